"""``train.model_init_kwargs.quantization_config``: a base that is loaded quantised, with transformers' keys, and its size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clustertune.recipe.findings import show_value
from clustertune.recipe.layers import did_you_mean
from clustertune.recipe.parameters import Linear

BASE = "base_quantization"
"""Key of the manifests of adapters and merged models: how the base was stored that the adapter was trained on."""
METHODS = ("bitsandbytes", "fp8", "fbgemm_fp8", "torchao", "mxfp4", "gptq", "awq")
"""The methods whose sizes are known here, by their names in transformers/quantizers/auto.py."""
_BITSANDBYTES = {
    "load_in_4bit": (True, False),
    "load_in_8bit": (True, False),
    "bnb_4bit_quant_type": ("nf4", "fp4"),
    "bnb_4bit_use_double_quant": (True, False),
    "bnb_4bit_compute_dtype": ("bfloat16", "float16", "float32"),
    "bnb_4bit_quant_storage": ("uint8", "bfloat16", "float16", "float32"),
}
"""Keys of transformers' ``BitsAndBytesConfig`` with the values they take (transformers/utils/quantization_config.py)."""
_FREE = ("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight")

BLOCK, OUTER = 64, 256
"""bitsandbytes: weights that share one absmax, and absmax values that share one in double quantisation
(bitsandbytes/functional.py, quantize_4bit; https://arxiv.org/abs/2305.14314, 3)."""
FP8_BLOCK = 128 * 128
"""Weights that share a float32 scale by ``FineGrainedFP8Config``'s own ``weight_block_size``."""


@dataclass(frozen=True)
class Quantized:
    """How one parameter of a quantised linear layer is stored."""

    method: str
    packed: float
    """Bytes of the value itself."""
    scales: float
    """Bytes of what it is scaled by, per parameter."""
    formula: str
    splits: bool = True
    """FSDP can split it: its storage is a floating type."""
    skipped: tuple[str, ...] = ()
    """Patterns of modules that stay as they are (``llm_int8_skip_modules``, ``modules_to_not_convert``)."""

    @property
    def bytes(self) -> float:
        """Bytes of a parameter with its share of the scales."""
        return self.packed + self.scales

    def converts(self, linear: Linear) -> bool:
        """Whether transformers 5.23 stores this matrix of a layer quantised.

        bitsandbytes replaces modules whose type is nn.Linear (or GPT-2's Conv1D) itself: no class that inherits from it, and no
        bare parameter, which fused experts and routers are (integrations/bitsandbytes.py, replace_with_bnb_linear). fp8 has a
        class for fused experts (integrations/finegrained_fp8.py), fbgemm_fp8 for Llama 4's, mxfp4 for nothing but them.
        """
        name, experts = f"model.layers.0.{linear.name}", linear.bare and linear.copies > 1
        if any(_is_skipped(name, pattern) for pattern in self.skipped):
            return False
        if self.method == "mxfp4":
            return experts
        if experts:
            return self.method == "fp8" or (self.method == "fbgemm_fp8" and linear.name.startswith("feed_forward."))
        return not linear.bare and not (linear.derived and self.method in ("bitsandbytes", "fp8"))


def _is_skipped(name: str, pattern: str) -> bool:
    """transformers' rule (quantizers/quantizers_utils.py, should_convert_module)."""
    try:
        return name.endswith(pattern) or re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name) is not None
    except re.error:
        return False


