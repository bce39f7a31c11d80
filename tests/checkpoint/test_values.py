"""The small states of a checkpoint: as they were, without a pickle, and from the files of earlier releases."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from clustertune.checkpoint import shards
from clustertune.errors import UserError
from clustertune.manifest import XXH3_128, hash_file

OPTIMIZER: dict[str, Any] = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 5)}, 7: {"exp_avg": torch.randn(4).bfloat16()}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "nan": math.inf, "params": [0, 7]}],
}
RANDOM: dict[str, Any] = {
    "python": random.Random(3).getstate(),
    "numpy": np.random.RandomState(3).get_state(),
    "cpu": torch.get_rng_state(),
    "cuda": [torch.arange(16, dtype=torch.uint8)],
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("value", [OPTIMIZER, RANDOM, {}, None, {"last_epoch": 3, "_last_lr": [1e-300], "lr_lambdas": [None]}])
def test_a_state_comes_back_as_it_was(value: Any, tmp_path: Path) -> None:
    records = shards.save_small(tmp_path, "scheduler", value)
    assert same(value, shards.load_small(tmp_path, "scheduler"))
    file = tmp_path / "scheduler.safetensors"
    assert records == {"scheduler.safetensors": hash_file(file, XXH3_128)}
    with safe_open(file, "pt") as opened:  # any reader of safetensors opens it
        assert opened.metadata()


@pytest.mark.parametrize("value", [{1, 2}, [object()], {"a": b"bytes"}, {"a": torch.zeros(2, dtype=torch.complex128)}])
def test_what_would_not_come_back_is_not_saved(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        shards.save_small(tmp_path, "scheduler", value)


@pytest.mark.parametrize(
    "shape", [["set", []], ["tensor", 5], ["tensor"], ["tensor", "0"], ["dict", [[1]]], ["dict", [[["list", []], 1]]], "{"]
)
def test_a_file_that_holds_no_state_is_refused(shape: Any, tmp_path: Path) -> None:
    shards.save_small(tmp_path, "scheduler", [torch.zeros(2)])
    file = tmp_path / "scheduler.safetensors"
    text = '["list",[["tensor",0]]]'
    data = file.read_bytes()
    before, after = (json.dumps(one) for one in (text, shape if isinstance(shape, str) else json.dumps(shape)))
    assert data.count(before.encode()) == 1
    length = int.from_bytes(data[:8], "little") + len(after) - len(before)
    file.write_bytes(length.to_bytes(8, "little") + data[8:].replace(before.encode(), after.encode()))
    with pytest.raises(UserError, match="contains no state of a training"):
        shards.load_small(tmp_path, "scheduler")
