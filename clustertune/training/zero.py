"""TRL's trainer on DeepSpeed's engine: the guard and the checkpoint files are put in before anything is loaded or stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clustertune.errors import Problem, UserError
from clustertune.training import deepspeed, deepspeed_swap
from clustertune.training.deepspeed_files import Hashed
from clustertune.training.timed import TimedTrainer


class ZeroTrainer(TimedTrainer):
    """What DeepSpeed needs done otherwise; without DeepSpeed nothing is."""

    refuse_step: Callable[[float | None, bool], None]
    """Called on all ranks before each of DeepSpeed's optimizer steps; raises where one is not finite anywhere."""

    @property
    def engine(self) -> Any | None:
        """DeepSpeed's engine once the model has been wrapped, else None."""
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        return wrapped.engine if wrapped is not None else None

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The last thing that the Trainer does between making the engine and loading a checkpoint into it."""
        made = super().create_scheduler(*args, **kwargs)
        engine = self.engine
        if engine is not None and not isinstance(engine.checkpoint_engine, Hashed):
            engine.checkpoint_engine = Hashed(engine.optimizer)
            deepspeed_swap.follow(engine)
            deepspeed.guard(engine, self.refuse_step)
        return made

    def check_world_of(self, saved: int, now: int) -> None:
        """Raise UserError where a checkpoint of another number of ranks is to be loaded: ZeRO's parts do not fit."""
        if self.is_deepspeed_enabled and saved not in (0, now):
            text = f"the checkpoint is of {saved} ranks, this attempt has {now}: DeepSpeed cannot lay its parts out anew"
            fix = f"go on with {saved} ranks, or export it and start from that"
            raise UserError(Problem(text, fix=fix))


def local(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter: of a DTensor's, of ZeRO-3's, else the parameter."""
    if (part := deepspeed.local_part(parameter)) is not None:
        return part
    found: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found.detach()
