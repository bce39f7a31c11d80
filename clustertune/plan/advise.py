"""Search the strategies that fit, rank them, and say why the others lose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from clustertune.config.cluster_schema import Cluster
from clustertune.config.overrides import Source
from clustertune.plan import memory
from clustertune.plan.candidates import Candidate, Refused, candidates
from clustertune.plan.constants import Constants
from clustertune.plan.host import host_parts
from clustertune.plan.lengths import Lengths
from clustertune.plan.machine import Machine
from clustertune.plan.predict import make_plan, make_shape, read_strategy, real_length
from clustertune.plan.shape import Shape
from clustertune.plan.step import Step, step
from clustertune.plan.strategy import Strategy
from clustertune.plan.term import total

Goal = Literal["time", "cost", "memory"]
GIB = 2**30


@dataclass(frozen=True)
class Option:
    """One candidate with what it would take."""

    candidate: Candidate
    step_s: float
    needed: float
    """Bytes that a GPU must have free."""
    fits: bool
    why: str
    """What it spends its time on, or why it does not fit."""
    burdens: int = 0
    """How many of these it needs beyond the recipe: a quantised base, host memory or NVMe for what a GPU would hold."""
    hours: float | None = None
    """Of the whole training; None where the number of steps is not known."""

    @property
    def strategy(self) -> Strategy:
        return self.candidate.strategy

    def key(self, goal: Goal) -> float:
        """What is ranked: time, GPU-time, or bytes. Time is the whole training's in hours, else a step's in seconds."""
        if goal == "memory":
            return self.needed
        time = self.step_s if self.hours is None else self.hours
        return time * (self.strategy.world_size if goal == "cost" else 1)

    def starts(self, cluster: Cluster) -> bool:
        """Whether this program starts it on the cluster: Megatron-Core only where the cluster file names its image."""
        return self.strategy.kind != "Megatron" or cluster.container.megatron is not None


@dataclass(frozen=True)
class Advice:
    """The best of each family, best first; then families of which nothing fits."""

    goal: Goal
    fitting: list[Option]
    losing: list[Option]
    searched: int
    refused: dict[str, str] = field(default_factory=dict)
    """Families that the libraries or the recipe do not allow, with the first reason."""


def advise(
    source: Source, machine: Machine, constants: Constants, *, nodes: Iterable[int], goal: Goal = "time",
    lengths: Lengths | None = None,
) -> Advice:  # fmt: skip
    """Try every candidate at the recipe's global batch and keep the best of each family.

    Raises UserError where the architecture cannot be counted.
    """
    shape = make_shape(source.resolved, read_strategy(source.resolved), cudnn=machine.has_cudnn_attention)
    search = _Search(shape, machine, constants, lengths, goal)
    best: dict[str, Option] = {}
    refused: dict[str, str] = {}
    searched = 0
    for candidate in candidates(source, search.shape.counted, machine, sorted(set(nodes))):
        if isinstance(candidate, Refused):
            refused.setdefault(candidate.family, candidate.why)
            continue
        searched += 1
        option = search.judge(candidate, best.get(candidate.family))
        if option is not None:
            best[candidate.family] = option
    fitting = _ranked([search.timed(o) for o in best.values() if o.fits], goal)
    losing = sorted((o for o in best.values() if not o.fits), key=lambda o: o.needed)
    return Advice(goal, fitting, losing, searched, {name: why for name, why in refused.items() if name not in best})


ALIKE = 1.03
"""Options nearer to the best than this share are alike: the model is no better. Of these the one that quantises and offloads
least goes first, then the emptier GPU."""


def _ranked(options: list[Option], goal: Goal) -> list[Option]:
    """The best first; of those that the model cannot tell from it, the plainer one, then the one with more room."""
    ordered = sorted(options, key=lambda o: (o.key(goal), o.needed))
    alike = [o for o in ordered if o.key(goal) <= ALIKE * ordered[0].key(goal)]
    return sorted(alike, key=lambda o: (o.burdens, o.needed, o.key(goal))) + ordered[len(alike) :]


@dataclass(frozen=True)
class _Search:
    """What all candidates of a search share."""

    shape: Shape
    machine: Machine
    constants: Constants
    lengths: Lengths | None
    goal: Goal

    def judge(self, candidate: Candidate, known: Option | None) -> Option | None:
        """The candidate's option where it is better than the known one of its family, else None."""
        here = replace(self.shape, strategy=real_length(candidate.strategy, self.lengths)[0])
        peak = max(memory.moments(here, self.constants), key=lambda moment: moment.bytes)
        needed = peak.bytes + total(memory.reserved(peak.bytes, self.constants))
        refusal = self._too_large(candidate, here, peak, needed)
        if refusal is not None:
            if known is not None and (known.fits or known.needed <= needed):
                return None
            return Option(candidate, float("inf"), needed, False, refusal)
        one = step(here, self.machine, self.constants)
        option = Option(candidate, one.seconds, needed, True, _spent(one), self._burdens(here))
        return option if known is None or not known.fits or option.key(self.goal) < known.key(self.goal) else None

    def timed(self, option: Option) -> Option:
        """The option with the hours of its whole training."""
        found = option.candidate
        plan = make_plan(
            found.resolved, self.machine, self.constants, lengths=self.lengths, chosen=found.strategy, sure=False
        )  # fmt: skip
        return replace(option, hours=plan.hours)

    def _burdens(self, here: Shape) -> int:
        places = (here.strategy.offload_params, here.strategy.offload_optimizer)
        return int(here.quantised and not self.shape.quantised) + int(places != ("none", "none"))

    def _too_large(self, candidate: Candidate, here: Shape, peak: memory.Moment, needed: float) -> str | None:
        """Which memory does not hold it, and what fills it."""
        if needed > self.machine.usable_bytes:
            largest = max(peak.parts, key=lambda term: term.value)
            room = f"{needed / GIB:.0f} GiB of {self.machine.usable_bytes / GIB:.0f}"
            return f"needs {room}; {largest.name} {largest.value / GIB:.0f} GiB"
        host = total(host_parts(candidate.resolved, here))
        if host > self.machine.host_bytes:
            return f"needs {host / GIB:,.0f} GiB of a node's RAM, which is {self.machine.host_bytes / GIB:,.0f}"
        return None


