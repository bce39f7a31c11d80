"""Parameter counts against the models that the installed transformers and PEFT build."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.recipe.architecture import scale_down
from clustertune.recipe.native_rules import filled, lora_defaults
from clustertune.recipe.parameters import (
    KNOWN,
    count,
    lora_parameter_count,
)
from tests.recipe.architectures import ARCHITECTURES

OLD_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD_ROPE["original_max_position_embeddings"] = 4096
STEP = {"decoder_sparse_step": 2, "use_sliding_window": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama biases": ("meta-llama/Llama-3.1-8B-Instruct", {"attention_bias": True, "mlp_bias": True}),
    "llama old rope": ("meta-llama/Llama-3.1-8B-Instruct", {"rope_theta": 500000.0, "rope_scaling": OLD_ROPE}),
    "llama wide heads": ("meta-llama/Llama-3.1-8B-Instruct", {"head_dim": 256, "num_key_value_heads": None}),
    "qwen2 window": ("Qwen/Qwen2.5-7B-Instruct", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}),
    "qwen2_moe dense layers": ("Qwen/Qwen1.5-MoE-A2.7B", {"mlp_only_layers": [0, 5], "qkv_bias": False, **STEP}),
    "qwen3_moe dense layers": ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": [1, 3], "attention_bias": True, **STEP}),
    "qwen3_moe other name": ("Qwen/Qwen3-30B-A3B", {"num_experts": None, "num_local_experts": 64}),
    "qwen3 window": ("Qwen/Qwen3-8B", {"use_sliding_window": True, "max_window_layers": 4, "attention_bias": True}),
    "qwen3_next pattern": ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"layer_types": ["linear_attention", "full_attention"] * 24}),
    "gemma3 pattern": ("google/gemma-3-1b-it", {"layer_types": ["full_attention"] + ["sliding_attention"] * 25}),
    "gemma3 other pattern": ("google/gemma-3-1b-it", {"sliding_window_pattern": 4}),
    "qwen3_next interval": ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": 3}),
    "gemma untied": ("google/gemma-7b", {"tie_word_embeddings": False, "attention_bias": True}),
    "glm4 no bias": ("THUDM/GLM-4-9B-0414", {"attention_bias": False}),
    "granite biases": ("ibm-granite/granite-3.3-8b-instruct", {"attention_bias": True, "mlp_bias": True}),
    "starcoder2 no bias": ("bigcode/starcoder2-7b", {"use_bias": False}),
    "gpt_neox no bias": ("EleutherAI/gpt-neox-20b", {"attention_bias": False}),
    "gpt2 inner": ("openai-community/gpt2", {"n_inner": 1000}),
    "falcon old": ("tiiuae/falcon-7b", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon one norm": ("tiiuae/falcon-40b", {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 1024}),
    "deepseek_v2 queries": ("deepseek-ai/DeepSeek-V2-Lite", {"q_lora_rank": 384, "attention_bias": True, "mlp_bias": True}),
    "deepseek_v3 plain queries": ("deepseek-ai/DeepSeek-V3", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "gpt_oss no bias": ("openai/gpt-oss-20b", {"attention_bias": False}),
    "llama4 chosen layers": ("meta-llama/Llama-4-Scout-17B-16E", {"moe_layers": [3, 4], "attention_bias": True}),
    "nemotron biases": ("nvidia/Minitron-8B-Base", {"attention_bias": True, "mlp_bias": True}),
    "smollm3 window": ("HuggingFaceTB/SmolLM3-3B", {"use_sliding_window": True, "sliding_window": 512, "mlp_bias": True}),
    "gemma4 experts": (
        "google/gemma-4-E4B",
        {
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
        },
    ),
    "gemma4 wide": ("google/gemma-4-E4B", {"use_double_wide_mlp": True, "global_head_dim": 256, "attention_bias": True}),
    "glm5 shared indexers": ("zai-org/GLM-5", {"index_topk_freq": 4, "first_k_dense_replace": 1}),
    "glm flash dense": ("zai-org/GLM-4.7-Flash", {"mlp_layer_types": ["dense"] * 5 + ["sparse"] * 42, "attention_bias": True}),
    "olmo3 pattern": ("allenai/Olmo-3-1125-32B", {"layer_types": ["full_attention"] * 64}),
    "qwen3.5 interval": ("Qwen/Qwen3.5-27B", {"full_attention_interval": 2, "attention_bias": True}),
    "ernie biases": ("baidu/ERNIE-4.5-0.3B-PT", {"use_bias": True, "tie_word_embeddings": False}),
}


def changed(name: str) -> dict[str, Any]:
    """A variant's architecture; None takes a key out."""
    base, change = VARIANTS[name]
    keep = {key for key, value in change.items() if value is None and key != "q_lora_rank"}
    return {key: value for key, value in (ARCHITECTURES[base] | change).items() if key not in keep}


EVERY = {**ARCHITECTURES, **{name: changed(name) for name in VARIANTS}}
FAMILIES = list({body["model_type"]: name for name, body in ARCHITECTURES.items()}.values())
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}, "nemotron": {"num_key_value_heads": 48}}
"""Without these transformers cannot run, or not even build, a model: their defaults are None."""
SMALLEST = {f"defaults of {kind}": {"model_type": kind, **NEEDED.get(kind, {})} for kind in KNOWN}


