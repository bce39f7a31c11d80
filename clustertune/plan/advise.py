"""Search the strategies that fit, rank them, and say why the others lose; and what would make a recipe fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from clustertune.cluster.schema import Cluster
from clustertune.console import duration
from clustertune.errors import UserError
from clustertune.host.system import GIB
from clustertune.plan.constants import Constants
from clustertune.plan.machine import PlanMachine
from clustertune.plan.memory import EVALUATION
from clustertune.plan.predict import Footprint, Plan, held, make_plan, make_shape, real_length
from clustertune.plan.schedule import Lengths
from clustertune.plan.step import Step, step
from clustertune.plan.strategy import ModelShape, Strategy, strategy
from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import quantization
from clustertune.recipe.parameters import ParameterCount
from clustertune.resolve.overrides import RecipeSource, RequestedLayout, distribution, loaded, recomputation, share, sizes
from clustertune.resolve.resolved import Recompute, Resolved

RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of recomputed layers."""
MICRO = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Candidate:
    """One strategy with the name of its family, and the recipe that has it."""

    family: str
    strategy: Strategy
    resolved: Resolved
    """With the candidate's distribution; micro batch and recomputation are the strategy's."""
    layout: tuple[str, ...]
    """The overrides of the distribution."""
    ratio: float
    """Share of recomputed layers as a recipe says it."""

    def arguments(self, start: Resolved) -> list[str]:
        """The overrides that make it of the recipe ``start``."""
        return [*self.layout, *sizes(start, self.strategy.micro_batch, self.ratio, self.strategy.kind)]


def candidates(
    source: RecipeSource, counted: ParameterCount, machine: PlanMachine, nodes: list[int]
) -> Iterator[Candidate | tuple[str, str]]:
    """All combinations that divide: distribution, sizes, micro batch and recomputation, on each of ``nodes``; of a family that
    the recipe cannot have here its name and why.

    The global batch stays; of LoRA the base may be quantised.
    """
    start = source.resolved
    for count in nodes:
        for base in _bases(start):
            for family, layout in _layouts(start, counted, machine, count, base):
                name = f"{family} {base}" if base and layout.kind != "Megatron" else family
                arguments = distribution(start, layout)
                try:
                    changed = source.changed([*arguments, *sizes(start, 1, 1.0, layout.kind)])
                    used = strategy(changed)
                except UserError as error:
                    yield name, error.problems[0].message
                    continue
                yield from _sizes(Candidate(name, used, changed, tuple(arguments), 1.0))


def _bases(start: Resolved) -> tuple[str, ...]:
    """How the base may be loaded: as it is where all of it is trained."""
    if start.lora is None:
        return ("",)
    own = quantization.of(start.train_args)
    return ("bf16", "nf4") if own is None or own.get("load_in_4bit") else ("bf16", "")


def _sizes(candidate: Candidate) -> Iterator[Candidate]:
    """Micro batches and shares of recomputation of one distribution, of which micro batch 1 with all layers is given."""
    used = candidate.strategy
    for micro in (size for size in MICRO if used.accumulation % size == 0):
        accumulation = used.accumulation // micro
        if used.virtual > 1 and accumulation % used.pp:
            continue  # the interleaved schedule takes whole rounds of micro batches
        for ratio in RATIOS:
            if ratio not in (0.0, 1.0) and used.kind != "FSDP2":
                continue
            recomputed = share(candidate.resolved, ratio, used.kind)
            recompute = replace(used.recompute, share=recomputed) if recomputed else Recompute()
            changed = replace(used, micro_batch=micro, accumulation=accumulation, recompute=recompute)
            yield replace(candidate, strategy=changed, ratio=ratio)