def _spent(one: Step) -> str:
    """The largest part of a step in words."""
    parts = {
        "computing": sum(term.value for term in one.compute),
        "exposed communication": one.exposed.value,
        "an idle pipeline": one.bubble.value,
        "the optimizer": one.optimizer.value,
    }
    name, value = max(parts.items(), key=lambda item: item[1])
    text = f"{value / one.seconds:.0%} {name}"
    if name == "exposed communication" and one.wires:
        wire = max(one.wires, key=lambda w: w.term.value)
        text += f" ({wire.collective.name})"
    return text


def reasons(advice: Advice) -> list[tuple[Option, str]]:
    """For each option but the winner, why it loses."""
    found = []
    for option in advice.fitting[1:]:
        winner = advice.fitting[0]
        ratio = option.key(advice.goal) / winner.key(advice.goal)
        comparison = {"time": "slower", "cost": "dearer", "memory": "more memory"}[advice.goal]
        if ratio <= ALIKE:
            text = "alike, with a quantised base or offloading" if option.burdens > winner.burdens else "alike"
            if (more := option.needed - winner.needed) > 0:
                text += f", and {more / GIB:.1f} GiB more per GPU"
            found.append((option, f"{text}: {option.why}"))
            continue
        found.append((option, f"{ratio:.2f} x {comparison}: {option.why}"))
    return found + [(option, option.why) for option in advice.losing]


def overrides(advice: Advice, source: Source) -> dict[str, Sequence[str]]:
    """For each family that fits all the overrides that select its best, those that were given included."""
    return {o.candidate.family: source.all(o.candidate.arguments(source.resolved)) for o in advice.fitting}
