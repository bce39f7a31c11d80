"""The program of one training rank: every launcher starts this, once per GPU (or per process where there is none)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from clustertune.checkpoint.store import CheckpointStore
from clustertune.config.resolved import Resolved
from clustertune.errors import ExitCode, Problem, UserError, storage_error
from clustertune.launch.local import LAUNCHER_PID
from clustertune.process import die_with_parent
from clustertune.rundir import RunDir
from clustertune.storage import is_full, storage_cause
from clustertune.training.stop import StopFlag

RECORD_BYTES = 4096
"""Reserved for a rank's record: one block of common file systems."""


def main(run_dir: Path, attempt: int, *, quiet: bool = False) -> int:
    """Train this rank's part of a prepared run. Returns the exit code; it and the reason are left in the attempt's folder."""
    stop = StopFlag()
    stop.install()
    rank = int(os.environ.get("RANK", "0"))
    run = RunDir(run_dir)
    records = run.attempt(attempt)
    if not _bind_to_launcher(records / LAUNCHER_PID):
        return int(ExitCode.AGAIN)
    records.mkdir(parents=True, exist_ok=True)
    _reserve(records / f"rank-{rank}.json")
    (records / f"rank-{rank}.pid").write_text(f"{os.getpid()}\n")
    out = _redirect_output(records / f"rank-{rank}.log", show=rank == 0 and not quiet)
    code, problems = ExitCode.OK, []
    try:
        code = train(run, attempt, stop, out)
    except UserError as error:
        code, problems = error.code, [asdict(p) for p in error.problems]
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        known = _explain(error, records / f"rank-{rank}.log")
        code, problems = known.code, [asdict(p) for p in known.problems]
    record = {"rank": rank, "code": int(code), "time": time.time(), "problems": problems}
    for leave in (lambda: _fill(records / f"rank-{rank}.json", record), sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(OSError):
            leave()
    if code not in (ExitCode.OK, ExitCode.AGAIN):
        # Other ranks may wait in a collective for this one: leave without the interpreter's orderly end.
        _finish_tracker(int(code))
        os._exit(code)
    return int(code)


def _reserve(path: Path) -> None:
    """Take the room of this rank's record: what a full disk did must be told on a full disk. Blanks are no record."""
    path.write_bytes(b" " * RECORD_BYTES)


def _fill(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record over the reserved blanks."""
    with path.open("r+b") as out:
        out.write(json.dumps(record).encode().ljust(RECORD_BYTES - 1) + b"\n")


def _bind_to_launcher(pid_file: Path) -> bool:
    """Die with the parent process. False where the launcher has ended already: a job without it waits half an hour for it."""
    if not pid_file.exists():  # srun, torchrun and others: they look after their processes, and a save may still succeed
        die_with_parent(signal.SIGTERM)
        return True
    # With the command or its launcher killed, its lock on the run folder is gone too: nobody may go on writing there.
    die_with_parent(signal.SIGKILL)
    return pid_file.read_text().strip() == str(os.getppid())


def _explain(error: BaseException, log: Path) -> UserError:
    """What ended this rank: the storage, where the system says so or has no room left, an interruption, or a fault."""
    if isinstance(error, KeyboardInterrupt):
        return UserError(Problem("interrupted", fix="run the same command again to go on"), ExitCode.AGAIN)
    if (said := storage_cause(error)) is not None:
        return storage_error(said, "training stopped", Path(said.filename or log.parent))
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    if is_full(log.parent):
        problem = Problem(f"no space left: {first}", file=str(log), fix="free space, then run the same command again")
        return UserError(problem, ExitCode.STORAGE)
    return UserError(Problem(first, file=str(log)), ExitCode.FAILED)


def _finish_tracker(code: int) -> None:
    """Close W&B's offline file, which its exit handler would do."""
    if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
        with contextlib.suppress(Exception):
            wandb.finish(exit_code=code)


def _redirect_output(log: Path, *, show: bool) -> TextIO:
    """Send all that libraries print to ``log``; return a stream to the launcher's stdout for what people should see."""
    seen = _Forgiving(os.fdopen(os.dup(1) if show else os.open(os.devnull, os.O_WRONLY), "wb", 0))
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    return seen


class _Forgiving(io.TextIOWrapper):
    """A text stream whose reader may go away (a closed terminal, ``| head``): training does not stop for its audience."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(raw, encoding="utf-8", errors="replace", line_buffering=True, write_through=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def train(run: RunDir, attempt: int, stop: StopFlag, out: TextIO) -> ExitCode:
    """Build the trainer, resume from the newest whole checkpoint, train, and say how it ended."""
    resolved = run.resolved()
    notes = _set_environment(resolved, run)

    from clustertune.training.session import Session

    session = Session.build(run.path, resolved, stop, out, attempt, notes)
    store = CheckpointStore(run.checkpoints, attempt, resolved.train_args.get("save_total_limit"), session.group, session.tell)
    latest = store.latest()
    if latest and latest[1].get("final"):
        session.tell(f"{latest[0].name} is the final checkpoint: nothing is left to train")
        return ExitCode.OK
    trainer = session.make_trainer(
        store, model_source(run, resolved), run.data, lambda folder: _describe(folder, resolved), _report_distribution(run)
    )
    return session.run(trainer, latest)


def model_source(run: RunDir, resolved: Resolved) -> tuple[str, str | None]:
    """Where the base model is read from: a folder, or a Hub id and its commit."""
    if resolved.recipe.model.weights == "random":
        return str(run.local_model(resolved.recipe.model.name)), None
    return resolved.recipe.model.path or resolved.recipe.model.name, resolved.recipe.model.revision


def _set_environment(resolved: Resolved, run: RunDir) -> list[str]:
    """What accelerate and the trackers read from the environment; before either is imported."""
    if Path(model_source(run, resolved)[0]).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # PEFT asks the Hub for the base's config at every save otherwise
    import torch

    from clustertune.training import build, cpu_fsdp

    notes = []
    if not torch.cuda.is_available():
        fsdp = resolved.accelerate.get("fsdp_config") or {}
        notes = cpu_fsdp.set_environment(int(fsdp.get("fsdp_version", 1)) if fsdp else None)
        cpu_fsdp.install()
    build.set_tracker_environment(run.path, f"{resolved.name}-{resolved.fingerprint()[:12]}", "clustertune")
    return notes


def _describe(folder: Path, resolved: Resolved) -> None:
    """A checkpoint carries its recipe, so that it can be exported without its run folder."""
    (folder / "recipe.json").write_text(json.dumps(resolved.as_dict(), indent=1) + "\n")


def _report_distribution(run: RunDir) -> Any:
    def report(found: Mapping[str, Any]) -> None:
        run.update(distributed=dict(found))

    return report
