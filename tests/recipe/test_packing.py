"""Packed recipes attend conversation by conversation; where that is not to be had, this is said before the queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.recipe.library_facts import config_fields
from clustertune.resolve.kernels import PACKED
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from tests.recipe.conftest import Refuse

KEY = "train.model_init_kwargs.attn_implementation"


def attention(resolved: Resolved) -> Any:
    return (resolved.train_args["model_init_kwargs"] or {}).get("attn_implementation")


def masked(resolved: Resolved) -> list[str]:
    return [text for text in resolved.warnings if "attention mask" in text]


@pytest.mark.parametrize(
    ("given", "expected", "warning"),
    [
        ([], PACKED, ""), (["train.packing=false"], None, ""),
        (["train.packing_strategy=wrapped"], None, ""),  # TRL lets conversations see each other then, as one long text
        (["train.packing_strategy=bfd_split"], PACKED, ""),
        ([f"{KEY}=sdpa"], "sdpa", "8,192 x 8,192"),
        ([f"{KEY}=eager", "train.max_length=1000"], "eager", "2,000 x 2,000"),
        ([f"{KEY}=sdpa", "train.packing=false"], "sdpa", ""), ([f"{KEY}=flex_attention"], "flex_attention", ""),
        (["train.packing=false", "train.padding_free=true", f"{KEY}=sdpa"], "sdpa", "8,192 x 8,192"),
    ],
)  # fmt: skip
def test_what_the_recipe_says_is_left_alone(given: list[str], expected: str | None, warning: str) -> None:
    resolved = resolve("qwen2.5-72b-tulu3", given)
    assert attention(resolved) == expected
    assert bool(masked(resolved)) == bool(warning) and all(warning in text for text in masked(resolved))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attention_dropout": 0.1}, "dropout"),
        ({"head_dim": 36}, "heads of 36"),
        ({"head_dim": 512}, "heads of 512"),
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "soft cap"),
        ({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}, "sinks"),
        ({"model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}, "code of its own"),
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "192 (keys) and 128 (values)"),
        ({"model_type": "minicpm3", "architectures": ["MiniCPM3ForCausalLM"]}, "different sizes"),
    ],
)
def test_an_architecture_that_it_does_not_compute(changes: dict[str, Any], why: str, recipes: Path, refused: Refuse) -> None:
    """sdpa with its mask and a warning, eager where sdpa leaves something out; refused where the recipe asks for it by name."""
    folder = recipes / "tiny-oasst2"
    model = {**json.loads((folder / "model.json").read_text()), **changes}
    model = {key: value for key, value in model.items() if key in config_fields(model["model_type"])}
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\n")
    resolved = resolve(folder, ["lora.target_modules=all-linear"])
    assert attention(resolved) == ("eager" if why in ("soft cap", "sinks") else None)
    assert why in masked(resolved)[0] and "train.packing=false" in masked(resolved)[0]
    found = refused(folder, ["lora.target_modules=all-linear", f"{KEY}={PACKED}"])
    assert any(problem.key == KEY and why in str(problem) for problem in found)
