"""Processes and signals: what asks a run to stop, and how no rank outlives its launcher."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""SIGUSR1 is what ``sbatch --signal`` sends ahead of the limit, SIGTERM what ends a job, SIGINT a person's Ctrl-C."""


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send ``number`` to this process when its parent ends (Linux): no rank outlives its launcher."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request was in place
        os.kill(os.getpid(), number)