def _layouts(
    start: Resolved, counted: ParameterCount, machine: PlanMachine, nodes: int, base: str
) -> Iterator[tuple[str, RequestedLayout]]:
    """Families and distributions of one number of nodes."""
    each = start.recipe.slurm.gpus_per_node
    world, inner = nodes * each, min(machine.domain, each)
    plain = RequestedLayout("FSDP2", nodes, base=base)
    offloaded = replace(plain, offload_params="cpu", offload_optimizer="cpu")
    if world == 1:
        yield "one GPU", RequestedLayout("NO", nodes, base=base)
        yield "one GPU with CPU offload", offloaded
        return
    yield "DDP", RequestedLayout("DDP", nodes, base=base)
    yield "FSDP2", plain
    yield "FSDP2 without resharding", replace(plain, reshard=False)
    yield "FSDP2 with CPU offload", offloaded
    for shards in sorted({inner, inner // 2, 2 * inner} - {0, 1}):
        if world % shards == 0 and world > shards:
            yield f"HSDP {shards} x {world // shards}", replace(plain, replicas=world // shards)
    if base == "nf4":
        return
    for stage in (1, 2):
        yield f"ZeRO-{stage}", RequestedLayout(f"ZeRO-{stage}", nodes, base=base)
    yield "ZeRO-3 with CPU optimizer", RequestedLayout("ZeRO-3", nodes, base=base, offload_optimizer="cpu")
    nvme = RequestedLayout("ZeRO-3", nodes, base=base, offload_params="nvme", offload_optimizer="nvme")
    yield "ZeRO-3 on NVMe", nvme
    for size in (2, 4, 8):
        if size <= inner and world > size and world % size == 0:
            if _splits_heads(counted, size):
                yield f"TP {size} x FSDP2 {world // size}", replace(plain, tp=size)
            yield f"CP {size} x FSDP2 {world // size}", replace(plain, cp=size)
    yield from _megatron(counted, nodes, world, inner, base)


def _splits_heads(counted: ParameterCount, size: int) -> bool:
    return all(kind.attention.kv_heads % size == 0 and kind.attention.heads % size == 0 for kind in counted.layers)


def _megatron(counted: ParameterCount, nodes: int, world: int, inner: int, base: str) -> Iterator[tuple[str, RequestedLayout]]:
    """Megatron-Core: tensor, pipeline (plain and interleaved) and expert parallelism with the distributed optimizer."""
    layers = counted.num_layers
    experts = max((linear.copies for kind in counted.layers for linear in kind.linears), default=1)
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            shared, ends = tp * pp, layers % pp > 0
            pieces = layers + 2 * ends  # 126 layers of Llama 405B, embedding and loss are 128
            if tp > inner or not _splits_heads(counted, tp) or world % shared or pieces % pp or world < shared:
                continue
            layout = RequestedLayout("Megatron", nodes, base=base, tp=tp, pp=pp, ends=ends)
            if shared > 1:
                yield f"TP {tp} x PP {pp}", layout
            for virtual in (2, 4):
                if pp > 1 and pieces % (pp * virtual) == 0:
                    yield f"TP {tp} x PP {pp} interleaved", replace(layout, virtual=virtual)
            for ep in (2, 4, 8):
                if experts > 1 and experts % ep == 0 and world // shared % ep == 0:
                    yield f"TP {tp} x PP {pp} x EP {ep}", replace(layout, ep=ep)


# --- the search -----------------------------------------------------------------------------------------------------

Goal = Literal["time", "cost", "memory"]
NF4 = (
    "nf4 holds the base in 4 bits. QLoRA measured no loss by that: 53.1 % of MMLU beside 53.0 % in bf16, the mean of LLaMA 7B "
    "to 65B tuned on Alpaca and FLAN v2 (arXiv:2305.14314, table 4). eval.base: true shows whether it holds here"
)
"""What a strategy with a quantised base may cost in quality."""


@dataclass(frozen=True)
class CostedCandidate:
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
    seconds: Mapping[str, float] | None = None
    """Of the whole training by part; None where the number of steps is not known."""

    @property
    def hours(self) -> float | None:
        """Of the whole training."""
        return None if self.seconds is None else math.fsum(self.seconds.values()) / 3600

    @property
    def strategy(self) -> Strategy:
        return self.candidate.strategy

    def key(self, goal: Goal) -> float:
        """What is ranked: time, GPU-time, or bytes. Time is the whole training's in hours, else a step's in seconds."""
        if goal == "memory":
            return self.needed
        time = self.step_s if self.hours is None else self.hours
        return time * (self.strategy.gpus if goal == "cost" else 1)

    @property
    def quality(self) -> str:
        """What the strategy may cost in quality beside one that trains the same weights in 16 bits; empty: nothing, it computes
        the same."""
        loaded_as = quantization.of(self.candidate.resolved.train_args) or {}
        return NF4 if loaded_as.get("load_in_4bit") else ""

    def starts(self, cluster: Cluster) -> bool:
        """Whether this program starts it on the cluster: Megatron-Core only where the cluster file names its image."""
        return self.strategy.kind != "Megatron" or cluster.container.megatron is not None


@dataclass(frozen=True)
class Advice:
    """The best of each family, best first; then families of which nothing fits."""

    goal: Goal
    fitting: list[CostedCandidate]
    losing: list[CostedCandidate]
    searched: int
    refused: dict[str, str] = field(default_factory=dict)
    """Families that the libraries or the recipe do not allow, with the first reason."""


def advise(
    source: RecipeSource, machine: PlanMachine, constants: Constants, *, nodes: Iterable[int], goal: Goal = "time",
    lengths: Lengths | None = None,
) -> Advice:  # fmt: skip
    """Try every candidate at the recipe's global batch and keep the best of each family.

    Raises UserError where the architecture cannot be counted.
    """
    shape = make_shape(source.resolved, strategy(source.resolved), cudnn=machine.has_cudnn_attention)
    search = _Search(shape, machine, constants, lengths, goal)
    best: dict[str, CostedCandidate] = {}
    refused: dict[str, str] = {}
    searched = 0
    for candidate in candidates(source, search.shape.counted, machine, sorted(set(nodes))):
        if isinstance(candidate, tuple):
            refused.setdefault(*candidate)
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


def _ranked(options: list[CostedCandidate], goal: Goal) -> list[CostedCandidate]:
    """The best first; of those that the model cannot tell from it, the plainer one, then the one with more room."""
    ordered = sorted(options, key=lambda o: (o.key(goal), o.needed))
    alike = [o for o in ordered if o.key(goal) <= ALIKE * ordered[0].key(goal)]
    return sorted(alike, key=lambda o: (o.burdens, o.needed, o.key(goal))) + ordered[len(alike) :]


@dataclass(frozen=True)
class _Search:
    """What all candidates of a search share."""

    shape: ModelShape
    machine: PlanMachine
    constants: Constants
    lengths: Lengths | None
    goal: Goal

    def judge(self, candidate: Candidate, known: CostedCandidate | None) -> CostedCandidate | None:
        """The candidate's option where it is better than the known one of its family, else None."""
        real = replace(self.shape, strategy=real_length(candidate.strategy, self.lengths)[0])
        room = held(candidate.resolved, real, self.constants)
        needed = room.needed
        if (refusal := self._too_large(room)) is not None:
            if known is not None and (known.fits or known.needed <= needed):
                return None
            return CostedCandidate(candidate, float("inf"), needed, False, refusal)
        one = step(real, self.machine, self.constants)
        option = CostedCandidate(candidate, one.seconds, needed, True, _spent(one), self._burdens(real))
        return option if known is None or not known.fits or option.key(self.goal) < known.key(self.goal) else None

    def timed(self, option: CostedCandidate) -> CostedCandidate:
        """The option with the seconds of its whole training, and what most of them go to."""
        candidate = option.candidate
        plan = make_plan(
            candidate.resolved, self.machine, self.constants, lengths=self.lengths, chosen=candidate.strategy, sure=False
        )  # fmt: skip
        seconds = plan.totals()
        return option if seconds is None else replace(option, seconds=seconds, why=_largest(seconds, option.why))

    def _burdens(self, shape: ModelShape) -> int:
        places = (shape.strategy.offload_params, shape.strategy.offload_optimizer)
        return int(shape.quantised and not self.shape.quantised) + int(places != ("none", "none"))

    def _too_large(self, room: Footprint) -> str | None:
        """Which memory does not hold it, and what fills it."""
        usable, host = self.machine.usable_bytes, self.machine.host_bytes
        if room.needed > usable:
            largest = max(room.peak.parts, key=lambda term: term.value)
            return f"needs {room.needed / GIB:.0f} GiB of {usable / GIB:.0f}; {largest.name} {largest.value / GIB:.0f} GiB"
        if room.host_bytes > host:
            return f"needs {room.host_bytes / GIB:,.0f} GiB of a node's RAM, which is {host / GIB:,.0f}"
        return None


def _spent(one: Step) -> str:
    """The largest part of a step, as a phrase."""
    parts = {
        "computing": sum(term.value for term in one.compute),
        "exposed communication": one.exposed.value,
        "an idle pipeline": one.bubble.value,
        "the optimizer": one.optimizer.value,
        "generating answers": one.generation.value if one.generation else 0.0,
    }
    name, value = max(parts.items(), key=lambda item: item[1])
    text = f"{value / one.seconds:.0%} {name}"
    if name == "exposed communication" and one.wires:
        wire = max(one.wires, key=lambda w: w.term.value)
        text += f" ({wire.collective.name})"
    return text


AROUND = {"load": "loading the weights", "evaluation": "evaluations", "checkpoint": "saving"}
"""Parts of a training that lie around its steps, as a phrase."""


def _largest(seconds: Mapping[str, float], of_a_step: str) -> str:
    """The largest part of a whole training, as a phrase."""
    name = max(seconds, key=lambda part: seconds[part])
    return f"{seconds[name] / math.fsum(seconds.values()):.0%} {AROUND[name]}" if name in AROUND else of_a_step


def _longer(option: CostedCandidate, winner: CostedCandidate) -> str:
    """The part around the steps by which an option is slower than the winner; else what it spends its time on."""
    if option.seconds is None or winner.seconds is None:
        return option.why
    more = {name: value - winner.seconds.get(name, 0.0) for name, value in option.seconds.items()}
    name = max(more, key=lambda part: more[part])
    if name not in AROUND or more[name] <= 0:
        return option.why
    return f"{duration(more[name])} more for {AROUND[name]}"


def reasons(advice: Advice) -> list[tuple[CostedCandidate, str]]:
    """For each option but the winner, why it loses."""
    explained = []
    for option in advice.fitting[1:]:
        winner = advice.fitting[0]
        ratio = option.key(advice.goal) / winner.key(advice.goal)
        comparison = {"time": "the time", "cost": "the cost", "memory": "the memory"}[advice.goal]
        if ratio <= ALIKE:
            text = f"no difference above {ALIKE - 1:.0%}"
            if option.burdens > winner.burdens:
                text += ", but quantises or offloads more"
            if (more := option.needed - winner.needed) > 0:
                text += f", uses {more / GIB:.1f} GiB more per GPU"
            explained.append((option, f"{text}: {option.why}"))
            continue
        why = option.why if advice.goal == "memory" else _longer(option, winner)
        explained.append((option, f"{ratio:.2f}x {comparison}: {why}"))
    return explained + [(option, option.why) for option in advice.losing]


def overrides(advice: Advice, source: RecipeSource) -> dict[str, Sequence[str]]:
    """For each family that fits all the overrides that select its best, those that were given included."""
    return {o.candidate.family: source.all(o.candidate.arguments(source.resolved)) for o in advice.fitting}


# --- what would make a recipe fit: each change tried alone, the smallest first; two together where none is enough -----

MOST_NODES = 1024


@dataclass(frozen=True)
class Remedy:
    """One change after which it fits."""

    what: str
    arguments: list[str] | None
    """The recipe overrides that make it; None where the cluster is too small for it."""
    plan: Plan


@dataclass(frozen=True)
class _Change:
    what: str
    arguments: list[str]
    same: bool = True
    """The training computes the same numbers after it."""


def remedies(plan: Plan, named: tuple[str, ...] = ()) -> list[Remedy]:
    """The changes that are each enough, in the order of how little they change what is trained and on what.

    ``named``: the overrides with which the plan's recipe was resolved.
    """
    source = RecipeSource(plan.resolved, named)
    changes = list(_changes(plan))
    alone = [(change, _tried(plan, source, change)) for change in changes]
    singles = [remedy for change, remedy in alone if remedy is not None and change.same]
    singles += [remedy] if (remedy := _nodes(plan, source)) is not None else []
    singles += [remedy for change, remedy in alone if remedy is not None and not change.same]
    return singles if any(remedy.arguments for remedy in singles) else [*_pairs(plan, source, changes), *singles]


def _tried(plan: Plan, source: RecipeSource, change: _Change) -> Remedy | None:
    """The change where it is allowed and enough."""
    try:
        tried = _planned(plan, source.changed(change.arguments))
    except UserError:
        return None
    return Remedy(change.what, change.arguments, tried) if tried.fits else None


def _planned(plan: Plan, resolved: Resolved) -> Plan:
    return make_plan(resolved, plan.machine, plan.constants, lengths=plan.lengths, sure=False)


def _pairs(plan: Plan, source: RecipeSource, changes: list[_Change]) -> list[Remedy]:
    """Two changes together, the first that is enough with each other one."""
    pairs: list[Remedy] = []
    for index, one in enumerate(changes):
        for other in changes[index + 1 :]:
            keys = [{text.partition("=")[0] for text in change.arguments} for change in (one, other)]
            if keys[0] & keys[1] or any(one.what in remedy.what for remedy in pairs):
                continue
            both = _Change(f"{one.what}, and {other.what}", [*one.arguments, *other.arguments])
            remedy = _tried(plan, source, both)
            if remedy is not None:
                pairs.append(remedy)
    return pairs


def _changes(plan: Plan) -> Iterator[_Change]:
    used, start = plan.strategy, plan.resolved
    if plan.peak.name == EVALUATION:
        for size in (4, 2, 1):
            if size < used.eval_batch:
                yield _Change(f"evaluations of {size} rows a rank", [f"train.per_device_eval_batch_size={size}"])
    for ratio in (0.25, 0.5, 0.75, 1.0):
        if share(start, ratio, used.kind) > used.recompute.share and (ratio == 1 or used.kind != "Megatron"):
            text = f"recompute the activations of {ratio:.0%} of the layers"
            yield _Change(text, recomputation(start, ratio, used.kind))
    yield from _sharded(plan)
    for smaller in (2, 4, 8, 16):
        if used.micro_batch % smaller == 0:
            size = used.micro_batch // smaller
            text = f"a micro batch of {size}, accumulated {used.accumulation * smaller} times"
            yield _Change(text, [f"train.per_device_train_batch_size={size}"])
    if used.kind == "FSDP2" and used.offload_params == "none":
        yield _Change("weights and optimizer state in host memory", [f"accelerate.{acc.key_of('offload_params')}=true"])
    if used.lora and not plan.shape.quantised and used.kind in ("FSDP2", "DDP", "NO"):
        yield _Change("a base quantised to NF4", loaded(start, "nf4"), same=False)
    key = "train.max_completion_length" if plan.resolved.is_grpo else "train.max_length"
    for length in (4096, 2048, 1024, 512):
        if length < used.sequence:
            yield _Change(f"sequences of {length} tokens", [f"{key}={length}"], same=False)


def _sharded(plan: Plan) -> Iterator[_Change]:
    """What is whole on every rank, split over them."""
    used, start = plan.strategy, plan.resolved
    nodes = start.recipe.slurm.nodes
    if used.kind == "FSDP2" and not used.reshard and used.weight_shards > 1:
        layout = RequestedLayout("FSDP2", nodes, used.replicas, used.tp, cp=used.cp, offload_params=used.offload_params)
        yield _Change("give the weights back after forward", distribution(start, layout))
    elif used.kind in ("DDP", "ZeRO-0", "ZeRO-1", "ZeRO-2") and used.world_size > 1:
        arguments = distribution(start, RequestedLayout("FSDP2", nodes))
        yield _Change("FSDP2, which splits the weights over the ranks", arguments)
    elif used.replicas > 1:
        arguments = distribution(start, RequestedLayout("FSDP2", nodes, tp=used.tp, cp=used.cp, reshard=used.reshard))
        yield _Change("one copy of the weights over all nodes", arguments)


def _nodes(plan: Plan, source: RecipeSource) -> Remedy | None:
    """The fewest nodes on which it fits; without arguments where the cluster has not as many."""
    used, beside = plan.strategy, plan.strategy.server_nodes
    for count in range(used.nodes + 1, MOST_NODES + 1):
        each = used.tp * used.pp * used.cp * used.replicas
        world = count * used.ranks_per_node
        batch = used.data_parallel_size * used.micro_batch * used.accumulation
        if world > plan.machine.domain and plan.machine.inter.bytes_per_s <= 0:
            return None
        if world % each or batch % (world // (used.tp * used.pp * used.cp) * used.micro_batch):
            continue
        arguments = [f"slurm.nodes={count}"]
        if used.kind == "FSDP2" and used.tp * used.cp * used.replicas > 1:
            arguments.append(f"accelerate.{acc.key_of('dp_shard')}={world // each}")
        try:
            tried = _planned(replace(plan, machine=replace(plan.machine, nodes=count + beside)), source.changed(arguments))
        except UserError:
            continue
        if tried.fits:
            text = f"{count} nodes instead of {used.nodes}"
            if count + beside > plan.machine.nodes:
                return Remedy(f"{text}; {plan.machine.name} has {plan.machine.nodes}", None, tried)
            return Remedy(text, arguments, tried)
    return None
