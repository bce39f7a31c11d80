"""Merge a LoRA adapter into its base, shard by shard, through buffers whose size does not depend on the model.

Each output file is read, changed, written and hashed in one pass by a few threads (matrix products, system calls and hashing
all release the interpreter's lock). Files are finished one by one in a staging folder, and moved singly into the output when
all are there: a directory rename can move half of a folder on a mergerfs pool.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.console import byte_progress, say
from clustertune.errors import Problem, UserError, storage_error
from clustertune.manifest import Comparison, FileRecord, hash_file
from clustertune.merge.job import Job, check_space, prepare
from clustertune.merge.pipeline import write_shards
from clustertune.merge.publish import publish
from clustertune.merge.stage import Journal, clear, locked
from clustertune.merge.target import finished_manifest, free_bytes, remove_published, remove_temporary


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


def _resume(job: Job, workers: int) -> Journal:
    """The journal to go on with: verified shards of the same inputs are kept, all else in staging is removed."""
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
    # The journal stays until it is replaced: without it the files already moved into the output would be nobody's.
    clear(job.staging, keep={*journal.shards, journal.path.name})
    journal.rewrite()
    if journal.shards:
        say(f"{job.staging}: going on after {len(journal.shards)} of {len(job.shards)} files, verified")
    return journal


def _check_finished(job: Job, workers: int) -> None:
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


def _summary(job: Job, state: str, started: float, reused: int) -> dict[str, Any]:
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


def _merge_locked(job: Job, workers: int, started: float) -> dict[str, Any]:
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
                with Comparison(job.base.folder) as base:
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
    state = "already merged" if job.finished else "would go on" if staged else "would merge"
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