def config(body: dict[str, Any]) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoConfig.for_model(**body)


def build(body: dict[str, Any]) -> Any:
    """The real model of an architecture, without memory for its weights."""
    import torch
    import transformers

    made = config(body)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made)


def stored(model: Any) -> dict[str, Any]:
    """The parameters, and DeepSeek-V3's corrections, which are parameters where they were published."""
    corrections = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return dict(model.named_parameters()) | corrections


@pytest.mark.parametrize(
    ("name", "billions", "with_embedding"),
    [
        ("openai/gpt-oss-20b", 3.61, False),  # arXiv 2508.10925, table 1
        ("Qwen/Qwen3-30B-A3B", 3.35, True),  # model card: 3.3B activated
        ("deepseek-ai/DeepSeek-V3", 37.55, True),  # arXiv 2412.19437: 37B activated
        ("mistralai/Mixtral-8x7B-v0.1", 12.88, True),  # arXiv 2401.04088: 13B active
    ],
)
def test_published_active_parameters(name: str, billions: float, with_embedding: bool) -> None:
    """What a token passes through, by the convention of each source."""
    counted = count(ARCHITECTURES[name])
    assert counted is not None
    assert round((counted.active + counted.embedding * with_embedding) / 1e9, 2) == billions


FULL = ("Qwen/Qwen3-Next-80B-A3B-Instruct", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b", *SMALLEST)


@pytest.mark.parametrize("name", FULL)
def test_the_count_is_that_of_the_real_model(name: str) -> None:
    """Full size, variants of what the families can, and nothing given but the family: the defaults are transformers' own."""
    body = (EVERY | SMALLEST)[name]
    counted = count(body)
    assert counted is not None
    assert counted.total == sum(tensor.numel() for tensor in stored(build(body)).values())


def peft_count(body: dict[str, Any], lora: dict[str, Any]) -> int | None:
    """What PEFT trains; None where it refuses."""
    import torch
    from peft import LoraConfig, get_peft_model

    try:
        with torch.device("meta"):
            model = get_peft_model(build(body), LoraConfig(task_type="CAUSAL_LM", **lora))
    except ValueError:
        return None
    return sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad) or None


MOE = ["gate_proj", "up_proj", "down_proj"]
FUSED = ("gate_up_proj", "down_proj")
LORA: list[tuple[str, dict[str, Any]]] = [
    *((name, {"target_modules": "all-linear"}) for name in FAMILIES),
    ("meta-llama/Llama-3.1-8B-Instruct", {"target_modules": ["mlp"]}),
    ("meta-llama/Llama-3.1-8B-Instruct", {"target_modules": ["x"]}),
    ("meta-llama/Llama-3.1-8B-Instruct", {"target_modules": r".*layers\.1\.self_attn\.(q|v)_proj"}),
    ("openai-community/gpt2", {"target_modules": ["c_attn"]}),
    ("openai-community/gpt2", {"target_modules": ["c_proj", "mlp.c_fc"]}),
    ("mistralai/Mixtral-8x7B-v0.1", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    ("mistralai/Mixtral-8x7B-v0.1", {"target_modules": ["q_proj", "gate"]}),
    ("mistralai/Mixtral-8x7B-v0.1", {"target_modules": ["q_proj", "w1"]}),
    ("Qwen/Qwen3-30B-A3B", {"target_modules": ["q_proj", *MOE]}),
    ("Qwen/Qwen3-30B-A3B", {"target_modules": ["q_proj", *MOE], "lora_dropout": 0.1}),
    ("Qwen/Qwen3-30B-A3B", {"target_modules": ["q_proj", "mlp.experts.down_proj"]}),
    ("Qwen/Qwen3-30B-A3B", {"target_modules": ["gate_proj", "down_proj"]}),
    ("Qwen/Qwen3-30B-A3B", {"target_modules": r".*layers\.1\.self_attn\.(q|k)_proj"}),
    ("qwen3_moe dense layers", {"target_modules": ["q_proj", *MOE]}),
    ("qwen3_moe dense layers", {"target_modules": ["q_proj"], "target_parameters": [f"experts.{n}" for n in FUSED]}),
    ("qwen3_moe dense layers", {"target_modules": [], "target_parameters": ["layers.1.mlp.experts.down_proj"]}),
    ("Qwen/Qwen1.5-MoE-A2.7B", {"target_modules": ["q_proj", *MOE, "shared_expert_gate"]}),
    ("deepseek-ai/DeepSeek-V3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}),
    ("deepseek-ai/DeepSeek-V3", {"target_modules": ["kv_b_proj", *MOE]}),
    ("deepseek-ai/DeepSeek-V2-Lite", {"target_modules": ["q_proj", *MOE, "gate"]}),
    ("meta-llama/Llama-4-Scout-17B-16E", {"target_modules": ["q_proj", "router"]}),
]


@pytest.mark.parametrize(("name", "lora"), LORA, ids=[f"{name}-{index}" for index, (name, _) in enumerate(LORA)])
def test_lora_is_counted_as_peft_makes_it(name: str, lora: dict[str, Any]) -> None:
    """Fused experts, routers, Conv1D, latent attention; what PEFT refuses has no count."""
    body = scale_down(EVERY[name])
    assert lora_parameter_count(body, filled(lora_defaults(), {"r": 4, **lora})) == peft_count(body, {"r": 4, **lora})
