"""One quantity of a plan with the arithmetic that gave it: the number, and the same formula with the numbers put in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SECONDS, BYTES = "s", "B"


@dataclass(frozen=True)
class Term:
    """A part of the step or of the memory."""

    name: str
    """What it is, in a phrase."""
    value: float
    unit: str
    formula: str = ""
    """The arithmetic with ``{name}`` where a number of :attr:`values` stands."""
    values: Mapping[str, float | int | str] = field(default_factory=dict)

    def arithmetic(self) -> str:
        """The formula with its numbers, and the result: ``8,192 tokens x ... = 0.63 s``."""
        shown = {key: number(value) for key, value in self.values.items()}
        return f"{self.formula.format(**shown)} = {quantity(self.value, self.unit)}"


def number(value: float | int | str) -> str:
    """A number as a person reads it: thousands separated, four digits that count."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}" if abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """A number with its unit; bytes as GiB, short times as ms."""
    if unit == BYTES:
        return f"{value / 2**30:.2f} GiB" if abs(value) >= 2**28 else f"{value / 2**20:.2f} MiB"
    if unit == SECONDS:
        return f"{value:,.3g} s" if abs(value) >= 1 or value == 0 else f"{value * 1e3:,.3g} ms"
    return f"{number(value)} {unit}".rstrip()


def total(terms: list[Term]) -> float:
    """The sum of the values of terms that share a unit."""
    return sum(term.value for term in terms)
