"""What a model is made of, from its architecture alone: the layers of each family of decoders, as the installed transformers
builds them (models/TYPE/modeling_TYPE.py), parameter counts, and what LoRA adapts. Exact for the families that stand here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from clustertune.recipe.library_facts import model_facts

# --- an architecture's values as its configuration class sees them: other names resolved, defaults filled in --------------


class Values:
    """An architecture's values by any of a key's names; what is not given has the default of the installed transformers."""

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        kind = str(architecture["model_type"])
        self.kind = kind
        aliases = model_facts(kind)["aliases"]
        self._same = {**aliases, **{own: other for other, own in aliases.items()}}
        self._architecture = architecture
        self._defaults = model_facts(kind)["defaults"]

    def get(self, key: str) -> Any:
        """The value of a key; None where there is none."""
        for known in (self._architecture, self._defaults):
            for name in (key, self._same.get(key, key)):
                if name in known:
                    return known[name]
        return None

    def keys(self) -> frozenset[str]:
        """All keys that have a value or a default."""
        return frozenset(self._architecture) | frozenset(self._defaults)

    def integer(self, key: str) -> int:
        """A whole number that must be there. Raises KeyError where it is not."""
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return int(value)

    def flag(self, key: bool | str) -> bool:
        """A key's truth, or the constant itself."""
        return key if isinstance(key, bool) else bool(self.get(key))

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.integer("num_hidden_layers")

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.integer("hidden_size")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.integer("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Key-value heads: as many as query heads where nothing says otherwise."""
        return int(self.get("num_key_value_heads") or self.heads)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return int(self.get("head_dim") or self.hidden // self.heads)

    @cached_property
    def attention_types(self) -> tuple[str, ...]:
        """The kind of attention of each layer, as the configuration classes derive it where ``layer_types`` is not given."""
        types = self.get("layer_types")
        if types:
            return tuple(map(str, types))
        name = _NAMES.get(self.kind, "sliding_attention")
        rule = _LOCAL.get(self.kind) if name != "sliding_attention" or self.is_windowed else None
        return tuple(name if rule and rule(self, layer) else "full_attention" for layer in range(self.layers))

    @property
    def is_windowed(self) -> bool:
        """Whether there is a sliding window at all."""
        return bool(self.get("sliding_window")) and self.get("use_sliding_window") in (None, True)


def _has_rope(values: Values, layer: int) -> bool:
    """Layers without rotary positions see everything (NoPE)."""
    flags = values.get("no_rope_layers")
    return bool(flags[layer]) if flags else (layer + 1) % values.integer("no_rope_layer_interval") != 0


def _every(layer: int, values: Values, key: str, default: int) -> bool:
    """Not every so-many-th layer, where the interval may be given under a key that is not a field."""
    return (layer + 1) % int(values.get(key) or default) != 0


_LOCAL: dict[str, Callable[[Values, int], bool]] = {
    "qwen2": lambda values, layer: layer >= values.integer("max_window_layers"),
    "qwen3": lambda values, layer: layer >= values.integer("max_window_layers"),
    "qwen2_moe": lambda values, layer: layer % 2 == 0 and layer < values.integer("max_window_layers"),
    "gemma2": lambda _, layer: layer % 2 == 0,
    "gpt_oss": lambda _, layer: layer % 2 == 0,
    "gemma3_text": lambda values, layer: _every(layer, values, "sliding_window_pattern", 6),
    "qwen3_next": lambda values, layer: _every(layer, values, "full_attention_interval", 4),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"), lambda values, layer: _every(layer, values, "full_attention_interval", 4)
    ),
    "gemma4_text": lambda values, layer: (layer + 1) % 6 != 0 and layer + 1 < values.layers,
    "olmo3": lambda _, layer: (layer + 1) % 4 != 0,
    "llama4_text": _has_rope,
    "smollm3": lambda values, layer: not _has_rope(values, layer),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"), lambda *_: True),
}
"""Which layers see a part only, by model type: ``__post_init__`` of the configuration classes; others see everything."""
_NAMES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "linear_attention"),
    "llama4_text": "chunked_attention",
}
_SEES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The key that says how many tokens a layer sees, by its kind of attention."""


def window(values: Values, layer: int) -> int | None:
    """How many tokens one token of a layer sees; None: all before it."""
    kind = values.attention_types[layer]
    if kind not in _SEES or (kind == "sliding_attention" and not values.is_windowed):
        return None
    seen = values.get(_SEES[kind])
    return int(seen) if seen else None


# --- what is counted --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """One matrix of a layer, or all experts' matrices of one name."""

    name: str
    """As in the module tree of the installed transformers, below the layer: ``self_attn.q_proj``, ``mlp.experts.down_proj``."""
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    """How many of it the layer has (experts)."""
    active: float = 1.0
    """How many of the copies one token passes through (experts per token)."""
    bare: bool = False
    """A bare parameter, not a linear module: the fused experts and the routers of transformers 5."""
    derived: bool = False
    """A class of transformers' own below nn.Linear (Llama 4's router, all of Falcon's), or a module that its family
    keeps in float32 (``_keep_in_fp32_modules``): bitsandbytes converts neither."""

    @property
    def weights(self) -> int:
        """Elements of the matrices of all copies, biases left out."""
        return self.copies * self.inputs * self.outputs

    @property
    def size(self) -> int:
        """Parameters of one copy."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return self.copies * self.size


@dataclass(frozen=True)
class Attention:
    """What a layer's attention computes; ``qk_dim`` and ``v_dim`` are per head."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    """Tokens that a token sees (sliding window or chunk); None: all before it."""


