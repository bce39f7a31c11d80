"""The lease of a run folder: one job at a time, and a restarted job takes over from what is left of its earlier start."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from clustertune.console import say
from clustertune.errors import ExitCode, UserError
from clustertune.manifest import read_object, write_durably
from clustertune.rundir import RunDir

OWNER = "owner.json"
WAIT_SECONDS = 60.0
"""How long a restarted job waits for its former self to notice the new attempt and let go of the lock."""


@contextlib.contextmanager
def taken_over(run: RunDir, job: str, restart: int, is_running: Callable[[str], bool]) -> Iterator[None]:
    """Hold the run folder for a job. ``is_running`` tells whether another job, by its id, runs now.

    An earlier start of the same job (the scheduler restarted it: a node was lost or cut off) may still hold the lock on a node
    that the scheduler cannot reach. It exits as soon as it sees the new attempt's folder; where it cannot even see that,
    it cannot write here either. Raises UserError (exit 75) where another job or command works here, or a later start of this
    one: the late start of a cut-off node would fence off its own successor.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    path = run.path / OWNER
    owner = read_object(path)
    former = str(owner.get("job", "")) or None
    if former not in (None, job) and is_running(str(former)):
        fix = f"wait for job {former}, or cancel it: scancel {former}"
        raise UserError(f"job {former} works in this run folder", file=str(run.path), fix=fix, code=ExitCode.AGAIN)
    if former == job and int(str(owner.get("restart", 0))) > restart:
        raise UserError(f"a later start of job {job} owns this run; stopping this one", file=str(run.path), code=ExitCode.AGAIN)
    now = {"job": job, "restart": restart, "host": os.uname().nodename, "pid": os.getpid()}
    body = json.dumps(now) + "\n"
    with contextlib.ExitStack() as stack:
        if former == job:
            write_durably(path, body)
            run.new_attempt()  # what is left of the former self sees it, and ends
            _wait_for_lock(run, stack)
        else:
            stack.enter_context(run.lock())
            write_durably(path, body)
        yield


def _wait_for_lock(run: RunDir, stack: contextlib.ExitStack) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            stack.enter_context(run.lock())
            return
        except UserError as error:
            if time.monotonic() >= deadline:
                say(f"note: {error.problems[0].message}: an earlier start of this job, isolated; it can no longer write")
                return
        time.sleep(1)


def still_mine(run_path: Path, job: str, restart: int) -> bool:
    """Whether no later start of the job has taken over; also where that cannot be read now.

    One failed read on network storage is no reason to kill a training: the number of the newest attempt fences as well.
    """
    owner = read_object(run_path / OWNER)
    return not owner or (owner.get("job") == job and int(str(owner.get("restart", restart))) <= restart)
