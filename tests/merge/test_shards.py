"""The output's files against ``huggingface_hub``'s own split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st

from clustertune.errors import UserError
from clustertune.merge.pieces import parse_size, plan_shards
from clustertune.tensorfile import Tensor


def fake(sizes: list[int]) -> list[Tensor]:
    return [Tensor(f"t{n}", "U8", (size,), Path(), 0, size) for n, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=25), st.integers(1, 100))
def test_same_files_as_the_hub(sizes: list[int], limit: int) -> None:
    state = {f"t{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(state, max_shard_size=limit)
    ours = plan_shards(fake(sizes), limit)
    assert {s.name: [t.name for t in s.tensors] for s in ours} == theirs.filename_to_tensors


def test_wide_types_come_first_so_that_every_tensor_is_aligned() -> None:
    mixed = [
        Tensor("a", "U8", (3,), Path(), 0, 3),
        Tensor("b", "F32", (2,), Path(), 0, 8),
        Tensor("c", "BF16", (1,), Path(), 0, 2),
    ]
    (shard,) = plan_shards(mixed, 1000)
    assert [t.name for t in shard.tensors] == ["b", "c", "a"]
    assert len(shard.header) % 8 == 0


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), (77, 77), ("2MiB", 2 << 20), ("10KB", 10_000)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5 apples", "0", 0, -1, "-5GB", "GB", "5GBGB", "1e9", "5XB"])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(UserError, match="not a size"):
        parse_size(text)
