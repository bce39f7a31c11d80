"""Reading, copying and hashing many files in a child process that is given up when nothing moves.

A mount that hangs holds every process that reads from it, and no signal helps: so :func:`within` has a child do the work, and
ends it where no byte comes for so many seconds. The child is ``python -m clustertune.staging.hashed_copy FD``, with a
``multiprocessing.Connection`` at that descriptor; ``multiprocessing`` itself would wait for the child when the parent exits.
Copies are hashed on their way: neither ``rsync`` nor ``cp`` says what it has read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from io import FileIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from clustertune import console
from clustertune.errors import ExitCode, UserError, storage_error
from clustertune.manifest import FileRecord, new_hasher
from clustertune.process import die_with_parent
from clustertune.staging import source_files
from clustertune.staging.source_files import SourceFile

STALL_SECONDS = 120.0
"""How long nothing may move: longer than the fail-over of a file server, shorter than what holds up a job unnoticed."""
SECONDS_BETWEEN_LINES = 30.0
BLOCK = 8 << 20
"""Bytes of one read: a network file system splits it into requests that are under way together."""
THREADS = 8
REPORT_SECONDS = 0.2

Advance = Callable[[int], None]


class Stalled(UserError):
    """No byte came for the whole limit."""


def amount(size: float) -> str:
    """``3.2 MB``."""
    for unit, word in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.2f} {word}"
    return f"{size:.0f} bytes"


# --- what the callers use ------------------------------------------------------------------------------------------------


def locate(root: Path, stall: float) -> Path:
    """Where a folder really lies, links followed. Raises UserError."""
    return Path(within(stall, root, "locate", root))


def survey(root: Path, what: str, stall: float) -> list[SourceFile]:
    """:func:`clustertune.staging.source_files.survey` with a limit. Raises UserError."""
    found: list[SourceFile] = within(stall, root, "survey", root, what)
    return found


def mirror(
    root: Path, out: Path, sources: Sequence[SourceFile], algorithm: str, stall: float
) -> tuple[dict[str, FileRecord], int]:
    """Copy files into ``out``, several at once. Returns the record of each by ``algorithm``, and the bytes that were copied.

    A file that is there with the source's size and time is hashed and kept, as rsync would; one whose hash is not the one that
    the source's folder names is copied again. A file has its name only once all of it is on the disk. Raises UserError.
    """
    if not sources:
        return {}, 0
    with shown(f"copying {root.name}", sum(file.size for file in sources)) as advance:
        found: tuple[dict[str, FileRecord], int] = within(
            stall, root, "copy_files", root, out, sources, algorithm, advance=advance, target=out
        )
    return found


def hash_files(
    paths: Sequence[tuple[Path, FileRecord | None]], algorithm: str, stall: float, what: str = "verifying"
) -> list[FileRecord | str]:
    """The record of each file, by the algorithm of its given record, else by ``algorithm``; a text where it cannot be read.

    Raises UserError where the storage hangs.
    """
    if not paths:
        return []
    with shown(what, sum(record.size for _, record in paths if record)) as advance:
        pairs = [(path, record.algorithm if record else algorithm) for path, record in paths]
        found: list[FileRecord | str] = within(stall, paths[0][0].parent, "hash_all", pairs, advance=advance)
    return found


@contextlib.contextmanager
def shown(what: str, total: int) -> Iterator[Advance]:
    """A function that shows the bytes done so far: a bar on a terminal, elsewhere a line every half minute."""
    with console.byte_progress() as bar:
        task = bar.add_task(what, total=total)
        began = last = time.monotonic()

        def advance(done: int) -> None:
            nonlocal last
            bar.update(task, completed=done)
            now = time.monotonic()
            if not console.stderr.is_terminal and now - last > SECONDS_BETWEEN_LINES:
                last = now
                rate = done / max(now - began, 1e-9) / 1e9
                console.say(f"{what}: {amount(done)} of {amount(total)}, {rate:.2f} GB/s")

        yield advance


# --- the child, seen from the parent -------------------------------------------------------------------------------------


def within(
    stall: float, path: Path, task: str, *arguments: Any, advance: Advance = lambda _: None, target: Path | None = None
) -> Any:
    """Have a child carry out one of :data:`TASKS`. ``path``: for messages; ``advance``: called with the bytes so far.

    Raises UserError: the task's own, or exit 73 where nothing moved for ``stall`` seconds.
    """
    package = str(Path(__file__).resolve().parents[2])
    ours, theirs = Pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "clustertune.staging.hashed_copy", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))},
    )
    theirs.close()
    try:
        ours.send((task, arguments))
        while ours.poll(stall):
            kind, body = ours.recv()
            if kind == "bytes":
                advance(body)
            elif kind == "answer":
                return body
            elif kind == "problems":
                raise UserError(*body)
            else:
                where = body.filename or str(path)
                doing = "cannot be written" if target is not None and Path(where).is_relative_to(target) else "cannot be read"
                raise storage_error(body, doing, where)
        fix = "is the storage mounted and its server up? --stall SECONDS waits longer"
        raise Stalled(f"nothing was read or written for {stall:g} s", file=str(path), fix=fix, code=ExitCode.STORAGE)
    except (EOFError, ConnectionError):
        text = f"the copying process ended (exit code {child.wait()})"
        raise UserError(text, file=str(path), fix="run the same command again: it continues", code=ExitCode.AGAIN) from None
    finally:
        child.kill()
        # A process that waits for a hung mount ends when the mount answers: it is not waited for, and has nothing to say.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(2)
        ours.close()


# --- the child -----------------------------------------------------------------------------------------------------------


class Progress:
    """The bytes done by all threads, sent to the parent a few times a second."""

    def __init__(self, parent: Connection) -> None:
        self._parent, self._lock = parent, threading.Lock()
        self._bytes, self._sent = 0, 0.0

    def __call__(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if time.monotonic() - self._sent > REPORT_SECONDS:
                self._sent = time.monotonic()
                self._parent.send(("bytes", self._bytes))


def copy_files(
    advance: Advance, root: Path, out: Path, sources: Sequence[SourceFile], algorithm: str
) -> tuple[dict[str, FileRecord], int]:
    """:func:`mirror`, in this process. Raises UserError, OSError of the first file that fails."""
    pool = ThreadPoolExecutor(THREADS)
    largest_first = sorted(sources, key=lambda file: -file.size)  # none is left alone at the end
    running = {pool.submit(_copy, advance, file, root / file.name, out / file.name, algorithm): file for file in largest_first}
    records, copied = {}, 0
    try:
        for done in as_completed(running):
            records[running[done].name], new = done.result()
            copied += new
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return records, copied


def _copy(advance: Advance, file: SourceFile, source: Path, target: Path, algorithm: str) -> tuple[FileRecord, int]:
    """The record of the copy, and the bytes that were copied."""
    # By its own digest where that is another too: a copy on a node's disk is recorded by XXH3 beside the source's SHA-256,
    # for it is hashed again and again, eight times faster.
    kinds = {kind for kind in (algorithm, file.algorithm) if kind}

    def record(digests: Mapping[str, str]) -> FileRecord | None:
        fits = not file.algorithm or digests[file.algorithm] == file.digest
        return FileRecord(file.size, digests[algorithm], algorithm) if fits else None

    with contextlib.suppress(OSError):
        there = target.stat()
        if (there.st_size, there.st_mtime_ns) == (file.size, file.mtime_ns):
            with target.open("rb", buffering=0) as kept:
                if same := record(_hash(advance, kept, target, kinds, file.size)[1]):
                    return same, 0
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.tmp")  # not part of a folder, for its manifest
    with _named(source), source.open("rb", buffering=0) as src:
        _require_unchanged(file, src, source)
        with _named(part), os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as dst:
            size, digests = _hash(advance, src, source, kinds, file.size, dst.write)
            dst.flush()
            os.fsync(dst.fileno())
            _forget(dst.fileno())
        _require_unchanged(file, src, source)
        if size != file.size:
            raise _changed(source)
    if (found := record(digests)) is None:
        part.unlink()
        where = "the name that the Hub gave it" if source.is_symlink() else "the folder's manifest"
        fix = "the file is damaged where it lies: load or make it again"
        text = f"its content differs from {where} ({file.algorithm})"
        raise UserError(text, file=str(source), fix=fix, code=ExitCode.FAILED)
    os.utime(part, ns=(file.mtime_ns, file.mtime_ns))
    part.replace(target)
    return found, file.size


def _hash(
    advance: Advance, src: FileIO, path: Path, kinds: set[str], size: int, write: Callable[[memoryview], object] | None = None
) -> tuple[int, dict[str, str]]:
    """Size and digests of what is read from ``src``; each block is given to ``write`` too."""
    hashers = {kind: new_hasher(kind, size) for kind in kinds}
    buffer, done = memoryview(bytearray(BLOCK)), 0
    while True:
        with _named(path):
            count = src.readinto(buffer)
        if not count or done > size:
            break
        for hasher in hashers.values():
            hasher.update(buffer[:count])
        if write is not None:
            write(buffer[:count])
        done += count
        advance(count)
    _forget(src.fileno())
    return done, {kind: hasher.hexdigest() for kind, hasher in hashers.items()}


def _forget(fd: int) -> None:
    """Give a file's pages back: 800 GB through the page cache push out everything else. Some file systems refuse."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _require_unchanged(file: SourceFile, src: FileIO, path: Path) -> None:
    state = os.fstat(src.fileno())
    if (state.st_size, state.st_mtime_ns, state.st_ctime_ns) != (file.size, file.mtime_ns, file.ctime_ns):
        raise _changed(path)


