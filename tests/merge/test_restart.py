"""Interrupted anywhere, the output is whole or absent, and the same command makes the very same files."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.errors import ExitCode, UserError
from clustertune.merge import merge, streaming
from clustertune.merge.pieces import Output
from clustertune.merge.streaming import locked, staging_folder
from tests.faults import CALLS, Crash, fault_at, sweep
from tests.merge.conftest import file_hashes, save_adapter

SIZE, COARSE = "60KB", "150KB"


@pytest.fixture(scope="module")
def reference(base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a merge that nothing disturbed."""
    out = tmp_path_factory.mktemp("reference") / "out"
    merge(base, adapter, out, shard_size=SIZE)
    return file_hashes(out)


def whole_or_absent(out: Path) -> bool:
    """Whole by its manifest, or without one. Then nobody can load part of it: there is no config, or all weights are there."""
    if (out / "MANIFEST.json").exists():
        assert manifest.find_problems(out, "merged") == []
        return True
    if (out / "config.json").exists():
        weights = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        assert all((out / name).exists() for name in weights.values())
    staging = staging_folder(out)
    assert not (staging / "config.json").exists()
    return False


@pytest.mark.parametrize("killed", [True, False])
def test_a_kill_or_a_full_disk_at_any_step(base: Path, adapter: Path, tmp_path: Path, killed: bool) -> None:
    """Each flush and each change of a name is once the last thing that happens, or is refused (exit 73): the same command ends
    with the very same files."""

    def work(number: int) -> dict[str, Any]:
        return merge(base, adapter, tmp_path / str(number) / "out", shard_size=COARSE, workers=1)

    work(0)
    reference, number = file_hashes(tmp_path / "0" / "out"), 0
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for number in sweep(work) if killed else sweep(work, full, (*CALLS, "pwrite")):
        out = tmp_path / str(number) / "out"
        whole = whole_or_absent(out)
        assert work(number)["state"] == ("already merged" if whole else "merged"), number
        assert file_hashes(out) == reference, number
        assert [p.name for p in out.parent.iterdir()] == ["out"], number
        shutil.rmtree(out.parent)
    assert number > 30


