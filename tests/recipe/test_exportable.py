"""Each key of PEFT's LoraConfig is one that can be exported and merged, or it is refused before the queue."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from clustertune.recipe import native_rules
from clustertune.recipe.checks import check_lora, is_targeted

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
LORA: dict[str, Any] = {"target_modules": ["q_proj"]}
MERGED = {
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "modules_to_save",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "target_parameters",
}  # fmt: skip
"""Keys that training uses and the merge reads, as ``tests/merge`` compares with PEFT."""
WITHOUT_EFFECT = {"megatron_core", "qalora_group_size", "fan_in_fan_out"}
"""They belong to refused keys; PEFT takes ``fan_in_fan_out`` back for each linear layer."""
REFUSED: dict[str, Any] = {"bias": "all", "task_type": "SEQ_CLS", "init_lora_weights": "pissa", "ensure_weight_tying": True}


def keys(lora: dict[str, Any], architecture: dict[str, Any] = LLAMA) -> set[str]:
    return {str(found[0][1]) for found in check_lora(native_rules.lora_defaults() | LORA | lora, architecture)}


def test_no_key_of_the_installed_peft_is_unknown_here() -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields == MERGED | WITHOUT_EFFECT | set(REFUSED) | set(native_rules.LORA_UNSUPPORTED) | set(native_rules.LORA_OWNED)


@pytest.mark.parametrize("key", [*REFUSED, *native_rules.LORA_UNSUPPORTED])
def test_what_cannot_be_merged_is_refused(key: str) -> None:
    assert not keys({})
    assert key in keys({key: REFUSED.get(key, True)})


@pytest.mark.parametrize("target", [["q_proj", "embed_tokens"], ["model.embed_tokens"], r".*(q_proj|embed_tokens)"])
@pytest.mark.parametrize("tied", [True, False])
def test_lora_on_the_input_embedding_is_refused(target: object, tied: bool) -> None:
    assert "target_modules" in keys({"target_modules": target}, LLAMA | {"tie_word_embeddings": tied})


@pytest.mark.parametrize("kind", ["gpt2", "openai-gpt"])
def test_lora_on_transposed_layers_is_refused(kind: str) -> None:
    assert "lora" in {found[0][0] for found in check_lora(native_rules.lora_defaults() | LORA, LLAMA | {"model_type": kind})}


HEADS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "lm_head"]}, {"target_modules": "lm_head"}, {"target_modules": r".*_head"},
    {"target_modules": r".*(q_proj|lm_head)"}, {"target_modules": r".*(proj|head|tokens)", "exclude_modules": r".*tokens"},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ["v_proj"], "rank_pattern": {"lm_head": 2}},
]  # fmt: skip
BESIDE: list[dict[str, Any]] = [
    {"target_modules": "all-linear"}, {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ["lm_head"]},
    {"target_modules": r".*(q_proj|lm_head)", "exclude_modules": r".*_head"}, {"target_modules": r".*\.self_attn\..*"},
]  # fmt: skip


@pytest.mark.parametrize("lora", HEADS)
def test_lora_on_a_tied_head_is_refused_however_it_is_named(lora: dict[str, Any]) -> None:
    assert keys(lora, LLAMA | {"tie_word_embeddings": True}) == {"target_modules"} and not keys(lora)


@pytest.mark.parametrize("lora", BESIDE)
def test_lora_beside_a_tied_head_is_taken(lora: dict[str, Any]) -> None:
    assert not keys(lora, LLAMA | {"tie_word_embeddings": True})


@pytest.mark.parametrize("lora", [*HEADS, *BESIDE])
def test_the_head_is_adapted_where_peft_adapts_it(lora: dict[str, Any]) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    adapted = {name for name, _ in get_peft_model(model, LoraConfig(**lora)).named_modules() if name.endswith(".lora_A")}
    assert is_targeted(native_rules.lora_defaults() | lora, "lm_head") == any("lm_head" in name for name in adapted)


def test_a_rank_of_what_all_linear_leaves_out_has_no_effect() -> None:
    assert keys({"target_modules": "all-linear", "rank_pattern": {"lm_head": 4}}) == {"rank_pattern"}
