"""A sweep on this machine: one point after the other, each as a process of its own."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from clustertune import lock
from clustertune.console import say
from clustertune.rundir import keep_private
from clustertune.sweep.points import Point, Sweep

STOP_SECONDS = 300.0
"""For a run that is asked to stop: it ends the step it is in and saves."""


def run_command(sweep: Sweep, point: Point) -> list[str]:
    """``clustertune run`` of one point."""
    return [
        sys.executable,
        "-m",
        "clustertune",
        "run",
        point.recipe,
        *point.overrides,
        *(["--tiny"] if point.tiny else []),
        "--run-dir",
        str(point.run_dir),
        "--to",
        sweep.last,
    ]


def run_all(sweep: Sweep) -> list[int]:
    """Run the points that are left; one that fails does not hold up the others. Returns the numbers of those that failed."""
    failed = []
    keep_private()
    with lock.held(sweep.path / "lock", "works on this sweep", shown=sweep.path, fix="wait for it"):
        sweep.write()
        (sweep.path / "logs").mkdir(exist_ok=True)
        left = sweep.left()
        for number, point in enumerate(left, 1):
            began = time.perf_counter()
            say(f"point {point.index} ({number} of {len(left)}): {point.words}")
            code = _run(sweep, point, run_command(sweep, point))
            said = "done" if code == 0 else f"ended with exit code {code}, see {_log(sweep, point)}"
            say(f"point {point.index}: {said} ({time.perf_counter() - began:.1f} s)")
            if code:
                failed.append(point.index)
    return failed


def _log(sweep: Sweep, point: Point) -> str:
    return str(sweep.path / "logs" / f"point-{point.index:04d}.log")


def _run(sweep: Sweep, point: Point, command: Sequence[str]) -> int:
    with open(_log(sweep, point), "ab") as log:  # noqa: PTH123
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        # A session of its own: Ctrl-C reaches this process only, which then asks the run to save and stop.
        child = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            try:
                child.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            raise
