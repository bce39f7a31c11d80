"""What would make a recipe fit: each change tried alone, the smallest first; two together where none is enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from clustertune.config import accelerate_file as acc
from clustertune.config import overrides
from clustertune.config.overrides import RecipeSource, RequestedLayout
from clustertune.config.resolved import Resolved
from clustertune.errors import UserError
from clustertune.plan.predict import Plan, make_plan

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


def remedies(plan: Plan, given: tuple[str, ...] = ()) -> list[Remedy]:
    """The changes that are each enough, in the order of how little they change what is trained and on what.

    ``given``: the overrides with which the plan's recipe was resolved.
    """
    source = RecipeSource(plan.resolved, given)
    changes = list(_changes(plan))
    alone = [(change, _tried(plan, source, change)) for change in changes]
    found = [remedy for change, remedy in alone if remedy is not None and change.same]
    found += [remedy] if (remedy := _nodes(plan, source)) is not None else []
    found += [remedy for change, remedy in alone if remedy is not None and not change.same]
    return found if any(remedy.arguments for remedy in found) else [*_pairs(plan, source, changes), *found]


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
    found: list[Remedy] = []
    for index, one in enumerate(changes):
        for other in changes[index + 1 :]:
            keys = [{text.partition("=")[0] for text in change.arguments} for change in (one, other)]
            if keys[0] & keys[1] or any(one.what in remedy.what for remedy in found):
                continue
            both = _Change(f"{one.what}, and {other.what}", [*one.arguments, *other.arguments])
            remedy = _tried(plan, source, both)
            if remedy is not None:
                found.append(remedy)
    return found


def _changes(plan: Plan) -> Iterator[_Change]:
    used, start = plan.strategy, plan.resolved
    for ratio in (0.25, 0.5, 0.75, 1.0):
        if overrides.share(start, ratio, used.kind) > used.recompute.share and (ratio == 1 or used.kind != "Megatron"):
            text = f"recompute the activations of {ratio:.0%} of the layers"
            yield _Change(text, overrides.recomputation(start, ratio, used.kind))
    yield from _sharded(plan)
    for smaller in (2, 4, 8, 16):
        if used.micro_batch % smaller == 0:
            size = used.micro_batch // smaller
            text = f"a micro batch of {size}, accumulated {used.accumulation * smaller} times"
            yield _Change(text, [f"train.per_device_train_batch_size={size}"])
    if used.kind in ("FSDP1", "FSDP2") and used.offload_params == "none":
        yield _Change("weights and optimizer state in host memory", [f"accelerate.{acc.key_of('offload_params')}=true"])
    if used.lora and not plan.shape.quantised and used.kind in ("FSDP2", "DDP", "NO"):
        yield _Change("a base quantised to NF4", overrides.loaded(start, "nf4"), same=False)
    for length in (4096, 2048, 1024, 512):
        if length < used.sequence:
            yield _Change(f"sequences of {length} tokens", [f"train.max_length={length}"], same=False)


def _sharded(plan: Plan) -> Iterator[_Change]:
    """What is whole on every rank, split over them."""
    used, start = plan.strategy, plan.resolved
    nodes = start.recipe.slurm.nodes
    if used.kind in ("FSDP2", "FSDP1") and not used.reshard and used.weight_shards > 1:
        layout = RequestedLayout("FSDP2", nodes, used.replicas, used.tp, cp=used.cp, offload_params=used.offload_params)
        yield _Change("give the weights back after forward", overrides.distribution(start, layout))
    elif used.kind in ("DDP", "ZeRO-0", "ZeRO-1", "ZeRO-2") and used.world_size > 1:
        arguments = overrides.distribution(start, RequestedLayout("FSDP2", nodes))
        yield _Change("FSDP2, which splits the weights over the ranks", arguments)
    elif used.replicas > 1:
        arguments = overrides.distribution(start, RequestedLayout("FSDP2", nodes, tp=used.tp, cp=used.cp, reshard=used.reshard))
        yield _Change("one copy of the weights over all nodes", arguments)


def _nodes(plan: Plan, source: RecipeSource) -> Remedy | None:
    """The fewest nodes on which it fits; without arguments where the cluster has not as many."""
    used = plan.strategy
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
            tried = _planned(replace(plan, machine=replace(plan.machine, nodes=count)), source.changed(arguments))
        except UserError:
            continue
        if tried.fits:
            text = f"{count} nodes instead of {used.nodes}"
            if count > plan.machine.nodes:
                return Remedy(f"{text}; {plan.machine.name} has {plan.machine.nodes}", None, tried)
            return Remedy(text, arguments, tried)
    return None
