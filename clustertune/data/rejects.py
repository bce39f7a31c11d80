"""Rows that cannot be used: where each stands, why it is out, how many there are of each kind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from clustertune.errors import Problem, UserError

SHOWN = 20
"""Bad rows that a refusal lists; the rest is in the count."""
LOOKED_AT = 100
"""Bad rows that are looked at for another format, and columns that are listed as not used."""

NOT_A_FAULT = "no-assistant-reply"
"""A prompt without an answer is left out and counted, but it is a whole row: ``bad_rows: stop`` does not stop at it."""


@dataclass(frozen=True)
class RowLocation:
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
        self.rows = 0
        """All rows that were read, good and bad: messages in a file of trees, else records."""
        self.counts: Counter[str] = Counter()
        self.faults: list[Reject] = []
        self.unused: set[str] = set()
        """Columns of the input, and fields of its messages, that no example holds."""
        self.looks_like: Counter[str] = Counter()
        """The settings with which bad rows could be read."""
        self.columns: list[str] = []
        """Those of the first bad row."""
        self._sink = sink

    def good(
        self, records: Iterable[tuple[RowLocation, dict[str, Any] | BadRow]], known: Iterable[str], columns: Mapping[str, str]
    ) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
        """The records that are rows; the others are rejected. ``columns``: the input's names of the ``known`` ones."""
        ours = set(known)
        for location, record in records:
            if isinstance(record, BadRow):
                self.rows += 1
                self.add(location, record.reason, record.detail)
                continue
            given = {name: record[theirs] for name, theirs in columns.items() if theirs in record}
            row = {key: value for key, value in record.items() if key not in columns.values()} | given if columns else record
            self.leave_out(key for key in row.keys() - ours if row[key] is not None)
            yield location, row

    def leave_out(self, names: Iterable[str]) -> None:
        """Remember what no example holds; of rows that each have other columns, the first :data:`LOOKED_AT`."""
        if len(self.unused) < LOOKED_AT:
            self.unused.update(map(str, names))

    def look(self, row: dict[str, Any], recognise: Callable[[dict[str, Any]], str | None]) -> None:
        """Remember what format a bad row may have; the first :data:`LOOKED_AT` are looked at."""
        if self.total_faults <= LOOKED_AT:
            self.columns = self.columns or [str(key) for key in row][:SHOWN]
            if (found := recognise(row)) is not None:
                self.looks_like[found] += 1

    def add(self, location: RowLocation, reason: str, detail: str) -> None:
        """Count and write one rejected row."""
        reject = Reject(location.file, location.line, reason, detail)
        self.counts[reason] += 1
        self._sink.write(json.dumps(asdict(reject)) + "\n")
        if reason != NOT_A_FAULT and len(self.faults) < SHOWN:
            self.faults.append(reject)

    @property
    def total_faults(self) -> int:
        """Rows that are really wrong."""
        return sum(self.counts.values()) - self.counts[NOT_A_FAULT]

    @property
    def share(self) -> float:
        """Of the rows, those that are really wrong."""
        return self.total_faults / max(self.rows, 1)

    def refuse(self, text: str, fix: str, root: Path | None, shown_input: str) -> UserError:
        """An error that says ``text``, and then names the first bad rows with file and line."""
        problems = [Problem(text, file=shown_input, fix=fix)]
        for reject in self.faults:
            file = str(root / reject.file) if root else reject.file
            problems.append(Problem(f"{reject.reason}: {reject.detail}", file=f"{file}:{reject.line}"))
        return UserError(problems)

    def hint(self, format_name: str) -> str:
        """What to do where rows are not of the format that the recipe names."""
        (looks, count), *_ = self.looks_like.most_common(1) or [("", 0)]
        if count and looks != f"data.format: {format_name}":
            return f"the rows look like {looks}"
        if not self.counts["wrong-column"]:
            return "fix them"
        there = (
            f"; the columns are {', '.join(self.columns)}: data.columns gives them the format's names" if self.columns else ""
        )
        return f"is data.format={format_name} right?{there}"


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
