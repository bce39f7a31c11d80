"""TRL's SFTTrainer with what it lacks: checkpoints through a store, a stop before a bad optimizer step, an agreed stop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import SFTTrainer

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.training.collectives import Group
from clustertune.training.stop import StopFlag


class Store(Protocol):
    """Where checkpoints go; implemented by the checkpoint room."""

    def begin(self, step: int) -> Path: ...

    def commit(self, path: Path, meta: Mapping[str, Any]) -> int: ...

    def prune(self) -> list[Path]: ...


class _EvalStopped(Exception):
    """All ranks agreed, at the same batch, to leave the evaluation."""


@contextmanager
def untouched_random_state() -> Any:
    """Leave the random state of Python, NumPy and torch as it was: an evaluation must not move the dropout of training.

    A DataLoader draws its base seed from torch's global generator each time it is iterated.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


class Trainer(SFTTrainer):  # type: ignore[misc]
    """One rank's trainer. ``store``, ``stop`` and ``on_checkpoint`` are set before ``train()``."""

    def __init__(
        self,
        *args: Any,
        store: Store,
        stop: StopFlag,
        on_checkpoint: Callable[[int, Path, int, Mapping[str, Any]], None],
        checkpoint_extra: Callable[[Path], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group = Group()
        self.store, self.stop = store, stop
        self.on_checkpoint, self.checkpoint_extra = on_checkpoint, checkpoint_extra
        self.stopping = False
        """All ranks agreed to stop after the current step."""
        self.eval_skipped = False
        """An evaluation that was due at the step of the stop was left out; the next attempt makes it up."""
        self.peak_memory_bytes = 0
        """Highest peak memory over ranks so far."""
        self._bad_loss: float | None = None

    # -- the guard before the optimizer step ---------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if self._bad_loss is None and not torch.isfinite(loss):
            self._bad_loss = float(loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The last thing that the Trainer does before the optimizer step: refuse a step that is not finite anywhere."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) if norm is not None else 0.0
        bad = [float(self._bad_loss is not None), float(not math.isfinite(value))]
        if any(self.group.maximum(bad)):
            self._raise_non_finite(
                f"loss {self._bad_loss}" if bad[0] else f"gradient norm {value}" if bad[1] else "finite here"
            )
        return norm

    def _raise_non_finite(self, here: str) -> None:
        by_rank = [f"rank {rank}: {what}" for rank, what in enumerate(self.group.gather(here)) if what != "finite here"]
        raise UserError(
            Problem(
                f"not finite at step {self.state.global_step + 1} ({'; '.join(by_rank)}); "
                f"stopped before the optimizer step, nothing of it was saved",
                fix="lower train.learning_rate, look at the data of that step, or check the base model's weights",
            ),
            ExitCode.STOP,
        )

    # -- the agreed stop ------------------------------------------------------------------------------------------

    def agree(self, memory_bytes: int = 0) -> bool:
        """At a step's end: do all ranks stop here? Also exchanges the peak memory, in the same collective."""
        wanted, memory = self.group.maximum([float(self.stop.is_set), float(memory_bytes)])
        self.peak_memory_bytes = max(self.peak_memory_bytes, int(memory))
        self.stopping = self.stopping or bool(wanted)
        return self.stopping

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.agree():
            raise _EvalStopped
        return super().prediction_step(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        guard: AbstractContextManager[None] = untouched_random_state()
        try:
            with guard:
                metrics: dict[str, float] = super().evaluate(*args, **kwargs)
                return metrics
        except _EvalStopped:
            self.eval_skipped = True
            self._metrics["eval"].clear()
            self.model.train()
            self.control.should_save = True
            self.control.should_training_stop = True
            return {}

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002
        """Replaces the Trainer's: a new folder of the store, no ``training_args.bin`` (a pickle that may hold a token)."""
        self._check_parameters()
        self.store_flos()
        step = self.state.global_step
        meta = {
            "step": step,
            "epoch": self.state.epoch,
            "tokens": self._total_train_tokens,
            "world_size": self.group.world_size,
            "final": step >= self.state.max_steps,
            "eval_skipped": self.eval_skipped,
        }
        failure: str | None = None
        folder: Path | None = None
        try:
            folder = self.store.begin(step)
            self._write_state(folder)
        except (OSError, RuntimeError, torch.distributed.checkpoint.CheckpointException) as error:
            failure = f"rank {self.group.rank}: {error}"
        failures = [f for f in self.group.gather(failure) if f]
        size = 0
        if not failures and folder is not None:
            try:
                size = self.store.commit(folder, meta)
            except OSError as error:
                failures = [str(error)]
        if failures or folder is None:
            raise UserError(
                Problem(
                    f"the checkpoint of step {step} was not saved: {failures[0].splitlines()[0]}",
                    file=str(folder or self.args.output_dir),
                    fix="free space or mend the storage, then run the same command again: it goes on from the last whole one",
                ),
                ExitCode.STORAGE,
            )
        self.on_checkpoint(step, folder, size, meta)
        self.store.prune()

    def _check_parameters(self) -> None:
        finite = all(bool(torch.isfinite(_local(p)).all()) for p in self.model.parameters() if p.requires_grad)
        if any(self.group.maximum([float(not finite)])):
            self._raise_non_finite("finite here" if finite else "trained parameters")

    def _write_state(self, folder: Path) -> None:
        self._save_optimizer_and_scheduler(str(folder))
        self._save_scaler(str(folder))
        self._save_rng_state(str(folder))
        if self.group.rank != 0:
            return
        if not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
            self.accelerator.unwrap_model(self.model).save_pretrained(folder)
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        self.checkpoint_extra(folder)

    def restore_counts(self, meta: Mapping[str, Any]) -> None:
        """What TRL does not restore: tokens seen so far."""
        self._total_train_tokens = int(meta.get("tokens", 0))


def _local(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()
