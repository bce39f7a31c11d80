"""The staging folder of a node: one tree for each model or dataset, who reads it, and what makes room for the next.

``PATH/clustertune-UID/KEY/`` holds ``MANIFEST.json`` (written last) and the tree in a folder that has the source's name. Beside
it lies ``KEY.lock``: jobs that read from a tree share it, who repairs or removes the tree holds it alone. One process at a time
fills the cache (``.lock``). The kernel frees a lock with its process, so that a killed job uses nothing; the time of
``KEY.lock`` says when the tree was used last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune import lock
from clustertune.cluster.schema import Staging
from clustertune.console import say
from clustertune.errors import ExitCode, UserError, storage_error, storing
from clustertune.manifest import MANIFEST, XXH3_128, fsync_path, list_files, read_manifest, seal
from clustertune.staging import hashed_copy
from clustertune.staging.hashed_copy import STALL_SECONDS, SourceFile, amount
from clustertune.text import listed

KIND = "staged"
SPARE = 64 << 20
"""Bytes of the disk that are left free."""


@dataclass(frozen=True)
class CachedTree:
    """What lies in the cache under one key."""

    key: str
    bytes: int
    used: float
    """Unix time."""


@dataclass(frozen=True)
class StagingCache:
    """A user's part of the staging folder."""

    root: Path
    limit: int
    """Bytes that may lie here."""

    def folder(self, key: str) -> Path:
        return self.root / key

    def lock_file(self, key: str) -> Path:
        return self.root / f"{key}.lock"

    def trees(self) -> list[CachedTree]:
        """All trees, the one that was used longest ago first."""
        cached = []
        for path in self.root.iterdir():
            if not path.is_dir() or path.is_symlink():
                continue
            try:
                used = self.lock_file(path.name).stat().st_mtime
            except OSError:
                used = 0.0
            cached.append(CachedTree(path.name, tree_bytes(path), used))
        return sorted(cached, key=lambda tree: tree.used)

    def shared(self, key: str, *, wait: Callable[[str], None]) -> TreeLock:
        """Share a tree with all who read from it. ``wait``: called once with who repairs or removes it."""
        fd = lock.take(self.lock_file(key), fcntl.LOCK_SH, wait, in_cache=True)
        assert not isinstance(fd, str)
        return TreeLock(self.lock_file(key), fd)

    @contextlib.contextmanager
    def alone(self, key: str, *, wait: Callable[[str], None] | None) -> Iterator[bool]:
        """Hold a tree alone; the key ``""``: be the one who fills the cache. ``wait``: called once with who holds it; None:
        gives False at once where it is held."""
        fd = lock.take(self.lock_file(key), fcntl.LOCK_EX, wait, in_cache=True)
        if isinstance(fd, str):
            yield False
            return
        try:
            yield True
        finally:
            os.close(fd)

    def make_room(self, key: str, size: int, say: Callable[[str], None]) -> list[CachedTree]:
        """Have room for ``size`` bytes of a tree; what was used longest ago goes. Returns what went.

        Call as the one who fills the cache. Raises UserError: more than the limit, or no room (exit 73).
        """
        if size > self.limit:
            text = f"{amount(size)} do not fit into the {amount(self.limit)} that may be kept there"
            fix = "raise storage.staging.gb in the cluster file, or slurm.staging=false reads from the shared storage"
            raise UserError(text, file=str(self.root), fix=fix, code=ExitCode.STORAGE)
        removed: list[CachedTree] = []
        others, present = [tree for tree in self.trees() if tree.key != key], tree_bytes(self.folder(key))

        def lacking() -> int:
            used = sum(tree.bytes for tree in others if tree not in removed)
            return max(used + size - self.limit, size - present + SPARE - shutil.disk_usage(self.root).free)

        for tree in others:
            if (lack := lacking()) <= 0:
                break
            if self.remove(tree, say, f"to make room for {amount(lack)}"):
                removed.append(tree)
        if (lack := lacking()) > 0:
            in_use = len(others) - len(removed)
            text = f"no room for {amount(size)}: {amount(lack)} are lacking"
            text += f", and {in_use} trees there are in use" if in_use else ""
            fix = "free space there, or slurm.staging=false reads from the shared storage"
            raise UserError(text, file=str(self.root), fix=fix, code=ExitCode.STORAGE)
        return removed

    def remove(self, tree: CachedTree, say: Callable[[str], None], why: str) -> bool:
        """Remove a tree that is not in use; False where it is. The manifest goes first: half a tree never counts."""
        with self.alone(tree.key, wait=None) as taken:
            if not taken:
                return False
            say(f"removes {self.folder(tree.key)} ({amount(tree.bytes)}) {why}")
            discard(self.folder(tree.key))
            self.lock_file(tree.key).unlink(missing_ok=True)
        return True


