"""The sweep folder: ``sweep.json`` with the numbered points, and for each point a run folder of its own.

``sweep.json`` (written before anything runs), ``points/0000/`` (run folders), ``tokens/`` (which points share), ``logs/``,
``jobs/``, ``report.html``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import write_durably
from clustertune.recipe.load import COMMAND_LINE, find_folder
from clustertune.recipe.yamlfile import parse_value
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.staging import bundle

SWEEP = "sweep.json"
FORMAT = 1


@dataclass(frozen=True)
class Point:
    """One run of a sweep: what ``clustertune run`` and ``job`` need."""

    index: int
    """Its number, from 0: the index in the job array."""
    recipe: str
    """The recipe folder, as an absolute path."""
    overrides: tuple[str, ...]
    tiny: bool
    run_dir: Path
    values: dict[str, str]
    """What was varied, by key."""

    @property
    def settings(self) -> str:
        """``learning_rate=1e-5 r=16``: what was varied, for people."""
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Sweep:
    """A sweep as its folder holds it."""

    path: Path
    name: str
    """The recipe's name."""
    last: str
    """The stage after which a point is finished."""
    keys: tuple[str, ...]
    """The settings that are varied."""
    points: tuple[Point, ...]
    draws: int | None = None
    seed: int | None = None
    created: float = 0.0

    def left(self) -> list[Point]:
        """The points that are not finished."""
        return [point for point in self.points if RunDir(point.run_dir).stage(self.last) is None]

    def write(self) -> None:
        """Write ``sweep.json``, durably. Raises UserError where the folder holds another sweep or something else."""
        points = [{key: getattr(one, key) for key in ("recipe", "overrides", "tiny", "values")} for one in self.points]
        known = {key: getattr(self, key) for key in ("name", "last", "keys", "draws", "seed")}
        body = {"format": FORMAT, **known, "created": round(time.time(), 3), "points": points}
        if (self.path / SWEEP).exists():
            before = read_sweep(self.path)
            if before.points != self.points:
                fix = "give another --sweep-dir, or leave it out: each sweep has its own folder"
                raise UserError("holds another sweep", file=str(self.path), fix=fix)
            if before.last == self.last:
                return
        elif self.path.is_dir() and any(entry.name not in ("lock", "jobs") for entry in self.path.iterdir()):
            raise UserError("holds something else than a sweep", file=str(self.path), fix="give another --sweep-dir")
        self.path.mkdir(parents=True, exist_ok=True)
        write_durably(self.path / SWEEP, json.dumps(body, indent=1) + "\n")


def read_sweep(path: Path) -> Sweep:
    """The sweep of a folder. Raises UserError where there is none."""
    file = path / SWEEP
    try:
        body: dict[str, Any] = json.loads(file.read_bytes())
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r} is not known")
        points = tuple(
            Point(
                index=index,
                recipe=str(entry["recipe"]),
                overrides=tuple(map(str, entry["overrides"])),
                tiny=bool(entry["tiny"]),
                run_dir=run_dir(path, index),
                values={str(key): str(value) for key, value in entry["values"].items()},
            )
            for index, entry in enumerate(body["points"])
        )
        keys = tuple(map(str, body["keys"]))
        return Sweep(
            path, str(body["name"]), str(body["last"]), keys, points, body["draws"], body["seed"], float(body["created"])
        )
    except FileNotFoundError:
        fix = "clustertune sweep RECIPE section.key=value,value makes one"
        raise UserError(f"is not a sweep: it has no {SWEEP}", file=str(path), fix=fix) from None
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"unreadable: {error!r}", file=str(file)) from None


def run_dir(path: Path, index: int) -> Path:
    """The run folder of a point."""
    return path.absolute() / "points" / f"{index:04d}"


def point(path: Path, index: int) -> Point:
    """The point that a task of the job array works on. Raises UserError where the sweep has none of that number."""
    points = read_sweep(path).points
    if not 0 <= index < len(points):
        raise UserError(f"has no point {index}: {len(points)} points, from 0", file=str(path / SWEEP))
    return points[index]


def make_sweep(
    recipe: str,
    arguments: Sequence[str],
    *,
    tiny: bool,
    last: str,
    draws: int | None = None,
    seed: int = 0,
    more: Sequence[str] = (),
    path: Path | None = None,
    runs: Path = Path("runs"),
) -> tuple[Sweep, list[Resolved]]:
    """All points of a sweep, each resolved before anything is made; nothing is written.

    ``more`` are overrides that every point gets. Without ``path`` the folder is ``runs/<recipe>/sweep-<12 hex>``: the same
    command finds the same sweep. Raises UserError with the problems of all points at once.
    """
    folder, _ = find_folder(recipe)
    axes = parse_axes(arguments)
    values = combinations(axes, draws, seed)
    varied = [axis.key for axis in axes if axis.size > 1]
    resolved: list[Resolved] = []
    problems: dict[Problem, None] = {}
    chosen: list[tuple[str, ...]] = []
    for combination in values:
        overrides = tuple(f"{axis.key}={value}" for axis, value in zip(axes, combination, strict=True))
        chosen.append((*overrides, *more))
        try:
            resolved.append(resolve(recipe, chosen[-1], tiny=tiny))
        except UserError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise UserError(list(problems))
    where = path or runs / folder.name / f"sweep-{_identity(chosen, resolved, tiny)}"
    points = tuple(
        Point(
            index=index,
            recipe=str(folder),
            overrides=overrides,
            tiny=tiny,
            run_dir=run_dir(where, index),
            values={axis.key: value for axis, value in zip(axes, values[index], strict=True) if axis.key in varied},
        )
        for index, overrides in enumerate(chosen)
    )
    sweep = Sweep(where, folder.name, last, tuple(varied), points, draws, seed if draws is not None else None)
    return sweep, resolved


