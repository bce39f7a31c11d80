"""The program of one training rank: every launcher starts this, once per GPU (or per process where there is none)."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import io
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from clustertune import manifest, secrets
from clustertune.checkpoint.store import Cadence, CheckpointStore
from clustertune.errors import ExitCode, Problem, UserError, is_full, storage_cause, storage_error
from clustertune.evaluate.during import is_kept
from clustertune.launch.agent import launcher_pid_file
from clustertune.launch.attempt import PLAN, AttemptPlan, check_fence
from clustertune.launch.environment import one_gpu
from clustertune.monitor.sampler import gpu_names
from clustertune.plan.schedule import seconds_between_ends
from clustertune.process import StopFlag, die_with_parent
from clustertune.report import cost
from clustertune.report.cost import failures
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import UNSAVED, RunDir
from clustertune.staging import bundle, needs, staging_step
from clustertune.staging.hashed_copy import amount
from clustertune.training import event_log
from clustertune.training.engine import engine_of
from clustertune.training.event_log import Attempt, Heartbeat

if TYPE_CHECKING:
    from clustertune.training.session import Session

BUDGET = "its budget is used up"
"""Why a run was asked to stop, in the place of a signal's name."""
RECORD_BYTES = 4096
"""Reserved for a rank's record: one block of common file systems."""


def main(run_dir: Path, attempt: int, *, quiet: bool = False) -> int:
    """Train this rank's part of a prepared run. Returns the exit code; it and the reason are left in the attempt's folder."""
    stop = StopFlag()
    stop.install()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # asked of a rank that hangs: its stacks go to its log
    rank = int(os.environ.get("RANK", "0"))
    run = RunDir(run_dir)
    records = run.attempt(attempt)
    if not _bind_to_launcher(launcher_pid_file(records, _node_of(rank, records))):
        return int(ExitCode.AGAIN)
    records.mkdir(parents=True, exist_ok=True)
    _reserve(records / f"rank-{rank}.json")
    (records / f"rank-{rank}.pid").write_text(f"{os.getpid()}\n")
    heartbeat = Heartbeat(records / f"rank-{rank}.heartbeat")
    heartbeat("start")
    out = _redirect_output(records / f"rank-{rank}.log", show=rank == 0 and not quiet)
    code, problems, orderly, superseded = ExitCode.OK, [], False, False
    try:
        check_fence(run.path, attempt)
        code = train(run, attempt, stop, heartbeat, out)
        if code is ExitCode.AGAIN and stop.signal_name == BUDGET:
            budget = run.resolved().recipe.budget
            assert budget is not None
            raise cost.over(budget)
        orderly = True
    except BaseException as error:
        superseded = (newer := _superseded(run.path, attempt)) is not None
        if not isinstance(error, UserError):
            with contextlib.suppress(OSError):
                traceback.print_exc()
        known = newer or _explain(error, records / f"rank-{rank}.log")
        code, problems = known.code, [asdict(p) for p in known.problems]
    heartbeat("end")
    record = {"rank": rank, "host": os.uname().nodename, "step": heartbeat.step, "code": int(code), "time": time.time()}
    for leave in (
        lambda: _fill(records / f"rank-{rank}.json", {**record, "problems": problems}),
        sys.stdout.flush,
        sys.stderr.flush,
    ):
        with contextlib.suppress(OSError):
            leave()
    # Another attempt continues with this run at W&B: to close it here would mark it as ended.
    closed = not superseded and event_log.finish_wandb(int(code))
    if not (orderly and closed):
        # Other ranks may wait in a collective for this one, and W&B at exit for a server that does not answer.
        os._exit(code)
    return int(code)


def _node_of(rank: int, records: Path) -> int:
    """The node of a rank, by the attempt's plan; 0 where there is none that can be read (which :func:`train` tells)."""
    try:
        return rank // AttemptPlan.read(records).ranks_per_node
    except (UserError, ZeroDivisionError):
        return 0


