"""The time of one optimizer step by part: computing, communication that nothing hides, the pipeline's bubble, the optimizer.

Matrix products take their FLOPs, everything else the bytes that it moves through the GPU's memory. Communication runs beside
computing as FSDP prefetches: of each pass the longer one counts, and a small share of the shorter. What the next product
waits for (tensor, expert and pipeline parallelism) counts whole.

FLOPs of a matrix product of (t x n) and (n x m): 2 t n m. Backward takes as many for the input's gradient and, for trained
weights, as many again for the weight's. LoRA's frozen base has no weight gradients. A checkpointed layer runs forward twice.
Attention by a fused kernel: forward 2 products over the causal half, backward 5 (https://arxiv.org/abs/2307.08691, 3.1).
Packed conversations: the causal half of each, or under a mask the whole square of the micro batch, which no kernel skips parts
of. Padded rows count as the causal half, as in the runs that ``attention_share`` was fitted to.

Ranks are numbered as accelerate's mesh and Megatron-Core do: tensor parallel innermost, then context, then data parallel,
pipeline outermost; the ranks of a node follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clustertune.plan import generation_cost
from clustertune.plan.constants import SECONDS, Constants, Term, total
from clustertune.plan.machine import PlanMachine
from clustertune.plan.memory import WHOLE, SavedActivations
from clustertune.plan.strategy import ModelShape, Strategy
from clustertune.recipe.parameters import LayerKind

# --- computing --------------------------------------------------------------------------------------------------------

ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class ComputeTime:
    """One micro batch on one rank (of a pipeline: one stage)."""

    forward: list[Term]
    backward: list[Term]

    @property
    def seconds(self) -> float:
        return total(self.forward) + total(self.backward)


def micro_batch(shape: ModelShape, machine: PlanMachine, constants: Constants) -> ComputeTime:
    """The parts of one micro batch, forward and backward."""
    work = _KernelTimes(shape, machine, constants)
    forward = [*work.products(1, "forward"), work.attention(1, "forward"), work.elements(1, "forward"), work.loss(1)]
    again = shape.strategy.recompute.share
    backward = [
        *work.products(1 if shape.strategy.lora else 2, "backward"),
        work.attention(ATTENTION_BACKWARD, "backward"),
        work.elements(2, "backward"),
        work.loss(2),
    ]
    if shape.strategy.lora:
        forward.append(work.adapters(1))
        backward.append(work.adapters(2 + again))
        forward.append(work.expert_updates(1))
        backward.append(work.expert_updates(2 + again))
    if name := shape.strategy.second_forward:
        forward += [*work.products(1, name), work.attention(1, name), work.elements(1, name), work.loss(1)]
    if shape.quantised and shape.strategy.compute != "fp8":
        forward.append(work.dequantising(2 if shape.strategy.second_forward else 1))
        backward.append(work.dequantising(1 + again * SavedActivations(shape, constants).products_again))
    if shape.strategy.weight_bytes == 4 and shape.strategy.weight_shards > 1:
        forward.append(work.casts(1))
        backward.append(work.casts(2 if shape.strategy.reshard else 1))
    if head := shape.strategy.head_again:
        backward.append(work.products(head, "recomputation")[1])
    if again:
        name, policy = "recomputation", SavedActivations(shape, constants)
        backward += work.products(again * policy.products_again, name, head=False)
        backward += [work.attention(again * policy.attention_again, name), work.elements(again, name)]
    return ComputeTime([t for t in forward if t.value], [t for t in backward if t.value])


def flops(shape: ModelShape, *, hardware: bool, attention: bool = True) -> float:
    """FLOPs of one optimizer step over all ranks: the model's, or with ``hardware`` also what is computed again, and LoRA's
    update of experts. A reference's forward pass is the model's. ``attention``: its scores and sums, else products alone.

    Of LoRA the frozen base counts 4 per parameter and token, its adapters 6; attention counts the causal half of each
    conversation, with ``hardware`` what a mask makes of it.
    """
    plan, counted = shape.strategy, shape.counted
    policy = SavedActivations(shape, Constants())
    again = plan.recompute.share if hardware else 0.0
    second = int(plan.second_forward == "reference")
    passes = (2 if plan.lora else 3) + second + again * policy.products_again
    looks = (1 + second + ATTENTION_BACKWARD + again * policy.attention_again) if attention else 0.0
    per_token = 0.0
    for kind in counted.layers:
        per_token += kind.count * (2 * kind.active_matmul * passes + _attention_flops(kind, plan, masks=hardware) * looks)
    head = (2 if plan.lora else 3) + second + (plan.head_again if hardware else 0)
    per_token += 2 * shape.head_weights * head + (6 + 2 * again) * shape.per_token
    updates = 2 * shape.rank * shape.all_experts * (3 + again) * plan.accumulation * plan.world_size if hardware else 0.0
    return per_token * shape.step_tokens + updates


def _attention_flops(kind: LayerKind, plan: Strategy, *, masks: bool = True) -> float:
    """Forward FLOPs of one token in one layer: it sees half of its conversation, or its window; under a mask (unless not
    ``masks``) the kernel computes the whole row."""
    attention, length = kind.attention, plan.conversation or plan.sequence
    seen = length / 2
    if attention.window is not None and attention.window < length:
        window = attention.window
        seen = window * (1 - window / (2 * length))
    if masks and plan.packing and plan.isolated and plan.attention != "flash":
        seen = plan.row
    return 2 * attention.heads * (attention.qk_dim + attention.v_dim) * seen


@dataclass(frozen=True)
class _KernelTimes:
    """The computation of one micro batch on one GPU, part by part."""

    shape: ModelShape
    machine: PlanMachine
    constants: Constants

    @property
    def speed(self) -> float:
        """FLOP/s of matrix products in the type that the strategy computes in."""
        machine, constants = self.machine, self.constants
        peak = machine.peak_flops * constants.gemm(machine.generation)
        compute = self.shape.strategy.compute
        if compute == "fp8" and machine.peak_flops_fp8:
            peak = machine.peak_flops_fp8 * constants.gemm(machine.generation) * constants.fp8_share[machine.generation]
        if compute == "fp32":
            peak /= 2  # TF32: half of bfloat16 on every generation that has both
        return peak / constants.compute_scale

    @property
    def dense_speed(self) -> float:
        """FLOP/s of products that stay in 16 bits where the base computes in float8: adapters, attention."""
        machine, constants = self.machine, self.constants
        return machine.peak_flops * constants.gemm(machine.generation) / constants.compute_scale

    @property
    def memory(self) -> float:
        """Bytes per second of kernels that only move data."""
        return self.machine.hbm_bytes_per_s * self.constants.hbm_share / self.constants.compute_scale

    def products(self, passes: float, name: str, *, head: bool = True) -> list[Term]:
        """Linear layers and the output head; ``passes`` in units of a forward pass."""
        plan, shape = self.shape.strategy, self.shape
        weights = sum(kind.count * kind.active_matmul for kind in shape.counted.layers) / plan.pp / plan.tp
        sizes = {"matrix products": weights}
        if head:
            # Of a pipeline the last stage alone has the head; the schedule waits for the slowest stage.
            sizes["output head"] = shape.head_weights / plan.tp
        text = "{passes} FLOPs x {weights} weights x {tokens} tokens / {speed} FLOP/s"
        values = {"tokens": shape.tokens, "passes": 2 * passes, "speed": self.speed}
        each = 2 * passes * shape.tokens / self.speed
        return [Term(f"{what}, {name}", each * size, SECONDS, text, values | {"weights": size}) for what, size in sizes.items()]

    def attention(self, passes: float, name: str) -> Term:
        """Scores and weighted sums of attention."""
        plan, shape = self.shape.strategy, self.shape
        per_token = sum(kind.count * _attention_flops(kind, plan) for kind in shape.counted.layers) / plan.pp / plan.tp
        speed = self.dense_speed * self.constants.attention_share
        value = passes * per_token * shape.tokens / speed
        values = {"passes": passes, "flops": per_token, "tokens": shape.tokens, "speed": speed}
        return Term(f"attention, {name}", value, SECONDS, "{passes} x {flops} FLOPs x {tokens} tokens / {speed} FLOP/s", values)

    def elements(self, passes: float, name: str) -> Term:
        """Norms, activations, residuals, rotary embeddings and casts: bytes over bandwidth."""
        plan, shape, constants = self.shape.strategy, self.shape, self.constants
        hidden = constants.compiled_hidden if plan.compiled or plan.liger else constants.eager_hidden
        hidden = constants.engine_hidden if plan.is_megatron else hidden
        # A forward pass is a third of forward and backward together.
        width = shape.counted.num_layers * hidden * shape.counted.hidden / 3
        width /= plan.pp * (plan.tp if plan.sequence_parallel else 1)
        value = passes * width * 2 * shape.tokens / self.memory
        values = {"passes": passes, "width": width, "tokens": shape.tokens, "speed": self.memory}
        text = "{passes} x {width} elements x 2 B x {tokens} tokens / {speed} B/s"
        return Term(f"element-wise kernels, {name}", value, SECONDS, text, values)

    def casts(self, passes: float) -> Term:
        """A float32 shard is cast before each all-gather, and the reduced gradient copied into its shard: 6 to 8 bytes each."""
        count = self.shape.parameters / self.shape.strategy.weight_shards
        values = {"passes": passes, "count": count, "speed": self.memory}
        text = "{passes} x 7 B x {count} parameters / {speed} B/s"
        return Term("casts of the shards", passes * 7 * count / self.memory, SECONDS, text, values)

    def dequantising(self, passes: float) -> Term:
        """Each use of a quantised weight writes it out in 16 bits first: no fused product is used in training
        (bitsandbytes/autograd/_functions.py, MatMul4Bit)."""
        shape = self.shape
        size = shape.strategy.weight_bytes + 2
        values = {"passes": passes, "count": shape.packed, "bytes": size, "speed": self.memory}
        text = "{passes} x {count} parameters x {bytes} B / {speed} B/s"
        return Term("dequantising", passes * shape.packed * size / self.memory, SECONDS, text, values)

    def loss(self, passes: float) -> Term:
        """Cross-entropy over the vocabulary: a third in the forward pass, two in the backward pass."""
        plan, shape = self.shape.strategy, self.shape
        size = self.constants.loss_bytes / (3 if plan.fused_loss or plan.is_megatron else 1)
        entries = shape.counted.vocabulary / plan.tp
        value = passes / 3 * size * entries * shape.tokens / self.memory
        values = {"passes": passes / 3, "bytes": size, "entries": entries, "tokens": shape.tokens, "speed": self.memory}
        text = "{passes} x {bytes} B x {entries} vocabulary entries x {tokens} tokens / {speed} B/s"
        return Term("cross-entropy", value, SECONDS, text, values)

    def adapters(self, passes: float) -> Term:
        """LoRA's own products: the bytes of inputs and outputs where the rank is small, the FLOPs where it is large."""
        shape = self.shape
        weights = shape.per_token / (shape.strategy.tp * shape.strategy.pp)
        width = self.constants.lora_passes / 3 * weights / max(1, shape.rank)
        moved, computed = width * 2 / self.memory, 2 * weights / self.dense_speed
        values: dict[str, float | int | str] = {"passes": passes, "tokens": shape.tokens}
        if computed > moved:
            values |= {"weights": weights, "speed": self.dense_speed}
            text = "{passes} x 2 FLOPs x {weights} weights x {tokens} tokens / {speed} FLOP/s"
        else:
            values |= {"width": width, "speed": self.memory}
            text = "{passes} x {width} elements x 2 B x {tokens} tokens / {speed} B/s"
        return Term("LoRA", passes * max(moved, computed) * shape.tokens, SECONDS, text, values)

    def expert_updates(self, passes: float) -> Term:
        """B A of every adapted expert, whatever tokens come: written, read with the weights, and their sum written."""
        count, rank = self.shape.all_experts, self.shape.rank
        values = {"passes": passes, "count": count, "rank": rank, "speed": self.speed, "memory": self.memory}
        text = "{passes} x {count} parameters of experts x (2 x {rank} FLOPs / {speed} FLOP/s + 4 x 2 B / {memory} B/s)"
        value = passes * count * (2 * rank / self.speed + 8 / self.memory)
        return Term("LoRA on experts", value, SECONDS, text, values)


