"""The fields are those of the imported classes; values are taken or refused as those classes would."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from clustertune.config import native_rules
from clustertune.config.checks import check_lora, check_native, check_train, lora_section, train_section
from clustertune.config.findings import Found
from clustertune.config.models import find_model
from clustertune.config.native_rules import NativeField, check_value, lora_fields, train_fields
from clustertune.config.resolve import resolve
from clustertune.errors import UserError
from tests.command import run


@pytest.fixture(scope="session")
def imported() -> dict[str, Any]:
    """The really imported classes, 7 s to have."""
    from peft import LoraConfig
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from trl import SFTConfig

    return {"train": SFTConfig, "lora": LoraConfig, "reporters": INTEGRATION_TO_CALLBACK}


@pytest.mark.parametrize(("section", "fields"), [("train", train_fields), ("lora", lora_fields)])
def test_fields_equal_the_imported_dataclass(imported: dict[str, Any], section: str, fields: Any) -> None:
    real = {item.name: item for item in dataclasses.fields(imported[section])}
    read = fields()
    assert list(read) == list(real)
    for name, item in read.items():
        if item.default is not native_rules.UNKNOWN:
            assert real[name].default == item.default, name
    assert sum(item.default is native_rules.UNKNOWN for item in read.values()) < 8


def test_enumerations_equal_the_imported_ones(imported: dict[str, Any]) -> None:
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
    from transformers.training_args import OptimizerNames

    for name, real in (
        ("lr_scheduler_type", SchedulerType), ("optim", OptimizerNames), ("eval_strategy", IntervalStrategy),
        ("logging_strategy", IntervalStrategy), ("save_strategy", SaveStrategy),
    ):  # fmt: skip
        assert set(train_fields()[name].choices) == {item.value for item in real}
    assert set(native_rules.reporters()) == set(imported["reporters"])


@pytest.mark.parametrize("name", ["tiny-oasst2", "llama405b-oasst2"])
@pytest.mark.parametrize("tiny", [False, True])
def test_the_imported_classes_take_what_is_resolved(imported: dict[str, Any], name: str, tiny: bool, tmp_path: Any) -> None:
    resolved = resolve(name, tiny=tiny)
    args = {key: value for key, value in resolved.train_args.items() if key != "tf32"}  # needs an NVIDIA GPU
    made = imported["train"](**args, output_dir=str(tmp_path), use_cpu=True)
    assert made.activation_checkpointing is False and made.gradient_checkpointing is False
    assert made.gradient_accumulation_steps == resolved.train_args["gradient_accumulation_steps"]
    lora = imported["lora"](**resolved.recipe.lora)
    assert lora.r in {16, 32} and lora.task_type == "CAUSAL_LM"


def test_resolving_imports_no_heavy_package() -> None:
    code = (
        "import sys; from clustertune.config.resolve import resolve; from clustertune.config import show; "
        "show.as_json(resolve('llama405b-oasst2')); "
        "print(sorted({'torch','transformers','trl','peft','accelerate','datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("learning_rate", "5e-5", 5e-5), ("learning_rate", 1, 1), ("packing", "yes", True), ("packing", 1, True),
        ("seed", "7", 7), ("seed", 7.0, 7), ("lr_scheduler_type", "cosine", "cosine"), ("max_length", None, None),
        ("logging_steps", 1, 1), ("report_to", ["wandb"], ["wandb"]), ("report_to", "none", "none"),
        ("model_init_kwargs", {"dtype": "bfloat16"}, {"dtype": "bfloat16"}), ("pad_to_multiple_of", 8, 8),
        ("bf16", None, None), ("warmup_steps", 0.03, 0.03),
    ],
)  # fmt: skip
def test_values_that_are_taken(name: str, given: Any, taken: Any) -> None:
    result = check_value(train_fields()[name], given)
    assert result == taken and type(result) is type(taken)


@pytest.mark.parametrize(
    ("given", "good"),
    [("pissa_niter_16", True), ("pissa_niter_x", False), ("gaussian", True), (True, True), ("gausian", False)],
)
def test_a_literal_with_a_placeholder(given: Any, good: bool) -> None:
    item = lora_fields()["init_lora_weights"]
    if good:
        assert check_value(item, given) == given
    else:
        with pytest.raises(ValueError):
            check_value(item, given)


def test_every_rule_names_a_field_that_exists_or_is_gone() -> None:
    for section in (train_section(), lora_section()):
        assert set(section.ranges) <= set(section.fields)
        assert not set(section.removed) & set(section.fields)
    assert set(native_rules.LORA_OWNED) | set(native_rules.LORA_UNSUPPORTED) <= set(lora_fields())
    gone = set(native_rules.TRAIN_OWNED) - set(train_fields())
    assert gone == {"logging_dir", "overwrite_output_dir", "no_cuda", "push_to_hub_model_id", "push_to_hub_organization"}


def keys(found: Iterable[Found]) -> list[str]:
    return [".".join(path) for path, _, _ in found]


@pytest.mark.parametrize("key", sorted(native_rules.TRAIN_RANGES))
def test_each_range_refuses_a_negative_number(key: str) -> None:
    assert keys(check_native(train_section(), {key: -7})[1]) == [f"train.{key}"]
    assert check_native(dataclasses.replace(train_section(), ranges={}), {key: -7})[1] == [], "it is the range that refuses"


@pytest.mark.parametrize("key", sorted(native_rules.TRAIN_OWNED))
def test_each_owned_key_is_refused_with_its_reason(key: str) -> None:
    assert native_rules.TRAIN_OWNED[key] in check_native(train_section(), {key: "x"})[1][0][1]


@pytest.mark.parametrize(("key", "fix"), sorted(native_rules.TRAIN_REMOVED.items()))
def test_each_removed_key_has_a_remedy(key: str, fix: str) -> None:
    assert check_native(train_section(), {key: 1})[1][0][2] == fix


def test_a_secret_is_never_shown() -> None:
    for given in ({"hub_tokens": "abc"}, {"api_key": "abc"}, {"Password": "abc"}):
        _, problems = check_native(train_section(), given)
        assert problems and "abc" not in str(problems)


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"fp16": True, "bf16": True}, "fp16"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor"),
        ({"packing": True, "max_length": None}, "max_length"),
        ({"pad_token": "<|e|>", "eos_token": "<|e|>"}, "pad_token"),
        ({"save_only_model": True}, "save_only_model"),
        ({"report_to": ["wandb", "wand"]}, "report_to"),
        ({"gradient_checkpointing": True, "activation_checkpointing": False}, "gradient_checkpointing"),
    ],
)
def test_values_that_do_not_go_together(train: dict[str, Any], key: str) -> None:
    assert keys(check_train(train)) == [f"train.{key}"]


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
QV = ["q_proj", "v_proj"]


@pytest.mark.parametrize("target", [QV, ["self_attn.q_proj"], "all-linear", r".*\.(q|v)_proj", ["embed_tokens"]])
def test_targets_that_exist(target: Any) -> None:
    assert keys(check_lora({"target_modules": target}, LLAMA)) == []


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({}, "target_modules"), ({"target_modules": []}, "target_modules"), ({"target_modules": ["q_prj"]}, "target_modules"),
        ({"target_modules": ["q"]}, "target_modules"), ({"target_modules": "q_proj"}, "target_modules"),
        ({"target_modules": "("}, "target_modules"), ({"target_modules": ["c_attn"]}, "target_modules"),
        ({"target_modules": QV, "modules_to_save": ["lm_hed"]}, "modules_to_save"),
        ({"target_modules": QV, "layers_to_transform": [0, 4]}, "layers_to_transform"),
        ({"target_modules": QV, "layers_pattern": "layers"}, "layers_pattern"),
        ({"target_modules": QV, "bias": "all"}, "bias"), ({"target_modules": QV, "task_type": "SEQ_CLS"}, "task_type"),
        ({"target_modules": QV, "init_lora_weights": "pissa"}, "init_lora_weights"),
        *(({"target_modules": QV, key: True}, key) for key in native_rules.LORA_UNSUPPORTED),
    ],
)  # fmt: skip
def test_lora_that_the_chain_cannot_carry(lora: dict[str, Any], key: str) -> None:
    assert keys(check_lora(lora, LLAMA)) == [f"lora.{key}"]


MOE = find_model("Qwen/Qwen3-30B-A3B").architecture
EXPERTS = {"target_modules": QV, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("architecture", "changes", "wrong"),
    [
        (MOE, {}, []),
        (MOE, {"target_modules": []}, []),
        (MOE, {"rank_pattern": {r".*\.gate_up_proj": 4}}, []),
        (MOE, {"lora_dropout": 0.05}, ["lora_dropout"]),
        (MOE, {"target_modules": "all-linear"}, ["target_modules"]),
        (MOE, {"layers_to_transform": [1]}, ["layers_to_transform"]),
        (MOE, {"target_parameters": ["experts.up_proj", "q_proj.weight", "down_proj"]}, 2 * ["target_parameters"]),
        (MOE, {"lora_dropout": 0.1, "target_parameters": ["x"]}, ["lora_dropout", "target_parameters"]),
        (find_model("llama70b-fsdp2").architecture, {}, ["target_parameters"]),
        (find_model("openai/gpt-oss-20b").architecture, {}, ["target_parameters"]),
    ],
)
def test_lora_on_experts(architecture: dict[str, Any], changes: dict[str, Any], wrong: list[str]) -> None:
    """Names of the model's own parameters, and nothing beside them that PEFT refuses or passes over."""
    assert keys(check_lora({**EXPERTS, **changes}, architecture)) == [f"lora.{key}" for key in wrong]


