"""The output's files, and sizes as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.merge.pieces import parse_size, plan_shards
from clustertune.tensorfile import Tensor


def test_wide_types_come_first_so_that_every_tensor_is_aligned() -> None:
    sizes = {"a": ("U8", 3, 3), "b": ("F32", 2, 8), "c": ("BF16", 1, 2)}
    mixed = [Tensor(name, dtype, (count,), Path(), 0, size) for name, (dtype, count, size) in sizes.items()]
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
