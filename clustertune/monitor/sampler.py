"""The program beside a node's ranks: measures the node again and again. A child of the agent, started by :class:`Agent`.

A process of its own and no thread: a driver whose GPU has left the bus can hold a call for ever, and the kernel would not end a
process with such a thread.

``telemetry/NODE.jsonl`` of a run folder holds every sample. The first line, which each start repeats, names the columns. A row
is ``[unix seconds, attempt, [node's values], [[values of each GPU], ...], problems]``, the last only where there are some.
Samples become rarer (:func:`seconds_between`), and nothing is ever rewritten.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.manifest import open_plain
from clustertune.monitor.readings import COLUMNS, GPU_COLUMNS, Gpus, sample_node
from clustertune.process import die_with_parent
from clustertune.report.telemetry import FOLDER, TelemetryRow, Values

LEAST_SECONDS = 0.5
"""What a last row is written for."""


def listen_to_parent(pid: int) -> None:
    """End with the parent, whose ``pid`` it is, and with SIGTERM, where :func:`is_over` looks.

    What a scheduler or a terminal sends to every process is for the ranks: they are measured to their end.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(signal.SIGTERM, pid)
    os.nice(10)


def is_over(seconds: float) -> bool:
    """Wait for so long at most; whether the end was asked for meanwhile."""
    return signal.sigtimedwait({signal.SIGTERM}, max(0.0, seconds)) is not None


def main(parent: int, run: Path, attempt: int, node: int) -> None:
    """Sample until the parent ends or sends SIGTERM. Raises OSError where the run's storage fails, and UserError
    where a link or a pipe is in the place of a file: the ranks do not need us."""
    listen_to_parent(parent)
    every = float(os.environ.get("CLUSTERTUNE_SAMPLE_SECONDS", "0"))
    gpus = Gpus()
    host = os.uname().nodename
    about = {"host": host, "node": node, "cpus": os.cpu_count(), "gpus": gpus.names}
    began = before = time.monotonic()
    sample_node(run)
    gpus.sample(0.0)
    about["energy"] = "counter" if gpus.counts_energy else "power samples" if gpus.names else None
    writer = TelemetryWriter(run / FOLDER, host, about)
    ended = False
    while not ended:
        ended = is_over((every or seconds_between(before - began)) - (time.monotonic() - before))
        now = time.monotonic()
        if ended and now - before < LEAST_SECONDS:
            return
        seconds, before = now - before, now
        writer.add(TelemetryRow(time.time(), attempt, sample_node(run), tuple(gpus.sample(seconds)), dict(gpus.problems)))


# --- the files -------------------------------------------------------------------------------------------------------


def seconds_between(age: float) -> float:
    """Seconds to the next sample of a sampler that runs for ``age`` seconds: a month of 64 nodes with 8 GPUs is 250 MB."""
    return 10.0 if age < 3600 else 60.0 if age < 86400 else 300.0


def line(row: TelemetryRow) -> str:
    """A row as it stands in a file."""
    parts = [round(row.time, 1), row.attempt, _rounded(row.node, COLUMNS)]
    parts.append([_rounded(gpu, GPU_COLUMNS) for gpu in row.gpus])
    return json.dumps([*parts, dict(row.problems)] if row.problems else parts, separators=(",", ":")) + "\n"


def _rounded(values: Values, columns: Mapping[str, int]) -> list[float | None]:
    found = []
    for name, digits in columns.items():
        value = values.get(name)
        found.append(None if value is None else round(value, digits) if digits else round(value))
    return found


class TelemetryWriter:
    """Appends the rows of one node. ``about``: what the first line of its files says beside the columns. Raises OSError."""

    def __init__(self, folder: Path, name: str, about: Mapping[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "is a link", str(folder))
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}.jsonl"
        with os.fdopen(open_plain(self.path, os.O_RDONLY | os.O_CREAT), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = file.read() not in (b"", b"\n")
        head = {**about, "node_columns": list(COLUMNS), "gpu_columns": list(GPU_COLUMNS)}
        append(self.path, ("\n" if torn else "") + json.dumps(head, separators=(",", ":")) + "\n")

    def add(self, row: TelemetryRow) -> None:
        """Append a row."""
        append(self.path, line(row))


def append(path: Path, text: str) -> None:
    """Add to a file, which is made where there is none; a link is not followed. Raises OSError."""
    handle = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
