"""The layers of each family of decoders, as the installed transformers builds them (models/TYPE/modeling_TYPE.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clustertune.config.counted import Attention, LayerKind, Linear
from clustertune.config.values import Values, window

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

    def shape(self) -> Attention:
        """The attention of a part that has one."""
        assert self.attention is not None
        return self.attention


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
    up, down = names
    return LayerPart(
        (Linear(f"{prefix}.{up}", hidden, inner, bias), Linear(f"{prefix}.{down}", inner, hidden, bias)), inner=inner
    )


# --- mixtures of experts, latent attention (DeepSeek), a recurrent state (Qwen3-Next) ----------------------------------


MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
_CHUNK = 64
"""Tokens that the gated delta rule takes at once: ``chunk_size`` of torch_chunk_gated_delta_rule, modeling_qwen3_next.py."""


def experts(
    prefix: str, values: Values, number: int, inner: int, *, router: str = "gate", bias: bool = False, bare_router: bool = True
) -> LayerPart:
    """The router and the experts, whose gate and up projections transformers 5 keeps in one 3-dimensional parameter."""
    hidden, chosen = values.hidden, values.whole("num_experts_per_tok")
    linears = (
        Linear(f"{prefix}.{router}", hidden, number, bias, bare=bare_router),
        Linear(f"{prefix}.experts.gate_up_proj", hidden, 2 * inner, bias, number, chosen, bare=True),
        Linear(f"{prefix}.experts.down_proj", inner, hidden, bias, number, chosen, bare=True),
    )
    return LayerPart(linears, inner=chosen * inner)


def _together(first: LayerPart, *rest: LayerPart, norms: int) -> LayerKind:
    """One layer of its parts; the first has the attention."""
    parts = (first, *rest)
    linears = tuple(linear for part in parts for linear in part.linears)
    other, inner = sum(part.other for part in parts) + norms, sum(part.inner for part in parts)
    return LayerKind(1, linears, other, first.shape(), inner)


def _is_sparse(values: Values, layer: int) -> bool:
    """The rule of Qwen's mixtures for the layers that have experts."""
    dense = values.get("mlp_only_layers") or []
    step = int(values.get("decoder_sparse_step") or 1)
    return layer not in dense and int(values.get("num_experts") or 0) > 0 and (layer + 1) % step == 0


def _qwen_block(values: Values, layer: int) -> tuple[LayerPart, ...]:
    """The feed-forward part of Qwen's layers: dense, or experts with (Qwen2-MoE, Qwen3-Next) or without a shared one."""
    hidden = values.hidden
    if not _is_sparse(values, layer):
        return (gated("mlp", hidden, values.whole("intermediate_size")),)
    routed = experts("mlp", values, values.whole("num_experts"), values.whole("moe_intermediate_size"))
    if values.kind == "qwen3_moe":
        return (routed,)
    shared = gated("mlp.shared_expert", hidden, values.whole("shared_expert_intermediate_size"))
    return routed, shared, LayerPart((Linear("mlp.shared_expert_gate", hidden, 1),))


def mixture_layer(values: Values, layer: int) -> LayerKind:
    """Mixtral, Qwen2-MoE, Qwen3-MoE."""
    norms = 2 * values.hidden
    if values.kind == "mixtral":
        block = experts("mlp", values, values.whole("num_local_experts"), values.whole("intermediate_size"))
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
        "mlp", values, values.whole("num_local_experts"), values.whole("intermediate_size"), router="router", bias=True
    )
    first = attention(values, layer, qkv_bias=bias, out_bias=bias)
    return _together(first, block, norms=2 * values.hidden + values.heads)


