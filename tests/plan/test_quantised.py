"""What of a base a quantisation converts: the pinned transformers' module classes decide, and the plan counts it."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.recipe import quantization
from clustertune.recipe.parameters import count
from tests.plan.test_command import answer, refused
from tests.recipe.architectures import ARCHITECTURES
from tests.recipe.test_parameters import FAMILIES, build

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
MIXTURES = ("mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B", "zai-org/GLM-4.5-Air", "deepseek-ai/DeepSeek-V3")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("skipped", [(), (r".*\.mlp", "o_proj")])
def test_converted_as_transformers_does(name: str, skipped: tuple[str, ...]) -> None:
    """Of every family, the weights in modules that bitsandbytes would replace (transformers 5.23, replace_with_bnb_linear)."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = build(ARCHITECTURES[name])
    left = [*get_keys_to_not_convert(model), *skipped, *(model._keep_in_fp32_modules or [])]
    modules = [module for key, module in model.named_modules() if should_convert_module(key, left)]
    modules = [
        one for one in modules if one is not getattr(getattr(model, "model", None), "per_layer_model_projection", None)
    ]  # of no layer
    theirs = sum(one.weight.numel() for one in modules if isinstance(one, Conv1D) or type(one) is nn.Linear)
    counted = count(ARCHITECTURES[name])
    assert counted is not None
    config: dict[str, Any] = NF4 | ({"llm_int8_skip_modules": list(skipped)} if skipped else {})
    base = quantization.read(config, counted.hidden)
    assert theirs == sum(kind.count * one.weights for kind in counted.layers for one in kind.linears if base.converts(one))


def test_methods_with_a_class_for_experts() -> None:
    """fp8 and mxfp4 store fused experts; of a dense model bitsandbytes takes each matrix."""
    counted = {name: count(ARCHITECTURES[name]) for name in ("openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B")}
    read = {method: quantization.read({"quant_method": method}, 4096) for method in ("mxfp4", "fp8")}
    read["nf4"] = quantization.read(NF4, 4096)

    def names(model: str, method: str) -> set[str]:
        found = counted[model]
        assert found is not None
        return {one.name.split(".")[-1] for kind in found.layers for one in kind.linears if read[method].converts(one)}

    assert names("openai/gpt-oss-20b", "mxfp4") == {"gate_up_proj", "down_proj"}
    assert names("openai/gpt-oss-20b", "nf4") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {"gate_up_proj", "q_proj"} <= names("Qwen/Qwen3-30B-A3B", "fp8") and "gate" not in names("Qwen/Qwen3-30B-A3B", "fp8")
    assert {"gate_proj", "q_proj"} <= names("Qwen/Qwen3-8B", "nf4")


@pytest.mark.parametrize("model", MIXTURES)
def test_experts_are_counted_in_16_bits(model: str) -> None:
    """QLoRA of a mixture saves what its attention takes alone: what would need experts in 4 bits does not fit."""
    counted = count(ARCHITECTURES[model])
    assert counted is not None
    experts = sum(kind.count * one.parameters for kind in counted.layers for one in kind.linears if one.copies > 1)
    words = ("--model", model, "--method", "qlora", "--gpus")
    if 2 * experts < 0.8 * 8 * 139 * 2**30:
        body = answer(*words, "1x8xh200-sxm")
        assert 8 * body["memory_parts_gib"]["weights"] * 2**30 > 2 * experts
        assert any("experts" in note and "bitsandbytes" in note for note in body["assumptions"])
    assert "experts" in refused(*words, "1x1xb200" if experts > 90e9 else "1x1xl40s")


def test_a_dense_model_is_quantised_whole() -> None:
    """No note of experts, and a quarter of the bytes."""
    body = answer("--model", "Qwen/Qwen3-8B", "--method", "qlora", "--gpus", "1x1xh100-sxm")
    assert not any("leaves" in note for note in body["assumptions"])
    assert body["memory_parts_gib"]["weights"] * 2**30 < 0.4 * 2 * body["parameters"]
