"""``python -m clustertune`` is the command itself; launchers start ranks this way."""

import sys

from clustertune.cli import main

sys.exit(main())
