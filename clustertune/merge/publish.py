"""The last step: finished files move singly into the output, then its config, then its manifest."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from clustertune.config import quantization
from clustertune.errors import storage_error
from clustertune.manifest import MANIFEST, FileRecord, fsync_path, read_manifest, seal, write_durably
from clustertune.merge.base import INDEX
from clustertune.merge.job import Job, names, require_unchanged
from clustertune.merge.stage import Journal, clear
from clustertune.merge.target import KIND, index_text


def _write_text(job: Job) -> dict[str, FileRecord]:
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


def _meta(job: Job) -> dict[str, object]:
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
    """What an adapter's manifest says of the base that it was trained on; nothing where there is none."""
    meta = read_manifest(adapter).meta if (adapter / MANIFEST).exists() else {}
    return {quantization.BASE: meta[quantization.BASE]} if quantization.BASE in meta else {}


def publish(job: Job, journal: Journal) -> None:
    """Make ``out`` whole from the finished shards in staging, then remove staging.

    May be interrupted anywhere and called again. Raises UserError: 73 where the storage fails, 75 where an input changed.
    """
    require_unchanged(job)
    try:
        if not journal.published:
            journal.begin_publish(names(job))
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
