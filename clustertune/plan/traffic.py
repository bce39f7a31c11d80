"""What a rank sends in one optimizer step, collective by collective, from the strategy alone."""

from __future__ import annotations

from dataclasses import dataclass

from clustertune.plan.groups import Collective, Group
from clustertune.plan.shape import Shape

ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Traffic:
    """The collectives of one micro batch and of the end of a step."""

    forward: list[Collective]
    """Beside the forward pass of each micro batch: the next layer's weights travel while this one computes."""
    backward: list[Collective]
    """Beside the backward pass of each micro batch."""
    last: list[Collective]
    """Beside the backward pass of the last micro batch of a step: gradients."""
    exposed: list[Collective]
    """Of each micro batch, with nothing beside them: the next product needs the result."""
    after: list[Collective]
    """After the optimizer step."""


def traffic(shape: Shape) -> Traffic:
    """All collectives of a step. Sizes follow the tensors; see each part's comment for where it is from."""
    plan = shape.strategy
    result = Traffic([], [], [], [], [])
    shards = Group(plan.weight_shards, plan.tp)
    if plan.weight_shards > 1:
        gathered = Collective(_gather_name(shape), "gather", shards, shape.gathered, shape.layers + 1)
        result.forward.extend([gathered, gathered] if plan.whole_forward else [gathered])
        if plan.reshard:
            result.backward.append(gathered)
    _gradients(shape, result)
    _tensor(shape, result)
    _context(shape, result)
    _experts(shape, result)
    if plan.pp > 1:
        sent = shape.tokens * shape.counted.hidden * ACTIVATION_BYTES / (plan.tp if plan.sequence_parallel else 1)
        stages = Group(plan.pp, plan.world // plan.pp)
        result.exposed.append(Collective("pipeline send", "send", stages, 2 * sent * plan.virtual, 2 * plan.virtual))
    return result


def _gather_name(shape: Shape) -> str:
    return "all-gather of the weights" if shape.strategy.kind != "Megatron" else "all-gather of the updated weights"


def _gradients(shape: Shape, result: Traffic) -> None:
    """Reduce-scatter where gradients are split, all-reduce where each rank keeps them; HSDP both, one after the other.

    transformers' Trainer holds the reduction back until a step's last micro batch (no_sync) but under DeepSpeed, whose stages 2
    and 3 reduce in every backward pass.
    """
    plan = shape.strategy
    size = shape.local_trained * plan.reduce_bytes
    every = plan.reduce_each or plan.kind in ("ZeRO-2", "ZeRO-3")
    place = result.backward if every else result.last
    layers = shape.layers + 1
    if plan.gradient_shards > 1:
        group = Group(plan.gradient_shards, plan.tp)
        place.append(Collective("reduce-scatter of the gradients", "gather", group, size, layers))
        size /= plan.gradient_shards
    elif plan.state_shards > 1 and plan.weight_shards == 1:
        # ZeRO-1 and Megatron's distributed optimizer keep whole gradients, but each rank needs the sum of its share only.
        group = Group(plan.state_shards, plan.tp)
        place.append(Collective("reduce-scatter of the gradients", "gather", group, size, layers))
    elif plan.dp * plan.cp // plan.replicas > 1 and plan.weight_shards == 1:
        group = Group(plan.dp * plan.cp // plan.replicas, plan.tp)
        place.append(Collective("all-reduce of the gradients", "reduce", group, size, layers))
    if plan.replicas > 1:
        group = Group(plan.replicas, plan.tp * plan.dp * plan.cp // plan.replicas)
        place.append(Collective("all-reduce of the gradients between replicas", "reduce", group, size, layers))
    if plan.state_shards > 1 and plan.weight_shards == 1:
        # ZeRO-1, ZeRO-2 and Megatron's distributed optimizer: each rank updates its share, then all need all of it.
        updated = shape.local_trained * ACTIVATION_BYTES
        result.after.append(
            Collective("all-gather of the updated weights", "gather", Group(plan.state_shards, plan.tp), updated, 1)
        )


def _tensor(shape: Shape, result: Traffic) -> None:
    """Two all-reduces of a layer's output in forward and two in backward (https://arxiv.org/abs/1909.08053, 3); with sequence
    parallelism an all-gather and a reduce-scatter each, which move as much. Recomputation repeats the forward ones."""
    plan = shape.strategy
    if plan.tp == 1:
        return
    size = shape.tokens * shape.counted.hidden * ACTIVATION_BYTES
    group, name = Group(plan.tp), "tensor-parallel all-reduce"
    if plan.overlap_tp:
        forward, backward = 2 * shape.layers, shape.layers * (2 + 2 * plan.checkpointed)
        result.forward.append(Collective(name, "reduce", group, forward * size, forward))
        result.backward.append(Collective(name, "reduce", group, backward * size, backward))
        return
    calls = shape.layers * (4 + 2 * plan.checkpointed)
    result.exposed.append(Collective(name, "reduce", group, calls * size, calls))


def _context(shape: Shape, result: Traffic) -> None:
    """Ring attention: keys and values of all other ranks pass by, their gradients in backward as well
    (https://arxiv.org/abs/2310.01889)."""
    plan = shape.strategy
    if plan.cp == 1:
        return
    group = Group(plan.cp, plan.tp)
    width = (
        sum(k.count * k.attention.kv_heads * (k.attention.qk_dim + k.attention.v_dim) for k in shape.counted.layers) / plan.pp
    )
    whole = width * plan.micro_batch * plan.sequence * ACTIVATION_BYTES / plan.tp
    calls = shape.layers
    result.forward.append(Collective("keys and values around the ring", "gather", group, whole, calls))
    again = 2 + plan.checkpointed
    result.backward.append(
        Collective("keys, values and their gradients around the ring", "gather", group, again * whole, calls)
    )


def _experts(shape: Shape, result: Traffic) -> None:
    """Each token goes to its experts and comes back, in forward and in backward."""
    plan = shape.strategy
    if plan.ep == 1:
        return
    passes = 0.0
    for kind in shape.counted.layers:
        experts = [linear.active for linear in kind.linears if linear.copies > 1]
        passes += kind.count * (max(experts) if experts else 0)
    size = (
        shape.tokens * shape.counted.hidden * ACTIVATION_BYTES * passes / plan.pp / (plan.tp if plan.sequence_parallel else 1)
    )
    rounds = 4 + 2 * plan.checkpointed
    calls = rounds * shape.layers
    result.exposed.append(Collective("all-to-all of the experts", "exchange", Group(plan.ep, plan.tp), rounds * size, calls))
