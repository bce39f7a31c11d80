"""Layers with mixtures of experts, with latent attention (DeepSeek) and with a recurrent state (Qwen3-Next)."""

from __future__ import annotations

from clustertune.config.counted import Attention, LayerKind, Linear
from clustertune.config.parts import Part, attention, gated
from clustertune.config.values import Values

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
_CHUNK = 64
"""Tokens that the gated delta rule takes at once: ``chunk_size`` of torch_chunk_gated_delta_rule, modeling_qwen3_next.py."""


def experts(
    prefix: str, values: Values, number: int, inner: int, *, router: str = "gate", bias: bool = False, bare_router: bool = True
) -> Part:
    """The router and the experts, whose gate and up projections transformers 5 keeps in one 3-dimensional parameter."""
    hidden, chosen = values.hidden, values.whole("num_experts_per_tok")
    linears = (
        Linear(f"{prefix}.{router}", hidden, number, bias, bare=bare_router),
        Linear(f"{prefix}.experts.gate_up_proj", hidden, 2 * inner, bias, number, chosen, bare=True),
        Linear(f"{prefix}.experts.down_proj", inner, hidden, bias, number, chosen, bare=True),
    )
    return Part(linears, inner=chosen * inner)


def _together(first: Part, *rest: Part, norms: int) -> LayerKind:
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


def _qwen_block(values: Values, layer: int) -> tuple[Part, ...]:
    """The feed-forward part of Qwen's layers: dense, or experts with (Qwen2-MoE, Qwen3-Next) or without a shared one."""
    hidden = values.hidden
    if not _is_sparse(values, layer):
        return (gated("mlp", hidden, values.whole("intermediate_size")),)
    routed = experts("mlp", values, values.whole("num_experts"), values.whole("moe_intermediate_size"))
    if values.kind == "qwen3_moe":
        return (routed,)
    shared = gated("mlp.shared_expert", hidden, values.whole("shared_expert_intermediate_size"))
    return routed, shared, Part((Linear("mlp.shared_expert_gate", hidden, 1),))


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


def _latent_attention(values: Values) -> Part:
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
    return Part(linears, int(rank or 0) + narrow, attention=Attention(heads, heads, nope + rope, wide))


def deepseek_layer(values: Values, layer: int) -> LayerKind:
    """DeepSeek-V2 and V3: dense for the first ``first_k_dense_replace`` layers; without the layer that predicts more tokens.

    V3's router has one correction per expert (``e_score_correction_bias``), which the published 671,026,419,200 hold, although
    transformers keeps it as a buffer.
    """
    hidden = values.hidden
    bias = values.kind == "deepseek_v2" and values.flag("mlp_bias")
    first = _latent_attention(values)
    if layer < int(values.get("first_k_dense_replace") or 0):
        return _together(first, gated("mlp", hidden, values.whole("intermediate_size"), bias=bias), norms=2 * hidden)
    inner = values.whole("moe_intermediate_size")
    routed = experts("mlp", values, values.whole("n_routed_experts"), inner)
    shared = gated("mlp.shared_experts", hidden, inner * values.whole("n_shared_experts"), bias=bias)
    corrections = values.whole("n_routed_experts") if values.kind == "deepseek_v3" else 0
    return _together(first, routed, shared, norms=2 * hidden + corrections)


def qwen3_next_layer(values: Values, layer: int) -> LayerKind:
    """Every fourth layer has gated attention, the others the gated delta rule."""
    if values.attention_types[layer] == "linear_attention":
        first = _delta_rule(values)
    else:
        bias = values.flag("attention_bias")
        first = attention(values, layer, qkv_bias=bias, out_bias=bias, qk_norm="head", query_factor=2)
    return _together(first, *_qwen_block(values, layer), norms=2 * values.hidden)


def _delta_rule(values: Values) -> Part:
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
    return Part(linears, other, attention=Attention(heads, groups, key, value, _CHUNK + 2 * key * value // (key + value)))
