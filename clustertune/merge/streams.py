"""Bytes in and out: whole reads, and one output file that is hashed while it is written."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from clustertune.errors import storage_error
from clustertune.manifest import FileRecord, fsync_path

CHUNK = 4 << 20
"""Bytes per system call."""
RING = 3
"""Buffers of one output file: one is filled, one is hashed, one lies between."""
_FLUSH = 64 << 20
"""Bytes after which what was written is sent to the device."""
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
"""What ``copy_file_range`` answers where the two filesystems cannot do it (see copy_file_range(2), ERRORS)."""


def read_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset`` on. Raises OSError, EIO where the file ends before."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}, while it was being read")
        done += got


class Source:
    """The base's files, opened once each for one output file. A failing read is told with the file's name."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}

    def fd(self, path: Path) -> int:
        """An open descriptor of ``path``."""
        if path not in self._fds:
            try:
                self._fds[path] = os.open(path, os.O_RDONLY)
                os.posix_fadvise(self._fds[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            except OSError as error:
                raise storage_error(error, "reading", path) from error
        return self._fds[path]

    def read(self, path: Path, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``path``. Raises UserError (exit 73) where the file cannot be read."""
        fd = self.fd(path)
        try:
            read_exactly(fd, view, offset)
        except OSError as error:
            raise storage_error(error, "reading", path) from error

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


class Output:
    """A file that is written front to back and hashed beside it, so that its manifest costs no second read.

    The caller fills a view of :meth:`buffer` and hands it to :meth:`write` or :meth:`copy`; a thread hashes it meanwhile,
    because SHA-256 without CPU instructions for it is slower than a disk (0.4 GB/s on a Xeon of 2.5 GHz).
    """

    kernel_copy = True
    """Whether ``copy_file_range`` is worth another attempt; off for the process once a filesystem has refused it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._digest, self._size, self._flushed = fd, hashlib.sha256(), 0, 0
        self._ring = [bytearray() for _ in range(RING)]
        self._next, self._free = 0, threading.Semaphore(RING)
        self._queue: SimpleQueue[memoryview | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._hash, daemon=True)
        self._thread.start()

    def _hash(self) -> None:
        while (view := self._queue.get()) is not None:
            self._digest.update(view)
            view.release()
            self._free.release()

    def buffer(self, size: int) -> memoryview:
        """``size`` bytes to fill, and then to hand over before the next call; waits where hashing lags behind."""
        self._free.acquire()
        if len(self._ring[self._next]) < size:
            self._ring[self._next] = bytearray(size)
        view = memoryview(self._ring[self._next])[:size]
        self._next = (self._next + 1) % RING
        return view

    def write(self, view: memoryview) -> None:
        """Append a filled buffer, which is the file's from now on. Raises OSError."""
        self._queue.put(view[:])
        self._put(view)

    def copy(self, fd: int, offset: int, view: memoryview) -> None:
        """Append a buffer that was read from ``fd`` at ``offset`` (and so is in the page cache), by the kernel.

        Where the filesystem shares blocks (XFS, btrfs) or copies on its server (NFS 4.2), nothing is moved at all.
        """
        self._queue.put(view[:])
        done = 0
        while Output.kernel_copy and done < len(view):
            try:
                got = os.copy_file_range(fd, self._fd, len(view) - done, offset + done)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                got = 0
            if got == 0:
                Output.kernel_copy = False
            done += got
            self._size += got
        self._put(view[done:])

    def _put(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.write(self._fd, view[done:])
        self._size += done
        if self._size - self._flushed >= _FLUSH:
            # Starts writing to the device and does not wait (Linux, mm/fadvise.c); else a large file waits for its fsync.
            os.posix_fadvise(self._fd, self._flushed, self._size - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._size

    def finish(self) -> None:
        """Wait until all that was handed over is hashed."""
        self._queue.put(None)
        self._thread.join()

    def record(self) -> FileRecord:
        """Size and hash, after :meth:`finish`."""
        return FileRecord(self._size, self._digest.hexdigest())


@contextmanager
def durable_output(path: Path) -> Iterator[Output]:
    """Write ``path`` (mode 0666 less umask) under a name of its own; it has its name only when all of it is on the device.

    Raises UserError (exit 73) where the storage fails; what was written so far stays under ``<name>.part``.
    """
    part = path.with_name(path.name + ".part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        output = Output(fd)
        try:
            yield output
            os.fsync(fd)
        finally:
            output.finish()
            os.close(fd)
        part.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        raise storage_error(error, "writing", path) from error
