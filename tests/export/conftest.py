"""Checkpoints to export: real ones of two gloo ranks, and synthetic ones with any tensors in them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from clustertune.checkpoint.shards import Planner, ShardWriter
from clustertune.export.export import build_expected
from clustertune.manifest import MANIFEST, seal
from clustertune.recipe.native_rules import lora_defaults
from clustertune.resolve.resolve import resolve
from tests.command import REPO, warm
from tests.conftest import once

ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
    "tie_word_embeddings": False,
}  # fmt: skip
LORA = lora_defaults() | {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LORA["task_type"] = "CAUSAL_LM"

Maker = Callable[..., Path]


def write_recipe(
    checkpoint: Path,
    lora: Mapping[str, Any] | None,
    architecture: Mapping[str, Any] = ARCHITECTURE,
    revision: str | None = "0" * 40,
    train: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> None:
    """The ``recipe.json`` that the training writes into a checkpoint."""
    body = resolve("tiny-oasst2", ["train.bf16=true"]).as_dict()
    body["recipe"]["model"] |= {"name": "example/tiny", "revision": revision}
    body |= {"name": "tiny", "architecture": architecture, "lora": lora, "train_args": body["train_args"] | train, **changes}
    (checkpoint / "recipe.json").write_text(json.dumps(body))


def seal_checkpoint(checkpoint: Path, step: int = 2) -> Path:
    """Trainer state and manifest, again."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    seal(checkpoint, "checkpoint", {"step": step, "world_size": 2})
    return checkpoint


def save_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A distributed checkpoint with exactly these keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder.parent.mkdir(parents=True, exist_ok=True)
        dcp.save(dict(tensors), storage_writer=ShardWriter(folder), planner=Planner(), no_dist=True)


def make_tensors(lora: Mapping[str, Any] = LORA, seed: int = 0) -> dict[str, torch.Tensor]:
    """The checkpoint keys and tensors of a trained adapter, random."""
    generator = torch.Generator().manual_seed(seed)
    expected = build_expected(ARCHITECTURE, lora, "example/tiny", None)
    return {f"model.{name}": torch.randn(shape, generator=generator) for name, shape in expected.tensors.items()}


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Maker:
    """``make_checkpoint(tensors, name=..., step=..., lora=...)`` gives a sealed checkpoint folder."""

    def make(
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        name: str = "step-000002",
        step: int = 2,
        lora: Mapping[str, Any] | None = LORA,
    ) -> Path:
        checkpoint = tmp_path / name
        tensors = make_tensors() if tensors is None else tensors
        save_shards(checkpoint / "pytorch_model_fsdp_0", tensors)
        write_recipe(checkpoint, lora)
        return seal_checkpoint(checkpoint, step)

    return make


@pytest.fixture(scope="session")
def real_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What :mod:`tests.export.processes` leaves. Read only."""

    def make(out: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore"}
        with (
            (out / "said").open("wb") as said,
            warm(stack=True).start(
                ["tests.export.processes", str(out)], REPO, said.fileno(), said.fileno(), environment
            ) as answer,
        ):
            answer.settimeout(240)
            assert answer.recv(64) == b"0", (out / "said").read_text()[-3000:]

    return once(tmp_path_factory, "shards", make)


@pytest.fixture
def real_checkpoint(real_shards: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A sealed copy of one of the real cases."""

    def copy(case: str) -> Path:
        checkpoint = tmp_path / case / "step-000002"
        shutil.copytree(real_shards / case, checkpoint)
        if case == "ddp":
            (checkpoint / "adapter_config.json").unlink()
            (checkpoint / "README.md").unlink()
        write_recipe(checkpoint, LORA | {"modules_to_save": ["lm_head"]} if case.endswith("-head") else LORA)
        return seal_checkpoint(checkpoint)

    return copy
