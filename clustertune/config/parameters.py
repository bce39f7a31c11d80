"""Parameter counts from an architecture alone, exact for the families that config/families.py knows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from clustertune.config.counted import LayerKind, Linear, ParameterCount
from clustertune.config.families import FAMILIES, Names
from clustertune.config.values import Values, module_names, window

KNOWN: tuple[str, ...] = tuple(sorted(FAMILIES))
"""Model types that are counted; tests/config/test_parameters.py compares each with the installed transformers."""

_UNCOUNTED = (
    "modules_to_save",
    "rank_pattern",
    "layers_to_transform",
    "exclude_modules",
    "trainable_token_indices",
    "layer_replication",
    "use_dora",
    "lora_bias",
)
"""Settings of PEFT's LoraConfig under which r (inputs + outputs) for each target module is not all that is trained."""

_QWEN = {"gate": "gate", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_CONVERTED: dict[str, dict[str, str]] = {
    "mixtral": {"gate": "gate", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "deepseek_v2": _QWEN,
    "deepseek_v3": _QWEN,
    "glm4_moe": _QWEN,
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
    hidden, vocabulary, tied = values.hidden, values.whole("vocab_size"), values.flag("tie_word_embeddings")
    positions = values.whole("max_position_embeddings") if family.positions else 0
    return ParameterCount(
        layers=tuple(replace(kind, count=number) for kind, number in kinds.items()),
        hidden=hidden,
        vocabulary=vocabulary,
        embedding=(vocabulary + positions) * hidden,
        head=0 if tied else vocabulary * hidden,
        other=2 * hidden if family.norm_bias else hidden,
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
    target = lora.get("target_modules") or []
    if not is_counted(architecture) or any(lora.get(key) for key in _UNCOUNTED) or lora.get("bias", "none") != "none":
        return None
    if chosen := lora.get("target_parameters"):
        rest = lora_parameter_count(architecture, {**lora, "target_parameters": None}) if target else 0
        found = adapted_experts(architecture, {"target_parameters": chosen})
        each = [linear.copies * (linear.inputs + linear.outputs) for _, linear in found]
        return None if rest is None or not (each or target) else rest + int(lora.get("r", 8)) * sum(each)
    if not target:
        return None
    kind, rank = str(architecture["model_type"]), int(lora.get("r", 8))
    layers, names = layers_of(architecture), FAMILIES[kind].names
    if isinstance(target, str) and target.lower() == "all-linear":
        target = "all-linear"
    elif any(matches(target, name) for name in _others(layers, names)):
        return None  # embeddings, the head, or a module that holds the linears: another count, or refused by PEFT
    if kind in _CONVERTED:
        return _converted(layers, names, target, rank, lora, _CONVERTED[kind])
    trained = sum(
        rank * (linear.inputs + linear.outputs) for name, linear in _named(layers, names) if _chosen(target, name, linear)
    )
    return trained or None


def weight_bytes(architecture: Mapping[str, Any]) -> float | None:
    """Bytes of the model's weights in bfloat16; None where the architecture cannot be counted."""
    found = parameter_count(architecture)
    return None if found is None else 2.0 * found


def trained_count(architecture: Mapping[str, Any], lora: Mapping[str, Any] | None) -> int | None:
    """Parameters that are trained: the adapter's, or all without ``lora``; None where they cannot be counted."""
    return parameter_count(architecture) if lora is None else lora_parameter_count(architecture, lora)


def adapter_modules(architecture: Mapping[str, Any]) -> list[str]:
    """The full names of all modules that LoRA can replace; empty where the source of the model does not show them."""
    kind = str(architecture["model_type"])
    if is_counted(architecture):
        names = FAMILIES[kind].names
        return [*names.outside, *(name for name, linear in _named(layers_of(architecture), names) if not linear.bare)]
    found, layers = module_names(kind, str(architecture["architectures"][0])), range(int(architecture["num_hidden_layers"]))
    return list(dict.fromkeys(name.replace(".0.", f".{layer}.", 1) for layer in layers for name in found))


def expert_parameters(architecture: Mapping[str, Any]) -> list[tuple[str, Linear]]:
    """The parameters of fused experts by their full names; empty where the model has none, or is not counted."""
    if not is_counted(architecture):
        return []
    named = _named(layers_of(architecture), FAMILIES[str(architecture["model_type"])].names)
    return [(name, linear) for name, linear in named if linear.bare and linear.copies > 1]


def adapted_experts(architecture: Mapping[str, Any], lora: Mapping[str, Any]) -> list[tuple[str, Linear]]:
    """Those of them that LoRA adapts: by ``target_parameters``, or by the names that they had before transformers 5."""
    renamed = _CONVERTED.get(str(architecture["model_type"]), {})
    target, chosen = lora.get("target_modules") or [], list(lora.get("target_parameters") or [])
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


def _named(layers: list[LayerKind], names: Names) -> Iterator[tuple[str, Linear]]:
    """Every linear of the model with its full name."""
    for index, layer in enumerate(layers):
        for linear in layer.linears:
            yield f"{names.layers}.{index}.{linear.name}", linear


def _others(layers: list[LayerKind], names: Names) -> set[str]:
    """Names of modules that are not linears of layers: embeddings, head, and everything that holds a linear."""
    found = set(names.outside)
    for name, _ in _named(layers, names):
        holder = name.rpartition(".")[0]
        while holder and holder not in found:
            found.add(holder)
            holder = holder.rpartition(".")[0]
    return found


def _chosen(target: str | list[str], name: str, linear: Linear) -> bool:
    return not linear.bare and (target == "all-linear" or matches(target, name))


def _converted(
    layers: list[LayerKind],
    names: Names,
    target: str | list[str],
    rank: int,
    lora: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> int | None:
    """LoRA on a mixture whose targets PEFT rewrites for transformers 5 (``_convert_peft_config_moe``).

    All targets become ends of names; those of experts and routers go onto their bare parameters, and onto nothing else: dense
    layers and shared experts with the same names stay frozen. Each expert gets its own r, the fused gate and up projection 2 r.
    """
    named = list(_named(layers, names))
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
    if onto.count("gate_up_proj") == 1 or (onto and lora.get("lora_dropout")):
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
