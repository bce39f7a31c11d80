"""Published config.json files, cut to what makes the architecture: with those of the list, of every family that is counted."""

from __future__ import annotations

from typing import Any

from clustertune.resolve.models import find_model, known_models

_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_LONG = [1.0 + index / 8 for index in range(48)]
_LLAMA4 = {"head_dim": 128, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1}
_SHAPES: dict[str, tuple[str, str, tuple[int | None, ...], dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", "Llama", (4096, 14336, 32, 32, 8, 128256, 131072), {}),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", "Qwen2", (3584, 18944, 28, 28, 4, 152064, 32768), {"use_sliding_window": False}),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        "qwen2_moe", "Qwen2Moe", (2048, 5632, 24, 16, 16, 151936, 8192),
        {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        "qwen3_next", "Qwen3Next", (2048, 5120, 48, 16, 2, 151936, 262144),
        {"head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32, "linear_num_key_heads": 16},
    ),
    "google/gemma-7b": ("gemma", "Gemma", (3072, 24576, 28, 16, 16, 256000, 8192), {"head_dim": 256}),
    "google/gemma-2-9b": ("gemma2", "Gemma2", (3584, 14336, 42, 16, 8, 256000, 8192), {"head_dim": 256}),
    "google/gemma-3-1b-it": (
        "gemma3_text", "Gemma3", (1152, 6912, 26, 4, 1, 262144, 32768), {"head_dim": 256, "sliding_window": 512},
    ),
    "microsoft/Phi-3.5-mini-instruct": (
        "phi3", "Phi3", (3072, 8192, 32, 32, 32, 32064, 131072),
        {"sliding_window": 262144, "original_max_position_embeddings": 4096,
         "rope_scaling": {"type": "longrope", "short_factor": _LONG, "long_factor": _LONG}},
    ),
    "allenai/OLMo-2-1124-13B": ("olmo2", "Olmo2", (5120, 13824, 40, 40, 40, 100352, 4096), {}),
    "THUDM/GLM-4-9B-0414": ("glm4", "Glm4", (4096, 13696, 40, 32, 2, 151552, 32768), {"attention_bias": True}),
    "CohereForAI/c4ai-command-r-plus": ("cohere", "Cohere", (12288, 33792, 64, 96, 8, 256000, 131072), {"use_qk_norm": True}),
    "ibm-granite/granite-3.3-8b-instruct": (
        "granite", "Granite", (4096, 12800, 40, 32, 8, 49159, 131072), {"tie_word_embeddings": True},
    ),
    "bigcode/starcoder2-7b": (
        "starcoder2", "Starcoder2", (4608, 18432, 32, 36, 4, 49152, 16384), {"use_bias": True, "sliding_window": 4096},
    ),
    "EleutherAI/gpt-neox-20b": ("gpt_neox", "GPTNeoX", (6144, 24576, 44, 64, None, 50432, 2048), {}),
    "tiiuae/falcon-7b": (
        "falcon", "Falcon", (4544, None, 32, 71, None, 65024, 2048),
        {"multi_query": True, "parallel_attn": True, "bias": False},
    ),
    "tiiuae/falcon-40b": (
        "falcon", "Falcon", (8192, None, 60, 128, None, 65024, 2048), {"num_kv_heads": 8, "new_decoder_architecture": True},
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        "deepseek_v2", "DeepseekV2", (2048, 10944, 27, 16, 16, 102400, 163840),
        {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
         "n_group": 1, "topk_group": 1, "q_lora_rank": None},
    ),
    "meta-llama/Llama-4-Scout-17B-16E": (
        "llama4_text", "Llama4", (5120, 8192, 48, 40, 8, 202048, 131072),
        {**_LLAMA4, "num_local_experts": 16, "interleave_moe_layer_step": 1},
    ),
    "meta-llama/Llama-4-Maverick-17B-128E": (
        "llama4_text", "Llama4", (5120, 8192, 48, 40, 8, 202048, 131072),
        {**_LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2},
    ),
    "nvidia/Minitron-8B-Base": ("nemotron", "Nemotron", (4096, 16384, 32, 48, 8, 256000, 4096), {"head_dim": 128}),
    "HuggingFaceTB/SmolLM3-3B": (
        "smollm3", "SmolLM3", (2048, 11008, 36, 16, 4, 128256, 65536), {"tie_word_embeddings": True},
    ),
    "baidu/ERNIE-4.5-0.3B-PT": (
        "ernie4_5", "Ernie4_5", (1024, 3072, 18, 16, 2, 103424, 131072), {"head_dim": 128, "tie_word_embeddings": True},
    ),
    "allenai/Olmo-3-1125-32B": ("olmo3", "Olmo3", (5120, 27648, 64, 40, 8, 100278, 65536), {"sliding_window": 4096}),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        "seed_oss", "SeedOss", (5120, 27648, 64, 80, 8, 155136, 524288), {"head_dim": 128, "attention_bias": True},
    ),
    "THUDM/glm-4-9b-hf": ("glm", "Glm", (4096, 13696, 40, 32, 2, 151552, 131072), {"head_dim": 128, "attention_bias": True}),
    "Qwen/Qwen3.5-27B": (
        "qwen3_5_text", "Qwen3_5", (5120, 17408, 64, 24, 4, 248320, 262144),
        {"head_dim": 256, "linear_num_value_heads": 48, "linear_num_key_heads": 16},
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        "qwen3_5_moe_text", "Qwen3_5Moe", (2048, None, 40, 16, 2, 248320, 262144),
        {"head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32, "linear_num_key_heads": 16},
    ),
    "zai-org/GLM-4.7-Flash": (
        "glm4_moe_lite", "Glm4MoeLite", (2048, 10240, 47, 20, 20, 154880, 202752),
        {"moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4},
    ),
    "zai-org/GLM-5": (
        "glm_moe_dsa", "GlmMoeDsa", (6144, 12288, 78, 64, 64, 154880, 202752),
        {"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8},
    ),
    "google/gemma-4-E4B": (
        "gemma4_text", "Gemma4", (2560, 10240, 42, 8, 2, 262144, 131072),
        {"head_dim": 256, "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256, "sliding_window": 512},
    ),
}  # fmt: skip
"""By name: the model type, its class without ForCausalLM, the values of :data:`_KEYS` (None: it has no such key), and more."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: dict(find_model(name).architecture) for name in known_models() if "/" in name},
    **{
        name: {
            "model_type": kind,
            "architectures": [f"{top}ForCausalLM"],
            **{key: value for key, value in zip(_KEYS, shape, strict=True) if value is not None},
            **more,
        }
        for name, (kind, top, shape, more) in _SHAPES.items()
    },
    "openai-community/gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
    },
}  # fmt: skip
