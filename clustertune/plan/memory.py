"""Memory of one GPU by part and by moment, and RAM of a node. The largest moment is the peak.

What rests and what is kept for backward is counted; what comes and goes in between (weights gathered from other ranks,
gradients on their way to them, the loss) was followed, storage by storage, through steps of small models on two ranks
and of layers of the real size on 64 ranks of fake tensors (both in tests/plan/test_measured_memory.py).
What a layer keeps for its backward pass is counted, not fitted, where no compiler decides: with a dispatch mode that follows
storages, on transformers 5.23's Llama, Qwen3 and Qwen3-MoE under FSDP2 and DDP on two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from clustertune.plan import generation_cost
from clustertune.plan.constants import BYTES, Constants, Term, total
from clustertune.plan.strategy import ModelShape
from clustertune.recipe.parameters import LayerKind, Linear, ParameterCount
from clustertune.resolve.resolved import IN_FLIGHT, Resolved

HALF, FULL = 2, 4
GROUPS = (("q_proj", "k_proj", "v_proj", "qkv_proj"), ("o_proj",), ("gate_proj", "up_proj", "gate_up_proj"), ("down_proj",))
"""Projections that share an input, joined or each for itself."""
TILE_TOKENS, TILE_ENTRIES = 4096, 32768
"""TRL's loss projects so many tokens on so many vocabulary entries at once, in a buffer that is this wide even where the
vocabulary is not (trl/kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE; trl/trainer/utils.py, _CHUNKED_LOGPROB_CHUNK_SIZE)."""

FORWARD, LOSS, REFERENCE = "forward pass, last layer", "end of the forward pass, at the loss", "forward pass of the reference"
BACKWARD, UPDATE, GENERATION = "backward pass", "optimizer step", "generation of the answers"
EVALUATION = "evaluation"
"""The moments of a step by name, and the one between steps."""


@dataclass(frozen=True)
class Moment:
    """What is in memory at one point of a step."""

    name: str
    parts: list[Term]

    @property
    def bytes(self) -> float:
        return total(self.parts)


def moments(shape: ModelShape, constants: Constants) -> list[Moment]:
    """The moments at which memory can be largest, in the order of a step."""
    memory = _Memory(shape, constants)
    resting = [memory.weights(), memory.reference(), memory.trained_copy(), memory.states()]
    paired = shape.strategy.second_forward == "reference"
    update = [*resting, memory.gradients(1.0), memory.update(), memory.held_logits()]
    named = {
        **({FORWARD: _largest(resting, forward)} if (forward := memory.forward()) else {}),
        LOSS: _largest(resting, memory.at_loss()),
        **({REFERENCE: _largest(resting, memory.second_forward())} if paired else {}),
        **({GENERATION: [*resting, *answers]} if (answers := generation_cost.held(shape)) else {}),
        BACKWARD: _largest(resting, memory.backward()),
        UPDATE: update,
        **({EVALUATION: _largest(resting, memory.evaluation())} if shape.strategy.eval_batch else {}),
    }
    return [Moment(name, [term for term in parts if term.value]) for name, parts in named.items()]


def training_peak(course: list[Moment]) -> Moment:
    """The largest of :func:`moments` that is part of a training step; evaluations between steps are left out."""
    return max((moment for moment in course if moment.name != EVALUATION), key=lambda moment: moment.bytes)


def evaluation_peak(course: list[Moment]) -> Moment | None:
    """The moment of :func:`moments` that evaluations have; None where the training has none."""
    return next((moment for moment in course if moment.name == EVALUATION), None)


def smaller_evaluation(shape: ModelShape, constants: Constants) -> int:
    """The most rows a rank with which an evaluation takes no more than the training's own peak; 0: not even one does."""
    least = training_peak(moments(shape, constants)).bytes
    rows = shape.strategy.eval_batch // 2
    while rows:
        made = moments(replace(shape, strategy=replace(shape.strategy, eval_batch=rows)), constants)
        one = evaluation_peak(made)
        if one is None or one.bytes <= least:
            return rows
        rows //= 2
    return 0


def _largest(resting: list[Term], options: list[list[Term]]) -> list[Term]:
    return [*resting, *max(options, key=total)]


def reserved(peak: float, constants: Constants) -> list[Term]:
    """What a process takes beside the peak of its tensors: the allocator's gaps, and CUDA and NCCL themselves."""
    share = constants.fragmentation
    gaps = Term("fragmentation", peak * share, BYTES, "{share} x {peak} GiB", {"share": share, "peak": peak / 2**30})
    size = constants.context_gib * 2**30
    return [gaps, Term("buffers", size, BYTES, "CUDA context, NCCL's channels and cuBLAS' workspaces", {})]


