"""A simulation beside the plan of the same depth: term by term, and the least time that its operators and collectives take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clustertune.errors import Problem
from clustertune.plan.predict import Plan
from clustertune.plan.step import RankGroup, traffic
from clustertune.simulate.run import Simulation

LAST_STEP = "step 2"
RESTING = ("weights", "adapters", "optimizer", "reference model")
"""The plan's terms of what lies on a GPU between steps."""


@dataclass(frozen=True)
class Compared:
    """One term of the plan and what was counted. Bytes."""

    term: str
    planned: float | None
    """None: the plan has no such term."""
    counted: float

    @property
    def difference(self) -> float | None:
        """As a share of what was counted: below 0 the plan is too low."""
        if self.planned is None or not self.counted:
            return None
        return self.planned / self.counted - 1

    def as_json(self) -> dict[str, Any]:
        return {"term": self.term, "planned": self.planned, "counted": self.counted, "difference": self.difference}


def terms(plan: Plan, simulation: Simulation) -> list[Compared]:
    """Each moment's memory, and the bytes of each kind of collective in a step."""
    one = simulation.first
    rest = sum(term.value for term in plan.moments[-1].parts if term.name in RESTING)
    planned = {moment.name: moment.bytes for moment in plan.moments}
    found = [Compared("at rest", rest, one["rest_bytes"])]
    counted = {name: peak["bytes"] for name, peak in one["moments"].items() if name not in ("loading", "at rest")}
    found += [Compared(name, planned.get(name), size) for name, size in counted.items()]
    found.append(Compared("peak", plan.peak.bytes, max(counted.values())))
    return [*found, *_traffic(plan, simulation)]


KINDS = {"gather": ("all-gather", "reduce-scatter"), "reduce": ("all-reduce",), "exchange": ("all-to-all",), "send": ("send",)}
"""The plan's kinds of collective by what they may be called."""


def _traffic(plan: Plan, simulation: Simulation) -> Iterator[Compared]:
    sizes = traffic(plan.shape)
    micro = plan.strategy.accumulation
    planned: dict[tuple[str, int], float] = defaultdict(float)
    for part, times in ((sizes.forward, micro), (sizes.backward, micro), (sizes.exposed, micro), (sizes.last, 1)):
        for one in part:
            kind = "reduce-scatter" if one.name.startswith("reduce-scatter") else KINDS[one.kind][0]
            planned[kind, one.group.size] += one.size * times
    counted: Counter[tuple[str, int]] = Counter()
    for row in simulation.first["traffic"].get(LAST_STEP, []):
        if row["ranks"] > 1:
            counted[row["kind"], row["ranks"]] += row["bytes"]
    for kind, ranks in sorted({*planned, *(key for key, size in counted.items() if size > SMALL)}):
        known = planned.get((kind, ranks))
        yield Compared(f"{kind}, {ranks} ranks", known, counted[kind, ranks])


SMALL = 2**20
"""Bytes of a step that are not worth a line: the loss, the norm, counts of tokens."""


@dataclass(frozen=True)
class LeastTime:
    """What a step takes at the very least: every operator at the GPU's peak and every link at its nominal speed. Seconds."""

    device: float
    link: float

    @property
    def seconds(self) -> float:
        """Computing and communicating at once, perfectly."""
        return max(self.device, self.link)


def least_time(plan: Plan, simulation: Simulation) -> LeastTime:
    """Of the rank that was simulated. Operators below the GPU's cache in size count by their FLOPs alone."""
    machine, one = plan.machine, simulation.first
    seconds = 0.0
    for row in one["traffic"].get(LAST_STEP, []):
        members = row["ranks"]
        if members == 1:
            continue
        inside = RankGroup(members, row["stride"]).inside(machine)
        link = machine.intra if inside else machine.inter
        nominal = link.nominal_bytes_per_s or link.bytes_per_s
        share = (members - 1) / members * (2 if row["kind"] == "all-reduce" else 1)
        if nominal:
            seconds += row["bytes"] * share / nominal
    return LeastTime(one["device_seconds"], seconds)


def mismatches(simulation: Simulation) -> list[Problem]:
    """Collectives that two ranks make in another order, or with other bytes: ranks would wait for each other for ever."""
    problems = []
    (first, one), *others = simulation.ranks.items()
    for rank, other in others:
        for stage in {**one["sequence"], **other["sequence"]}:
            mine, theirs = one["sequence"].get(stage, []), other["sequence"].get(stage, [])
            at = _first_difference(mine, theirs)
            if at is None:
                continue
            said = [_describe(calls[at]) if at < len(calls) else "nothing more" for calls in (mine, theirs)]
            text = f"{stage}, collective {at + 1}: rank {first} makes {said[0]}, rank {rank} {said[1]}"
            problems.append(Problem(text, file="--ranks", fix="ranks of one group must make the same collectives in one order"))
            break
    return problems


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return min(len(one), len(other)) if len(one) != len(other) else None


def _describe(call: Sequence[Any]) -> str:
    kind, ranks, stride, size = call
    return f"{kind} of {size:,} B over {ranks} ranks" + (f", {stride} apart" if stride != 1 else "")


def as_json(plan: Plan, simulation: Simulation) -> dict[str, Any]:
    """``simulation`` of the plan's document. Bytes and seconds."""
    least = least_time(plan, simulation)
    ranks = {
        str(rank): {key: value for key, value in one.items() if key != "sequence"} for rank, one in simulation.ranks.items()
    }
    return {
        "layers": int(simulation.resolved.architecture["num_hidden_layers"]),
        "note": simulation.note,
        "terms": [one.as_json() for one in terms(plan, simulation)],
        "least_step_s": {"device": least.device, "links": least.link},
        "planned_step_s": plan.step.seconds,
        "ranks": ranks,
        "mismatches": [str(problem) for problem in mismatches(simulation)],
    }