@dataclass
class TreeLock:
    """An open lock of a tree."""

    path: Path
    fd: int

    def mark_used(self) -> None:
        """The tree was used now."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def open_cache(staging: Staging) -> StagingCache:
    """This user's staging cache on this node, made where it is missing.

    ``storage.staging.path`` itself is made only where its parent is there: on a node whose disk is not mounted it would fill
    the system's. Raises UserError.
    """
    path = Path(staging.path)
    root = path / f"clustertune-{os.getuid()}"
    try:
        path.mkdir(exist_ok=True, mode=0o755)
        root.mkdir(exist_ok=True, mode=0o700)
        info = root.lstat()
    except FileNotFoundError:
        host = os.uname().nodename
        fix = "mount the node's disk, or correct storage.staging.path in the cluster file"
        raise UserError(f"{host} has no such folder", file=str(path), fix=fix, code=ExitCode.STORAGE) from None
    except OSError as error:
        raise storage_error(error, "cannot be used for staging", path) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        message = "belongs to another user, or others can write to it: ranks would load what they put there"
        raise UserError(message, file=str(root), fix="remove it, or set another storage.staging.path")
    return StagingCache(root, int(staging.gb * 1e9))


def discard(folder: Path) -> None:
    """Remove a tree, its manifest first. Raises OSError."""
    if not folder.exists():
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    fsync_path(folder)
    shutil.rmtree(folder)


def tree_bytes(folder: Path) -> int:
    """Bytes that lie in a folder."""
    total = 0
    for root, _dirs, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 - thousands of files
    return total


# --- one tree: known by what the source holds, filled, verified, and leased while it is read -------------------------


@dataclass(frozen=True)
class SourceFolder:
    """A folder that a recipe needs."""

    what: str
    """``model`` or ``data``."""
    name: str
    """The folder's name in the copy: a model's is what the adapter will say about its base."""
    root: Path
    """The folder on the shared storage."""
    revision: str | None = None


@dataclass
class StagedTree:
    """A complete tree, leased until :meth:`release`."""

    source: SourceFolder
    path: Path
    """The folder to read from."""
    bytes: int
    files: int
    copied: int
    """Bytes that were copied now; 0 where the tree was there."""
    seconds: float
    """What copying and verifying took."""
    removed: list[str] = field(default_factory=list)
    lease: TreeLock | None = None

    def release(self) -> None:
        """Let the tree be removed again."""
        if self.lease is not None:
            self.lease.close()
            self.lease = None

    def as_json(self) -> dict[str, Any]:
        """For ``--json`` and a run's records."""
        source, speed = self.source, self.copied / max(self.seconds, 1e-9) / 1e9
        return {
            "what": source.what, "name": source.name, "revision": source.revision, "from": str(source.root),
            "path": str(self.path), "bytes": self.bytes, "files": self.files, "copied": self.copied, "reused": self.copied == 0,
            "seconds": round(self.seconds, 3), "gb_s": round(speed, 3) if self.copied else None, "removed": self.removed,
        }  # fmt: skip


def key_of(source: SourceFolder, files: Sequence[SourceFile]) -> str:
    """A tree's name: another one for another content. A file without a known digest counts with its time."""
    body = [[file.name, file.size, file.digest or [str(source.root.absolute()), file.mtime_ns]] for file in files]
    digest = hashlib.sha256(json.dumps([source.what, source.name, body]).encode()).hexdigest()[:16]
    return f"{source.what}-{re.sub(r'[^A-Za-z0-9._-]+', '-', source.name)[:60].strip('.-') or 'tree'}-{digest}"


