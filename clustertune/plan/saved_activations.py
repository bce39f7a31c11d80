"""What a layer keeps for its backward pass, per token: counted, not fitted, where no compiler decides.

Counted with a dispatch mode that follows storages, on transformers 5.23's Llama, Qwen3 and Qwen3-MoE under FSDP2, FSDP1 and DDP
on two ranks (tests/plan/test_measured_memory.py): see each rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clustertune.config.counted import LayerKind
from clustertune.plan.constants import Constants
from clustertune.plan.shape import ModelShape

HALF, FULL = 2, 4
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Projections that share an input."""


@dataclass(frozen=True)
class SavedActivations:
    """Bytes per token, of one kind of layer, of one strategy."""

    shape: ModelShape
    constants: Constants

    @property
    def width(self) -> int:
        """Bytes of a number that matrix products read."""
        return FULL if self.shape.strategy.compute == "fp32" else HALF

    @property
    def autocast(self) -> bool:
        """Weights rest in float32 and are cast where they are used; FSDP and DeepSpeed cast them before (mixed precision)."""
        plan = self.shape.strategy
        return plan.kind in ("DDP", "NO") and self.width == HALF

    @property
    def stream(self) -> int:
        """Bytes of a number between layers: under autocast norms and sums stay in the type of the weights."""
        return FULL if self.autocast and self.shape.strategy.weight_bytes >= FULL else self.width

    @property
    def masked(self) -> bool:
        """Attention gets a mask: of padded rows, and of packed ones that hold several sequences. Flash attention takes lengths
        instead."""
        plan = self.shape.strategy
        return plan.attention != "flash" and (not plan.packing or plan.isolated)

    def layer(self, kind: LayerKind) -> float:
        """All that one layer keeps where nothing is recomputed."""
        plan, hidden = self.shape.strategy, self.shape.counted.hidden
        if plan.compiled:
            outside = HALF * self.constants.kept_compiled_hidden * hidden
            inside = self.width * (self.heads(kind) + self.constants.kept_compiled_inner * kind.inner)
            outside, inside = outside - self._unread((0, 2), hidden), inside - self._unread((3,), kind.inner)
        else:
            outside = self.norms(kind) * self.norm() * hidden + self.experts(kind)
            # Liger's gate computes its activation again in backward (liger_kernel/ops/swiglu.py).
            wide = 2 if self.shape.strategy.liger else 3
            inside = self.width * (self.heads(kind) + wide * kind.inner) + self.inputs(kind) + self.head_norms(kind)
        split = plan.tp if plan.sequence_parallel else 1
        return outside / split + (inside + self.scores(kind)) / plan.tp + self.mask()

    def norms(self, kind: LayerKind) -> int:
        """Norms of the layer's whole width: 2 in Llama, 4 in Gemma."""
        return max(2, kind.other // self.shape.counted.hidden)

    def norm(self) -> float:
        """Of a norm its input in float32 (in float32 training that is the residual sum itself), and for the gradient of its
        weight the normalised row. Liger's norm keeps its input as it is (liger_kernel/ops/rms_norm.py)."""
        if self.shape.strategy.liger:
            return self.stream
        return FULL + (0 if self.shape.strategy.lora else self.stream)

    def head_norms(self, kind: LayerKind) -> float:
        """Of norms over queries and keys (Qwen3) the same."""
        attention = kind.attention
        if kind.other % self.shape.counted.hidden != 2 * attention.qk_dim:
            return 0.0
        return self.norm() * (attention.heads + attention.kv_heads) * attention.qk_dim

    def heads(self, kind: LayerKind) -> int:
        """Elements of queries, keys, values and attention's output. Under a mask the keys and values of a group are repeated
        for each of its heads (transformers/integrations/sdpa_attention.py, use_gqa_in_sdpa); a compiler repeats them again."""
        attention = kind.attention
        plan = self.shape.strategy
        copies = 2 if self.shape.cudnn_attention and plan.attention == "sdpa" and (plan.compiled or self.masked) else 1
        wide = attention.heads * (attention.qk_dim + attention.v_dim * copies)
        return wide + (attention.heads if self.repeats else attention.kv_heads) * (attention.qk_dim + attention.v_dim)

    @property
    def repeats(self) -> bool:
        """Keys and values of a group are written out for each of its heads."""
        return not self.shape.strategy.compiled and (self.masked or self.shape.strategy.attention == "eager")

    def scores(self, kind: LayerKind) -> float:
        """Without a fused kernel: a score for every head and token before, as products give it and as the softmax's float32."""
        plan = self.shape.strategy
        return kind.attention.heads * plan.row * (self.width + FULL) if plan.attention == "eager" else 0.0

    def mask(self) -> float:
        """An entry for every token of the row, shared by all heads: sdpa makes a boolean mask one of the queries' type, in
        every layer."""
        plan = self.shape.strategy
        return float(self.width * plan.row) if self.masked and plan.attention == "sdpa" and not plan.compiled else 0.0

    def shared_mask(self) -> float:
        """The mask that all layers are given: boolean for sdpa. Layers that are computed again hold it until the first one's
        backward pass; others let it go before the loss."""
        plan = self.shape.strategy
        each = 1 if plan.attention == "sdpa" else self.width
        return float(each * plan.row) if self.masked and plan.recompute.share else 0.0

    def experts(self, kind: LayerKind) -> float:
        """Each token's row once for every expert that it goes to: sorted before, and their output before it is weighed."""
        active = max((linear.active for linear in kind.linears if linear.copies > 1), default=0.0)
        return 2 * self.width * active * self.shape.counted.hidden

    def inputs(self, kind: LayerKind) -> float:
        """What a product's weight gradient is computed from. A frozen weight has none; LoRA's first matrix does."""
        attention = kind.attention
        sizes = (self.shape.counted.hidden, attention.heads * attention.v_dim, self.shape.counted.hidden, kind.inner)
        return sum(size * self._of_group(index, names) for index, (size, names) in enumerate(zip(sizes, GROUPS, strict=True)))

    def _of_group(self, index: int, names: tuple[str, ...]) -> float:
        """Bytes for each element of the input that some projections share. Attention's output is kept by attention itself."""
        shape, kept_already = self.shape, index == 1
        if not shape.strategy.lora:
            if self.stream > self.width and index in (0, 2):
                return float(self.width * len(names))  # autocast casts the norm's float32 row for each product again
            return 0.0 if kept_already else float(self.width)
        adapted = sum(name in shape.targets for name in names)
        if shape.dropout:
            return adapted * self.constants.kept_dropout * self.width
        if self.autocast:
            return float(adapted * self.width)  # PEFT casts to the adapter's float32, autocast back, for each
        return float(self.width) if adapted and not kept_already else 0.0

    def _unread(self, groups: tuple[int, ...], size: int) -> float:
        """Inputs that only the weight gradient of something frozen would need, of what a compiler keeps."""
        shape = self.shape
        frozen = [index for index in groups if shape.strategy.lora and not any(n in shape.targets for n in GROUPS[index])]
        return float(self.width * size * len(frozen))

    def rank(self) -> float:
        """LoRA's narrow rows: a row of the rank for each adapted module, of all layers together."""
        shape = self.shape
        count = sum(
            kind.count * sum(linear.name.split(".")[-1] in shape.targets for linear in kind.linears)
            for kind in shape.counted.layers
        )
        return self.width * shape.rank * count / shape.strategy.tp if shape.strategy.lora else 0.0

    def last_norm(self) -> float:
        """The last norm and its row, from which the head computes."""
        plan = self.shape.strategy
        return (self.norm() + self.width) * self.shape.counted.hidden / (plan.tp if plan.sequence_parallel else 1)

    def working(self, kind: LayerKind) -> float:
        """Gradients on their way through the widest part of a layer: of the product, of the activation and of up, less the
        product itself, which is gone; and that of the residual sum. Without a fused kernel it may be attention: the softmax's
        gradient and that of its scores, both in float32, less the probabilities as the product takes them."""
        plan = self.shape.strategy
        scores = kind.attention.heads * plan.row * (2 * FULL - self.width) if plan.attention == "eager" else 0
        return max(2.0 * self.width * kind.inner, scores) / plan.tp + self.stream * self.shape.counted.hidden


# --- what recomputed layers keep beside their input: ``activation_checkpointing.save``, in bytes and in work that is spared ---

WHOLE = ("o_proj", "down_proj", "gate")
"""Projections whose result tensor parallelism leaves whole on every rank."""


@dataclass(frozen=True)
class Product:
    """One matrix product of a layer's forward pass."""

    name: str
    width: float
    """Elements of its result per token, on one rank."""
    weights: float
    """Weights that a token meets in it, on one rank: half of its FLOPs."""
    adapter: bool = False


def products(shape: ModelShape, kind: LayerKind) -> Iterator[Product]:
    """The products in the order in which they run, LoRA's two after the base's (peft/tuners/lora/layer.py, forward).

    All experts of one name are one grouped product (transformers' grouped_mm).
    """
    plan = shape.strategy
    for linear in kind.linears:
        name = linear.name.split(".")[-1]
        # The result of a row-parallel product is a sum over all ranks: each has it whole.
        split = 1 if name in WHOLE else plan.tp
        width, rows = linear.outputs * linear.active / split, linear.inputs * linear.active
        yield Product(name, width, rows * linear.outputs / plan.tp)
        if plan.lora and name in shape.targets:
            yield Product(f"{name}.lora_A", shape.rank * linear.active, rows * shape.rank, adapter=True)
            yield Product(f"{name}.lora_B", width, width * shape.rank, adapter=True)


@dataclass(frozen=True)
class Policy:
    """A strategy's policy on one model."""

    shape: ModelShape
    sizes: SavedActivations

    @property
    def save(self) -> tuple[str, ...]:
        return self.shape.strategy.recompute.save if self.shape.strategy.recompute.share else ()

    def saved(self, kind: LayerKind) -> list[Product]:
        """The products whose results are kept: all, or the first, third, fifth ... of the layer."""
        found = list(products(self.shape, kind))
        return found if "matmul" in self.save else found[::2] if "every_second_matmul" in self.save else []

    def layer(self, kind: LayerKind) -> float:
        """Bytes per token that a recomputed layer keeps beside its input."""
        return self.sizes.width * sum(product.width for product in self.saved(kind)) + self._attention(kind)

    def _attention(self, kind: LayerKind) -> float:
        """The kernel's result, and of each head the logarithm of its sum in float32."""
        attention, plan = kind.attention, self.shape.strategy
        held = attention.heads * (attention.v_dim * self.sizes.width + FULL) / plan.tp
        return held if "attention" in self.save else 0.0

    def taken(self, kind: LayerKind) -> float:
        """Of that, what a layer which is computed again keeps for its backward pass anyway: the same tensors."""
        attention, plan = kind.attention, self.shape.strategy
        names = {"gate_proj", "up_proj"} | (set() if self.sizes.repeats else {"v_proj"})
        adapted = set(self.shape.targets) if plan.lora else set()
        width = sum(product.width for product in self.saved(kind) if product.name in names - adapted)
        if "attention" in self.save:
            width += attention.heads * attention.v_dim / plan.tp
        return self.sizes.width * width

    @property
    def products_again(self) -> float:
        """Share of the layers' products that recomputation repeats, of those that are recomputed at all."""
        spared = whole = 0.0
        for kind in self.shape.counted.layers:
            whole += kind.count * sum(p.weights for p in products(self.shape, kind) if not p.adapter)
            spared += kind.count * sum(p.weights for p in self.saved(kind) if not p.adapter)
        return 1 - spared / whole

    @property
    def attention_again(self) -> float:
        """The same of attention: all or nothing."""
        return 0.0 if "attention" in self.save else 1.0
