"""A small Llama in several dtypes and files, adapters of many kinds made by PEFT, and PEFT's own merge to compare with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SHAPES: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
}
"""Odd on purpose: rows that no block size divides."""


def save_llama(folder: Path, dtype: torch.dtype, shard_size: str = "60KB", **changes: Any) -> Path:
    """A random Llama with some negative zeros in it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPES, "tie_word_embeddings": False, **changes})).to(dtype)
    for parameter in model.parameters():
        parameter.data.view(-1)[::7] *= -0.0
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("base")
    return folder


def save_adapter(folder: Path, base: Path, dtype: torch.dtype = torch.float32, seed: int = 5, **settings: Any) -> Path:
    """An adapter that PEFT makes and saves, all its tensors random and of ``dtype``."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 8, "lora_alpha": 20, "target_modules": ["q_proj", "down_proj"], **settings})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = (torch.randn(parameter.shape) * 0.1).to(dtype)
    model.save_pretrained(folder)
    return folder


def peft_merged(base: Path, adapter: Path, **how: Any) -> dict[str, torch.Tensor]:
    """The tensors of PEFT's own merge."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return dict(model.merge_and_unload(**how).state_dict())


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model folder, by the safetensors library."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, negative zeros and dtype included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 by name of all files, the manifest too."""
    from clustertune.manifest import hash_file

    return {p.relative_to(folder).as_posix(): hash_file(p).sha256 for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """A test may set them; the next one starts afresh."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 base in several files. Read only."""
    return save_llama(tmp_path_factory.mktemp("merge") / "base", torch.bfloat16)


@pytest.fixture(scope="session")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain adapter for ``base``. Read only."""
    return save_adapter(tmp_path_factory.mktemp("merge") / "adapter", base)


@pytest.fixture
def own_base(base: Path, tmp_path: Path) -> Path:
    """A copy of ``base`` to spoil."""
    return shutil.copytree(base, tmp_path / "own-base")


@pytest.fixture
def own_adapter(adapter: Path, tmp_path: Path) -> Path:
    """A copy of ``adapter`` to spoil."""
    return shutil.copytree(adapter, tmp_path / "own-adapter")


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
