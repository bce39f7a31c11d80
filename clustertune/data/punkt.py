"""NLTK's English sentence splitter, shipped in ``nltk_data/``: the official parameters, so that scores are the official ones.

lm-eval downloads ``punkt_tab`` when its scorer is imported; without a network it continues and fails after the last prompt
(EleutherAI/lm-evaluation-harness#2266). Here the data is there before the import.
"""

from __future__ import annotations

from pathlib import Path

NLTK_DATA = Path(__file__).with_name("nltk_data")
"""Its NOTICE says where the parameters are from."""


def use_shipped() -> None:
    """Make NLTK find the shipped parameters before any others, in this process and those that it forks."""
    import nltk

    if str(NLTK_DATA) not in nltk.data.path[:1]:
        nltk.data.path.insert(0, str(NLTK_DATA))
