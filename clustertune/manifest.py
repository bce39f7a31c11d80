"""The commit protocol of every artefact: files written and fsynced, then ``MANIFEST.json`` (sizes and digests) written
last and fsynced with its directory. A folder without a valid manifest does not exist for any reader.

A manifest, and not a renamed directory, is the commit: on a mergerfs pool a directory rename can move the files of one
brick only and still return 0.

Digests are SHA-256, with two exceptions: the weights of a merged model are safetensors (no code in them), gigabytes each and
made faster than SHA-256 runs on a core without instructions for it (0.4 GB/s on a Xeon of 2.5 GHz, XXH3-128: over 3). Their
records carry XXH3-128, which finds every kind of damage but not a forger. So do the tensors of a checkpoint. Its other files
may be pickles, where a forged file is foreign code: there any other digest than SHA-256 makes the manifest unreadable.

Files without a manifest, of processes that may be killed while they write, have readers here that take what is whole.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import io
import json
import os
import pwd
import re
import secrets
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from clustertune.errors import Problem, UserError, storing

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

MANIFEST = "MANIFEST.json"
_CHUNK = 1 << 20
SHA256, XXH3_128 = "sha256", "xxh3_128"
GIT_SHA1 = "git_sha1"
"""The name that git, and with it the Hub, gives a small file: SHA-1 over ``blob SIZE\\0`` and the content."""
_WORDS = {SHA256: "SHA-256", XXH3_128: "XXH3-128"}
_FAST_KINDS = {"merged", "staged"}
"""Kinds of folder whose files may carry XXH3-128."""
TENSORS = (".distcp", ".safetensors")
"""Ends of the names of a checkpoint's files that no reader unpickles."""
_FAST_NAMES = {"checkpoint": TENSORS}
"""Ends of the names of files that may in a folder of another kind."""
_AROUND = {"parcel", "staged"}
"""Kinds of folder whose manifest names the files of the folders below it."""
_HUB = "hub"
_BLOB = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_OTHER_WEIGHTS = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
"""Weights in a Hub snapshot that nothing here loads. The publisher's own (``consolidated.safetensors``) are as large."""
_FIXES = {
    "checkpoint": "remove the folder, then run the same command again: it resumes from the checkpoint before",
    "adapter": "move the folder away, then export it again",
    "dataset": "remove the folder, then run the same command again: it is prepared again",
    "merged": "move the folder away, then merge or export again",
    "model": "remove the folder, then run the same command again: it is recreated",
    "parcel": "copy it again from where it was staged, or stage it again",
    "tokens": "remove the folder, then run the same command again: they are recreated",
    "staged": "remove the folder, then run the same command again: it is copied again",
    _HUB: "remove the file, and the blob that it links to, then fetch it again (hf download); if the change is yours, remove"
    " its .metadata below .cache/huggingface/download",
}
"""What to do about a damaged file, by the kind of its folder."""
SMALL = 64 << 20
"""Bytes up to which every reader compares a file itself; larger files and all weights are shared out over the ranks."""
THREADS = 4
"""Files that one process hashes at a time, at most."""


class Hasher(Protocol):
    """What of a hash object is used here."""

    def update(self, data: Any, /) -> None:
        """Hash further bytes."""

    def hexdigest(self) -> str:
        """The digest so far, in hex."""