def llama4_layer(values: Values, layer: int) -> LayerKind:
    """Every ``interleave_moe_layer_step``-th layer has experts and a shared one; the others a wider dense block."""
    hidden, bias = values.hidden, values.flag("attention_bias")
    first = attention(values, layer, qkv_bias=bias, out_bias=bias)
    chosen = values.get("moe_layers")
    sparse = layer in chosen if chosen is not None else (layer + 1) % values.whole("interleave_moe_layer_step") == 0
    if not sparse:
        return _together(first, gated("feed_forward", hidden, values.whole("intermediate_size_mlp")), norms=2 * hidden)
    inner = values.whole("intermediate_size")
    routed = experts("feed_forward", values, values.whole("num_local_experts"), inner, router="router", bare_router=False)
    return _together(first, routed, gated("feed_forward.shared_expert", hidden, inner), norms=2 * hidden)


def _latent_attention(values: Values) -> LayerPart:
    """Multi-head latent attention: queries (where ``q_lora_rank``) and keys with values go through narrow matrices."""
    hidden, heads, bias = values.hidden, values.heads, values.flag("attention_bias")
    rope, narrow = values.whole("qk_rope_head_dim"), values.whole("kv_lora_rank")
    nope, wide = values.whole("qk_nope_head_dim"), values.whole("v_head_dim")
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
        return _together(first, gated("mlp", hidden, values.whole("intermediate_size"), bias=bias), norms=2 * hidden)
    inner = values.whole("moe_intermediate_size")
    routed = experts("mlp", values, values.whole("n_routed_experts"), inner)
    shared = gated("mlp.shared_experts", hidden, inner * values.whole("n_shared_experts"), bias=bias)
    corrections = 0 if values.kind == "deepseek_v2" else values.whole("n_routed_experts")
    return _together(first, routed, shared, norms=2 * hidden + corrections)