@pytest.mark.parametrize(
    "words",
    [
        ["accelerate.fsdp_config.fsdp_version=1"],
        ["accelerate.parallelism_config={parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 4}"],
        ["train.torch_compile=true"],
        ["train.model_init_kwargs={quantization_config: {load_in_4bit: true, bnb_4bit_quant_storage: bfloat16}}"],
    ],
)
def test_a_distribution_that_does_not_carry_lora_on_experts(words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve("qwen3-30b-a3b-lora", words)
    assert "lora.target_parameters" in {problem.key for problem in caught.value.problems}


def test_frozen_experts_are_named_and_their_share() -> None:
    """Nobody trains a tenth of a mixture without knowing it."""
    frozen = ["lora.target_parameters=null"]
    assert not any("frozen" in text for text in resolve("qwen3-30b-a3b-lora").warnings)
    (text,) = [text for text in resolve("qwen3-30b-a3b-lora", frozen).warnings if "frozen" in text]
    assert "95%" in text and '"mlp.experts.down_proj"' in text
    done = run("submit", "qwen3-30b-a3b-lora", *frozen, "--cluster", "dgx-h100", "--dry-run")
    assert done.code == 0 and text in done.err


def test_a_field_that_takes_an_object_says_so() -> None:
    item = NativeField("x", native_rules.UNKNOWN, None, "")
    with pytest.raises(ValueError, match="Python object"):
        check_value(item, 3)