@dataclass(frozen=True)
class LayerKind:
    """Layers that are the same."""

    count: int
    linears: tuple[Linear, ...]
    other: int
    """Parameters beside the linears in one layer: norms, sinks."""
    attention: Attention
    inner: int
    """Width between the up and down projections, summed over the experts that a token passes through."""

    @property
    def parameters(self) -> int:
        """Parameters of one layer."""
        return sum(linear.parameters for linear in self.linears) + self.other

    @property
    def active(self) -> float:
        """Parameters of one layer that one token passes through."""
        return sum(linear.active * linear.size for linear in self.linears) + self.other

    @property
    def active_matmul(self) -> float:
        """Multiply-adds of one token in one layer's linears (attention's own products are not among them)."""
        return sum(linear.active * linear.inputs * linear.outputs for linear in self.linears)


@dataclass(frozen=True)
class ParameterCount:
    """The parameters of a model, exact."""

    layers: tuple[LayerKind, ...]
    hidden: int
    vocabulary: int
    embedding: int
    """Parameters of the token embedding, and of learned positions and rows for each layer where there are such."""
    head: int
    """Parameters of the output head; 0 where it is the token embedding (tied)."""
    other: int
    """The final norm, and what makes the rows for each layer."""
    tied: bool

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(kind.count * kind.parameters for kind in self.layers) + self.embedding + self.head + self.other

    @property
    def active(self) -> int:
        """Parameters that one token passes through: its experts, the output head (also a tied one), no embedding row.

        As the gpt-oss model card counts (arXiv 2508.10925, table 1: 3.61B and 5.13B). Qwen3-30B-A3B's 3.3B and
        DeepSeek-V3's 37B hold the embedding as well.
        """
        layers = sum(kind.count * kind.active for kind in self.layers)
        return round(layers) + self.vocabulary * self.hidden + self.other

    @property
    def largest(self) -> int:
        """Parameters of the largest matrix; all experts' matrices of one name are one parameter of transformers."""
        return max([self.embedding, *(part.parameters for kind in self.layers for part in kind.linears)])

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(kind.count for kind in self.layers)


# --- parts of a layer --------------------------------------------------------------------------------------------------


GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LayerPart:
    """Some of a layer: its linears, its other parameters, and what it computes."""

    linears: tuple[Linear, ...]
    other: int = 0
    inner: int = 0
    """Width between up and down projection, over the experts of one token."""
    attention: Attention | None = None


def attention(
    values: Values,
    layer: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: str = "",
    fused: bool = False,
    query_factor: int = 1,
) -> LayerPart:
    """q, k, v and o, or qkv and o where they are ``fused``.

    ``qk_norm``: "head" for one norm that all heads share, "all" for one over all heads, "optional" for the latter where
    ``use_qk_norm`` says so. ``query_factor`` 2: the query projection makes a gate too.
    """
    hidden, head, heads, groups = values.hidden, values.head_dim, values.heads, values.kv_heads
    query, keys = heads * head, groups * head
    if fused:
        linears: tuple[Linear, ...] = (Linear("self_attn.qkv_proj", hidden, query + 2 * keys, qkv_bias),)
    else:
        linears = (
            Linear("self_attn.q_proj", hidden, query_factor * query, qkv_bias),
            Linear("self_attn.k_proj", hidden, keys, qkv_bias),
            Linear("self_attn.v_proj", hidden, keys, qkv_bias),
        )
    linears += (Linear("self_attn.o_proj", query, hidden, out_bias),)
    wide = qk_norm == "all" or (qk_norm == "optional" and values.flag("use_qk_norm"))
    norms = query + keys if wide else 2 * head if qk_norm == "head" else 0
    return LayerPart(linears, norms, attention=Attention(heads, groups, head, head, window(values, layer)))


def gated(prefix: str, hidden: int, inner: int, names: tuple[str, ...] = GATED, *, bias: bool = False) -> LayerPart:
    """A gate and an up projection, in one matrix where ``names`` are two, and a down projection."""
    last = Linear(f"{prefix}.{names[-1]}", inner, hidden, bias)
    first = [Linear(f"{prefix}.{name}", hidden, 2 * inner if len(names) == 2 else inner, bias) for name in names[:-1]]
    return LayerPart((*first, last), inner=inner)


def plain(prefix: str, hidden: int, inner: int, names: tuple[str, ...], *, bias: bool = False) -> LayerPart:
    """An up and a down projection without a gate."""
    up = Linear(f"{prefix}.{names[0]}", hidden, inner, bias)
    return LayerPart((up, Linear(f"{prefix}.{names[1]}", inner, hidden, bias)), inner=inner)


# --- mixtures of experts, latent attention (DeepSeek), a recurrent state (Qwen3-Next) ----------------------------------


