"""The process that touches the storage for ``stage``: ``python -m clustertune.staging.copier``, one order as JSON on stdin.

A mount that hangs takes the process that reads from it with it, and no signal helps: so that is a process of its own, which
its parent gives up when it shows no progress. It prints one JSON object a line: ``{"bytes": N}`` while it works,
``{"file": ...}`` for each complete file, and at the end ``{"answer": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.manifest import MANIFEST, XXH3_128, FileRecord, hub_digest, new_hasher, read_manifest
from clustertune.process import die_with_parent

# --- what a folder holds, which of its files are needed, and what is known of their content --------------------------


INDEX = ".index.json"
_OTHER_WEIGHTS = re.compile(
    r".*\.(pth|pt|gguf|ggml|onnx|onnx_data|msgpack|h5|ot|tflite|mlmodel|nemo|bin|safetensors|ckpt)(\.index\.json)?"
)
_SHARDS = ("model.safetensors", "pytorch_model.bin")
"""What transformers loads, the first that is there; each alone or as shards that ``NAME.index.json`` lists."""


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

    def fits(self, record: FileRecord) -> bool:
        """Whether a record can be that of this file: size, and the digest where both are of one kind."""
        return self.size == record.size and (self.algorithm != record.algorithm or self.digest == record.digest)


def survey(root: Path, what: str) -> list[SourceFile]:
    """The files of ``root`` that a run needs, sorted by name.

    ``what``: ``model`` leaves out weights that transformers would not load (other formats, the publisher's own); anything
    else is taken whole. Raises UserError where the folder is none, lacks a shard, or contradicts its own manifest, OSError.
    """
    if not root.is_dir():
        problem = "is a file, not a folder" if root.exists() else "no such folder"
        raise UserError(problem, file=str(root), fix="is the storage mounted, and the name right?")
    found = dict(_walk(root))
    names = choose(found, _read_index(found)) if what == "model" else sorted(found)
    known = read_manifest(root).files if MANIFEST in found else {}
    files, problems = [], []
    for name in names:
        path = found[name]
        state, record = path.stat(), known.get(name)
        if record and record.size != state.st_size:
            problems.append(Problem(f"{state.st_size} bytes, the folder's manifest says {record.size}", file=str(path)))
        digest, algorithm = (record.digest, record.algorithm) if record else hub_digest(path) or (None, None)
        files.append(SourceFile(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, digest, algorithm))
    problems += [Problem("missing", file=str(root / name)) for name in known if name not in found]
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


def choose(names: Iterable[str], indices: Mapping[str, Sequence[str]]) -> list[str]:
    """The files of a model that transformers and the tokenizer read, sorted.

    ``indices``: for each ``NAME.index.json`` the shards that it lists. Weights in other formats stay behind: beside Llama's
    safetensors lie the publisher's own, as large again. Raises UserError where a listed shard is missing.
    """
    there = set(names)
    chosen = {name for name in there if "/" not in name and not _OTHER_WEIGHTS.fullmatch(name)}
    for stem in _SHARDS:
        index = stem + INDEX
        if index in there:
            if missing := sorted(set(indices[index]) - there):
                more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
                raise UserError(f"lacks {', '.join(missing[:3])}{more}", file=index, fix="load or copy the model again")
            return sorted(chosen | {index} | set(indices[index]))
        if stem in there:
            return sorted(chosen | {stem})
    if any(_OTHER_WEIGHTS.fullmatch(name) for name in there):  # weights under a name of their own: nothing is left out
        return sorted(there)
    return sorted(chosen)


def _read_index(found: Mapping[str, Path]) -> dict[str, list[str]]:
    indices = {}
    for stem in _SHARDS:
        if (path := found.get(stem + INDEX)) is None:
            continue
        try:
            shards = json.loads(path.read_bytes())["weight_map"].values()
            indices[stem + INDEX] = sorted({str(shard) for shard in shards})
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"no index of weights: {error!r}", file=str(path), fix="load or copy the model again") from None
    return indices


# --- copying many files at the speed of the disks: several at once, hashed on the way --------------------------------


BLOCK = 8 << 20
"""Bytes of one read: a network file system splits it into requests that are under way together."""
WORKERS = 8
BEHIND = 8
"""Blocks after which what was written must have reached the disk: dirty pages stay few, and the last fsync short."""
_WRITE, _WAIT_WRITE_WAIT = 2, 7  # linux/fs.h: SYNC_FILE_RANGE_WRITE; with WAIT_BEFORE and WAIT_AFTER


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
    # What the copy is recorded by first, then the source's own where that is another. A copy on a node's disk is recorded by
    # XXH3 beside the source's SHA-256: it is hashed again and again, eight times faster.
    hashes = {algorithm: new_hasher(algorithm, file.size) for algorithm in (record, file.algorithm) if algorithm}
    offset = 0
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
                done = 0
                while done < len(block):
                    done += os.pwrite(dst.fileno(), block[done:], offset + done)
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


# --- the process -----------------------------------------------------------------------------------------------------


TELL_SECONDS = 0.2


class _Teller:
    """Lines to the process that gave the order; counted bytes a few times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes, self._reported = 0, 0
        self._end = threading.Event()
        threading.Thread(target=self._tell_bytes, daemon=True).start()

    def advance(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    def tell(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    def done(self, name: str, record: FileRecord) -> None:
        self.tell({"file": name, "record": record.as_json()})

    def end(self, line: Mapping[str, Any]) -> None:
        self._end.set()
        self.tell({"bytes": self._bytes})
        self.tell(line)

    def _tell_bytes(self) -> None:
        while not self._end.wait(TELL_SECONDS):
            if self._bytes != self._reported:
                self._reported = self._bytes
                self.tell({"bytes": self._bytes})


def work(order: Mapping[str, Any], teller: _Teller) -> Any:
    """Carry out one order. Raises UserError, OSError."""
    if order["do"] == "locate":
        return os.path.realpath(order["root"])
    if order["do"] == "survey":
        return [asdict(file) for file in survey(Path(order["root"]), order["what"])]
    if order["do"] == "copy":
        files = [SourceFile(**values) for values in order["files"]]
        root, out = Path(order["root"]), Path(order["out"])
        bounds = {"workers": order["workers"], "record": order["record"]}
        copy_files(root, out, files, advance=teller.advance, done=teller.done, **bounds)
        return None
    assert order["do"] == "hash", order["do"]
    paths = [(Path(path), algorithm) for path, algorithm in order["paths"]]
    return hash_files(paths, teller.advance, order["workers"])


def main() -> int:
    """Read an order, carry it out, answer."""
    die_with_parent(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the whole job: who gave the order ends this process
    order = json.loads(sys.stdin.readline())
    teller = _Teller()
    try:
        answer = work(order, teller)
    except UserError as error:
        teller.end({"error": error.as_dict()})
    except OSError as error:
        teller.end({"os_error": {"errno": error.errno, "text": error.strerror or str(error), "path": error.filename}})
    else:
        teller.end({"answer": answer})
    return 0


if __name__ == "__main__":
    sys.exit(main())
