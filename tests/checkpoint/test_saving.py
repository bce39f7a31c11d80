"""The state of a checkpoint in one process: each byte hashed once, a copy used again, a load compared with what was saved."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException

from clustertune import manifest
from clustertune.checkpoint import saving, shards, store
from clustertune.checkpoint.saving import NotFinite, RankState, StateWriter, WrittenCheckpoint
from clustertune.checkpoint.store import CheckpointStore
from tests.checkpoint.test_store import OneRank


def states(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model_0": {"model": {"a": torch.randn(40, 30), "b": torch.randn(7).bfloat16()}}, "other_0": {"o": {"lr": 0.5}}}


def parts(found: dict[str, Any]) -> list[torch.Tensor]:
    return list(found["model_0"]["model"].values())


def make(folder: Path) -> StateWriter:
    return StateWriter(CheckpointStore(folder, 1, None, OneRank(), str), OneRank(), None)


def save(folder: Path, found: dict[str, Any], **more: Any) -> WrittenCheckpoint:
    return make(folder).start(2, RankState(found, parts(found), 1, **more), {"step": 2}).result()


def test_each_file_is_hashed_on_its_way_and_the_checkpoint_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "hash_file", lambda *_: pytest.fail("a file was read"))
        written = save(tmp_path, states(), small={"trainer_state.json": b"{}"})
    made = manifest.read_manifest(tmp_path / "step-000002", "checkpoint")
    assert store.verify(tmp_path / "step-000002") == [] and len(made.files) == 5
    assert written.bytes == sum(record.size for record in made.files.values())
    assert made.meta["state_digests"] == [saving.digest(parts(states()))]
    for name, record in made.files.items():
        assert record.algorithm == (manifest.XXH3_128 if name.endswith(".distcp") else manifest.SHA256)


def test_the_shards_are_safetensors_and_hold_no_pickle(tmp_path: Path) -> None:
    found = states()
    save(tmp_path, found)
    stored = load_file(tmp_path / "step-000002" / "model_0" / "__0_0.distcp")
    assert all(torch.equal(stored[f"model.{name}"], value) for name, value in found["model_0"]["model"].items())
    assert load_file(tmp_path / "step-000002" / "other_0" / "__0_0.distcp")["o.lr"].numpy().tobytes() == b"0.5"


def test_the_saving_thread_works_on_its_ranks_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the CUDA runtime begins on device 0. torch's own stream context ends on the device where it began: all ranks
    would make a context on the node's first GPU."""
    here, selected = threading.local(), []

    def select(device: int) -> None:
        selected.append(device)
        here.device = device

    def current() -> int:
        return getattr(here, "device", 0)

    def stream(device: int) -> Any:
        return SimpleNamespace(stream_id=7, device_index=device, device_type=1, device=torch.device("cuda", device))

    cuda = {
        "is_available": lambda: True, "_lazy_init": lambda: None, "set_device": select, "current_device": current,
        "_get_device_index": lambda device, *_, **__: current() if device is None else torch.device(device).index,
        "current_stream": lambda device=None: stream(current() if device is None else torch.device(device).index),
        "Stream": lambda: stream(current()),
    }  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_setStream", lambda stream_id, device_index, device_type: select(device_index), raising=False
    )
    exchange = lambda device: 0  # noqa: E731 - makes no context
    for place, name in ((torch.cuda, "_exchange_device"), (torch.cuda, "_maybe_exchange_device")):
        monkeypatch.setattr(place, name, exchange)
    monkeypatch.setattr(StateWriter, "_new_stager", lambda _: None)
    select(3)
    selected.clear()
    made = make(tmp_path)

    def copy() -> None:
        with torch.cuda.stream(made._stream):
            pass

    made._pool.submit(copy).result()
    assert selected and set(selected) == {3}


