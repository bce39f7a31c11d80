"""One attempt at training on this rank: trainer, guards, resume, and the reason it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from clustertune import manifest, secrets
from clustertune.checkpoint.store import CheckpointStore
from clustertune.console import escape
from clustertune.data import sequences
from clustertune.data.rewards import Rewards
from clustertune.data.tokenizer import check_labels, load_tokenizer
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.plan.schedule import check_schedule_end, find_idle_schedule
from clustertune.recipe.architecture import scale_down
from clustertune.resolve.kernels import attention_of
from clustertune.training import (
    base_model,
    base_weights,
    build,
    deepspeed_engine,
    event_log,
    figures,
    packing,
    recompute,
    sharding,
)
from clustertune.training.collectives import Group, check_world
from clustertune.training.event_log import Attempt, EventLog, TrainingConsole
from clustertune.training.figures import Startup, peak_host_bytes
from clustertune.training.loading import Loading
from clustertune.training.rollouts import RolloutTrainer
from clustertune.training.trainer import NothingLeft, PreferenceTrainer, RankTrainer, Saving, Trainer

NO_GRADIENT = "no_gradient"
"""The kind of alarm for steps that teach nothing, in ``metrics.jsonl`` and among the alerts."""
NEVER = 10**9
"""A step that no training reaches."""


MEASURED = (
    *("mfu", "hfu", "data_seconds", "forward_backward_seconds", "optimizer_seconds", "generation_seconds", "reward_seconds"),
    *("padding", "imbalance"),
)
"""Of :meth:`clustertune.training.figures.Figures.take`, in ``metrics.jsonl``."""
REWARDS = {f"reward_{name}": f"rewards/{key}" for name, key in
           {"accuracy": "accuracies", "margin": "margins", "chosen": "chosen", "rejected": "rejected"}.items()}  # fmt: skip
"""What TRL says about pairs of answers, by its name in ``metrics.jsonl``; in an evaluation's event behind ``eval_``."""
ROLLOUTS = {
    "reward": "reward", "reward_std": "reward_std", "kl": "kl", "same_reward": "frac_reward_zero_std",
    "completion_length": "completions/mean_length", "clipped": "completions/clipped_ratio",
}  # fmt: skip
"""The same about the model's own answers. ``same_reward``: share of the prompts whose answers all have one reward, and teach
nothing; ``clipped``: of the answers that were cut at ``max_completion_length``."""


