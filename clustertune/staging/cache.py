"""The staging folder of a node: one tree for each model or dataset, who uses it, and what makes room for the next.

``PATH/clustertune-UID/KEY/`` holds ``MANIFEST.json`` (written last) and the tree in a folder that has the source's name. Beside
it lies ``KEY.lock``: whoever fills or removes the tree holds it alone, whoever reads from it shares it. The kernel frees a
lock with its process, so that a killed job uses nothing; the file's time says when the tree was used last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertune import lock
from clustertune.config.cluster_schema import Staging
from clustertune.errors import ExitCode, UserError, storage_error
from clustertune.manifest import MANIFEST, FileRecord, fsync_path, list_files, parse_record, read_manifest, write_durably
from clustertune.staging import worker
from clustertune.staging.worker import Bounds, amount

KIND = "staged"
PLANNED = ".planned.tmp"
"""Bytes that a tree will take, while it is filled: room that is promised is not given twice."""
JOURNAL = ".whole.tmp"
"""The files that are whole, one JSON line each, while the tree is filled."""
SPARE = 64 << 20
"""Bytes of the disk that are left free."""


@dataclass(frozen=True)
class CachedTree:
    """What lies in the cache under one key."""

    key: str
    bytes: int
    used: float
    """Unix time."""
    whole: bool


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
        found = []
        for path in self.root.iterdir():
            if not path.is_dir() or path.is_symlink():
                continue
            try:
                used = self.lock_file(path.name).stat().st_mtime
            except OSError:
                used = 0.0
            found.append(CachedTree(path.name, tree_bytes(path), used, (path / MANIFEST).exists()))
        return sorted(found, key=lambda tree: tree.used)

    def shared(self, key: str, *, wait: Callable[[str], None]) -> TreeLock:
        """Share a tree with all who read from it. ``wait``: called once with who fills or removes it."""
        taken = _take(self.lock_file(key), fcntl.LOCK_SH, wait)
        assert taken is not None
        return taken

    @contextlib.contextmanager
    def alone(self, key: str, *, wait: Callable[[str], None] | None) -> Iterator[TreeLock | None]:
        """Hold a tree alone. ``wait``: called once with who holds it; None: gives None at once where it is held."""
        taken = _take(self.lock_file(key), fcntl.LOCK_EX, wait)
        try:
            yield taken
        finally:
            if taken is not None:
                taken.close()

    def make_room(self, key: str, size: int, say: Callable[[str], None]) -> list[CachedTree]:
        """Promise ``size`` bytes to a tree; what was used longest ago goes. Returns what went.

        Call with the tree's own lock held. Raises UserError: more than the limit, or no room (exit 73).
        """
        if size > self.limit:
            text = f"{amount(size)} do not fit into the {amount(self.limit)} that may be kept there"
            fix = "raise storage.staging.gb in the cluster file, or slurm.staging=false reads from the shared storage"
            raise UserError(text, file=str(self.root), fix=fix, code=ExitCode.STORAGE)
        removed: list[CachedTree] = []
        with self.alone("", wait=lambda _holder: None):  # one at a time counts and promises room
            others = [tree for tree in self.trees() if tree.key != key]
            there = tree_content(self.folder(key))
            used = sum(tree.bytes for tree in others)
            # What others are still filling is promised on the disk too.
            promised = sum(max(0, tree.bytes - tree_content(self.folder(tree.key))) for tree in others if not tree.whole)

            def lacking() -> int:
                disk = size - there + promised + SPARE - shutil.disk_usage(self.root).free
                return max(used + size - self.limit, disk)

            for tree in others:
                if (lack := lacking()) <= 0:
                    break
                if self.remove(tree.key, tree, say, f"to make room for {amount(lack)}"):
                    removed.append(tree)
                    used -= tree.bytes
            if (lack := lacking()) > 0:
                raise self._no_room(size, lack, len(others) - len(removed))
            write_durably(self.folder(key) / PLANNED, str(size))
        return removed

    def _no_room(self, size: int, lack: int, in_use: int) -> UserError:
        text = f"no room for {amount(size)}: {amount(lack)} are lacking"
        text += f", and {in_use} trees there are in use" if in_use else ""
        fix = "free space there, or slurm.staging=false reads from the shared storage"
        return UserError(text, file=str(self.root), fix=fix, code=ExitCode.STORAGE)

    def remove(self, key: str, tree: CachedTree, say: Callable[[str], None], why: str) -> bool:
        """Remove a tree that is not in use; False where it is. The manifest goes first: half a tree is never whole."""
        with self.alone(key, wait=None) as taken:
            if taken is None:
                return False
            say(f"removes {self.folder(key)} ({amount(tree.bytes)}, used {ago(tree.used)}) {why}")
            discard(self.folder(key))
            self.lock_file(key).unlink(missing_ok=True)
        return True


@dataclass
class TreeLock:
    """An open lock of a tree."""

    path: Path
    fd: int

    def touch(self) -> None:
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
        found = root.lstat()
    except FileNotFoundError:
        host = os.uname().nodename
        fix = "mount the node's disk, or correct storage.staging.path in the cluster file"
        raise UserError(f"{host} has no such folder", file=str(path), fix=fix, code=ExitCode.STORAGE) from None
    except OSError as error:
        raise storage_error(error, "cannot be used for staging", path) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
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
    """What a tree takes, or was promised while it is filled."""
    try:
        return sum(record.size for record in read_manifest(folder, KIND).files.values())
    except UserError:
        pass
    planned = 0
    with contextlib.suppress(OSError, ValueError):
        planned = int((folder / PLANNED).read_text())
    return max(planned, tree_content(folder))


def tree_content(folder: Path) -> int:
    """Bytes that lie in a folder."""
    total = 0
    for root, _dirs, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 - thousands of files
    return total


def ago(used: float) -> str:
    """``3 days ago``."""
    seconds = max(0.0, time.time() - used)
    for size, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word} ago" if used else "never"
    return "just now"


def _take(path: Path, how: int, wait: Callable[[str], None] | None) -> TreeLock | None:
    """Lock a file that is made where it is absent; None where it is locked and nothing waits. Raises OSError."""
    fd = lock.take(path, how, wait, in_cache=True)
    return None if isinstance(fd, str) else TreeLock(path, fd)


def _journal_line(name: str, record: FileRecord) -> str:
    return json.dumps({"name": name, **record.as_json()}) + "\n"


def write_journal(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """The journal again, with these files."""
    write_durably(folder / JOURNAL, "".join(_journal_line(*item) for item in sorted(records.items())))


@contextlib.contextmanager
def journal(folder: Path, records: dict[str, FileRecord]) -> Iterator[Callable[[str, FileRecord], None]]:
    """A function that adds a whole file to ``records`` and to the folder's journal."""
    with (folder / JOURNAL).open("a") as file:

        def add(name: str, record: FileRecord) -> None:
            records[name] = record
            file.write(_journal_line(name, record))
            file.flush()

        yield add


