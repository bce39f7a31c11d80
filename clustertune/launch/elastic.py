"""torchrun with one addition: ``python -m clustertune.launch.elastic``, which takes torchrun's own command line.

torch binds each rank to the NUMA node of its GPU where the ranks take all GPUs that are seen here. Its option
``--numa-binding`` would end a rank that cannot be bound, in a container without the right to, say; this one trains unbound.
"""

from __future__ import annotations

import shutil

from torch.distributed import run
from torch.distributed.launcher import api
from torch.numa.binding import AffinityMode, NumaOptions


def numa_options() -> NumaOptions | None:
    """What torch binds ranks with; None where its numactl is missing."""
    if shutil.which("numactl") is None:
        return None
    return NumaOptions(affinity_mode=AffinityMode.NODE, should_fall_back_if_binding_fails=True)


def main() -> None:
    """The command line of ``torchrun``."""
    api.get_default_numa_options = numa_options
    run.main()


if __name__ == "__main__":
    main()
