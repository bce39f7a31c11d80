"""Weights of a large model without drawing each: whole, loadable, and the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.data import local_model

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2})],
)
def test_transformers_loads_them_whole(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """A missing key would be drawn again by each rank, and ranks would train different models."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES, **more)
    written = local_model.write_random_weights(config, tmp_path, 1, shard_bytes=100_000)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(found.values()), found
    assert written == sum(p.numel() for p in model.parameters()) and len(list(tmp_path.glob("*.safetensors"))) > 1
    assert model.config.architectures == [type(model).__name__]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    assert all(0.01 < float(p.detach().float().std()) < 0.03 for p in matrices), "normal, of the configuration's deviation"
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    assert not torch.equal(matrices[1].flatten()[:64], matrices[2].flatten()[:64]), "tensors begin at other places of the block"


def test_a_large_model_of_a_run_is_written_that_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that a benchmark of 8 billion parameters takes, on one that is called large: sealed, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from clustertune.data import local_model
    from clustertune.manifest import find_problems

    monkeypatch.setattr(local_model, "LARGE", 1000)
    architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
    seen: list[int] = []
    written = local_model.write_random_weights
    monkeypatch.setattr(local_model, "write_random_weights", lambda *given: seen.append(written(*given)) or seen[-1])
    out = local_model.make_local_model(architecture, ["some words to learn from"] * 20, tmp_path / "m", 1)
    assert seen == [139_584] and find_problems(out, local_model.KIND) == []
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.eos_token_id == tokenizer.eos_token_id and model.config.vocab_size == 512