def _changed(path: Path) -> UserError:
    """A source that was written to, replaced or removed while it was read."""
    fix = "run the same command again when nothing writes there any more"
    return UserError("changed while it was copied", file=str(path), fix=fix, code=ExitCode.AGAIN)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Give errors that name no file this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def hash_all(advance: Advance, paths: Sequence[tuple[Path, str]]) -> list[FileRecord | str]:
    """:func:`hash_files`, in this process."""

    def one(item: tuple[Path, str]) -> FileRecord | str:
        path, algorithm = item
        try:
            with path.open("rb", buffering=0) as src:
                size, digests = _hash(advance, src, path, {algorithm}, os.fstat(src.fileno()).st_size)
        except OSError as error:
            return error.strerror or str(error)
        return FileRecord(size, digests[algorithm], algorithm)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, paths))


TASKS: Mapping[str, Callable[..., Any]] = {
    "locate": lambda _advance, root: os.path.realpath(root),
    "survey": lambda _advance, root, what: source_files.survey(root, what),
    "copy_files": copy_files,
    "hash_all": hash_all,
}


def main() -> None:
    """Carry out one task, and answer. The process ends with the answer: what other threads still do is of no use."""
    die_with_parent(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the job: the parent ends this process
    parent: Connection = Connection(int(sys.argv[1]))
    task, arguments = parent.recv()
    progress = Progress(parent)
    answer: tuple[str, Any]
    try:
        answer = ("answer", TASKS[task](progress, *arguments))
    except UserError as error:
        answer = ("problems", (error.problems, error.code))
    except OSError as error:
        answer = ("os", OSError(error.errno, error.strerror or str(error), error.filename))
    with progress._lock:
        parent.send(answer)
    os._exit(0)


if __name__ == "__main__":
    main()