def read_journal(folder: Path) -> dict[str, FileRecord]:
    """The files that were whole when a killed process left the folder; a torn last line is none."""
    found = {}
    with contextlib.suppress(OSError):
        for line in (folder / JOURNAL).read_bytes().splitlines():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                body = json.loads(line)
                found[str(body["name"])] = parse_record(body)
    return found


def keep_whole(
    folder: Path, bounds: Bounds, fits: Callable[[str, FileRecord], bool], goes: Callable[[str], bool]
) -> dict[str, FileRecord]:
    """What an interrupted process has left whole, each file hashed again; the journal names these alone.

    ``fits``: whether a file is still wanted as it was recorded. ``goes``: whether any other file is removed.
    """
    there = {name: record for name, record in read_journal(folder).items() if fits(name, record) and (folder / name).is_file()}
    wrong = set(find_differing(folder, there, bounds))
    whole = {name: record for name, record in there.items() if name not in wrong}
    for name in list_files(folder):
        if name not in whole and goes(name):
            (folder / name).unlink()
    write_journal(folder, whole)
    return whole


def find_differing(folder: Path, records: Mapping[str, FileRecord], bounds: Bounds) -> list[str]:
    """The files whose content is not what was recorded."""
    with worker.shown("verifying", sum(record.size for record in records.values())) as advance:
        paths = [(folder / name, record.algorithm) for name, record in records.items()]
        answers = worker.hash_files(paths, bounds, advance)
    found = zip(records.items(), answers, strict=True)
    return [name for (name, record), answer in found if answer != (record.size, record.digest)]
