"""TRL's trainers with what they lack: checkpoints through a store, a stop before a bad optimizer step, an agreed stop."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import accelerator
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper  # the package leaves it out where DeepSpeed is not installed
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from transformers import set_seed
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import DPOTrainer, SFTTrainer
from trl.trainer import dpo_trainer

from clustertune.checkpoint import shards
from clustertune.checkpoint.saving import (
    MODEL,
    NotFinite,
    NotSaved,
    RankState,
    StateWriter,
    WrittenCheckpoint,
    describe_error,
    digest,
    load_model,
    load_optimizer,
    sharded_states,
)
from clustertune.checkpoint.store import Cadence, CheckpointStore
from clustertune.errors import ExitCode, Problem, UserError, free_bytes, is_full, storage_cause
from clustertune.manifest import FileRecord, read_whole
from clustertune.replaced import replaced
from clustertune.training import deepspeed_engine, parallelism
from clustertune.training.collectives import Group
from clustertune.training.event_log import Attempt
from clustertune.training.figures import COLUMNS, Base, Clock, Figures, PairMeans, TokenMeans, peak_memory_bytes
from clustertune.training.loading import Loading

ALARM_STEPS = 5
"""Optimizer steps in a row that teach nothing, after which a run raises the alarm."""
IDLE_STEPS = 20
"""The same, after which it ends. With GRPO it is that many generations, of which no prompt had answers with different rewards:
with 16 prompts a batch 320 in a row. The learning rate does not matter: a gradient in warm-up is not 0."""


def local(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter: of a DTensor's, of ZeRO-3's, else the parameter."""
    if (part := deepspeed_engine.local_part(parameter)) is not None:
        return part
    tensor: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return tensor.detach()


@dataclass
class Saving:
    """A save: under way, then whole on disk."""

    step: int
    final: bool
    future: Future[WrittenCheckpoint]
    behind: bool
    """Training continues meanwhile."""
    began: float
    """By time.perf_counter."""
    stall_seconds: float
    """Training stood still for it so far."""
    path: Path = Path()
    written: WrittenCheckpoint | None = None
    """What the threads of all ranks made of it."""
    seconds: float = 0.0
    """From its begin until it was whole."""
    every_seconds: float | None = None
    """From here on between two saves, where they come by time."""


class _EvalStopped(Exception):
    """All ranks agreed, at the same batch, to leave the evaluation."""


