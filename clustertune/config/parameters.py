"""Parameter counts from an architecture alone, for dense decoders of the Llama kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clustertune.config.modeling import module_names

DENSE = ("llama", "mistral", "qwen2")
"""Model types whose linear layers are exactly q, k, v, o, gate, up and down, and whose norms are two a layer and one more."""


def linear_shapes(architecture: Mapping[str, Any]) -> dict[str, tuple[int, int]] | None:
    """(inputs, outputs) of each linear module of a layer; None for other model types than :data:`DENSE`."""
    if architecture.get("model_type") not in DENSE or not architecture.get("intermediate_size"):
        return None
    hidden, inner = int(architecture["hidden_size"]), int(architecture["intermediate_size"])
    heads = int(architecture["num_attention_heads"])
    groups = int(architecture.get("num_key_value_heads") or heads)
    head = int(architecture.get("head_dim") or hidden // heads)
    return {
        "self_attn.q_proj": (hidden, heads * head),
        "self_attn.k_proj": (hidden, groups * head),
        "self_attn.v_proj": (hidden, groups * head),
        "self_attn.o_proj": (heads * head, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def parameter_count(architecture: Mapping[str, Any]) -> int | None:
    """All parameters, exact for :data:`DENSE` models, else None."""
    shapes = linear_shapes(architecture)
    if shapes is None:
        return None
    hidden, layers = int(architecture["hidden_size"]), int(architecture["num_hidden_layers"])
    per_layer = sum(inputs * outputs for inputs, outputs in shapes.values()) + 2 * hidden
    per_layer += sum(shapes[name][1] for name in _biased(architecture))
    embeddings = int(architecture["vocab_size"]) * hidden * (1 if _tied(architecture) else 2)
    return layers * per_layer + embeddings + hidden


def _tied(architecture: Mapping[str, Any]) -> bool:
    return bool(architecture.get("tie_word_embeddings", False))


def _biased(architecture: Mapping[str, Any]) -> list[str]:
    names = []
    if architecture["model_type"] == "qwen2":
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    if architecture["model_type"] == "llama" and architecture.get("attention_bias"):
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    if architecture["model_type"] == "llama" and architecture.get("mlp_bias"):
        names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    return names


def lora_parameter_count(architecture: Mapping[str, Any], lora: Mapping[str, Any]) -> int | None:
    """The parameters that LoRA trains: r (inputs + outputs) for each target module; None where that is not all there is.

    ``target_modules`` by PEFT's rule: a list names ends of module names, a text is a pattern for the whole name.
    """
    shapes = linear_shapes(architecture)
    plain = not any(lora.get(key) for key in ("modules_to_save", "rank_pattern", "layers_to_transform", "exclude_modules"))
    if shapes is None or not plain or not lora.get("target_modules"):
        return None
    target = lora["target_modules"]
    modules = module_names(str(architecture["model_type"]), str(architecture["architectures"][0]))
    outside = [name for name in modules if ".layers." not in name]
    if target != "all-linear" and any(_matches(target, name) for name in outside):
        return None
    rank, layers = int(lora.get("r", 8)), range(int(architecture["num_hidden_layers"]))
    return sum(
        rank * (inputs + outputs)
        for layer in layers
        for name, (inputs, outputs) in shapes.items()
        if target == "all-linear" or _matches(target, f"model.layers.{layer}.{name}")
    )


def _matches(target: str | list[str], name: str) -> bool:
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in target)
