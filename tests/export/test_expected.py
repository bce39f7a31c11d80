"""The expected tensors are PEFT's own, for any architecture and at any size."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from clustertune.errors import UserError
from clustertune.export.expected import build_expected
from tests.export.conftest import ARCHITECTURE, LORA

LLAMA_405B: dict[str, Any] = ARCHITECTURE | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
}  # fmt: skip


@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        LORA | {"target_modules": "all-linear"},
        LORA | {"target_modules": r".*layers\.1\..*(q|o)_proj", "rank_pattern": {"o_proj": 2}, "use_rslora": True},
        LORA | {"modules_to_save": ["lm_head"], "layers_to_transform": [0]},
        LORA | {"init_lora_weights": "orthogonal"},
        LORA | {"use_dora": True},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_names_and_shapes_are_those_of_a_real_model(lora: dict[str, Any], kind: str) -> None:
    architecture = {key: value for key, value in ARCHITECTURE.items() if key != "architectures"} | {"model_type": kind}
    expected = build_expected(architecture, lora, "example/tiny", None)
    model = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture)), LoraConfig(**lora))
    saved = get_peft_model_state_dict(model)
    assert expected.tensors == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert not expected.base & saved.keys()
    assert expected.config["init_lora_weights"] == lora.get("init_lora_weights", True)


def test_405b_is_checked_in_seconds_and_without_memory() -> None:
    before = torch.get_default_dtype()
    lora = {"r": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    started = time.process_time()
    expected = build_expected(LLAMA_405B, lora, "example/405b", None)
    assert time.process_time() - started < 20
    assert len(expected.tensors) == 1008
    assert sum(torch.Size(shape).numel() for shape in expected.tensors.values()) == 404_619_264
    assert torch.get_default_dtype() == before


@pytest.mark.parametrize(
    ("architecture", "lora"),
    [
        ({"model_type": "no-such-model"}, LORA),
        ({}, LORA),
        (ARCHITECTURE | {"hidden_size": "many"}, LORA),
        (ARCHITECTURE, LORA | {"target_modules": ["absent_proj"]}),
        (ARCHITECTURE, LORA | {"no_such_field": 1}),
        (ARCHITECTURE, LORA | {"r": 0}),
        (ARCHITECTURE, LORA | {"init_lora_weights": "olora"}),
    ],
)
def test_what_does_not_go_together_is_refused(architecture: dict[str, Any], lora: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"recipe\.json"):
        build_expected(architecture, lora, "example/tiny", None)
