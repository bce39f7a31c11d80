"""Processes and signals: what asks a run to stop, and how no rank outlives its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""SIGUSR1 is what ``sbatch --signal`` sends ahead of the limit, SIGTERM what ends a job, SIGINT a person's Ctrl-C."""


class Stopped(BaseException):
    """SIGTERM or SIGUSR1: the scheduler wants the machine back. No handler of errors on the way may swallow it."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The stop signals, and SIGHUP (a closed terminal) unless it is ignored here: ``nohup`` asks for that."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (*STOP_SIGNALS, *hangup)


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock; 0 where ``/proc`` does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send ``number`` to this process when its parent ends (Linux): no rank outlives its launcher."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request was in place
        os.kill(os.getpid(), number)
