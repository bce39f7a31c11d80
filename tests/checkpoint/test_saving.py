"""The state of a checkpoint in one process: each byte hashed once, a copy used again, a load compared with what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clustertune import manifest
from clustertune.checkpoint import saving
from clustertune.checkpoint.saving import StateWriter


def states(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model_0": {"model": {"a": torch.randn(40, 30), "b": torch.randn(7).bfloat16()}}, "other_0": {"o": {"lr": 0.5}}}


def parts(found: dict[str, Any]) -> list[torch.Tensor]:
    return list(found["model_0"]["model"].values())


def test_the_digest_of_each_file_is_known_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = states()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "hash_file", lambda *_: pytest.fail("a file was read"))
        written = StateWriter().start(tmp_path, found, lambda: "digest", lambda: manifest.list_files(tmp_path)).result()
    assert set(written.records) == set(manifest.list_files(tmp_path)) and len(written.records) == 4
    assert written.records == manifest.record_files(tmp_path, written.records) and written.digest == "digest"


def test_a_copy_keeps_its_values_and_its_memory() -> None:
    writer, found = StateWriter(), states()
    copied, held = writer.copy(found, parts(found))
    before = [part.clone() for part in parts(found)]
    for part in parts(found):
        part.zero_()
    assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))
    places = [part.data_ptr() for part in held]
    assert places == [part.data_ptr() for part in parts(dict(copied))], "one copy of what both name"
    _, again = writer.copy(found, parts(found))
    assert [part.data_ptr() for part in again] == places and not any(part.any() for part in again)


def test_a_state_that_was_not_loaded_is_not_what_was_saved(tmp_path: Path) -> None:
    writer, found = StateWriter(), states()
    writer.start(tmp_path, found, str, list).result()
    assert writer.equals(tmp_path, found)
    parts(found)[0][3, 4] += 1
    assert not writer.equals(tmp_path, found)


@pytest.mark.parametrize(
    ("free", "limit", "fits"), [(10e9, None, True), (2e9, None, False), (10e9, 2e9, False), (None, None, False)]
)
def test_a_copy_needs_room_for_all_ranks_of_a_node(
    free: float | None, limit: float | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of 1 GB each. What is unknown is not assumed to be there."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(saving, "memory", lambda _: {"memory_available_bytes": free, "memory_limit_bytes": limit})
    writer = StateWriter()
    assert (writer.room_for(10**9) is None) is fits
    writer.copied_bytes = 10**9  # it is there already
    assert (writer.room_for(10**9) is None) is (free is not None)
