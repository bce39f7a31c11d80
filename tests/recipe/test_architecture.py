"""model.json against transformers itself: classes, keys, module names, counts, and scaled-down models that really build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.recipe.architecture import find_problems
from clustertune.resolve.resolve import resolve

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_rope_scaling_shrinks_with_the_positions() -> None:
    small = resolve("llama405b-oasst2", tiny=True).architecture
    assert small["rope_parameters"]["original_max_position_embeddings"] == 8192 * 2048 // 131072
    assert small["rope_parameters"]["factor"] == 8.0
    assert small["num_attention_heads"] // small["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"model_type": "lama"}, "model_type", "llama"), ({"model_type": None}, "model_type", "missing"),
        ({"model_type": 3}, "model_type", "not a model type"), ({"hiden_size": 4}, "hiden_size", "did you mean hidden_size"),
        ({"hidden_size": None}, "hidden_size", "whole number"), ({"hidden_size": "256"}, "hidden_size", "whole number"),
        ({"hidden_size": 250}, "hidden_size", "not a multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads", "not a multiple"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "whole number"),
        ({"num_hidden_layers": 100_000_000}, "num_hidden_layers", "from 1 to 10,000"),
        ({"vocab_size": 10**12}, "vocab_size", "whole number"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures", "LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures", "LlamaForCausalLM"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or"),
        ({"rope_parameters": [1]}, "rope_parameters", "rope_type"),
        ({"auto_map": {"AutoModel": "x.y"}}, "auto_map", "never run"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "unquantized"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_model_json(change: dict[str, Any], key: str, says: str) -> None:
    found = {problem.key: str(problem) for problem in find_problems(LLAMA | change, "model.json")}
    assert key in found, found
    assert says in found[key]


def test_a_published_config_json_is_accepted(tmp_path: Path) -> None:
    """The keys as transformers saves them, with those that it adds."""
    from transformers import LlamaConfig

    LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"}).save_pretrained(tmp_path)
    body = json.loads((tmp_path / "config.json").read_text())
    assert find_problems(body, "config.json") == []
