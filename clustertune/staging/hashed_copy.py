"""Reading, copying and hashing many files in a child process that is given up when nothing moves.

A mount that hangs holds every process that reads from it, and no signal helps: so :func:`within` has a forked child do the
work, and ends it where it has read, written and computed nothing for so many seconds. Copies are hashed: neither ``rsync`` nor
``cp`` says what it has written. Which files of a folder a run needs is said here, too, and what is known of their content.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from clustertune import bounded, console
from clustertune.errors import ExitCode, Problem, UserError, storage_error
from clustertune.manifest import MANIFEST, FileRecord, hash_file, hub_digest, open_to_read, read_manifest, read_whole

STALL_SECONDS = 120.0
"""How long nothing may move: longer than the fail-over of a file server, shorter than what holds up a job unnoticed."""
SECONDS_BETWEEN_LINES = 30.0
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


# --- which files ------------------------------------------------------------------------------------------------------

_OTHER_WEIGHTS = re.compile(
    r".*\.(pth|pt|gguf|ggml|onnx|onnx_data|msgpack|h5|ot|tflite|mlmodel|nemo|bin|safetensors|ckpt)(\.index\.json)?"
)
_WEIGHTS = tuple(
    re.compile(rf"{stem}(-\d+-of-\d+)?\.{kind}(\.index\.json)?")
    for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin"))
)
"""What transformers loads, the first that is there; each alone or as shards with an index."""


@dataclass(frozen=True)
class SourceFile:
    """One file as it was found."""

    name: str
    """Below the folder, with ``/``."""
    size: int
    mtime_ns: int
    ctime_ns: int
    digest: str | None = None
    """The digest that its manifest, or the name of its blob in the Hub's cache, gives for its content."""
    algorithm: str | None = None
    """``sha256``, ``xxh3_128`` or ``git_sha1``."""


def walk_source(root: Path, what: str) -> list[SourceFile]:
    """The files of ``root`` that a run needs, sorted by name.

    ``what``: ``model`` leaves out weights that transformers would not load (other formats, the publisher's own); anything
    else is taken whole. Raises UserError where the folder is none or contradicts its own manifest, OSError.
    """
    if not root.is_dir():
        problem = "is a file, not a folder" if root.exists() else "no such folder"
        raise UserError(problem, file=str(root), fix="is the storage mounted, and the name right?")
    by_name = dict(_walk(root))
    names = choose(by_name) if what == "model" else sorted(by_name)
    known = read_manifest(root).files if MANIFEST in by_name else {}
    files, problems = [], []
    for name in names:
        path = by_name[name]
        state, record = path.stat(), known.get(name)
        if record and record.size != state.st_size:
            problems.append(Problem(f"{state.st_size} bytes, the folder's manifest says {record.size}", file=str(path)))
        digest, algorithm = (record.digest, record.algorithm) if record else hub_digest(path) or (None, None)
        files.append(SourceFile(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, digest, algorithm))
    problems += [Problem("missing", file=str(root / name)) for name in known if name not in by_name]
    if problems:
        raise UserError([*problems, Problem("is incomplete or damaged", file=str(root), fix="copy or make it again")])
    if not files:
        raise UserError("contains no file", file=str(root), fix="is the storage mounted, and the name right?")
    return files


