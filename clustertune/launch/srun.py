"""Run one attempt as a step of a Slurm job: start it, pass on the warning, and let go when another start has taken over."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from clustertune.process import die_with_parent, stop_signals

POLL_SECONDS = 0.5
END_SECONDS = 60.0
"""How long a step may take to end after a node of it has failed: 20 s for the others' words, then Slurm's KillWait (30 s)."""


def run_step(
    command: Sequence[str],
    signals: list[int],
    still_mine: Callable[[], bool],
    failed: Callable[[], bool] = lambda: False,
    ask: Callable[[], None] | None = None,
) -> int:
    """Run ``srun`` to its end. Returns its exit code; signals that came meanwhile are added to ``signals``.

    SIGUSR1 goes on through srun to every process of the step: measured on Slurm 22.05, also to those in sessions of their
    own. SIGTERM Slurm itself sends to all of them; where only the batch script got it, it is passed on as SIGUSR1, which
    asks for a save. ``failed`` tells whether a node has said that it failed: srun waits without end for the tasks of a node
    that lost its power and came back before Slurm noticed. ``ask`` asks the ranks for a save in place of SIGUSR1 through srun.
    """
    child = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, preexec_fn=in_srun)  # noqa: PLW1509 - libc only
    previous = {number: signal.signal(number, _forward(child, signals, ask)) for number in stop_signals()}
    since: float | None = None
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(POLL_SECONDS)
            now = time.monotonic()
            if since is None and failed():
                since = now
            if (since is not None and now - since > END_SECONDS) or not still_mine():
                child.kill()
                return child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _forward(child: subprocess.Popen[bytes], signals: list[int], ask: Callable[[], None] | None) -> Any:
    def handle(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if ask is not None:
            with contextlib.suppress(OSError):  # a full disk: the signal then, which is better than nothing
                ask()
                return
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGUSR1)

    return handle


def in_srun() -> None:
    """Before srun begins: it ends with this process."""
    die_with_parent(signal.SIGTERM)
