"""Mount points: empty and immutable, so that nothing can be written there while the file system is not mounted."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.errors import Problem
from clustertune.ops.bounded import Answer, Work, ask_all, below, mount_points
from clustertune.ops.files import NODE, inside

# linux/fs.h; the kernel reads and writes an int whatever the number says.
_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10
_NO_FLAGS = (errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
NO_FLAG = "its file system knows no immutable flag; while nothing is mounted there, root can write to it"
SECONDS = 20.0
"""For all mount points of a node; nothing that is mounted on them is asked."""


@dataclass(frozen=True)
class MountPoint:
    """A mount point as it is below whatever is mounted on it."""

    path: str
    kind: str
    """``absent``, ``folder``, ``other`` (a file), ``link`` or ``unknown`` (only root sees it, or it did not answer)."""
    entries: tuple[str, ...] = ()
    """What lies in it, some of it."""
    immutable: bool | None = None
    """None: the file system knows no such flag, or it was not seen."""
    mounted: bool = False
    leads: str = ""
    """Where a symbolic link on the way leads."""


def look(points: Iterable[str], root: Path, seconds: float = SECONDS) -> list[MountPoint]:
    """The mount points of a node, or of a tree, in which nothing is mounted."""
    points = list(points)
    if root != NODE:
        return [_look(point, root, inside(root, point)) for point in points]
    mounted = set(mount_points())
    found = {point: MountPoint(point, "unknown", mounted=point in mounted) for point in points}
    if os.geteuid() != 0:
        points = [point for point in points if point not in mounted]
    for answer in _each(points, mounted, _seen, seconds):
        for point, seen in (answer.found or {}).items():
            found[point] = MountPoint(**{**seen, "entries": tuple(seen["entries"]), "mounted": point in mounted})
    return list(found.values())


def _seen(points: list[str]) -> dict[str, Any]:
    return {point: asdict(_look(point, NODE, Path(os.path.realpath(point)))) for point in points}


def _each(points: list[str], mounted: set[str], what: Callable[[list[str]], Mapping[str, Any]], seconds: float) -> list[Answer]:
    """Do ``what`` at mount points, below what is mounted there. In children: what lies above a mount point may hang."""
    covered, plain = ([point for point in points if (point in mounted) is on] for on in (True, False))
    works: dict[str, Work] = {"plain": partial(what, plain)} if plain else {}
    if covered:
        works["covered"] = below(covered, partial(what, covered))
    return list(ask_all(works, seconds).values())


def _look(path: str, root: Path, target: Path) -> MountPoint:
    leads = "/" + str(target.relative_to(root)) if root != NODE else str(target)
    if leads != path:
        return MountPoint(path, "link", leads=leads)
    try:
        mode = target.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return MountPoint(path, "absent")
    except PermissionError:
        return MountPoint(path, "unknown")
    if not stat.S_ISDIR(mode):
        return MountPoint(path, "other")
    try:
        with os.scandir(target) as found:
            names = tuple(sorted(entry.name for _, entry in zip(range(20), found, strict=False)))
        return MountPoint(path, "folder", names, immutable(target))
    except PermissionError:
        return MountPoint(path, "unknown")


def immutable(target: Path) -> bool | None:
    """Whether a folder bears the flag; None where its file system knows none."""
    return _flags(target, lambda flags: flags)


def _flags(target: Path, change: Callable[[int], int]) -> bool | None:
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        data = bytearray(8)
        fcntl.ioctl(fd, _GET_FLAGS, data)
        before = int.from_bytes(data[:4], "little")
        after = change(before)
        if after != before:
            data[:4] = after.to_bytes(4, "little")
            fcntl.ioctl(fd, _SET_FLAGS, data)
        return bool(after & _IMMUTABLE)
    except OSError as error:
        if error.errno in _NO_FLAGS:
            return None
        raise
    finally:
        os.close(fd)


def set_immutable(target: Path, on: bool = True) -> bool | None:
    """Set or clear the flag. Returns what it is now; None where the file system knows none. Raises OSError."""
    return _flags(target, lambda flags: flags | _IMMUTABLE if on else flags & ~_IMMUTABLE)


def problems(points: Iterable[MountPoint]) -> list[Problem]:
    """What must be moved away first: a mount would hide it."""
    found = []
    for point in points:
        if point.kind == "link":
            message = f"a symbolic link leads to {point.leads}: systemd mounts nothing there"
            fix = f"make it a folder, or write {point.leads} into the cluster file"
            found.append(Problem(message, file=point.path, fix=fix))
        elif point.kind == "other":
            found.append(Problem("is not a folder, nothing can be mounted there", file=point.path, fix="move it away"))
        elif point.kind == "folder" and point.entries and not point.mounted:
            names = ", ".join(point.entries[:5]) + (", ..." if len(point.entries) > 5 else "")
            message = f"nothing is mounted there, yet it holds {names}: the mount would hide that"
            found.append(Problem(message, file=point.path, fix="move it away; it may have been meant for the brick"))
    return found


def missing(point: MountPoint, *, live: bool) -> str | None:
    """What is to be done about a mount point, as a command; None: nothing. Only a live node's is made immutable."""
    if point.kind == "absent":
        return f"mkdir -p {point.path}" + (f" && chattr +i {point.path}" if live else "")
    if live and point.kind == "folder" and point.immutable is False:
        return f"chattr +i {point.path}" + (" (below what is mounted on it)" if point.mounted else "")
    return None


def make(points: Iterable[MountPoint], root: Path) -> tuple[list[str], dict[str, str]]:
    """Make what is absent, and on a live node set the flag, below what is mounted.

    Returns the mount points that are as they can be, and a message for each that is not: NO_FLAG or a failure.
    """
    wanted = [point.path for point in points if point.kind in ("absent", "folder")]
    if root != NODE:
        for path in wanted:
            inside(root, path).mkdir(parents=True, exist_ok=True)
        return wanted, {}
    failures = dict.fromkeys(wanted, f"no answer in {SECONDS:g} s")
    for answer in _each(wanted, set(mount_points()), lambda paths: {path: _make(path) for path in paths}, SECONDS):
        failures |= answer.found or {}
    return [path for path in wanted if failures[path] in ("", NO_FLAG)], {
        path: reason for path, reason in failures.items() if reason
    }


def _make(path: str) -> str:
    """Empty, or why it is not as it should be."""
    target = Path(path)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if set_immutable(target) is None:
            return NO_FLAG
    except OSError as error:
        if not target.is_dir():
            return f"could not be made: {error.strerror}; see what is mounted above it, and how"
        hint = "; a container may not, the machine itself may" if error.errno == errno.EPERM else ""
        return f"could not be made immutable: {error.strerror}{hint}"
    return ""
