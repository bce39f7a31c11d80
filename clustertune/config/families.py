"""The layers of each family of decoders, as the installed transformers builds them (models/TYPE/modeling_TYPE.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clustertune.config.counted import Attention, LayerKind, Linear
from clustertune.config.mixtures import MIXTURES, deepseek_layer, gpt_oss_layer, llama4_layer, mixture_layer, qwen3_next_layer
from clustertune.config.parts import GATED, attention, gated, plain
from clustertune.config.values import Values

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