_CHUNK = 64
"""Tokens that the gated delta rule takes at once: ``chunk_size`` of torch_chunk_gated_delta_rule, modeling_qwen3_next.py."""


def experts(
    prefix: str, values: Values, number: int, inner: int, *, router: str = "gate", bias: bool = False, bare_router: bool = True
) -> LayerPart:
    """The router and the experts, whose gate and up projections transformers 5 keeps in one 3-dimensional parameter."""
    hidden, chosen = values.hidden, values.integer("num_experts_per_tok")
    linears = (
        Linear(f"{prefix}.{router}", hidden, number, bias, bare=bare_router, derived=not bare_router),
        Linear(f"{prefix}.experts.gate_up_proj", hidden, 2 * inner, bias, number, chosen, bare=True),
        Linear(f"{prefix}.experts.down_proj", inner, hidden, bias, number, chosen, bare=True),
    )
    return LayerPart(linears, inner=chosen * inner)


def _together(first: LayerPart, *rest: LayerPart, norms: int) -> LayerKind:
    """One layer of its parts; the first has the attention."""
    parts = (first, *rest)
    linears = tuple(linear for part in parts for linear in part.linears)
    other, inner = sum(part.other for part in parts) + norms, sum(part.inner for part in parts)
    assert first.attention is not None
    return LayerKind(1, linears, other, first.attention, inner)


def _is_sparse(values: Values, layer: int) -> bool:
    """The rule of Qwen's mixtures for the layers that have experts."""
    dense = values.get("mlp_only_layers") or []
    step = int(values.get("decoder_sparse_step") or 1)
    return layer not in dense and int(values.get("num_experts") or 0) > 0 and (layer + 1) % step == 0


def _qwen_block(values: Values, layer: int) -> tuple[LayerPart, ...]:
    """The feed-forward part of Qwen's layers: dense, or experts with (Qwen2-MoE, Qwen3-Next) or without a shared one."""
    hidden = values.hidden
    if not _is_sparse(values, layer):
        return (gated("mlp", hidden, values.integer("intermediate_size")),)
    routed = experts("mlp", values, values.integer("num_experts"), values.integer("moe_intermediate_size"))
    if values.kind == "qwen3_moe":
        return (routed,)
    shared = gated("mlp.shared_expert", hidden, values.integer("shared_expert_intermediate_size"))
    return routed, shared, LayerPart((Linear("mlp.shared_expert_gate", hidden, 1),))


def mixture_layer(values: Values, layer: int) -> LayerKind:
    """Mixtral, Qwen2-MoE, Qwen3-MoE."""
    norms = 2 * values.hidden
    if values.kind == "mixtral":
        block = experts("mlp", values, values.integer("num_local_experts"), values.integer("intermediate_size"))
        return _together(attention(values, layer), block, norms=norms)
    if values.kind == "qwen2_moe":
        first = attention(values, layer, qkv_bias=values.flag("qkv_bias"))
    else:
        bias = values.flag("attention_bias")
        first = attention(values, layer, qkv_bias=bias, out_bias=bias, qk_norm="head")
    return _together(first, *_qwen_block(values, layer), norms=norms)


def gpt_oss_layer(values: Values, layer: int) -> LayerKind:
    """Experts and router with biases, one sink per head."""
    bias = values.flag("attention_bias")
    block = experts(
        "mlp", values, values.integer("num_local_experts"), values.integer("intermediate_size"), router="router", bias=True
    )
    first = attention(values, layer, qkv_bias=bias, out_bias=bias)
    return _together(first, block, norms=2 * values.hidden + values.heads)


def llama4_layer(values: Values, layer: int) -> LayerKind:
    """Every ``interleave_moe_layer_step``-th layer has experts and a shared one; the others a wider dense block."""
    hidden, bias = values.hidden, values.flag("attention_bias")
    first = attention(values, layer, qkv_bias=bias, out_bias=bias)
    chosen = values.get("moe_layers")
    sparse = layer in chosen if chosen is not None else (layer + 1) % values.integer("interleave_moe_layer_step") == 0
    if not sparse:
        return _together(first, gated("feed_forward", hidden, values.integer("intermediate_size_mlp")), norms=2 * hidden)
    inner = values.integer("intermediate_size")
    routed = experts("feed_forward", values, values.integer("num_local_experts"), inner, router="router", bare_router=False)
    return _together(first, routed, gated("feed_forward.shared_expert", hidden, inner), norms=2 * hidden)


def _latent_attention(values: Values) -> LayerPart:
    """Multi-head latent attention: queries (where ``q_lora_rank``) and keys with values go through narrow matrices."""
    hidden, heads, bias = values.hidden, values.heads, values.flag("attention_bias")
    rope, narrow = values.integer("qk_rope_head_dim"), values.integer("kv_lora_rank")
    nope, wide = values.integer("qk_nope_head_dim"), values.integer("v_head_dim")
    rank = values.get("q_lora_rank")
    if rank is None:
        queries: tuple[Linear, ...] = (Linear("self_attn.q_proj", hidden, heads * (nope + rope)),)
    else:
        queries = (
            Linear("self_attn.q_a_proj", hidden, int(rank), bias),
            Linear("self_attn.q_b_proj", int(rank), heads * (nope + rope)),
        )
    linears = (
        *queries,
        Linear("self_attn.kv_a_proj_with_mqa", hidden, narrow + rope, bias),
        Linear("self_attn.kv_b_proj", narrow, heads * (nope + wide)),
        Linear("self_attn.o_proj", heads * wide, hidden, bias),
    )
    return LayerPart(linears, int(rank or 0) + narrow, attention=Attention(heads, heads, nope + rope, wide))


