"""What is asked of one file system, in a child of its own: the answer may never come."""

from __future__ import annotations

import contextlib
import errno
import grp
import itertools
import mmap
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from clustertune.ops.files import inside
from clustertune.ops.storage.layout import DATA, NFS_PORT

NOBODY = 65534
"""Root writes as this user, with the group's right: as root, root_squash would answer for everybody."""
XATTRS = ("version", "branches", "srcmounts", "cache.files", "minfreespace", "moveonenospc", "category.create", "func.create")
_PROBE, _MOST = ".clustertune-check.", 5000
"""How our files begin, and how many entries of a folder are skipped to find old ones."""
_SIZE = 256 * 1024
"""Bytes of the probe: several pages, and more than one NFS write where wsize is small."""


def state(root: Path, path: str) -> dict[str, Any]:
    """What statvfs and the folder itself tell, as fields of ``look.MountState``. Raises OSError: ESTALE, ENOTCONN, EIO."""
    target = inside(root, path)
    found = os.statvfs(target)
    with os.scandir(target) as entries:
        next(entries, None)  # a stale handle shows where the folder is read
    data: bool | None = True
    seen = target
    try:
        (target / DATA).stat()
        seen = target / DATA
    except FileNotFoundError:
        data = False
    return {
        "root_disk": seen.stat().st_dev == Path("/").stat().st_dev,
        "data": data,
        "read_only": bool(found.f_flag & os.ST_RDONLY),
        "total": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "inodes": found.f_files,
        "free_inodes": found.f_favail,
    }


def xattrs(root: Path, pool: str) -> dict[str, str]:
    """mergerfs' settings at run time, those that it tells."""
    control, found = inside(root, pool) / ".mergerfs", {}
    for name in XATTRS:
        with contextlib.suppress(OSError):
            found[name] = os.getxattr(control, f"user.mergerfs.{name}").decode(errors="replace")
    return found


def connect(address: str, seconds: float) -> dict[str, Any]:
    """Whether a server listens on the port of NFS. Raises OSError."""
    with socket.create_connection((address, NFS_PORT), timeout=seconds):
        return {"ok": True}


def folder(root: Path, path: str) -> dict[str, Any]:
    """Mode and group of a folder. Raises OSError."""
    seen = inside(root, path).stat()
    try:
        group = grp.getgrgid(seen.st_gid).gr_name
    except KeyError:
        group = str(seen.st_gid)
    return {"mode": seen.st_mode & 0o7777, "group": group}


def write(root: Path, mount: str, folders: list[str], gid: int | None) -> dict[str, Any]:
    """Create, write, sync, rename, read back and map a file of our own, and remove it."""
    places = [inside(root, folder) for folder in folders]
    if os.geteuid() == 0 and _reached_by_all(inside(root, mount)):
        os.setgroups([gid] if gid is not None else [])
        os.setgid(gid if gid is not None else NOBODY)
        os.setuid(NOBODY)
    first = f"{_PROBE}{socket.gethostname()}.{os.getpid()}"
    second = f"{first}.renamed"
    step, data, folder = "reach", os.urandom(_SIZE), None
    try:
        folder = _open_first(places)
        if folder is None:
            return {"written": "absent"}
        _sweep(folder)
        step = "create"
        before = time.time()
        fd = os.open(first, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            step = "write"
            file.write(data)
            step = "fsync"
            os.fsync(fd)
            after = time.time()
            stamped = os.fstat(fd).st_mtime
        step = "rename"
        os.rename(first, second, src_dir_fd=folder, dst_dir_fd=folder)
        step = "read"
        with os.fdopen(os.open(second, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            if file.read() != data:
                return {"written": "EIO", "write_step": "read"}
            mapped = _map(file.fileno(), data)
        return {"written": "ok", "mmap": mapped, "skew": _skew(before, stamped, after)}
    except OSError as error:
        return {"written": errno.errorcode.get(error.errno or 0, "EIO"), "write_step": step}
    finally:
        for name in (first, second) if folder is not None else ():
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _sweep(folder: int) -> None:
    """Remove what earlier looks of this machine left: those that hung were killed when the file system answered."""
    mine = f"{_PROBE}{socket.gethostname()}."
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in itertools.islice(entries, _MOST):
            number = entry.name[len(mine) :].partition(".")[0]
            if entry.name.startswith(mine) and number.isdecimal() and not _runs(number):
                os.unlink(entry.name, dir_fd=folder)


def _runs(number: str) -> bool:
    """Whether a process of that number is there, and not only waiting to be reaped."""
    try:
        return bool(Path(f"/proc/{number}/cmdline").read_bytes())
    except OSError:
        return False


def _reached_by_all(mount: Path) -> bool:
    """Whether another user can come as far as what is mounted: storage below a private folder is tried as root."""
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in mount.parents)


def _open_first(folders: list[Path]) -> int | None:
    """The first folder that is there; None: none of them."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _map(fd: int, data: bytes) -> str:
    try:
        with mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as view:
            return "ok" if view[: len(data)] == data else "EIO"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "EIO")


def _skew(before: float, stamped: float, after: float) -> float:
    """How far a file's time lies outside of the interval in which it was written, seconds; file systems round down."""
    tick = 0.02
    if stamped < before - tick:
        return stamped - before
    return max(0.0, stamped - after)
