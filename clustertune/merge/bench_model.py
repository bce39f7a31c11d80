"""A Llama of random weights and an adapter for it, of any size, written in blocks: the input of the merge benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clustertune.merge.base import INDEX
from clustertune.merge.lora import CONFIG, WEIGHTS
from clustertune.merge.shards import plan_shards
from clustertune.tensorfile import Tensor, byte_size

_HIDDEN, _INTER, _VOCAB, _HEADS = 2048, 5632, 32000, 16
_BLOCK = 4 << 20


def _tensor(name: str, *shape: int, dtype: str = "BF16") -> Tensor:
    return Tensor(name, dtype, shape, Path(), 0, byte_size(dtype, shape))


def _layer(number: int) -> list[Tensor]:
    p = f"model.layers.{number}"
    attention = [_tensor(f"{p}.self_attn.{m}_proj.weight", _HIDDEN, _HIDDEN) for m in "qkvo"]
    mlp = [_tensor(f"{p}.mlp.{m}_proj.weight", _INTER, _HIDDEN) for m in ("gate", "up")]
    norms = [_tensor(f"{p}.{m}_layernorm.weight", _HIDDEN) for m in ("input", "post_attention")]
    return [*attention, *mlp, _tensor(f"{p}.mlp.down_proj.weight", _HIDDEN, _INTER), *norms]


def _write(path: Path, header: bytes, tensors: list[Tensor], scale: float) -> None:
    import torch

    with path.open("wb") as out:
        out.write(header)
        for tensor in tensors:
            for start in range(0, tensor.size, _BLOCK):
                count = min(_BLOCK, tensor.size - start) // 2
                out.write(memoryview((torch.randn(count) * scale).bfloat16().view(torch.uint8).numpy()))


def make_base(folder: Path, gb: float, shard_size: int) -> int:
    """Write a Llama of about ``gb`` (1e9 bytes) of bfloat16 in files of ``shard_size`` bytes. Returns its layers."""
    import torch

    torch.manual_seed(0)
    ends = [_tensor("model.embed_tokens.weight", _VOCAB, _HIDDEN), _tensor("lm_head.weight", _VOCAB, _HIDDEN)]
    ends.append(_tensor("model.norm.weight", _HIDDEN))
    layers = max(1, round((gb * 1e9 - sum(t.size for t in ends)) / sum(t.size for t in _layer(0))))
    tensors = sorted([*ends, *(t for n in range(layers) for t in _layer(n))], key=lambda t: t.name)
    folder.mkdir(parents=True)
    shards = plan_shards(tensors, shard_size)
    for shard in shards:
        _write(folder / shard.name, shard.header, shard.tensors, 0.02)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTER,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "vocab_size": _VOCAB,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) > 1:
        weights = {t.name: s.name for s in shards for t in s.tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return layers


def make_adapter(folder: Path, layers: int, rank: int) -> None:
    """Write a LoRA of ``rank`` on q, k, v and o of every layer."""
    tensors = []
    for number in range(layers):
        for m in "qkvo":
            key = f"base_model.model.model.layers.{number}.self_attn.{m}_proj"
            tensors += [_tensor(f"{key}.lora_A.weight", rank, _HIDDEN), _tensor(f"{key}.lora_B.weight", _HIDDEN, rank)]
    folder.mkdir(parents=True)
    (shard,) = plan_shards(tensors, 1 << 60)
    _write(folder / WEIGHTS, shard.header, shard.tensors, 0.02)
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    config["target_modules"] = [f"{m}_proj" for m in "qkvo"]
    (folder / CONFIG).write_text(json.dumps(config))
