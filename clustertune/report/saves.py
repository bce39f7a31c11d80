"""How a run saves: how often, what it takes, and whether the failures that it met ask for another cadence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from clustertune.plan.saves import best_seconds, seconds_between_ends
from clustertune.report.content import duration, get, number, percent, size
from clustertune.report.cost import AttemptCost
from clustertune.report.metrics import Metrics

LEAST = 2
"""Failures from which on a run's own rate is believed: one alone says little about the next."""
BEFORE_HOURS = 24.0
"""Node-hours up to one more failure, as if seen before the run: two failures in the first minutes do not make a rate."""
CERTAIN = 3.0
"""No failure in this many times some hours shows, with 95 % certainty, that the mean is not below them: -ln(0.05)."""


@dataclass(frozen=True)
class Failures:
    """Ends of a run's attempts that no warning announced."""

    count: int
    node_hours: float
    """That all attempts ran, times their nodes."""

    @property
    def mtbf_hours(self) -> float | None:
        """Of one node; None below :data:`LEAST` failures."""
        return (self.node_hours + BEFORE_HOURS) / (self.count + 1) if self.count >= LEAST else None


def failures(attempts: Sequence[AttemptCost]) -> Failures:
    """What the attempts of a run met. The newest is not counted while it has no end."""
    now, newest = time.time(), max((one.attempt for one in attempts), default=0)
    hours = sum(one.seconds(now) / 3600 * one.nodes for one in attempts)
    return Failures(sum(one.failed and (one.code is not None or one.attempt != newest) for one in attempts), hours)


def as_dict(document: Mapping[str, Any], metrics: Metrics, attempts: Sequence[AttemptCost]) -> dict[str, Any] | None:
    """The part ``saves`` of ``report.json``; None for a run that saved nothing. Seconds and bytes: medians of the
    saves to shared storage, where there are any; null: unknown.
    """
    saves = [record for record in metrics.checkpoints if record.status in ("saved", "local")]
    if not saves:
        return None

    def middle(get: Callable[[Any], float | None], status: str = "saved") -> float | None:
        known = [value for record in saves if record.status == status and (value := get(record)) is not None]
        return median(known) if known else middle(get, "local") if status == "saved" else None

    stalls = [record.stall for record in saves if record.stall is not None]
    trained, met = sum(one.seconds(time.time()) for one in attempts), failures(attempts)
    stall, write = middle(lambda one: one.stall), middle(lambda one: one.write)
    recipe = get(document, "recipe", "recipe") or {}
    nodes = int(get(recipe, "slurm", "nodes") or 1)
    given = get(document, "cluster", "compute", "mtbf_hours")
    mtbf = given or met.mtbf_hours
    between = seconds_between_ends(nodes, mtbf, get(document, "jobs", "train", "minutes"))
    every = next((record.every for record in reversed(saves) if record.every is not None and record.status == "saved"), None)
    return {
        "every": get(recipe, "save", "every") or (f"{steps}" if (steps := get(recipe, "train", "save_steps")) else None),
        "every_seconds": every,
        "milestones": list(get(recipe, "save", "milestones") or ()),
        "shared": sum(record.status == "saved" for record in saves),
        "local": sum(record.status == "local" for record in saves),
        "bytes": middle(lambda one: one.bytes),
        "copy_seconds": middle(lambda one: one.copy),
        "stall_seconds": stall,
        "write_seconds": write,
        "stall_share": sum(stalls) / trained if stalls and trained else None,
        "failures": met.count,
        "node_hours": met.node_hours,
        "mtbf_hours": mtbf,
        "mtbf_from": "cluster file" if given else "this run" if mtbf else "published",
        "auto_seconds": best_seconds(stall, write, between) if stall is not None and write is not None else None,
    }


def rows(found: Mapping[str, Any] | None) -> list[list[str]]:
    """The same for the page: what, and its value."""
    if found is None:
        return []
    every, seconds = found["every"], found["every_seconds"]
    cadence = "unknown" if every is None else f"{every} steps" if str(every).isdigit() else str(every)
    if seconds is not None:
        cadence += f": {duration(seconds)} in the end"
    if found["milestones"]:
        cadence += f"; and at {', '.join(map(number, found['milestones']))}"
    count = f"{number(found['shared'])} on shared storage"
    if found["local"]:
        count += f", {number(found['local'])} on the nodes' own disks"
    stall = f"{duration(found['stall_seconds'])} a save, {duration(found['copy_seconds'])} to copy to host memory beside it"
    if found["stall_share"] is not None:
        stall += f"; {percent(found['stall_share'])} of the training"
    hours = found["node_hours"]
    met = f"{found['failures']} in {hours:,.2f} node-hours" if found["failures"] else f"none in {hours:,.2f} node-hours"
    if not found["failures"]:
        met += f": with 95 % certainty the mean time between two is at least {hours / CERTAIN:,.2f} node-hours"
    wanted = f"{duration(found['auto_seconds'])} between saves, by the failure rate "
    source = {"cluster file": "of the cluster file", "this run": "of this run", "published": "published for GPU clusters"}
    wanted += source[found["mtbf_from"]]
    return [
        ["saved every", cadence],
        ["saves", f"{count}, {size(found['bytes'])} each"],
        ["training stood still", stall],
        ["written in", duration(found["write_seconds"])],
        ["ends without a warning", met],
        ["save.every: auto would take", wanted if found["auto_seconds"] is not None else "unknown"],
    ]
