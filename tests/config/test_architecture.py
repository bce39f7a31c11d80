"""model.json against transformers itself: classes, keys, module names, counts, and scaled-down models that really build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.config import architecture
from clustertune.config.architecture import find_problems, read_architecture, scale_down
from clustertune.config.modeling import config_fields, layer_classes, model_types, module_names
from clustertune.config.parameters import lora_parameter_count, parameter_count
from clustertune.config.resolve import resolve
from clustertune.errors import UserError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-biased": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-old-rope": LLAMA
    | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen2": LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "mistral": LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 48},
    "mixtral": LLAMA
    | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
    },
}


def build(body: dict[str, Any]) -> Any:
    """The real model of an architecture, without memory for its weights."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**body)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_scaled_down_model_is_of_the_same_class_and_small(name: str) -> None:
    body = VARIANTS[name]
    assert find_problems(body, "model.json") == []
    small = scale_down(body)
    assert find_problems(small, "model.json") == []
    model = build(small)
    assert type(model).__name__ == body["architectures"][0]
    assert len(model.model.layers) == 2
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    if "num_local_experts" in body:
        assert model.config.num_local_experts == 4


@pytest.mark.parametrize("name", VARIANTS)
def test_the_parameter_count_is_exact(name: str) -> None:
    assert parameter_count(VARIANTS[name]) == sum(p.numel() for p in build(VARIANTS[name]).parameters())


def test_no_count_is_better_than_a_wrong_one() -> None:
    assert parameter_count(LLAMA | {"model_type": "mamba"}) is None
    assert lora_parameter_count(LLAMA, {"r": 4, "target_modules": ["lm_head"]}) is None


@pytest.mark.parametrize("name", VARIANTS)
def test_module_names_read_from_source_are_the_models(name: str) -> None:
    import torch

    body = VARIANTS[name]
    read = module_names(body["model_type"], body["architectures"][0])
    real = {n for n, m in build(body).named_modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)}
    first = {n for n in real if ".layers." not in n or ".layers.0." in n}
    assert first <= set(read)
    # A mixture's source also shows the dense branch that other layers may take.
    assert set(read) - first <= {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")}
    assert layer_classes(body["model_type"])[0].endswith("DecoderLayer")


@pytest.mark.parametrize(
    "target", [["q_proj", "v_proj"], "all-linear", r".*self_attn\.(k|o)_proj", ["mlp.down_proj"], r"model\.layers\.1\..*q_proj"]
)
def test_the_lora_count_is_pefts(target: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = get_peft_model(build(LLAMA), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=target))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert lora_parameter_count(LLAMA, {"r": 4, "target_modules": target}) == trained


def test_the_reference_model_is_the_published_one() -> None:
    resolved = resolve("llama405b-oasst2")
    assert parameter_count(resolved.architecture) == 405_853_388_800
    assert resolved.recipe.lora is not None
    counted = lora_parameter_count(resolved.architecture, resolved.recipe.lora)
    assert counted == 404_619_264 == resolved.recipe.expect.trainable_parameters


def test_the_reference_adapter_counted_by_peft() -> None:
    """126 layers on the meta device: no weights, some seconds."""
    import torch
    from peft import LoraConfig, get_peft_model

    resolved = resolve("llama405b-oasst2")
    assert resolved.recipe.lora is not None
    with torch.device("meta"):
        model = get_peft_model(build(resolved.architecture), LoraConfig(**resolved.recipe.lora))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 404_619_264
    assert sum(p.numel() for p in model.parameters()) == 405_853_388_800 + 404_619_264


def test_rope_scaling_shrinks_with_the_positions() -> None:
    small = resolve("llama405b-oasst2", tiny=True).architecture
    assert small["rope_parameters"]["original_max_position_embeddings"] == 8192 * 2048 // 131072
    assert small["rope_parameters"]["factor"] == 8.0
    assert small["num_attention_heads"] // small["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"model_type": "lama"}, "model_type", "llama"),
        ({"model_type": None}, "model_type", "missing"),
        ({"model_type": 3}, "model_type", "not a model type"),
        ({"hiden_size": 4}, "hiden_size", "did you mean hidden_size"),
        ({"hidden_size": None}, "hidden_size", "whole number"),
        ({"hidden_size": "256"}, "hidden_size", "whole number"),
        ({"hidden_size": 250}, "hidden_size", "no multiple"),
        ({"num_attention_heads": 0}, "num_attention_heads", "whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads", "no multiple"),
        ({"num_hidden_layers": -2}, "num_hidden_layers", "whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "whole number"),
        ({"vocab_size": 10**12}, "vocab_size", "whole number"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures", "LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures", "LlamaForCausalLM"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "positive"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
        ({"eos_token_id": [1, 9000]}, "eos_token_id", "9000"),
        ({"bos_token_id": -1}, "bos_token_id", "token"),
        ({"rope_parameters": [1]}, "rope_parameters", "rope_type"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type", "word"),
        (
            {"rope_parameters": {"original_max_position_embeddings": [1]}},
            "rope_parameters.original_max_position_embeddings",
            "positive",
        ),
        ({"rope_parameters": {"full_attention": {"factor": -1}}}, "rope_parameters.full_attention.factor", "positive"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": "8"}}, "rope_parameters.factor", "positive"),
        ({"auto_map": {"AutoModel": "x.y"}}, "auto_map", "never run"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "unquantized"),
    ],
)
def test_what_is_wrong_in_a_model_json(change: dict[str, Any], key: str, says: str) -> None:
    found = {problem.key: str(problem) for problem in find_problems(LLAMA | change, "model.json")}
    assert key in found, found
    assert says in found[key]


def test_what_is_missing_in_a_model_json() -> None:
    for key in architecture.INTEGERS:
        found = find_problems({name: value for name, value in LLAMA.items() if name != key}, "model.json")
        assert [problem.key for problem in found] == [key]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "3", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"model_type": "llama"', "\ufeff[]"]
)
def test_a_model_json_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read_architecture(tmp_path / "model.json", "model.json")
    assert all(str(problem.file).startswith("model.json") for problem in caught.value.problems)


def test_a_published_config_json_is_accepted(tmp_path: Path) -> None:
    """The keys as transformers saves them, with those that it adds."""
    from transformers import LlamaConfig

    LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"}).save_pretrained(tmp_path)
    body = json.loads((tmp_path / "config.json").read_text())
    assert find_problems(body, "config.json") == []


def test_model_types_are_transformers_own() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for kind in ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "gemma2", "gemma3_text", "llama4_text"):
        assert kind in model_types() and kind in CONFIG_MAPPING_NAMES
        assert "hidden_size" in config_fields(kind)
