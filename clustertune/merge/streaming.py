"""Merge a LoRA adapter into its base, shard by shard, through buffers whose size does not depend on the model.

Each output file is read, changed, written and hashed in one pass by a few threads (matrix products, system calls and hashing
all release the interpreter's lock). Files are finished one by one in a staging folder, and moved singly into the output when
all are there: a directory rename can move half of a folder on a mergerfs pool.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from clustertune.config import quantization
from clustertune.console import byte_progress, say
from clustertune.errors import Problem, UserError, storage_error
from clustertune.manifest import (
    MANIFEST,
    DigestComparison,
    FileRecord,
    fsync_path,
    hash_file,
    read_manifest,
    seal,
    write_durably,
)
from clustertune.merge.base import INDEX
from clustertune.merge.job import MergeJob, check_space, prepare, require_unchanged
from clustertune.merge.pieces import ConvertedElements, Merged, Piece, Worker, cut
from clustertune.merge.streams import BUFFERS, CHUNK, InputFiles, Output, Shard
from clustertune.merge.target import (
    KIND,
    Journal,
    clear,
    finished_manifest,
    free_bytes,
    index_text,
    locked,
    output_names,
    remove_published,
    remove_temporary,
)


def _damaged(records: dict[str, FileRecord], places: dict[str, Path], workers: int) -> list[str]:
    """The names whose file is not there or does not have its hash."""

    def whole(name: str) -> bool:
        try:
            return (
                places[name].stat().st_size == records[name].size
                and hash_file(places[name], records[name].algorithm) == records[name]
            )
        except OSError:
            return False

    with ThreadPoolExecutor(workers) as pool:
        return [name for name, good in zip(records, pool.map(whole, records), strict=True) if not good]


def _resume(job: MergeJob, workers: int) -> Journal:
    """The journal to continue with: verified shards of the same inputs are kept, all else in staging is removed."""
    journal = Journal(job.staging).load()
    if journal.inputs not in (None, job.inputs):
        say(f"{job.staging}: base, adapter or shard size have changed since; the unfinished merge there is thrown away")
        remove_published(job.out, journal)
    if journal.inputs != job.inputs:
        clear(job.staging, keep=set())
        journal = Journal(job.staging)
        journal.inputs = job.inputs
    planned = {s.name for s in job.shards}
    places = {n: (job.out if (job.out / n).exists() else job.staging) / n for n in journal.shards}
    for name in {*_damaged(journal.shards, places, workers), *(set(journal.shards) - planned)}:
        say(f"{places[name]}: not what was written; this file is merged again")
        places[name].unlink(missing_ok=True)
        del journal.shards[name]
    if job.out.is_dir():
        remove_temporary(job.out)
    # The journal stays until it is replaced: without it the files already moved into the output would belong to no merge.
    clear(job.staging, keep={*journal.shards, journal.path.name})
    journal.rewrite()
    if journal.shards:
        say(f"{job.staging}: continuing after {len(journal.shards)} of {len(job.shards)} files, verified")
    return journal


def _check_finished(job: MergeJob, workers: int) -> None:
    """Raises UserError where the finished output has been damaged since."""
    if job.finished is None:
        return
    damaged = _damaged(job.finished.files, {name: job.out / name for name in job.finished.files}, workers)
    if damaged:
        fix = "move the folder away, then run the same command again"
        raise UserError([Problem("missing, or differs from the manifest", file=str(job.out / n), fix=fix) for n in damaged])
    if job.staging.is_dir():
        with locked(job.staging):
            clear(job.staging)


def _peak_rss() -> int:
    """Bytes; VmHWM and not getrusage, whose value a child inherits from its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _summary(job: MergeJob, state: str, started: float, reused: int) -> dict[str, Any]:
    seconds = time.monotonic() - started
    return {
        "out": str(job.out),
        "state": state,
        "tensors": len(job.base.tensors),
        "merged": len(job.adapter.updates),
        "replaced": len(job.adapter.replaced),
        "bytes": job.size,
        "shards": len(job.shards),
        "reused_shards": reused,
        "seconds": round(seconds, 3),
        "gb_per_s": round(job.size / 1e9 / seconds, 3),
        "peak_rss_bytes": _peak_rss(),
        "warnings": job.adapter.warnings,
    }


def _merge_locked(job: MergeJob, workers: int, started: float) -> dict[str, Any]:
    with locked(job.staging):
        if finished_manifest(job.out, job.inputs):  # another process has finished it between the plan and the lock
            clear(job.staging)
            return _summary(job, "already merged", started, len(job.shards))
        journal = _resume(job, workers)
        todo = [s for s in job.shards if s.name not in journal.shards]
        with byte_progress() as bar:
            task = bar.add_task("merging", total=sum(t.size for s in todo for t in s.tensors))
            if todo:
                # The same bytes at about the same time: the page cache takes them from storage once.
                with DigestComparison(job.base.folder) as base:
                    write_shards(job, journal, todo, job.limit_workers(workers), partial(bar.advance, task))
                    problems = base.finish()
                if problems:
                    clear(job.staging)  # what is made of damaged weights: a base copied back with its old times looks the same
                    raise UserError(problems)
        publish(job, journal)
    return _summary(job, "merged", started, len(job.shards) - len(todo))


