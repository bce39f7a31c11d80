"""One tree in the staging cache: known by what the source holds, filled, verified, and leased while it is read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune import manifest
from clustertune.console import say
from clustertune.errors import ExitCode, UserError, storage_error
from clustertune.manifest import FileRecord
from clustertune.staging import cache, worker
from clustertune.staging.cache import JOURNAL, KIND, PLANNED, StagingCache, TreeLock
from clustertune.staging.survey import SourceFile
from clustertune.staging.worker import Bounds


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
    """A tree that is whole, and leased until :meth:`release`."""

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
        return {
            "what": self.source.what,
            "name": self.source.name,
            "revision": self.source.revision,
            "from": str(self.source.root),
            "path": str(self.path),
            "bytes": self.bytes,
            "files": self.files,
            "copied": self.copied,
            "reused": self.copied == 0,
            "seconds": round(self.seconds, 3),
            "gb_s": round(self.copied / max(self.seconds, 1e-9) / 1e9, 3) if self.copied else None,
            "removed": self.removed,
        }


def key_of(source: SourceFolder, files: Sequence[SourceFile]) -> str:
    """A tree's name: another one for another content. A file without a known digest counts with its time."""
    body = [[file.name, file.size, file.digest or [str(source.root.absolute()), file.mtime_ns]] for file in files]
    digest = hashlib.sha256(json.dumps([source.what, source.name, body]).encode()).hexdigest()[:16]
    return f"{source.what}-{re.sub(r'[^A-Za-z0-9._-]+', '-', source.name)[:60].strip('.-') or 'tree'}-{digest}"


