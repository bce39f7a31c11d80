"""A run of a Megatron recipe on a small architecture, and the stand-ins of NVIDIA's modules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clustertune import manifest
from clustertune.data.prepare import FILES
from clustertune.export.export import build_expected
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from tests.megatron.standin import Loop, installed

SMALL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 4096,
}  # fmt: skip
WORDS = [
    "megatron.tensor_model_parallel_size=8", "megatron.pipeline_model_parallel_size=2", "train.save_steps=4",
    "train.eval_steps=5", "train.max_steps=10", "train.global_batch_size=4",
]  # fmt: skip


@pytest.fixture
def resolved(tmp_path: Path) -> Resolved:
    """The reference recipe with a Megatron section and a model of two layers."""
    base = tmp_path / "base"
    base.mkdir()
    return replace(resolve("llama405b-oasst2", WORDS), architecture=SMALL)


@pytest.fixture
def run(resolved: Resolved, tmp_path: Path) -> RunDir:
    """A run folder up to its first attempt, with the inputs of the ranks."""
    found = RunDir(tmp_path / "run")
    found.path.mkdir()
    found.run_json.write_text(json.dumps({"recipe": resolved.as_dict(), "fingerprint": resolved.fingerprint()}))
    found.data.mkdir()
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "source": {}})
    for name in FILES:
        (found.data / name).write_text(line + "\n" if name != "rejected.jsonl" else "")
    manifest.seal(found.data, "dataset", {})
    return found


@pytest.fixture
def loop(resolved: Resolved) -> Iterator[Loop]:
    """NVIDIA's loop, and an adapter as its export would write it."""
    assert resolved.lora is not None
    expected = build_expected(SMALL, resolved.lora, "m", None)
    adapter = {name: torch.ones(shape) for name, shape in expected.tensors.items()}
    with installed(Loop(adapter=adapter)) as found:
        yield found
