"""Reading ``telemetry/`` of a run folder, which :mod:`clustertune.monitor.sampler` writes and describes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "telemetry"
Values = Mapping[str, float | None]


@dataclass(frozen=True)
class TelemetryRow:
    """What one node measured at one time."""

    time: float
    """Unix seconds of its end."""
    attempt: int
    """Negative: no attempt at training but the evaluation that began at that Unix second."""
    node: Values
    gpus: tuple[Values, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    """By GPU, or by what could not be read."""


@dataclass
class NodeTelemetry:
    """What a reader keeps of one node."""

    about: dict[str, Any] = field(default_factory=dict)
    last: TelemetryRow | None = None
    """Of a training."""
    joules: dict[int, float] = field(default_factory=dict)
    """By attempt, of all GPUs together."""


class History:
    """The course of all nodes together, minute by minute."""

    COLUMNS = ("utilisation", "memory_gib", "power_w", "cpu")
    """Of GPUs, and of nodes the last."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, tuple[float, int, float]]] = {}

    def add(self, row: TelemetryRow) -> None:
        """Take a row of any node, in any order."""
        if row.attempt < 0:
            return
        values = [(name, gpu.get(name)) for gpu in row.gpus for name in self.COLUMNS[:3]] + [("cpu", row.node.get("cpu"))]
        part = self._found.setdefault(int(row.time // 60), {})
        for name, value in values:
            if value is not None:
                total, count, most = part.get(name, (0.0, 0, value))
                part[name] = (total + value, count + 1, max(most, value))

    def column(self, name: str, *, most: bool = False) -> list[tuple[float, float]]:
        """Unix seconds of each minute's middle, and the mean of all GPUs (or nodes) in it, or the largest value."""
        return [
            (60 * (at + 0.5), part[name][2] if most else part[name][0] / part[name][1])
            for at, part in sorted(self._found.items())
            if name in part
        ]


class TelemetryReader:
    """Follows ``telemetry/``: each :meth:`read` takes what was appended since the one before, and keeps little of it."""

    def __init__(self, folder: Path, history: History | None = None) -> None:
        self.folder, self.history = folder, history
        self.nodes: dict[str, NodeTelemetry] = {}
        self._places: dict[Path, int] = {}
        """By file the byte that is read next."""

    def read(self) -> dict[str, NodeTelemetry]:
        """The nodes by the name of their files."""
        for path in sorted(self.folder.glob("*.jsonl")) if self.folder.is_dir() else ():
            with contextlib.suppress(OSError):
                self._follow(path)
        return self.nodes

    def _follow(self, path: Path) -> None:
        with path.open("rb") as lines:
            lines.seek(self._places.get(path, 0))
            node = self.nodes.setdefault(path.stem, NodeTelemetry())
            for row in parse(lines, node.about):
                self._take(node, row)
            self._places[path] = lines.tell()

    def _take(self, node: NodeTelemetry, row: TelemetryRow) -> None:
        if self.history is not None:
            self.history.add(row)
        if row.attempt >= 0 and (node.last is None or row.time >= node.last.time):
            node.last = row
        known = [joules for gpu in row.gpus if (joules := gpu.get("energy_j")) is not None]
        if known:
            node.joules[row.attempt] = max(node.joules.get(row.attempt, 0.0), sum(known))


def parse(lines: Any, about: dict[str, Any]) -> Iterator[TelemetryRow]:
    """The rows of lines, each by the columns of the head before it; ``about`` takes the newest head."""
    for line in iter(lines.readline, b""):
        if not line.endswith(b"\n"):  # it is being written, or its writer was killed
            lines.seek(-len(line), os.SEEK_CUR)
            return
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            body = json.loads(line)
            if isinstance(body, dict):
                about.update(body)
            elif len(body) >= 4:
                columns = about["gpu_columns"]
                gpus = tuple(dict(zip(columns, gpu, strict=False)) for gpu in body[3])
                node = dict(zip(about["node_columns"], body[2], strict=False))
                yield TelemetryRow(float(body[0]), int(body[1]), node, gpus, body[4] if len(body) > 4 else {})
