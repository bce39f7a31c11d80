"""Interrupted anywhere, or on a disk that fails, the output is whole or absent; the same command makes the very same files."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clustertune import manifest
from clustertune.errors import ExitCode, UserError
from clustertune.merge import merge, pieces, streaming
from clustertune.merge.pieces import Output
from clustertune.merge.streaming import locked, staging_folder
from clustertune.tensorfile import Tensor, build_header, byte_size
from tests.damage import failing, flip, refused
from tests.faults import CALLS, Crash, fault_at, sweep
from tests.merge.conftest import file_hashes, save_adapter, save_llama

SIZE = "60KB"


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
@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.jobs)])
def test_a_kill_or_a_full_disk_at_any_step(tmp_path: Path, killed: bool, step: int) -> None:
    """Each flush and each change of a name (here every tenth) is once the last thing that happens, or is refused (exit 73).
    The same command ends with the very same files."""
    base = save_llama(tmp_path / "base", torch.bfloat16, num_hidden_layers=1)  # three shards: each step is a merge
    adapter = save_adapter(tmp_path / "adapter", base)

    def work(number: int) -> dict[str, Any]:
        return merge(base, adapter, tmp_path / str(number) / "out", shard_size=SIZE, workers=1)

    work(0)
    reference, number = file_hashes(tmp_path / "0" / "out"), 0
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for number in sweep(work, step=step) if killed else sweep(work, full, (*CALLS, "pwrite"), step):
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
        patch.setattr(streaming, "seal", failing(Crash()))
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
    with refused("changed while", ExitCode.AGAIN):
        merge(own_base, adapter, tmp_path / "out", shard_size=SIZE)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(streaming, "write_shards", original)
    assert merge(own_base, adapter, tmp_path / "out", shard_size=SIZE)["reused_shards"] == 0


def test_one_merge_at_a_time(base: Path, adapter: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    out = tmp_path / "out"
    with locked(staging_folder(out)), refused(f"process {os.getpid()} on", ExitCode.AGAIN):
        merge(base, adapter, out, shard_size=SIZE)
    merge(base, adapter, out, shard_size=SIZE)
    assert file_hashes(out) == reference


def test_an_fsync_that_failed_is_not_believed(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard whose flush failed is written again, from the beginning."""
    out, original, failed = tmp_path / "out", os.fsync, []

    def fail(fd: int) -> None:
        if not failed and Path(f"/proc/self/fd/{fd}").readlink().name == "model-00002-of-00006.safetensors.part":
            failed.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        original(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UserError, match="Input/output"):
            merge(base, adapter, out, shard_size="60KB", workers=1)
    assert failed
    assert sorted(p.name for p in staging_folder(out).glob("*.safetensors")) == ["model-00001-of-00006.safetensors"]
    assert merge(base, adapter, out, shard_size="60KB")["reused_shards"] == 1


class Refusing:
    """The C library with an fallocate(2) that answers ``code``."""

    def __init__(self, code: int) -> None:
        self.code = code

    def fallocate(self, *_: Any) -> int:
        ctypes.set_errno(self.code)
        return -1


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_a_filesystem_without_fallocate_or_without_room(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """What the filesystem cannot do is done without; a full or failing disk is reported before a byte is written."""
    with monkeypatch.context() as patch:
        refusing = {"CDLL": lambda *_, **__: Refusing(code), "c_int64": ctypes.c_int64, "get_errno": ctypes.get_errno}
        patch.setattr(pieces, "ctypes", SimpleNamespace(**refusing))
        if code == errno.EOPNOTSUPP:
            merge(base, adapter, tmp_path / "out")
        else:
            with refused(os.strerror(code), ExitCode.STORAGE):
                merge(base, adapter, tmp_path / "out")
            assert not (tmp_path / "out").exists()
    merge(base, adapter, tmp_path / "out")
    merge(base, adapter, tmp_path / "reference")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "reference")


