"""One writer at a time: an flock on a file, and a message that names the process which has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from clustertune.errors import ExitCode, UserError
from clustertune.manifest import open_plain

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""flock(2) on file systems mounted without locks (Lustre without ``flock``, some NFS servers): better unlocked than not at
all; two writers at once are then the user's care."""
POLL_SECONDS = 0.2


@contextlib.contextmanager
def held(path: Path, doing: str, *, shown: Path, fix: str) -> Iterator[None]:
    """Hold the file ``path``, which is made (mode 0666 less umask) where it is absent, with its folder.

    The kernel drops the lock with the last process that has the file open; the holder may remove the file before.
    Raises UserError (exit 75) where another process has it: ``shown: process 7 on node3 DOING -> fix``; with exit 2 where a
    link, or something else than a file, lies there. Raises OSError where the file cannot be made.
    """
    fd = take(path)
    if isinstance(fd, str):
        raise UserError(f"{fd} {doing}", file=str(shown), fix=fix, code=ExitCode.AGAIN)
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def in_turn(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the file ``path``, made where it is absent; where another process has it, call ``wait`` once and wait for it."""
    fd = take(path, wait=lambda _holder: wait())
    assert isinstance(fd, int)  # who waits gets it in the end
    try:
        yield
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    """Open the lock itself: where others can write to its folder, a link could name any file of the user, which is cut to 0."""
    try:
        return open_plain(path, os.O_RDWR | os.O_CREAT)
    except UserError:
        raise UserError("is not a plain file, so it cannot be a lock", file=str(path), fix=f"rm {path}") from None


def _sign(fd: int) -> None:
    """Write who holds a lock. On a full disk the lock is held without that: archiving the run may make room."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            os.close(fd)
            raise


def take(
    path: Path, how: int = fcntl.LOCK_EX, wait: Callable[[str], None] | None = None, *, in_cache: bool = False
) -> int | str:
    """A descriptor of the file ``path`` with its lock (``LOCK_EX``, or ``LOCK_SH`` to share it), made where it is absent.

    Where others have it: the words that name the holder, or with ``wait``, which gets them once, the descriptor later.
    ``in_cache``: nothing may be removed from a cache on a guess, so a file system without locks is an error; its folder is
    not made; and the file keeps its times, for to look is not to use. Raises OSError, and UserError as :func:`held`.
    """
    announced = False
    while True:
        if not in_cache:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = _open(path)
        except FileNotFoundError:
            if in_cache:
                raise
            continue  # the holder before has just removed the folder
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            if wait is None:
                return holder
            if not announced:
                wait(holder)
            announced = True
            time.sleep(POLL_SECONDS)
            continue
        except OSError as error:
            if in_cache or error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
        if _is_at(path, fd):
            if how == fcntl.LOCK_EX:
                before = os.fstat(fd)
                _sign(fd)
                if in_cache:
                    with contextlib.suppress(OSError):  # another user's file
                        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
            return fd
        os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    """Whether an open file still lies at ``path``: a lock on one that its holder has removed has no effect."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
