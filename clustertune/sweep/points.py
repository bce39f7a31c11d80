"""The sweep folder: ``sweep.json`` with the numbered points, and for each point a run folder of its own.

``sweep.json`` (written before anything runs), ``points/0000/`` (run folders), ``tokens/`` (which points share), ``logs/``,
``jobs/``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import write_durably
from clustertune.recipe.layers import COMMAND_LINE, find_folder, parse_value
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.staging import bundle

SWEEP = "sweep.json"


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

    def left(self) -> list[Point]:
        """The points that are not finished."""
        return [point for point in self.points if RunDir(point.run_dir).stage(self.last) is None]

    def write(self) -> None:
        """Write ``sweep.json``, durably. Raises UserError where the folder holds another sweep or something else."""
        points = [{key: getattr(one, key) for key in ("recipe", "overrides", "tiny", "values")} for one in self.points]
        known = {key: getattr(self, key) for key in ("name", "last", "keys")}
        body = {**known, "points": points}
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
        return Sweep(path, str(body["name"]), str(body["last"]), keys, points)
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
    values = combinations(axes)
    varied = [axis.key for axis in axes if len(axis.values) > 1]
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
    return Sweep(where, folder.name, last, tuple(varied), points), resolved


def _identity(chosen: Sequence[Sequence[str]], resolved: Sequence[Resolved], tiny: bool) -> str:
    body = [tiny, [list(point) for point in chosen], [item.fingerprint() for item in resolved]]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:12]


def missing_inputs(sweep: Sweep, resolved: Sequence[Resolved]) -> list[Problem]:
    """The files and folders of ``data.input`` that are not there, of the points that have not read them yet."""
    found: dict[Problem, None] = {}
    for item, one in zip(resolved, sweep.points, strict=True):
        if RunDir(one.run_dir).stage("prepare") is None:
            found |= dict.fromkeys(bundle.missing_inputs(item))
    return list(found)


# --- space ----------------------------------------------------------------------------------------------------------------

# What is varied: ``key=a,b`` arguments as axes, and their grid.

MAX_POINTS = 1000
"""Slurm's own MaxArraySize of 1001 allows the indices 0 to 1000."""
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True)
class Axis:
    """One setting and the values that it takes; one value alone is the same for all points."""

    key: str
    values: tuple[str, ...]
    """As they stand on the command line: YAML."""


def parse_axes(arguments: Sequence[str]) -> list[Axis]:
    """The axes of ``key=value,value`` arguments. Raises UserError with everything that is wrong."""
    axes: list[Axis] = []
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
        if axis.key.startswith("slurm.") and len(axis.values) > 1
    ]
    raise_if(problems)
    return axes


def _axis(key: str, text: str) -> Axis:
    """The values between commas, as a list of YAML: those inside of brackets or quotes do not split. Raises ValueError."""
    values = parse_value(f"[{text}]") if "," in text else [parse_value(text)]
    words = [value if isinstance(value, str) and parse_value(value) == value else json.dumps(value) for value in values]
    if len(set(words)) < len(words):
        raise ValueError(f"{next(word for word in words if words.count(word) > 1)} appears twice")
    return Axis(key, tuple(words))


def combinations(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """The values of every point of the grid, in the order of ``axes``. Raises UserError where it is empty or too large."""
    size = math.prod(len(axis.values) for axis in axes)
    if size < 2:
        raise UserError("nothing is varied", file=COMMAND_LINE, fix="give several values: train.learning_rate=1e-5,5e-5")
    if size > MAX_POINTS:
        raise UserError(f"a grid of {size:,} points", file=COMMAND_LINE, fix=f"fewer values: {MAX_POINTS} points at most")
    return list(itertools.product(*(axis.values for axis in axes)))
