"""What is varied: ``key=a,b`` arguments as axes, their grid, and random draws from them."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from clustertune.config.load import COMMAND_LINE
from clustertune.config.yamlfile import parse_value
from clustertune.errors import Problem, UserError

MAX_POINTS = 1000
"""Slurm's own MaxArraySize of 1001 allows the indices 0 to 1000."""
_RANGE = re.compile(r"(log|uniform|int):([^.]*(?:\.\d[^.]*)?)\.\.(.+)")
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True)
class Axis:
    """One setting and the values that it takes; one value alone is the same for all points."""

    key: str
    values: tuple[str, ...]
    """As they stand on the command line: YAML."""

    @property
    def size(self) -> float:
        return len(self.values)

    def pick(self, share: float) -> str:
        """The value at ``share`` (0 to below 1) of the axis."""
        return self.values[int(share * len(self.values))]


@dataclass(frozen=True)
class Range:
    """One setting whose values are drawn from an interval."""

    key: str
    kind: str
    """``log`` (uniform in the exponent), ``uniform`` or ``int`` (both ends can be drawn)."""
    low: float
    high: float

    @property
    def size(self) -> float:
        return self.high - self.low + 1 if self.kind == "int" else math.inf

    def pick(self, share: float) -> str:
        """The value at ``share`` (0 to below 1), with six digits: what a person can type again."""
        if self.kind == "int":
            return str(int(self.low + share * self.size))
        if self.kind == "log":
            return f"{math.exp(math.log(self.low) + share * math.log(self.high / self.low)):.6g}"
        return f"{self.low + share * (self.high - self.low):.6g}"


def split_values(text: str) -> list[str]:
    """The parts between commas; those inside of brackets or quotes do not split. Raises ValueError in one line."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and not parts[-1].strip(" [{(,"):
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    if quote or depth:
        raise ValueError(f"a {quote or 'bracket'} is not closed")
    return [part.strip() for part in parts]


def parse_axes(words: Sequence[str]) -> list[Axis | Range]:
    """The axes of ``key=value,value`` and ``key=log:1e-6..1e-4`` arguments. Raises UserError with everything that is wrong."""
    axes: list[Axis | Range] = []
    problems: list[Problem] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not _KEY.fullmatch(key):
            fix = "write section.key=value,value, as train.learning_rate=1e-5,5e-5"
            problems.append(Problem(f"{(key if equals else word)[:60]!r} is no setting", file=COMMAND_LINE, fix=fix))
            continue
        if any(axis.key == key for axis in axes):
            problems.append(Problem("stands twice", file=COMMAND_LINE, key=key, fix="name all values in one: key=a,b,c"))
            continue
        try:
            axes.append(_axis(key, text))
        except ValueError as error:
            problems.append(Problem(str(error), file=COMMAND_LINE, key=key))
    problems += [
        Problem("cannot be varied: one job array has one shape", file=COMMAND_LINE, key=axis.key, fix="a sweep for each")
        for axis in axes
        if axis.key.startswith("slurm.") and axis.size > 1
    ]
    if problems:
        raise UserError(problems)
    return axes


def _axis(key: str, text: str) -> Axis | Range:
    found = _RANGE.fullmatch(text.strip())
    if found:
        return _range(key, found)
    values = split_values(text)
    if "" in values and len(values) > 1:
        raise ValueError("an empty value between commas")
    known: list[object] = []
    for value in values:
        parsed = parse_value(value)
        if any(parsed == other and type(parsed) is type(other) for other in known):
            raise ValueError(f"{value} stands twice")
        known.append(parsed)
    return Axis(key, tuple(values))


def _range(key: str, found: re.Match[str]) -> Range:
    kind = found[1]
    try:
        low, high = float(found[2]), float(found[3])
    except ValueError:
        raise ValueError(f"{found[0]!r} is no range; write {kind}:LOW..HIGH") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{found[0]!r}: the low end must lie below the high one")
    if kind == "log" and low <= 0:
        raise ValueError(f"{found[0]!r}: both ends must be above 0")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"{found[0]!r}: the ends must be whole numbers")
    return Range(key, kind, low, high)


def combinations(axes: Sequence[Axis | Range], draws: int | None = None, seed: int = 0) -> list[tuple[str, ...]]:
    """The values of every point, in the order of ``axes``: the whole grid, or ``draws`` different ones drawn with ``seed``.

    The first N of more draws are the same as N draws. Raises UserError where there are too many points, too few different
    ones, or none at all.
    """
    if draws is not None:
        return _draw(axes, draws, seed)
    ranges = [axis.key for axis in axes if isinstance(axis, Range)]
    if ranges:
        problem = "a range has no grid"
        raise UserError([Problem(problem, file=COMMAND_LINE, key=key, fix="--random N draws from it") for key in ranges])
    size = math.prod(int(axis.size) for axis in axes)
    if size < 2:
        fix = "give several values: train.learning_rate=1e-5,5e-5"
        raise UserError(Problem("nothing is varied", file=COMMAND_LINE, fix=fix))
    if size > MAX_POINTS:
        fix = f"fewer values, or --random N draws some of them; {MAX_POINTS} at most"
        raise UserError(Problem(f"a grid of {size:,} points", file=COMMAND_LINE, fix=fix))
    return list(itertools.product(*(axis.values for axis in axes if isinstance(axis, Axis))))


def _draw(axes: Sequence[Axis | Range], draws: int, seed: int) -> list[tuple[str, ...]]:
    size = math.prod(axis.size for axis in axes)
    if not 1 <= draws <= MAX_POINTS:
        raise UserError(Problem(f"{draws} draws: 1 to {MAX_POINTS} are possible", file=COMMAND_LINE, key="--random"))
    if draws > size:
        problem = Problem(f"{draws} draws from {size:.0f} different points", file=COMMAND_LINE, key="--random")
        raise UserError(problem)
    generator = random.Random(seed)  # noqa: S311 (what is drawn must come again, not be a secret)
    found: dict[tuple[str, ...], None] = {}
    for _ in range(100 * draws + 10_000):
        found[tuple(axis.pick(generator.random()) for axis in axes)] = None
        if len(found) == draws:
            return list(found)
    problem = Problem(f"only {len(found)} of {draws} draws differ", file=COMMAND_LINE, key="--random", fix="widen the ranges")
    raise UserError(problem)