def plan(base: Path, adapter: Path, out: Path, *, shard_size: str | int = "5GB") -> dict[str, Any]:
    """What :func:`merge` would do, every check made and nothing written.

    Returns the files with their bytes, the bytes that are there already from an interrupted merge, and the free space.
    Raises UserError as :func:`merge` does, bar the check of free space.
    """
    job = prepare(base, adapter, out, shard_size)
    staged = job.staged_bytes()
    state = "already merged" if job.finished else "would continue" if staged else "would merge"
    return {
        "out": str(out),
        "state": state,
        "tensors": len(job.base.tensors),
        "merged": len(job.adapter.updates),
        "replaced": len(job.adapter.replaced),
        "files": {**{s.name: s.size for s in job.shards}, **{n: p.stat().st_size for n, p in job.companions.items()}},
        "bytes": job.size,
        "staged_bytes": staged,
        "free_bytes": free_bytes(out),
        "fits": bool(job.finished) or free_bytes(out) >= job.missing_bytes(),
        "warnings": job.adapter.warnings,
    }


def merge(base: Path, adapter: Path, out: Path, *, shard_size: str | int = "5GB", workers: int | None = None) -> dict[str, Any]:
    """Merge a LoRA adapter into a base model; ``out`` is whole afterwards, or absent.

    The tensors are byte-equal to those of PEFT's default ``merge_and_unload()`` on CPU. The same command continues an
    interrupted merge after the last verified file, and says so where the merge is done already. ``workers``: threads,
    by default one per core up to 4.

    Returns counts, bytes, seconds, GB/s (1e9 bytes of output) and the process's peak resident bytes. Raises UserError: exit 2
    for inputs that do not fit or an output that stands in the way, 73 for storage (staged work is kept), 75 where another
    process merges into the same output.
    """
    started = time.monotonic()
    workers = workers or min(4, len(os.sched_getaffinity(0)))
    job = prepare(base, adapter, out, shard_size)
    for warning in job.adapter.warnings:
        say(f"warning: {warning}")
    if job.finished:
        _check_finished(job, workers)
        return _summary(job, "already merged", started, len(job.shards))
    check_space(job)
    try:
        return _merge_locked(job, workers, started)
    except OSError as error:
        raise storage_error(error, "merging", Path(error.filename or job.staging)) from error


# --- publish --------------------------------------------------------------------------------------------------------------

# The last step: finished files move singly into the output, then its config, then its manifest.


def _write_text(job: MergeJob) -> dict[str, FileRecord]:
    """Everything but the weights, ``config.json`` last: until it is there nothing loads the folder."""
    texts = {name: path.read_bytes() for name, path in job.companions.items() if name != "config.json"}
    if len(job.shards) > 1:
        texts[INDEX] = index_text(job.base, job.shards).encode()
    texts["config.json"] = job.companions["config.json"].read_bytes()
    for name, data in texts.items():
        (job.out / name).parent.mkdir(exist_ok=True)
        write_durably(job.out / name, data)
    return {name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in texts.items()}


def _own_version() -> str:
    """A checkout that is mounted into a container is not installed there."""
    try:
        return version("clustertune")
    except PackageNotFoundError:
        return "a checkout"


def _meta(job: MergeJob) -> dict[str, object]:
    return {
        "inputs": job.inputs,
        "base": {
            "name": job.base.folder.resolve().name,
            "files": {p.name: {"header_sha256": hashlib.sha256(h.text).hexdigest()} for p, h in job.base.headers.items()},
        },
        "adapter": {"name": job.adapter.folder.resolve().name, "sha256": job.adapter.sha256, **_trained_on(job.adapter.folder)},
        "tensors": {"all": len(job.base.tensors), "merged": len(job.adapter.updates), "replaced": len(job.adapter.replaced)},
        "shard_size": job.shard_size,
        "versions": {"clustertune": _own_version(), "torch": version("torch")},
    }


def _trained_on(adapter: Path) -> dict[str, object]:
    """What an adapter's manifest says about the base that it was trained on; nothing where there is none."""
    meta = read_manifest(adapter).meta if (adapter / MANIFEST).exists() else {}
    return {quantization.BASE: meta[quantization.BASE]} if quantization.BASE in meta else {}