def new_hasher(algorithm: str, size: int = 0) -> Hasher:
    """An empty hash of ``sha256``, ``xxh3_128``, or ``git_sha1``, whose header has the ``size`` of the content in bytes."""
    if algorithm == SHA256:
        return hashlib.sha256()
    if algorithm == GIT_SHA1:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
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
    """A record from its JSON. Raises KeyError, TypeError or ValueError if it is not a record or has not exactly one digest."""
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
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_mode() -> int:
    """The mode of a new file under this process' umask, for what safetensors 0.8 writes: 0600 whatever the umask."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o644 & ~umask


def write_durably(path: Path, data: bytes | str, *, mode: int | None = None) -> None:
    """Write ``path`` so that after a crash it holds all of ``data`` or what it held before (tmp, fsync, rename, fsync dir).

    Where others can write to its folder, nothing that they put there is opened: the temporary file has a name that nobody
    knows ahead, and a link in the place of ``path`` is replaced, not followed. Others cannot write to the file, whatever the
    umask: a checkpoint whose manifest they can write is not resumed from. ``mode``: that of the file, whatever the umask.
    """
    tmp = path.with_name(f".{path.name}.{secrets.randbits(64)}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(tmp, flags, 0o644 if mode is None else 0o600), "wb") as out:
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            out.write(data.encode() if isinstance(data, str) else data)
            out.flush()
            os.fsync(out.fileno())
        tmp.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
        error.filename = str(path)  # the system names no file when a disk is full
        raise


def require_replaceable(path: Path, mark: str, key: str = "--out") -> None:
    """Raise UserError where something is at ``path`` that the same command did not write: what it writes begins with ``mark``,
    within 4 KiB. ``key``: the option that named the path."""
    fix = "give the path of a new file"
    try:
        fd = open_plain(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    except UserError:
        raise UserError("is not a plain file", file=str(path), key=key, fix=fix) from None
    with os.fdopen(fd, "rb") as before:
        if mark.encode() not in before.read(4096):
            raise UserError("is there, and this command did not write it", file=str(path), key=key, fix=fix)


def replace_ours(path: Path, text: str, mark: str) -> None:
    """Write a page where nothing is, or what the same command wrote before: text that holds ``mark`` within 4 KiB.

    Raises UserError where something else is there, or it cannot be written.
    """
    with storing("cannot be written", path):
        require_replaceable(path, mark)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text)


def open_plain(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a file that is neither a link, which may lead to any file of the user, nor a pipe or a device.

    Raises OSError, and UserError where it is something else.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        fd = -1
    if fd < 0 or not stat.S_ISREG(os.fstat(fd).st_mode):
        if fd >= 0:
            os.close(fd)
        raise UserError("is not a plain file", file=str(path), fix=f"rm {path}")
    return fd


def is_private_group(group: int) -> bool:
    """Whether it is the user's own group of one, as most distributions make it; files are group-writable by default there."""
    try:
        named, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return named.gr_name == user.pw_name and group == user.pw_gid and set(named.gr_mem) <= {user.pw_name}


def require_own_code(path: Path, shown: str) -> None:
    """Raise UserError where others could have written a file that is run: a link, another user's, or one that they can write.

    ``shown``: how messages call it. Raises OSError where it is not there.
    """
    at = path.lstat()
    others = stat.S_IWOTH if is_private_group(at.st_gid) else stat.S_IWGRP | stat.S_IWOTH
    if stat.S_ISLNK(at.st_mode):
        raise UserError("is a link, and is run as you", file=shown, fix="put the file itself in its place")
    if not stat.S_ISREG(at.st_mode):
        raise UserError("is not a plain file, and is run as you", file=shown)
    if at.st_uid not in (os.geteuid(), 0):
        fix = "if you trust its owner: copy it, and put the copy in its place"
        raise UserError(f"belongs to user {at.st_uid}, you are {os.geteuid()}, and is run as you", file=shown, fix=fix)
    if at.st_mode & others:
        text = f"others can write to it (mode {stat.S_IMODE(at.st_mode):04o}), and it is run as you"
        raise UserError(text, file=shown, fix=f"chmod go-w {path}, if you are sure that nobody else has changed it")