def deepseek_layer(values: Values, layer: int) -> LayerKind:
    """DeepSeek-V2, V3 and GLM-4.5: dense for the first ``first_k_dense_replace`` layers; without the layer that predicts more
    tokens.

    The router of V3 and GLM has one correction per expert (``e_score_correction_bias``), which the published 671,026,419,200
    hold, although transformers keeps it as a buffer.
    """
    hidden = values.hidden
    bias = values.kind == "deepseek_v2" and values.flag("mlp_bias")
    if values.kind == "glm4_moe":
        first = attention(
            values, layer, qkv_bias=values.flag("attention_bias"), qk_norm="head" if values.flag("use_qk_norm") else ""
        )
    else:
        first = _latent_attention(values)
    if layer < int(values.get("first_k_dense_replace") or 0):
        return _together(first, gated("mlp", hidden, values.integer("intermediate_size"), bias=bias), norms=2 * hidden)
    inner = values.integer("moe_intermediate_size")
    routed = experts("mlp", values, values.integer("n_routed_experts"), inner)
    shared = gated("mlp.shared_experts", hidden, inner * values.integer("n_shared_experts"), bias=bias)
    corrections = 0 if values.kind == "deepseek_v2" else values.integer("n_routed_experts")
    return _together(first, routed, shared, norms=2 * hidden + corrections)


def glm_latent_layer(values: Values, layer: int) -> LayerKind:
    """GLM-4.7-Flash and GLM-5: DeepSeek's layer, dense by ``mlp_layer_types`` or for the first layers.

    GLM-5's layers have an indexer that chooses the tokens that attention sees; transformers lays its choice over the scores of
    all of them as a mask, so that attention is counted whole. Of the indexer the projections are counted.
    """
    hidden, first = values.hidden, _latent_attention(values)
    if values.kind == "glm_moe_dsa" and _has_indexer(values, layer):
        heads, width = values.integer("index_n_heads"), values.integer("index_head_dim")
        indexer = (
            Linear("self_attn.indexer.wq_b", values.integer("q_lora_rank"), heads * width),
            Linear("self_attn.indexer.wk", hidden, width),
            Linear("self_attn.indexer.weights_proj", hidden, heads, derived=True),
        )
        first = replace(first, linears=(*first.linears, *indexer), other=first.other + 2 * width)
    kinds, dense = values.get("mlp_layer_types"), values.get("first_k_dense_replace")
    if kinds[layer] == "dense" if kinds else layer < int(1 if dense is None else dense):
        return _together(first, gated("mlp", hidden, values.integer("intermediate_size")), norms=2 * hidden)
    inner, number = values.integer("moe_intermediate_size"), values.integer("n_routed_experts")
    shared = gated("mlp.shared_experts", hidden, inner * values.integer("n_shared_experts"))
    return _together(first, experts("mlp", values, number, inner), shared, norms=2 * hidden + number)


def _has_indexer(values: Values, layer: int) -> bool:
    """The rule of GlmMoeDsaConfig.__post_init__; other layers take the choice of the one before."""
    kinds = values.get("indexer_types")
    if kinds is None and (pattern := values.get("index_topk_pattern")) is not None:
        kinds = [{"F": "full", "S": "shared"}.get(part, part) for part in pattern]
    if kinds is not None:
        return bool(kinds[layer] == "full")
    every, skipped = max(int(values.get("index_topk_freq") or 1), 1), values.get("index_skip_topk_offset")
    return max(layer - (2 if skipped is None else int(skipped)) + 1, 0) % every == 0


def gemma4_layer(values: Values, layer: int) -> LayerKind:
    """Wide heads where a layer sees everything, layers that share keys and values, a gated row of each token's own embedding
    in every layer, and experts beside the dense block."""
    hidden, bias, inner = values.hidden, values.flag("attention_bias"), values.integer("intermediate_size")
    sees_all = values.attention_types[layer] == "full_attention"
    wide, equal = values.get("global_head_dim"), values.flag("attention_k_eq_v")
    head = int(512 if wide is None else wide) if sees_all else values.head_dim
    groups = int((sees_all and equal and values.get("num_global_key_value_heads")) or values.kv_heads)
    reused = layer >= values.layers - int(values.get("num_kv_shared_layers") or 0)
    linears = [Linear("self_attn.q_proj", hidden, values.heads * head, bias)]
    if not reused:
        linears.append(Linear("self_attn.k_proj", hidden, groups * head, bias))
        if not (equal and sees_all):
            linears.append(Linear("self_attn.v_proj", hidden, groups * head, bias))
    linears.append(Linear("self_attn.o_proj", values.heads * head, hidden, bias))
    seen = Attention(values.heads, groups, head, head, window(values, layer))
    first = LayerPart(tuple(linears), head if reused else 2 * head, attention=seen)
    parts = [gated("mlp", hidden, inner * (2 if reused and values.flag("use_double_wide_mlp") else 1))]
    norms = 4
    if values.flag("enable_moe_block"):
        number, chosen = values.integer("num_experts"), values.integer("top_k_experts")
        width = values.integer("moe_intermediate_size")
        routed = (
            Linear("router.proj", hidden, number),
            Linear("experts.gate_up_proj", hidden, 2 * width, False, number, chosen, bare=True),
            Linear("experts.down_proj", width, hidden, False, number, chosen, bare=True),
        )
        parts.append(LayerPart(routed, hidden + number, inner=chosen * width))
        norms += 3
    if own := int(values.get("hidden_size_per_layer_input") or 0):
        parts.append(
            LayerPart((Linear("per_layer_input_gate", hidden, own), Linear("per_layer_projection", own, hidden)), inner=0)
        )
        norms += 1
    return _together(first, *parts, norms=norms * hidden)


