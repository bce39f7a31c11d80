"""Everything about one merge that is known, and checked, before a byte is written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError, collect_problems
from clustertune.manifest import Manifest, hash_file
from clustertune.merge.base import Base, read_base
from clustertune.merge.lora import Adapter, read_adapter
from clustertune.merge.pieces import block_elements
from clustertune.merge.streams import BUFFERS, CHUNK, Shard, parse_size, plan_shards
from clustertune.merge.target import (
    Journal,
    companion_files,
    finished_manifest,
    free_bytes,
    place_problems,
    staging_folder,
)

FORMAT = 1
"""Raise it when the bytes of an output change for the same inputs: staged work of older versions is then not continued."""
WORKING_MEMORY = 192 << 20
"""Bytes for the buffers of all workers together; what torch, MKL and the plan of a 405B model take comes on top."""


@dataclass(frozen=True)
class MergeJob:
    """One merge, planned."""

    base: Base
    adapter: Adapter
    out: Path
    shards: list[Shard]
    companions: dict[str, Path]
    shard_size: int
    inputs: str
    """Hash of all that decides the output's bytes; large base files count by header, size and modification time."""
    base_identity: dict[str, list[Any]]
    finished: Manifest | None
    """The manifest of ``out`` where the very same merge is there already."""

    @property
    def staging(self) -> Path:
        """The folder of unfinished work."""
        return staging_folder(self.out)

    @property
    def size(self) -> int:
        """Bytes of the output but its manifest."""
        return sum(s.size for s in self.shards) + sum(p.stat().st_size for p in self.companions.values())

    def staged_bytes(self) -> int:
        """Bytes that an earlier, interrupted merge of the same inputs has left finished (by name and size)."""
        journal = Journal(self.staging).load()
        if journal.inputs != self.inputs:
            return 0
        sizes = {s.name: s.size for s in self.shards}
        places = [(name, folder / name) for name in journal.shards for folder in (self.staging, self.out)]
        return sum(p.stat().st_size for name, p in places if p.exists() and p.stat().st_size == sizes.get(name))

    def missing_bytes(self) -> int:
        """Bytes that still have to be found on the disk. A file that a killed merge left unfinished gives its room back."""
        unfinished = sum(p.stat().st_blocks * 512 for p in self.staging.glob("*.part"))
        return self.size - self.staged_bytes() - unfinished

    def worker_bytes(self) -> int:
        """Upper bound of one worker's buffers: A; the update, the sum and B of a block; a raw one; what waits to be hashed."""
        largest = 0
        for name, update in self.adapter.updates.items():
            rows, columns = self.base.tensors[name].shape[-2:]
            block = block_elements(rows, columns)
            block_rows = block // max(1, columns)
            factors = 4 * (update.rank * columns + 2 * block + 2 * block_rows * update.b.shape[1])
            largest = max(largest, factors + CHUNK + BUFFERS * max(CHUNK, 4 * block))
        return max(largest, 32 << 20)

    def limit_workers(self, wanted: int) -> int:
        """At most ``wanted``, as many as fit into ``WORKING_MEMORY``; at least one."""
        return max(1, min(wanted, WORKING_MEMORY // self.worker_bytes()))


def _digest(job: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def prepare(base: Path, adapter: Path, out: Path, shard_size: str | int) -> MergeJob:
    """Check everything and plan the output. Raises UserError with every problem found; nothing is written."""
    problems: list[Problem] = []
    model: Base | None = None
    fitted: Adapter | None = None
    limit = 0
    problems += place_problems(base, adapter, out)
    with collect_problems(problems):
        limit = parse_size(shard_size)
    with collect_problems(problems):
        model = read_base(base)
    with collect_problems(problems):
        fitted = read_adapter(adapter, model)
    if problems or model is None or fitted is None:
        raise UserError(problems)
    return _plan(model, fitted, out, limit)


def _plan(base: Base, adapter: Adapter, out: Path, shard_size: int) -> MergeJob:
    shards = plan_shards(list(base.tensors.values()), shard_size)
    companions = companion_files(base, adapter)
    identity = base.identity()
    inputs = _digest(
        {
            "format": FORMAT,
            "base": identity,
            "headers": {p.name: hashlib.sha256(h.text).hexdigest() for p, h in base.headers.items()},
            "adapter": adapter.sha256,
            "companions": {name: hash_file(path).sha256 for name, path in companions.items()},
            "shard_size": shard_size,
        }
    )
    return MergeJob(
        base=base,
        adapter=adapter,
        out=out,
        shards=shards,
        companions=companions,
        shard_size=shard_size,
        inputs=inputs,
        base_identity=identity,
        finished=finished_manifest(out, inputs),
    )


def check_space(job: MergeJob) -> None:
    """Raises UserError (exit 73) where what is still to be written does not fit."""
    need, free = job.missing_bytes(), free_bytes(job.out)
    if free < need:
        message = f"needs {need / 1e9:.3f} GB, {free / 1e9:.3f} GB are free"
        fix = "free space, then run the same command again"
        raise UserError(Problem(message, file=str(job.out), fix=fix), ExitCode.STORAGE)


def unchanged(job: MergeJob) -> bool:
    """Whether the inputs are still those that were planned with."""
    try:
        adapter = {name: hash_file(job.adapter.folder / name).sha256 for name in job.adapter.sha256}
        return job.base.identity() == job.base_identity and adapter == job.adapter.sha256
    except OSError:
        return False


def require_unchanged(job: MergeJob) -> None:
    """Raises UserError where an input changed during the merge: its output may be a mixture and is not published."""
    if not unchanged(job):
        message = "base or adapter changed while they were merged"
        raise UserError(Problem(message, file=str(job.base.folder), fix="run the same command again"), ExitCode.AGAIN)
