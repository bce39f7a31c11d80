"""One attempt at training on this rank: trainer, guards, resume, and the reason it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback, set_seed

from clustertune import manifest, secrets
from clustertune.config.architecture import scale_down
from clustertune.config.kernels import attention_of
from clustertune.config.resolved import Resolved
from clustertune.data import sequences
from clustertune.data.tokenizer import check_labels, load_tokenizer
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.plan import AttemptPlan
from clustertune.plan.schedule import check_schedule_end
from clustertune.process import StopFlag
from clustertune.rundir import RunDir
from clustertune.training import base_model, build, deepspeed, figures, kernels, packing, recompute, sharding, tracker
from clustertune.training.collectives import Group, check_world
from clustertune.training.events import EventLog, TrainingConsole
from clustertune.training.heartbeat import Heartbeat
from clustertune.training.loading import Loading
from clustertune.training.startup import Startup, StartupWatch
from clustertune.training.trainer import (
    CheckpointFolders,
    NothingLeft,
    PreferenceTrainer,
    RankTrainer,
    SavedCheckpoint,
    Trainer,
)
from clustertune.training.watch import Watch

NEVER = 10**9
"""A step that no training reaches."""
LABEL_SAMPLE = 64
"""Training rows whose labels are looked at before the first step."""


class _BeforeFirstStep(TrainerCallback):  # type: ignore[misc]
    """Compare what accelerate really set up with what the recipe asked for."""

    def __init__(self, session: Session, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._session, self._report = session, report
        self.trainer: RankTrainer | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        assert self.trainer is not None
        self._session.compared()
        found = sharding.inspect(self.trainer.model_wrapped, self.trainer.accelerator, self._session.group.gather)
        resolved = self._session.resolved
        sharding.check(found, resolved.distribution)
        if (engine := self.trainer.engine) is not None:
            self._session.facts["deepspeed"] = deepspeed.check(engine, resolved)
        self._session.facts["recomputed_layers"] = str(recompute.apply(self.trainer.model, resolved))
        figures.attach(self.trainer, resolved, recompute.layers_of, self._session.facts["gpu0"])
        if self._session.group.rank == 0:
            for text in check_schedule_end(resolved, self.trainer.state.max_steps):
                self._session.tell(f"warning: {text}")
            self._session.open_console(self.trainer.state.max_steps)
            facts = {**found.as_dict(), **self._session.facts}
            facts["attention"] = found.attention or facts["attention"]  # what the model calls, before what was asked for
            self._report({**facts, "steps": self.trainer.state.max_steps, "notes": self._session.notes})
        if self.trainer.is_at_end and self.trainer.eval_dataset is None:
            raise NothingLeft
        self._session.attempt.heartbeat("train", self.trainer.state.global_step)


@dataclass(frozen=True)
class Attempt:
    """What a rank knows of the attempt that it is part of."""

    number: int
    plan: AttemptPlan | None
    """None where whoever started the ranks left none."""
    stop: StopFlag
    heartbeat: Heartbeat
    fence: Callable[[], None]
    """Raises UserError where another attempt has taken over."""
    out: TextIO
    """What people see of rank 0."""


@dataclass
class Session:
    """What this rank holds for the length of one attempt."""

    run_path: Path
    resolved: Resolved
    attempt: Attempt
    args: Any
    """TRL's, of :func:`build.configuration`."""
    group: Group
    notes: list[str]
    facts: dict[str, Any]
    startup: Startup
    log: EventLog | None = None
    console: TrainingConsole | None = None
    _weights: manifest.DigestComparison | None = None

    @classmethod
    def build(cls, run_path: Path, resolved: Resolved, attempt: Attempt, notes: list[str]) -> Session:
        """Fit the recipe to this machine and join the process group. Raises UserError where not all ranks are there."""
        import torch

        startup = Startup()
        startup.begin("process group")
        notes = [*notes, *kernels.set_environment(resolved.distribution)]
        build.check_packages(resolved.train_args, cuda=torch.cuda.is_available())
        deepspeed.prepare(resolved)
        packing.register()
        fitted = build.fit_to_device(resolved.train_args, cuda=torch.cuda.is_available())
        # TRL 1.16 deprecates its own pad_token: the tokenizer carries it.
        values = {key: value for key, value in fitted.values.items() if key != "pad_token"}
        kind = build.configuration(resolved)
        values |= sequences.PAIRS if resolved.is_dpo else sequences.TRAINER
        if resolved.recipe.save is not None:
            values["save_steps"] = NEVER  # but at the end: the trainer asks the section
        if values.get("padding_free") and not values.get("packing"):
            values["max_length"] = None  # TRL asks for it: the rows are cut already
        args = kind(output_dir=str(run_path), **build.spelt(values, kind.__dataclass_fields__))
        notes += deepspeed.fit_to_cpu(args)
        group = Group()
        check_world(group, resolved.world_size, attempt.plan)
        session = cls(run_path, resolved, attempt, args, group, [*notes, *fitted.notes], {}, startup)
        startup.end()
        if group.rank == 0:
            session.log = EventLog(run_path / "metrics.jsonl", attempt.number, attempt.fence)
        return session

    def tell(self, message: str) -> None:
        """Say something to the person at the console (rank 0 only)."""
        if self.group.rank == 0:
            if self.console:
                self.console.say(message)
            else:
                self.attempt.out.write(message + "\n")

    def open_console(self, total_steps: int) -> None:
        """From here on steps are shown, as a bar or as lines."""
        self.console = TrainingConsole(self.attempt.out, total_steps)
        self._watch.show_on(self.console)

    def make_trainer(
        self,
        store: CheckpointFolders,
        source: tuple[str, str | None],
        data: Path,
        describe: Callable[[Path], None],
        report: Callable[[Mapping[str, Any]], None],
        keys: Mapping[str, str],
    ) -> RankTrainer:
        """TRL's trainer on the prepared tokens, with tokenizer, LoRA and callbacks.

        ``keys``: the user's tokens by the names of their variables. W&B starts a process, which would inherit them all.
        """
        self._init_tracker(keys.get("WANDB_API_KEY"))
        self.attempt.heartbeat("model")
        with secrets.lent({name: value for name, value in keys.items() if name == "HF_TOKEN"}):
            return self._make_trainer(store, source, data, describe, report)

    def _make_trainer(
        self,
        store: CheckpointFolders,
        source: tuple[str, str | None],
        data: Path,
        describe: Callable[[Path], None],
        report: Callable[[Mapping[str, Any]], None],
    ) -> RankTrainer:
        recipe = self.resolved.recipe
        with self.startup.part("digests"):
            self._compare(base_model.folder(*source), data)
        base_model.check(*source, self.resolved)
        with self.startup.part("data"):
            train_args = self.resolved.train_args
            chats = recipe.data.has_chats
            tokenizer = load_tokenizer(*source, self.resolved.chat_template, train_args, chats=chats)
            train, held_out = sequences.load(data, RunDir(self.run_path).data, tokenizer, train_args)
        if held_out is None:
            self.args.eval_strategy, self.args.eval_on_start = "no", False
            self.notes.append("no evaluation: the eval split is empty")
        watch = Watch(self.log, None)
        before = _BeforeFirstStep(self, report)
        init = dict(self.args.model_init_kwargs or {})
        if source[1]:
            init["revision"] = source[1]
        self.args.model_init_kwargs = init
        loading = Loading(self.resolved.distribution, self.startup, self.group).install()
        self.startup.begin("model")
        set_seed(self.args.seed)  # TRL 1.2.0, of the reference's stack, draws LoRA's matrices without
        trainer = (PreferenceTrainer if self.resolved.is_dpo else Trainer)(
            model=source[0],
            args=self.args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=LoraConfig(**recipe.lora) if recipe.lora is not None else None,
            callbacks=[before, watch, self._startup_watch(), *kernels.watches(self.resolved, self.tell, self.log)],
            loading=loading,
            store=store,
            stop=self.attempt.stop,
            heartbeat=self.attempt.heartbeat,
            fence=self.attempt.fence,
            on_checkpoint=self._on_checkpoint,
            on_removed=self._on_removed,
            checkpoint_extra=describe,
        )
        sharding.set_precision(trainer.accelerator, self.resolved.distribution.reduce_dtype)
        self.startup.end()
        self.notes += dict.fromkeys(loading.notes)  # a reference model's are the same
        tracker.guard(trainer.callback_handler.callbacks, self.tell)
        trainer.remove_callback(PrinterCallback)  # its dicts say what the console's lines say
        before.trainer = trainer
        self._watch = watch
        self._look_at(trainer, tokenizer)
        return trainer

    def _compare(self, base: Path | None, data: Path) -> None:
        """Hold what this run is made of against its digests: data and small files now, weights beside their loading.

        Raises UserError on all ranks where one sees a damaged file. :meth:`compared` gives the verdict on the weights.
        """
        for part in (RunDir(self.run_path).data, data):  # the conversations, and the tokens that were made of them
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

    def compared(self) -> None:
        """Wait until the weights are compared, before they are trained on. Raises UserError on all ranks alike."""
        if self._weights is not None:
            with self.startup.part("digests"):
                manifest.agree(self._weights.finish(), self.group)
            self._weights.stop()
            self._weights = None

    def _startup_watch(self) -> StartupWatch:
        return StartupWatch(self.startup, self.group.gather, self.log.write if self.log else None, self.tell)

    def _look_at(self, trainer: RankTrainer, tokenizer: Any) -> None:
        """Facts of the run that are checked or reported before the first step."""
        sample = trainer.train_dataset.select(range(min(LABEL_SAMPLE, len(trainer.train_dataset))))
        rows = ({"input_ids": row["chosen_ids"]} for row in sample) if self.resolved.is_dpo else sample
        check_labels(rows, {tokenizer.eos_token_id})
        trainable = sum(deepspeed.elements(p) for p in trainer.model.parameters() if p.requires_grad)
        total = sum(deepspeed.elements(p) for p in trainer.model.parameters())
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
        on, notes = tracker.start_wandb(key) if self.group.rank == 0 else (False, [])
        self.notes += notes
        if not on:
            self.args.report_to = [name for name in self.args.report_to if name != "wandb"]

    def _on_checkpoint(self, saved: SavedCheckpoint) -> None:
        name = str(saved.path) if saved.local else str(saved.path.relative_to(self.run_path))
        if self.log:
            self.log.write(
                "checkpoint", step=saved.step, path=name, bytes=saved.bytes, seconds=round(saved.seconds, 4),
                status="local" if saved.local else "saved",
                save_copy_s=round(saved.copy_seconds, 4), save_stall_s=round(saved.stall_seconds, 4),
                save_write_s=round(saved.write_seconds, 4),
                **({"save_every_s": round(saved.every_seconds, 1)} if saved.every_seconds is not None else {}),
            )  # fmt: skip
            self.log.sync()
        self.tell(f"saved {name}  {saved.bytes / 1e6:.1f} MB  {saved.seconds:.2f} s" + ("  (final)" if saved.final else ""))

    def _on_removed(self, path: Path) -> None:
        if self.log:
            name = str(path.relative_to(self.run_path))
            self.log.write("checkpoint", step=int(path.name.split("-")[1].split(".")[0]), path=name, status="removed")

    def run(self, trainer: RankTrainer, latest: tuple[Path, Mapping[str, Any]] | None) -> ExitCode:
        """Train from the beginning or from ``latest``; say how it ended."""
        checkpoint, meta = latest if latest else (None, {})
        start = int(meta.get("step", 0))
        trainer.resume_with(meta)
        batch = int(self.resolved.recipe.train["global_batch_size"])
        if meta.get("world_size", self.group.world_size) != self.group.world_size and len(trainer.train_dataset) % batch:
            self.notes.append(
                f"the checkpoint is of {meta['world_size']} ranks, this attempt has {self.group.world_size}: the last "
                f"step of an epoch, which has fewer rows than the global batch of {batch}, may take other rows"
            )
        self._watch.attach(trainer)
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
            reason = "finished" if finished else f"asked to stop ({self.attempt.stop.signal_name or 'another rank was'})"
            if not finished:
                self.tell(
                    f"stopped at step {max(start, trainer.state.global_step)} as asked; the same command resumes from there"
                )
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