# --- what layers keep for their backward pass, in bytes and in work that is spared ------------------------------------

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
        instead, and context parallelism is causal alone (accelerate takes the mask away)."""
        plan = self.shape.strategy
        return plan.attention != "flash" and plan.cp == 1 and (not plan.packing or plan.isolated)

    def layer(self, kind: LayerKind) -> float:
        """All that one layer keeps where nothing is recomputed."""
        plan, hidden = self.shape.strategy, self.shape.counted.hidden
        if plan.compiled:
            rows, wide = self.constants.kept_compiled_hidden, self.constants.kept_compiled_inner
            if plan.is_megatron:
                # Of each of two norms its input and its result, which the next product keeps, and of the gate both halves and
                # their product; what products keep is in the type that they read, float8 as well (transformer_engine/pytorch/
                # module, layernorm_linear.py, layernorm_mlp.py, linear.py).
                read = 0.5 if plan.compute == "fp8" else 1.0
                rows, wide = 2 + 2 * read, 2 + read
            outside = HALF * rows * hidden
            inside = self.width * (self.heads(kind) + wide * kind.inner)
            outside, inside = outside - self._unread((0, 2), hidden), inside - self._unread((3,), kind.inner)
        else:
            wide_inputs, inputs = self.inputs(kind)
            outside = self.norms(kind) * self.norm() * hidden + self.experts(kind) + wide_inputs
            # Liger's gate computes its activation again in backward (liger_kernel/ops/swiglu.py).
            wide = 2 if self.shape.strategy.liger else 3
            inside = self.width * (self.heads(kind) + wide * kind.inner) + inputs + self.head_norms(kind)
        split = plan.tp if plan.sequence_parallel else 1
        return outside / split + (inside + self.scores(kind)) / plan.tp + self.mask()

    def norms(self, kind: LayerKind) -> int:
        """Norms of the layer's whole width: 2 in Llama, 4 in Gemma."""
        return max(2, kind.other // self.shape.counted.hidden)

    def adapts(self, linear: Linear) -> bool:
        """Whether LoRA adapts this module."""
        return not linear.bare and linear.name.split(".")[-1] in self.shape.targets

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
        for each of its heads (transformers/integrations/sdpa_attention.py, use_gqa_in_sdpa); a compiler repeats them again.
        Context parallelism repeats those of the whole sequence, and joins two outputs
        (:mod:`clustertune.training.parallelism`)."""
        attention = kind.attention
        plan = self.shape.strategy
        if plan.cp > 1 and not plan.is_megatron:
            return attention.heads * ((1 + plan.cp) * attention.qk_dim + (2 + plan.cp) * attention.v_dim)
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

    def expert_rows(self, kind: LayerKind) -> float:
        """Bytes of each token's row, once for every expert that it goes to."""
        active = max((linear.active for linear in kind.linears if linear.copies > 1), default=0.0)
        return self.width * active * self.shape.counted.hidden

    def experts(self, kind: LayerKind) -> float:
        """These rows sorted before the experts, from which their weights' gradients are made, and their output before it is
        weighed."""
        return (1 if self.shape.strategy.lora and not self.shape.wrapped else 2) * self.expert_rows(kind)

    def inputs(self, kind: LayerKind) -> tuple[float, float]:
        """What a product's weight gradient is computed from: of the residual sum's width, and within attention and the
        feed-forward, which tensor parallelism splits. A frozen weight has none; LoRA's first matrix does."""
        attention, own = kind.attention, [linear.name.split(".")[-1] for linear in kind.linears]
        qkv, out, up, down = (
            self._of_group(index, [name for name in names if name in own]) for index, names in enumerate(GROUPS)
        )
        if any(linear.name in self.shape.wrapped and linear.name.endswith(GROUPS[3]) for linear in kind.linears):
            down += self.width
        return (qkv + up) * self.shape.counted.hidden, out * attention.heads * attention.v_dim + down * kind.inner

    def _of_group(self, index: int, names: list[str]) -> float:
        """Bytes for each element of the input that some projections share. Attention's output is kept by attention itself."""
        shape, kept_already = self.shape, index == 1
        if not shape.strategy.lora:
            if self.stream > self.width and index in (0, 2):
                return float(self.width * len(names))  # autocast casts the norm's float32 row for each product again
            return 0.0 if kept_already else float(self.width)
        adapted = sum(name in shape.targets for name in names)
        if shape.dropout:
            return adapted * (self.width + self.constants.dropout_mask)
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
        product itself, which is gone, where down is trained or adapted and had kept it; and that of the residual sum. Without a
        fused kernel it may be attention: the softmax's gradient and that of its scores, both in float32, less the probabilities
        as the product takes them."""
        plan = self.shape.strategy
        down = [linear for linear in kind.linears if linear.name.endswith(GROUPS[3])]
        keeps = not plan.lora or any(self.adapts(linear) or linear.name in self.shape.wrapped for linear in down)
        scores = kind.attention.heads * plan.row * (2 * FULL - self.width) if plan.attention == "eager" else 0
        rows = (2.0 if keeps else 3.0) * self.width * kind.inner
        return max(rows, scores) / plan.tp + self.stream * self.shape.counted.hidden

    def norm_back(self, kind: LayerKind) -> float:
        """The same of the second norm, whose rows tensor parallelism leaves whole: five in float32, less what the feed-forward
        had kept."""
        hidden = self.shape.counted.hidden
        if not self.passes_norms or self.shape.strategy.lora:
            return 0.0
        kept = self.width * (4 * kind.inner / self.shape.strategy.tp + 2 * hidden)
        return 5 * FULL * hidden - kept + self.stream * hidden

    @property
    def passes_norms(self) -> bool:
        """A norm writes out rows in float32, as no compiler and no kernel of Liger's does it in one pass, and whole ones."""
        plan = self.shape.strategy
        return not plan.compiled and not plan.liger and not plan.sequence_parallel

    def passing(self, kind: LayerKind) -> float:
        """What is in memory at once inside a layer that keeps nothing: the activation, up and their product (and gate, where
        one product gives gate and up), or attention; and two rows of the residual sum's width. An adapted up has two results
        more, LoRA's and that scaled (peft/tuners/lora/layer.py). Experts hold their sorted rows meanwhile, and at the end their
        output, weighed, and in the tokens' order again (transformers/integrations/moe.py)."""
        plan, attention = self.shape.strategy, kind.attention
        joined = any(linear.name.endswith("gate_up_proj") for linear in kind.linears)
        adapted = plan.lora and any(linear.name.endswith(GROUPS[2]) and self.adapts(linear) for linear in kind.linears)
        wide = (6 if joined else 4) if adapted else 4 if joined else 3
        elements = self.heads(kind)
        if (
            plan.cp > 1 and not plan.is_megatron
        ):  # this rank's keys and values, the gathered and ordered values, and the outputs before they are one
            elements += attention.kv_heads * (attention.qk_dim + (1 + 2 * plan.cp) * attention.v_dim)
            elements += attention.heads * attention.v_dim
        rows, row = self.expert_rows(kind), self.stream * self.shape.counted.hidden
        within = (self.width * elements + self.scores(kind)) / plan.tp - row  # of two rows attention holds one, the normalised
        norm = 2 * FULL * self.shape.counted.hidden - row if self.passes_norms else 0.0  # its input and its result in float32
        return max(self.width * wide * kind.inner / plan.tp + rows, 4 * rows, within, norm) + 2 * row

    # -- activation_checkpointing.save ------------------------------------------------------------------------------------

    @property
    def save(self) -> tuple[str, ...]:
        return self.shape.strategy.recompute.save if self.shape.strategy.recompute.share else ()

    def saved(self, kind: LayerKind) -> list[Product]:
        """The products whose results are kept: all, or the first, third, fifth ... of the layer."""
        matmuls = list(products(self.shape, kind))
        return matmuls if "matmul" in self.save else matmuls[::2] if "every_second_matmul" in self.save else []

    def beside_input(self, kind: LayerKind) -> float:
        """Bytes per token that a recomputed layer keeps beside its input."""
        return self.width * sum(product.width for product in self.saved(kind)) + self._kernel(kind)

    def _kernel(self, kind: LayerKind) -> float:
        """The kernel's result, and of each head the logarithm of its sum in float32."""
        attention, plan = kind.attention, self.shape.strategy
        held = attention.heads * (attention.v_dim * self.width + FULL) / plan.tp
        return held if "attention" in self.save else 0.0

    def taken(self, kind: LayerKind) -> float:
        """Of that, what a layer which is computed again keeps for its backward pass anyway: the same tensors."""
        attention, plan = kind.attention, self.shape.strategy
        names = set(GROUPS[2]) | (set() if self.repeats else {"v_proj"})
        adapted = set(self.shape.targets) if plan.lora else set()
        width = sum(product.width for product in self.saved(kind) if product.name in names - adapted)
        if "attention" in self.save:
            width += attention.heads * attention.v_dim / plan.tp
        return self.width * width

    @property
    def products_again(self) -> float:
        """Share of the layers' products that recomputation repeats, of those that are recomputed at all."""
        spared = weights = 0.0
        for kind in self.shape.counted.layers:
            matmuls = [product for product in products(self.shape, kind) if not product.adapter]
            left = [product for product in self.saved(kind) if not product.adapter]
            left += matmuls[-1:] if self.ends_early(kind) and matmuls[-1] not in left else []
            weights += kind.count * sum(product.weights for product in matmuls)
            spared += kind.count * sum(product.weights for product in left)
        return 1 - spared / weights

    def ends_early(self, kind: LayerKind) -> bool:
        """Whether recomputation leaves the layer's last product out. torch stops as soon as it has what backward needs
        (torch/utils/checkpoint.py, ``_StopRecomputationError``), and that is down's input and not its result. LoRA on down
        needs what comes behind the base's product, the weighing of experts needs their result; Megatron-Core's own
        function (tensor_parallel/random.py, ``CheckpointFunction``) repeats the whole layer."""
        experts = any(linear.copies > 1 for linear in kind.linears)
        return not (self.shape.strategy.is_megatron or experts or self.adapts(kind.linears[-1]))

    @property
    def attention_again(self) -> float:
        """The same of attention: all or nothing."""
        return 0.0 if "attention" in self.save else 1.0


# --- the moments of a step --------------------------------------------------------------------------------------------


class _Memory(SavedActivations):
    """All parts of a GPU's memory."""

    # -- what rests -------------------------------------------------------------------------------------------------------

    def weights(self) -> Term:
        """The base model as it rests between uses. Of a quantised one the block scales may stay whole on every rank."""
        plan, shape = self.shape.strategy, self.shape
        unsharded = shape.packed * plan.whole_bytes
        size = 0.0 if plan.offload_params != "none" else (shape.stored - unsharded) / plan.weight_shards + unsharded
        values = {"held": shape.parameters, "bytes": plan.weight_bytes, "shards": plan.weight_shards}
        text = "{held} parameters x {bytes} B / {shards} ranks"
        if shape.quantised:
            values |= {"held": shape.packed, "bytes": plan.weight_bytes - plan.whole_bytes, "whole": unsharded}
            values |= {"ends": shape.parameters - shape.packed, "half": plan.other_bytes}
            text = "({held} quantised parameters x {bytes} B + {ends} others x {half} B) / {shards} ranks + {whole} B of scales"
        return Term("weights", size, BYTES, text, values)

    def reference(self) -> Term:
        """A second, frozen model, beside the trained one and sharded as it is. No backward pass gives back what FSDP2 leaves
        gathered behind a forward one: the head, or without resharding all of it."""
        plan, shape = self.shape.strategy, self.shape
        if not plan.reference_bytes:
            return Term("reference model", 0.0, BYTES, "the base without its adapter", {})
        count = shape.parameters if plan.offload_params == "none" else 0.0
        left = (self.head * self.end_bytes if plan.reshard else shape.gathered) if self.gathers else 0.0
        values = {"count": count, "bytes": plan.reference_bytes, "shards": plan.weight_shards, "left": left}
        size = count * plan.reference_bytes / plan.weight_shards + left
        return Term(
            "reference model", size, BYTES, "{count} parameters x {bytes} B / {shards} ranks + {left} B gathered", values
        )

    def trained_copy(self) -> Term:
        """LoRA's own weights."""
        plan = self.shape.strategy
        count = self.shape.split_trained if plan.lora and plan.offload_params == "none" else 0.0
        values = {"count": count, "bytes": plan.trained_bytes, "shards": plan.weight_shards}
        size = count * plan.trained_bytes / plan.weight_shards
        return Term("adapters", size, BYTES, "{count} parameters x {bytes} B / {shards} ranks", values)

    def states(self) -> Term:
        """The optimizer's moments, and the master copy where it is kept beside the weights."""
        plan, count = self.shape.strategy, self.shape.split_trained
        size = 0.0 if plan.offload_optimizer != "none" else count * plan.state_bytes / plan.state_shards
        values = {"count": count, "bytes": plan.state_bytes, "shards": plan.state_shards}
        return Term("optimizer", size, BYTES, "{count} trained parameters x {bytes} B / {shards} ranks", values)

    # -- the moments of a step --------------------------------------------------------------------------------------------

    def forward(self) -> list[list[Term]]:
        """The last layer, while it is copied out of the buffer that FSDP2 gathered it into, and at work; and the first one,
        behind the buffer of a root that keeps the ends, which is another program's.

        torch 2.13 frees the buffer of the layer before only behind that copy (_fsdp_param_group.py:430), the product ahead of
        it (:func:`clustertune.training.sharding.free_gathered_units`).
        """
        plan, layers = self.shape.strategy, self.shape.layers
        inside = max(self.passing(kind) for kind in self.shape.counted.layers)
        if plan.recompute.share < 1:
            inside = max(inside, self.largest_saved)
        kept = [*self.activations((layers - 1) / layers), self._rows(1, self.shape.tokens, "input of the layer at work")]
        working = self._at_work(inside, self.shape.tokens)
        if not self.gathers and plan.pp == 1:
            return [[self.accumulated(1.0), self.buckets(), self.cast_weights(1.0), *kept, *working]]
        if plan.kind != "FSDP2" or not self.gathers:
            return []
        before = 1.0 if plan.ends_apart or layers < 2 else 2.0
        copied = [self._layers(1.0 + before), self._ends(self.held_ends)]
        copied.append(Term("gathered layers", self.split_by_columns * HALF, BYTES, "experts split by columns, in order", {}))
        at_work = [self._layers(2.0), copied[1]]
        if not plan.reshard:
            gathered = self._all_gathered(1.0, self.first_end)
            copied, at_work = [*gathered, self._layers(before)], [*gathered, self._layers(1.0)]
        rows = self._rows(1, self.shape.tokens, "rows of the embedding")
        first = [*self.first_unit(), rows]
        return [[self.accumulated(1.0), *rest] for rest in (first, [*kept, *copied], [*kept, *at_work, *working])]

    def first_unit(self) -> list[Term]:
        """The embedding, or the root that keeps the ends, with the buffer from which it was copied. An embedding of its own is
        given back before the first layer is gathered; one that is the head is not (accelerate, fsdp_utils.py, "tail")."""
        plan = self.shape.strategy
        behind = self._layers((1.0 if self.shape.counted.tied else 0.0) if plan.ends_apart else 2.0)
        return [behind, self._ends(2 * self.first_end)]

    @property
    def split_by_columns(self) -> float:
        """Parameters of a layer's experts where they are fewer than ranks (:func:`clustertune.training.sharding.
        split_experts_evenly`): FSDP2 copies them once more out of its buffer, into their order."""
        experts = [one for kind in self.shape.counted.layers for one in kind.linears if one.copies > 1]
        few = any(one.copies < self.shape.strategy.weight_shards for one in experts)
        each = (sum(one.parameters for one in kind.linears if one.copies > 1) for kind in self.shape.counted.layers)
        return max(each) / self.shape.strategy.tp if few else 0.0

    def _rows(self, count: int, tokens: float, text: str) -> Term:
        """Rows of the residual sum's width."""
        values = {"tokens": tokens, "size": float(count * self.stream * self.shape.counted.hidden)}
        return Term("buffers", tokens * values["size"], BYTES, text + ": {tokens} tokens x {size} B", values)

    def _at_work(self, inside: float, tokens: float) -> list[Term]:
        """What the forward pass of a layer takes; of adapted experts the update, and the sum that computes, until its end."""
        values = {"tokens": tokens, "size": inside}
        text = "inside the layer at work: {tokens} tokens x {size} B"
        return [Term("buffers", tokens * inside, BYTES, text, values), self._experts(2.0 * self.largest_experts)]

    def evaluation(self) -> list[list[Term]]:
        """A forward pass that keeps nothing, of an evaluation's own batch: a layer at work, with its input and the embedding's
        output, which the model's forward pass holds; then the head, with the rows before and behind the mask of labels. It
        stays gathered behind the first batch: accelerate gives the last unit back in the backward pass alone."""
        plan = self.shape.strategy
        tokens = self.shape.tokens / plan.micro_batch * plan.eval_batch
        gathered = []
        if self.gathers:
            layers = self._layers(min(2.0, self.shape.layers))
            tail = self.head if plan.ends_apart and not plan.lora and not self.shape.counted.tied else 0.0
            ends = self._ends(self.held_ends + tail)
            gathered = [layers, ends] if plan.reshard else self._all_gathered(1.0, self.first_end + tail)
        inside = max(self.passing(kind) for kind in self.shape.counted.layers)
        if self.masked and plan.attention == "sdpa":
            inside += plan.sequence * (plan.eval_batch if plan.packing and plan.isolated else 1)  # the mask of all layers
        held = self._rows(2, tokens, "inputs of the layer at work and of the first one")
        scores = self.router_scores(tokens)
        head = [
            *self.gathered_at_loss(),
            self.whole_head(back=False),
            self.logits(back=False, tokens=tokens),
            self.cast_head(1),
        ]
        values = {"tokens": tokens, "size": 2.0 * FULL * self.shape.counted.hidden if self.passes_norms else 0.0}
        norm = Term("buffers", tokens * values["size"], BYTES, "inside the last norm: {tokens} tokens x {size} B", values)
        rows = self._rows(2, tokens, "rows for the last norm and the head")
        first = [*self.first_unit(), self._rows(1, tokens, "rows of the embedding")] if self.gathers and plan.reshard else []
        work = [*gathered, held, *self._at_work(inside, tokens)]
        last = [first, work, [*self.gathered_at_loss(), norm, rows], [*head, rows]]
        return [[self.cast_weights(1.0), scores, *terms] for terms in last]

    def at_loss(self) -> list[list[Term]]:
        """All activations are there: once with the loss going forward, once with its gradient going back."""
        around = [self.accumulated(1.0), self.buckets(), *self.activations(1.0, self.last_norm(), at_end=True)]
        forward = [self.cast_weights(1.0), self.cast_head(1), *self.gathered_at_loss(), self.whole_head(back=False)]
        forward.append(self.logits(back=False))
        back = [*self.gathered_at_loss(back=True), self.whole_head(back=True), self.logits(back=True), self.head_gradient()]
        if self.tensor_head and self.shape.strategy.second_forward == "reference":
            forward += [self._ends(self.head, size=self.stored_end), self._rows(3, self.shape.tokens, "rows of the reference")]
        return [[*around, *forward], [*around, self.cast_weights(self.kept), self.cast_head(2), *back]]

    @property
    def tensor_head(self) -> bool:
        """With LoRA TRL asks for the head's whole tensor, as it is stored (trl/trainer/utils.py, full_tensor), outside of FSDP.
        Of the reference it asks again, while the model's own waits for its backward pass. A head that is the embedding is
        gathered already."""
        plan = self.shape.strategy
        apart = self.gathers and plan.ends_apart and plan.reshard and not self.shape.counted.tied
        return apart and plan.lora and plan.fused_loss and plan.tiled_loss

    @property
    def stored_end(self) -> float:
        """Bytes of a parameter of embedding and head as it is stored."""
        plan = self.shape.strategy
        return plan.other_bytes if self.shape.quantised else plan.weight_bytes

    def second_forward(self) -> list[list[Term]]:
        """While the model's activations, and its head, wait for its backward pass, each layer of the reference is gathered and
        computed, and keeps nothing."""
        tokens, head = self.shape.tokens, [self._ends(self.head, size=self.stored_end)]
        held = [self.accumulated(1.0), self.buckets(), self.cast_weights(1.0), *self.activations(1.0, self.last_norm())]
        layers = [self._layers(2.0)] if self.gathers and self.shape.strategy.reshard else []
        inside = max(self.passing(kind) for kind in self.shape.counted.layers)
        ends = head if self.tensor_head else self.gathered_at_loss()
        if self.gathers and self.shape.strategy.ends_apart and self.shape.strategy.reshard and not self.tensor_head:
            ends = [self._ends(self.head)]  # the buffer that it came from is gone by then
        return [[*held, *ends, *layers, *self._at_work(inside, tokens)]]

    def backward(self) -> list[list[Term]]:
        """Beginning and end of a layer's turn: of the last layer (the first one back); of the one before it, when the gradients
        of the last one are on their way while the inputs of all others are still kept; of the first two. Then the end."""
        layers = self.shape.layers
        turns = []
        working = max(self._working(kind) for kind in self.shape.counted.layers)
        for index in sorted({max(0.0, n) for n in (layers - 1, layers - 2, min(1.0, layers - 1), 0.0)}, reverse=True):
            done = 1 - (index + 1) / layers
            common = [self.gradients(done), self.accumulated(1 - done, back=True), self.buckets(), self.held_logits()]
            common.append(self.cast_weights(self.kept * (1 - done), again=self.kept < 1))
            common += [*self.gathered_in_backward(index), self.in_flight(index)]
            begin = Term("buffers", working, BYTES, "gradients inside the layer at work: {size} B", {"size": working})
            turns.append([*common, *self.activations((index + 1) / layers), *self.recomputed(index), begin])
            turns.append([*common, *self.activations(index / layers), self.whole_gradients(), self.first_norm_back()])
        return [*turns, *([self.gradients(1.0), self.held_logits(), *terms] for terms in self.root_gradients())]

    # -- weights ----------------------------------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        plan = self.shape.strategy
        return plan.weight_shards > 1 or plan.offload_params != "none"

    @cached_property
    def layer_bytes(self) -> float:
        """The largest layer, gathered. A quantised base travels quantised; the product's operand is bfloat16."""
        plan, shape = self.shape.strategy, self.shape
        # Of two layers that are there one is the buffer, with its padding.
        both = (shape.local_trained + shape.split_trained) / 2
        own = both / shape.layers * self.width if plan.lora and plan.kind == "FSDP2" else 0.0
        packed = plan.gather_bytes + (HALF if plan.gather_bytes < HALF else 0) / 2
        kinds = [(shape.packed_of(kind), shape.layer(kind)) for kind in shape.counted.layers]
        return max(inside * packed + (size - inside) * shape.end_bytes for inside, size in kinds) + own

    @property
    def end_bytes(self) -> float:
        """Bytes of a gathered number of embedding and head, which are never quantised."""
        return max(HALF, min(self.shape.strategy.gather_bytes, self.width))

    @property
    def head(self) -> float:
        """Parameters of the output projection on this rank."""
        return self.shape.head_weights / self.shape.strategy.tp

    def whole_head(self, *, back: bool) -> Term:
        """Under tensor parallelism TRL's tiles take the head whole on every rank (trl/trainer/utils.py, full_tensor), beside
        its own part; and going back the gradient of the other ranks' part, in float32 and cast. Found by simulating."""
        plan, shape = self.shape.strategy, self.shape
        head = shape.head_weights if plan.tp > 1 and plan.fused_loss and plan.tiled_loss else 0.0
        others = head * (1 - 1 / plan.tp) if back and not plan.lora else 0.0
        values = {"whole": head, "half": HALF, "others": others, "bytes": HALF + FULL}
        text = "{whole} parameters x {half} B, and gradients of {others} of the other tensor-parallel ranks x {bytes} B"
        return Term("gathered embedding and head", head * HALF + others * (HALF + FULL), BYTES, text, values)

    def gathered_at_loss(self, *, back: bool = False) -> list[Term]:
        """FSDP2 gathers into a buffer and copies from there; the buffer stays until the next unit has been copied, or the
        forward pass is over."""
        plan, layers = self.shape.strategy, self.shape.layers
        if not self.gathers:
            return []
        if not plan.reshard:
            return [*self._all_gathered(1.0, self.shape.ends), self._ends(self.head if plan.ends_apart and not back else 0.0)]
        if not plan.ends_apart:
            # ZeRO-3 has asked for the next layer by then.
            return [self._layers(1.0 if plan.is_fsdp else min(2.0, layers)), self._ends(self.shape.ends)]
        if self.tensor_head:
            return [self._layers(1.0), self._ends(self.head, size=self.stored_end)]
        if self.shape.counted.tied or (back and plan.fused_loss and plan.tiled_loss):
            return [self._layers(1.0), self._ends(self.head)]  # the last layer is asked for before the tiles begin
        return [self._ends(self.head * (1 if back else 2))]

    def gathered_in_backward(self, index: float) -> list[Term]:
        """The layer at work and the next one, which is already on its way; the embedding is the last one."""
        plan, shape = self.shape.strategy, self.shape
        if not self.gathers:
            return []
        if not plan.reshard:
            return self._all_gathered((index + 1) / shape.layers, self.first_end)
        if not plan.ends_apart:
            return [self._layers(min(2.0, shape.layers)), self._ends(shape.ends)]
        if index > 0:
            return [self._layers(2.0), self._ends(self.held_ends)]
        return [self._layers(1.0), self._ends(self.first_end)]

    @property
    def first_end(self) -> float:
        """Parameters of the ends that are gathered, or hold a gradient, while layers are at work: those of the first unit, or
        both where the root has them."""
        return self.shape.counted.embedding / self.shape.strategy.tp if self.shape.strategy.ends_apart else self.shape.ends

    @property
    def held_ends(self) -> float:
        """Parameters of the ends that stay gathered while layers are at work: the root's; and the embedding that is the head,
        which accelerate gives back in the backward pass alone."""
        plan = self.shape.strategy
        if not plan.ends_apart:
            return self.shape.ends
        return self.first_end if self.shape.counted.tied else 0.0

    def _all_gathered(self, left: float, ends: float) -> list[Term]:
        """Kept from forward to backward; a layer that is through with its backward pass gives its weights back."""
        shape = self.shape
        size = shape.gathered_body * left + ends * shape.end_bytes
        each = shape.gathered_body / shape.body
        values = {"left": left, "body": shape.body, "bytes": each, "ends": ends, "half": shape.end_bytes}
        text = "{left} x {body} parameters of layers x {bytes} B + {ends} others x {half} B"
        return [Term("gathered layers", size, BYTES, text, values)]

    def _layers(self, count: float) -> Term:
        values = {"layers": count, "count": self.shape.largest, "bytes": self.layer_bytes / self.shape.largest}
        return Term(
            "gathered layers", count * self.layer_bytes, BYTES, "{layers} layers x {count} parameters x {bytes} B", values
        )

    def _ends(self, count: float, size: float | None = None) -> Term:
        each = self.end_bytes if size is None else size
        values = {"count": count, "bytes": each}
        return Term("gathered embedding and head", count * each, BYTES, "{count} parameters x {bytes} B", values)

    @property
    def kept(self) -> float:
        """The share of layers that are not recomputed."""
        return 1 - self.shape.strategy.recompute.share

    def cast_weights(self, left: float, *, again: bool = False) -> Term:
        """Under autocast every matrix has a copy in 16 bits from its use to the end of the forward pass (its cache), and where
        nothing is recomputed to the backward pass; ``again``: the layer at work computes its own anew."""
        shape = self.shape
        held = self.autocast and shape.strategy.weight_bytes >= FULL
        count = shape.body * left + (shape.largest if again else 0.0) if held else 0.0
        return Term("buffers", count * HALF, BYTES, "{count} parameters x 2 B, autocast's copies", {"count": count})

    def cast_head(self, tiles: int) -> Term:
        """The same of the head; TRL casts what a tile takes, going back while the one before is there."""
        plan, shape = self.shape.strategy, self.shape
        held = (self.autocast or (self.tensor_head and self.width == HALF)) and plan.weight_bytes >= FULL
        tile = tiles * min(TILE_ENTRIES, shape.counted.vocabulary) * shape.counted.hidden
        count = (tile if plan.tiled_loss and plan.fused_loss else self.head) if held else 0.0
        return Term("buffers", count * HALF, BYTES, "{count} parameters of the head x 2 B, cast", {"count": count})

    # -- gradients --------------------------------------------------------------------------------------------------------

    def gradients(self, done: float) -> Term:
        """Gradients after their reduction, of a share of the layers; none where they go to the host with their parameters."""
        plan, shape = self.shape.strategy, self.shape
        # The head's are reduced first; where it belongs to the root it waits for the embedding.
        ends = shape.ends - shape.counted.embedding / plan.tp if plan.ends_apart and not plan.lora else 0.0
        trained = shape.split_trained
        count = trained if done == 1 else ends + (trained - (0.0 if plan.lora else shape.ends)) * done
        held = 0.0 if plan.offload_params != "none" else count
        size = plan.gradient_bytes / (2 if self.has_buckets and done < 1 else 1)
        values = {"count": held, "bytes": size, "shards": plan.gradient_shards}
        text = "{count} trained parameters x {bytes} B / {shards} ranks"
        return Term("gradients", held * size / plan.gradient_shards, BYTES, text, values)

    def accumulated(self, left: float, *, back: bool = False) -> Term:
        """Gradients of earlier micro batches. transformers' Trainer skips the reduction until the last one (no_sync), so that
        FSDP keeps them whole on every rank until then; ``back``: the head's is reduced, that of the first end waits."""
        plan = self.shape.strategy
        unsharded = plan.is_fsdp and plan.accumulation > 1 and plan.gradient_shards > 1 and not plan.reduce_each
        resident = unsharded or (plan.gradient_shards == 1 and (plan.accumulation > 1 or plan.pp > 1))
        ends = 0.0 if plan.lora else self.first_end if back else self.shape.ends
        count = (self.shape.local_trained - (0.0 if plan.lora else self.shape.ends)) * left + ends if resident else 0.0
        size = plan.reduce_bytes if unsharded else plan.gradient_bytes / (2 if self.has_buckets else 1)
        values = {"count": count, "bytes": size}
        text = "{count} trained parameters x {bytes} B, not yet reduced between micro batches"
        return Term("gradients", count * size, BYTES, text, values)

    @property
    def has_buckets(self) -> bool:
        return self.shape.strategy.kind == "DDP" and self.shape.strategy.world_size > 1

    def buckets(self) -> Term:
        """DDP's buckets are there from the first step on."""
        count = self.shape.local_trained if self.has_buckets else 0.0
        size = self.shape.strategy.gradient_bytes / 2
        text = "{count} trained parameters x {bytes} B in DDP's buckets"
        return Term("gradients", count * size, BYTES, text, {"count": count, "bytes": size})

    @cached_property
    def layer_trained(self) -> float:
        """Trained parameters of the largest layer."""
        return self.shape.local_trained / self.shape.layers if self.shape.strategy.lora else self.shape.largest

    @property
    def layer_reduced(self) -> float:
        """The same in a reduction."""
        return self.shape.split_trained / self.shape.layers if self.shape.strategy.lora else self.shape.largest

    def whole_gradients(self) -> Term:
        """Gradients of the layer at work before their reduction."""
        plan = self.shape.strategy
        count = self.layer_trained if plan.is_fsdp and plan.gradient_shards > 1 else 0.0
        values = {"count": count, "bytes": self.width}
        return Term(
            "gradients", count * self.width, BYTES, "{count} parameters of a layer x {bytes} B, not yet reduced", values
        )

    def first_norm_back(self) -> Term:
        """The last rows of a layer's turn, beside its gradients: its first norm's input and five more in float32, and the
        gradient of the residual sum."""
        passes = self.passes_norms and not self.shape.strategy.lora
        size = (6.0 * FULL + self.stream) * self.shape.counted.hidden if passes else 0.0
        values = {"tokens": self.shape.tokens, "size": size}
        text = "inside the first norm of the layer at work: {tokens} tokens x {size} B"
        return Term("buffers", self.shape.tokens * size, BYTES, text, values)

    def in_flight(self, index: float) -> Term:
        """What the reduction of the unit before reads from, and the head's gradient where it waits for the end."""
        plan, shape = self.shape.strategy, self.shape
        last = index >= shape.layers - 1
        count = waiting = 0.0
        if plan.is_fsdp and plan.gradient_shards > 1:
            count = self.layer_reduced if not last else 0.0 if self.head_waits or plan.lora else self.head
        if self.head_waits and not plan.lora:
            waiting = self.head
        return self._reducing(count, waiting)

    @property
    def head_waits(self) -> bool:
        """The head's gradient waits for the embedding's: they are one parameter, or the root's of FSDP."""
        plan = self.shape.strategy
        return self.shape.counted.tied or (plan.gradient_shards > 1 and plan.is_fsdp and not plan.ends_apart)

    def _reducing(self, count: float, waiting: float = 0.0) -> Term:
        size, width = self.shape.strategy.reduce_bytes, self.stream
        values = {"count": count, "bytes": size, "waiting": waiting, "width": width}
        text = "{count} gradients in reduction x {bytes} B + {waiting} of the root waiting x {width} B"
        return Term("buffers", count * size + waiting * width, BYTES, text, values)

    def _gradients(self, kind: LayerKind, names: tuple[str, ...]) -> float:
        """Bytes of the first weight gradients of a layer's turn: of down while the feed-forward's widest rows are there."""
        plan = self.shape.strategy
        first = (linear for linear in kind.linears if linear.name.endswith(names) and not plan.lora)
        return sum(linear.parameters / plan.tp / (plan.ep if linear.copies > 1 else 1) for linear in first) * self.width

    def root_gradients(self) -> list[list[Term]]:
        """The end: the embedding's gradient, or the root's with the head's. FSDP2 gives its weights back and copies them for
        their reduction (torch, _fsdp_collectives.py, foreach_reduce)."""
        plan, shape = self.shape.strategy, self.shape
        if plan.lora:  # no gradient, but its unit is gathered, unless it is the head, which is there from the forward pass on
            again = self.gathers and plan.ends_apart and plan.reshard and not shape.counted.tied
            rows = self._rows(2, shape.tokens, "rows of the embedding and their gradient")
            return [[self._ends(2 * self.first_end), self.accumulated(1.0), rows]] if again else []
        if plan.pp > 1:
            return []
        if plan.kind in ("NO", "DDP"):
            copies = (plan.accumulation > 1) + shape.counted.tied  # beside what is held: its own, and the head's
            values = {"copies": copies, "count": shape.counted.embedding, "bytes": plan.weight_bytes}
            text = "{copies} gradients of the embedding and the head that it is x {count} x {bytes} B"
            return [[Term("gradients", copies * shape.counted.embedding * plan.weight_bytes, BYTES, text, values)]]
        if plan.gradient_shards == 1 or not plan.is_fsdp:
            return []
        count, values = self.first_end, {"count": self.first_end, "bytes": self.width}
        own = Term("gradients", count * self.width, BYTES, "{count} of the root x {bytes} B", values)
        return [[own, self._ends(count), self._reducing(self.layer_trained)], [own, self._reducing(count)]]

    # -- activations ------------------------------------------------------------------------------------------------------

    @cached_property
    def saved_activations(self) -> float:
        """Bytes per token of all layers where nothing is recomputed."""
        return sum(kind.count * self.layer(kind) for kind in self.shape.counted.layers) + self.rank()

    @cached_property
    def largest_saved(self) -> float:
        """The same of the layer with most."""
        counted = self.shape.counted
        return max(self.layer(kind) for kind in counted.layers) + self.rank() / counted.num_layers

    def in_stage(self, *, last: bool) -> float:
        """Micro batches whose activations the first, or the last, stage of a pipeline holds at once.

        1F1B: as many as stages, and one. Interleaved: of parts of a stage (megatron/core/pipeline_parallel/schedules.py,
        num_warmup_microbatches) v p + p - 1, and (v - 1) p + 1.
        """
        plan = self.shape.strategy
        if plan.pp == 1:
            return 1.0
        many = min(plan.accumulation, plan.pp)
        if plan.virtual == 1:
            return 1.0 if last else many
        parts = (plan.virtual - 1) * plan.pp + 1 if last else plan.virtual * plan.pp + plan.pp - 1
        return many * parts / (plan.virtual * plan.pp)

    def activations(self, share: float, last: float = 0.0, *, at_end: bool = False) -> list[Term]:
        """What a share of the layers keeps for backward, and ``last`` bytes per token behind them, which are gone when layers
        go back; ``at_end``: in the last stage of a pipeline, which has the loss."""
        plan, shape = self.shape.strategy, self.shape
        inflight = self.in_stage(last=at_end)
        kept = (1 - plan.recompute.share) * share
        per_token = self.saved_activations * kept + last
        row = self.stream * shape.counted.hidden / (plan.tp if plan.sequence_parallel else 1)
        saved = sum(kind.count * self.beside_input(kind) for kind in shape.counted.layers)
        inputs = 0.0 if plan.recompute.offload else shape.counted.num_layers * row
        stored = (inputs + saved) * plan.recompute.share * share + self.shared_mask()
        scale = self.constants.memory_scale * shape.tokens * inflight / plan.pp
        values = {"tokens": shape.tokens, "bytes": per_token, "inflight": inflight, "pp": plan.pp}
        text = "{tokens} tokens x {bytes} B (all layers) x {inflight} micro batches / {pp} stages"
        terms = [Term("activations", per_token * scale, BYTES, text, values), self._experts(shape.all_experts * kept)]
        terms.append(self.router_scores(shape.tokens * inflight / plan.pp * share))
        return [*terms, Term("saved layer inputs", stored * scale, BYTES, text, values | {"bytes": stored})]

    def _experts(self, count: float) -> Term:
        """Adapted experts with the update in them, or the update alone. The product of a layer that is not recomputed keeps the
        sum for backward."""
        text = "{count} parameters of experts x {bytes} B, with LoRA's update in them"
        return Term("activations", count * self.width, BYTES, text, {"count": count, "bytes": self.width})

    def router_scores(self, tokens: float) -> Term:
        """A score of each expert in each layer, which transformers keeps for the loss that balances them
        (utils/output_capturing.py)."""
        counted = self.shape.counted
        experts = [(kind.count, max(one.copies for one in kind.linears)) for kind in counted.layers]
        balanced = self.shape.strategy.balances_experts
        number = sum(layers * count for layers, count in experts if balanced and count > 1)
        values = {"tokens": tokens, "number": number, "bytes": self.width}
        text = "{tokens} tokens x {number} scores of experts in all layers x {bytes} B"
        return Term("activations", tokens * number * self.width, BYTES, text, values)

    @cached_property
    def largest_experts(self) -> int:
        """Adapted experts' parameters of the layer with most."""
        return max(self.shape.experts(kind) for kind in self.shape.counted.layers)

    def _working(self, kind: LayerKind) -> float:
        """Bytes inside the layer at work, beside what it keeps: of its gradients; or, where experts are computed again, what is
        there at their end: four times the tokens' rows, of which some are kept, two rows of the residual sum, and of adapted
        ones the update and the sum. Backward each matrix's gradient takes the place of its sum; one at a time has a copy."""
        adapted = [one.copies * one.inputs * one.outputs for one in kind.linears if one.name in self.shape.wrapped]
        again = self.shape.strategy.recompute.share > 0
        back = max(
            self.shape.tokens * self.working(kind) + self._gradients(kind, GROUPS[3]),
            self.shape.tokens * self.norm_back(kind) + self._gradients(kind, GROUPS[2] + GROUPS[3]),
        )
        back += self.width * (max(adapted, default=0) + (sum(adapted) if again else 0))
        down = any(self.adapts(linear) for linear in kind.linears if linear.name.endswith(GROUPS[3]))
        if again and self.autocast and self.shape.dropout and down:
            # Computing down again, PEFT casts its input to the adapter's float32 and drops from that. Beside are the gradient
            # of the residual sum, the sum behind attention, down's own result and two normalised rows.
            dropped = (2 * FULL + self.width) * kind.inner + 5 * self.stream * self.shape.counted.hidden
            back = max(back, self.shape.tokens * dropped)
        rows = 4 * self.expert_rows(kind) - self.experts(kind) + 2 * self.stream * self.shape.counted.hidden
        return max(back, self.shape.tokens * rows + 2 * self.width * sum(adapted)) if again else back

    def recomputed(self, index: float) -> list[Term]:
        """The layer that is recomputed at the moment. Where some are not recomputed, the last one is among them, and what it
        kept is gone by then."""
        plan, shape = self.shape.strategy, self.shape
        if not plan.recompute.share or (plan.recompute.share < 1 and index >= shape.layers - 1):
            return []
        largest = self.largest_saved - min(self.taken(kind) for kind in shape.counted.layers)
        values = {"tokens": shape.tokens, "bytes": largest}
        return [Term("one recomputed layer", largest * shape.tokens, BYTES, "{tokens} tokens x {bytes} B", values)]

    # -- the loss and the update ------------------------------------------------------------------------------------------

    def logits(self, *, back: bool, tokens: float | None = None) -> Term:
        """Logits with their float32 copy and log-softmax, or that with its gradient twice; of a loss in tiles one tile. Without
        a float32 copy, or where a compiler fuses it: logits and log-softmax, then a gradient of each, in 16 bits."""
        plan, shape = self.shape.strategy, self.shape
        tokens = tokens or shape.tokens
        if plan.fused_loss:
            rows = min(tokens, TILE_TOKENS) if plan.tiled_loss else 0.0
            values = {"rows": rows, "entries": TILE_ENTRIES, "bytes": self.width}
            size = rows * TILE_ENTRIES * self.width
            return Term("logits", size, BYTES, "a tile of {rows} tokens x {entries} vocabulary entries x {bytes} B", values)
        entries, half = shape.counted.vocabulary / plan.tp, self.width == HALF
        size = 3 * FULL if back else 2 * FULL + (HALF if half else 0)
        if half and ((plan.compiled and not plan.whole_loss) or plan.half_loss):
            size = (4 if back else 3) * HALF
        values = {"tokens": tokens, "entries": entries, "bytes": size}
        text = "{tokens} tokens x {entries} vocabulary entries x {bytes} B"
        return Term("logits", size * entries * tokens, BYTES, text, values)

    def held_logits(self) -> Term:
        """A loop's own variable keeps the logits until the next forward pass has new ones."""
        plan, shape = self.shape.strategy, self.shape
        entries = shape.counted.vocabulary / plan.tp if plan.holds_logits else 0.0
        values = {"tokens": shape.tokens, "entries": entries, "bytes": self.width}
        text = "{tokens} tokens x {entries} vocabulary entries x {bytes} B, held by the program through the backward pass"
        return Term("logits", shape.tokens * entries * self.width, BYTES, text, values)

    def head_gradient(self) -> Term:
        """TRL's tiles add up the head's gradient, whole, in float32, and cast it at the end; that of the rows likewise."""
        plan, shape = self.shape.strategy, self.shape
        tiles = plan.fused_loss and plan.tiled_loss
        size = FULL + (self.stream if self.stream < FULL else 0)
        each = size if tiles and not plan.lora else 0
        rows = shape.tokens * shape.counted.hidden if tiles else 0.0
        values = {"count": self.head, "bytes": each, "rows": rows, "size": size}
        text = "gradient of the head {count} x {bytes} B + of its input {rows} x {size} B"
        return Term("buffers", self.head * each + rows * size, BYTES, text, values)

    def update(self) -> Term:
        """Temporaries of the foreach implementation: the root of the second moment."""
        plan, count = self.shape.strategy, self.shape.split_trained
        none = plan.offload_optimizer != "none" or not plan.state_bytes or plan.fused_optimizer
        held, size = 0.0 if none else count, min(FULL, plan.trained_bytes)
        values = {"count": held, "bytes": size, "shards": plan.state_shards}
        text = "{count} trained parameters x {bytes} B / {shards} ranks"
        return Term("buffers", held * size / plan.state_shards, BYTES, text, values)


# --- RAM of a node: what loading takes, and what is offloaded to it ---------------------------------------------------

WEIGHTS = "offloaded weights"
RANK_HOST_BYTES = 2e9
"""Interpreter, torch and CUDA context of a rank. Measured: 0.6 GB without CUDA; the context's host side assumed."""

COPY_SHARE = 0.8
"""Of a node's free memory, what copies for saves may take: page cache and data loaders need the rest. Assumed."""


def host_parts(resolved: Resolved, shape: ModelShape) -> list[Term]:
    """What the node of rank 0 holds at most, while loading or while training, whichever is more."""
    plan = shape.strategy
    ranks = plan.ranks_per_node
    own = Term("ranks", ranks * RANK_HOST_BYTES, BYTES, "{ranks} ranks x 2 GB", {"ranks": ranks})
    resting = _offloaded(shape)
    # Rows are read into weights that lie in host memory already; a whole copy is given back as they are filled.
    weights = [term for term in resting if term.name == WEIGHTS] if resolved.distribution.reads_parts else []
    loading = [*weights, _loading(resolved, shape)]
    more = [t for t in max(loading, resting, key=lambda terms: sum(t.value for t in terms)) if t.value]
    return [own, *more]


def save_copy(shape: ModelShape) -> Term | None:
    """The copy of trained weights and optimizer state that a save behind training takes of a node's RAM, kept from the first
    save on; None where training waits for its saves (:mod:`clustertune.checkpoint.saving`).
    """
    plan = shape.strategy
    if not plan.kind.startswith(("FSDP", "DDP", "NO")):
        return None
    ranks = plan.ranks_per_node if plan.kind.startswith("FSDP") else 1  # where all ranks have the same, the first one saves it
    each = (4 if plan.lora else plan.weight_bytes) + plan.state_bytes
    values = {"ranks": ranks, "count": shape.split_trained, "bytes": each, "shards": plan.state_shards}
    size = ranks * shape.split_trained * each / plan.state_shards
    return Term("copy for saves", size, BYTES, "{ranks} ranks x {count} trained x {bytes} B / {shards}", values)


def _loading(resolved: Resolved, shape: ModelShape) -> Term:
    """Weights in host memory at once: a few parts (FSDP2 and ZeRO-3), all in one rank (FSDP1), or all in every rank."""
    plan, size = shape.strategy, 2.0 * shape.counted.total
    if plan.is_megatron:
        return Term("loading", size / plan.world_size * plan.ranks_per_node, BYTES, "each rank reads its own shard", {})
    if resolved.distribution.reads_parts:
        largest, each = shape.counted.largest, row_bytes(resolved)
        values = {"ranks": plan.ranks_per_node, "parts": IN_FLIGHT, "count": largest, "bytes": each}
        values |= {"shards": plan.weight_shards}
        size = rows_in_flight(resolved, shape.counted, plan.ranks_per_node, plan.weight_shards)
        return Term("loading", size, BYTES, "{ranks} ranks x {parts} parts x {count} parameters x {bytes} B / {shards}", values)
    if resolved.distribution.loading == "first":
        return Term("loading", size, BYTES, "{count} parameters x 2 B in one rank", {"count": shape.counted.total})
    values = {"ranks": plan.ranks_per_node, "count": shape.counted.total}
    return Term("loading", plan.ranks_per_node * size, BYTES, "{ranks} ranks x {count} parameters x 2 B", values)


def row_bytes(resolved: Resolved) -> int:
    """Bytes that a parameter takes while it is read: in bfloat16 and, trained itself, as the float32 that FSDP2 makes of it.

    DeepSpeed makes its float32 copies later, of what lies in its place by then.
    """
    return 2 + 4 if resolved.distribution.is_fsdp and resolved.lora is None else 2


def rows_in_flight(resolved: Resolved, counted: ParameterCount, ranks: int, shards: int) -> float:
    """Bytes that the ranks of a node hold at once while each reads its part; ``shards``: ranks that share a matrix."""
    return ranks * IN_FLIGHT * counted.largest * row_bytes(resolved) / shards


def _offloaded(shape: ModelShape) -> list[Term]:
    """Shards of weights, gradients and optimizer state that live in host memory."""
    plan, ranks = shape.strategy, shape.strategy.ranks_per_node
    terms = []
    if plan.offload_params == "cpu":
        each = shape.stored / shape.parameters
        values = {"ranks": ranks, "count": shape.parameters, "bytes": each, "shards": plan.weight_shards}
        size = ranks * shape.stored / plan.weight_shards
        terms.append(Term(WEIGHTS, size, BYTES, "{ranks} ranks x {count} parameters x {bytes} B / {shards}", values))
        if plan.reference_bytes:
            values |= {"bytes": plan.reference_bytes}
            size = ranks * shape.parameters * plan.reference_bytes / plan.weight_shards
            text = "{ranks} ranks x {count} parameters x {bytes} B / {shards}"
            terms.append(Term("offloaded reference", size, BYTES, text, values))
    if plan.offload_optimizer == "cpu":
        each = plan.state_bytes + plan.gradient_bytes
        values = {"ranks": ranks, "count": shape.local_trained, "bytes": each, "shards": plan.state_shards}
        size = ranks * shape.local_trained * each / plan.state_shards
        terms.append(Term("offloaded optimizer", size, BYTES, "{ranks} ranks x {count} trained x {bytes} B / {shards}", values))
    if plan.recompute.offload:
        size = ranks * shape.tokens * shape.layers * shape.counted.hidden * 2
        values = {"ranks": ranks, "tokens": shape.tokens, "layers": shape.layers, "hidden": shape.counted.hidden}
        text = "{ranks} ranks x {tokens} tokens x {layers} layers x {hidden} x 2 B"
        terms.append(Term("offloaded checkpoints", size, BYTES, text, values))
    return terms
