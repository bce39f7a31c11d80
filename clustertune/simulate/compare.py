"""A simulation beside the plan of the same depth: term by term, and the least time that its operators and collectives take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clustertune.errors import Problem
from clustertune.plan.memory import EVALUATION, UPDATE, save_copy
from clustertune.plan.predict import Plan
from clustertune.plan.step import RankGroup, traffic
from clustertune.simulate.simulator import Simulation

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
    rest = sum(term.value for term in plan.moment(UPDATE).parts if term.name in RESTING)
    planned = {moment.name: moment.bytes for moment in plan.moments}
    found = [Compared("at rest", rest, one["rest_bytes"])]
    counted = {name: peak["bytes"] for name, peak in one["moments"].items() if name not in BESIDE}
    if EVALUATION not in planned:  # the recipe has none
        counted.pop(EVALUATION, None)
    found += [Compared(name, planned.get(name), size) for name, size in counted.items()]
    found.append(Compared("peak", plan.peak.bytes, max(counted.values())))
    return [*found, *_traffic(plan, simulation), *_saved(plan, one)]


def _saved(plan: Plan, one: dict[str, Any]) -> Iterator[Compared]:
    """What one rank writes at a save, reads when it resumes, and copies to host memory meanwhile."""
    strategy, saved = plan.strategy, one["save"]
    share = plan.schedule.checkpoint_bytes / (strategy.state_shards * strategy.tp if strategy.kind.startswith("FSDP") else 1)
    share *= plan.shape.split_trained / plan.shape.local_trained
    yield Compared("checkpoint, written by this rank", share, saved["bytes"])
    if "resume" in one and one["resume"]["checkpoint_bytes"]:
        yield Compared("checkpoint, read by this rank", share, one["resume"]["checkpoint_bytes"])
    if (copy := save_copy(plan.shape)) is not None:
        ranks = strategy.ranks_per_node if strategy.kind.startswith("FSDP") else 1
        yield Compared("copy for saves in host memory", copy.value / ranks, saved["pinned_bytes"] + saved["pageable_bytes"])


def phases(one: dict[str, Any]) -> list[str]:
    """The moments in the order in which they come, but for loading."""
    return [name for name in one["moments"] if name not in (SAVE, EVALUATION, "loading")] + [
        name for name in (SAVE, EVALUATION) if name in one["moments"]
    ]


def faults(simulation: Simulation) -> list[Problem]:
    """What would go wrong on GPUs beside the sequence of collectives: threads, streams, and random numbers."""
    found = []
    for rank, one in simulation.ranks.items():
        own = rank % simulation.resolved.distribution.ranks_per_node
        for thread, devices in one["save"]["devices"].items():
            if other := [device for device in devices if device != own]:
                text = f"rank {rank}: thread {thread} makes a context on cuda:{other[0]}, its own device is cuda:{own}"
                found.append(Problem(text, file=SAVE, fix="put the thread on its device before it does anything else"))
        found += [
            Problem(
                f"rank {rank}: {text} ({count} times)", file=SAVE, fix="have the stream wait for an event, or the host for it"
            )
            for text, count in one["save"]["faults"].items()
        ]
        if "resume" in one:
            found += _random(rank, one["resume"])
    return found


def _random(rank: int, resumed: dict[str, Any]) -> Iterator[Problem]:
    device = resumed["device"]
    given = [one for one in resumed["random"] if one["device"] == device]
    if resumed["reseeded"] or not given or given[-1]["of"][:1] != [rank]:
        text = f"rank {rank}, resumed on cuda:{device}, does not draw on from the random state that it saved"
        yield Problem(text, file="resume", fix="save the state of the rank's own device, and set it on the device that it has")


SAVE = "save"
BESIDE = ("loading", "at rest", SAVE)
"""Moments that are none of a step: the plan has a term for what rests, and bytes for a save."""
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
        share = (members - 1) / members * (2 if row["kind"] == "all-reduce" else 1)
        seconds += row["bytes"] * share / RankGroup(members, row["stride"]).nominal(machine)
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
        "faults": [str(problem) for problem in faults(simulation)],
    }
