"""A base model without bytes: sparse safetensors files of the real sizes, with real headers."""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def write(folder: Path, architecture: Mapping[str, Any]) -> int:
    """Write config and weights of an architecture into ``folder``; returns the parameters. 812 GB of a 405B take no room."""
    folder.mkdir()
    keys = {key: value for key, value in architecture.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(architecture["model_type"], **keys)
    config.architectures = architecture["architectures"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for tied in getattr(model, "_tied_weights_keys", None) or () if config.tie_word_embeddings else ():
        shapes.pop(tied, None)
    files: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        files[name.split(".")[2] if ".layers." in name else "ends"][name] = shape
    index: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(files.values()):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        size += _sparse(path, tensors)
        index |= dict.fromkeys(tensors, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
    return sum(parameter.numel() for parameter in model.parameters())


def _sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """One file of bfloat16 tensors; returns their bytes."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)
    return at
