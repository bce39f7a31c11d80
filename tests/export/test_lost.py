"""Shards that were not gathered: an adapter with the rows of one rank alone is no adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.errors import UserError
from clustertune.export.export import export
from tests.export.conftest import LORA, Maker, make_tensors


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("last", [True, False], ids=["last rank", "first rank"])
@pytest.mark.parametrize("more", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 8}}], ids=["", "rslora", "ranks"])
def test_a_lost_shard_is_refused(
    make_checkpoint: Maker, tmp_path: Path, part: str, axis: int, last: bool, more: dict[str, object]
) -> None:
    lora = LORA | more
    tensors = make_tensors(lora)
    name = next(name for name in tensors if part in name)
    half = tensors[name].shape[axis] // 2
    tensors[name].narrow(axis, half if last else 0, half).zero_()
    with pytest.raises(UserError, match="shard") as caught:
        export(make_checkpoint(tensors, lora=lora), tmp_path / "out")
    assert name.removeprefix("model.") in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_neuron_that_learnt_nothing_is_no_lost_shard(make_checkpoint: Maker, tmp_path: Path) -> None:
    tensors = make_tensors()
    next(tensor for name, tensor in tensors.items() if "lora_B" in name)[3].zero_()
    export(make_checkpoint(tensors), tmp_path / "out")
