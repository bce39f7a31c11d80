"""What LoRA may be put onto: the modules that the installed transformers builds, no fewer and no more."""

from __future__ import annotations

import re
from typing import Any

import pytest

from clustertune.config import checks
from clustertune.config.architecture import common_names, scale_down
from clustertune.config.parameters import adapter_modules, head_names
from clustertune.config.values import module_names
from tests.config.architectures import ARCHITECTURES
from tests.conftest import TINY_LLAMA

FALCON, LITE = ARCHITECTURES["tiiuae/falcon-7b"], ARCHITECTURES["deepseek-ai/DeepSeek-V2-Lite"]
NAMES = sorted({body["model_type"]: name for name, body in ARCHITECTURES.items()}.values())


def real(architecture: dict[str, Any]) -> set[str]:
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**{key: value for key, value in architecture.items() if key != "architectures"})
    with torch.device("meta"):
        model = getattr(transformers, architecture["architectures"][0])(config)
    kinds = (torch.nn.Linear, torch.nn.Embedding, transformers.pytorch_utils.Conv1D)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


@pytest.mark.parametrize("name", NAMES)
def test_the_modules_are_those_of_the_model(name: str) -> None:
    """By the counted families, and by the model type, whose facts are of all choices of its configuration and may show more."""
    small = scale_down(common_names(ARCHITECTURES[name]))
    built, kind, top = real(small), small["model_type"], small["architectures"][0]
    assert set(adapter_modules(small)) == built
    assert {re.sub(r"\.\d+\.", ".0.", name, count=1) for name in built} <= set(module_names(kind, top))
    assert head_names(small) == ["lm_head"]


def refusals(architecture: dict[str, Any], **lora: Any) -> list[str]:
    return [message for _, message, _ in checks.check_lora(lora, architecture)]


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        (FALCON, ["query_key_value", "dense"]),
        (FALCON, r".*\.(query_key_value|dense)"),
        (LITE, ["q_proj", "kv_b_proj", "o_proj"]),
        (LITE, ["mlp.down_proj"]),
        (ARCHITECTURES["deepseek-ai/DeepSeek-V3"], ["q_a_proj", "q_b_proj"]),
        (TINY_LLAMA, r"model\.layers\.1\..*q_proj"),
        ({**TINY_LLAMA, "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}, r"model\.layers\.1\..*q_proj"),
        (TINY_LLAMA, "all-linear"),
    ],
)
def test_true_targets_are_taken(architecture: dict[str, Any], targets: Any) -> None:
    """Classes from a table (Falcon), from a condition (DeepSeek), a layer that is not the first."""
    assert refusals(architecture, target_modules=targets) == []


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [(FALCON, ["q_proj"]), (LITE, ["q_a_proj"]), (TINY_LLAMA, [r"dense"]), (TINY_LLAMA, r"model\.layers\.2\..*q_proj")],
)
def test_targets_that_the_model_does_not_have_are_refused(architecture: dict[str, Any], targets: Any) -> None:
    """DeepSeek-V2-Lite's queries are one matrix; PEFT would leave a name of a list out without a message."""
    assert any(
        "has no module" in text or "matches no module" in text for text in refusals(architecture, target_modules=targets)
    )


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], r".*(q_proj|lm_head)", r"lm_.*", ["lm_head"]])
@pytest.mark.parametrize("kind", ["llama", "olmo3"])
def test_an_adapter_on_the_head_is_refused(targets: Any, kind: str) -> None:
    """TRL refuses it too, once the base is loaded (trl/trainer/sft_trainer.py:1066)."""
    architecture = {**TINY_LLAMA, "model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}
    assert any("an adapter would not be trained" in text for text in refusals(architecture, target_modules=targets))


@pytest.mark.parametrize("more", [{"exclude_modules": ["lm_head"]}, {"layers_to_transform": [0]}, {"exclude_modules": "lm.*"}])
def test_a_head_that_peft_leaves_out_is_no_obstacle(more: dict[str, Any]) -> None:
    assert refusals(TINY_LLAMA, target_modules=["q_proj", "lm_head"], **more) == []
