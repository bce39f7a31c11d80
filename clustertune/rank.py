"""The program of one training rank: every launcher starts this, once per GPU (or per process where there is none)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from clustertune.checkpoint.store import CheckpointStore
from clustertune.config.resolved import Resolved
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.process import die_with_parent
from clustertune.rundir import RunDir
from clustertune.training.stop import StopFlag


def main(run_dir: Path, attempt: int, *, quiet: bool = False) -> int:
    """Train this rank's part of a prepared run. Returns the exit code; it and the reason are left in the attempt's folder."""
    stop = StopFlag()
    stop.install()
    die_with_parent(signal.SIGTERM)
    rank = int(os.environ.get("RANK", "0"))
    run = RunDir(run_dir)
    records = run.attempt(attempt)
    records.mkdir(parents=True, exist_ok=True)
    (records / f"rank-{rank}.pid").write_text(f"{os.getpid()}\n")
    out = _redirect_output(records / f"rank-{rank}.log", show=rank == 0 and not quiet)
    code, problems = ExitCode.OK, []
    try:
        code = train(run, attempt, stop, out)
    except UserError as error:
        code, problems = error.code, [asdict(p) for p in error.problems]
    except BaseException as error:
        traceback.print_exc()
        code = ExitCode.FAILED
        problems = [asdict(Problem(f"{type(error).__name__}: {error}".splitlines()[0], file=str(records / f"rank-{rank}.log")))]
    record = {"rank": rank, "code": int(code), "time": time.time(), "problems": problems}
    (records / f"rank-{rank}.json").write_text(json.dumps(record) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (ExitCode.OK, ExitCode.AGAIN):
        # Other ranks may wait in a collective for this one: leave without the interpreter's orderly end.
        _finish_tracker(int(code))
        os._exit(code)
    return int(code)


def _finish_tracker(code: int) -> None:
    """Close W&B's offline file, which its exit handler would do."""
    if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
        with contextlib.suppress(Exception):
            wandb.finish(exit_code=code)


def _redirect_output(log: Path, *, show: bool) -> TextIO:
    """Send all that libraries print to ``log``; return a stream to the launcher's stdout for what people should see."""
    seen = os.fdopen(os.dup(1) if show else os.open(os.devnull, os.O_WRONLY), "w", buffering=1)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    return seen


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