def of(train: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantisation that the complete ``train`` section asks for."""
    init = train["model_init_kwargs"]
    config = init.get("quantization_config") if isinstance(init, Mapping) else None
    return config if isinstance(config, dict) and config else None


def method(config: Mapping[str, Any]) -> str:
    """transformers takes ``load_in_4bit`` without a ``quant_method`` for bitsandbytes' (quantizers/auto.py, from_dict)."""
    named = config.get("quant_method")
    if named is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return "bitsandbytes"
    return str(named)


def label(config: Mapping[str, Any]) -> str:
    """Method and kind, for people: ``bitsandbytes nf4``, ``fp8``."""
    kind = config.get("bnb_4bit_quant_type", "fp4") if config.get("load_in_4bit") else config.get("bits") or config.get("fmt")
    return f"{method(config)} {kind}" if kind else method(config)


def is_sharded(config: Mapping[str, Any]) -> bool:
    """Whether FSDP takes such weights apart and brings them together again as they were: bitsandbytes' 4 bits alone.

    Its kernels find the scales beside the bytes. Of all others FSDP2 casts what is a floating type, float8 included, to the
    type that it computes in, without the scales (torch 2.13, _fsdp_param.py), and whole integers it does not split.
    """
    return method(config) == "bitsandbytes" and bool(config.get("load_in_4bit"))


def cast_away(config: Mapping[str, Any], train: Mapping[str, Any], kind: str) -> str | None:
    """Why 4-bit weights in this storage would lose their values; None where they keep them. ``kind``: accelerate's
    ``DistributedType``.

    Under ``train.bf16`` each floating parameter is cast to bfloat16: by FSDP1 and FSDP2 as they gather it (param_dtype of
    accelerate's policy), by DeepSpeed before the first step (0.19, engine.py, _cast_module_mixed_precision). A
    float16 holds four of them in its bits, a float32 eight: rounded, they are others.
    """
    caster = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed"}.get(kind)
    storage = str(config.get("bnb_4bit_quant_storage", "uint8"))
    if caster is None or train["bf16"] is False or not config.get("load_in_4bit") or storage not in ("float16", "float32"):
        return None
    return f"{storage}: with train.bf16 {caster} casts it to bfloat16, which changes the 4-bit values that it holds"


def find_problems(config: object) -> Iterator[tuple[tuple[str, ...], str, str | None]]:
    """Key path below ``quantization_config``, what is wrong, and what to do."""
    if not isinstance(config, dict):
        yield (), f"{show_value(config)} is not a mapping", "write {load_in_4bit: true, bnb_4bit_quant_type: nf4}"
        return
    named = method(config)
    if named not in METHODS:
        text = "missing" if config.get("quant_method") is None else f"{show_value(named)} is not one of {', '.join(METHODS)}"
        yield ("quant_method",), text, did_you_mean(named, METHODS)
        return
    if named != "bitsandbytes":
        return
    for key, value in config.items():
        if key in (*_FREE, "quant_method"):
            continue
        choices = _BITSANDBYTES.get(key)
        if choices is None:
            yield (key,), "BitsAndBytesConfig has no such field", did_you_mean(key, (*_BITSANDBYTES, *_FREE))
        elif value not in choices or isinstance(value, bool) is not isinstance(choices[0], bool):
            yield (key,), f"{show_value(value)} is not one of {', '.join(json.dumps(w) for w in choices)}", None
    if bool(config.get("load_in_4bit")) == bool(config.get("load_in_8bit")):
        yield (), "one of load_in_4bit and load_in_8bit must be true", "write load_in_4bit: true"


def read(config: Mapping[str, Any], hidden: int) -> Quantized:
    """The size of a checked ``quantization_config``; ``hidden`` is the row length that a scale per row is spread over."""
    skipped = config.get("llm_int8_skip_modules" if method(config) == "bitsandbytes" else "modules_to_not_convert")
    return replace(_read(config, hidden), skipped=tuple(map(str, skipped)) if isinstance(skipped, list) else ())


def _read(config: Mapping[str, Any], hidden: int) -> Quantized:
    named = method(config)
    if named == "bitsandbytes" and config.get("load_in_4bit"):
        splits = str(config.get("bnb_4bit_quant_storage", "uint8")) != "uint8"
        if config.get("bnb_4bit_use_double_quant"):
            scales = 1 / BLOCK + 4 / (BLOCK * OUTER)
            return Quantized(named, 0.5, scales, f"0.5 + 1/{BLOCK} + 4/({BLOCK} x {OUTER})", splits)
        return Quantized(named, 0.5, 4 / BLOCK, f"0.5 + 4/{BLOCK}", splits)
    if named == "mxfp4":  # https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf: blocks of 32
        return Quantized(named, 0.5, 1 / 32, "0.5 + 1/32", splits=False)
    bits, group = config.get("bits"), config.get("group_size", 128)
    bits = bits if isinstance(bits, int) and 2 <= bits <= 8 else 4
    group = group if isinstance(group, int) and group > 0 else hidden
    if named == "torchao":
        bits = 4 if "int4" in json.dumps(config.get("quant_type"), default=str).lower() else 8
    if bits == 8 or named in ("bitsandbytes", "fp8", "fbgemm_fp8"):
        block, scaled = config.get("weight_block_size"), FP8_BLOCK if named == "fp8" else hidden
        is_pair = isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block)
        scaled = int(block[0] * block[1]) if named == "fp8" and is_pair else scaled  # type: ignore[index]
        return Quantized(named, 1.0, 4 / scaled, f"1 + 4/{scaled}", splits=named in ("fp8", "fbgemm_fp8", "torchao"))
    # A scale of 2 bytes and a zero point of as many bits as a weight for each group.
    return Quantized(named, bits / 8, (2 + bits / 8) / group, f"{bits}/8 + (2 + {bits}/8)/{group}", splits=False)
