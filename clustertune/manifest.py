"""The commit protocol of every artefact: files written and fsynced, then ``MANIFEST.json`` (sizes and digests) written
last and fsynced with its directory. A folder without a valid manifest does not exist for any reader.

A manifest, and not a renamed directory, is the commit: on a mergerfs pool a directory rename can move the files of one
brick only and still return 0.

Digests are SHA-256, with one exception: the weights of a merged model are safetensors (no code in them), gigabytes each and
made faster than SHA-256 runs on a core without instructions for it (0.4 GB/s on a Xeon of 2.5 GHz, XXH3-128: over 3). Their
records carry XXH3-128, which finds every kind of damage but not a forger. A checkpoint holds pickles, where a forged file is
foreign code: there any other digest than SHA-256 makes the manifest unreadable.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clustertune.errors import Problem, UserError

MANIFEST = "MANIFEST.json"
_CHUNK = 1 << 20
SHA256, XXH3_128 = "sha256", "xxh3_128"
_WORDS = {SHA256: "SHA-256", XXH3_128: "XXH3-128"}
_FAST_KINDS = {"merged", "staged"}
"""Kinds of folder whose files may carry XXH3-128."""


class Hasher(Protocol):
    """What of a hash object is used here."""

    def update(self, data: Any, /) -> None:
        """Hash further bytes."""

    def hexdigest(self) -> str:
        """The digest so far, in hex."""


def new_hasher(algorithm: str) -> Hasher:
    """An empty hash of ``sha256`` or ``xxh3_128``."""
    if algorithm == SHA256:
        return hashlib.sha256()
    import xxhash

    assert algorithm == XXH3_128, algorithm
    return xxhash.xxh3_128()


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and digest (hex) of one file."""

    size: int
    digest: str
    algorithm: str = SHA256

    @property
    def sha256(self) -> str:
        """The digest where it is a SHA-256. Raises ValueError where it is another: two kinds of digest never compare."""
        if self.algorithm != SHA256:
            raise ValueError(f"recorded by {self.algorithm}, not by SHA-256")
        return self.digest

    def as_json(self) -> dict[str, Any]:
        """``{"size": ..., "sha256": ...}`` or ``{"size": ..., "xxh3_128": ...}``."""
        return {"size": self.size, self.algorithm: self.digest}


def parse_record(body: Mapping[str, Any]) -> FileRecord:
    """A record from its JSON. Raises KeyError, TypeError or ValueError where it is none, or has no digest or two."""
    algorithms = [name for name in _WORDS if name in body]
    if len(algorithms) != 1:
        raise ValueError(f"a file has {len(algorithms) or 'no'} digests of a known kind ({', '.join(_WORDS)})")
    return FileRecord(int(body["size"]), str(body[algorithms[0]]), algorithms[0])


@dataclass(frozen=True)
class Manifest:
    """What a whole folder holds. ``files`` are paths relative to the folder, with ``/``; ``meta`` is the writer's own."""

    kind: str
    files: dict[str, FileRecord]
    meta: dict[str, Any] = field(default_factory=dict)


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to the device. Raises OSError: an fsync that failed must never be retried and believed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes | str) -> None:
    """Write ``path`` so that after a crash it holds all of ``data`` or what it held before (tmp, fsync, rename, fsync dir)."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with tmp.open("wb") as out:
        out.write(data.encode() if isinstance(data, str) else data)
        out.flush()
        os.fsync(out.fileno())
    tmp.replace(path)
    fsync_path(path.parent)


def hash_file(path: Path, algorithm: str = SHA256) -> FileRecord:
    """Size and digest of a file, read in chunks of 1 MiB."""
    digest, size = new_hasher(algorithm), 0
    with path.open("rb") as src:
        while chunk := src.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest(), algorithm)


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Fsync and hash the named files of a folder; the part of :func:`seal` that each rank does for its own files."""
    records = {}
    for name in names:
        fsync_path(folder / name)
        records[name] = hash_file(folder / name)
    return records


