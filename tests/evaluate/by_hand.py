"""``lm_eval run``, with langdetect's seed for which its command line has no switch, in a process that has the stack already."""

from __future__ import annotations

import os

import langdetect
import nltk
from lm_eval.__main__ import cli_evaluate

langdetect.DetectorFactory.seed = 0
nltk.data.path.insert(0, os.environ["NLTK_DATA"])
cli_evaluate()