class Watch(TrainerCallback):  # type: ignore[misc]
    """Has the session prove what was set up, measures, writes the events, and makes all ranks agree at each step's end.

    The start-up ends with the first step.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._began = time.perf_counter()
        self._seconds, self._steps = 0.0, 0
        self.tokens = 0.0
        """Trained by the last log line."""

    @property
    def trainer(self) -> RankTrainer:
        return self._session.trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:  # noqa: ARG002
        self._session.prove()
        # Save as this attempt is asked to: a state that resumes from a checkpoint has the steps of the one before.
        state.compute_steps(args, state.max_steps)
        self._session.startup.begin("evaluation" if args.eval_on_start else "other")
        self._before_first = True

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:  # noqa: ARG002
        self._began = time.perf_counter()
        if self._before_first:
            self._session.startup.end()
            self._session.startup.begin("first step")
            self._before_first = False

    def on_pre_optimizer_step(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002
        self._began += self.trainer.wait_for_copy()  # what is being copied must not change; the save's time, not the step's
        self._optimizer = self.trainer.clock.begin()

    def on_optimizer_step(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002
        self.trainer.clock.add("optimizer", self._optimizer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Agree on a stop; on one, save here and leave out an evaluation that would outlast the warning time.

        The last step is saved behind its evaluation, which may be that of the epoch's end.
        """
        del kw
        self._seconds += time.perf_counter() - self._began
        self._steps += 1
        is_last, epoch = state.global_step >= state.max_steps, float(state.epoch or 0)
        at_epoch = args.eval_strategy == "epoch" and args.eval_delay <= epoch and (is_last or abs(epoch - round(epoch)) < 1e-9)
        if is_last:
            control.should_save = not at_epoch
        if self.trainer.end_step():
            self.trainer.eval_skipped = bool(control.should_evaluate or at_epoch)
            control.should_evaluate = False
            control.should_save = control.should_log = control.should_training_stop = True
        if self.trainer.save_due:
            control.should_save = True
        self._session.end_startup()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Nothing more where all stop: the step was saved. Else the last step is saved here, behind its evaluation."""
        del args, kw
        if self.trainer.stopping:
            control.should_evaluate = control.should_save = False
        elif state.global_step >= state.max_steps:
            control.should_save = True

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **kw: Any) -> None:  # noqa: ARG002
        """A ``step`` or ``eval`` event from the Trainer's log line."""
        if self._session.log is None:
            return
        if "loss" in logs:
            self._write_step(state, logs)
        elif "eval_loss" in logs:
            if isinstance(self.trainer, RolloutTrainer):
                self._write_held_out(self.trainer, state, logs)
                return
            accuracy = logs.get("eval_mean_token_accuracy")
            rewards = {f"eval_{name}": logs[key] for name, own in REWARDS.items() if (key := f"eval_{own}") in logs}
            values = {"eval_loss": logs["eval_loss"], "eval_token_accuracy": accuracy, **rewards}
            self._session.log.write("eval", step=state.global_step, **values, seconds=logs.get("eval_runtime"))
            if self._session.console:
                what, share = ("reward", rewards["eval_reward_accuracy"]) if rewards else ("token", accuracy or 0)
                loss = f"loss {logs['eval_loss']:.4f}"
                self._session.console.say(f"eval at step {state.global_step}  {loss}  {what} accuracy {share:.3f}")

    def _write_held_out(self, trainer: RolloutTrainer, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """The events of an evaluation on held-out prompts: ``eval``, and one ``answer`` for each sample."""
        held_out, log = trainer.held_out, self._session.log
        assert held_out is not None and log is not None
        means = {f"eval_{name}": logs.get(f"eval_{ROLLOUTS[name]}") for name in ("completion_length", "clipped", "kl")}
        paired = {"eval_reward_difference": held_out.difference, "eval_reward_difference_error": held_out.error}
        log.write(
            "eval", step=state.global_step, eval_loss=logs["eval_loss"], eval_reward=held_out.reward, **paired,
            **{name: value for name, value in means.items() if value is not None},
            eval_rewards=held_out.by_name, eval_kinds=held_out.by_kind, seconds=logs.get("eval_runtime"),
        )  # fmt: skip
        for sample in held_out.samples:
            log.write("answer", step=state.global_step, **asdict(sample))
        shown = f"eval at step {state.global_step}  reward {held_out.reward:.4f}"
        if held_out.difference is not None:
            shown += f"  {held_out.difference:+.4f} +- {held_out.error:.4f} to the first, prompt by prompt"
        self._session.tell(shown)
        if held_out.alarm:
            log.write("alarm", step=state.global_step, message=held_out.alarm)
            self._session.tell(f"warning: {held_out.alarm}")

    def figures(self) -> dict[str, Any]:
        """What was measured of the steps since the last log line."""
        trainer, seconds = self.trainer, self._seconds
        tokens = float(trainer._total_train_tokens) - self.tokens
        values = trainer.figures.take(seconds) if trainer.figures is not None else {}
        return {**values, "tokens_per_second": tokens / seconds if seconds else 0.0}

    def _write_step(self, state: TrainerState, logs: dict[str, Any]) -> None:
        steps = max(self._steps, 1)
        # A step that learns from the answers of the one before brings no new tokens.
        tokens, rate = float(logs.get("num_tokens", self.tokens)), float(logs.get("tokens_per_second", 0.0))
        stragglers = self.trainer.figures.stragglers() if self.trainer.figures is not None else {}
        assert self._session.log is not None
        self._session.log.write(
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
            **{name: logs[key] for name, key in (REWARDS | ROLLOUTS).items() if key in logs},
            **({"rewards": by_name} if (by_name := _by_name(logs)) else {}),
            **{name: logs[name] for name in MEASURED if name in logs},
            **({"stragglers": stragglers} if stragglers else {}),
        )
        if self._session.console:
            shown = f"loss {logs['loss']:.4f}  lr {logs.get('learning_rate', 0):.2e}  grad {logs.get('grad_norm', 0):.3f}"
            if logs.get("reward") is not None:
                length = logs.get("completions/mean_length") or 0
                shown = f"reward {logs['reward']:.4f}  length {length:.0f}  {shown}"
            shown += f"  {rate:,.0f} tok/s  {self._seconds / steps:.2f} s"
            self._session.console.step(state.global_step, shown)
        self._seconds, self._steps, self.tokens = 0.0, 0, tokens


def _by_name(logs: Mapping[str, Any]) -> dict[str, float | None]:
    """The mean of each reward, before its weight."""
    return {key.split("/")[1]: logs[key] for key in logs if key.startswith("rewards/") and key.endswith("/mean")}


class Session:
    """What this rank holds for the length of one attempt."""

    trainer: RankTrainer
    log: EventLog | None = None
    console: TrainingConsole | None = None
    _weights: manifest.DigestComparison | None = None
    rewards: Rewards | None = None

    def __init__(self, attempt: Attempt) -> None:
        """Fit the recipe to this machine and join the process group. Raises UserError where not all ranks are there."""
        self.attempt, self.resolved, self.run_path = attempt, attempt.resolved, attempt.run.path
        self._open = contextlib.ExitStack()
        """What is open for the length of the attempt; the end of the process closes it where an error ends that."""
        self.startup = Startup()
        self.startup.begin("process group")
        resolved, cuda = attempt.resolved, torch.cuda.is_available()
        self.notes = attempt.notes + build.leave_shapes_to_torch(resolved.distribution)
        deepspeed_engine.prepare(resolved)
        packing.register()
        values, differences = build.fit_to_device(resolved.train_args, cuda=cuda)
        # With the section save the trainer asks it, but at the end.
        if resolved.recipe.save:
            values["save_steps"] = NEVER
        self.args = build.trl_arguments(resolved, self.run_path, values)
        self.notes += deepspeed_engine.fit_to_cpu(self.args) + differences
        self.group = Group()
        check_world(self.group, resolved.world_size, attempt.plan)
        self.apart = Group.apart()  # now, not at the first save: where it cannot be made, no weights are read
        self.facts: dict[str, Any] = {}
        self.startup.end()
        if self.group.rank == 0:
            self.log = EventLog(self.run_path / "metrics.jsonl", attempt.number, attempt.fence)

    def tell(self, message: str) -> None:
        """Say something to the person at the console (rank 0 only)."""
        if self.group.rank == 0:
            if self.console:
                self.console.say(message)
            else:
                self.attempt.out.write(escape(message) + "\n")

    def make_trainer(self, store: CheckpointStore, data: Path) -> RankTrainer:
        """TRL's trainer on the prepared tokens in ``data``, with tokenizer, LoRA and callbacks."""
        # W&B starts a process, which would inherit all of the user's tokens.
        self._init_tracker(self.attempt.tokens.get("WANDB_API_KEY"))
        self.attempt.heartbeat("model")
        with secrets.lent({name: value for name, value in self.attempt.tokens.items() if name == "HF_TOKEN"}):
            self.trainer = self._make_trainer(store, data)
        return self.trainer

    def _make_trainer(self, store: CheckpointStore, data: Path) -> RankTrainer:
        recipe, source, attempt = self.resolved.recipe, self.attempt.source, self.attempt
        with self.startup.part("digests"):
            self._compare(base_model.folder(*source), data)
        base_model.check(*source, self.resolved)
        with self.startup.part("data"):
            train_args = self.resolved.train_args
            kinds: dict[str, Any] = {"chats": recipe.data.has_chats, "system": recipe.data.system_messages}
            kinds["date"] = self.resolved.template_date
            tokenizer = load_tokenizer(*source, self.resolved.chat_template, train_args, **kinds)
            train, held_out = sequences.load(data, attempt.run.data, tokenizer, train_args)
        if held_out is None:
            self.args.eval_strategy, self.args.eval_on_start = "no", False
            self.notes.append("no evaluation: the eval split is empty")
        self._watch = Watch(self)
        init = dict(self.args.model_init_kwargs or {})
        if source[1]:
            init["revision"] = source[1]
        self.args.model_init_kwargs = init
        loading = Loading(self.resolved.distribution, self.startup, self.group).install()
        self.startup.begin("model")
        set_seed(self.args.seed)
        kind: Any = {"sft": Trainer, "dpo": PreferenceTrainer, "grpo": RolloutTrainer}[recipe.trainer]
        rewards = {}
        if self.resolved.is_grpo:
            self.rewards = self._open.enter_context(Rewards(recipe.reward or (), self.resolved.reward_code))
            self.rewards.asked_of(tokenizer)
            rewards["reward_funcs"] = self.rewards.judges
        trainer: RankTrainer = kind(
            model=source[0],
            **rewards,
            args=self.args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=LoraConfig(**self.resolved.lora) if self.resolved.lora is not None else None,
            callbacks=[self._watch],
            loading=loading,
            store=store,
            attempt=attempt,
            on_checkpoint=self._on_checkpoint,
        )
        trainer.apart, trainer.on_alarm = self.apart, self._on_alarm
        if self.rewards is not None and isinstance(trainer, RolloutTrainer):
            self.rewards.beat = trainer.beat
        sharding.set_precision(trainer.accelerator, self.resolved.distribution.reduce_dtype)
        self.startup.end()
        self.notes += dict.fromkeys(loading.notes)  # a reference model's are the same
        event_log.guard(trainer.callback_handler.callbacks, self.tell)
        trainer.remove_callback(PrinterCallback)  # its dicts say what the console's lines say
        self._look_at(trainer, tokenizer)
        return trainer

    def _compare(self, base: Path | None, data: Path) -> None:
        """Hold what this run is made of against its digests: data and small files now, weights beside their loading.

        Raises UserError on all ranks where one sees a damaged file. :meth:`compared` gives the verdict on the weights.
        """
        for part in (self.attempt.run.data, data):  # the conversations, and the tokens that were made of them
            manifest.require_whole(part, self.group)
        if base is None:
            return
        problems: list[Problem] = []
        rank, size = manifest.sharers(base, self.group)
        try:
            self._weights = manifest.DigestComparison(base, rank, size)
            problems = self._weights.problems
        except UserError as error:
            problems = error.problems
        manifest.agree(problems, self.group)
        if self._weights is not None:
            self._weights.start()
        if names := base_weights.unproved_files(base):
            self.notes.append(base_weights.unproved(base, names))

    def prove(self) -> None:
        """Before the first step: the weights are those of their digests, and the run is distributed as the recipe asks.

        Raises UserError on all ranks alike, NothingLeft where no step is to be taken.
        """
        if self._weights is not None:
            with self.startup.part("digests"):
                manifest.agree(self._weights.finish(), self.group)
            self._weights.stop()
            self._weights = None
        trainer, resolved, facts = self.trainer, self.resolved, self.facts
        state = sharding.inspect(trainer.model_wrapped, trainer.accelerator, self.group.gather)
        sharding.check(state, resolved.distribution)
        if (engine := trainer.engine) is not None:
            facts["deepspeed"] = deepspeed_engine.check(engine, resolved)
        facts["recomputed_layers"] = recompute.apply(trainer.model, resolved)
        figures.attach(trainer, resolved, recompute.layers_of, facts["gpu0"])
        steps = trainer.state.max_steps
        if idle := find_idle_schedule(resolved, steps):
            raise UserError(idle, ExitCode.STOP)
        if self.group.rank == 0:
            for text in check_schedule_end(resolved, steps):
                self.tell(f"warning: {text}")
            self.console = TrainingConsole(self.attempt.out, steps)  # from here on steps are shown, as a bar or as lines
            # What the model calls, before what was asked for.
            facts = {**state.as_dict(), **facts, "attention": state.attention or facts["attention"]}
            self.attempt.fence()
            self.attempt.run.update(distributed={**facts, "steps": steps, "notes": self.notes})
        if trainer.is_at_end and trainer.eval_dataset is None:
            raise NothingLeft
        self.attempt.heartbeat("train", trainer.state.global_step)

    def end_startup(self) -> None:
        """The first step is over: end the clock, and have all ranks tell what they read and held; once."""
        if self.startup.done:
            return
        self.startup.end()
        self.startup.finish()
        ranks = self.group.gather((self.startup.read_bytes, peak_host_bytes()))
        if self.log is not None:
            for event in self.startup.events([read for read, _ in ranks], [held for _, held in ranks]):
                self.log.write("startup", **event)
            self.tell(self.startup.summary())

    def _look_at(self, trainer: RankTrainer, tokenizer: Any) -> None:
        """Facts of the run that are checked or reported before the first step."""
        if self.resolved.recipe.data.has_chats and not self.resolved.is_grpo:
            sample = trainer.train_dataset.select(range(min(sequences.LABEL_SAMPLE, len(trainer.train_dataset))))
            check_labels(map(sequences.learnt, sample), {tokenizer.eos_token_id})
        trainable = sum(deepspeed_engine.elements(p) for p in trainer.model.parameters() if p.requires_grad)
        total = sum(deepspeed_engine.elements(p) for p in trainer.model.parameters())
        attention = attention_of(self.args.to_dict())
        self.facts |= {"trainable_parameters": trainable, "total_parameters": total, "attention": attention}
        self.facts |= build.machine_facts()
        expected = self.resolved.recipe.expect.trainable_parameters
        if expected not in (None, trainable) and not self.resolved.tiny:
            self.notes.append(f"{trainable:,} trainable parameters, the recipe expects {expected:,}")
        if getattr(self.args, "packing", False):
            isolated = packing.is_isolated(scale_down(self.resolved.architecture), attention)
            self.facts["packing"] = {"isolated": isolated, "attention": attention}
            if not isolated:
                self.notes.append(
                    f"packed conversations see each other: {attention} attention does not keep them apart for this model; "
                    "train.packing=false, or an attn_implementation that does, avoids it"
                )

    def _init_tracker(self, key: str | None) -> None:
        """Start W&B here, so that a tracker which fails is left out: training never stops for it.

        Rank 0 alone reports. The others leave it out, or the Trainer refuses to start where the package is not installed.
        """
        if "wandb" not in (self.args.report_to or []):
            return
        on, notes = event_log.start_wandb(key) if self.group.rank == 0 else (False, [])
        self.notes += notes
        if not on:
            self.args.report_to = [name for name in self.args.report_to if name != "wandb"]

    def _on_alarm(self, step: int, text: str) -> None:
        """Steps teach nothing: an event for the report and ``watch``, and a line for a person."""
        if self.log is not None:
            self.log.write("alarm", step=step, message=text, kind=NO_GRADIENT)
        self.tell(f"warning: {text}")

    def _on_checkpoint(self, saved: Saving) -> None:
        written = saved.written
        assert written is not None
        name = str(saved.path.relative_to(self.run_path))
        if self.log:
            self.log.write(
                "checkpoint", step=saved.step, path=name, bytes=written.bytes, seconds=round(saved.seconds, 4),
                status="saved",
                save_copy_s=round(written.copy_seconds, 4), save_stall_s=round(saved.stall_seconds, 4),
                save_write_s=round(written.seconds, 4),
                **({"save_every_s": round(saved.every_seconds, 1)} if saved.every_seconds is not None else {}),
            )  # fmt: skip
            self.log.sync()
            for path in written.removed:
                gone, step = str(path.relative_to(self.run_path)), int(path.name.split("-")[1].split(".")[0])
                self.log.write("checkpoint", step=step, path=gone, status="removed")
        self.tell(f"saved {name}  {written.bytes / 1e6:.1f} MB  {saved.seconds:.2f} s" + ("  (final)" if saved.final else ""))

    def run(self, latest: tuple[Path, Mapping[str, Any]] | None) -> ExitCode:
        """Train from the beginning or from ``latest``; say how it ended."""
        trainer = self.trainer
        checkpoint, meta = latest if latest else (None, {})
        start = int(meta.get("step", 0))
        trainer.resume_with(meta)
        batch = self.resolved.global_batch_size
        if meta.get("world_size", self.group.world_size) != self.group.world_size and len(trainer.train_dataset) % batch:
            self.notes.append(
                f"the checkpoint is of {meta['world_size']} ranks, this attempt has {self.group.world_size}: the last "
                f"step of an epoch, which has fewer rows than the global batch of {batch}, may take other rows"
            )
        self._watch.tokens = trainer._total_train_tokens
        trainer.describe_steps = self._watch.figures if self.log else None
        if checkpoint is not None and trainer.eval_dataset is not None:
            self.args.eval_on_start = bool(meta.get("eval_skipped"))
        if self.log:
            self.log.write("start", step=start, world_size=self.group.world_size, resumed_from=checkpoint and checkpoint.name)
        for note in self.notes:
            self.tell(f"note: {note}")
        self.tell(f"resume from {checkpoint.name}" if checkpoint else "train from the base model")
        code, reason = ExitCode.FAILED, "an error: see the rank's log"
        try:
            self._train(trainer, checkpoint)
            finished = trainer.is_at_end and not trainer.eval_skipped
            code = ExitCode.OK if finished else ExitCode.AGAIN
            at = max(start, trainer.state.global_step)
            reason = "finished" if finished else f"asked to stop ({self.attempt.stop.signal_name or 'another rank was'})"
            if not finished and not self.attempt.stop.is_set and at > start and trainer.is_score_due(at):
                reason = f"stopped at step {at} for its scores"
                self.tell(reason)
            elif not finished:
                self.tell(f"stopped at step {at} as asked; the same command resumes from there")
        except UserError as error:
            code, reason = error.code, error.problems[0].message
            raise
        finally:
            if self._weights is not None:  # stopped before the first step: the verdict is not needed
                self._weights.stop()
            if self.log:
                with contextlib.suppress(UserError):  # the attempt that has taken over tells the rest
                    self.log.write("stop", step=max(start, trainer.state.global_step), exit_code=int(code), reason=reason)
                    self.log.close()
            if self.console:
                self.console.close()
            self._open.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    def _train(self, trainer: RankTrainer, checkpoint: Path | None) -> None:
        """Take the steps that are left; make up the last evaluation where only that is."""
        if trainer.agree():  # asked while the model was loaded: there is nothing new to save
            return
        self.attempt.heartbeat("resume" if checkpoint else "train", trainer.start_step)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except NothingLeft:
            if checkpoint is not None and trainer.is_at_end and not trainer.eval_skipped:
                trainer.store.change(checkpoint, final=True, eval_skipped=False)
                self.tell(f"{checkpoint.name} is the final checkpoint now")
        trainer.finish_save()
