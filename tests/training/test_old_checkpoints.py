"""Checkpoints hold no pickle of ours, and those of earlier releases, which do, are continued to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from clustertune import manifest
from clustertune.checkpoint import restricted, store, values
from tests.training.benches import Bench, output_of

pytestmark = pytest.mark.timeout(900)


def age(checkpoint: Path) -> None:
    """Write a checkpoint as earlier releases did: torch's distributed checkpoints and ``torch.save``, SHA-256."""
    restricted.install()
    meta = manifest.read_manifest(checkpoint).meta
    for index in checkpoint.glob("*/.metadata"):
        state: dict[str, Any] = {}
        dcp.state_dict_loader._load_state_dict(
            state, dcp.FileSystemReader(index.parent), no_dist=True, planner=_EmptyStateDictLoadPlanner()
        )
        for file in index.parent.iterdir():
            file.unlink()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(index.parent), no_dist=True)
    for file in checkpoint.glob("*.safetensors"):
        name = file.stem
        if name in ("optimizer", "scheduler") or name.startswith("rng_state"):
            torch.save(values.load(checkpoint, name), checkpoint / (f"{name}.pth" if "rng" in name else f"{name}.pt"))
            file.unlink()
    (checkpoint / manifest.MANIFEST).unlink()
    manifest.seal(checkpoint, store.KIND, meta)


def tensors(checkpoint: Path) -> dict[str, str]:
    found = manifest.read_manifest(checkpoint)
    return {name: record.digest for name, record in found.files.items() if name.endswith(manifest.TENSORS)}


@pytest.mark.parametrize(
    "strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.jobs), pytest.param("fsdp1", marks=pytest.mark.jobs)]
)
def test_a_checkpoint_of_an_earlier_release_is_gone_on_from_to_the_same_bytes(strategy: str, bench: Bench) -> None:
    path = bench.make(strategy, "lora.lora_dropout=0.2")  # random numbers count
    assert bench.go(path) == [0, 0], output_of(path)
    second, third = path / "checkpoints" / "step-000002", path / "checkpoints" / "step-000003"
    for file in [*second.rglob("*"), *third.rglob("*")]:
        assert file.is_dir() or not file.read_bytes().startswith((b"PK", b"\x80")), f"{file} is a pickle"
    expected = tensors(third)
    assert {"scheduler.safetensors", "rng_state_0.safetensors", "rng_state_1.safetensors"} < set(expected)
    third.rename(path / "third")
    age(second)
    assert len(list(second.glob("*.pt"))) + len(list(second.glob("*.pth"))) == 3 + (strategy == "ddp")
    bench.end(path)
    assert tensors(path / "checkpoints" / "step-000003.a2") == expected