def qwen3_next_layer(values: Values, layer: int) -> LayerKind:
    """Qwen3-Next and Qwen3.5: every fourth layer has gated attention, the others the gated delta rule."""
    if values.attention_types[layer] == "linear_attention":
        first = _delta_rule(values)
    else:
        bias = values.flag("attention_bias")
        first = attention(values, layer, qkv_bias=bias, out_bias=bias, qk_norm="head", query_factor=2)
    return _together(first, *_qwen_block(values, layer), norms=2 * values.hidden)


def _delta_rule(values: Values) -> LayerPart:
    """The gated delta rule: a state of key x value numbers per head instead of attention over all tokens.

    Its work is written as a window: the 64 tokens of a chunk, and as many as cost what reading and writing the state does,
    2 x 2 qk_dim v_dim = 2 w (qk_dim + v_dim).
    """
    heads, groups = values.integer("linear_num_value_heads"), values.integer("linear_num_key_heads")
    key, value = values.integer("linear_key_head_dim"), values.integer("linear_value_head_dim")
    keys, width = groups * key, heads * value
    sizes = {"qkvz": 2 * keys + 2 * width, "ba": 2 * heads}
    if values.kind != "qwen3_next":
        sizes = {"qkv": 2 * keys + width, "z": width, "b": heads, "a": heads}
    linears = (
        *(Linear(f"linear_attn.in_proj_{name}", values.hidden, size) for name, size in sizes.items()),
        Linear("linear_attn.out_proj", width, values.hidden),
    )
    convolution = (2 * keys + width) * values.integer("linear_conv_kernel_dim")
    other = convolution + 2 * heads + value
    return LayerPart(linears, other, attention=Attention(heads, groups, key, value, _CHUNK + 2 * key * value // (key + value)))


# --- families ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How one family's parameters are counted."""

    layer: Callable[[Values, int], LayerKind]
    layers: str = "model.layers"
    """Where it keeps them in its module tree."""
    outside: tuple[str, ...] = ("model.embed_tokens", "lm_head")
    """Embeddings and head, which LoRA may name as well."""
    norm_bias: bool = False
    """The final norm has a bias."""
    positions: bool = False
    """Positions are learned."""
    per_layer: bool = False
    """Each token has a row of its own for every layer (``hidden_size_per_layer_input``), and a projection makes another."""


@dataclass(frozen=True)
class _Dense:
    """A layer of attention and one feed-forward block; biases are constants or keys of the configuration."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: str = ""
    fused_qkv: bool = False
    mlp: tuple[str, ...] = GATED
    norms: int = 2
    norm_bias: bool = False

    def __call__(self, values: Values, layer: int) -> LayerKind:
        first = attention(
            values,
            layer,
            qkv_bias=values.flag(self.qkv_bias),
            out_bias=values.flag(self.out_bias),
            qk_norm=self.qk_norm,
            fused=self.fused_qkv,
        )
        block = gated if "gate" in self.mlp[0] else plain
        second = block("mlp", values.hidden, values.integer("intermediate_size"), self.mlp, bias=values.flag(self.mlp_bias))
        return _together(first, second, norms=self.norms * values.hidden * (2 if self.norm_bias else 1))


def _one_matrix(
    values: Values, names: tuple[str, str, str, str], inner: int, norms: int, *, bias: bool, mlp_bias: bool, groups: int = 0
) -> LayerKind:
    """A layer with query, key and value in one matrix. ``names``: it, the output, and the up and down projection.

    ``norms``: vectors of the hidden size. ``groups``: key-value heads where there are fewer than heads.
    """
    hidden, heads = values.hidden, values.heads
    head, groups = hidden // heads, groups or heads
    linears = (Linear(names[0], hidden, (heads + 2 * groups) * head, bias), Linear(names[1], hidden, hidden, bias))
    first = LayerPart(linears, attention=Attention(heads, groups, head, head))
    return _together(first, plain("mlp", hidden, inner, names[2:], bias=mlp_bias), norms=norms * hidden)


def _gpt_neox_layer(values: Values, _: int) -> LayerKind:
    names = ("attention.query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h")
    bias = values.flag("attention_bias")
    return _one_matrix(values, names, values.integer("intermediate_size"), 4, bias=bias, mlp_bias=True)


def _gpt2_layer(values: Values, _: int) -> LayerKind:
    names = ("attn.c_attn", "attn.c_proj", "c_fc", "c_proj")
    return _one_matrix(values, names, int(values.get("n_inner") or 4 * values.hidden), 4, bias=True, mlp_bias=True)


def _falcon_layer(values: Values, _: int) -> LayerKind:
    names = ("self_attention.query_key_value", "self_attention.dense", "dense_h_to_4h", "dense_4h_to_h")
    bias, new = values.flag("bias"), values.flag("new_decoder_architecture")
    groups = int(values.get("num_kv_heads") or 0) if new else int(values.flag("multi_query"))
    width = int(values.get("ffn_hidden_size") or 4 * values.hidden)
    two = not values.flag("parallel_attn") or (values.get("num_ln_in_parallel_attn") or (2 if new else 1)) == 2
    kind = _one_matrix(values, names, width, 4 if two else 2, bias=bias, mlp_bias=bias, groups=groups)
    return replace(kind, linears=tuple(replace(linear, derived=True) for linear in kind.linears))


_PLAIN = _Dense()
_BIASED = _Dense("attention_bias", "attention_bias")
_BIASED_ALL = _Dense("attention_bias", "attention_bias", "mlp_bias")
_GPT2 = ("transformer.wte", "transformer.wpe", "lm_head")

FAMILIES: dict[str, Family] = {
    "cohere": Family(_Dense("attention_bias", "attention_bias", qk_norm="optional", norms=1)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe"), Family(deepseek_layer)),
    "ernie4_5": Family(_Dense("use_bias", "use_bias", "use_bias")),
    "falcon": Family(_falcon_layer, "transformer.h", ("transformer.word_embeddings", "lm_head"), norm_bias=True),
    "gemma": Family(_BIASED),
    "gemma2": Family(_Dense("attention_bias", "attention_bias", norms=4)),
    "gemma3_text": Family(_Dense("attention_bias", "attention_bias", qk_norm="head", norms=4)),
    "gemma4_text": Family(
        gemma4_layer,
        outside=("model.embed_tokens", "model.embed_tokens_per_layer", "model.per_layer_model_projection", "lm_head"),
        per_layer=True,
    ),
    "glm": Family(_Dense("attention_bias", mlp=("gate_up_proj", "down_proj"))),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa"), Family(glm_latent_layer)),
    "glm4": Family(_Dense("attention_bias", mlp=("gate_up_proj", "down_proj"), norms=4)),
    "gpt2": Family(_gpt2_layer, "transformer.h", _GPT2, norm_bias=True, positions=True),
    "gpt_neox": Family(_gpt_neox_layer, "gpt_neox.layers", ("gpt_neox.embed_in", "lm_head"), norm_bias=True),
    "gpt_oss": Family(gpt_oss_layer),
    **dict.fromkeys(("granite", "llama", "smollm3"), Family(_BIASED_ALL)),
    "llama4_text": Family(llama4_layer),
    "mistral": Family(_PLAIN),
    "nemotron": Family(
        _Dense("attention_bias", "attention_bias", "mlp_bias", mlp=("up_proj", "down_proj"), norm_bias=True), norm_bias=True
    ),
    **dict.fromkeys(("olmo2", "olmo3"), Family(_Dense("attention_bias", "attention_bias", qk_norm="all"))),
    "phi3": Family(_Dense(fused_qkv=True, mlp=("gate_up_proj", "down_proj"))),
    "qwen2": Family(_Dense(True)),
    "qwen3": Family(_Dense("attention_bias", "attention_bias", qk_norm="head")),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), Family(qwen3_next_layer)),
    "seed_oss": Family(_Dense("attention_bias", "attention_out_bias", "mlp_bias")),
    "starcoder2": Family(_Dense("use_bias", "use_bias", "use_bias", mlp=("c_fc", "c_proj"), norm_bias=True), norm_bias=True),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), Family(mixture_layer)),
}
"""Every family that is counted, by ``model_type``."""

# --- counting, and what LoRA adapts -------------------------------------------------------------------------------------

KNOWN: tuple[str, ...] = tuple(sorted(FAMILIES))
"""Model types that are counted; tests/recipe/test_parameters.py compares each with the installed transformers."""

_UNCOUNTED = (
    "modules_to_save", "rank_pattern", "layers_to_transform", "exclude_modules", "trainable_token_indices",
    "layer_replication", "use_dora", "lora_bias",
)  # fmt: skip
"""Settings of PEFT's LoraConfig under which r (inputs + outputs) for each target module is not all that is trained."""

_QWEN = {"gate": "gate", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_CONVERTED: dict[str, dict[str, str]] = {
    "mixtral": {"gate": "gate", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    **dict.fromkeys(
        ("qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _QWEN
    ),
}
"""Model types for which PEFT puts targets of the names that experts and routers had before transformers 5 onto the bare
parameters that they are now: ``_MOE_TARGET_MODULE_MAPPING`` of peft/utils/transformers_weight_conversion.py."""


def is_counted(architecture: Mapping[str, Any]) -> bool:
    """Whether the parameters of an architecture are counted."""
    crossed = architecture.get("model_type") == "gpt2" and architecture.get("add_cross_attention")
    return architecture.get("model_type") in FAMILIES and not crossed


def uncounted(architecture: Mapping[str, Any]) -> str:
    """What to tell where :func:`count` gives None."""
    return f"parameters of {architecture.get('model_type')} cannot be counted here; known: {', '.join(KNOWN)}"


def layers_of(architecture: Mapping[str, Any]) -> list[LayerKind]:
    """The layers in their order, each with count 1; only for a counted architecture."""
    return list(_layers(json.dumps(architecture)))


@lru_cache(maxsize=64)
def _layers(text: str) -> tuple[LayerKind, ...]:
    values = Values(json.loads(text))
    layer = FAMILIES[values.kind].layer
    return tuple(layer(values, index) for index in range(values.layers))


def count(architecture: Mapping[str, Any]) -> ParameterCount | None:
    """Everything that a model is made of; None where the family is not known. Values are those of a checked model.json."""
    return _count(json.dumps(architecture)) if is_counted(architecture) else None


@lru_cache(maxsize=64)
def _count(text: str) -> ParameterCount:
    """Counted once for an architecture's JSON: a search over layouts asks again and again."""
    architecture = json.loads(text)
    values = Values(architecture)
    family = FAMILIES[values.kind]
    kinds = Counter(layers_of(architecture))
    hidden, vocabulary, tied = values.hidden, values.integer("vocab_size"), values.flag("tie_word_embeddings")
    positions = values.integer("max_position_embeddings") if family.positions else 0
    own = int(values.get("hidden_size_per_layer_input") or 0) if family.per_layer else 0
    rows = values.integer("vocab_size_per_layer_input") * values.layers * own if own else 0
    projection = (hidden * values.layers + 1) * own
    return ParameterCount(
        layers=tuple(replace(kind, count=number) for kind, number in kinds.items()),
        hidden=hidden,
        vocabulary=vocabulary,
        embedding=(vocabulary + positions) * hidden + rows,
        head=0 if tied else vocabulary * hidden,
        other=(2 * hidden if family.norm_bias else hidden) + projection,
        tied=tied,
    )


def parameter_count(architecture: Mapping[str, Any]) -> int | None:
    """All parameters, exact for :data:`KNOWN` model types, else None."""
    counted = count(architecture)
    return None if counted is None else counted.total


def lora_parameter_count(architecture: Mapping[str, Any], lora: Mapping[str, Any]) -> int | None:
    """The parameters that LoRA trains, as the installed PEFT makes them; None where that is not known, or PEFT refuses.

    ``target_modules`` by PEFT's rule: a list names ends of module names, a text is a pattern for the whole name. Each target
    matrix gets r (inputs + outputs), of ``target_parameters`` each expert's; for the fused experts see :func:`_converted`.
    """
    target = lora["target_modules"] or []
    if not is_counted(architecture) or any(lora[key] for key in _UNCOUNTED) or lora["bias"] != "none":
        return None
    if chosen := lora["target_parameters"]:
        rest = lora_parameter_count(architecture, {**lora, "target_parameters": None}) if target else 0
        adapted = adapted_experts(architecture, {"target_modules": None, "target_parameters": chosen})
        each = [linear.copies * (linear.inputs + linear.outputs) for _, linear in adapted]
        return None if rest is None or not (each or target) else rest + int(lora["r"]) * sum(each)
    if not target:
        return None
    kind, rank = str(architecture["model_type"]), int(lora["r"])
    named = list(_named(architecture))
    if isinstance(target, str) and target.lower() == "all-linear":
        target = "all-linear"
        named += _projection(architecture)
    elif any(matches(target, name) for name in _others(FAMILIES[kind].outside, named)):
        return None  # embeddings, the head, or a module that holds the linears: another count, or refused by PEFT
    if kind in _CONVERTED:
        return _converted(named, target, rank, lora, _CONVERTED[kind])
    return sum(rank * (linear.inputs + linear.outputs) for name, linear in named if _chosen(target, name, linear)) or None


def _projection(architecture: Mapping[str, Any]) -> Iterator[tuple[str, Linear]]:
    """The linear module outside of the layers with which Gemma 4 makes its rows for each layer."""
    values = Values(architecture)
    if FAMILIES[values.kind].per_layer and (own := int(values.get("hidden_size_per_layer_input") or 0)):
        name = "model.per_layer_model_projection"
        yield name, Linear(name, values.hidden, values.layers * own)


def weight_bytes(architecture: Mapping[str, Any]) -> float | None:
    """Bytes of the model's weights in bfloat16; None where the architecture cannot be counted."""
    parameters = parameter_count(architecture)
    return None if parameters is None else 2.0 * parameters


def trained_count(architecture: Mapping[str, Any], lora: Mapping[str, Any] | None) -> int | None:
    """Parameters that are trained: the adapter's, or all without ``lora``; None where they cannot be counted."""
    return parameter_count(architecture) if lora is None else lora_parameter_count(architecture, lora)


def adapter_modules(architecture: Mapping[str, Any]) -> list[str]:
    """The full names of all modules that LoRA can replace; empty where the source of the model does not show them."""
    kind = str(architecture["model_type"])
    if is_counted(architecture):
        return [*FAMILIES[kind].outside, *(name for name, linear in _named(architecture) if not linear.bare)]
    names = model_facts(kind)["modules"].get(str(architecture["architectures"][0]), {})
    layers = range(int(architecture["num_hidden_layers"]))
    return list(dict.fromkeys(name.replace(".0.", f".{layer}.", 1) for layer in layers for name in names))


def expert_parameters(architecture: Mapping[str, Any]) -> list[tuple[str, Linear]]:
    """The parameters of fused experts by their full names; empty where the model has none, or is not counted."""
    if not is_counted(architecture):
        return []
    return [(name, linear) for name, linear in _named(architecture) if linear.bare and linear.copies > 1]


def adapted_experts(architecture: Mapping[str, Any], lora: Mapping[str, Any]) -> list[tuple[str, Linear]]:
    """Those of them that LoRA adapts: by ``target_parameters``, or by the names that they had before transformers 5."""
    renamed = _CONVERTED.get(str(architecture["model_type"]), {})
    target, chosen = lora["target_modules"] or [], list(lora["target_parameters"] or [])
    if isinstance(target, str):
        ends = set(renamed) if target.lower() == "all-linear" else set()
    else:
        ends = {str(name).split(".")[-1] for name in target}
    chosen += [new for old, new in renamed.items() if old in ends]
    return [(name, linear) for name, linear in expert_parameters(architecture) if matches(chosen, name)]


def head_names(architecture: Mapping[str, Any]) -> list[str]:
    """The output projection's name: what a causal model has beside its decoder."""
    return [name for name in adapter_modules(architecture) if "." not in name] or ["lm_head"]


def narrowest(architecture: Mapping[str, Any]) -> int | None:
    """The tokens that a token sees in the layer that sees the fewest; None: all before it, in every layer.

    Defaults of the installed transformers count. Of a family whose layers are not known here, a window is every layer's.
    """
    values = Values(architecture)
    if values.kind in FAMILIES or values.get("layer_types"):
        seen = [window(values, layer) for layer in range(values.layers)]
    else:
        seen = [values.get("sliding_window") if values.is_windowed else None, values.get("attention_chunk_size")]
    return min((int(size) for size in seen if size), default=None)


def _named(architecture: Mapping[str, Any]) -> Iterator[tuple[str, Linear]]:
    """Every linear of a counted model with its full name."""
    where = FAMILIES[str(architecture["model_type"])].layers
    for index, layer in enumerate(layers_of(architecture)):
        for linear in layer.linears:
            yield f"{where}.{index}.{linear.name}", linear


def _others(outside: tuple[str, ...], named: list[tuple[str, Linear]]) -> set[str]:
    """Names of modules that are not linears of layers: embeddings, head, and everything that holds a linear."""
    names = set(outside)
    for name, _ in named:
        holder = name.rpartition(".")[0]
        while holder and holder not in names:
            names.add(holder)
            holder = holder.rpartition(".")[0]
    return names


def _chosen(target: str | list[str], name: str, linear: Linear) -> bool:
    return not linear.bare and (target == "all-linear" or matches(target, name))


def _converted(
    named: list[tuple[str, Linear]], target: str | list[str], rank: int, lora: Mapping[str, Any], renamed: Mapping[str, str]
) -> int | None:
    """LoRA on a mixture whose targets PEFT rewrites for transformers 5 (``_convert_peft_config_moe``).

    All targets become ends of names; those of experts and routers go onto their bare parameters, and onto nothing else: dense
    layers and shared experts with the same names stay frozen. Each expert gets its own r, the fused gate and up projection 2 r.
    """
    if isinstance(target, str):
        ends = {name.split(".")[-1] for name, linear in named if _chosen(target, name, linear)}
        if target == "all-linear":
            ends |= set(renamed)
        elif any(matches(target, old) for name, linear in named if linear.bare for old in _old_names(name, renamed)):
            return None
    else:
        ends = set(target)
    moved = {end: end.split(".")[-1] for end in ends if end.split(".")[-1] in renamed}
    onto = [renamed[old] for old in set(moved.values())]
    if onto.count("gate_up_proj") == 1 or (onto and lora["lora_dropout"]):
        return None  # PEFT refuses half of a fused matrix, and dropout before a bare parameter
    plain = sorted(ends - set(moved))
    trained = 0
    for name, linear in named:
        width = linear.inputs + linear.outputs
        if not linear.bare:
            trained += rank * width if matches(plain, name) else 0
        elif (last := name.split(".")[-1]) in onto:
            trained += (2 if last == "gate_up_proj" else 1) * rank * linear.copies * width
    return trained or None


def _old_names(name: str, renamed: Mapping[str, str]) -> list[str]:
    """The names that a bare parameter answers to: its own, its weight, and those from before transformers 5."""
    parent, _, last = name.rpartition(".")
    return [name, f"{name}.weight", *(f"{parent}.{old}" for old, new in renamed.items() if new == last)]


def matches(target: str | list[str], name: str) -> bool:
    """PEFT's rule: a list matches the end of a module's name, a text is a regular expression for the whole name."""
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in target)