class Stager:
    """Copies trees into a staging cache."""

    def __init__(
        self, on: StagingCache, stall: float = STALL_SECONDS, *, deep: bool = True, tell: Callable[[str], None] = say
    ) -> None:
        """``stall``: seconds without data after which storage is given up. ``deep``: hash a tree that is there, byte for byte;
        else look only whether it was written to since."""
        self._cache, self._stall, self._deep, self._tell = on, stall, deep, tell

    def plan(self, source: SourceFolder) -> dict[str, Any]:
        """What :meth:`stage` would do. Raises UserError."""
        files = hashed_copy.survey(source.root, source.what, self._stall)
        folder = self._cache.folder(key_of(source, files))
        return {
            "what": source.what, "name": source.name, "from": str(source.root), "path": str(folder / source.name),
            "bytes": sum(file.size for file in files), "files": len(files), "there": (folder / MANIFEST).exists(),
        }  # fmt: skip

    def stage(self, source: SourceFolder) -> StagedTree:
        """The tree of ``source``: as it is there, or copied now. Waits where another process fills the cache.

        Raises UserError: the source is incomplete, changes, or hangs; no room, or the disk is full (exit 73). Only a tree with
        a manifest counts; the finished files of an interrupted copy are kept for the next try.
        """

        def waits(holder: str) -> None:
            self._tell(f"waits for {holder}, which uses or fills {self._cache.root}")

        began = time.perf_counter()
        files = hashed_copy.survey(source.root, source.what, self._stall)
        key, size = key_of(source, files), sum(file.size for file in files)
        folder = self._cache.folder(key)
        copied, removed, deep = 0, list[str](), self._deep
        with storing("cannot hold the copy", folder, named=True):
            while True:
                lease = self._cache.shared(key, wait=waits)
                wrong = self._find_wrong(folder, source, files, deep=deep)
                if wrong == []:
                    lease.mark_used()
                    seconds = time.perf_counter() - began
                    return StagedTree(source, folder / source.name, size, len(files), copied, seconds, removed, lease)
                lease.close()
                with self._cache.alone("", wait=waits), self._cache.alone(key, wait=None if wrong else waits) as mine:
                    if not mine:
                        fix = "the shared storage is read until that job has ended"
                        raise UserError("is damaged, and another job reads from it", file=str(folder), fix=fix)
                    if wrong or self._find_wrong(folder, source, files, deep=False) != []:
                        for name in (MANIFEST, *(wrong or ())):
                            (folder / name).unlink(missing_ok=True)
                        folder.mkdir(mode=0o700, exist_ok=True)
                        removed += [str(self._cache.folder(t.key)) for t in self._cache.make_room(key, size, self._tell)]
                        copied += self._fill(folder, source, files)
                        deep = False  # what was just hashed on its way is not hashed again

    def _find_wrong(self, folder: Path, source: SourceFolder, files: Sequence[SourceFile], *, deep: bool) -> list[str] | None:
        """The files of a tree that are not as they were sealed; None where there is no tree. Changes nothing."""
        if not (folder / MANIFEST).exists():
            return None
        try:
            sealed = read_manifest(folder, KIND).files
        except UserError as error:
            self._tell(f"warning: {error.problems[0]}")
            return [MANIFEST]
        expected = {f"{source.name}/{file.name}": (file.size, file.mtime_ns) for file in files}
        # What is not part of the copy: transformers would read some files by their names. Hidden folders are the libraries' own
        # (datasets keeps its tables in .cache beside the data).
        names = [name for name in list_files(folder) if not any(part.startswith(".") for part in name.split("/"))]
        present = {name: ((state := (folder / name).stat()).st_size, state.st_mtime_ns) for name in names}
        wrong = {name for name in present.keys() | expected.keys() if present.get(name) != expected.get(name)}
        look = sorted(sealed.keys() - wrong) if deep else []
        answers = hashed_copy.hash_files([(folder / name, sealed[name]) for name in look], XXH3_128, self._stall)
        wrong |= {name for name, answer in zip(look, answers, strict=True) if answer != sealed[name]}
        if wrong:
            self._tell(f"warning: {folder}: damaged, missing or foreign: {listed(sorted(wrong), 3)}")
        return sorted(wrong)

    def _fill(self, folder: Path, source: SourceFolder, files: Sequence[SourceFile]) -> int:
        """Copy what is missing, and seal the tree. Returns the bytes that were copied."""
        out, expected = folder / source.name, {f"{source.name}/{file.name}" for file in files}
        for name in list_files(folder):
            if name not in expected:
                (folder / name).unlink()
        size = sum(file.size for file in files)
        self._tell(f"copies {source.name}: {len(files)} files, {amount(size)}, {source.root} -> {out}")
        try:
            records, copied = hashed_copy.mirror(source.root, out, files, XXH3_128, self._stall)
            # The source is now what it was before the first byte: nothing was added, replaced or removed meanwhile.
            if hashed_copy.survey(source.root, source.what, self._stall) != list(files):
                fix = "run the same command again when nothing writes there any more"
                raise UserError("changed while it was copied", file=str(source.root), fix=fix, code=ExitCode.AGAIN)
            named = {f"{source.name}/{name}": record for name, record in records.items()}
            meta = {"source": str(source.root), "revision": source.revision, "host": os.uname().nodename}
            seal(folder, KIND, meta, named)
        except (UserError, OSError) as error:
            # The finished files of a copy that failed stay, unless the disk is full, which harms all who use the node.
            if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
                with contextlib.suppress(OSError):
                    discard(folder)
            raise
        return copied
