"""Rows that cannot be used: where each stands, why it is out, how many there are of each kind."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from clustertune.errors import Problem, UserError

SHOWN = 20
"""Bad rows that a refusal lists; the rest is in the count."""

NOT_A_FAULT = "no-assistant-reply"
"""A prompt that nobody answered is left out and counted, but it is a whole row: ``bad_rows: stop`` does not stop at it."""


@dataclass(frozen=True)
class Place:
    """Where a record stands."""

    file: str
    """Name of the file below the input, or ``dataset/split`` for the Hub."""
    line: int
    """Line of the file (of the record's first character in a JSON array), or row number in Parquet and the Hub; from 1."""
    split: str | None = None
    """``train`` or ``eval`` where the input has splits of its own."""
    row: int = 0
    """Number of the record in its file, from 1."""


@dataclass(frozen=True)
class Reject:
    """One row that is left out."""

    file: str
    line: int
    reason: str
    detail: str


class BadRow(Exception):
    """Raised while one record is read: the record is out for ``reason``, the next one is looked at."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Rejects:
    """Counts rejected rows and writes each to ``sink`` at once, so that a file of bad rows costs no memory."""

    def __init__(self, sink: IO[str]) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[Reject] = []
        self._sink = sink

    def add(self, place: Place, reason: str, detail: str) -> None:
        """Count and write one rejected row."""
        reject = Reject(place.file, place.line, reason, detail)
        self.counts[reason] += 1
        self._sink.write(json.dumps(asdict(reject)) + "\n")
        if reason != NOT_A_FAULT and len(self.faults) < SHOWN:
            self.faults.append(reject)

    @property
    def total_faults(self) -> int:
        """Rows that are really wrong."""
        return sum(self.counts.values()) - self.counts[NOT_A_FAULT]

    def refuse(self, root: Path | None, shown_input: str) -> UserError:
        """The error of ``bad_rows: stop``: the total, then the first rows with file and line."""
        total = self.total_faults
        more = f", the first {SHOWN} follow" if total > SHOWN else ""
        problems = [
            Problem(
                f"{total} bad row{'s' if total > 1 else ''} ({count_words(self.counts)}){more}",
                file=shown_input,
                fix="fix them, or leave them out with data.bad_rows=skip",
            )
        ]
        for reject in self.faults:
            file = str(root / reject.file) if root else reject.file
            problems.append(Problem(f"{reject.reason}: {reject.detail}", file=f"{file}:{reject.line}"))
        return UserError(problems)


def count_words(counts: Counter[str]) -> str:
    """``empty-text 3, cycle 2``."""
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common())


def excerpt(value: object, width: int = 60) -> str:
    """A value for a message: scalars cut to ``width``, containers by their type only (they may be 5,000 levels deep)."""
    if isinstance(value, dict | list):
        return {"dict": "an object", "list": "a list"}[type(value).__name__]
    if isinstance(value, str):
        value = value if len(value) <= width else value[:width] + "..."
    shown = ascii(value)
    return shown if len(shown) <= 3 * width else shown[: 3 * width] + "..."
