"""Whether a gradient belongs to its loss: called in each rank (``breaks`` of :mod:`tests.training.forked`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LENGTH = 3e-3
"""Of the step along the gradient, over all trained parameters: the third derivative and float32 weigh 1e-4 each."""


def measure() -> None:
    """Have the first micro batch write ``derivative.json`` into the run folder.

    Norm of its gradient, and the loss's slope along it by central differences, each loss from the same random state: they
    are one number where backward drops what forward dropped. An adapter's B starts from zero, where dropout changes no loss,
    so that the parameters are moved first.
    """
    import torch
    import torch.distributed as dist

    from clustertune.training.trainer import Trainer, local

    step = Trainer.training_step

    def measured(self: Any, model: Any, inputs: Any, *more: Any) -> Any:
        Trainer.training_step = step  # type: ignore[method-assign]
        trained = [p for p in model.parameters() if p.requires_grad]
        own, state = torch.Generator().manual_seed(1), torch.get_rng_state()

        def move(by: list[Any], length: float) -> None:
            with torch.no_grad():
                for parameter, other in zip(trained, by, strict=True):
                    local(parameter).add_(other, alpha=length)

        def loss() -> float:
            torch.set_rng_state(state)
            value = step(self, model, dict(inputs), *more).double()
            dist.all_reduce(value)
            return float(value) / dist.get_world_size()

        move([torch.randn(local(p).shape, generator=own) for p in trained], 0.02)
        first = loss()
        gradients = [local(p.grad).clone() for p in trained]
        squares = torch.stack([part.double().square().sum() for part in gradients]).sum()
        if hasattr(trained[0], "to_local"):
            dist.all_reduce(squares)
        norm = float(squares) ** 0.5
        move(gradients, LENGTH / norm)
        ahead = loss()
        move(gradients, -2 * LENGTH / norm)
        found = {"loss": first, "norm": norm, "slope": (ahead - loss()) / (2 * LENGTH)}
        if dist.get_rank() == 0:
            Path(self.args.output_dir, "derivative.json").write_text(json.dumps(found))
        os._exit(0)

    Trainer.training_step = measured  # type: ignore[method-assign]


def measure_without_random_state() -> None:
    """As :func:`measure`, with the wrapped layers as accelerate leaves them."""
    from clustertune.training import recompute

    recompute._draw_the_same_again = lambda model: None
    measure()