def _superseded(run_path: Path, attempt: int) -> UserError | None:
    """What the fence says: whatever failed in an attempt that another one has followed is no news to anybody."""
    try:
        check_fence(run_path, attempt)
    except UserError as error:
        return error
    return None


def _reserve(path: Path) -> None:
    """Take the room of this rank's record: what a full disk did must be recorded on a full disk. Blanks are not a record."""
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
    # With the command or its launcher killed, its lock on the run folder is gone too: no rank may continue writing there.
    die_with_parent(signal.SIGKILL)
    return pid_file.read_text().strip() == str(os.getppid())


def _explain(error: BaseException, log: Path) -> UserError:
    """What ended this rank: the storage, where the system says so or has no room left, an interruption, or a fault."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return UserError("interrupted", fix="run the same command again to continue", code=ExitCode.AGAIN)
    if (cause := storage_cause(error)) is not None:
        return storage_error(cause, "training stopped", Path(cause.filename or log.parent))
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    if is_full(log.parent):
        problem = Problem(f"no space left: {first}", file=str(log), fix="free space, then run the same command again")
        return UserError(problem, ExitCode.STORAGE)
    return UserError(first, file=str(log), code=ExitCode.FAILED)


def _redirect_output(log: Path, *, show: bool) -> TextIO:
    """Send all that libraries print to ``log``; return a stream to the launcher's stdout for what people should see."""
    seen = _Forgiving(os.fdopen(os.dup(1) if show else os.open(os.devnull, os.O_WRONLY), "wb", 0))
    fd = manifest.open_plain(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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


def train(run: RunDir, number: int, stop: StopFlag, heartbeat: Heartbeat, out: TextIO) -> ExitCode:
    """Build the trainer, resume from the newest whole checkpoint, train, and say how it ended."""
    resolved = run.resolved()
    engine = engine_of(resolved)
    records = run.attempt(number)
    plan = AttemptPlan.read(records) if engine is not None or (records / PLAN).exists() else None
    if plan is not None and _is_first():
        _limit(run, resolved, number, stop)
    keys = _take_secrets()
    near = staging_step.local_folders(records, _node_of(int(os.environ.get("RANK", "0")), records))
    source = (str(near["model"]), None) if "model" in near else needs.base_of(resolved, run).source

    def fence() -> None:
        check_fence(run.path, number)

    attempt = Attempt(run, resolved, number, stop, heartbeat, fence, out, source, _follow_plan(plan), keys, plan)
    if engine is not None:
        bundle.enter(resolved)
        return engine.train(attempt)
    attempt.notes += _set_environment(resolved, run, source[0], has_key="WANDB_API_KEY" in keys)

    from clustertune.training.session import Session

    session, save = Session(attempt), resolved.recipe.save
    limit, stays = resolved.train_args["save_total_limit"], partial(is_kept, run, resolved.recipe)
    store = CheckpointStore(run.checkpoints, number, limit, session.group, session.tell, fence, stays)
    with session.startup.part("digests"):
        latest = store.latest()
    if latest and latest[1].get("final"):
        session.tell(f"{latest[0].name} is the final checkpoint: nothing is left to train")
        return ExitCode.OK

    data = near.get("data", run.tokens)
    sys.stderr.write(f"base model from {source[0]}, tokens from {data}\n")
    if session.log is not None and plan is not None:
        _tell_staged(run, session, staging_step.read_records(records, len(plan.nodes)))
    trainer = session.make_trainer(store, data)
    if (during := resolved.recipe.eval.during) is not None:
        trainer.is_score_due = partial(during.is_due, milestones=resolved.recipe.milestones)
        trainer.ends_for_scores = not resolved.recipe.scores_beside
    if save is not None:
        trainer.cadence = Cadence(save, _between_ends(run, plan))
    trainer.saves = UNSAVED not in os.environ
    return session.run(latest)


def _between_ends(run: RunDir, plan: AttemptPlan | None) -> float:
    """Seconds between two failures of the nodes of an attempt; the time limit of its job counts as one.

    The rate of failures is the cluster file's, else this run's own, else a published one. Infinite on ranks other than the
    first, which alone decides when a save is due.
    """
    if not _is_first():
        return math.inf
    cluster = run.read().get("cluster") or {}
    mtbf = cluster.get("compute", {}).get("mtbf_hours") or failures(cost.of_attempts(run.path)).mtbf_hours
    nodes, limit = (len(plan.nodes), plan.limit_minutes) if plan is not None else (1, None)
    return seconds_between_ends(nodes, mtbf, limit)


def _is_first() -> bool:
    """Whether this is rank 0."""
    return os.environ.get("RANK", "0") == "0"


def _limit(run: RunDir, resolved: Resolved, number: int, stop: StopFlag) -> None:
    """Have the run stop at a step once its budget is used up. Raises UserError (exit 2) for dollars without a price."""
    if (budget := resolved.recipe.budget) is None:
        return
    names = gpu_names() if budget.usd is not None else []
    left = cost.deadline(run, budget, number, names) - time.time()
    timer = threading.Timer(max(0.0, left), stop.ask, [BUDGET])
    timer.daemon = True
    timer.start()


def _tell_staged(run: RunDir, session: Session, records: list[dict[str, Any]]) -> None:
    """What each node copied to its own disk, into the metrics and the run's record; nothing where none did."""
    for record in records:
        assert session.log is not None
        session.log.write("staged", **record)
        for tree in record["trees"]:
            how = "was there" if tree["reused"] else f"{tree['seconds']:.1f} s, {tree['gb_s']:.2f} GB/s"
            session.tell(f"staged on {record['host']}: {tree['name']}, {amount(tree['bytes'])}, {how}")
        for text in record["warnings"]:
            session.tell(f"warning: {record['host']}: {text}")
    if records:
        run.update(staged=records)


def _take_secrets() -> dict[str, str]:
    """The user's tokens, out of the environment; rank 0 reads ``.env``, the others have no use for it."""
    if _is_first():
        secrets.apply_env()
    return secrets.drop()


def _follow_plan(plan: AttemptPlan | None) -> list[str]:
    """The plan's variables, before torch is loaded. Returns a note for what was otherwise before."""
    if plan is None:
        return []
    notes = []
    for key, value in plan.environment.items():
        if (before := os.environ.get(key)) not in (None, value):
            notes.append(f"{key}={value} by the plan of this attempt; it was {before} in the environment")
        os.environ[key] = value
    return notes


def _set_environment(resolved: Resolved, run: RunDir, model: str, *, has_key: bool) -> list[str]:
    """What accelerate and the trackers read from the environment; before either is imported."""
    bundle.enter(resolved)
    os.environ.update(one_gpu(resolved.world_size, os.environ))
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # PEFT asks the Hub for the base's config at every save otherwise
    from clustertune.training import build

    build.set_environment(run.accelerate_file, resolved.world_size, alone=resolved.distribution.kind == "NO")
    import torch

    from clustertune.training import build, deepspeed_engine

    notes = deepspeed_engine.set_environment(resolved, _tracker_id(run, resolved), cuda=torch.cuda.is_available())
    if not torch.cuda.is_available() and not resolved.distribution.is_deepspeed:
        build.use_cpu()
        build.install_cpu_fsdp()
    event_log.set_tracker_environment(run.path, _tracker_id(run, resolved), "clustertune", has_key=has_key)
    return notes


def _tracker_id(run: RunDir, resolved: Resolved) -> str:
    """W&B's id of this run: the same in all attempts, another one for the same recipe in another run folder."""
    body = run.read()
    digest = hashlib.sha256(f"{body.get('fingerprint')} {body.get('created')}".encode()).hexdigest()
    # W&B refuses ids with slashes, # ? % : and those of more than 64 characters.
    return f"{re.sub('[^A-Za-z0-9_-]', '-', resolved.name)[:40]}-{digest[:12]}"