@pytest.mark.parametrize("room", [streaming.WORKING_MEMORY, 1])
def test_threads_share_a_file(base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """One output file in many small pieces, made by so many threads: the same bytes, and no more buffers than fit.

    Torch keeps the threads that it had.
    """
    torch.set_num_threads(2)
    merge(base, adapter, tmp_path / "reference")
    made, original = set[int](), pieces.Worker.make

    def make(worker: pieces.Worker, *args: Any) -> None:
        made.add(threading.get_ident())
        time.sleep(0.001 * random.random())
        original(worker, *args)

    monkeypatch.setattr(streaming, "WORKING_MEMORY", room)
    monkeypatch.setattr(pieces, "CHUNK", 3000)
    monkeypatch.setattr(pieces.Worker, "make", make)
    merge(base, adapter, tmp_path / "out", workers=5)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert len(made) == (1 if room == 1 else 5)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "reference")
    assert torch.get_num_threads() == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_thread_that_fails_keeps_nobody_waiting(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The others wait for buffers that hang behind the failed piece; they are let go, and the error is reported."""
    original, count = pieces.Worker.make, itertools.count(1)

    def make(worker: pieces.Worker, *args: Any) -> None:
        if next(count) == nth:
            time.sleep(0.3)
            raise RuntimeError("a thread failed")
        original(worker, *args)

    monkeypatch.setattr(pieces, "CHUNK", 3000)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a thread failed"):
        patch.setattr(pieces.Worker, "make", make)
        merge(base, adapter, tmp_path / "out", workers=3)
    assert not (tmp_path / "out").exists()
    merge(base, adapter, tmp_path / "out", workers=3)


PEAK = """
import json, sys
from pathlib import Path
import torch
def peak(): return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
idle = peak()
from clustertune.merge import merge
done = merge(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), workers=4)
sys.stdout.write(json.dumps({"over": peak() - idle, "said": done["peak_rss_bytes"], "peak": peak()}))
"""


def hole(folder: Path, file: str, shapes: dict[str, tuple[int, int]], config: dict[str, Any]) -> Path:
    """A folder with bfloat16 tensors of zeros, which take no room and no time to write."""
    folder.mkdir()
    tensors = [Tensor(name, "BF16", shape, Path(), 0, byte_size("BF16", shape)) for name, shape in shapes.items()]
    with (folder / file).open("wb") as out:
        header = build_header(tensors)
        out.write(header)
        out.truncate(len(header) + sum(tensor.size for tensor in tensors))
    (folder / ("config.json" if file == "model.safetensors" else "adapter_config.json")).write_text(json.dumps(config))
    return folder


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path, repo: Path) -> None:
    """A tensor of 400 MB, an adapter of rank 256: less than 300 MiB above the interpreter with torch, four workers or not.

    A factor takes 51 MB in float32: not four of them at once.
    """
    rows, columns, rank, module = 4000, 50_000, 256, "model.layers.0.wide"
    base = hole(tmp_path / "base", "model.safetensors", {f"{module}.weight": (rows, columns)}, {})
    factors = {f"base_model.model.{module}.lora_{x}.weight": s for x, s in (("A", (rank, columns)), ("B", (rows, rank)))}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["wide"]}
    adapter = hole(tmp_path / "adapter", "adapter_model.safetensors", factors, config)
    arguments = [sys.executable, "-c", PEAK, str(base), str(adapter), str(tmp_path / "out")]
    measured = json.loads(subprocess.run(arguments, capture_output=True, text=True, cwd=repo, check=True).stdout)
    assert measured["over"] < 300 << 20
    assert measured["said"] <= measured["peak"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == (base / "model.safetensors").stat().st_size
    job = streaming.prepare(base, adapter, tmp_path / "new", "5GB")
    assert job.worker_bytes() > 51e6 and 1 <= job.limit_workers(4) < 4
    shutil.rmtree(tmp_path / "out")