class NothingLeft(Exception):
    """There is no step to take: asked to stop before the first one, or the checkpoint was the last step's."""


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """Leave the random state of Python, NumPy and torch as it was: an evaluation must not move the dropout of training.

    A DataLoader draws its base seed from torch's global generator each time it is iterated.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        # Without devices torch warns on a machine of several GPUs, of which this rank uses one.
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class RankTrainer(Base):  # type: ignore[misc]
    """What a rank's trainers share: TRL's trainer on every axis of accelerate's mesh, and under DeepSpeed.

    ``fence`` raises UserError where another attempt has taken over; rank 0 asks each step.

    accelerate 1.15 makes the mesh, gives the ranks of one tp or cp group the same batch and shards over the rest. The two
    other things that it does are replaced: ``_prepare_tp`` imports what transformers 5.23 no longer has, ``_prepare_cp`` knows
    CUDA only.
    """

    apart: Group | None = None
    """The ranks on the group of the saving thread, where it was made before."""
    _writer: StateWriter | None = None
    _saving: Saving | None = None
    """The save that is being written; its checkpoint does not exist yet."""
    saves = True
    """A benchmark's ranks do not."""
    _waits_for_saves = False
    """A copy of the state does not fit into host memory."""
    _saved_step = -1
    """Of this attempt's newest save."""
    _has_room = False
    """It does, on all ranks."""

    def __init__(
        self,
        *args: Any,
        loading: Loading,
        store: CheckpointStore,
        attempt: Attempt,
        on_checkpoint: Callable[[Saving], None],
        **kwargs: Any,
    ) -> None:
        self.loading, self.startup = loading, loading.startup
        super().__init__(*args, **kwargs)
        self._split()
        self.group = Group()
        self.store, self.resolved, self.stop = store, attempt.resolved, attempt.stop
        self.heartbeat, self.fence = attempt.heartbeat, attempt.fence
        self.on_checkpoint = on_checkpoint
        self.stopping = False
        """All ranks agreed to stop after the current step."""
        self.eval_skipped = False
        """An evaluation that was due at the step of the stop was left out; the next attempt makes it up."""
        self.start_step = 0
        """The step that this attempt resumes from."""
        self.peak_memory_bytes = 0
        """Highest peak memory over ranks so far."""
        self.on_inputs: Callable[[Mapping[str, Any]], None] | None = None
        """Gets the inputs of every micro batch of training; a simulation begins a new one."""
        self.clock = Clock()
        self.figures: Figures | None = None
        """Of all ranks, on rank 0."""
        self.describe_steps: Callable[[], dict[str, Any]] | None = None
        self.cadence: Cadence | None = None
        """Says when to save where the recipe has a section for it; rank 0 asks it."""
        self.save_due = False
        """All ranks save behind this step."""
        self.is_score_due: Callable[[int], bool] = lambda _: False
        """Whether the ranks save behind a step, so that its checkpoint is scored (``eval.during``)."""
        self.ends_for_scores = True
        """The ranks end then, and their GPUs answer."""
        self._measured: list[list[float]] = []
        """This rank's figures of each step since the last log line."""
        self._losses: list[torch.Tensor] = []
        """Of the micro batches of this step, on the device: to look at each would wait for its backward pass."""
        self._resumed: Mapping[str, Any] = {}
        self.on_alarm: Callable[[int, str], None] = lambda *_: None
        """Gets a step and what is wrong: training goes on."""
        self._idle = 0
        """Optimizer steps in a row that taught nothing."""

    # -- the mesh and the engine ----------------------------------------------------------------------------------

    def _split(self) -> None:
        """Split the model over tp, and have it attend over the ranks of cp."""
        if (sizes := self.accelerator.parallelism_config) is None:
            return
        # On the instance: other trainings in the same process keep accelerate's own.
        self.accelerator._prepare_tp = self.accelerator._prepare_cp = lambda *args: args
        mesh = self.accelerator.torch_device_mesh
        if sizes.tp_enabled:
            parallelism.split(self.model, mesh["tp"], upcast=self.accelerator.mixed_precision != "no")
        if sizes.cp_enabled:
            parallelism.install_context(self.model, mesh["cp"])

    def my_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of each sequence where its group shares them."""
        sizes = self.accelerator.parallelism_config
        if sizes is None or not sizes.cp_enabled or sizes.cp_size == 1:
            return inputs
        rank = self.accelerator.torch_device_mesh["cp"].get_local_rank()
        return parallelism.share_of(inputs, rank, int(sizes.cp_size), int(self.processing_class.pad_token_id))

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Replaces the Trainer's, which cuts with torch's CUDA-only context."""
        return contextlib.nullcontext, self.my_inputs(inputs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with self.startup.part("sharding"):
            self.loading.upcast(self.model, self.accelerator.mixed_precision)
            prepared = super()._prepare_for_training(*args, **kwargs)
            self.loading.remove()
            return prepared

    @property
    def engine(self) -> Any | None:
        """DeepSpeed's engine once the model has been wrapped, else None."""
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        return wrapped.engine if wrapped is not None else None

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The last thing that the Trainer does between making the engine and loading a checkpoint into it."""
        made = super().create_scheduler(*args, **kwargs)
        if (engine := self.engine) is not None:
            deepspeed_engine.take_over(engine, self.refuse_step)
        return made

    # -- what is measured ------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the wait for each batch is this rank's own, what it then counts over all ranks is not."""
        return super().get_batch_samples(self.clock.batches(epoch_iterator), *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As TRL's, with the figures of the steps since the last line: for ``metrics.jsonl`` and every tracker."""
        if "loss" in logs:
            self._gather_figures()
            logs |= self.describe_steps() if self.describe_steps is not None else {}
        super().log(logs, *args, **kwargs)

    # -- the guard before the optimizer step ---------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.heartbeat("train", self.state.global_step)
        if self.on_inputs is not None:
            self.on_inputs(args[1])
        self.clock.count(args[1])
        with self.clock.part("forward_backward"):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._losses.append(loss.detach().reshape(()))
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The last thing that the Trainer does before the optimizer step: refuse a step that is not finite anywhere."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        losses, self._losses = self._losses, []
        device = losses[0].device if losses else None
        losses.append(torch.as_tensor(0.0 if full is None else full, device=device).detach().reshape(()))
        # The host waits for the GPU here, once a step.
        *values, value = torch.stack([one.double() for one in losses]).cpu().tolist()
        bad = next((loss for loss in values if not math.isfinite(loss)), None)
        self.refuse_step(bad, math.isfinite(value), f"gradient norm {value}")
        if (taught := self.has_taught(value)) is not None:
            self._count_idle(taught=taught)
        return norm

    def has_taught(self, norm: float) -> bool | None:
        """Whether a step with this gradient norm over all ranks changes the model; None where it is not to be counted."""
        return norm != 0

    def why_idle(self) -> tuple[str, str]:
        """Why steps teach nothing, and what to do."""
        fix = "look at the rows: what has labels within train.max_length; and at what is trained: lora.target_modules"
        return "the gradient of every trained parameter is 0", fix

    def _count_idle(self, *, taught: bool) -> None:
        """Raise the alarm, then UserError (exit 93) on all ranks alike, where steps in a row teach nothing.

        The gradient norm is that of all ranks, and so are GRPO's figures: all count the same.
        """
        self._idle = 0 if taught else self._idle + 1
        step = int(self.state.global_step) + 1
        at_end = step >= self.state.max_steps and self._idle == step and step < ALARM_STEPS
        if taught or (self._idle not in (ALARM_STEPS, IDLE_STEPS) and not at_end):
            return
        what, fix = self.why_idle()
        text = f"{self._idle} steps up to step {step} taught nothing: {what}"
        if self._idle == IDLE_STEPS:
            self.finish_save()  # of a step before: it is good
            raise UserError(Problem(f"no progress: {text}", fix=fix), ExitCode.STOP)
        if self.group.rank == 0:
            self.on_alarm(step, f"{text}; {fix}")

    def refuse_step(self, loss: float | None, finite: bool, what: str = "gradients") -> None:
        """Raise UserError on all ranks where one has a ``loss`` that is not finite, or gradients. DeepSpeed steps before the
        Trainer sees a gradient norm: its engine asks here.
        """
        if any(self.group.maximum([float(loss is not None), float(not finite)])):
            self._raise_non_finite(f"loss {loss}" if loss is not None else "finite here" if finite else what)

    def _raise_non_finite(self, own: str, fix: str | None = None) -> None:
        self.finish_save()  # of a step before: it is good
        by_rank = [f"rank {rank}: {what}" for rank, what in enumerate(self.group.gather(own)) if what != "finite here"]
        step = min(self.state.global_step + 1, self.state.max_steps)
        raise self._non_finite(step, by_rank, "stopped before the optimizer step, ", fix)

    def _non_finite(self, step: int, by_rank: Sequence[str], when: str = "", fix: str | None = None) -> UserError:
        text = f"not finite at step {step} ({'; '.join(by_rank)}); {when}nothing of it was saved"
        fix = fix or "lower train.learning_rate, look at the data of that step, or check the base model's weights"
        return UserError(Problem(text, fix=fix), ExitCode.STOP)

    # -- the agreed stop ------------------------------------------------------------------------------------------

    def agree(self, *, at_step_end: bool = False) -> bool:
        """Do all ranks stop here? One small collective, at each step's end and each batch of an evaluation.

        A save that all ranks have written by then becomes a checkpoint; at a step's end rank 0 says whether one is due.
        Raises UserError (exit 75), on all ranks alike, where another attempt has taken over.
        """
        superseded = self._superseded()
        is_writing = self._saving is not None and not self._saving.future.done()
        due = at_step_end and self.group.rank == 0 and self._is_save_due()
        flags = (self.stop.is_set, superseded is not None, is_writing, due)
        stop, taken, is_writing, due = map(bool, self.group.maximum([float(flag) for flag in flags]))
        if taken:
            raise superseded or UserError(Problem("a newer attempt of this run is active; stopping this one"), ExitCode.AGAIN)
        step = int(self.state.global_step)
        scored = at_step_end and step < self.state.max_steps and self.is_score_due(step)
        self.stopping, self.save_due = self.stopping or stop or (scored and self.ends_for_scores), due or scored
        if self._saving is not None and not is_writing:
            self._commit()
        return self.stopping

    def _superseded(self) -> UserError | None:
        """What the fence says. Rank 0 alone asks: file systems answer nodes at different times."""
        if self.group.rank == 0:
            try:
                self.fence()
            except UserError as error:
                return error
        return None

    def end_step(self) -> bool:
        """Keep what this rank measured of a step for the next log line, and :meth:`agree`."""
        self._measured.append(self.clock.take())
        return self.agree(at_step_end=True)

    def _gather_figures(self) -> None:
        """At a log line, all ranks together: their peak memory, and their figures of each step since the line before."""
        measured, self._measured = self._measured, []
        ranks = self.group.gather_numbers([float(peak_memory_bytes()), *(value for row in measured for value in row)])
        self.peak_memory_bytes = max(self.peak_memory_bytes, *(int(memory) for memory, *_ in ranks))
        if self.figures is None:
            return
        for at in range(1, len(COLUMNS) * len(measured), len(COLUMNS)):
            self.figures.add([values[at : at + len(COLUMNS)] for values in ranks])

    def _is_save_due(self) -> bool:
        """The recipe's section asks for a save behind this step."""
        if self.cadence is None:
            return False
        if not self.cadence.state_bytes:
            self.cadence.state_bytes = float(sum(part.nbytes for part in state_parts(self.model, self.optimizer)))
        return self.cadence.is_due(int(self.state.global_step), busy=self._saving is not None)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.heartbeat("eval", self.state.global_step)
        if self.agree():
            raise _EvalStopped
        return super().prediction_step(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Raises NothingLeft where no step is to follow an evaluation ahead of the first step of this attempt."""
        metrics: dict[str, float] = {}
        try:
            with untouched_random_state():
                metrics = super().evaluate(*args, **kwargs)
        except _EvalStopped:
            self.eval_skipped = True
            self._metrics["eval"].clear()
            self.model.train()
            # Else the Trainer evaluates, and saves this step, once more at the end of the epoch.
            self.control.should_evaluate = False
            self.control.should_save = True
            self.control.should_training_stop = True
        finally:
            # FSDP2 leaves the last group of layers gathered for a backward pass. A save that follows would meet whole
            # parameters: the digest of a rank's part is that of the whole, and torch cannot free what it looked at.
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        loss = metrics.get("eval_loss", 0.0)
        if any(self.group.maximum([float(not math.isfinite(loss))])):
            fix = (
                "look at the eval split (a conversation without a labelled token within train.max_length?), at the base "
                "model's weights, or lower train.learning_rate"
            )
            self._raise_non_finite("finite here" if math.isfinite(loss) else f"eval loss {loss}", fix)
        if self.state.global_step == self.start_step and (self.stopping or self.is_at_end):
            raise NothingLeft  # the Trainer would take one step more before it looks whether it should stop
        return metrics

    @property
    def is_at_end(self) -> bool:
        """All steps have been taken."""
        return 0 < int(self.state.max_steps) <= int(self.state.global_step)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002
        """Replaces the Trainer's: a new folder of the store, written behind the next steps where there are any.

        No ``training_args.bin`` (a pickle that may hold a token).
        """
        if not self.saves:
            return
        self.finish_save()  # one at a time
        began = time.perf_counter()
        step = self.state.global_step
        if step == self._saved_step:  # behind the step already, now at its epoch's end
            return
        self.heartbeat("save", step)
        self.store_flos()
        meta = {
            "step": step,
            "epoch": self.state.epoch,
            "tokens": self._total_train_tokens,
            "world_size": self.group.world_size,
            "mesh": self._mesh,
            # Without its evaluation the last step is not the end: the next attempt makes it up, and saves once more.
            "final": step >= self.state.max_steps and not self.eval_skipped,
            "eval_skipped": self.eval_skipped,
        }
        try:
            # DeepSpeed writes by itself, now and into the folder.
            folder = self.store.begin(step) if self.is_deepspeed_enabled else None
            state = self._collect(folder)
        except Exception as error:
            # A lost peer fails a save too: only what the storage did is the storage's.
            if not (isinstance(error, OSError) or storage_cause(error) or is_full(self.store.path(step))):
                raise
            # This rank leaves alone, and the others fail at the next thing they do together: a collective here, to agree
            # on the failure, would meet another one of a rank that is still inside the save, and both would wait.
            raise self._not_saved(step, f"rank {self.group.rank}: {describe_error(error)}") from error
        self._saving, self._saved_step = self._start(folder, meta, state, began), step
        if self.stopping or self.is_at_end or not self._saving.behind:
            self.finish_save()
        self.heartbeat("train", step)

    @property
    def writer(self) -> StateWriter:
        """What writes behind training. All ranks ask for it together, the first time."""
        if self._writer is None:
            ranks = self.apart or Group.apart()
            self._writer = StateWriter(self.store.on(ranks), ranks, ranks.process_group)
        return self._writer

    def _start(self, folder: Path | None, meta: Mapping[str, Any], state: RankState, began: float) -> Saving:
        """Have the state written, from a copy where training continues."""
        writer = self.writer
        if self.cadence is not None:
            self.cadence.began()
        behind = not (self.stopping or self.is_at_end)
        if behind and self.is_deepspeed_enabled:
            state.digest, state.trained = digest(state.parts), 0  # it is on disk, and changes in the next step
        elif behind and not self._has_room:  # a copy that is there is used again: no rank asks for more
            copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.is_fsdp_enabled else 1
            reasons = self.group.gather(writer.room_for(sum(part.nbytes for part in state.parts), copies))
            reason = next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), None)
            self._has_room = behind = reason is None
            if reason and not self._waits_for_saves:
                self._waits_for_saves = True
                self.store.tell(f"note: training waits for each save: {reason}")
        copied = behind and not self.is_deepspeed_enabled
        future = writer.start(int(meta["step"]), state, meta, folder, copied=copied)
        if copied and self._changes_between_steps:
            writer.wait_for_copy()
        stall = time.perf_counter() - began
        return Saving(int(meta["step"]), bool(meta["final"]), future, behind, began, stall)

    @property
    def _changes_between_steps(self) -> bool:
        """The optimizer changes weights outside of its step: schedule-free ones on ``train()``, others in the backward pass."""
        name = str(getattr(self.args.optim, "value", self.args.optim))
        return hasattr(self.optimizer.optimizer, "train") or name.endswith(("lomo", "layerwise"))

    def wait_for_copy(self) -> float:
        """Before each optimizer step: what is being copied must not change. Returns the seconds that training stood still."""
        if self._saving is None or not self.writer.is_copying:
            return 0.0
        began = time.perf_counter()
        self.heartbeat("save", self._saving.step)
        self.writer.wait_for_copy()
        self.heartbeat("train", self.state.global_step)
        seconds = time.perf_counter() - began
        self._saving.stall_seconds += seconds
        return seconds

    def finish_save(self) -> None:
        """Wait until the save under way is whole on disk; returns at once where there is none. All ranks call this together.

        Raises UserError on all ranks alike where one could not write.
        """
        if self._saving is None:
            return
        began = time.perf_counter()
        self.heartbeat("save", self._saving.step)
        while any(self.group.maximum([float(not self._saving.future.done())])):  # no rank waits in a collective for long
            wait([self._saving.future], timeout=1.0)
        self._saving.stall_seconds += time.perf_counter() - began
        self._commit()

    def _commit(self) -> None:
        """All ranks' threads are done: tell what they made."""
        assert self._saving is not None
        saving, self._saving = self._saving, None
        step = saving.step
        try:
            saving.written = saving.future.result()
        except NotFinite as error:
            raise self._non_finite(step, [f"rank {rank}: trained parameters" for rank in error.ranks]) from None
        except (NotSaved, OSError) as error:
            what, stored = (str(error), error.stored) if isinstance(error, NotSaved) else (describe_error(error), True)
            raise self._not_saved(step, what, stored=stored) from error
        if saving.written.waited and self.group.rank == 0:
            self.store.tell(f"note: training waited for the save of step {step}: {saving.written.waited}")
        if self.cadence is not None:
            self.cadence.measured(saving.stall_seconds, saving.written.seconds)
            saving.every_seconds = self.cadence.seconds()
        saving.path, saving.seconds = self.store.path(step), time.perf_counter() - saving.began
        self.on_checkpoint(saving)
        self.heartbeat("train", self.state.global_step)

    def _not_saved(self, step: int, what: str, *, stored: bool = True) -> UserError:
        folder = self.store.path(step)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        need = 3 * sum(
            deepspeed_engine.elements(p) * p.element_size() for p in trained
        )  # the parameters and AdamW's two moments
        free = free_bytes(folder)
        room = f" ({free / 1e6:.1f} MB free, it needs about {need / 1e6:.1f} MB)" if free is not None else ""
        fix = "run the same command again: it resumes from the last whole one"
        fix = f"free space or fix the storage, then {fix}" if stored else fix
        problem = Problem(f"the checkpoint of step {step} was not saved: {what}{room}", file=str(folder), fix=fix)
        return UserError(problem, ExitCode.STORAGE if stored else ExitCode.FAILED)

    def _collect(self, folder: Path | None) -> RankState:
        """What this rank puts into a checkpoint. DeepSpeed writes its own part into ``folder``; small files are bytes here."""
        parts = state_parts(self.model, self.optimizer)
        state = RankState({}, parts, sum(p.requires_grad for p in self.model.parameters()))
        with tempfile.TemporaryDirectory() as made:
            aside = folder or Path(made)
            if self.is_fsdp_enabled:
                state.states = sharded_states(self.model, self.optimizer)
                self._check_states(state.states, aside)
                if self.group.rank == 0:
                    self._save_scheduler(aside)
            elif self.is_deepspeed_enabled:
                self._save_optimizer_and_scheduler(str(aside))
            elif self.group.rank == 0:  # every rank has the same
                self._save_scheduler(aside)
                state.states, state.alone = self._plain_state()
            else:
                state.parts, state.trained = [], 0
            self._save_scaler(str(aside))
            self._save_rng_state(str(aside))
            if self.group.rank == 0:
                for callback in [*self.callback_handler.callbacks, self.control]:
                    if isinstance(callback, ExportableState):
                        self.state.stateful_callbacks[type(callback).__name__] = callback.state()
                self.state.save_to_json(str(aside / TRAINER_STATE_NAME))
                # So that it can be exported without its run folder.
                (aside / "recipe.json").write_text(json.dumps(self.resolved.as_dict(), indent=1) + "\n")
            if folder is None:
                files = (path for path in aside.rglob("*") if path.is_file())
                state.small = {path.relative_to(aside).as_posix(): read_whole(path) for path in files}
        return state

    def _plain_state(self) -> tuple[Mapping[str, Any], Callable[[Path, Mapping[str, Any]], Mapping[str, FileRecord]]]:
        """What changes in training of a model that is not sharded, and what writes it with what does not."""
        model = self.accelerator.unwrap_model(self.model)
        state, is_adapter = model.state_dict(), isinstance(model, PeftModel)
        trains = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
        moving = {name: value for name, value in state.items() if trains.get(name, not is_adapter)}

        def write(folder: Path, states: Mapping[str, Any]) -> Mapping[str, FileRecord]:
            model.save_pretrained(folder, state_dict={**state, **states["model"]})
            return shards.save_small(folder, shards.OPTIMIZER, states["optimizer"])

        return {"model": moving, "optimizer": self.optimizer.state_dict()}, write

    def _check_states(self, states: Mapping[str, Any], folder: Path) -> None:
        """Refuse a save without all trained parameters. Raises UserError on all ranks alike.

        PEFT 0.21.2 looks for the adapter by the names of modules. Activation checkpointing wraps them, and FSDP's state has the
        names without the wrapper: nothing is found, and an empty state is saved without an error.
        """
        trained = sum(p.requires_grad for p in self.model.parameters())
        stored = len(states[MODEL]["model"])
        if stored < trained:
            text = f"{stored} of {trained} trained parameters were to be saved"
            fix = "use the version of PEFT that containers/versions.env names (clustertune doctor lists differences)"
            raise UserError(Problem(text, file=str(folder), fix=fix))

    # -- resume ---------------------------------------------------------------------------------------------------

    def resume_with(self, meta: Mapping[str, Any]) -> None:
        """Take what TRL does not restore (tokens seen), and what the restored state must be equal to."""
        saved, now = int(meta.get("world_size", 0)), self.group.world_size
        if self.is_deepspeed_enabled and saved not in (0, now):
            text = f"the checkpoint is of {saved} ranks, this attempt has {now}: DeepSpeed cannot lay its parts out again"
            raise UserError(Problem(text, fix=f"continue with {saved} ranks, or export it and start from that"))
        self.start_step = int(meta.get("step", 0))
        self._total_train_tokens = int(meta.get("tokens", 0))
        self._resumed = meta

    @property
    def _mesh(self) -> dict[str, int]:
        """The device mesh of a sharded model, size by dimension; empty where there is none."""
        mesh = next((p.device_mesh for p in self.model.parameters() if hasattr(p, "device_mesh")), None)
        return dict(zip(mesh.mesh_dim_names or ("dp_shard",), mesh.shape, strict=True)) if mesh is not None else {}

    @property
    def _is_reshaped(self) -> bool:
        """The checkpoint that this attempt resumes from is of another number of ranks, or of another mesh."""
        world, mesh = self.group.world_size, self._mesh
        return (self._resumed.get("world_size", world), self._resumed.get("mesh", mesh)) != (world, mesh)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.group.rank == 0 and self._has_own_scheduler:
            Path(output_dir, SCHEDULER_NAME).unlink(missing_ok=True)  # the Trainer's, a pickle
            self._save_scheduler(Path(output_dir))

    @property
    def _has_own_scheduler(self) -> bool:
        """The schedule is not DeepSpeed's, which saves it with the rest of its state."""
        return not self.is_deepspeed_enabled or not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper)

    def _save_scheduler(self, folder: Path) -> None:
        shards.put_small(folder, shards.SCHEDULER, self.lr_scheduler.state_dict())

    def _save_scaler(self, output_dir: str) -> None:
        """Replaces the Trainer's, which writes a pickle."""
        if self.accelerator.scaler is not None and self.group.rank == 0:
            shards.put_small(Path(output_dir), shards.SCALER, self.accelerator.scaler.state_dict())

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = self.accelerator.scaler
        if checkpoint and scaler is not None and (stored := self._stored(checkpoint, shards.SCALER)) is not None:
            scaler.load_state_dict(stored)

    def _save_rng_state(self, output_dir: str) -> None:
        """Replaces the Trainer's, which writes a pickle."""
        states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        states |= self.own_state()
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()  # of its own device: all others are other ranks'
        shards.put_small(Path(output_dir), shards.random_of(self.group.rank, self.group.world_size), states)

    def own_state(self) -> dict[str, Any]:
        """What else of this rank goes on where a run was left: tensors, numbers and text, nested."""
        return {}

    def take_own_state(self, states: Mapping[str, Any]) -> None:
        """Take what :meth:`own_state` gave when the checkpoint was written."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self.startup.part("resume"):
            if self.is_fsdp_enabled:
                load_model(self.model, Path(resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._is_reshaped:
            # The states of other ranks: each draws from a seed of its own, as at the start of a run.
            set_seed((self.args.seed + self.start_step * self.group.world_size + self.group.rank) % 2**32)
            return
        states = self._stored(checkpoint, shards.random_of(self.group.rank, self.group.world_size))
        if states is None:  # of an export: each rank resumes from the seed
            return
        self.take_own_state(states)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["cpu"])
        if torch.cuda.is_available() and "cuda" in states:  # a run that began on CPUs has none
            torch.cuda.set_rng_state(states["cuda"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The last part of a load; then prove the whole: one that matches no key leaves the start values, without a message."""
        if checkpoint is None:
            return
        if self.is_fsdp_enabled:
            load_optimizer(self.model, self.optimizer, Path(checkpoint))
        elif not self.is_deepspeed_enabled:
            self.optimizer.load_state_dict(self._stored(checkpoint, shards.OPTIMIZER, needed=True))
        if self._has_own_scheduler:
            self.lr_scheduler.load_state_dict(self._stored(checkpoint, shards.SCHEDULER, needed=True))
        same = self._holds_other_ranks(Path(checkpoint)) if self._is_reshaped else self._holds_what_it_held()
        if wrong := [str(rank) for rank, ok in enumerate(self.group.gather(same)) if not ok]:
            text = f"parameters or optimizer state of rank {', '.join(wrong)} after loading are not those that were saved"
            fix = "resume with the versions that wrote it (run.json names them)"
            raise UserError(Problem(text, file=checkpoint, fix=fix), ExitCode.FAILED)

    @staticmethod
    def _stored(checkpoint: str, name: str, *, needed: bool = False) -> Any:
        """A small state; None where there is none. Raises UserError where it is ``needed``, and for more than values."""
        stored = shards.load_small(Path(checkpoint), name)
        if stored is None and needed:
            fix = "resume from another checkpoint, or train again"
            raise UserError(Problem(f"the {name}'s state is missing", file=checkpoint, fix=fix))
        return stored

    def _holds_what_it_held(self) -> bool:
        """Whether the restored state is this rank's of the save, by its digest."""
        digests = self._resumed.get("state_digests") or []
        if len(digests) not in (1, self.group.world_size):
            return True
        expected = digests[self.group.rank % len(digests)]  # one where every rank has the same
        return bool(expected == digest(state_parts(self.model, self.optimizer)))

    def _holds_other_ranks(self, checkpoint: Path) -> bool:
        """Whether the restored state is what other ranks saved: this rank's part of it, read once more and compared."""
        if not self.is_fsdp_enabled:  # every rank has the same, as at the save
            parts = digest(state_parts(self.model, self.optimizer))
            return parts in (self._resumed.get("state_digests") or [parts])
        return self.writer.equals(checkpoint, sharded_states(self.model, self.optimizer))


class Trainer(RankTrainer, TokenMeans, SFTTrainer):  # type: ignore[misc]
    """One rank's trainer of conversations and text."""


class ReferenceTrainer(RankTrainer):
    """What trainers share that hold the model against itself before training: the base under an adapter, or a second one."""

    ref_model: Any

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_fsdp_enabled and self.ref_model is not None:
            with self.startup.part("sharding"):
                frozen = self.ref_model.requires_grad_(requires_grad=False).eval()
                self.ref_model = accelerator.fsdp2_prepare_model(self.accelerator, frozen)
        return super()._prepare_for_training(*args, **kwargs)


class PreferenceTrainer(ReferenceTrainer, PairMeans, DPOTrainer):  # type: ignore[misc]
    """One rank's trainer of pairs of answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # TRL shards the reference as one unit, gathered whole in each step, and before its precision is set.
        with replaced(dpo_trainer, prepare_fsdp=lambda model, _: model):
            super().__init__(*args, **kwargs)

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:  # noqa: ARG002
        """Rows are made: clustertune/data/sequences.py."""
        return dataset

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, which switches recomputation off and on again around the reference, of all layers and with the plain
        function: the share of layers and what they keep would be lost. Without gradients nothing is kept for backward anyway.
        """
        with replaced(dpo_trainer, disable_gradient_checkpointing=lambda *_: contextlib.nullcontext()):
            return super().compute_loss(*args, **kwargs)


def state_parts(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """This rank's part of every trained parameter and of its optimizer state, in the optimizer's order."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if deepspeed_engine.is_zero(inner):
        return list(deepspeed_engine.state_tensors(inner))
    parameters = [p for p in model.parameters() if p.requires_grad]
    tensors = [*parameters, *(value for p in parameters for _, value in sorted(inner.state.get(p, {}).items()))]
    return [local(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