def test_parameters_that_are_not_finite_make_no_checkpoint(tmp_path: Path) -> None:
    found = states()
    parts(found)[0][3, 4] = math.inf
    with pytest.raises(NotFinite, match=r"\[0\]"):
        save(tmp_path, found)
    assert store.newest_whole(tmp_path)[0] is None


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """All kinds of values."""
    values = dict(enumerate([None, True, 3, 0.1, 1e300, math.inf, "text", [0.9, 0.999], []]))
    tensors = [torch.randn(3, 5, 2).to(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn)]
    tensors += [torch.tensor(7), torch.tensor([True, False]), torch.empty(0, 4), torch.arange(5, dtype=torch.uint8)]
    state = {
        "values": {f"v{at}": one for at, one in values.items()},
        "tensors": {f"t{at}": one for at, one in enumerate(tensors)},
    }
    dcp.save(state, storage_writer=shards.ShardWriter(tmp_path), planner=shards.Planner(), no_dist=True)
    empty = {at: torch.zeros_like(one) for at, one in state["tensors"].items()}
    read = {"values": dict.fromkeys(state["values"]), "tensors": empty}
    shards.load(read, tmp_path)
    assert read["values"] == state["values"]
    assert all(one.float().equal(other.float()) for one, other in zip(read["tensors"].values(), tensors, strict=True))


def test_a_state_that_was_not_loaded_is_not_what_was_saved(tmp_path: Path) -> None:
    writer, found = make(tmp_path), states()
    save(tmp_path, found)
    assert writer.equals(tmp_path / "step-000002", found)
    parts(found)[0][3, 4] += 1
    assert not writer.equals(tmp_path / "step-000002", found)
    file = tmp_path / "step-000002/model_0/__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointException, match="cut short"):
        writer.equals(tmp_path / "step-000002", found)


@pytest.mark.parametrize(
    ("free", "limit", "fits"), [(10e9, None, True), (2e9, None, False), (10e9, 2e9, False), (None, None, False)]
)
def test_a_copy_needs_room_for_all_ranks_of_a_node(
    free: float | None, limit: float | None, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of 1 GB each. What is unknown is not assumed to be there."""
    monkeypatch.setattr(saving, "memory", lambda _: {"memory_available_bytes": free, "memory_limit_bytes": limit})
    writer = make(tmp_path)
    assert (writer.room_for(10**9, 2) is None) is fits
    writer.copied_bytes = 10**9
    assert writer.room_for(10**9, 2) is None, "it is there already"


def test_a_copy_has_the_values_of_its_own_save_and_keeps_its_memory(tmp_path: Path) -> None:
    """Copied once where two name it. A learning rate is no tensor; a list may grow; what lies elsewhere is copied there."""
    writer, tensor = make(tmp_path), torch.ones(3)
    given: dict[str, Any] = {"optimizer_0": {"o": {"lr": 0.5, "steps": [1], "m": tensor, "view": tensor[1:]}}}
    first, kept = writer.copy(given, [tensor])
    given["optimizer_0"]["o"] |= {"lr": 0.25, "steps": [1]}
    tensor += 1
    assert kept[0].tolist() == [1, 1, 1]
    second, held = writer.copy(given, [tensor])
    found = second["optimizer_0"]["o"]
    assert found["lr"] == 0.25 and first["optimizer_0"]["o"]["lr"] == 0.5
    assert found["m"].tolist() == [2, 2, 2] and found["view"].tolist() == [2, 2]
    assert held[0].data_ptr() == kept[0].data_ptr() == found["m"].data_ptr() != tensor.data_ptr()
    given["optimizer_0"]["o"] |= {"m": torch.full((3,), 7.0), "steps": [1, 2]}
    third, _ = writer.copy(given, [tensor])
    assert third["optimizer_0"]["o"]["m"].tolist() == [7, 7, 7] and third["optimizer_0"]["o"]["steps"] == [1, 2]
    assert third["optimizer_0"]["o"]["view"].tolist() == [2, 2]
    given["optimizer_0"]["o"] |= {"steps": [1, 2, 3]}  # nothing else moves
    assert writer.copy(given, [tensor])[0]["optimizer_0"]["o"]["steps"] == [1, 2, 3]
