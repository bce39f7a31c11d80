"""What accelerate's mesh asks of the trainer beyond FSDP: a model split over tp, sequences split over cp.

accelerate 1.15 makes the mesh, gives the ranks of one tp or cp group the same batch and shards over the rest. The two other
things that it does are replaced: ``_prepare_tp`` imports what transformers 5.23 no longer has, ``_prepare_cp`` knows CUDA only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from clustertune.training import context, tensor
from clustertune.training.evaluation import TokenMeanTrainer


def _as_they_are(*args: Any) -> tuple[Any, ...]:
    return args


class MeshTrainer(TokenMeanTrainer):
    """TRL's trainer on every axis of accelerate's mesh."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.split_modules: dict[str, int] = {}
        """Modules that are split over tp, by style."""
        sizes = self.accelerator.parallelism_config
        if sizes is None:
            return
        # On the instance: other trainings in the same process keep accelerate's own.
        self.accelerator._prepare_tp = self.accelerator._prepare_cp = _as_they_are
        mesh = self.accelerator.torch_device_mesh
        if sizes.tp_enabled:
            precise = self.accelerator.mixed_precision == "no"
            self.split_modules = tensor.split(self.model, mesh["tp"], upcast=not precise)
        if sizes.cp_enabled:
            context.install(self.model, mesh["cp"])

    @property
    def _context(self) -> tuple[int, int]:
        """This rank's place in its context-parallel group, and the group's size (1 without)."""
        sizes = self.accelerator.parallelism_config
        if sizes is None or not sizes.cp_enabled:
            return 0, 1
        return self.accelerator.torch_device_mesh["cp"].get_local_rank(), int(sizes.cp_size)

    def my_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        rank, size = self._context
        return inputs if size == 1 else context.share_of(inputs, rank, size, int(self.processing_class.pad_token_id))

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Replaces the Trainer's, which cuts with torch's CUDA-only context."""
        return contextlib.nullcontext, self.my_inputs(inputs)
