"""Disks that are full or fail, files that several threads write, and memory that stays bounded."""

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
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from clustertune import manifest
from clustertune.errors import ExitCode, UserError
from clustertune.merge import merge, pieces, streaming
from clustertune.merge.pieces import Output
from clustertune.merge.streaming import staging_folder
from clustertune.tensorfile import Tensor, build_header, byte_size
from tests.merge.conftest import file_hashes
from tools import merge_bench


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


def test_a_base_that_cannot_be_read(base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails under the base is reported with the base's file, not the output's."""

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pieces, "read_exactly", fail)
    with pytest.raises(UserError, match=rf"{base}.*reading: Input/output") as caught:
        merge(base, adapter, tmp_path / "out")
    assert caught.value.code == ExitCode.STORAGE


@given(cuts=st.sets(st.integers(1, 4999), max_size=12), seed=st.integers(0, 2**32))
def test_pieces_in_any_order_make_one_digest(tmp_path_factory: pytest.TempPathFactory, cuts: set[int], seed: int) -> None:
    """Written and added in any order, a file has the digest of its bytes; exactly the last call says that it is complete."""
    content, bounds = random.Random(seed).randbytes(5000), [0, *sorted(cuts), 5000]
    path, released = tmp_path_factory.mktemp("output") / "out", list[int]()
    output, pieces_left = Output(path, len(content)), list(itertools.pairwise(bounds))
    random.Random(seed).shuffle(pieces_left)
    complete = []
    for start, end in pieces_left:
        output.write(memoryview(content)[start:end], start)
        complete.append(output.add(memoryview(content)[start:end], start, partial(released.append, start)))
    record = output.finish()
    assert path.read_bytes() == content
    assert record == manifest.FileRecord(5000, xxhash.xxh3_128_hexdigest(content), "xxh3_128")
    assert complete == [False] * len(cuts) + [True]
    assert released == bounds[:-1]


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
        patch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing(code))
        if code == errno.EOPNOTSUPP:
            merge(base, adapter, tmp_path / "out")
        else:
            with pytest.raises(UserError, match=os.strerror(code)) as caught:
                merge(base, adapter, tmp_path / "out")
            assert caught.value.code == ExitCode.STORAGE
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


@pytest.mark.parametrize("with_peft", [False, pytest.param(True, marks=pytest.mark.long)])
def test_benchmark_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_peft: bool) -> None:
    """The benchmark's own path on a toy: the same bytes as PEFT's, and a page that says where it ran."""
    for name, value in (("_HIDDEN", 128), ("_INTER", 300), ("_VOCAB", 500)):
        monkeypatch.setattr(merge_bench, name, value)
    result = merge_bench.measure(tmp_path / "bench", 0.005, 1, workers=1, with_peft=with_peft)
    assert result["differing_tensors"] == (0 if with_peft else None)
    assert [r["way"] for r in result["rows"]][:2] == ["cp -r + fsync", "clustertune merge"]
    assert not (tmp_path / "bench").exists()
    page = merge_bench.as_markdown({**result, "hardware": {"machine": "a laptop"}}, "the command")
    assert "a laptop" in page
    assert "the command" in page