def test_a_kill_of_the_continuation(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    """One step further each time, on the same output: every run is the continuation of a killed one."""
    out, runs = tmp_path / "out", 0
    for number in itertools.count(3, 3):
        try:
            with fault_at(number):
                merge(base, adapter, out, shard_size=SIZE, workers=1)
            break
        except Crash:
            whole_or_absent(out)
            runs += 1
    assert runs > 4
    assert file_hashes(out) == reference


def interrupt(base: Path, adapter: Path, out: Path, after: int) -> list[str]:
    """Let so many shards be written, then crash."""
    written: list[str] = []

    def make(path: Path, size: int) -> Output:
        if len(written) == after:
            raise Crash
        written.append(path.name)
        return Output(path, size)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(streaming, "Output", make)
        merge(base, adapter, out, shard_size=SIZE, workers=1)
    return written


SPOILT: dict[str, tuple[int, Callable[[Path, str], object]]] = {
    "nothing": (4, lambda staging, first: None),
    "the journal is torn": (3, lambda staging, first: cut(staging / "journal.jsonl", -1)),
    "an entry is torn": (3, lambda staging, first: cut(staging / "journal.jsonl", -20)),
    "the journal is zeros": (0, lambda staging, first: (staging / "journal.jsonl").write_bytes(b"\0" * 300)),
    "the journal is another's": (0, lambda staging, first: (staging / "journal.jsonl").write_bytes(b'{"inputs": 3}\n')),
    "the journal leaves the folder": (
        0,
        lambda staging, first: (staging / "journal.jsonl").write_bytes(b'{"shard": "../../x", "size": 1}\n'),
    ),
    "a shard is flipped": (3, lambda staging, first: flip(staging / first)),
    "a shard is cut": (3, lambda staging, first: cut(staging / first, -8)),
}


@pytest.mark.parametrize("what", SPOILT)
def test_goes_on_with_the_shards_that_are_whole(
    base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str], what: str
) -> None:
    """Of four, those that the journal names and whose content is what was written."""
    out, (kept, spoil) = tmp_path / "out", SPOILT[what]
    first, *_ = interrupt(base, adapter, out, 4)
    assert not out.exists()
    spoil(staging_folder(out), first)
    done = merge(base, adapter, out, shard_size=SIZE)
    assert (done["reused_shards"], done["shards"]) == (kept, sum(name.endswith(".safetensors") for name in reference))
    assert file_hashes(out) == reference


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_an_unfinished_file_is_not_counted_twice(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed merge has taken the room of a whole file: that room is free again for the next one."""
    out, whole = tmp_path / "out", streaming.prepare(base, adapter, tmp_path / "out", SIZE).missing_bytes()
    interrupt(base, adapter, out, 0)
    (staging_folder(out) / "model-00001-of-00006.safetensors.part").write_bytes(bytes(40_960))
    monkeypatch.setattr(streaming, "free_bytes", lambda _: whole - 40_960)
    assert merge(base, adapter, out, shard_size=SIZE)["state"] == "merged"


def test_other_inputs_throw_the_staged_work_away(
    base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    interrupt(base, save_adapter(tmp_path / "other", base, seed=9), out, 3)
    assert merge(base, adapter, out, shard_size=SIZE)["reused_shards"] == 0
    assert "have changed since" in capsys.readouterr().err
    assert file_hashes(out) == reference


def test_other_inputs_during_the_publication(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    """Half of another merge's files are in the output already, without a manifest: they go, all of them."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clustertune.merge.streaming.seal", lambda *_: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash):
            merge(base, save_adapter(tmp_path / "other", base, seed=9), out, shard_size="30KB")
    assert len(list(out.glob("*.safetensors"))) > 8
    merge(base, adapter, out, shard_size=SIZE)
    assert file_hashes(out) == reference


def test_a_foreign_file_in_a_half_published_output_stops(base: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with fault_at(0) as seen:
        merge(base, adapter, tmp_path / "count", shard_size=SIZE, workers=1)
    with fault_at(len(seen) - 12), pytest.raises(Crash):
        merge(base, adapter, out, shard_size=SIZE, workers=1)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        merge(base, adapter, out, shard_size=SIZE)


def test_a_finished_output(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    """The same command does nothing, another one is refused; one that was damaged since is not called merged."""
    out = tmp_path / "out"
    merge(base, adapter, out, shard_size=SIZE)
    (out / "README.md").write_text("a note of the user's")
    assert merge(base, adapter, out, shard_size=SIZE)["state"] == "already merged"
    with pytest.raises(UserError, match="other inputs"):
        merge(base, adapter, out, shard_size="70KB")
    (out / "README.md").unlink()
    assert file_hashes(out) == reference
    flip(sorted(out.glob("*.safetensors"))[1])
    before = file_hashes(out)
    with pytest.raises(UserError, match="differs from the manifest"):
        merge(base, adapter, out, shard_size=SIZE)
    assert file_hashes(out) == before


@pytest.mark.parametrize("changed", ["base", "adapter"])
def test_an_input_that_changes_meanwhile(
    own_base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """The output could be a mixture: it is not published, and the next run starts over."""
    original = streaming.write_shards
    adapter = shutil.copytree(adapter, tmp_path / "own-adapter")

    def write_and_touch(*args: Any) -> None:
        original(*args)
        if changed == "base":
            os.utime(sorted(own_base.glob("*.safetensors"))[0], (1, 1))
        else:
            weights = adapter / "adapter_model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(streaming, "write_shards", write_and_touch)
    with pytest.raises(UserError, match="changed while") as caught:
        merge(own_base, adapter, tmp_path / "out", shard_size=SIZE)
    assert caught.value.code == ExitCode.AGAIN
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(streaming, "write_shards", original)
    assert merge(own_base, adapter, tmp_path / "out", shard_size=SIZE)["reused_shards"] == 0


def test_one_merge_at_a_time(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    out = tmp_path / "out"
    with locked(staging_folder(out)), pytest.raises(UserError, match=f"process {os.getpid()} on") as caught:
        merge(base, adapter, out, shard_size=SIZE)
    assert caught.value.code == ExitCode.AGAIN
    merge(base, adapter, out, shard_size=SIZE)
    assert file_hashes(out) == reference


def test_finished_by_another_between_plan_and_lock(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, str]
) -> None:
    out, original = tmp_path / "out", streaming.check_space

    def meanwhile(planned: Any) -> None:
        monkeypatch.setattr(streaming, "check_space", original)
        merge(base, adapter, out, shard_size=SIZE)

    monkeypatch.setattr(streaming, "check_space", meanwhile)
    assert merge(base, adapter, out, shard_size=SIZE)["state"] == "already merged"
    assert file_hashes(out) == reference
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
