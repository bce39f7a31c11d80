"""Copying many files at the speed of the disks: several at once, ranges of a large one side by side, hashed on the way.

Blocks are read with large sequential reads (page faults of a mapped file cost a round trip each on NFS), hashed in order as
they pass, written, and dropped from the page cache on both sides: a model larger than the memory leaves it as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.manifest import GIT_SHA1, XXH3_128, Hasher, new_hasher
from clustertune.staging.survey import SourceFile

BLOCK = 8 << 20
"""Bytes of one read: a network file system splits it into requests that are under way together."""
WORKERS = 8
IN_FLIGHT = 4
"""Blocks of one file that are under way at once: hashing goes in order, and the others wait for it."""
BEHIND = 8
"""Blocks after which what was written must have reached the disk: dirty pages stay few, and the last fsync short."""
_WRITE, _WAIT_WRITE_WAIT = 2, 7  # linux/fs.h: SYNC_FILE_RANGE_WRITE; with WAIT_BEFORE and WAIT_AFTER


class Stop(Exception):
    """Another worker has failed."""


@dataclass(frozen=True)
class Done:
    """A copied file: its record, and by which signs it is known again without being read."""

    name: str
    size: int
    digest: str
    algorithm: str
    signs: tuple[int, int, int]
    """Inode, mtime and ctime (ns) of the copy."""


def hashers(file: SourceFile, record: str) -> dict[str, Hasher]:
    """What a file is hashed with: the digest that its copy is recorded by first, then the source's own where that is another.

    A copy on a node's disk is recorded by XXH3 beside the source's SHA-256: it is hashed again and again, eight times faster.
    """
    found: dict[str, Hasher] = {record: new_hasher(record)}
    if file.algorithm == GIT_SHA1:
        found[GIT_SHA1] = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    elif file.algorithm not in (None, record):
        found[file.algorithm] = new_hasher(file.algorithm)
    return found


def signs(path: Path) -> tuple[int, int, int]:
    """Inode, mtime and ctime: a file whose signs are the same was not written to through the file system."""
    state = path.stat()
    return state.st_ino, state.st_mtime_ns, state.st_ctime_ns


def write_back(fd: int, offset: int, size: int, *, wait: bool) -> None:
    """Start writing a range to the disk, or wait until it is there; a hint only, :func:`os.fsync` is what counts."""
    _libc().sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _WAIT_WRITE_WAIT if wait else _WRITE)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def drop(fd: int, offset: int, size: int) -> None:
    """Give a range's pages back; file systems without a page cache refuse."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


