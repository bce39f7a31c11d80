"""``python -m clustertune`` is the command itself; launchers start ranks this way."""

import sys

from clustertune.cli.app import main

sys.exit(main())
