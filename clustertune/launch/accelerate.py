"""``accelerate launch`` whose ranks do not import from the working folder: ``python -m clustertune.launch.accelerate``.

For DeepSpeed accelerate 1.15 puts the folder into the ranks' PYTHONPATH, ahead of the standard library and of torch
(utils/launch.py, prepare_deepspeed_cmd_env). Everything else is accelerate's own.
"""

from __future__ import annotations

import os

from accelerate.commands import launch
from accelerate.utils import launch as environment


def main() -> None:
    """The command line of ``accelerate launch``."""
    environment.env_var_path_add = lambda name, _folder: os.environ.get(name, "")
    launch.main()


if __name__ == "__main__":
    main()