def _walk(root: Path) -> Iterable[tuple[str, Path]]:
    """All files, links to files followed, without hidden folders (.git, .cache of a download) and unfinished downloads."""
    for folder, dirs, names in os.walk(root):
        dirs[:] = sorted(name for name in dirs if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith((".incomplete", ".lock", ".tmp")) or not path.is_file():
                if path.is_symlink() and not path.exists():
                    fix = "the cache is damaged: load the model again"
                    raise UserError("a link to a file that is not there", file=str(path), fix=fix)
                continue
            yield path.relative_to(root).as_posix(), path


def choose(names: Iterable[str]) -> list[str]:
    """The files of a model that transformers and the tokenizer read, sorted.

    Weights in other formats stay behind: beside Llama's safetensors lie the publisher's own, as large again.
    """
    present = set(names)
    chosen = {name for name in present if "/" not in name and not _OTHER_WEIGHTS.fullmatch(name)}
    for weights in _WEIGHTS:
        if loaded := {name for name in present if weights.fullmatch(name)}:
            return sorted(chosen | loaded)
    # Weights under a name of their own: nothing is left out.
    return sorted(present if any(_OTHER_WEIGHTS.fullmatch(name) for name in present) else chosen)


# --- what the callers use ------------------------------------------------------------------------------------------------


def survey(root: Path, what: str, stall: float) -> list[SourceFile]:
    """:func:`walk_source` with a limit. Raises UserError."""
    return within(stall, root, lambda: walk_source(root, what))


def mirror(
    root: Path, out: Path, sources: Sequence[SourceFile], algorithm: str, stall: float
) -> tuple[dict[str, FileRecord], int]:
    """Copy files into ``out``, several at once. Returns the record of each by ``algorithm``, and the bytes that were copied.

    A file that is there with the source's size and time is hashed and kept, as rsync would; one whose hash is not the one that
    the source's folder names is copied again. A file has its name only once all of it is on the disk. Raises UserError.
    """
    shown = (f"copying {root.name}", sum(file.size for file in sources))
    return within(stall, root, lambda: copy_files(root, out, sources, algorithm), shown=shown, target=out)


def hash_files(
    paths: Sequence[tuple[Path, FileRecord | None]], algorithm: str, stall: float, what: str = "verifying"
) -> list[FileRecord | str]:
    """The record of each file, by the algorithm of its given record, else by ``algorithm``; a text where it cannot be read.

    Raises UserError where the storage hangs.
    """
    if not paths:
        return []
    pairs = [(path, record.algorithm if record else algorithm) for path, record in paths]
    shown = (what, sum(record.size for _, record in paths if record))
    return within(stall, paths[0][0].parent, lambda: hash_all(pairs), shown=shown)


# --- the child, seen from the parent -------------------------------------------------------------------------------------


def within(
    stall: float, path: Path, work: Callable[[], T], *, shown: tuple[str, int] | None = None, target: Path | None = None
) -> T:
    """What ``work`` returns in a forked child. ``path``: for messages; ``shown``: what is done, and how many bytes it is: a bar
    on a terminal, elsewhere a line every half minute.

    Raises UserError: the work's own, or exit 73 where nothing moved for ``stall`` seconds.
    """
    pid, pipe = bounded.fork_child(lambda answers: Connection(os.dup(answers.fileno()), readable=False).send(_outcome(work)))
    answers = Connection(pipe, writable=False)
    try:
        _await(answers, pid, stall, path, shown)
        kind, body = answers.recv()
    except EOFError:
        fix = "run the same command again: it continues"
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


def _await(answers: Connection, pid: int, stall: float, path: Path, shown: tuple[str, int] | None) -> None:
    """Return when there is an answer, or the child has ended. Raises UserError where nothing moves."""
    before, moved, told = _counts(pid), time.monotonic(), time.monotonic()
    with console.byte_progress() as bar:
        task = bar.add_task(shown[0], total=shown[1]) if shown else None
        while not answers.poll(0.5):
            now, counts = time.monotonic(), _counts(pid)
            if counts != before:
                before, moved = counts, now
            elif now - moved > stall:
                fix = "is the storage mounted and its server up? --stall SECONDS waits longer"
                text = f"nothing was read or written for {stall:g} s"
                raise UserError(text, file=str(path), fix=fix, code=ExitCode.STORAGE)
            if shown and task is not None:
                bar.update(task, completed=min(counts[0], shown[1]))
                if not console.stderr.is_terminal and now - told > SECONDS_BETWEEN_LINES:
                    told = now
                    console.say(f"{shown[0]}: {amount(counts[0])} of {amount(shown[1])} read")


def _counts(pid: int) -> tuple[int, int, int]:
    """Bytes that a process has read and written, and clock ticks that it has computed (proc(5)); zeros where it has ended."""
    try:
        done = dict(line.split(": ") for line in read_whole(Path(f"/proc/{pid}/io")).decode().splitlines())
        ticks = read_whole(Path(f"/proc/{pid}/stat")).decode().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0, 0, 0
    return int(done["rchar"]), int(done["wchar"]), sum(map(int, ticks))


# --- the child -----------------------------------------------------------------------------------------------------------


def copy_files(root: Path, out: Path, sources: Sequence[SourceFile], algorithm: str) -> tuple[dict[str, FileRecord], int]:
    """:func:`mirror`, in this process. Raises UserError, OSError of the first file that fails."""
    pool = ThreadPoolExecutor(THREADS)
    largest_first = sorted(sources, key=lambda file: -file.size)  # none is left alone at the end
    running = {file: pool.submit(_copy, file, root / file.name, out / file.name, algorithm) for file in largest_first}
    try:
        answers = {file.name: running[file].result() for file in largest_first}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return {name: record for name, (record, _) in answers.items()}, sum(copied for _, copied in answers.values())


def _copy(file: SourceFile, source: Path, target: Path, algorithm: str) -> tuple[FileRecord, int]:
    """The record of the copy, and the bytes that were copied."""
    with contextlib.suppress(OSError):
        info = target.stat()
        if (info.st_size, info.st_mtime_ns) == (file.size, file.mtime_ns) and (same := _record(file, target, algorithm)):
            return same, 0
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.tmp")  # not part of a folder, for its manifest
    try:
        with source.open("rb", buffering=0) as src:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as dst:
                shutil.copyfileobj(src, dst, BLOCK)
                dst.flush()
                os.fsync(dst.fileno())
                copied = dst.tell()
            state = os.fstat(src.fileno())
            _forget(src.fileno())
    except OSError as error:
        error.filename = error.filename or str(part)  # a disk that is full names no file
        raise
    if copied != file.size or (state.st_mtime_ns, state.st_ctime_ns) != (file.mtime_ns, file.ctime_ns):
        fix = "run the same command again when nothing writes there any more"
        raise UserError("changed while it was copied", file=str(source), fix=fix, code=ExitCode.AGAIN)
    if (record := _record(file, part, algorithm)) is None:
        part.unlink()
        where = "the name that the Hub gave it" if source.is_symlink() else "the folder's manifest"
        fix = "the file is damaged where it lies: load or make it again"
        text = f"its content differs from {where} ({file.algorithm})"
        raise UserError(text, file=str(source), fix=fix, code=ExitCode.FAILED)
    os.utime(part, ns=(file.mtime_ns, file.mtime_ns))
    part.replace(target)
    return record, file.size


def _record(file: SourceFile, path: Path, algorithm: str) -> FileRecord | None:
    """The record of a copy by ``algorithm``; None where it is not what the source's folder says.

    By the source's own digest too, where that is another: a copy on a node's disk is recorded by XXH3 beside the source's
    SHA-256, for it is hashed again and again, eight times faster.
    """
    known = hash_file(path, file.algorithm) if file.algorithm else None
    record = known if known and file.algorithm == algorithm else hash_file(path, algorithm)
    with open_to_read(path) as copy:
        _forget(copy.fileno())
    return record if known is None or known.digest == file.digest else None


def _forget(fd: int) -> None:
    """Give a file's pages back: 800 GB through the page cache push out everything else. Some file systems refuse."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def hash_all(paths: Sequence[tuple[Path, str]]) -> list[FileRecord | str]:
    """:func:`hash_files`, in this process."""

    def one(item: tuple[Path, str]) -> FileRecord | str:
        path, algorithm = item
        try:
            record = hash_file(path, algorithm)
            with open_to_read(path) as file:
                _forget(file.fileno())
        except OSError as error:
            return error.strerror or str(error)
        return record

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, paths))