class Stager:
    """Copies trees into a staging cache."""

    def __init__(self, on: StagingCache, bounds: Bounds, *, deep: bool = True, tell: Callable[[str], None] = say) -> None:
        """``deep``: hash a tree that is there, byte for byte; else look only whether it was written to since."""
        self._cache, self._bounds, self._deep, self._tell = on, bounds, deep, tell

    def plan(self, source: SourceFolder) -> dict[str, Any]:
        """What :meth:`stage` would do. Raises UserError."""
        files = worker.survey(source.root, source.what, self._bounds)
        key = key_of(source, files)
        size = sum(file.size for file in files)
        there = (self._cache.folder(key) / manifest.MANIFEST).exists()
        target = self._cache.folder(key) / source.name
        return {
            **{"what": source.what, "name": source.name, "from": str(source.root), "path": str(target)},
            **{"bytes": size, "files": len(files), "there": there},
        }

    def stage(self, source: SourceFolder) -> StagedTree:
        """The tree of ``source``: as it is there, or copied now. Waits where another process is copying it.

        Raises UserError: the source is not whole, changes, or hangs; no room, or the disk is full (exit 73). Nothing that
        is not whole counts as whole, and what is whole of an interrupted copy is kept for the next try.
        """
        began = time.perf_counter()
        files = worker.survey(source.root, source.what, self._bounds)
        key, size = key_of(source, files), sum(file.size for file in files)
        folder = self._cache.folder(key)
        copied, removed, deep = 0, list[str](), self._deep
        try:
            while True:
                lease = self._cache.shared(key, wait=lambda holder: self._waits(holder, folder))
                wrong = self._find_wrong(folder, source, files, deep=deep)
                if wrong == []:
                    lease.touch()
                    seconds = time.perf_counter() - began
                    return StagedTree(source, folder / source.name, size, len(files), copied, seconds, removed, lease)
                lease.close()
                with self._alone(key, folder, damaged=bool(wrong)):
                    if wrong or self._find_wrong(folder, source, files, deep=False) != []:
                        self._spoil(folder, wrong or [])
                        removed += self._make_room(key, size)
                        copied += self._fill(folder, source, files)
                        deep = False  # what was just hashed on its way is not hashed again
        except OSError as error:
            raise storage_error(error, "cannot hold the copy", error.filename or folder) from error

    @contextlib.contextmanager
    def _alone(self, key: str, folder: Path, *, damaged: bool) -> Iterator[TreeLock]:
        """Hold the tree alone, to fill or fix it. Raises UserError where a job reads from what has to be fixed."""
        wait = None if damaged else lambda holder: self._waits(holder, folder)
        with self._cache.alone(key, wait=wait) as lock:
            if lock is None:
                fix = "the shared storage is read until that job has ended"
                raise UserError("is damaged, and another job reads from it", file=str(folder), fix=fix)
            yield lock

    def _waits(self, holder: str, folder: Path) -> None:
        self._tell(f"waits for {holder}, which uses or fills {folder}")

    def _make_room(self, key: str, size: int) -> list[str]:
        self._cache.folder(key).mkdir(mode=0o700, exist_ok=True)
        return [str(self._cache.folder(tree.key)) for tree in self._cache.make_room(key, size, self._tell)]

    def _find_wrong(self, folder: Path, source: SourceFolder, files: Sequence[SourceFile], *, deep: bool) -> list[str] | None:
        """The files of a tree that are not as they were sealed; None where there is no tree. Changes nothing."""
        if not (folder / manifest.MANIFEST).exists():
            return None
        try:
            found = manifest.read_manifest(folder, KIND)
        except UserError as error:
            self._tell(f"warning: {error.problems[0]}")
            return [manifest.MANIFEST]
        recorded = found.meta.get("signs", {})
        records = {f"{source.name}/{file.name}" for file in files}
        # What is none of the copy's: transformers would read some files by their names. Hidden folders are the libraries' own
        # (datasets keeps its tables in .cache beside the data).
        there = {name for name in manifest.list_files(folder) if not any(part.startswith(".") for part in name.split("/"))}
        wrong = sorted(there ^ records)
        states = {name: signs(folder / name) for name in sorted(records & found.files.keys())}
        suspects = [name for name, state in states.items() if state and (deep or list(state) != recorded.get(name))]
        wrong += cache.find_differing(folder, {name: found.files[name] for name in suspects}, self._bounds)
        if wrong:
            shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            self._tell(f"warning: {folder}: damaged, missing or foreign: {shown}")
        return wrong

    def _spoil(self, folder: Path, wrong: Sequence[str]) -> None:
        """Take the seal off a tree, and keep what is whole of it."""
        if not (folder / manifest.MANIFEST).exists():
            return
        with contextlib.suppress(UserError):
            files = manifest.read_manifest(folder, KIND).files
            cache.write_journal(folder, {name: record for name, record in files.items() if name not in wrong})
        (folder / manifest.MANIFEST).unlink()

    def _fill(self, folder: Path, source: SourceFolder, files: Sequence[SourceFile]) -> int:
        """Copy what is missing, and seal the tree. Returns the bytes that were copied."""
        whole = self._kept_from_before(folder, source, files)
        wanted = [file for file in files if f"{source.name}/{file.name}" not in whole]
        size = sum(file.size for file in wanted)
        if whole:
            self._tell(f"{len(whole)} files of an earlier copy are whole and kept")
        self._tell(f"copies {source.name}: {len(wanted)} files, {worker.amount(size)}, {source.root} -> {folder / source.name}")
        try:
            with cache.journal(folder, whole) as add, worker.shown(f"copying {source.name}", size) as advance:

                def keep(name: str, record: FileRecord) -> None:
                    add(f"{source.name}/{name}", record)

                worker.copy(source.root, folder / source.name, wanted, self._bounds, done=keep, advance=advance)
            self._check_source(source, files)
            self._seal(folder, source, whole)
        except (UserError, OSError) as error:
            self._leave(folder, error)
            raise
        return size

    def _check_source(self, source: SourceFolder, files: Sequence[SourceFile]) -> None:
        """The source is now what it was before the first byte: nothing was added, replaced or removed meanwhile."""
        if worker.survey(source.root, source.what, self._bounds) != list(files):
            fix = "run the same command again when nothing writes there any more"
            raise UserError("changed while it was copied", file=str(source.root), fix=fix, code=ExitCode.AGAIN)

    def _leave(self, folder: Path, error: UserError | OSError) -> None:
        """What stays of a copy that failed: its whole files, unless the disk is full, which harms all who use the node."""
        if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
            with contextlib.suppress(OSError):
                cache.discard(folder)

    def _kept_from_before(self, folder: Path, source: SourceFolder, files: Sequence[SourceFile]) -> dict[str, FileRecord]:
        """The files that a killed copy has left whole: each is hashed again, and all others are removed."""
        expected = {f"{source.name}/{file.name}": file for file in files}

        def fits(name: str, record: FileRecord) -> bool:
            file = expected.get(name)
            return file is not None and file.fits(record)

        return cache.keep_whole(folder, self._bounds, fits, lambda _name: True)

    def _seal(self, folder: Path, source: SourceFolder, whole: Mapping[str, FileRecord]) -> None:
        meta = {
            "source": str(source.root),
            "revision": source.revision,
            "host": os.uname().nodename,
            "signs": {name: signs(folder / name) for name in whole},
        }
        for name in (JOURNAL, PLANNED):
            (folder / name).unlink(missing_ok=True)
        manifest.seal(folder, KIND, meta, whole)


def signs(path: Path) -> tuple[int, int, int] | None:
    """Inode, mtime and ctime: a file whose signs are the same was not written to through the file system. None: not there."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_ctime_ns
