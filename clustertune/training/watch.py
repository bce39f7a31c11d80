"""The Trainer callback that measures, writes the events, and makes all ranks agree at each step's end."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from clustertune.training.events import EventLog, TrainingConsole
from clustertune.training.trainer import RankTrainer

MEASURED = ("mfu", "hfu", "data_seconds", "forward_backward_seconds", "optimizer_seconds", "padding", "imbalance")
"""Of :meth:`clustertune.training.figures.Figures.take`, in ``metrics.jsonl``."""
REWARDS = {f"reward_{name}": f"rewards/{key}" for name, key in
           {"accuracy": "accuracies", "margin": "margins", "chosen": "chosen", "rejected": "rejected"}.items()}  # fmt: skip
"""What TRL says about pairs of answers, by its name in ``metrics.jsonl``; in an evaluation's event behind ``eval_``."""


def peak_memory_bytes() -> int:
    """Peak memory of this rank: allocated on its GPU, else the resident set of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Watch(TrainerCallback):  # type: ignore[misc]
    """``log`` and ``console`` are None on ranks other than 0."""

    def __init__(self, log: EventLog | None, console: TrainingConsole | None) -> None:
        self.trainer: RankTrainer | None = None
        self._log, self._console = log, console
        self._began = time.perf_counter()
        self._seconds, self._steps = 0.0, 0
        self._tokens = 0.0

    def attach(self, trainer: RankTrainer) -> None:
        """Tell the callback its trainer; it also sets where the token count starts after a resume."""
        self.trainer = trainer
        self._tokens = trainer._total_train_tokens
        trainer.describe_steps = self._figures if self._log is not None else None

    def show_on(self, console: TrainingConsole) -> None:
        """Show steps and evaluations on rank 0's console from now on."""
        self._console = console

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:  # noqa: ARG002
        """Save as this attempt is asked to: a state that resumes from a checkpoint has the steps of the one before."""
        state.compute_steps(args, state.max_steps)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:  # noqa: ARG002
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002
        assert self.trainer is not None
        self._optimizer = self.trainer.clock.begin()

    def on_optimizer_step(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002
        assert self.trainer is not None
        self.trainer.clock.add("optimizer", self._optimizer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Agree on a stop; on one, save here and leave out an evaluation that would outlast the warning time.

        The last step is saved behind its evaluation, which may be that of the epoch's end.
        """
        del kw
        self._seconds += time.perf_counter() - self._began
        self._steps += 1
        assert self.trainer is not None
        is_last, epoch = state.global_step >= state.max_steps, float(state.epoch or 0)
        at_epoch = args.eval_strategy == "epoch" and args.eval_delay <= epoch and (is_last or abs(epoch - round(epoch)) < 1e-9)
        if is_last:
            control.should_save = not at_epoch
        if self.trainer.agree(peak_memory_bytes(), self.trainer.clock.take()):
            self.trainer.eval_skipped = bool(control.should_evaluate or at_epoch)
            control.should_evaluate = False
            control.should_save = True
            control.should_log = True
            control.should_training_stop = True
        if self.trainer.save_due:
            control.should_save = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Nothing more where all stop: the step was saved. Else the last step is saved here, behind its evaluation."""
        del args, kw
        assert self.trainer is not None
        if self.trainer.stopping:
            control.should_evaluate = control.should_save = False
        elif state.global_step >= state.max_steps:
            control.should_save = True

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **kw: Any) -> None:  # noqa: ARG002
        """A ``step`` or ``eval`` event from the Trainer's log line."""
        if self._log is None or self.trainer is None:
            return
        if "loss" in logs:
            self._write_step(state, logs)
        elif "eval_loss" in logs:
            accuracy = logs.get("eval_mean_token_accuracy")
            rewards = {f"eval_{name}": logs[key] for name, own in REWARDS.items() if (key := f"eval_{own}") in logs}
            found = {"eval_loss": logs["eval_loss"], "eval_token_accuracy": accuracy, **rewards}
            self._log.write("eval", step=state.global_step, **found, seconds=logs.get("eval_runtime"))
            if self._console:
                what, share = ("reward", rewards["eval_reward_accuracy"]) if rewards else ("token", accuracy or 0)
                loss = f"loss {logs['eval_loss']:.4f}"
                self._console.say(f"eval at step {state.global_step}  {loss}  {what} accuracy {share:.3f}")

    def _figures(self) -> dict[str, Any]:
        """What was measured of the steps since the last log line."""
        trainer, seconds = self.trainer, self._seconds
        assert trainer is not None
        tokens = float(trainer._total_train_tokens) - self._tokens
        found = trainer.figures.take(seconds) if trainer.figures is not None else {}
        return {**found, "tokens_per_second": tokens / seconds if seconds else 0.0}

    def _write_step(self, state: TrainerState, logs: dict[str, Any]) -> None:
        assert self._log is not None
        assert self.trainer is not None
        steps = max(self._steps, 1)
        tokens, rate = float(logs.get("num_tokens", 0.0)), float(logs.get("tokens_per_second", 0.0))
        stragglers = self.trainer.figures.stragglers() if self.trainer.figures is not None else {}
        self._log.write(
            "step",
            step=state.global_step,
            epoch=logs.get("epoch"),
            loss=logs["loss"],
            token_accuracy=logs.get("mean_token_accuracy"),
            entropy=logs.get("entropy"),
            learning_rate=logs.get("learning_rate"),
            grad_norm=logs.get("grad_norm"),
            tokens=int(tokens),
            seconds=round(self._seconds / steps, 6),
            tokens_per_second=round(rate, 3),
            memory_bytes=self.trainer.peak_memory_bytes,
            **{name: logs[key] for name, key in REWARDS.items() if key in logs},
            **{name: logs[name] for name in MEASURED if name in logs},
            **({"stragglers": stragglers} if stragglers else {}),
        )
        if self._console:
            self._console.step(
                state.global_step,
                f"loss {logs['loss']:.4f}  lr {logs.get('learning_rate', 0):.2e}  grad {logs.get('grad_norm', 0):.3f}  "
                f"{rate:,.0f} tok/s  {self._seconds / steps:.2f} s",
            )
        self._seconds, self._steps, self._tokens = 0.0, 0, tokens