def list_files(folder: Path) -> list[str]:
    """All regular files below a folder but the manifest and hidden temporary ones, relative, sorted. Links are not followed."""
    found = []
    for root, _dirs, files in os.walk(folder):
        for name in files:
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if relative != MANIFEST and not (name.startswith(".") and name.endswith(".tmp")):
                found.append(relative)
    return sorted(found)


def seal(folder: Path, kind: str, meta: Mapping[str, Any], records: Mapping[str, FileRecord] | None = None) -> Manifest:
    """Make a folder whole: fsync and hash its files (unless ``records`` of them are given), then write the manifest last.

    Raises OSError where the storage fails; the folder then has no manifest.
    """
    if records is None:
        records = record_files(folder, list_files(folder))
    assert kind in _FAST_KINDS or all(r.algorithm == SHA256 for r in records.values()), f"a {kind} takes SHA-256 only"
    for directory in sorted({(folder / name).parent for name in records} | {folder}):
        fsync_path(directory)
    body = {
        "format": 1,
        "kind": kind,
        "meta": dict(meta),
        "files": {name: record.as_json() for name, record in sorted(records.items())},
    }
    body["checksum"] = _checksum(body)
    write_durably(folder / MANIFEST, json.dumps(body, indent=1, sort_keys=True) + "\n")
    fsync_path(folder.parent)
    return Manifest(kind, dict(records), dict(meta))


def _checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 over a manifest's own content: ``meta`` says where training goes on, and no file's hash covers it."""
    content = {key: value for key, value in body.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path, kind: str | None = None) -> Manifest:
    """Read and check the form of a manifest (not the files it names). Raises UserError where it is missing or unreadable."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        if body.get("checksum", checksum := _checksum(body)) != checksum:
            raise ValueError("its content differs from its checksum")
        files = {}
        for name, record in body["files"].items():
            if name.startswith("/") or ".." in Path(name).parts:
                raise ValueError(f"file name {name!r} leaves the folder")
            files[name] = parse_record(record)
            if files[name].algorithm != SHA256 and body["kind"] not in _FAST_KINDS:
                raise ValueError(f"a {body['kind']} takes SHA-256 only, {name} has {files[name].algorithm}")
        found = Manifest(str(body["kind"]), files, dict(body["meta"]))
    except FileNotFoundError:
        raise UserError(Problem("no manifest: the folder was never finished", file=str(path))) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(Problem(f"unreadable manifest: {error}", file=str(path))) from None
    if kind is not None and found.kind != kind:
        raise UserError(Problem(f"holds a {found.kind}, not a {kind}", file=str(folder)))
    return found


def find_problems(folder: Path, kind: str | None = None, *, hashes: bool = True, allow_extra: bool = False) -> list[Problem]:
    """Everything that keeps a folder from being whole: an empty list means whole.

    ``hashes=False`` compares existence and size only. ``allow_extra`` tolerates files that the manifest does not name
    (a user may put a README beside a merged model, but nothing may stand unlisted in a checkpoint).
    """
    try:
        manifest = read_manifest(folder, kind)
    except UserError as error:
        return error.problems
    problems = []
    for name, record in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != record.size:
                problems.append(Problem(f"{size} bytes, the manifest says {record.size}", file=str(path)))
            elif hashes and hash_file(path, record.algorithm) != record:
                problems.append(Problem(f"content differs from the manifest's {_WORDS[record.algorithm]}", file=str(path)))
        except FileNotFoundError:
            problems.append(Problem("missing", file=str(path)))
        except OSError as error:
            problems.append(Problem(f"unreadable: {error.strerror}", file=str(path)))
    if not allow_extra:
        extra = sorted(set(list_files(folder)) - set(manifest.files))
        problems += [Problem("not named by the manifest", file=str(folder / name)) for name in extra]
    return problems