def qwen3_next_layer(values: Values, layer: int) -> LayerKind:
    """Every fourth layer has gated attention, the others the gated delta rule."""
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
    heads, groups = values.whole("linear_num_value_heads"), values.whole("linear_num_key_heads")
    key, value = values.whole("linear_key_head_dim"), values.whole("linear_value_head_dim")
    keys, width = groups * key, heads * value
    linears = (
        Linear("linear_attn.in_proj_qkvz", values.hidden, 2 * keys + 2 * width),
        Linear("linear_attn.in_proj_ba", values.hidden, 2 * heads),
        Linear("linear_attn.out_proj", width, values.hidden),
    )
    convolution = (2 * keys + width) * values.whole("linear_conv_kernel_dim")
    other = convolution + 2 * heads + value
    return LayerPart(linears, other, attention=Attention(heads, groups, key, value, _CHUNK + 2 * key * value // (key + value)))


# --- families ----------------------------------------------------------------------------------------------------------


Layer = Callable[[Values, int], LayerKind]


@dataclass(frozen=True)
class Names:
    """Where a family keeps things in its module tree."""

    layers: str = "model.layers"
    outside: tuple[str, ...] = ("model.embed_tokens", "lm_head")
    """Embeddings and head, which LoRA may name as well."""


@dataclass(frozen=True)
class Family:
    """How one family's parameters are counted."""

    layer: Layer
    names: Names = Names()
    norm_bias: bool = False
    """The final norm has a bias."""
    positions: bool = False
    """Positions are learned."""


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
        second = block("mlp", values.hidden, values.whole("intermediate_size"), self.mlp, bias=values.flag(self.mlp_bias))
        norms = self.norms * values.hidden * (2 if self.norm_bias else 1)
        return LayerKind(1, first.linears + second.linears, first.other + norms, first.shape(), second.inner)


def _gpt_neox_layer(values: Values, _: int) -> LayerKind:
    hidden, bias = values.hidden, values.flag("attention_bias")
    block = plain("mlp", hidden, values.whole("intermediate_size"), ("dense_h_to_4h", "dense_4h_to_h"), bias=True)
    linears = (
        Linear("attention.query_key_value", hidden, 3 * hidden, bias),
        Linear("attention.dense", hidden, hidden, bias),
    )
    head = hidden // values.heads
    return LayerKind(1, linears + block.linears, 4 * hidden, Attention(values.heads, values.heads, head, head), block.inner)


def _gpt2_layer(values: Values, _: int) -> LayerKind:
    hidden = values.hidden
    block = plain("mlp", hidden, int(values.get("n_inner") or 4 * hidden), ("c_fc", "c_proj"), bias=True)
    linears = (Linear("attn.c_attn", hidden, 3 * hidden, True), Linear("attn.c_proj", hidden, hidden, True))
    head = hidden // values.heads
    return LayerKind(1, linears + block.linears, 4 * hidden, Attention(values.heads, values.heads, head, head), block.inner)


def _falcon_layer(values: Values, _: int) -> LayerKind:
    hidden, heads, bias = values.hidden, values.heads, values.flag("bias")
    head, new = hidden // heads, values.flag("new_decoder_architecture")
    groups = int(values.get("num_kv_heads") or heads) if new else 1 if values.flag("multi_query") else heads
    width = int(values.get("ffn_hidden_size") or 4 * hidden)
    block = plain("mlp", hidden, width, ("dense_h_to_4h", "dense_4h_to_h"), bias=bias)
    linears = (
        Linear("self_attention.query_key_value", hidden, (heads + 2 * groups) * head, bias),
        Linear("self_attention.dense", hidden, hidden, bias),
    )
    given = values.get("num_ln_in_parallel_attn")
    two = not values.flag("parallel_attn") or (given or (2 if new else 1)) == 2
    norms = 2 * hidden * (2 if two else 1)
    return LayerKind(1, linears + block.linears, norms, Attention(heads, groups, head, head), block.inner)


_PLAIN = _Dense()
_BIASED = _Dense("attention_bias", "attention_bias")
_BIASED_ALL = _Dense("attention_bias", "attention_bias", "mlp_bias")
_NEOX = Names("gpt_neox.layers", ("gpt_neox.embed_in", "lm_head"))
_GPT2 = Names("transformer.h", ("transformer.wte", "transformer.wpe", "lm_head"))
_FALCON = Names("transformer.h", ("transformer.word_embeddings", "lm_head"))

FAMILIES: dict[str, Family] = {
    "cohere": Family(_Dense("attention_bias", "attention_bias", qk_norm="optional", norms=1)),
    "deepseek_v2": Family(deepseek_layer),
    "deepseek_v3": Family(deepseek_layer),
    "ernie4_5": Family(_Dense("use_bias", "use_bias", "use_bias")),
    "falcon": Family(_falcon_layer, _FALCON, norm_bias=True),
    "gemma": Family(_BIASED),
    "gemma2": Family(_Dense("attention_bias", "attention_bias", norms=4)),
    "gemma3_text": Family(_Dense("attention_bias", "attention_bias", qk_norm="head", norms=4)),
    "glm4": Family(_Dense("attention_bias", mlp=("gate_up_proj", "down_proj"), norms=4)),
    "glm4_moe": Family(deepseek_layer),
    "gpt2": Family(_gpt2_layer, _GPT2, norm_bias=True, positions=True),
    "gpt_neox": Family(_gpt_neox_layer, _NEOX, norm_bias=True),
    "gpt_oss": Family(gpt_oss_layer),
    "granite": Family(_BIASED_ALL),
    "llama": Family(_BIASED_ALL),
    "llama4_text": Family(llama4_layer),
    "mistral": Family(_PLAIN),
    "nemotron": Family(
        _Dense("attention_bias", "attention_bias", "mlp_bias", mlp=("up_proj", "down_proj"), norm_bias=True), norm_bias=True
    ),
    "olmo2": Family(_Dense("attention_bias", "attention_bias", qk_norm="all")),
    "phi3": Family(_Dense(fused_qkv=True, mlp=("gate_up_proj", "down_proj"))),
    "qwen2": Family(_Dense(True)),
    "qwen3": Family(_Dense("attention_bias", "attention_bias", qk_norm="head")),
    "qwen3_next": Family(qwen3_next_layer),
    "smollm3": Family(_BIASED_ALL),
    "starcoder2": Family(_Dense("use_bias", "use_bias", "use_bias", mlp=("c_fc", "c_proj"), norm_bias=True), norm_bias=True),
    **{kind: Family(mixture_layer) for kind in MIXTURES},
}
"""Every family that is counted, by ``model_type``."""
