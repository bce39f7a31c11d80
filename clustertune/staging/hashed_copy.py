"""Reading, copying and hashing many files in a child process that is given up when nothing moves.

A mount that hangs holds every process that reads from it, and no signal helps: so :func:`within` has a forked child do the
work, and ends it where it has read, written and computed nothing for so many seconds. Copies are hashed on their way: neither
``rsync`` nor ``cp`` says what it has written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from clustertune import bounded, console
from clustertune.errors import ExitCode, Problem, UserError, storage_error
from clustertune.manifest import DigestComparison, FileRecord, new_hasher
from clustertune.staging import source_files
from clustertune.staging.source_files import SourceFile

STALL_SECONDS = 120.0
"""How long nothing may move: longer than the fail-over of a file server, shorter than what holds up a job unnoticed."""
BLOCK = 8 << 20
"""Bytes of one read: a network file system splits it into requests that are under way together."""
THREADS = 8
T = TypeVar("T")


def amount(size: float) -> str:
    """``3.2 MB``."""
    for unit, word in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.2f} {word}"
    return f"{size:.0f} bytes"


# --- what the callers use ------------------------------------------------------------------------------------------------


def survey(root: Path, what: str, stall: float) -> list[SourceFile]:
    """:func:`clustertune.staging.source_files.survey` with a limit. Raises UserError."""
    return within(stall, root, lambda: source_files.survey(root, what))


def mirror(root: Path, out: Path, sources: Sequence[SourceFile], algorithm: str, stall: float) -> dict[str, FileRecord]:
    """Copy files into the folder ``out``, several at once. Returns the record of each by ``algorithm``. Raises UserError."""
    total = sum(file.size for file in sources)
    return within(stall, root, lambda: copy_files(root, out, sources, algorithm), total=total, target=out)


def find_damage(folder: Path, stall: float) -> list[Problem]:
    """The files of a folder that differ from its manifest, each byte read. Raises UserError where the storage hangs."""

    def compare() -> list[Problem]:
        try:
            with DigestComparison(folder) as comparison:
                return comparison.finish()
        except UserError as error:  # the manifest itself
            return error.problems

    return within(stall, folder, compare)


# --- the child, seen from the parent -------------------------------------------------------------------------------------


def within(stall: float, path: Path, work: Callable[[], T], *, total: int | None = None, target: Path | None = None) -> T:
    """What ``work`` returns in a forked child. ``path``: for messages; ``total``: bytes that it reads, for a bar.

    Raises UserError: the work's own, or exit 73 where nothing moved for ``stall`` seconds.
    """
    pid, pipe = bounded.fork_child(lambda answers: Connection(os.dup(answers.fileno()), readable=False).send(_outcome(work)))
    answers = Connection(pipe, writable=False)
    try:
        _await(answers, pid, stall, path, total)
        kind, body = answers.recv()
    except EOFError:
        fix = "run the same command again"
        raise UserError("the copying process ended", file=str(path), fix=fix, code=ExitCode.AGAIN) from None
    finally:
        answers.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        # A process that waits for a hung mount ends when the mount answers: it is not waited for, and has nothing to say.
        bounded.reap(pid, time.monotonic() + 2)
    if kind == "problems":
        raise UserError(*body)
    if kind == "os":
        where = body.filename or str(path)
        doing = "cannot be written" if target is not None and Path(where).is_relative_to(target) else "cannot be read"
        raise storage_error(body, doing, where)
    answer: T = body
    return answer


def _outcome(work: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "answer", work()
    except UserError as error:
        return "problems", (error.problems, error.code)
    except OSError as error:
        return "os", OSError(error.errno, error.strerror or str(error), error.filename)


def _await(answers: Connection, pid: int, stall: float, path: Path, total: int | None) -> None:
    """Return when there is an answer, or the child has ended. Raises UserError where nothing moves."""
    before, moved = _counts(pid), time.monotonic()
    with console.byte_progress() as bar:
        task = bar.add_task(path.name, total=total, visible=total is not None)
        while not answers.poll(0.5):
            now, counts = time.monotonic(), _counts(pid)
            if counts != before:
                before, moved = counts, now
            elif now - moved > stall:
                fix = "is the storage mounted and its server up? --stall SECONDS waits longer"
                text = f"nothing was read or written for {stall:g} s"
                raise UserError(text, file=str(path), fix=fix, code=ExitCode.STORAGE)
            bar.update(task, completed=counts[0])


def _counts(pid: int) -> tuple[int, int, int]:
    """Bytes that a process has read and written, and clock ticks that it has computed (proc(5)); zeros where it has ended."""
    try:
        done = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0, 0, 0
    return int(done["rchar"]), int(done["wchar"]), sum(map(int, ticks))


# --- the child -----------------------------------------------------------------------------------------------------------


def copy_files(root: Path, out: Path, sources: Sequence[SourceFile], algorithm: str) -> dict[str, FileRecord]:
    """:func:`mirror`, in this process. Raises UserError, OSError of the first file that fails."""
    pool = ThreadPoolExecutor(THREADS)
    largest_first = sorted(sources, key=lambda file: -file.size)  # none is left alone at the end
    running = {file.name: pool.submit(_copy, file, root / file.name, out / file.name, algorithm) for file in largest_first}
    try:
        return {name: copying.result() for name, copying in running.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _copy(file: SourceFile, source: Path, target: Path, algorithm: str) -> FileRecord:
    """Copy one file, and return its record by ``algorithm``.

    Hashed by the digest that the source's folder names too: a copy on a node's disk is recorded by XXH3 beside the source's
    SHA-256, for it is hashed again and again, eight times faster.
    """
    hashers = {name: new_hasher(name, file.size) for name in (algorithm, file.algorithm) if name}
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with source.open("rb", buffering=0) as src, target.open("wb") as dst:
            while block := src.read(BLOCK):
                dst.write(block)
                for hasher in hashers.values():
                    hasher.update(block)
            dst.flush()
            os.fsync(dst.fileno())
            state, size = os.fstat(src.fileno()), dst.tell()
    except OSError as error:
        error.filename = error.filename or str(target)  # a disk that is full names no file
        raise
    if (size, state.st_mtime_ns, state.st_ctime_ns) != (file.size, file.mtime_ns, file.ctime_ns):
        fix = "run the same command again when nothing writes there any more"
        raise UserError("changed while it was copied", file=str(source), fix=fix, code=ExitCode.AGAIN)
    if file.algorithm and hashers[file.algorithm].hexdigest() != file.digest:
        where = "the name that the Hub gave it" if source.is_symlink() else "the folder's manifest"
        fix = "the file is damaged where it lies: remove it (and what it links to), then load or make it again"
        text = f"its content differs from {where} ({file.algorithm})"
        raise UserError(text, file=str(source), fix=fix, code=ExitCode.FAILED)
    os.utime(target, ns=(file.mtime_ns, file.mtime_ns))
    return FileRecord(size, hashers[algorithm].hexdigest(), algorithm)
