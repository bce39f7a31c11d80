"""Processes and signals: what asks a run to stop, and how no rank outlives its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""SIGUSR1 is what ``sbatch --signal`` sends ahead of the limit, SIGTERM what ends a job, SIGINT a person's Ctrl-C."""


class Stopped(BaseException):
    """SIGTERM or SIGUSR1: the scheduler wants the machine back. No handler of errors on the way may swallow it."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The stop signals, and SIGHUP (a closed terminal) unless it is ignored here: ``nohup`` asks for that."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (*STOP_SIGNALS, *hangup)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Have ``handler`` called for each of the stop signals while the context lasts."""
    previous = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class StopFlag:
    """Set by SIGUSR1 (Slurm's ``--signal``), SIGTERM, SIGINT or SIGHUP; read at step boundaries and during eval."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def install(self) -> None:
        """Handle the stop signals from now on. A second SIGINT ends the rank at once."""
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def ask(self, why: str) -> None:
        """Ask to stop without a signal; ``why`` stands in the place of its name."""
        self.signal_name = self.signal_name or why

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None


def captured(
    command: Sequence[str | Path], seconds: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that gets no input, and keep what it says. Raises OSError, subprocess.TimeoutExpired."""
    return subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
        env=env,
    )


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock; 0 where ``/proc`` does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send ``number`` to this process when its parent ends (Linux): no rank outlives its launcher.

    ``parent``: its pid, for one that asks after its start, when the parent may have ended; None: the present one.
    """
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request was in place
        os.kill(os.getpid(), number)


def start(command: Sequence[str | Path], last: signal.Signals, **options: Any) -> subprocess.Popen[bytes]:
    """Start a program that leads a session, and gets the signal ``last`` when this process ends. Raises OSError.

    It ignores SIGUSR1, which would kill it. This process must have no other thread. ``options``: further arguments of Popen.
    """

    def in_child() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        die_with_parent(last)

    started = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
    return subprocess.Popen(list(command), preexec_fn=in_child, **started)  # noqa: PLW1509 - it calls libc only


def end(child: subprocess.Popen[Any], seconds: float) -> None:
    """Ask a child to end (SIGTERM), and kill it where it has not within ``seconds``."""
    for ask, patience in ((child.terminate, seconds), (child.kill, 10)):  # a child that hangs in a driver cannot be ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            ask()
            child.wait(patience)
            return


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads a session, with all that it started; SIGKILL ends a stopped process, too."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a child that hangs in a driver cannot be ended
        child.wait(10)
