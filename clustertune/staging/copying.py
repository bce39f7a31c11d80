"""Copying many files at the speed of the disks: several at once, hashed on the way.

Blocks are read with large sequential reads (page faults of a mapped file cost a round trip each on NFS), hashed in order as
they pass, written, and dropped from the page cache on both sides: a model larger than the memory leaves it as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path

from clustertune.errors import ExitCode, UserError
from clustertune.manifest import XXH3_128, FileRecord, Hasher, new_hasher
from clustertune.staging.survey import SourceFile

BLOCK = 8 << 20
"""Bytes of one read: a network file system splits it into requests that are under way together."""
WORKERS = 8
BEHIND = 8
"""Blocks after which what was written must have reached the disk: dirty pages stay few, and the last fsync short."""
_WRITE, _WAIT_WRITE_WAIT = 2, 7  # linux/fs.h: SYNC_FILE_RANGE_WRITE; with WAIT_BEFORE and WAIT_AFTER


def hashers(file: SourceFile, record: str) -> dict[str, Hasher]:
    """What a file is hashed with: the digest that its copy is recorded by first, then the source's own where that is another.

    A copy on a node's disk is recorded by XXH3 beside the source's SHA-256: it is hashed again and again, eight times faster.
    """
    return {algorithm: new_hasher(algorithm, file.size) for algorithm in (record, file.algorithm) if algorithm}


def write_back(fd: int, offset: int, size: int, *, wait: bool) -> None:
    """Start writing a range to the disk, or wait until it is there; a hint only, :func:`os.fsync` is what counts."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _WAIT_WRITE_WAIT if wait else _WRITE)


def drop(fd: int, offset: int, size: int) -> None:
    """Give a range's pages back; file systems without a page cache refuse."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


def copy_files(
    root: Path,
    out: Path,
    files: Sequence[SourceFile],
    *,
    advance: Callable[[int], None],
    done: Callable[[str, FileRecord], None],
    workers: int = WORKERS,
    record: str = XXH3_128,
) -> None:
    """Copy files, several at once. ``advance(bytes)`` is called for every block, ``done`` for every whole file.

    Raises what the first failing one met: OSError with the path, UserError where a file is not as recorded.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, workers)) as pool:
        largest_first = sorted(files, key=lambda file: -file.size)  # none is left alone at the end
        running = [pool.submit(_copy, file, root / file.name, out / file.name, record, advance, stop) for file in largest_first]
        try:
            for copied in as_completed(running):
                done(*copied.result())
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _copy(
    file: SourceFile, source: Path, target: Path, record: str, advance: Callable[[int], None], stop: threading.Event
) -> tuple[str, FileRecord]:
    hashes, offset = hashers(file, record), 0
    with _named(target), source.open("rb", buffering=0) as src:
        _same(file, src, source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a new inode: what a killed copier has still open is no longer this file
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as dst:
            for block in _blocks(src, source):
                if stop.is_set():
                    raise CancelledError
                if offset + len(block) > file.size:  # it grows while it is read
                    raise changed(source)
                for hasher in hashes.values():
                    hasher.update(block)
                _write(dst.fileno(), block, offset)
                write_back(dst.fileno(), offset, len(block), wait=False)
                offset += len(block)
                if offset > BEHIND * BLOCK:
                    write_back(dst.fileno(), offset - BEHIND * BLOCK, BLOCK, wait=True)
                    drop(dst.fileno(), offset - BEHIND * BLOCK, BLOCK)
                advance(len(block))
            os.fsync(dst.fileno())
            drop(dst.fileno(), 0, 0)
        _same(file, src, source)
    digests = {kind: hasher.hexdigest() for kind, hasher in hashes.items()}
    if file.algorithm and digests[file.algorithm] != file.digest:
        raise damaged(source, file.algorithm)
    return file.name, FileRecord(file.size, digests[record], record)


def _same(file: SourceFile, src: io.FileIO, path: Path) -> None:
    """Raise UserError where an open source is not what was listed."""
    state = os.fstat(src.fileno())
    if (state.st_size, state.st_mtime_ns, state.st_ctime_ns) != (file.size, file.mtime_ns, file.ctime_ns):
        raise changed(path)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Give errors that name no file this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _blocks(src: io.FileIO, path: Path) -> Iterator[memoryview]:
    """A file's content, each block valid until the next is asked for; the pages of what was read are given back."""
    buffer, offset = memoryview(bytearray(BLOCK)), 0
    with contextlib.suppress(OSError):
        os.posix_fadvise(src.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while True:
        with _named(path):
            got = src.readinto(buffer)
        if not got:
            return
        drop(src.fileno(), offset, got)
        offset += got
        yield buffer[:got]


def changed(path: Path) -> UserError:
    """A source that was written to, replaced or removed while it was read."""
    fix = "run the same command again when nothing writes there any more"
    return UserError("changed while it was copied", file=str(path), fix=fix, code=ExitCode.AGAIN)


def damaged(path: Path, algorithm: str) -> UserError:
    """A source whose content is not what its own folder says."""
    where = "the name that the Hub gave it" if path.is_symlink() else "the folder's manifest"
    fix = "the file is damaged where it lies: load or make it again"
    return UserError(f"its content differs from {where} ({algorithm})", file=str(path), fix=fix, code=ExitCode.FAILED)


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def hash_files(
    paths: Sequence[tuple[Path, str]], advance: Callable[[int], None], workers: int = WORKERS
) -> list[tuple[int, str] | str]:
    """Size and digest of each file (with its algorithm), several at once; a text where one cannot be read."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(lambda item: _hash_one(item[0], item[1], advance), paths))


def _hash_one(path: Path, algorithm: str, advance: Callable[[int], None]) -> tuple[int, str] | str:
    hasher, size = new_hasher(algorithm), 0
    try:
        with path.open("rb", buffering=0) as src:
            for block in _blocks(src, path):
                hasher.update(block)
                size += len(block)
                advance(len(block))
    except OSError as error:
        return error.strerror or str(error)
    return size, hasher.hexdigest()