def publish(job: MergeJob, journal: Journal) -> None:
    """Make ``out`` whole from the finished shards in staging, then remove staging.

    May be interrupted anywhere and called again. Raises UserError: 73 where the storage fails, 75 where an input changed.
    """
    require_unchanged(job)
    try:
        if not journal.published:
            journal.begin_publish(output_names(job.shards, job.companions))
        job.out.mkdir(exist_ok=True)
        fsync_path(job.out.parent)
        for shard in job.shards:
            staged = job.staging / shard.name
            if staged.exists():
                staged.rename(job.out / shard.name)
        fsync_path(job.out)
        seal(job.out, KIND, _meta(job), {**journal.shards, **_write_text(job)})
        clear(job.staging)
    except OSError as error:
        raise storage_error(error, "finishing", job.out) from error


# --- pipeline -------------------------------------------------------------------------------------------------------------

# The threads share one queue of pieces, file after file. A free thread takes the next piece.


class _Line:
    """The pieces that are left, and the buffers for them.

    A buffer is taken before the piece, so the first piece that is not finished always has one, and no thread waits forever.
    """

    def __init__(self, job: MergeJob, todo: list[Shard], workers: int) -> None:
        self._workers, self._guard, self._stopped = workers, threading.Lock(), False
        self._buffers: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(BUFFERS * workers):
            self._buffers.put(bytearray(CHUNK))
        self.outputs, self.journal_guard = list[Output](), threading.Lock()
        self._pieces = self._all(job, todo)

    def _all(self, job: MergeJob, todo: list[Shard]) -> Iterator[tuple[Output, Piece]]:
        for shard in todo:
            path = job.staging / shard.name
            try:
                output = Output(path, shard.size)
            except OSError as error:
                raise storage_error(error, "writing", path) from error
            self.outputs.append(output)
            for piece in cut(shard, job.adapter):
                yield output, piece

    def take(self) -> tuple[Output, Piece, bytearray] | None:
        """The next piece, or None where there is none or the line was stopped."""
        buffer = self._buffers.get()
        with self._guard:
            taken = None if self._stopped else next(self._pieces, None)
        if taken is None:
            self._buffers.put(buffer)  # for the next who waits, and then finds the end as well
            return None
        if len(buffer) < taken[1].size:
            buffer = bytearray(taken[1].size)
        return (*taken, buffer)

    def give_back(self, buffer: bytearray) -> None:
        """A buffer is free again."""
        self._buffers.put(buffer)

    def stop(self) -> None:
        """Let no thread begin another piece, or wait for a buffer that a failed piece holds."""
        with self._guard:
            self._stopped = True
        for _ in range(self._workers):
            self._buffers.put(bytearray())


def _load_torch() -> int:
    """Import torch with one thread per product: the workers are the parallelism, and the products' bits do not depend on it.

    Returns the threads that it had before.
    """
    import torch

    before: int = torch.get_num_threads()
    torch.set_num_threads(1)
    return before


@contextmanager
def _torch_beside() -> Iterator[Future[int]]:
    """Import torch, which takes as long as copying gigabytes, while the first pieces are copied."""
    pool = ThreadPoolExecutor(1)
    loading = pool.submit(_load_torch)
    pool.shutdown(wait=False)
    try:
        yield loading
    finally:
        if not loading.exception():
            import torch

            torch.set_num_threads(loading.result())


def _work(line: _Line, worker: Worker, journal: Journal, torch: Future[int], advance: Callable[[int], None]) -> None:
    while taken := line.take():
        output, piece, buffer = taken
        if isinstance(piece.content, Merged | ConvertedElements):
            torch.result()
        view = memoryview(buffer)[: piece.size]
        worker.make(piece, view, output)
        try:
            if output.add(view, piece.offset, partial(line.give_back, buffer)):
                record = output.finish()
                with line.journal_guard:
                    journal.add_shard(output.path.name, record)
        except OSError as error:
            raise storage_error(error, "writing", output.path) from error
        if not isinstance(piece.content, bytes):
            advance(piece.size)


def write_shards(job: MergeJob, journal: Journal, todo: list[Shard], workers: int, advance: Callable[[int], None]) -> None:
    """Write output files into staging and note each in the journal when it is on the device.

    ``advance`` is called with the number of bytes of weights written. Raises UserError (exit 73) where the storage fails.
    """
    if not todo:
        return
    line, source, failures = _Line(job, todo, workers), InputFiles(), list[BaseException]()

    def run(torch: Future[int]) -> None:
        try:
            _work(line, Worker(source), journal, torch, advance)
        except BaseException as error:
            failures.append(error)
            line.stop()

    try:
        with _torch_beside() as torch, ThreadPoolExecutor(workers) as pool:
            try:
                for future in [pool.submit(run, torch) for _ in range(workers)]:
                    future.result()
            except BaseException:
                line.stop()
                raise
    finally:
        source.close()
        for output in line.outputs:
            output.abandon()
    if failures:
        raise failures[0]
