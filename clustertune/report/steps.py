"""The optimizer steps of a run, in columns: a run of a million steps is read, drawn and compared in 300 MB."""

from __future__ import annotations

import heapq
import math
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import Any, NamedTuple, overload


class StepRecord(NamedTuple):
    """One optimizer step. What the line lacked, or held in another type, is None."""

    step: int
    attempt: int
    time: float | None = None
    """Unix seconds."""
    loss: float | None = None
    token_accuracy: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens: float | None = None
    """Tokens since the beginning of the run, over all ranks."""
    seconds: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: float | None = None
    """Peak, the largest of all ranks."""
    mfu: float | None = None
    reward_accuracy: float | None = None
    """Share of the pairs whose chosen answer has the higher reward."""
    reward_margin: float | None = None
    """The chosen answer's reward less the rejected one's, on average."""
    reward: float | None = None
    """Of the model's own answers, each reward times its weight, on average."""
    kl: float | None = None
    """Divergence of the model from its reference, nats per token."""
    completion_length: float | None = None
    """Tokens of an answer, on average."""
    generation_seconds: float | None = None


FIGURES = StepRecord._fields[2:]
"""Fields of a record that a line may lack."""
WARM_UP = 2
"""First steps that hold compilation and first connections."""
LARGEST = 2**63 - 1
"""The largest step and attempt that a column holds."""


_SORTED_AT_ONCE = 1 << 16


def median(values: array[float]) -> float | None:
    """The median; None without values. :func:`statistics.median` gives the same, but makes a list of 32 MB of a million."""
    starts = range(0, len(values), _SORTED_AT_ONCE)
    parts = [array("d", sorted(values[at : at + _SORTED_AT_ONCE])) for at in starts]
    middle = list(islice(heapq.merge(*parts), max(0, len(values) - 1) // 2, len(values) // 2 + 1))
    return sum(middle) / len(middle) if middle else None


class Column(Sequence[float | None]):
    """One figure of all steps, times ``factor``: 9 bytes a step, where a list of floats takes 32."""

    def __init__(self, values: array[float], known: bytearray, factor: float = 1.0) -> None:
        self.values, self.known, self.factor = values, known, factor

    @classmethod
    def unknown(cls, rows: int) -> Column:
        """A column of ``rows`` steps that lack the figure."""
        return cls(array("d", bytes(8 * rows)), bytearray(rows))

    def insert(self, at: int, value: float | None) -> None:
        self.values.insert(at, 0.0 if value is None else value)
        self.known.insert(at, value is not None)

    def replace(self, at: int, value: float | None) -> None:
        self.values[at], self.known[at] = 0.0 if value is None else value, value is not None

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, at: int) -> float | None: ...
    @overload
    def __getitem__(self, at: slice) -> list[float | None]: ...
    def __getitem__(self, at: int | slice) -> float | list[float | None] | None:
        if isinstance(at, slice):
            return [self[row] for row in range(*at.indices(len(self)))]
        return self.values[at] * self.factor if self.known[at] else None

    def __iter__(self) -> Iterator[float | None]:
        return (value * self.factor if known else None for value, known in zip(self.values, self.known, strict=True))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The column as numpy's float64, shape (len,); NaN for what is not known."""
        import numpy as np

        return np.where(np.frombuffer(self.known, bool), np.frombuffer(self.values) * self.factor, np.nan)


class Steps(Sequence[StepRecord]):
    """Step records by step. A record is made when it is asked for."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self.numbers, self.attempts = array("q"), array("q")
        """Step and attempt of each record."""
        self._columns: dict[str, Column] = {}
        for record in records:
            self.put(record)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> StepRecord: ...
    @overload
    def __getitem__(self, at: slice) -> list[StepRecord]: ...
    def __getitem__(self, at: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(at, slice):
            return [self[row] for row in range(*at.indices(len(self)))]
        figures = {name: column[at] for name, column in self._columns.items()}
        return StepRecord(self.numbers[at], self.attempts[at], **figures)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def put(self, record: StepRecord) -> None:
        """Add a record, or replace that of the same step. Raises OverflowError for a step beyond :data:`LARGEST`."""
        step, rows = record.step, len(self)
        at = rows if not rows or step > self.numbers[-1] else bisect_left(self.numbers, step)
        replaces = at < rows and self.numbers[at] == step
        if replaces:
            self.numbers[at], self.attempts[at] = step, record.attempt
        else:
            self.numbers.insert(at, step)
            self.attempts.insert(at, record.attempt)
        for name, value in zip(FIGURES, record[2:], strict=True):
            column = self._columns.get(name)
            if column is None:
                if value is None:
                    continue
                column = self._columns[name] = Column.unknown(rows)
            (column.replace if replaces else column.insert)(at, value)

    def attempt_of(self, step: int) -> int | None:
        """The attempt whose record of a step there is; None: there is none."""
        at = bisect_left(self.numbers, step)
        return self.attempts[at] if at < len(self) and self.numbers[at] == step else None

    def ends(self, step: int) -> tuple[dict[int, float | None], dict[int, float | None]]:
        """By attempt the time of its last record up to ``step``, and of its last one behind it."""
        at, times = bisect_right(self.numbers, step), iter(self.column("time"))
        before = dict(zip(self.attempts[:at], islice(times, at), strict=True))
        return before, dict(zip(self.attempts[at:], times, strict=True))

    def drop(self, step: int, attempt: int) -> int:
        """Remove what attempts up to ``attempt`` logged behind ``step``; returns the last step removed, or ``step``."""
        at = bisect_right(self.numbers, step)
        kept = bytearray(number > attempt for number in self.attempts[at:])
        last = at + kept.rfind(0)
        removed = self.numbers[last] if last >= at else step
        self.numbers[at:] = array("q", compress(self.numbers[at:], kept))
        self.attempts[at:] = array("q", compress(self.attempts[at:], kept))
        for column in self._columns.values():
            column.values[at:] = array("d", compress(column.values[at:], kept))
            column.known[at:] = bytearray(compress(column.known[at:], kept))
        return removed

    def column(self, name: str, factor: float = 1.0) -> Column:
        """One field of all records, times ``factor``."""
        column = self._columns.get(name) or Column.unknown(len(self))
        return Column(column.values, column.known, factor)

    def known(self, name: str, skip: int = 0) -> array[float]:
        """One field of the records that have it, without the first ``skip`` records."""
        column = self._columns.get(name)
        return array("d", () if column is None else compress(column.values[skip:], column.known[skip:]))

    def timed(self) -> Iterator[tuple[int, int, float]]:
        """Of each logged stretch with a time: the step before it, how many steps it is, and the seconds of one of them."""
        before = 0
        for step, seconds in zip(self.numbers, self._columns.get("seconds", ()), strict=False):
            start, before = before, step
            if seconds is not None and 0 < seconds < math.inf and step > start:
                yield start, step - start, seconds

    def steady(self) -> Iterator[float]:
        """Seconds of a step of each stretch that begins behind the warm-up."""
        return (seconds for start, _, seconds in self.timed() if start >= WARM_UP)

    def step_seconds(self) -> float | None:
        """The median of :meth:`steady`: what a step takes. None where no stretch begins behind the warm-up."""
        return median(array("d", self.steady()))
