"""The trainer's start-up by part, and its weights by :mod:`clustertune.training.loading`."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from clustertune.training.loading import Loading
from clustertune.training.mesh import MeshTrainer


class TimedTrainer(MeshTrainer):
    """TRL's trainer that fills a model which was made without weights, and counts where the time goes until it trains."""

    def __init__(self, *args: Any, loading: Loading, **kwargs: Any) -> None:
        self.loading, self.startup = loading, loading.startup
        super().__init__(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with self.startup.part("sharding"):
            self.loading.upcast(self.model, self.accelerator.mixed_precision)
            prepared = super()._prepare_for_training(*args, **kwargs)
            self.loading.remove()
            return prepared

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As TRL's; then the last group of layers, which FSDP2 leaves gathered for a backward pass, is parted again.

        Else a save that follows meets whole parameters: the digest of a rank's part is that of the whole, and torch cannot
        free what the digest looked at.
        """
        try:
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            return metrics
        finally:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.startup.part("resume"):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self.startup.part("resume"):
            super()._load_optimizer_and_scheduler(*args, **kwargs)
