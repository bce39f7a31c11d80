"""``accelerate launch`` with two additions: ``python -m clustertune.launch.accelerate``.

Ranks do not import from the working folder: for DeepSpeed accelerate 1.15 puts the folder into the ranks' PYTHONPATH, ahead of
the standard library and of torch (utils/launch.py, prepare_deepspeed_cmd_env). And torch's elastic agent binds each rank to the
NUMA node of its GPU where the ranks take all GPUs that are seen here: accelerate has no option for torch's ``--numa-binding``.
"""

from __future__ import annotations

import os
import shutil

from accelerate.commands import launch
from accelerate.utils import launch as environment
from torch.distributed.launcher import api
from torch.numa.binding import AffinityMode, NumaOptions


def numa_options() -> NumaOptions | None:
    """What torch binds ranks with; None where its numactl is missing. A rank that cannot be bound trains unbound."""
    if shutil.which("numactl") is None:
        return None
    return NumaOptions(affinity_mode=AffinityMode.NODE, should_fall_back_if_binding_fails=True)


def main() -> None:
    """The command line of ``accelerate launch``."""
    environment.env_var_path_add = lambda name, _folder: os.environ.get(name, "")
    api.get_default_numa_options = numa_options
    launch.main()


if __name__ == "__main__":
    main()
