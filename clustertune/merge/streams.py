"""Bytes in and out: whole reads, and output files that several threads write and that are hashed meanwhile."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustertune.errors import Problem, UserError, storage_error
from clustertune.manifest import XXH3_128, FileRecord, fsync_path, new_hasher
from clustertune.tensorfile import BITS, Tensor, build_header

CHUNK = 4 << 20
"""Bytes that one thread works on at a time."""
STEP = 256 << 10
"""Bytes per system call: what was read is still in the core's cache when it is written (0.6 CPU seconds per GB read, hashed
and written, against 0.9 to 2.0 with 4 MiB and 0.8 with a read beside ``copy_file_range``; ext4, Linux 6.18)."""
BUFFERS = 2
"""Buffers per thread: one is filled while the other may wait for its turn to be hashed."""
_AHEAD = 64 << 20
"""Bytes by which the kernel is asked to read ahead of the threads."""
_FLUSH = 64 << 20
"""Bytes after which what was written is sent to the device."""
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM}
"""What fallocate(2) answers where the filesystem cannot do it."""


def read_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset`` on. Raises OSError, EIO where the file ends before."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}, while it was being read")
        done += got


class InputFiles:
    """The input files, opened once each for all threads. A failing read names the file."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._guard = threading.Lock()

    def _fd(self, path: Path) -> int:
        with self._guard:
            if path not in self._fds:
                self._fds[path] = os.open(path, os.O_RDONLY)
            return self._fds[path]

    def read(self, path: Path, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``path``. Raises UserError (exit 73) where the file cannot be read."""
        try:
            read_exactly(self._fd(path), view, offset)
        except OSError as error:
            raise storage_error(error, "reading", path) from error

    def announce(self, path: Path, offset: int, size: int) -> None:
        """Have the kernel read what follows soon: threads that take turns look to it like random access."""
        try:
            os.posix_fadvise(self._fd(path), offset + _AHEAD, size, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            raise storage_error(error, "reading", path) from error

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _reserve(fd: int, size: int) -> None:
    """Take the file's blocks at once where the filesystem can (writing is a fifth cheaper, and a full disk shows first).

    Not ``os.posix_fallocate``: where the filesystem cannot, glibc writes into every block instead.
    """
    if size and ctypes.CDLL(None, use_errno=True).fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code not in _NO_FALLOCATE:
            raise OSError(code, os.strerror(code))


class Output:
    """A file of ``size`` bytes, written at any place by several threads, and hashed in the order of its bytes.

    It has its name only when all of it is on the device; until then it is ``<name>.part``. Every method raises OSError.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._part = path.with_name(path.name + ".part")
        self._hasher, self._hashed, self._flushed = new_hasher(XXH3_128), 0, 0
        self._guard, self._hashing = threading.Lock(), False
        self._waiting: dict[int, tuple[memoryview, Callable[[], None]]] = {}
        self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _reserve(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise

    def write(self, view: memoryview, offset: int) -> None:
        """Write ``view`` at ``offset``."""
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done : done + STEP], offset + done)

    def add(self, view: memoryview, offset: int, release: Callable[[], None]) -> bool:
        """Hash what was written at ``offset`` as soon as all before it is hashed, by this thread or another.

        Then ``release`` is called. True for the one call with which the file is complete.
        """
        with self._guard:
            self._waiting[offset] = view, release
            if self._hashing:
                return False
            self._hashing = True
        while True:
            with self._guard:
                if self._hashed not in self._waiting:
                    self._hashing = False
                    return self._hashed == self.size
                view, release = self._waiting.pop(self._hashed)
            self._hasher.update(view)
            self._hashed += len(view)
            release()
            self._flush()

    def _flush(self) -> None:
        if self._hashed - self._flushed >= _FLUSH:
            # Starts writing to the device and does not wait (Linux, mm/fadvise.c); else a large file waits for its fsync.
            os.posix_fadvise(self._fd, self._flushed, self._hashed - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._hashed

    def finish(self) -> FileRecord:
        """Put the complete file on the device and give it its name."""
        try:
            os.fsync(self._fd)
        finally:
            self.abandon()
        self._part.replace(self.path)
        fsync_path(self.path.parent)
        return FileRecord(self.size, self._hasher.hexdigest(), XXH3_128)

    def abandon(self) -> None:
        """Close the file; what is not finished stays a part."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


# --- shards ---------------------------------------------------------------------------------------------------------------

# How the output is cut into files: the rule and the names of ``save_pretrained``.

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Shard:
    """One output file: its header, then ``tensors`` in the order of their bytes."""

    name: str
    tensors: list[Tensor]
    header: bytes

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(t.size for t in self.tensors)


def parse_size(text: str | int) -> int:
    """Bytes from ``5GB`` (decimal, as Hugging Face counts), ``512MiB`` (binary) or a plain number. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", str(text).upper())
    unit = (match[2] or "") if match else ""
    size = int(float(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise UserError(Problem(f"{text!r} is not a size", key="--shard-size", fix="such as 5GB, 500MB or a number of bytes"))
    return size


def split(tensors: Sequence[Tensor], shard_size: int) -> list[list[Tensor]]:
    """Group tensors, in order, into shards of at most ``shard_size`` bytes of data; a larger tensor gets one of its own.

    The rule of ``huggingface_hub.split_torch_state_dict_into_shards``, its order included: a tensor that is too large is
    put before the shard that is being filled.
    """
    groups: list[list[Tensor]] = []
    current: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if tensor.size > shard_size:
            groups.append([tensor])
            continue
        if filled + tensor.size > shard_size:
            groups.append(current)
            current, filled = [], 0
        current.append(tensor)
        filled += tensor.size
    if current:
        groups.append(current)
    return groups


def plan_shards(tensors: Sequence[Tensor], shard_size: int) -> list[Shard]:
    """The output files. In a file wide dtypes come first, as ``safetensors`` orders them: each tensor is aligned."""
    groups = [sorted(group, key=lambda t: -BITS[t.dtype]) for group in split(tensors, shard_size)]
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0], build_header(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group, build_header(group))
        for number, group in enumerate(groups, 1)
    ]
