"""Random weights of any size, written shard by shard: what a benchmark of a large architecture trains without any download.

Nothing is held but one shard. The values come from one block of normal numbers, laid over the tensors again and again at
other places: drawing each of 8 billion numbers takes a CPU minutes, and for speed and memory they do not matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = (1 << 22) + 9
"""Numbers of the block: odd, so that rows of a matrix do not repeat."""
SHARD_BYTES = 2_000_000_000
STD = 0.02
"""Where the configuration has no ``initializer_range``."""
INDEX = "model.safetensors.index.json"


def write(config: Any, out: Path, seed: int, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write bf16 weights for a transformers ``config`` to ``out``: safetensors, their index, and the configuration.

    Matrices are normal with the configuration's deviation, norms 1, biases 0. Returns the number of parameters. Raises
    OSError.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if getattr(config, "tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    deviation = float(getattr(config, "initializer_range", None) or STD)
    block = (torch.randn(BLOCK, generator=generator) * deviation).to(torch.bfloat16)
    shards = list(_split(shapes, shard_bytes))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = ["model.safetensors"] if len(shards) == 1 else names
    for name, keys in zip(names, shards, strict=True):
        save_file({key: _fill(key, shapes[key], block) for key in keys}, out / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        total = sum(2 * math.prod(shape) for shape in shapes.values())
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}) + "\n")
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(out)
    return sum(math.prod(shape) for shape in shapes.values())


def _split(shapes: dict[str, tuple[int, ...]], limit: int) -> Iterator[list[str]]:
    """Names of each shard, in the model's order."""
    keys: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if keys and size + 2 * math.prod(shape) > limit:
            yield keys
            keys, size = [], 0
        keys.append(name)
        size += 2 * math.prod(shape)
    if keys:
        yield keys


def _fill(name: str, shape: tuple[int, ...], block: Any) -> Any:
    """One tensor."""
    import torch

    if len(shape) < 2:
        return torch.zeros(shape, dtype=torch.bfloat16) if name.endswith("bias") else torch.ones(shape, dtype=torch.bfloat16)
    made = torch.empty(math.prod(shape), dtype=torch.bfloat16)
    shift = sum(name.encode()) * 7919 % BLOCK
    position = 0
    while position < len(made):
        piece = block[shift : shift + len(made) - position]
        made[position : position + len(piece)] = piece
        position, shift = position + len(piece), 0
    return made.view(shape)
