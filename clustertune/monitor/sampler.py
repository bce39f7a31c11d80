"""The program beside a node's ranks: measures the node every ten seconds. A child of the agent, started by :class:`Agent`.

A process of its own and no thread: a driver whose GPU has left the bus can hold a call for ever, and the kernel would not end a
process with such a thread.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from clustertune.monitor import store
from clustertune.monitor.machine import NodeSampler
from clustertune.monitor.nvml import Gpus
from clustertune.monitor.store import TelemetryWriter
from clustertune.process import die_with_parent
from clustertune.report.telemetry import FOLDER, TelemetryRow

LEAST_SECONDS = 0.5
"""What a last row is written for."""


def listen_to_parent() -> None:
    """End with the parent, and with SIGTERM, where :func:`is_over` looks. What a scheduler or a terminal sends to every process
    is for the ranks: they are measured to their end."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(signal.SIGTERM)
    os.nice(10)


def is_over(seconds: float) -> bool:
    """Wait for so long at most; whether the end was asked for meanwhile."""
    return signal.sigtimedwait({signal.SIGTERM}, max(0.0, seconds)) is not None


def main(run: Path, attempt: int, node: int) -> None:
    """Sample until the parent ends or sends SIGTERM. Raises OSError where the run's storage fails: the ranks do not need us."""
    listen_to_parent()
    every = float(os.environ.get("CLUSTERTUNE_SAMPLE_SECONDS", store.TIERS[0][0]))
    gpus, machine = Gpus(), NodeSampler(run)
    host = os.uname().nodename
    about = {"host": host, "node": node, "cpus": os.cpu_count(), "gpus": gpus.names}
    before = time.monotonic()
    machine.sample(0.0)
    gpus.sample(0.0)
    about["energy"] = "counter" if gpus.counts_energy else "power samples" if gpus.names else None
    writer = TelemetryWriter(run / FOLDER, host, about)
    ended = False
    while not ended:
        ended = is_over(every - (time.monotonic() - before))
        now = time.monotonic()
        if ended and now - before < LEAST_SECONDS:
            return
        seconds, before = now - before, now
        writer.add(
            TelemetryRow(time.time(), attempt, machine.sample(seconds), tuple(gpus.sample(seconds)), dict(gpus.problems))
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