# --- what a rank sends, collective by collective, from the strategy alone; and how long a collective takes ------------


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

    def nominal(self, machine: PlanMachine) -> float:
        """The most that it could be: what the link promises, and of all nodes that an NVLink domain joins, if one group is all
        that leaves it."""
        if self.inside(machine):
            return machine.intra.nominal_bytes_per_s
        return machine.inter.nominal_bytes_per_s * max(1, machine.domain // machine.gpus_per_node)

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
ASYNC_TP = 0.4
"""Share of the tensor-parallel traffic that runs beside the products where it may. Of 70B on 256 H100 (torchtitan, pull request
1299, and its benchmark of December 2024) asynchronous TP took 2.3 s in bfloat16 and 1.1 s in float8 off a step whose sums take
4.2 s by this model: 55 and 25 %."""


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
        size = shape.gathered
        if plan.kind == "FSDP2" and plan.lora and plan.ends_apart and plan.tiled_loss:
            size += shape.split_trained * shape.end_bytes  # FSDP gathers the adapters as well
        if plan.kind == "FSDP2" and plan.lora and plan.ends_apart and plan.tiled_loss and not shape.counted.tied:
            # TRL gathers the head outside of FSDP, as it is stored, in each forward pass and beside nothing.
            head, calls = shape.head_weights / plan.tp, 2 if plan.second_forward == "reference" else 1
            stored = head * (plan.other_bytes if shape.quantised else plan.weight_bytes)
            result.exposed.append(Collective("all-gather of the head", "gather", shards, calls * stored, calls))
            size -= head * shape.end_bytes
        gathered = Collective("all-gather of the weights", "gather", shards, size, shape.layers + 1)
        result.forward.append(gathered)
        if plan.second_forward:  # the head of a second model stays gathered, as no backward pass gives it back
            stays = plan.reference_bytes > 0 and plan.reshard and plan.ends_apart
            head = shape.head_weights / plan.tp * plan.gather_bytes if stays else 0.0
            result.forward.append(replace(gathered, size=size - head))
        if plan.reshard:
            # accelerate leaves head and last norm gathered behind the forward pass (fsdp_utils.py, "tail").
            left = plan.ends_apart and (not plan.lora or shape.counted.tied)
            tail = shape.head_weights / plan.tp * plan.gather_bytes if left else 0.0
            result.backward.append(replace(gathered, size=size - tail))
    _gradients(shape, result)
    _tensor(shape, result)
    _context(shape, result)
    _experts(shape, result)
    if plan.pp > 1:
        sent = shape.tokens * shape.counted.hidden * ACTIVATION_BYTES / (plan.tp if plan.sequence_parallel else 1)
        stages = RankGroup(plan.pp, plan.world_size // plan.pp)
        one_way = Collective("pipeline send", "send", stages, sent * plan.virtual, plan.virtual)
        if plan.overlap_pp:
            result.forward.append(one_way)
            result.backward.append(one_way)
        else:
            result.exposed.append(replace(one_way, size=2 * one_way.size, calls=2 * one_way.calls))
    return result


def _gradients(shape: ModelShape, result: Traffic) -> None:
    """Reduce-scatter where gradients are split, all-reduce where each rank keeps them; HSDP both, one after the other.

    transformers' Trainer holds the reduction back until a step's last micro batch (no_sync) but under DeepSpeed, whose stages 2
    and 3 reduce in every backward pass.
    """
    plan = shape.strategy
    size = shape.split_trained * plan.reduce_bytes
    every = plan.reduce_each or plan.kind in ("ZeRO-2", "ZeRO-3")
    when = result.backward if every else result.last if plan.overlap_dp else result.after
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
        beside = plan.overlap_dp and plan.is_megatron  # the first forward pass of the next step, which is as long as any other
        group = RankGroup(plan.state_shards, plan.tp)
        (result.last if beside else result.after).append(
            Collective("all-gather of the updated weights", "gather", group, updated, 1)
        )


def _tensor(shape: ModelShape, result: Traffic) -> None:
    """Two all-reduces of a layer's output in forward and two in backward (https://arxiv.org/abs/1909.08053, 3); with sequence
    parallelism an all-gather and a reduce-scatter each, which move as much. Recomputation repeats the forward ones."""
    plan = shape.strategy
    if plan.tp == 1:
        return
    size = shape.tokens * shape.counted.hidden * ACTIVATION_BYTES
    group, name = RankGroup(plan.tp), "tensor-parallel all-reduce"
    if plan.fused_loss and plan.tiled_loss:
        head_bytes = shape.head_weights * ACTIVATION_BYTES
        result.exposed.append(Collective("all-gather of the head over tensor parallelism", "gather", group, head_bytes, 1))
    # torch's recomputation ends before a layer's last sum, which nothing of it needs; Megatron-Core's repeats the whole layer.
    again = (2 if plan.is_megatron else 1) * plan.recompute.share
    if plan.overlap_tp:
        for calls, beside in ((2 * shape.layers, result.forward), ((2 + again) * shape.layers, result.backward)):
            hidden = Collective(f"{name}, asynchronous", "reduce", group, ASYNC_TP * calls * size, ASYNC_TP * calls)
            beside.append(hidden)
            left = 1 - ASYNC_TP
            result.exposed.append(Collective(name, "reduce", group, left * calls * size, left * calls))
        return
    calls = shape.layers * (4 + again)
    if plan.kind == "FSDP2" and plan.tiled_loss:  # of this project's trainer
        # The embedding's sum; in backward one for each projection split by columns (training/parallelism.py, _SumGradient).
        # Found by simulating.
        columns = sum(
            kind.count * sum(linear.name.rpartition(".")[2] not in WHOLE for linear in kind.linears)
            for kind in shape.counted.layers
        )
        calls = shape.layers * (2 + plan.recompute.share) + columns + 1
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
    size = width * plan.micro_batch * plan.sequence * ACTIVATION_BYTES / plan.tp
    calls = shape.layers
    result.forward.append(Collective("keys and values around the ring", "gather", group, size, calls))
    if plan.kind == "FSDP2" and plan.tiled_loss:  # gathered before attention, their gradients reduced (training/parallelism.py)
        again = plan.recompute.share * size
        result.backward.append(Collective("keys and values, gathered again", "gather", group, again, calls))
        result.backward.append(Collective("reduce-scatter of their gradients", "gather", group, size, calls))
        return
    again = 2 + plan.recompute.share
    result.backward.append(Collective("keys, values and their gradients around the ring", "gather", group, again * size, calls))


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


# --- host memory and NVMe ---------------------------------------------------------------------------------------------

HOST_ADAM_BYTES_PER_S = 150e9
"""Bytes per second that AdamW on all cores of a node reads and writes: about half of what two sockets of DDR5 copy. Assumed."""
NVME_BYTES_PER_S = 6e9
"""Sequential read or write of a node's local NVMe, bytes per second: one PCIe 4.0 x4 drive. Assumed."""
ADAM_BYTES = 28
"""Read: weight, gradient, two moments; written: weight and moments; float32."""
LOOP_ADAM_BYTES = 80
"""The same of torch's unfused AdamW on CPUs, whose eight operations each go through memory (torch/optim/adamw.py,
_single_tensor_adamw). Measured on 2 threads it took 12 times as long as the fused one."""


@dataclass(frozen=True)
class Offload:
    """Weights and optimizer states in host memory or on NVMe: what their way to the GPU and the update on the CPU take.

    Transfers beside the passes of one micro batch, and the optimizer step where it runs on the CPU.
    """

    forward_s: float
    backward_s: float
    optimizer: Term | None
    note: str | None
    transfer: Term | None = None
    """The weights' way of one micro batch."""
    source: str = ""
    """Where the weights come from, as a phrase."""


def offload(shape: ModelShape, machine: PlanMachine) -> Offload:
    """Times of one rank; zeros where nothing is offloaded."""
    plan = shape.strategy
    link = machine.host_link_bytes_per_s
    forward = backward = 0.0
    transfer, where, notes = None, "", []
    if "nvme" in (plan.offload_params, plan.offload_optimizer):
        notes.append(f"a node's NVMe is assumed to read and write {NVME_BYTES_PER_S / 1e9:g} GB/s")
    if plan.offload_params != "none":
        # The shard goes as it is stored, and is cast on the GPU (torch, FSDPParam.all_gather_inputs).
        share = shape.stored / plan.weight_shards
        if plan.offload_params == "nvme":
            link = min(link, NVME_BYTES_PER_S / machine.gpus_per_node)
        back = share * (1 if plan.reshard else 0) + shape.local_trained * plan.gradient_bytes / plan.gradient_shards
        forward, backward = share / link, back / link
        where = "NVMe" if plan.offload_params == "nvme" else "host memory"
        parts: dict[str, float | int | str] = {"forward": share, "backward": back, "link": link}
        text = "({forward} B + {backward} B) / {link} B/s, a micro batch forward and backward"
        transfer = Term(f"weights and gradients between {where} and GPU", forward + backward, SECONDS, text, parts)
    if plan.offload_optimizer == "none":
        return Offload(forward, backward, None, "; ".join(notes) or None, transfer, where)
    count = shape.local_trained / plan.state_shards
    speed = HOST_ADAM_BYTES_PER_S / plan.ranks_per_node
    if plan.offload_optimizer == "nvme":
        speed = min(speed, NVME_BYTES_PER_S / plan.ranks_per_node)
    to_host = count * (plan.gradient_bytes + 2)  # the gradient goes, the updated weight comes back in bfloat16
    loop = plan.kind.startswith("FSDP") and not plan.fused_optimizer  # DeepSpeed has a fused one of its own
    size = LOOP_ADAM_BYTES if loop else ADAM_BYTES
    value = count * size / speed + to_host / machine.host_link_bytes_per_s
    values = {"count": count, "bytes": size, "speed": speed, "moved": to_host, "link": machine.host_link_bytes_per_s}
    text = "{count} trained parameters x {bytes} B / {speed} B/s on the CPU + {moved} B / {link} B/s to and fro"
    if plan.offload_optimizer == "cpu":
        notes.append(f"the optimizer on the CPU is assumed to move {HOST_ADAM_BYTES_PER_S / 1e9:g} GB/s per node")
        notes += ["train.optim: adamw_torch_fused is several times as fast on the CPU"] if loop else []
    return Offload(forward, backward, Term("optimizer", value, SECONDS, text, values), "; ".join(notes), transfer, where)


@dataclass(frozen=True)
class TimedCollective:
    """A collective with its time."""

    collective: Collective
    term: Term


@dataclass(frozen=True)
class Step:
    """One optimizer step of the slowest rank. All times in seconds."""

    compute: list[Term]
    """What the rank computes in all micro batches."""
    exposed: Term
    """Communication that is not hidden behind computing."""
    bubble: Term
    optimizer: Term
    wires: list[TimedCollective]
    """Every collective of the step, hidden or not."""
    offload: Offload
    generation: Term | None = None
    """Of the model's own answers; None where it makes none."""
    waiting: float = 0.0
    """Of :attr:`exposed`, seconds of collectives that the next product waits for."""

    @property
    def seconds(self) -> float:
        parts = [self.exposed, self.bubble, self.optimizer, *([self.generation] if self.generation else [])]
        return total(self.compute) + total(parts)

    @property
    def communication(self) -> float:
        """Seconds that the network is busy, hidden or not."""
        return sum(wire.term.value for wire in self.wires)


def step(shape: ModelShape, machine: PlanMachine, constants: Constants) -> Step:
    """Predict one optimizer step."""
    plan = shape.strategy
    compute = micro_batch(shape, machine, constants)
    moved = traffic(shape)
    copies = offload(shape, machine)
    timer = _Timer(machine, constants)
    micro, last = _passes(compute, moved, copies, timer, constants)
    count = plan.accumulation
    exposed = micro * (count - 1) + last + timer.all(moved.after)
    busy = compute.seconds * count
    idle = _bubble(shape, compute.seconds + timer.all(moved.exposed))
    parts = [
        Term(t.name, t.value * count, SECONDS, "{n} x (" + t.formula + ")", {"n": count, **t.values})
        for t in _together(compute)
    ]
    values = {"n": count, "micro": micro, "last": last, "after": timer.all(moved.after), "busy": busy}
    if (host := launching(shape, busy + exposed)) is not None:
        parts.append(host)
    text = "({n} - 1) micro batches x {micro} s + the last {last} s + {after} s after the optimizer; computing takes {busy} s"
    exposed_term = Term("exposed communication", exposed, SECONDS, text, values)
    return Step(
        parts,
        exposed_term,
        idle,
        copies.optimizer or _optimizer(shape, machine, constants),
        timer.wires(moved, count),
        copies,
        generation_cost.of_step(shape, machine),
        timer.all(moved.exposed) * count,
    )


LAUNCHING = "host launching kernels"
LAUNCH_S = 40e-6
"""Seconds of the host for each kernel that it launches, with the Python above it. Measured on one H200: 38 us of an 8B with
LoRA, 44 us of a 1B (docs/results/gpu-h200.md), over the launches that simulations of the same recipes count."""
LAYER_LAUNCHES, PLAIN_LAUNCHES, OTHER_LAUNCHES = 180, 130, 140
"""Kernels of a micro batch, forward and backward, as simulations count them: of a layer that is recomputed, of one that is not,
and of what is no layer."""
ADAPTER_LAUNCHES, SHARDED_ADAPTER_LAUNCHES = 31, 20
"""What LoRA adds for each module: where autocast casts its input, and under FSDP, which casts before (405B: 262 in a layer)."""
HEAD_NORM_LAUNCHES, ROUTER_LAUNCHES, UPDATE_LAUNCHES = 52, 58, 13
"""What norms of queries and keys add to a layer (Qwen3-8B: 232), a mixture (router, sorting, weighing; Mixtral 8x7B: 238), and
LoRA for each matrix of experts (Qwen3-30B-A3B: 396 with adapters on four modules and two of these)."""


def launching(shape: ModelShape, seconds: float) -> Term | None:
    """What the host adds to ``seconds`` of a step where it cannot launch kernels as fast as the GPU computes them: small micro
    batches under TRL. Compiled code launches fewer; of other programs nothing is known."""
    plan = shape.strategy
    if plan.compiled or plan.liger or not plan.tiled_loss or plan.pp > 1:
        return None
    again = plan.recompute.share
    kernels: float = OTHER_LAUNCHES
    adapter = SHARDED_ADAPTER_LAUNCHES if plan.is_fsdp else ADAPTER_LAUNCHES
    for kind in shape.counted.layers:
        layer = LAYER_LAUNCHES * again + PLAIN_LAUNCHES * (1 - again)
        layer += HEAD_NORM_LAUNCHES * (kind.other % shape.counted.hidden == 2 * kind.attention.qk_dim)
        layer += ROUTER_LAUNCHES * any(linear.copies > 1 for linear in kind.linears)
        if plan.lora:
            modules = sum(not linear.bare and linear.name.rpartition(".")[2] in shape.targets for linear in kind.linears)
            layer += adapter * modules
            layer += UPDATE_LAUNCHES * len({linear.name for linear in kind.linears if linear.name in shape.wrapped})
        kernels += kind.count * layer
    values = {"n": plan.accumulation, "kernels": kernels, "each": LAUNCH_S * 1e6, "seconds": seconds}
    text = "{n} micro batches x {kernels} kernels x {each} us - {seconds} s of computing and exposed communication"
    value = plan.accumulation * kernels * LAUNCH_S - seconds
    return Term(LAUNCHING, value, SECONDS, text, values) if value > 0 else None


def _passes(compute: ComputeTime, moved: Traffic, copies: Offload, timer: _Timer, constants: Constants) -> tuple[float, float]:
    """Seconds beyond computing of a micro batch, and of the last one of a step."""
    forward, backward = total(compute.forward), total(compute.backward)
    wire_forward = max(timer.all(moved.forward), copies.forward_s)
    wire_backward = max(timer.all(moved.backward), copies.backward_s)
    wire_last = max(timer.all(moved.backward) + timer.all(moved.last), copies.backward_s)
    waiting = timer.all(moved.exposed)
    first = _beyond(forward, wire_forward, constants) + waiting
    return first + _beyond(backward, wire_backward, constants), first + _beyond(backward, wire_last, constants)


def _beyond(busy: float, wire: float, constants: Constants) -> float:
    """What a transfer beside ``busy`` seconds of computing adds to them."""
    return max(0.0, wire - busy) + constants.overlap_loss * min(busy, wire)


def _together(compute: ComputeTime) -> list[Term]:
    """Forward and backward parts that have one name, such as the cross-entropy, as one."""
    by_name: dict[str, Term] = {}
    for term in [*compute.forward, *compute.backward]:
        known = by_name.get(term.name)
        if known is None:
            by_name[term.name] = term
            continue
        # The values differ in the number of passes only.
        passes = float(known.values["passes"]) + float(term.values["passes"])
        by_name[term.name] = Term(term.name, known.value + term.value, SECONDS, term.formula, {**term.values, "passes": passes})
    return list(by_name.values())


def _bubble(shape: ModelShape, micro: float) -> Term:
    """Idle time of a stage while the pipeline fills and drains: (pp - 1) / virtual micro batches (1F1B and its interleaved
    form, https://arxiv.org/abs/2104.04473, 2.2)."""
    plan = shape.strategy
    values = {"pp": plan.pp, "virtual": plan.virtual, "micro": micro}
    value = (plan.pp - 1) / plan.virtual * micro
    return Term("pipeline bubble", value, SECONDS, "({pp} - 1) / {virtual} x {micro} s of a micro batch", values)


def _optimizer(shape: ModelShape, machine: PlanMachine, constants: Constants) -> Term:
    """Clipping and AdamW on the rank's share: bytes over memory bandwidth."""
    plan = shape.strategy
    count = shape.local_trained / plan.state_shards
    size = constants.fused_optimizer_bytes if plan.fused_optimizer else constants.optimizer_bytes
    size *= min(1.0, plan.state_bytes / 8) if plan.state_bytes else 0.5  # smaller moments are fewer bytes
    speed = machine.hbm_bytes_per_s * constants.hbm_share
    values = {"count": count, "bytes": size, "speed": speed}
    return Term("optimizer", count * size / speed, SECONDS, "{count} trained parameters x {bytes} B / {speed} B/s", values)


@dataclass(frozen=True)
class _Timer:
    """Seconds of collectives on one machine."""

    machine: PlanMachine
    constants: Constants

    def one(self, collective: Collective) -> float:
        return collective.seconds(self.machine, self.constants.intra_scale, self.constants.inter_scale)

    def all(self, collectives: list[Collective]) -> float:
        return sum(map(self.one, collectives))

    def wires(self, moved: Traffic, micro_batches: int) -> list[TimedCollective]:
        """All collectives of a step with their times; equal ones together."""
        alike: dict[Collective, int] = {}
        each = [(c, micro_batches) for c in (*moved.forward, *moved.backward, *moved.exposed)]
        for collective, count in [*each, *((c, 1) for c in (*moved.last, *moved.after))]:
            alike[collective] = alike.get(collective, 0) + count
        return [TimedCollective(c, self._term(c, count)) for c, count in alike.items() if c.group.size > 1]

    def _term(self, collective: Collective, count: float) -> Term:
        one, latency = self.one(collective), collective.latency(self.machine)
        values: dict[str, float | int | str] = {"n": count, "size": collective.size / 1e9, "latency": latency}
        if collective.kind == "exchange":
            values |= {"factor": 1, "speed": collective.size / (one - latency) / 1e9, "of": "from rank to rank"}
        else:
            bandwidth = collective.group.bandwidth(self.machine, self.constants.intra_scale, self.constants.inter_scale)
            values |= {"factor": collective.factor, "speed": bandwidth / 1e9, "of": "of the group's ring"}
        text = "{n} x ({factor} x {size} GB / {speed} GB/s {of} + {latency} s of latency)"
        return Term(collective.name, count * one, SECONDS, text, values)
