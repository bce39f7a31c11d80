"""Published config.json files, cut to what makes the architecture, of every family that is counted."""

from __future__ import annotations

from typing import Any

from clustertune.config.models import find_model, known_models


def _model(
    kind: str, top: str, hidden: int, layers: int, heads: int, vocabulary: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "architectures": [top],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        **more,
    }


def _dense(kind: str, top: str, shape: tuple[int, int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    """Shape: hidden, intermediate, layers, heads, key-value heads, vocabulary, positions."""
    hidden, inner, layers, heads, groups, vocabulary, positions = shape
    more = {"intermediate_size": inner, "num_key_value_heads": groups, **more}
    return _model(kind, top, hidden, layers, heads, vocabulary, positions, **more)


def _llama(*shape: int, **more: Any) -> dict[str, Any]:
    return _dense("llama", "LlamaForCausalLM", shape, **more)  # type: ignore[arg-type]


def _qwen2(*shape: int, **more: Any) -> dict[str, Any]:
    return _dense("qwen2", "Qwen2ForCausalLM", shape, use_sliding_window=False, **more)  # type: ignore[arg-type]


def _qwen3(*shape: int, **more: Any) -> dict[str, Any]:
    return _dense("qwen3", "Qwen3ForCausalLM", shape, head_dim=128, **more)  # type: ignore[arg-type]


def _qwen3_moe(*shape: int, **more: Any) -> dict[str, Any]:
    more = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, **more}
    return _dense("qwen3_moe", "Qwen3MoeForCausalLM", shape, **more)  # type: ignore[arg-type]


def _deepseek(version: str, *shape: int, **more: Any) -> dict[str, Any]:
    more = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, **more}
    return _dense(f"deepseek_{version.lower()}", f"Deepseek{version}ForCausalLM", shape, **more)  # type: ignore[arg-type]


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    shape = (2880, 2880, layers, 64, 8, 201088, 131072)
    more = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128}
    return _dense("gpt_oss", "GptOssForCausalLM", shape, **more)


def _llama4(experts: int, step: int) -> dict[str, Any]:
    shape = (5120, 8192, 48, 40, 8, 202048, 131072)
    more = {"head_dim": 128, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "interleave_moe_layer_step": step}
    return _dense("llama4_text", "Llama4ForCausalLM", shape, num_local_experts=experts, **more)


def _neox(hidden: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return _model("gpt_neox", "GPTNeoXForCausalLM", hidden, layers, heads, vocabulary, 2048, intermediate_size=4 * hidden)


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    names = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **names}