def open_to_read(path: Path) -> io.BufferedReader:
    """A file for reading. Raises OSError where it is none, and for a pipe or a device, whose reader may wait for ever.

    Links are followed: :func:`open_plain` refuses them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        os.set_blocking(fd, True)
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is not a plain file", str(path))


def plain_path(path: Path) -> Path:
    """The path itself, for what opens it by its name (numpy's maps). Raises OSError as :func:`open_to_read` does."""
    open_to_read(path).close()
    return path


def open_text(path: Path) -> TextIO:
    """As :func:`open_to_read`, of UTF-8 text."""
    return io.TextIOWrapper(open_to_read(path), encoding="utf-8")


def read_whole(path: Path) -> bytes:
    """The content of a file. Raises OSError as :func:`open_to_read` does."""
    with open_to_read(path) as file:
        return file.read()


def find_shared(path: Path) -> Problem | None:
    """Why another user could have written, or can write, a file or folder; None where nobody could."""
    at = path.lstat()
    if at.st_uid != os.getuid():
        text = f"belongs to user {at.st_uid}, you are {os.getuid()}: what it holds could be made to run as you"
        fix = "if you trust its owner: cp -r --no-preserve=mode,ownership, then chmod -R go-w the copy, and continue with it"
    elif not (stat.S_ISDIR(at.st_mode) or stat.S_ISREG(at.st_mode)):
        text, fix = "is neither a file nor a folder", "put what it links to in its place"
    elif at.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        text = f"others can write to it (mode {stat.S_IMODE(at.st_mode):04o}): what it holds could be made to run as you"
        fix = f"chmod -R go-w {path}, if you are sure that nobody else has changed it"
    else:
        return None
    return Problem(text, file=str(path), fix=fix)


def hash_file(path: Path, algorithm: str = SHA256, stop: threading.Event | None = None) -> FileRecord:
    """Size and digest of a file, read in chunks of 1 MiB. ``stop``, once set, ends it early with a digest of the part read."""
    digest, size = new_hasher(algorithm, path.stat().st_size), 0
    with open_to_read(path) as src:
        while (chunk := src.read(_CHUNK)) and not (stop and stop.is_set()):
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
    names = []
    for root, _dirs, files in os.walk(folder):
        for name in files:
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if relative != MANIFEST and not (name.startswith(".") and name.endswith(".tmp")):
                names.append(relative)
    return sorted(names)


def seal(folder: Path, kind: str, meta: Mapping[str, Any], records: Mapping[str, FileRecord] | None = None) -> Manifest:
    """Make a folder whole: fsync and hash its files (unless ``records`` of them are given), then write the manifest last.

    Raises OSError where the storage fails; the folder then has no manifest.
    """
    if records is None:
        records = record_files(folder, list_files(folder))
    slow = [name for name, record in records.items() if not _allows(kind, name, record)]
    assert not slow, f"a {kind} takes SHA-256 only for {slow}"
    for directory in sorted({(folder / name).parent for name in records} | {folder}):
        fsync_path(directory)
    sealed = Manifest(kind, dict(records), dict(meta))
    write_durably(folder / MANIFEST, render(sealed))
    fsync_path(folder.parent)
    return sealed


def render(manifest: Manifest) -> str:
    """The text of a manifest, with a checksum over its own content."""
    body = {
        "format": 1,
        "kind": manifest.kind,
        "meta": manifest.meta,
        "files": {name: record.as_json() for name, record in sorted(manifest.files.items())},
    }
    body["checksum"] = _checksum(body)
    return json.dumps(body, indent=1, sort_keys=True) + "\n"


def _allows(kind: str, name: str, record: FileRecord) -> bool:
    """Whether a file of such a folder may carry its digest."""
    return record.algorithm == SHA256 or kind in _FAST_KINDS or name.endswith(_FAST_NAMES.get(kind, ("/",)))


def _checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 over a manifest's own content: ``meta`` says where training continues, and no file's hash covers it."""
    content = {key: value for key, value in body.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path, kind: str | None = None) -> Manifest:
    """Read and check the form of a manifest (not the files it names). Raises UserError where it is missing or unreadable."""
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():  # reading a pipe may wait for ever
            raise UserError("unreadable manifest: is not a plain file", file=str(path))
        data = read_whole(path)
    except FileNotFoundError:
        raise UserError("no manifest: the folder was never finished", file=str(path)) from None
    except OSError as error:
        raise UserError(f"unreadable manifest: {error}", file=str(path)) from None
    manifest = parse(data, str(path))
    if kind is not None and manifest.kind != kind:
        raise UserError(f"holds a {manifest.kind}, not a {kind}", file=str(folder))
    return manifest


def parse(data: bytes, shown: str) -> Manifest:
    """A manifest from its text. Raises UserError, which names it as ``shown``, where it is none."""
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError("it contains no JSON object")
        if body.get("checksum", checksum := _checksum(body)) != checksum:
            raise ValueError("its content differs from its checksum")
        files = {}
        for name, record in body["files"].items():
            if name.startswith("/") or ".." in Path(name).parts:
                raise ValueError(f"file name {name!r} leaves the folder")
            files[name] = parse_record(record)
            if not _allows(body["kind"], name, files[name]):
                raise ValueError(f"a {body['kind']} takes SHA-256 only, {name} has {files[name].algorithm}")
        return Manifest(str(body["kind"]), files, dict(body["meta"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"unreadable manifest: {error}", file=shown) from None


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
        if problem := _readable(folder / name, record, manifest.kind, hashes=hashes):
            problems.append(problem)
    if not allow_extra:
        extra = sorted(set(list_files(folder)) - set(manifest.files))
        problems += [Problem("not named by the manifest", file=str(folder / name), fix="move it away") for name in extra]
    return problems


def find_problem(
    path: Path, record: FileRecord, kind: str = "", *, hashes: bool = True, stop: threading.Event | None = None
) -> Problem | None:
    """What keeps one file from being what was recorded; None where it is. ``kind``: of its folder, for the remedy.

    Raises OSError where the file cannot be read.
    """
    fix = _FIXES.get(kind)
    try:
        at = path.stat()
        if not stat.S_ISREG(at.st_mode):
            return Problem("is not a plain file", file=str(path), fix=fix)
        if (size := at.st_size) != record.size:
            return Problem(f"{size} bytes, the manifest says {record.size}", file=str(path), fix=fix)
        if not hashes or (current := hash_file(path, record.algorithm, stop)) == record or (stop and stop.is_set()):
            return None
    except FileNotFoundError:
        return Problem("missing", file=str(path), fix=fix)
    source = "the Hub's digest" if kind == _HUB else f"the manifest's {_WORDS[record.algorithm]}"
    text = f"content differs from {source}: {current.digest[:12]} found, {record.digest[:12]} expected"
    return Problem(text, file=str(path), fix=fix)


def _readable(path: Path, *args: Any, **more: Any) -> Problem | None:
    """As :func:`find_problem`; a file that cannot be read is a problem too."""
    try:
        return find_problem(path, *args, **more)
    except OSError as error:
        return Problem(f"unreadable: {error.strerror}", file=str(path))


def hub_digest(path: Path) -> tuple[str, str] | None:
    """The digest of a file's content at the Hub, and its algorithm; None where the Hub's client recorded none.

    Its cache keeps each content once, by its digest, and links to it; ``hf download --local-dir`` notes the digest below
    ``.cache/huggingface/download`` (huggingface_hub 1.x, ``_local_folder.py``).
    """
    target = path.readlink() if path.is_symlink() else path
    digest = target.name if target.parent.name == "blobs" else _noted_etag(path.absolute())
    if not _BLOB.fullmatch(digest):
        return None
    return digest, SHA256 if len(digest) == 64 else GIT_SHA1


def _noted_etag(path: Path) -> str:
    """The second line of the client's note about a file in a ``--local-dir``, which may be any folder around it; or ``""``."""
    for around in path.parents:
        note = around / ".cache/huggingface/download" / f"{path.relative_to(around)}.metadata"
        if note.is_file():
            with contextlib.suppress(OSError, ValueError):
                return [*read_whole(note).decode().splitlines(), "", ""][1].strip()
    return ""


def find_records(folder: Path) -> tuple[str, dict[Path, FileRecord]]:
    """The digests that lie beside the files of a folder, and the kind of what records them.

    They stand in the folder's own manifest; in that of staged inputs around it; or with the Hub's client (:func:`hub_digest`).
    Nothing is found for any other folder. Raises UserError for an unreadable manifest of its own.
    """
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        copied = not find_problems(folder.absolute().parent, "staged", hashes=False, allow_extra=True)
        return "staged" if copied else manifest.kind, {folder / name: record for name, record in manifest.files.items()}
    for around in folder.absolute().parents:
        if not (around / MANIFEST).is_file():
            continue
        try:
            manifest = read_manifest(around)
        except UserError:  # another program's
            continue
        if manifest.kind in _AROUND:
            named = {around / name: record for name, record in manifest.files.items()}
            return manifest.kind, {path: record for path, record in named.items() if folder.absolute() in path.parents}
    listed = sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")])
    read = (path for path in listed if path.suffix not in _OTHER_WEIGHTS and not path.name.startswith("consolidated"))
    digests = {path: digest for path in read if path.is_file() and (digest := hub_digest(path)) is not None}
    return _HUB, {path: FileRecord(path.stat().st_size, *digest) for path, digest in digests.items()}


class DigestComparison:
    """The files of an artefact compared with the digests that lie beside them: what every reader of one does.

    Small files are compared at once, by each reader: :attr:`problems`. Weights and large files are hashed by a few threads
    inside the ``with`` block, or from :meth:`start` to :meth:`stop`, beside the loading that reads the same bytes;
    :meth:`finish` gives the verdict. ``rank`` of ``world_size`` hashes its share only (``bytes`` in all): each file goes to
    one rank, the largest first to the rank with the fewest bytes. ``only``: names of the files that matter; all by default.
    ``small``: bytes up to which a file that contains no weights counts as small. Raises UserError for an unreadable manifest.
    """

    def __init__(
        self, folder: Path, rank: int = 0, world_size: int = 1, *, only: Collection[str] | None = None, small: int = SMALL
    ) -> None:
        self._kind, records = find_records(folder)
        records = {path: record for path, record in records.items() if only is None or path.name in only}
        self.recorded = frozenset(path.absolute() for path in records)
        """The files for which there is a digest."""
        large = {path for path, record in records.items() if record.size > small or path.suffix == ".safetensors"}
        self._share = {path: records[path] for path in _share_out(records, large, rank, world_size)}
        self.bytes = sum(record.size for record in self._share.values())
        sizes = [_readable(path, records[path], self._kind, hashes=path not in large) for path in records]
        self.problems: list[Problem] = [problem for problem in sizes if problem]
        """What is wrong by the sizes of all files and by the content of small ones."""
        self._stop = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[Future[Problem | None]] = []

    def start(self) -> Self:
        """Begin to hash this rank's share."""
        from concurrent.futures import ThreadPoolExecutor

        cores = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._pool = ThreadPoolExecutor(min(THREADS, cores), thread_name_prefix="digest")
        self._running = [
            self._pool.submit(_readable, path, record, self._kind, stop=self._stop) for path, record in self._share.items()
        ]
        return self

    @property
    def running(self) -> bool:
        """Whether this rank's share is still being hashed."""
        return not all(future.done() for future in self._running)

    @property
    def hashed(self) -> int:
        """Bytes of this rank's files that are done."""
        sizes = (record.size for record in self._share.values())
        return sum(size for size, future in zip(sizes, self._running, strict=False) if future.done())

    def wait(self, seconds: float) -> None:
        """Wait for this rank's share, at most so long."""
        from concurrent.futures import wait

        wait(self._running, timeout=seconds)

    def finish(self) -> list[Problem]:
        """Wait for this rank's share; everything that is wrong."""
        differing = [problem for future in self._running if (problem := future.result())]
        return [*self.problems, *(problem for problem in differing if problem not in self.problems)]

    def stop(self) -> None:
        """End what still runs: its verdict is not needed."""
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def looks_whole(folder: Path, kind: str) -> bool:
    """Whether the cheap comparisons agree: digests of small files, sizes of weights. Readers compare the weights."""
    try:
        read_manifest(folder, kind)
        return not DigestComparison(folder).problems
    except UserError:
        return False


def _share_out(records: Mapping[Path, FileRecord], large: set[Path], rank: int, world_size: int) -> list[Path]:
    """The files that fall to a rank, in the order of their names; the same division on all ranks."""
    held: list[tuple[int, list[Path]]] = [(0, [])] * world_size
    for path in sorted(large, key=lambda path: (-records[path].size, str(path))):
        least = held.index(min(held, key=lambda share: share[0]))
        held[least] = (held[least][0] + records[path].size, [*held[least][1], path])
    return sorted(held[rank][1])


class Ranks(Protocol):
    """What shared comparisons and checkpoints need of the process group."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]: ...

    def broadcast(self, value: Any) -> Any: ...

    def barrier(self) -> None: ...


def sharers(folder: Path, ranks: Ranks | None) -> tuple[int, int]:
    """This rank's place among those that see the very same folder, and their number: they share out its files.

    On a node's own disk (a staged copy, a Hub cache below /tmp) only that node's ranks do. All ranks call this together.
    """
    if ranks is None:
        return 0, 1
    try:
        info = folder.stat()
        own = [info.st_ino, info.st_ctime_ns]  # not st_dev, which NFS makes up on each node
    except OSError:
        own = []
    same = [rank for rank, other in enumerate(ranks.gather(own)) if other == own]
    return same.index(ranks.rank), len(same)


def agree(problems: list[Problem], ranks: Ranks | None = None) -> None:
    """Raise UserError on all ranks where one has a problem: one that left alone would leave the others waiting."""
    distinct = {str(problem): problem for of_rank in (ranks.gather(problems) if ranks else [problems]) for problem in of_rank}
    if distinct:
        raise UserError(list(distinct.values()))


def require_whole(folder: Path, ranks: Ranks | None = None, *, only: Collection[str] | None = None) -> None:
    """Compare a folder with its digests, each large file by one of ``ranks``, and wait for the verdict of all.

    Raises UserError, on all ranks alike, that names each file that differs. Does nothing where no digests are known.
    """
    rank, size = sharers(folder, ranks)
    try:
        with DigestComparison(folder, rank, size, only=only) as comparison:
            problems = comparison.finish()
    except UserError as error:
        problems = error.problems
    agree(problems, ranks)


# --- files of processes that may be killed while they write: one JSON object a line, or one a file --------------------


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file, for ``object_pairs_hook``. Raises ValueError where a key appears twice: readers differ in
    which one counts."""
    body = dict[str, Any]()
    for key, value in pairs:
        if key in body:
            raise ValueError(f"{key!r} appears twice")
        body[key] = value
    return body


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file in its order. Other lines (a killed writer's last) and missing files are skipped."""
    if not path.is_file():  # who opens a pipe waits without end
        return
    try:
        lines = open_to_read(path)
    except OSError:
        return
    with lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


MAX_JSON_BYTES = 64 << 20
"""The index of a model of 400,000 tensors has 40 MB."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError with the file in it, also where a key stands in it twice."""
    try:
        if path.exists() and not path.is_file():
            raise UserError("is not a plain file", file=str(path))
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UserError(f"more than {MAX_JSON_BYTES >> 20} MiB: this is no configuration", file=str(path))
        body = json.loads(read_whole(path), object_pairs_hook=once, parse_constant=_constant)
    except FileNotFoundError:
        raise UserError("missing", file=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"unreadable: {error}", file=str(path)) from None
    if not isinstance(body, dict):
        raise UserError("not a JSON object", file=str(path))
    return body


def _constant(name: str) -> float:
    """Infinity stands in files of real models (Mamba's ``time_step_limit``); NaN is a fault of what wrote the file."""
    if name == "NaN":
        raise ValueError("NaN is no value")
    return float(name)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty where there is no such file, or something else in it."""
    try:
        body = json.loads(read_whole(path)) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def read_text(path: Path) -> str:
    """What a file holds, bytes that are not UTF-8 replaced; empty where it cannot be read (yet)."""
    try:
        return read_whole(path).decode(errors="replace")
    except OSError:
        return ""
