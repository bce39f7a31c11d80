"""The program beside a node's ranks: measures the node every ten seconds. A child of the agent, started by :class:`Agent`.

A process of its own and no thread: a driver whose GPU has left the bus can hold a call for ever, and the kernel would not end a
process with such a thread.

``telemetry/`` of a run folder: what every node measured, in small append-only files that are thinned with age.

``NODE.10s.jsonl`` holds every sample of at least the last half hour, ``NODE.60s.jsonl`` one row a minute of at least the last
six hours, ``NODE.900s.jsonl`` one row a quarter of an hour of the whole run. The first line names the columns; a row is
``[unix seconds, attempt, [node's values], [[values of each GPU], ...], problems]``, the last only where there are some. Joined
rows keep the mean, the largest or the last value, as the column says. A file that is full becomes ``.old`` and takes the
place of the one before: nothing is ever rewritten, and 64 nodes of 8 GPUs need about 150 MB in a month.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import operator
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertune.manifest import open_plain
from clustertune.monitor.readings import COLUMNS, GPU_COLUMNS, Gpus, NodeSampler
from clustertune.process import die_with_parent
from clustertune.report.telemetry import FOLDER, TelemetryRow, Values, read_rows

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
    """Sample until the parent ends or sends SIGTERM. Raises OSError where the run's storage fails, and UserError
    where a link or a pipe is in the place of a file: the ranks do not need us."""
    listen_to_parent()
    every = float(os.environ.get("CLUSTERTUNE_SAMPLE_SECONDS", TIERS[0][0]))
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


# --- the files -------------------------------------------------------------------------------------------------------


TIERS = ((10, 180), (60, 360), (900, None))
"""Seconds of a row, and after how many rows a file is replaced (so that up to twice as many are kept)."""
_JOIN: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "last": lambda values: values[-1],
    "or": lambda values: functools.reduce(operator.or_, map(int, values)),
}


def line(row: TelemetryRow) -> str:
    """A row as it stands in a file."""
    parts = [round(row.time, 1), row.attempt, _rounded(row.node, COLUMNS)]
    parts.append([_rounded(gpu, GPU_COLUMNS) for gpu in row.gpus])
    return json.dumps([*parts, dict(row.problems)] if row.problems else parts, separators=(",", ":")) + "\n"


def _rounded(values: Values, columns: Mapping[str, tuple[str, int]]) -> list[float | None]:
    found = []
    for name, (_, digits) in columns.items():
        value = values.get(name)
        found.append(None if value is None else round(value, digits) if digits else round(value))
    return found


def join(rows: Sequence[TelemetryRow]) -> TelemetryRow:
    """One row for several of one attempt, oldest first."""
    last = rows[-1]
    gpus = tuple(_joined([row.gpus[at] for row in rows if at < len(row.gpus)], GPU_COLUMNS) for at in range(len(last.gpus)))
    problems = {key: text for row in rows for key, text in row.problems.items()}
    return TelemetryRow(last.time, last.attempt, _joined([row.node for row in rows], COLUMNS), gpus, problems)


def _joined(rows: Sequence[Values], columns: Mapping[str, tuple[str, int]]) -> Values:
    found: dict[str, float | None] = {}
    for name, (how, _) in columns.items():
        known = [value for row in rows if (value := row.get(name)) is not None]
        found[name] = _JOIN[how](known) if known else None
    return found


class TelemetryWriter:
    """Appends the rows of one node. ``about``: what the first line of its files says beside the columns. Raises OSError."""

    def __init__(self, folder: Path, name: str, about: Mapping[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "is a link", str(folder))
        self.folder, self.name = folder, re.sub(r"[^A-Za-z0-9_.-]", "-", name)
        head = {**about, "node_columns": list(COLUMNS), "gpu_columns": list(GPU_COLUMNS)}
        self.head = json.dumps(head, separators=(",", ":")) + "\n"
        self._counts = dict.fromkeys((seconds for seconds, _ in TIERS), 0)
        self._waiting: dict[int, list[TelemetryRow]] = {seconds: [] for seconds, _ in TIERS[1:]}
        for seconds, _ in TIERS:
            self._counts[seconds] = self._begin(self._path(seconds))
        self._take_up()

    def _path(self, seconds: int) -> Path:
        return self.folder / f"{self.name}.{seconds}s.jsonl"

    def _begin(self, path: Path) -> int:
        """Write the head, which each start repeats; return how many lines there were."""
        with os.fdopen(open_plain(path, os.O_RDONLY | os.O_CREAT), "rb") as file:
            before = file.read()
        append(path, ("\n" if before and not before.endswith(b"\n") else "") + self.head)
        return before.count(b"\n")

    def _take_up(self) -> None:
        """What an earlier start had measured and not joined yet."""
        # The coarsest first: what the finer ones then complete is added to it.
        for (fine, _), (coarse, _) in reversed(list(itertools.pairwise(TIERS))):
            done = max((row.time for row in read_rows([self._path(coarse)])), default=0.0)
            for row in read_rows([_old(self._path(fine)), self._path(fine)]):
                if row.time > done:
                    self._join_later(coarse, row)

    def add(self, row: TelemetryRow) -> None:
        """Take a row of the finest kind."""
        self._write(TIERS[0][0], row)

    def _write(self, seconds: int, row: TelemetryRow) -> None:
        path, limit = self._path(seconds), dict(TIERS)[seconds]
        if limit is not None and self._counts[seconds] >= limit:
            path.replace(_old(path))
            append(path, self.head)
            self._counts[seconds] = 0
        append(path, line(row))
        self._counts[seconds] += 1
        coarser = next((tier for tier, _ in TIERS if tier > seconds), None)
        if coarser is not None:
            self._join_later(coarser, row)

    def _join_later(self, seconds: int, row: TelemetryRow) -> None:
        waiting = self._waiting[seconds]
        if waiting and (row.time // seconds != waiting[0].time // seconds or row.attempt != waiting[0].attempt):
            done, self._waiting[seconds] = join(waiting), [row]
            self._write(seconds, done)
        else:
            waiting.append(row)


def _old(path: Path) -> Path:
    return path.with_suffix(".old.jsonl")


def append(path: Path, text: str) -> None:
    """Add to a file, which is made where there is none; a link is not followed. Raises OSError."""
    handle = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