def _identity(chosen: Sequence[Sequence[str]], resolved: Sequence[Resolved], tiny: bool) -> str:
    body = [tiny, [list(point) for point in chosen], [item.fingerprint(former=True) for item in resolved]]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:12]


def same_weights(sweep: Sweep, resolved: Sequence[Resolved]) -> list[str]:
    """Warnings where points would train the very same weights: what varies there is only how they are scored or kept."""
    by_print: dict[str, list[int]] = {}
    for item, one in zip(resolved, sweep.points, strict=True):
        by_print.setdefault(item.fingerprint(), []).append(one.index)
    twins = [numbers for numbers in by_print.values() if len(numbers) > 1]
    if not twins:
        return []
    numbers = ", ".join(map(str, twins[0][:10]))
    return [f"{sum(map(len, twins))} points train the same weights as another one (such as {numbers})"]


def missing_inputs(sweep: Sweep, resolved: Sequence[Resolved]) -> list[Problem]:
    """The files and folders of ``data.input`` that are not there, of the points that have not read them yet."""
    found: dict[Problem, None] = {}
    for item, one in zip(resolved, sweep.points, strict=True):
        if RunDir(one.run_dir).stage("prepare") is None:
            found |= dict.fromkeys(bundle.missing_inputs(item))
    return list(found)


# --- space ----------------------------------------------------------------------------------------------------------------

# What is varied: ``key=a,b`` arguments as axes, their grid, and random draws from them.

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
class SettingRange:
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


def parse_axes(arguments: Sequence[str]) -> list[Axis | SettingRange]:
    """The axes of ``key=value,value`` and ``key=log:1e-6..1e-4`` arguments. Raises UserError with everything that is wrong."""
    axes: list[Axis | SettingRange] = []
    problems: list[Problem] = []
    for word in arguments:
        key, equals, text = word.partition("=")
        if not equals or not _KEY.fullmatch(key):
            fix = "write section.key=value,value, as train.learning_rate=1e-5,5e-5"
            problems.append(Problem(f"{(key if equals else word)[:60]!r} is not a setting", file=COMMAND_LINE, fix=fix))
            continue
        if any(axis.key == key for axis in axes):
            problems.append(Problem("appears twice", file=COMMAND_LINE, key=key, fix="name all values in one: key=a,b,c"))
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
    raise_if(problems)
    return axes


def _axis(key: str, text: str) -> Axis | SettingRange:
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
            raise ValueError(f"{value} appears twice")
        known.append(parsed)
    return Axis(key, tuple(values))


def _range(key: str, found: re.Match[str]) -> SettingRange:
    kind = found[1]
    try:
        low, high = float(found[2]), float(found[3])
    except ValueError:
        raise ValueError(f"{found[0]!r} is not a range; write {kind}:LOW..HIGH") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{found[0]!r}: the low end must lie below the high one")
    if kind == "log" and low <= 0:
        raise ValueError(f"{found[0]!r}: both ends must be above 0")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"{found[0]!r}: the ends must be whole numbers")
    return SettingRange(key, kind, low, high)


def combinations(axes: Sequence[Axis | SettingRange], draws: int | None = None, seed: int = 0) -> list[tuple[str, ...]]:
    """The values of every point, in the order of ``axes``: the whole grid, or ``draws`` different ones drawn with ``seed``.

    The first N of more draws are the same as N draws. Raises UserError where there are too many points, too few different
    ones, or none at all.
    """
    if draws is not None:
        return _draw(axes, draws, seed)
    ranges = [axis.key for axis in axes if isinstance(axis, SettingRange)]
    if ranges:
        problem = "a range has no grid"
        raise UserError([Problem(problem, file=COMMAND_LINE, key=key, fix="--random N draws from it") for key in ranges])
    size = math.prod(int(axis.size) for axis in axes)
    if size < 2:
        raise UserError("nothing is varied", file=COMMAND_LINE, fix="give several values: train.learning_rate=1e-5,5e-5")
    if size > MAX_POINTS:
        fix = f"fewer values, or --random N draws some of them; {MAX_POINTS} at most"
        raise UserError(f"a grid of {size:,} points", file=COMMAND_LINE, fix=fix)
    return list(itertools.product(*(axis.values for axis in axes if isinstance(axis, Axis))))


def _draw(axes: Sequence[Axis | SettingRange], draws: int, seed: int) -> list[tuple[str, ...]]:
    size = math.prod(axis.size for axis in axes)
    if not 1 <= draws <= MAX_POINTS:
        raise UserError(f"{draws} draws: 1 to {MAX_POINTS} are possible", file=COMMAND_LINE, key="--random")
    if draws > size:
        raise UserError(f"{draws} draws from {size:.0f} different points", file=COMMAND_LINE, key="--random")
    generator = random.Random(seed)  # noqa: S311 (what is drawn must come again, not be a secret)
    found: dict[tuple[str, ...], None] = {}
    for _ in range(100 * draws + 10_000):
        found[tuple(axis.pick(generator.random()) for axis in axes)] = None
        if len(found) == draws:
            return list(found)
    raise UserError(f"only {len(found)} of {draws} draws differ", file=COMMAND_LINE, key="--random", fix="widen the ranges")
