"""The sweep folder: ``sweep.json`` with the numbered points, and for each point a run folder of its own.

``sweep.json`` (written before anything runs), ``points/0000/`` (run folders), ``tokens/`` (which points share), ``logs/``,
``jobs/``, ``report.html``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.config.load import find_folder
from clustertune.config.resolve import resolve
from clustertune.config.resolved import Resolved
from clustertune.errors import Problem, UserError
from clustertune.manifest import write_durably
from clustertune.rundir import RunDir
from clustertune.staging import bundle
from clustertune.sweep.space import combinations, parse_axes

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
    def words(self) -> str:
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
        body = {
            "format": FORMAT,
            "name": self.name,
            "last": self.last,
            "keys": list(self.keys),
            "draws": self.draws,
            "seed": self.seed,
            "created": round(time.time(), 3),
            "points": [
                {"recipe": p.recipe, "overrides": list(p.overrides), "tiny": p.tiny, "values": p.values} for p in self.points
            ],
        }
        if (self.path / SWEEP).exists():
            before = read_sweep(self.path)
            if before.points != self.points:
                fix = "give another --sweep-dir, or leave it out: each sweep has its own folder"
                raise UserError(Problem("holds another sweep", file=str(self.path), fix=fix))
            if before.last == self.last:
                return
        elif self.path.is_dir() and any(entry.name not in ("lock", "jobs") for entry in self.path.iterdir()):
            raise UserError(Problem("holds something else than a sweep", file=str(self.path), fix="give another --sweep-dir"))
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
        raise UserError(Problem(f"is no sweep: it has no {SWEEP}", file=str(path), fix=fix)) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(Problem(f"unreadable: {error!r}", file=str(file))) from None


def run_dir(path: Path, index: int) -> Path:
    """The run folder of a point."""
    return path.absolute() / "points" / f"{index:04d}"


def point(path: Path, index: int) -> Point:
    """The point that a task of the job array works on. Raises UserError where the sweep has none of that number."""
    points = read_sweep(path).points
    if not 0 <= index < len(points):
        raise UserError(Problem(f"has no point {index}: {len(points)} points, from 0", file=str(path / SWEEP)))
    return points[index]


def make_sweep(
    recipe: str,
    words: Sequence[str],
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
    axes = parse_axes(words)
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
    body = [tiny, [list(words) for words in chosen], [item.fingerprint(former=True) for item in resolved]]
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
