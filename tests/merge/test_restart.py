"""Interrupted anywhere, the output is whole or absent, and the same command makes the very same files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.errors import ExitCode, UserError
from clustertune.merge import merge, streaming
from clustertune.merge.pieces import Output
from clustertune.merge.streaming import locked, staging_folder
from tests.merge.conftest import file_hashes, save_adapter

SIZE, COARSE = "60KB", "150KB"


class Crash(BaseException):
    """Stands for a kill: no handler of the program may act on it."""


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


@contextmanager
def crash_at(number: int) -> Iterator[dict[str, int]]:
    """Raise Crash instead of the ``number``-th system call that changes the disk's names or flushes."""
    seen = {"calls": 0}
    originals = {name: getattr(os, name) for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir")}

    def watch(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen["calls"] += 1
            if seen["calls"] >= number:  # a killed process makes no further call either
                raise Crash
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(os, name, watch(name))
    try:
        yield seen
    finally:
        for name, function in originals.items():
            setattr(os, name, function)


def test_a_kill_before_any_step(base: Path, adapter: Path, tmp_path: Path) -> None:
    """Each flush and each change of a name is once the last thing that does not happen."""
    with crash_at(10**9) as seen:
        merge(base, adapter, tmp_path / "count", shard_size=COARSE, workers=1)
    assert seen["calls"] > 30
    reference = file_hashes(tmp_path / "count")
    for number in range(1, seen["calls"] + 1):
        out = tmp_path / str(number) / "out"
        with crash_at(number), pytest.raises(Crash):
            merge(base, adapter, out, shard_size=COARSE, workers=1)
        whole = whole_or_absent(out)
        done = merge(base, adapter, out, shard_size=COARSE, workers=1)
        assert done["state"] == ("already merged" if whole else "merged"), number
        assert file_hashes(out) == reference, number
        assert [p.name for p in out.parent.iterdir()] == ["out"], number
        shutil.rmtree(out.parent)


def test_a_kill_of_the_continuation(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    """One step further each time, on the same output: every run is the continuation of a killed one."""
    out, number, runs = tmp_path / "out", 3, 0
    while True:
        try:
            with crash_at(number):
                merge(base, adapter, out, shard_size=SIZE, workers=1)
            break
        except Crash:
            whole_or_absent(out)
            number, runs = number + 3, runs + 1
    assert runs > 4
    assert file_hashes(out) == reference


class FailAfter:
    """Let so many shards be written, then crash."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.written = count, list[str]()

        def make(path: Path, size: int) -> Output:
            if len(self.written) == self.count:
                raise Crash
            self.written.append(path.name)
            return Output(path, size)

        monkeypatch.setattr(streaming, "Output", make)


def interrupt(base: Path, adapter: Path, out: Path, after: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        run = FailAfter(after, patch)
        with pytest.raises(Crash):
            merge(base, adapter, out, shard_size=SIZE, workers=1)
        return run.written


def test_goes_on_after_every_shard(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    count = sum(name.endswith(".safetensors") for name in reference)
    for after in range(0, count, 2):
        out = tmp_path / str(after)
        interrupt(base, adapter, out, after)
        assert not out.exists()
        done = merge(base, adapter, out, shard_size=SIZE)
        assert (done["reused_shards"], done["shards"]) == (after, count)
        assert file_hashes(out) == reference


def test_an_unfinished_file_is_not_counted_twice(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed merge has taken the room of a whole file: that room is free again for the next one."""
    out, whole = tmp_path / "out", streaming.prepare(base, adapter, tmp_path / "out", SIZE).missing_bytes()
    interrupt(base, adapter, out, 0)
    (staging_folder(out) / "model-00001-of-00006.safetensors.part").write_bytes(bytes(40_960))
    monkeypatch.setattr(streaming, "free_bytes", lambda _: whole - 40_960)
    assert merge(base, adapter, out, shard_size=SIZE)["state"] == "merged"


def test_a_torn_journal_costs_one_shard(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    for number, tail in enumerate((-1, -20)):
        out = tmp_path / str(number)
        interrupt(base, adapter, out, 3)
        journal = staging_folder(out) / "journal.jsonl"
        journal.write_bytes(journal.read_bytes()[:tail])
        assert merge(base, adapter, out, shard_size=SIZE)["reused_shards"] == 2
        assert file_hashes(out) == reference


@pytest.mark.parametrize("content", [b"\0" * 300, b'{"inputs": 3}\n', b'{"shard": "../../x", "size": 1}\n'])
def test_a_journal_of_nonsense_is_no_journal(
    base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str], content: bytes
) -> None:
    out = tmp_path / "out"
    interrupt(base, adapter, out, 2)
    (staging_folder(out) / "journal.jsonl").write_bytes(content)
    assert merge(base, adapter, out, shard_size=SIZE)["reused_shards"] == 0
    assert file_hashes(out) == reference


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data if how == "flip" else data[:-8])


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_damaged_staged_shard_is_merged_again(
    base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first, _ = interrupt(base, adapter, out, 2)
    spoil(staging_folder(out) / first, how)
    assert merge(base, adapter, out, shard_size=SIZE)["reused_shards"] == 1
    assert file_hashes(out) == reference


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
    with crash_at(10**9) as seen:
        merge(base, adapter, tmp_path / "count", shard_size=SIZE, workers=1)
    with crash_at(seen["calls"] - 12), pytest.raises(Crash):
        merge(base, adapter, out, shard_size=SIZE, workers=1)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        merge(base, adapter, out, shard_size=SIZE)


def test_the_same_command_twice(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    out = tmp_path / "out"
    merge(base, adapter, out, shard_size=SIZE)
    (out / "README.md").write_text("a note of the user's")
    assert merge(base, adapter, out, shard_size=SIZE)["state"] == "already merged"
    with pytest.raises(UserError, match="other inputs"):
        merge(base, adapter, out, shard_size="70KB")
    (out / "README.md").unlink()
    assert file_hashes(out) == reference


def test_a_finished_output_that_was_damaged_is_not_called_merged(base: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    merge(base, adapter, out, shard_size=SIZE)
    spoil(sorted(out.glob("*.safetensors"))[1], "flip")
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