_LONG = [1.0 + index / 8 for index in range(48)]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: dict(find_model(name).architecture) for name in known_models() if "/" in name},
    "meta-llama/Llama-2-7b-hf": _llama(4096, 11008, 32, 32, 32, 32000, 4096),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 14336, 32, 32, 8, 128256, 131072),
    "meta-llama/Llama-3.2-1B-Instruct": _llama(2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True),
    "meta-llama/Llama-3.1-405B": _llama(16384, 53248, 126, 128, 8, 128256, 131072),
    "mistralai/Mistral-7B-v0.1": _dense(
        "mistral", "MistralForCausalLM", (4096, 14336, 32, 32, 8, 32000, 32768), sliding_window=4096
    ),
    "mistralai/Mistral-7B-v0.3": _dense(
        "mistral", "MistralForCausalLM", (4096, 14336, 32, 32, 8, 32768, 32768), sliding_window=None
    ),
    "mistralai/Mixtral-8x7B-v0.1": _dense(
        "mixtral", "MixtralForCausalLM", (4096, 14336, 32, 32, 8, 32000, 32768), num_local_experts=8, num_experts_per_tok=2
    ),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen/Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-72B": _qwen2(8192, 29568, 80, 64, 8, 152064, 131072),
    "Qwen/Qwen1.5-MoE-A2.7B": _dense(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        (2048, 5632, 24, 16, 16, 151936, 8192),
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, 151936, 40960, tie_word_embeddings=True),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8, 151936, 40960),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, 64, 4, 151936, 40960, moe_intermediate_size=1536),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _dense(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (2048, 5120, 48, 16, 2, 151936, 262144),
        head_dim=256,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        linear_num_value_heads=32,
        linear_num_key_heads=16,
    ),
    "google/gemma-7b": _dense("gemma", "GemmaForCausalLM", (3072, 24576, 28, 16, 16, 256000, 8192), head_dim=256),
    "google/gemma-2-2b-it": _dense("gemma2", "Gemma2ForCausalLM", (2304, 9216, 26, 8, 4, 256000, 8192), head_dim=256),
    "google/gemma-2-9b": _dense("gemma2", "Gemma2ForCausalLM", (3584, 14336, 42, 16, 8, 256000, 8192), head_dim=256),
    "google/gemma-3-1b-it": _dense(
        "gemma3_text", "Gemma3ForCausalLM", (1152, 6912, 26, 4, 1, 262144, 32768), head_dim=256, sliding_window=512
    ),
    "microsoft/Phi-3.5-mini-instruct": _dense(
        "phi3",
        "Phi3ForCausalLM",
        (3072, 8192, 32, 32, 32, 32064, 131072),
        sliding_window=262144,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": _LONG, "long_factor": _LONG},
    ),
    "allenai/OLMo-2-1124-13B": _dense("olmo2", "Olmo2ForCausalLM", (5120, 13824, 40, 40, 40, 100352, 4096)),
    "THUDM/GLM-4-9B-0414": _dense("glm4", "Glm4ForCausalLM", (4096, 13696, 40, 32, 2, 151552, 32768), attention_bias=True),
    "CohereForAI/c4ai-command-r-v01": _dense("cohere", "CohereForCausalLM", (8192, 22528, 40, 64, 64, 256000, 131072)),
    "CohereForAI/c4ai-command-r-plus": _dense(
        "cohere", "CohereForCausalLM", (12288, 33792, 64, 96, 8, 256000, 131072), use_qk_norm=True
    ),
    "ibm-granite/granite-3.3-8b-instruct": _dense(
        "granite", "GraniteForCausalLM", (4096, 12800, 40, 32, 8, 49159, 131072), tie_word_embeddings=True
    ),
    "bigcode/starcoder2-7b": _dense(
        "starcoder2", "Starcoder2ForCausalLM", (4608, 18432, 32, 36, 4, 49152, 16384), use_bias=True, sliding_window=4096
    ),
    "EleutherAI/gpt-neox-20b": _neox(6144, 44, 64, 50432),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "tiiuae/falcon-7b": _model(
        "falcon", "FalconForCausalLM", 4544, 32, 71, 65024, 2048, multi_query=True, parallel_attn=True, bias=False
    ),
    "tiiuae/falcon-40b": _model(
        "falcon", "FalconForCausalLM", 8192, 60, 128, 65024, 2048, num_kv_heads=8, new_decoder_architecture=True
    ),
    "deepseek-ai/DeepSeek-V2-Lite": _deepseek(
        "V2",
        *(2048, 10944, 27, 16, 16, 102400, 163840),
        q_lora_rank=None,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "meta-llama/Llama-4-Scout-17B-16E": _llama4(16, 1),
    "meta-llama/Llama-4-Maverick-17B-128E": _llama4(128, 2),
    "nvidia/Minitron-8B-Base": _dense("nemotron", "NemotronForCausalLM", (4096, 16384, 32, 48, 8, 256000, 4096), head_dim=128),
    "HuggingFaceTB/SmolLM3-3B": _dense(
        "smollm3", "SmolLM3ForCausalLM", (2048, 11008, 36, 16, 4, 128256, 65536), tie_word_embeddings=True
    ),
    "baidu/ERNIE-4.5-0.3B-PT": _dense(
        "ernie4_5", "Ernie4_5ForCausalLM", (1024, 3072, 18, 16, 2, 103424, 131072), head_dim=128, tie_word_embeddings=True
    ),
}
