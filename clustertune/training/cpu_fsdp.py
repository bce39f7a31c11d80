"""Let accelerate's FSDP run on CPU and gloo, so that the sharded path is the same program without a GPU.

accelerate 1.15 (``state.py``, ``AcceleratorState.__init__``) turns only MULTI_GPU, MULTI_XPU and their like into
``DistributedType.FSDP``. MULTI_CPU is not in that list, so a requested FSDP plugin is dropped without a message and the run is
plain data parallelism. All of FSDP behind it is device-neutral: this does for MULTI_CPU what the GPU branch does.
"""

from __future__ import annotations

import os
from typing import Any


def set_environment() -> None:
    """Set what accelerate reads on a machine without GPUs; to be called before accelerate is imported."""
    os.environ["ACCELERATE_USE_CPU"] = "true"  # `accelerate launch` does not set it for distributed_type FSDP


def install() -> None:
    """Wrap ``AcceleratorState.__init__`` once. Without effect where the distributed type is not MULTI_CPU."""
    from accelerate import state
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    original = state.AcceleratorState.__init__
    if getattr(original, "runs_fsdp_on_cpu", False):
        return

    def init(
        self: Any, mixed_precision: str | None = None, cpu: bool = False, *args: Any, fsdp_plugin: Any = None, **kwargs: Any
    ) -> None:
        fresh = not state.AcceleratorState._shared_state
        original(self, mixed_precision, cpu, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fresh and fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
                # Pinned memory is an accelerator's; without one torch refuses to make it.
                fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    init.runs_fsdp_on_cpu = True  # type: ignore[attr-defined]
    state.AcceleratorState.__init__ = init
