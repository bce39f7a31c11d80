"""How long a rank computes: matrix products by FLOPs, everything else by the bytes that it moves through the GPU's memory.

FLOPs of a matrix product of (t x n) and (n x m): 2 t n m. Backward takes as many for the input's gradient and, for trained
weights, as many again for the weight's. LoRA's frozen base has no weight gradients. A checkpointed layer runs forward twice.
Attention by a fused kernel: forward 2 products over the causal half, backward 5 (https://arxiv.org/abs/2307.08691, 3.1).
Packed conversations: the causal half of each, or under a mask the whole square of the micro batch, which no kernel skips parts
of. Padded rows count as the causal half, as in the runs that ``attention_share`` was fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass

from clustertune.config.counted import LayerKind
from clustertune.plan.constants import Constants
from clustertune.plan.machine import PlanMachine
from clustertune.plan.saved_activations import Policy, SavedActivations
from clustertune.plan.shape import ModelShape
from clustertune.plan.strategy import Strategy
from clustertune.plan.term import SECONDS, Term, total

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
    work = _Work(shape, machine, constants)
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
        backward.append(work.adapters(2))
        forward.append(work.expert_updates(1))
        backward.append(work.expert_updates(2 + again))
    if name := shape.strategy.second_forward:
        forward += [*work.products(1, name), work.attention(1, name), work.elements(1, name), work.loss(1)]
    if shape.quantised and shape.strategy.compute != "fp8":
        forward.append(work.dequantising(2 if shape.strategy.second_forward else 1))
        backward.append(work.dequantising(1 + again))
    if shape.strategy.weight_bytes == 4 and shape.strategy.weight_shards > 1:
        forward.append(work.casts(1))
        backward.append(work.casts(2 if shape.strategy.reshard else 1))
    if again:
        name, policy = "recomputation", Policy(shape, SavedActivations(shape, constants))
        backward += work.products(again * policy.products_again, name, head=False)
        backward += [work.attention(again * policy.attention_again, name), work.elements(again, name)]
    return ComputeTime([t for t in forward if t.value], [t for t in backward if t.value])


def flops(shape: ModelShape, *, hardware: bool) -> float:
    """FLOPs of one optimizer step over all ranks: the model's, or with ``hardware`` also what checkpointing computes again.
    A reference's forward pass is the model's.

    Of LoRA the frozen base counts 4 per parameter and token, its adapters 6; attention counts the causal half of each
    conversation, with ``hardware`` what a mask makes of it.
    """
    plan, counted = shape.strategy, shape.counted
    policy = Policy(shape, SavedActivations(shape, Constants()))
    again = plan.recompute.share if hardware else 0.0
    second = int(plan.second_forward == "reference")
    passes = (2 if plan.lora else 3) + second + again * policy.products_again
    looks = 1 + second + ATTENTION_BACKWARD + again * policy.attention_again
    per_token = 0.0
    for kind in counted.layers:
        per_token += kind.count * (2 * kind.active_matmul * passes + _attention_flops(kind, plan, masks=hardware) * looks)
    per_token += 2 * shape.head_weights * ((2 if plan.lora else 3) + second) + 6 * shape.per_token
    return per_token * shape.step_tokens


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
class _Work:
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
            peak = machine.peak_flops_fp8 * constants.gemm(machine.generation) * constants.fp8_share
        if compute == "fp32":
            peak /= 2  # TF32: half of bfloat16 on every generation that has both
        return peak / constants.compute_scale

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
        machine, constants = self.machine, self.constants
        speed = machine.peak_flops * constants.gemm(machine.generation) * constants.attention_share / constants.compute_scale
        value = passes * per_token * shape.tokens / speed
        values = {"passes": passes, "flops": per_token, "tokens": shape.tokens, "speed": speed}
        return Term(f"attention, {name}", value, SECONDS, "{passes} x {flops} FLOPs x {tokens} tokens / {speed} FLOP/s", values)

    def elements(self, passes: float, name: str) -> Term:
        """Norms, activations, residuals, rotary embeddings and casts: bytes over bandwidth."""
        plan, shape, constants = self.shape.strategy, self.shape, self.constants
        hidden = constants.compiled_hidden if plan.compiled or plan.liger else constants.eager_hidden
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
        values = {"passes": passes, "count": shape.body, "bytes": size, "speed": self.memory}
        text = "{passes} x {count} parameters x {bytes} B / {speed} B/s"
        return Term("dequantising", passes * shape.body * size / self.memory, SECONDS, text, values)

    def loss(self, passes: float) -> Term:
        """Cross-entropy over the vocabulary: a third in the forward pass, two in the backward pass."""
        plan, shape = self.shape.strategy, self.shape
        size = self.constants.loss_bytes / (3 if plan.fused_loss else 1)
        entries = shape.counted.vocabulary / plan.tp
        value = passes / 3 * size * entries * shape.tokens / self.memory
        values = {"passes": passes / 3, "bytes": size, "entries": entries, "tokens": shape.tokens, "speed": self.memory}
        text = "{passes} x {bytes} B x {entries} vocabulary entries x {tokens} tokens / {speed} B/s"
        return Term("cross-entropy", value, SECONDS, text, values)

    def adapters(self, passes: float) -> Term:
        """LoRA's own products are too thin to be bound by FLOPs: the bytes of inputs and outputs count."""
        shape = self.shape
        per_token = (
            self.constants.lora_passes / 3 * shape.per_token / max(1, shape.rank) / (shape.strategy.tp * shape.strategy.pp)
        )
        value = passes * per_token * 2 * shape.tokens / self.memory
        values = {"passes": passes, "width": per_token, "tokens": shape.tokens, "speed": self.memory}
        return Term("LoRA", value, SECONDS, "{passes} x {width} elements x 2 B x {tokens} tokens / {speed} B/s", values)

    def expert_updates(self, passes: float) -> Term:
        """B A of every adapted expert, whatever tokens come: written, read with the weights, and their sum written."""
        count, rank = self.shape.all_experts, self.shape.rank
        values = {"passes": passes, "count": count, "rank": rank, "speed": self.speed, "memory": self.memory}
        text = "{passes} x {count} parameters of experts x (2 x {rank} FLOPs / {speed} FLOP/s + 4 x 2 B / {memory} B/s)"
        value = passes * count * (2 * rank / self.speed + 8 / self.memory)
        return Term("LoRA on experts", value, SECONDS, text, values)