@dataclass
class _Open:
    """A file that is being copied."""

    file: SourceFile
    source: Path
    target: Path
    src: int
    dst: int
    hashes: dict[str, Hasher]
    next_block: int = 0
    hashed: int = 0
    left: int = 0
    turn: threading.Condition = field(default_factory=threading.Condition)

    @property
    def blocks(self) -> int:
        return max(1, -(-self.file.size // BLOCK))


class Copier:
    """Copies files with several threads. ``advance(bytes)`` is called for every block, ``done`` for every whole file."""

    def __init__(
        self,
        root: Path,
        out: Path,
        files: Sequence[SourceFile],
        *,
        advance: Callable[[int], None],
        done: Callable[[Done], None],
        workers: int = WORKERS,
        record: str = XXH3_128,
    ) -> None:
        self._record = record
        self._root, self._out, self._advance, self._done = root, out, advance, done
        self._waiting = deque(sorted(files, key=lambda file: -file.size))  # the largest first: none is left alone at the end
        self._open: list[_Open] = []
        self._workers = max(1, min(workers, sum(-(-file.size // BLOCK) or 1 for file in files)))
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Copy all. Raises what the first failing worker met: OSError with the path, UserError where a file is not as said."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        buffer = bytearray(BLOCK)
        try:
            while (found := self._take()) is not None:
                self._copy_block(*found, memoryview(buffer))
        except Stop:
            pass
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            for item in list(self._open):
                with item.turn:
                    item.turn.notify_all()

    def _take(self) -> tuple[_Open, int] | None:
        """The next block: of the open file that has the fewest under way, or of one more file where all have enough."""
        with self._lock:
            if self._error is not None:
                raise Stop
            ready = [item for item in self._open if item.next_block < item.blocks]
            ready.sort(key=lambda item: item.left)
            if self._waiting and (not ready or len(ready) < self._workers or ready[0].left >= IN_FLIGHT):
                item = self._begin(self._waiting.popleft())
                self._open.append(item)
            elif ready:
                item = ready[0]
            else:
                return None
            number = item.next_block
            item.next_block += 1
            item.left += 1
            return item, number

    def _begin(self, file: SourceFile) -> _Open:
        source, target = self._root / file.name, self._out / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            target.unlink()  # a new inode: what a killed copier has still open is no longer this file
        src = os.open(source, os.O_RDONLY | os.O_NOCTTY)
        try:
            self._same(file, src, source)
            dst = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except BaseException:
            os.close(src)
            raise
        with contextlib.suppress(OSError):
            os.posix_fadvise(src, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return _Open(file, source, target, src, dst, hashers(file, self._record))

    def _same(self, file: SourceFile, fd: int, path: Path) -> None:
        state = os.fstat(fd)
        if (state.st_size, state.st_mtime_ns, state.st_ctime_ns) != (file.size, file.mtime_ns, file.ctime_ns):
            raise changed(path)

    def _copy_block(self, item: _Open, number: int, buffer: memoryview) -> None:
        offset = number * BLOCK
        view = buffer[: min(BLOCK, item.file.size - offset)]
        try:
            _read(item.src, view, offset, item.source)
            drop(item.src, offset, len(view))
            self._hash(item, number, view)
            _write(item.dst, view, offset)
            write_back(item.dst, offset, len(view), wait=False)
            if number >= BEHIND:
                before = offset - BEHIND * BLOCK
                write_back(item.dst, before, BLOCK, wait=True)
                drop(item.dst, before, BLOCK)
        except OSError as error:
            if error.filename is None:
                error.filename = str(item.target)
            raise
        self._advance(len(view))
        with self._lock:
            item.left -= 1
            whole = item.left == 0 and item.next_block == item.blocks
            if whole:
                self._open.remove(item)
        if whole:
            self._finish(item)

    def _hash(self, item: _Open, number: int, view: memoryview) -> None:
        """Hash a block when those before it are hashed: they are under way in other threads, which never wait for this one."""
        with item.turn:
            while item.hashed != number:
                if self._error is not None:
                    raise Stop
                item.turn.wait(0.5)
        for hasher in item.hashes.values():
            hasher.update(view)
        with item.turn:
            item.hashed += 1
            item.turn.notify_all()

    def _finish(self, item: _Open) -> None:
        try:
            os.fsync(item.dst)
            drop(item.dst, 0, 0)
            self._same(item.file, item.src, item.source)
        except OSError as error:
            error.filename = error.filename or str(item.target)
            raise
        finally:
            os.close(item.src)
            os.close(item.dst)
        digests = {kind: hasher.hexdigest() for kind, hasher in item.hashes.items()}
        if item.file.algorithm and digests[item.file.algorithm] != item.file.digest:
            raise damaged(item.source, item.file.algorithm)
        kind = next(iter(digests))
        self._done(Done(item.file.name, item.file.size, digests[kind], kind, signs(item.target)))


def changed(path: Path) -> UserError:
    """A source that was written to, replaced or removed while it was read."""
    fix = "run the same command again when nobody writes there any more"
    return UserError(Problem("changed while it was copied", file=str(path), fix=fix), ExitCode.AGAIN)


def damaged(path: Path, algorithm: str) -> UserError:
    """A source whose content is not what its own folder says."""
    where = "the name that the Hub gave it" if path.is_symlink() else "the folder's manifest"
    fix = "the file is damaged where it lies: load or make it again"
    return UserError(Problem(f"its content differs from {where} ({algorithm})", file=str(path), fix=fix), ExitCode.FAILED)


def _read(fd: int, view: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if not got:  # shorter than it was
            raise changed(path)
        done += got


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def hash_files(
    paths: Sequence[tuple[Path, str]], advance: Callable[[int], None], workers: int = WORKERS
) -> list[tuple[int, str] | str]:
    """Size and digest of each file (with its algorithm), several at once; a text where one cannot be read."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(lambda item: _hash_one(item[0], item[1], advance), paths))


def _hash_one(path: Path, algorithm: str, advance: Callable[[int], None]) -> tuple[int, str] | str:
    hasher, size = new_hasher(algorithm), 0
    buffer = memoryview(bytearray(BLOCK))
    try:
        with path.open("rb", buffering=0) as src:
            while got := src.readinto(buffer):
                hasher.update(buffer[:got])
                drop(src.fileno(), size, got)
                size += got
                advance(got)
    except OSError as error:
        return error.strerror or str(error)
    return size, hasher.hexdigest()
