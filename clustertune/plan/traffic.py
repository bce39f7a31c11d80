"""What a rank sends in one optimizer step, collective by collective, from the strategy alone; and how long a collective takes.

Ranks are numbered as accelerate's mesh and Megatron-Core do: tensor parallel innermost, then context, then data parallel,
pipeline outermost; the ranks of a node follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from clustertune.plan.machine import PlanMachine
from clustertune.plan.shape import ModelShape

# --- process groups on the machine, and how long a collective over one takes ------------------------------------------


@dataclass(frozen=True)
class RankGroup:
    """``size`` ranks, ``stride`` apart."""

    size: int
    stride: int = 1

    def inside(self, machine: PlanMachine) -> bool:
        """Whether all members are joined by the fast link."""
        return self.size * self.stride <= machine.domain or self.size == 1

    def bandwidth(self, machine: PlanMachine, intra_scale: float = 1.0, inter_scale: float = 1.0) -> float:
        """Bytes per second of a ring over the group, per member.

        A ring that leaves the node (or the NVLink domain) crosses its border once in each direction; all groups that have
        members in one node share its network cards.
        """
        intra = machine.intra.bytes_per_s * intra_scale
        if self.inside(machine):
            return intra
        members = max(1, machine.domain // self.stride)
        sharing = machine.domain // members
        nodes = max(1, machine.domain // machine.gpus_per_node)
        inter = machine.inter.bytes_per_s * inter_scale * nodes / max(1, sharing)
        return min(intra, inter) if members > 1 else inter

    def latency(self, machine: PlanMachine) -> float:
        """Seconds of one step from a member to the next, the slowest."""
        return machine.intra.latency_s if self.inside(machine) else machine.inter.latency_s


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step."""

    name: str
    kind: str
    """``gather`` (all-gather and reduce-scatter move as much), ``reduce`` (all-reduce), ``exchange`` (all-to-all), ``send``."""
    group: RankGroup
    size: float
    """Bytes of the whole tensor (of what one rank sends, for ``exchange`` and ``send``) of all calls together."""
    calls: float
    """How many calls that is, for the latency."""

    def seconds(self, machine: PlanMachine, intra_scale: float = 1.0, inter_scale: float = 1.0) -> float:
        """Time on the wire: a ring's (nccl-tests' definition of the bus bandwidth), and its latency."""
        members = self.group.size
        if members == 1 or self.size == 0:
            return 0.0
        if self.kind == "exchange":
            return self._exchange(machine, intra_scale, inter_scale)
        share = 1.0 if self.kind == "send" else (members - 1) / members * (2 if self.kind == "reduce" else 1)
        bandwidth = self.group.bandwidth(machine, intra_scale, inter_scale)
        return self.size * share / bandwidth + self.latency(machine)

    def latency(self, machine: PlanMachine) -> float:
        """Seconds of all calls that no bandwidth shortens: a ring has a step less than members."""
        steps = 1 if self.kind in ("send", "exchange") else self.group.size - 1
        return self.calls * steps * self.group.latency(machine)

    def _exchange(self, machine: PlanMachine, intra_scale: float, inter_scale: float) -> float:
        """All-to-all: every rank of a node sends at once what goes to other nodes through the node's network cards."""
        members, near = self.group.size, self.group.size
        latency = self.latency(machine)
        if not self.group.inside(machine):
            near = max(1, machine.domain // self.group.stride)
        inside = self.size * (near - 1) / members / (machine.intra.bytes_per_s * intra_scale)
        if near == members:
            return inside + latency
        card = machine.inter.bytes_per_s * inter_scale / machine.gpus_per_node
        return max(inside, self.size * (members - near) / members / card) + latency

    @property
    def factor(self) -> str:
        """The share of the tensor that one member moves, as text."""
        if self.kind == "send":
            return "1"
        return f"{2 if self.kind == 'reduce' else 1} x {self.group.size - 1}/{self.group.size}"


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


def traffic(shape: ModelShape) -> Traffic:
    """All collectives of a step. Sizes follow the tensors; see each part's comment for where it is from."""
    plan = shape.strategy
    result = Traffic([], [], [], [], [])
    shards = RankGroup(plan.weight_shards, plan.tp)
    if plan.weight_shards > 1:
        gathered = Collective(_gather_name(shape), "gather", shards, shape.gathered, shape.layers + 1)
        result.forward.extend([gathered, gathered] if plan.second_forward else [gathered])
        if plan.reshard:
            result.backward.append(gathered)
    _gradients(shape, result)
    _tensor(shape, result)
    _context(shape, result)
    _experts(shape, result)
    if plan.pp > 1:
        sent = shape.tokens * shape.counted.hidden * ACTIVATION_BYTES / (plan.tp if plan.sequence_parallel else 1)
        stages = RankGroup(plan.pp, plan.world_size // plan.pp)
        result.exposed.append(Collective("pipeline send", "send", stages, 2 * sent * plan.virtual, 2 * plan.virtual))
    return result


def _gather_name(shape: ModelShape) -> str:
    return "all-gather of the weights" if shape.strategy.kind != "Megatron" else "all-gather of the updated weights"


def _gradients(shape: ModelShape, result: Traffic) -> None:
    """Reduce-scatter where gradients are split, all-reduce where each rank keeps them; HSDP both, one after the other.

    transformers' Trainer holds the reduction back until a step's last micro batch (no_sync) but under DeepSpeed, whose stages 2
    and 3 reduce in every backward pass.
    """
    plan = shape.strategy
    size = shape.local_trained * plan.reduce_bytes
    every = plan.reduce_each or plan.kind in ("ZeRO-2", "ZeRO-3")
    when = result.backward if every else result.last
    layers = shape.layers + 1
    if plan.gradient_shards > 1:
        group = RankGroup(plan.gradient_shards, plan.tp)
        when.append(Collective("reduce-scatter of the gradients", "gather", group, size, layers))
        size /= plan.gradient_shards
    elif plan.state_shards > 1 and plan.weight_shards == 1:
        # ZeRO-1 and Megatron's distributed optimizer keep whole gradients, but each rank needs the sum of its share only.
        group = RankGroup(plan.state_shards, plan.tp)
        when.append(Collective("reduce-scatter of the gradients", "gather", group, size, layers))
    elif plan.data_parallel_size * plan.cp // plan.replicas > 1 and plan.weight_shards == 1:
        group = RankGroup(plan.data_parallel_size * plan.cp // plan.replicas, plan.tp)
        when.append(Collective("all-reduce of the gradients", "reduce", group, size, layers))
    if plan.replicas > 1:
        group = RankGroup(plan.replicas, plan.tp * plan.data_parallel_size * plan.cp // plan.replicas)
        when.append(Collective("all-reduce of the gradients between replicas", "reduce", group, size, layers))
    if plan.state_shards > 1 and plan.weight_shards == 1:
        # ZeRO-1, ZeRO-2 and Megatron's distributed optimizer: each rank updates its share, then all need all of it.
        updated = shape.local_trained * ACTIVATION_BYTES
        result.after.append(
            Collective("all-gather of the updated weights", "gather", RankGroup(plan.state_shards, plan.tp), updated, 1)
        )


def _tensor(shape: ModelShape, result: Traffic) -> None:
    """Two all-reduces of a layer's output in forward and two in backward (https://arxiv.org/abs/1909.08053, 3); with sequence
    parallelism an all-gather and a reduce-scatter each, which move as much. Recomputation repeats the forward ones."""
    plan = shape.strategy
    if plan.tp == 1:
        return
    size = shape.tokens * shape.counted.hidden * ACTIVATION_BYTES
    group, name = RankGroup(plan.tp), "tensor-parallel all-reduce"
    if plan.overlap_tp:
        forward, backward = 2 * shape.layers, shape.layers * (2 + 2 * plan.recompute.share)
        result.forward.append(Collective(name, "reduce", group, forward * size, forward))
        result.backward.append(Collective(name, "reduce", group, backward * size, backward))
        return
    calls = shape.layers * (4 + 2 * plan.recompute.share)
    result.exposed.append(Collective(name, "reduce", group, calls * size, calls))


def _context(shape: ModelShape, result: Traffic) -> None:
    """Ring attention: keys and values of all other ranks pass by, their gradients in backward as well
    (https://arxiv.org/abs/2310.01889)."""
    plan = shape.strategy
    if plan.cp == 1:
        return
    group = RankGroup(plan.cp, plan.tp)
    width = (
        sum(k.count * k.attention.kv_heads * (k.attention.qk_dim + k.attention.v_dim) for k in shape.counted.layers) / plan.pp
    )
    whole = width * plan.micro_batch * plan.sequence * ACTIVATION_BYTES / plan.tp
    calls = shape.layers
    result.forward.append(Collective("keys and values around the ring", "gather", group, whole, calls))
    again = 2 + plan.recompute.share
    result.backward.append(
        Collective("keys, values and their gradients around the ring", "gather", group, again * whole, calls)
    )


def _experts(shape: ModelShape, result: Traffic) -> None:
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
    rounds = 4 + 2 * plan.recompute.share
    calls = rounds * shape.layers
    result.exposed.append(
        Collective("all-to-all of the experts", "exchange", RankGroup(plan.ep, plan.tp), rounds * size, calls)
    )
