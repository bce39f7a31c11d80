"""What each rank of a Megatron recipe does, inside NVIDIA's image: convert the base once, train, save, export to HF's form.

The launcher, its records, signals and exit codes are those of every other run. Nothing of Megatron is imported before
:func:`train` is called, and nothing of TRL, PEFT or accelerate ever.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertune import manifest, secrets
from clustertune.checkpoint.store import KIND, CheckpointStore, close, find_open
from clustertune.console import escape
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.megatron import bridge, megatron_files, settings
from clustertune.training.event_log import Attempt, EventLog

if TYPE_CHECKING:
    from clustertune.training.collectives import Group

BASE_KIND = "megatron-base"
TIMEOUT_MINUTES = 60
"""Of collectives: the conversion of 405B reads 810 GB before the first of them ends."""


def train(attempt: Attempt, nvidia: bridge.Bridge | None = None) -> ExitCode:
    """Train from the newest whole checkpoint, or from the base. Raises UserError; OK where nothing is left to do.

    ``nvidia``: their side; None: the real one.
    """
    m = attempt.resolved.recipe.megatron
    assert m is not None
    if m.tensor_model_parallel_size > 1 or m.context_parallel_size > 1:
        # Megatron-Core's order of kernels and collectives wants one hardware queue before Blackwell (its warning in
        # tensor_parallel/layers.py); a value that the user sets stays. Before torch is imported.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    nvidia = nvidia or bridge.Bridge.load(attempt.source, attempt.resolved.recipe.model.name)
    nvidia.start(datetime.timedelta(minutes=TIMEOUT_MINUTES))
    from clustertune.training.collectives import Group

    group = Group()

    def tell(text: str) -> None:
        if group.rank == 0:
            attempt.out.write(f"{escape(text)}\n")
            sys.stderr.write(f"{text}\n")

    limit = attempt.resolved.train_args["save_total_limit"]
    store = CheckpointStore(attempt.run.checkpoints, attempt.number, limit, group, tell, attempt.fence)
    latest = store.latest()
    if latest and latest[1].get("final"):
        store.tell(f"{latest[0].name} is the final checkpoint: nothing is left to train")
        return ExitCode.OK
    return _Training(attempt, nvidia, group, store).go(latest)


class _Training:
    """One attempt of one rank."""

    def __init__(self, attempt: Attempt, nvidia: bridge.Bridge, group: Group, store: CheckpointStore) -> None:
        self.attempt, self.bridge, self.group, self.store = attempt, nvidia, group, store
        self.log = EventLog(attempt.run.metrics, attempt.number, attempt.fence) if group.rank == 0 else None
        self.steps: int | None = None
        self.step = 0
        self.saved: Path | None = None
        """The newest checkpoint that is whole."""
        self._since, self._tokens = time.monotonic(), 0.0

    def go(self, latest: tuple[Path, dict[str, Any]] | None) -> ExitCode:
        """Convert, pack, train. How it ended goes into the metrics, too."""
        start = int(latest[1]["step"]) if latest else 0
        if self.log:
            self.log.write("start", step=start, world_size=self.group.world_size, resumed_from=latest and latest[0].name)
        code, reason = ExitCode.FAILED, "an error: see the rank's log"
        try:
            for note in self.attempt.notes:
                self.store.tell(f"note: {note}")
            self._fetch()
            where = megatron_files.paths(self.attempt.run.path)
            for folder in (Path(self.attempt.source[0]), where["data"], where["tokenizer"]):
                manifest.require_whole(folder, self.group)
            self._make_base()
            config = self._configure(latest)
            self.store.tell(f"resume from {latest[0].name}" if latest else "train from the base model")
            self.attempt.heartbeat("resume" if latest else "train", start)
            self.step, self.saved = start, latest and latest[0]
            stopped = self.bridge.finetune(config, self)
            finished = self.step >= (self.steps or 0) and not stopped
            code = ExitCode.OK if finished else ExitCode.AGAIN
            reason = "finished" if finished else "asked to stop"
            if not finished:
                self.store.tell(f"stopped at step {self.step} as asked; the same command resumes from there")
        except UserError as error:
            code, reason = error.code, error.problems[0].message
            raise
        finally:
            if self.log:
                self.log.write("stop", step=self.step, exit_code=int(code), reason=reason)
                self.log.close()
        self.bridge.end()
        return code

    def _fetch(self) -> None:
        """Have the base model in a folder: of an id, rank 0, which has the token, loads it into the cache that all share."""
        name, revision = self.attempt.source
        if Path(name).is_dir():
            return
        self.attempt.heartbeat("model")
        result: tuple[str | None, str] | None = None
        if self.group.rank == 0:
            self.store.tell(f"loading {name} from the Hub, where it is not in the cache")
            with secrets.lent({key: value for key, value in self.attempt.tokens.items() if key == "HF_TOKEN"}):
                try:
                    result = (str(self.bridge.fetch(name, revision)), "")
                except (OSError, ValueError) as error:  # what huggingface_hub raises; no message of it holds a token
                    result = (None, f"{type(error).__name__}: {error}".splitlines()[0][:300])
        folder, wrong = self.group.broadcast(result)
        if folder is None:
            fix = "clustertune stage RECIPE --to DIR on a machine that reaches the Hub, and staged: DIR"
            raise UserError(Problem(f"cannot be loaded: {wrong}", file=name, key="model.name", fix=fix))
        absent = sum(self.group.gather(not Path(folder).is_dir()))
        if absent:
            fix = "HF_HOME on storage that all nodes see, or clustertune stage RECIPE on each node"
            raise UserError(Problem(f"is not seen by {absent} of {self.group.world_size} ranks", file=folder, fix=fix))
        self.attempt.source = self.bridge.source = (folder, None)

    def _make_base(self) -> None:
        """HF's weights as a Megatron checkpoint, by all ranks together, once in a run: each holds its own part only."""
        out = megatron_files.paths(self.attempt.run.path)["base"]
        identity = {"model": self.attempt.resolved.recipe.model.name, "revision": self.attempt.resolved.recipe.model.revision}
        source = None
        if self.group.rank == 0 and not manifest.find_problems(out, BASE_KIND, hashes=False):
            source = manifest.read_manifest(out, BASE_KIND).meta.get("source")
        if self.group.broadcast(source) == identity:
            manifest.require_whole(out, self.group)
            manifest.agree(find_open(out) if self.group.rank == 0 else [], self.group)  # Megatron-Core unpickles it
            return
        self.attempt.fence()
        self.attempt.heartbeat("model")
        began = time.monotonic()
        self.store.tell(f"converting {self.attempt.source[0]} for Megatron, once")
        self._begin_anew(out)
        self.bridge.convert(self.attempt.source, self.attempt.resolved, out, self.attempt.heartbeat)
        self.group.barrier()
        if self.group.rank == 0:
            close(out)
            manifest.seal(out, BASE_KIND, {"source": identity, "seconds": round(time.monotonic() - began, 1)})
        self.group.barrier()
        self.store.tell(f"converted in {time.monotonic() - began:.0f} s")

    def _begin_anew(self, folder: Path) -> None:
        """Make a folder empty, for all ranks. Raises UserError (exit 73) on all of them where it cannot be written."""

        def make() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

        try:
            self.store.on_first(make)
        except OSError as error:
            text = f"cannot be written: {error.strerror or error}"
            raise UserError(Problem(text, file=str(folder)), ExitCode.STORAGE) from None

    def _configure(self, latest: tuple[Path, dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
        """The sections, complete: the steps are known once rank 0 has packed the data. Each attempt keeps what it ran."""
        attempt, where = self.attempt, megatron_files.paths(self.attempt.run.path)
        named: dict[str, str | None] = {
            "base": str(where["base"]), "data": str(where["data"]), "tokenizer": str(where["tokenizer"]),
            "save": str(self.store.path(int(latest[1]["step"]) if latest else 0)), "load": str(latest[0]) if latest else None,
        }  # fmt: skip
        counts: tuple[int, int, list[str]] | None = None
        if self.group.rank == 0:
            try:
                packed = self.bridge.pack(settings.build(attempt.resolved, named), attempt.heartbeat)
                counts = (packed.train, packed.eval, [])
            except UserError as error:
                counts = (0, 0, [problem.message for problem in error.problems])
        rows, evals, wrong = self.group.broadcast(counts)
        if wrong:
            raise UserError([Problem(text, file=str(where["data"])) for text in wrong])
        config = settings.build(attempt.resolved, named, settings.Counts(rows, evals))
        self.steps = int(config["train"]["train_iters"])
        self.store.tell(f"{rows} sequences to train on, {evals} to evaluate: {self.steps} steps")
        if self.group.rank == 0:
            folder = attempt.run.attempt(attempt.number)
            document = {"sequences": {"train": rows, "eval": evals}, "configuration": config}
            manifest.write_durably(folder / settings.PLAN_FILE, json.dumps(document, indent=1) + "\n")
        return config

    # What NVIDIA's loop calls, on every rank: some parts are collective.

    def on_train_step_end(self, context: Any) -> None:
        """Fired before the loop counts the step, and before it decides to save. The heartbeat shows that it makes progress."""
        from torch.cuda import max_memory_allocated

        step = int(context.state.train_state.step) + 1
        loss = bridge.from_last((context.loss_dict or {}).get("lm loss"))
        rate = context.optimizer.param_groups[0].get("lr") if context.optimizer is not None else None
        rate, norm = (None if value is None else float(value) for value in (rate, context.grad_norm))
        context.state.cfg.checkpoint.save = str(self.store.path(step))
        if self.attempt.stop.is_set:  # asked before Megatron had its own handler
            context.state.signal_handler._signal_received = True
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        self.step = step
        self.attempt.heartbeat("train", step)
        if self.log and loss is not None:
            train = self.attempt.resolved.train_args
            tokens = settings.global_batch(self.attempt.resolved) * int(train["max_length"])
            self._tokens += tokens
            packed = bool(train["packing"])
            self.log.write(
                "step", step=step, loss=loss, learning_rate=rate, grad_norm=norm,
                memory_bytes=int(max_memory_allocated()),
                seconds=round(seconds, 6),
                # Without packing the tokens of a step are not known here: padding would count as trained.
                **({"tokens": int(self._tokens), "tokens_per_second": round(tokens / seconds, 3)} if packed else {}),
            )  # fmt: skip

    def on_eval_end(self, context: Any) -> None:
        """The mean over the evaluation, which the last stage of the pipeline has."""
        step, loss = int(context.state.train_state.step), bridge.from_last((context.total_loss_dict or {}).get("lm loss"))
        self.attempt.heartbeat("eval", step)
        if self.log and loss is not None:
            self.log.write("eval", step=step, eval_loss=loss)

    def on_checkpoint_save(self, context: Any) -> None:
        """A checkpoint is on disk, by all ranks, as saving is synchronous here: it gets the recipe and, last, its manifest."""
        step = int(context.state.train_state.step)
        path = self.store.path(step)
        self.attempt.heartbeat("save", step)
        began = time.monotonic()
        if self.group.rank == 0:
            recipe = json.dumps(self.attempt.resolved.as_dict(), indent=1) + "\n"
            (path / "recipe.json").write_text(recipe)
        size = self.store.commit(path, {"step": step, "final": False, "world_size": self.group.world_size})
        self.saved = path
        if self.log:
            name = str(path.relative_to(self.attempt.run.path))
            seconds = round(time.monotonic() - began, 4)
            self.log.write("checkpoint", step=step, path=name, bytes=size, seconds=seconds, status="saved")
            self.log.sync()
        self.store.prune()
        self.attempt.heartbeat("train", step)

    def on_train_end(self, context: Any) -> None:
        """The last step is done and saved: what was trained is exported, and only then is the checkpoint the final one.

        Not fired where the loop was asked to stop.
        """
        if self.saved is None or self.step < (self.steps or 0):
            return
        self.attempt.heartbeat("save", self.step)
        self.store.tell("exporting to the form of Hugging Face")
        out = megatron_files.exported(self.attempt.run.path)
        self._begin_anew(out)
        self.bridge.export(context.state.cfg.peft, context.model, out)
        self.group.barrier()
        self.attempt.fence()
        if self.group.rank == 0:
            (out / "recipe.json").write_text(json.dumps(self.attempt.resolved.as_dict(), indent=1) + "\n")
            # A checkpoint's kind: the stage export reads it as it reads one of any other run.
            manifest.seal(out, KIND, {"step": self.step, "final": True, "checkpoint": self.saved.name})
            sealed = manifest.read_manifest(self.saved, KIND)
            manifest.seal(self.saved, KIND, {**sealed.meta, "final": True}, sealed.files)
        self.group.barrier()
