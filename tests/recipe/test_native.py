"""The fields are those of the imported classes; values are taken or refused as those classes would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from clustertune.recipe import native_rules
from clustertune.recipe.checks import check_lora, check_train
from clustertune.recipe.findings import Found
from clustertune.resolve.models import find_model
from tests.conftest import TINY_LLAMA
from tests.recipe.architectures import ARCHITECTURES
from tests.recipe.conftest import Refuse


@pytest.fixture(scope="session")
def imported() -> dict[str, Any]:
    """The really imported classes, 7 s to have."""
    from peft import LoraConfig
    from trl import SFTConfig

    return {"train": SFTConfig, "lora": LoraConfig}


def keys(found: Iterable[Found]) -> list[str]:
    return [".".join(path) for path, _, _ in found]


def test_each_rule_refuses_what_it_is_for() -> None:
    """A range a negative number, which the field itself takes; an owned key with its reason, a removed one with its remedy."""
    section = native_rules.train_section()
    for key in native_rules.TRAIN_RANGES:
        assert keys(native_rules.check(section, {key: -7})[1]) == [f"train.{key}"]
        assert native_rules.check(dataclasses.replace(section, ranges={}), {key: -7})[1] == [], "it is the range that refuses"
    for key, reason in section.owned.items():
        assert reason in native_rules.check(section, {key: "x"})[1][0][1]
    for key, fix in native_rules.TRAIN_REMOVED.items():
        assert native_rules.check(section, {key: 1})[1][0][2] == fix


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"fp16": True, "bf16": True}, "fp16"), ({"max_steps": 5, "warmup_steps": 6}, "warmup_steps"),
        ({"lr_scheduler_kwargs": {"num_cycles": -3}}, "lr_scheduler_kwargs"), ({"optim_args": "betta1=0.9"}, "optim_args"),
        ({"save_strategy": "best", "metric_for_best_model": "eval_los"}, "metric_for_best_model"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together(train: dict[str, Any], key: str) -> None:
    assert keys(check_train(native_rules.train_defaults() | train)) == [f"train.{key}"]


def complete(lora: dict[str, Any]) -> dict[str, Any]:
    return native_rules.filled(native_rules.lora_defaults(), lora)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
QV = ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({}, "target_modules"), ({"target_modules": []}, "target_modules"), ({"target_modules": ["q_prj"]}, "target_modules"),
        ({"target_modules": ["q"]}, "target_modules"), ({"target_modules": "q_proj"}, "target_modules"),
        ({"target_modules": "("}, "target_modules"), ({"target_modules": ["c_attn"]}, "target_modules"),
        ({"target_modules": r"model\.layers\.4\..*q_proj"}, "target_modules"),
        ({"target_modules": QV, "modules_to_save": ["lm_hed"]}, "modules_to_save"),
        ({"target_modules": QV, "layers_to_transform": [0, 4]}, "layers_to_transform"),
        ({"target_modules": QV, "bias": "all"}, "bias"), ({"target_modules": QV, "task_type": "SEQ_CLS"}, "task_type"),
        ({"target_modules": QV, "init_lora_weights": "pissa"}, "init_lora_weights"),
        *(({"target_modules": QV, key: True}, key) for key in native_rules.LORA_UNSUPPORTED),
    ],
)  # fmt: skip
def test_lora_that_the_chain_cannot_carry(lora: dict[str, Any], key: str) -> None:
    assert keys(check_lora(complete(lora), LLAMA)) == [f"lora.{key}"]


MOE = find_model("Qwen/Qwen3-30B-A3B").architecture
EXPERTS = {"target_modules": QV, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("architecture", "changes", "wrong"),
    [
        (MOE, {}, []), (MOE, {"target_modules": []}, []), (MOE, {"rank_pattern": {r".*\.gate_up_proj": 4}}, []),
        (MOE, {"lora_dropout": 0.05}, ["lora_dropout"]), (MOE, {"target_modules": "all-linear"}, ["target_modules"]),
        (MOE, {"layers_to_transform": [1]}, ["layers_to_transform"]),
        (MOE, {"target_parameters": ["experts.up_proj", "q_proj.weight", "down_proj"]}, 2 * ["target_parameters"]),
        (MOE, {"lora_dropout": 0.1, "target_parameters": ["x"]}, ["lora_dropout", "target_parameters"]),
        (find_model("llama70b-fsdp2").architecture, {}, ["target_parameters"]),
        (find_model("openai/gpt-oss-20b").architecture, {}, ["target_parameters"]),
    ],
)  # fmt: skip
def test_lora_on_experts(architecture: dict[str, Any], changes: dict[str, Any], wrong: list[str]) -> None:
    """Names of the model's own parameters, and nothing beside them that PEFT refuses or passes over."""
    assert keys(check_lora(complete({**EXPERTS, **changes}), architecture)) == [f"lora.{key}" for key in wrong]


@pytest.mark.parametrize(
    "words",
    [
        ["accelerate.parallelism_config={parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 4}"],
        ["train.model_init_kwargs={quantization_config: {load_in_4bit: true, bnb_4bit_quant_storage: bfloat16}}"],
    ],
)
def test_a_distribution_that_does_not_carry_lora_on_experts(words: list[str], refused: Refuse) -> None:
    assert "lora.target_parameters" in {problem.key for problem in refused("qwen3-30b-a3b-lora", words)}


FALCON, LITE = ARCHITECTURES["tiiuae/falcon-7b"], ARCHITECTURES["deepseek-ai/DeepSeek-V2-Lite"]


def refusals(architecture: dict[str, Any], **lora: Any) -> list[str]:
    return [message for _, message, _ in check_lora(complete(lora), architecture)]


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], r".*(q_proj|lm_head)", r"lm_.*", ["lm_head"]])
@pytest.mark.parametrize("kind", ["llama", "olmo3"])
def test_an_adapter_on_the_head_is_refused(targets: Any, kind: str) -> None:
    """TRL refuses it too, once the base is loaded (trl/trainer/sft_trainer.py:1066)."""
    architecture = {**TINY_LLAMA, "model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}
    assert any("an adapter would not be trained" in text for text in refusals(architecture, target_modules=targets))
    for more in ({"exclude_modules": ["lm_head"]}, {"layers_to_transform": [0]}, {"exclude_modules": "lm.*"}):
        assert refusals(TINY_LLAMA, target_modules=["q_proj", "lm_head"], **more) == [], "PEFT leaves it out"
