"""What a node's storage is now: devices, mount points, fstab, exports, and how bricks and pool answer.

Every look at a file system has a limit: one that hangs must not hang this.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import ipaddress
import itertools
import mmap
import os
import re
import shlex
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.bounded import Answer, Work, ask, ask_all, below, mount_points, mounts
from clustertune.cluster.schema import Brick
from clustertune.errors import Problem, UserError, collect_problems
from clustertune.events import read_text
from clustertune.host.mounts import MountLine, export_lines, unescape
from clustertune.ops.files import NODE, Change, foreign, inside, read, with_block
from clustertune.ops.nodes import group_id, tool
from clustertune.ops.storage.layout import DATA, EXPORT_FILE, NFS_PORT, FstabMount, StorageLayout
from clustertune.process import captured

BLOCK = "storage"
"""The name between the markers."""


@dataclass
class MountState:
    """One mount point and what is mounted there."""

    path: str
    fstype: str | None = None
    """None: nothing is mounted there."""
    source: str = ""
    as_meant: bool | None = None
    """Whether it is the device of the cluster file, or shows the folder of this node's brick; None: it is not to be that."""
    options: list[str] = field(default_factory=list)
    silent: bool = False
    """It did not answer in time."""
    left: int | None = None
    """The child that still waits for it."""
    errno: str = ""
    """What it answered instead: ``ESTALE``."""
    root_disk: bool | None = None
    """Whether what is seen there is on the disk of ``/``."""
    data: bool | None = None
    """Whether it has the folder that the pool is made of."""
    read_only: bool | None = None
    total: int | None = None
    free: int | None = None
    """Bytes that an ordinary user may write."""
    inodes: int | None = None
    free_inodes: int | None = None
    written: str = ""
    """``ok``, ``silent``, ``not asked``, ``forbidden`` to this user, ``absent`` (no folder to write to) or an errno's name."""
    write_step: str = ""
    """What failed: ``create``, ``write``, ``fsync``, ``rename``, ``read``."""
    mmap: str = ""
    """``ok`` or an errno's name, of a shared mapping of the file that was written."""
    skew: float | None = None
    """Seconds that the clock of who keeps the file is ahead of ours, beyond what the probe itself took."""


@dataclass
class Facts:
    """A node's storage as it is."""

    node: str
    root: bool = False
    """Whether root looked."""
    seconds: float = 0.0
    """The limit of one look."""
    bricks: dict[str, MountState] = field(default_factory=dict)
    """By mount point."""
    disks: dict[str, MountState] = field(default_factory=dict)
    """Where this node's own devices are mounted, by the exported folder."""
    pool: MountState | None = None
    xattrs: dict[str, str] = field(default_factory=dict)
    """mergerfs' settings at run time, without ``user.mergerfs.``."""
    servers: dict[str, str] = field(default_factory=dict)
    """Of each address whether its NFS port answers: ``ok``, ``silent`` or an errno's name."""
    points: list[MountPoint] = field(default_factory=list)
    folders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Mode and group, or errno, of what users share."""
    serves: bool | None = None
    """Whether the NFS server runs here; None: this node exports nothing."""
    etab: str = ""
    names: dict[str, str] = field(default_factory=dict)
    """Full names of hosts, as etab has them."""
    stale: list[str] = field(default_factory=list)
    """Files that are not what the cluster file says, with how."""
    by_hand: list[str] = field(default_factory=list)
    """Disks that the next boot does not mount, as messages."""


def collect(wanted: StorageLayout, root: Path, seconds: float, source: str = "") -> Facts:
    """Look at everything that ``wanted`` names, each for at most ``seconds``; a probe file is written and removed."""
    facts = Facts(wanted.node, os.geteuid() == 0, seconds)
    now = {entry.point: entry for entry in mounts()}
    pool = [wanted.pool.target] if wanted.pool else []
    disks = {mount.target: mount.source for mount in wanted.mounts if mount.kind == "device"}
    binds = {brick.mount: brick.path for brick in wanted.own if brick.path != brick.mount}
    real = _reals({*wanted.mounted, *disks, *pool, *binds.values()}, root, now, seconds)
    found = {path: MountState(path) for path in real}
    for path, state in found.items():
        if entry := now.get(real[path]):
            state.fstype, state.source, state.options = entry.fstype, entry.source, list(entry.options)
    facts.bricks = {brick.mount: found[brick.mount] for brick in wanted.bricks}
    for path, device in disks.items():
        facts.disks[path] = replace(found[path], as_meant=_same(found[path].source, device, live=True))
    for mount, path in binds.items():
        if found[path].fstype or path not in disks:
            found[mount].as_meant = _is_bind(now, real[path], real[mount])
    facts.pool = found[pool[0]] if pool else None
    places = [*facts.bricks.values(), *([facts.pool] if facts.pool else [])]
    _first_round(wanted, facts, places, root, seconds)
    _second_round(wanted, places, root, seconds)
    facts.points = look_at_points((mount.target for mount in wanted.mounts), root, seconds)
    if root == NODE and wanted.exports:
        facts.serves, facts.etab = serves(), read_etab()
        facts.names = canonical(wanted.exports, facts.etab, seconds)
    problems: list[Problem] = []
    stale = [change.path for change in file_changes(wanted, root, source, problems) if change.needed]
    facts.stale = [*(f"{path} is not what the cluster file says" for path in stale), *map(str, problems)]
    return facts


def _reals(paths: Iterable[str], root: Path, now: Mapping[str, MountLine], seconds: float) -> dict[str, str]:
    """Where each path leads. One that is a mount point as it stands is not looked at: what is mounted there may hang."""
    works: dict[str, Work] = {path: partial(_real, root, path) for path in paths if root != NODE or path not in now}
    return {path: path for path in paths} | {
        path: answer.found["path"] for path, answer in ask_all(works, seconds).items() if answer.found
    }


def _real(root: Path, path: str) -> dict[str, str]:
    return {"path": str(inside(root, path))}


def _is_bind(now: Mapping[str, MountLine], path: str, mount: str) -> bool | None:
    """Whether ``mount`` shows the folder ``path``, by the file system and its folder that are mounted; None: not mounted."""
    bind, above = now.get(mount), next((str(p) for p in (Path(path), *Path(path).parents) if str(p) in now), None)
    if bind is None or above is None:
        return None
    below = str(Path(path).relative_to(above))
    folder = os.path.normpath(f"{now[above].root}/{below}").replace("//", "/", 1)
    return (bind.device, bind.root) == (now[above].device, folder)


def _first_round(wanted: StorageLayout, facts: Facts, places: list[MountState], root: Path, seconds: float) -> None:
    """Whatever only reads."""
    works: dict[str, Work] = {f"at {state.path}": partial(_probe_mount, root, state.path) for state in places}
    if wanted.pool:
        works["xattrs"] = partial(_probe_xattrs, root, wanted.pool.target)
    servers = _other_servers(wanted) if root == NODE else []
    works |= {f"to {address}": partial(_probe_server, address, seconds) for address in servers}
    shared = wanted.shared
    paths = [f"{shared.rstrip('/')}/{name}" for name in wanted.names] if shared else []
    works |= {f"folder {path}": partial(_probe_folder, root, path) for path in paths}
    answers = ask_all(works, seconds + 0.5)
    for state in places:
        answer = answers[f"at {state.path}"]
        state.silent, state.left = answer.silent, answer.left
        state.errno = "" if answer.silent or not answer.errno else _outcome(answer)
        vars(state).update(answer.found or {})
    facts.xattrs = dict((answers["xattrs"].found if "xattrs" in answers else None) or {})
    facts.servers = {address: _outcome(answers[f"to {address}"]) for address in servers}
    for path in paths:
        answer = answers[f"folder {path}"]
        facts.folders[path] = answer.found or {"errno": _outcome(answer)}


def _other_servers(wanted: StorageLayout) -> list[str]:
    """The servers of the other nodes' bricks."""
    pairs = zip(wanted.bricks, wanted.addresses, strict=True)
    return list(dict.fromkeys(address for brick, address in pairs if brick.node != wanted.node))


def _second_round(wanted: StorageLayout, places: list[MountState], root: Path, seconds: float) -> None:
    """A write through every mount that answered and is mounted: on the root disk nothing is ever written."""
    gid = group_id(wanted.group)
    works: dict[str, Work] = {}
    pool = wanted.pool.target if wanted.pool else None
    trap = any(state.data if state.fstype is None else state.root_disk for state in places if state.path != pool)
    for state in places:
        state.written = "not asked"
        if state.fstype is None or state.silent or state.errno or state.root_disk or (trap and state.path == pool):
            continue
        if folders := _writable(wanted, state.path):
            works[state.path] = partial(_probe_write, root, state.path, folders, gid)
    answers = ask_all(works, seconds)
    for state in places:
        answer = answers.get(state.path, Answer(found={}))
        vars(state).update(answer.found or {})
        if answer.found is None:
            state.written, state.left = _outcome(answer), state.left or answer.left
        elif state.written in ("EACCES", "EPERM") and os.geteuid() != 0:
            state.written = "forbidden"


def _writable(wanted: StorageLayout, mount: str) -> list[str]:
    """Where a user may write on one mount: the folder for logs, else the shared one."""
    pool = wanted.pool.target if wanted.pool else None
    if wanted.shared is None:
        return []
    for seen, base in ((pool, f"{mount}/{DATA}"), (mount, mount)):
        if seen and (wanted.shared == seen or wanted.shared.startswith(f"{seen}/")):
            below = wanted.shared[len(seen) :]
            at = (mount if mount == pool else base) + below
            return [f"{at}/logs", at]
    return []


def _outcome(answer: Answer) -> str:
    if answer.silent:
        return "silent"
    return errno.errorcode.get(answer.errno, str(answer.errno)) if answer.errno else "ok"


def file_changes(
    wanted: StorageLayout, root: Path, source: str, problems: list[Problem], *, force: bool = False
) -> Iterator[Change]:
    """What fstab and our exports shall hold; ``problems`` takes why one of them cannot be written."""
    for path, lines in ((FSTAB, [mount.line for mount in wanted.mounts]), (EXPORT_FILE, list(wanted.exports))):
        before, after = None, None
        with collect_problems(problems):
            before = read(root, path)
            after = with_block(before, BLOCK, lines, shown=path, origin=Path(source).name, force=force)
        yield Change(path, before, before or b"" if after is None else after)


# --- what is asked of one file system, in a child of its own: the answer may never come ------------------------------


NOBODY = 65534
"""Root writes as this user, with the group's right: as root, root_squash would answer for everybody."""
XATTRS = ("version", "branches", "srcmounts", "cache.files", "minfreespace", "moveonenospc", "category.create", "func.create")
_PROBE, _MOST = ".clustertune-check.", 5000
"""How our files begin, and how many entries of a folder are skipped to find old ones."""
_TICK = 0.02
_SIZE = 256 * 1024
"""Bytes of the probe: several pages, and more than one NFS write where wsize is small."""


def _probe_mount(root: Path, path: str) -> dict[str, Any]:
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


def _probe_xattrs(root: Path, pool: str) -> dict[str, str]:
    """mergerfs' settings at run time, those that it tells."""
    control, found = inside(root, pool) / ".mergerfs", {}
    for name in XATTRS:
        with contextlib.suppress(OSError):
            found[name] = os.getxattr(control, f"user.mergerfs.{name}").decode(errors="replace")
    return found


def _probe_server(address: str, seconds: float) -> dict[str, Any]:
    """Whether a server listens on the port of NFS. Raises OSError."""
    with socket.create_connection((address, NFS_PORT), timeout=seconds):
        return {"ok": True}


def _probe_folder(root: Path, path: str) -> dict[str, Any]:
    """Mode and group of a folder. Raises OSError."""
    seen = inside(root, path).stat()
    try:
        group = grp.getgrgid(seen.st_gid).gr_name
    except KeyError:
        group = str(seen.st_gid)
    return {"mode": seen.st_mode & 0o7777, "group": group}


def _probe_write(root: Path, mount: str, folders: list[str], gid: int | None) -> dict[str, Any]:
    """Create, write, sync, rename, read back and map a file of our own, and remove it."""
    places = [inside(root, folder) for folder in folders]
    # Whether another user can come as far as what is mounted: storage below a private folder is tried as root.
    if os.geteuid() == 0 and all(parent.stat().st_mode & stat.S_IXOTH for parent in inside(root, mount).parents):
        os.setgroups([gid] if gid is not None else [])
        os.setgid(gid if gid is not None else NOBODY)
        os.setuid(NOBODY)
    first = f"{_PROBE}{socket.gethostname()}.{os.getpid()}"
    second = f"{first}.renamed"
    step, data, folder = "reach", os.urandom(_SIZE), None
    try:
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                break
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
        # How far the file's time lies outside of the interval in which it was written; file systems round down.
        skew = stamped - before if stamped < before - _TICK else max(0.0, stamped - after)
        return {"written": "ok", "mmap": mapped, "skew": skew}
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


def _map(fd: int, data: bytes) -> str:
    try:
        with mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as view:
            return "ok" if view[: len(data)] == data else "EIO"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "EIO")


# --- mount points: empty and immutable, so that nothing is written there while the file system is not mounted --------


# linux/fs.h; the kernel reads and writes an int whatever the number says.
_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10
_NO_FLAGS = (errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
NO_FLAG = "its file system knows no immutable flag; while nothing is mounted there, root can write to it"
POINT_SECONDS = 20.0
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


def look_at_points(points: Iterable[str], root: Path, seconds: float = POINT_SECONDS) -> list[MountPoint]:
    """The mount points of a node, or of a tree, in which nothing is mounted."""
    points = list(points)
    if root != NODE:
        return [_look(point, root, inside(root, point)) for point in points]
    mounted = set(mount_points())
    found = {point: MountPoint(point, "unknown", mounted=point in mounted) for point in points}
    if os.geteuid() != 0:
        points = [point for point in points if point not in mounted]
    for answer in _each(points, mounted, _look_at, seconds):
        for point, seen in (answer.found or {}).items():
            found[point] = MountPoint(**{**seen, "entries": tuple(seen["entries"]), "mounted": point in mounted})
    return list(found.values())


def _look_at(points: list[str]) -> dict[str, Any]:
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


def immutable(target: Path, make: bool | None = None) -> bool | None:
    """Whether a folder bears the flag, after ``make`` has set or cleared it; None where its file system knows none."""
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        data = bytearray(8)
        fcntl.ioctl(fd, _GET_FLAGS, data)
        flags = before = int.from_bytes(data[:4], "little")
        if make is not None:
            flags = before | _IMMUTABLE if make else before & ~_IMMUTABLE
        if flags != before:
            data[:4] = flags.to_bytes(4, "little")
            fcntl.ioctl(fd, _SET_FLAGS, data)
        return bool(flags & _IMMUTABLE)
    except OSError as error:
        if error.errno in _NO_FLAGS:
            return None
        raise
    finally:
        os.close(fd)


def point_problems(points: Iterable[MountPoint]) -> list[Problem]:
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


def to_do_at(point: MountPoint, *, live: bool) -> str | None:
    """What is to be done about a mount point, as a command; None: nothing. Only a live node's is made immutable."""
    if point.kind == "absent":
        return f"mkdir -p {point.path}" + (f" && chattr +i {point.path}" if live else "")
    if live and point.kind == "folder" and point.immutable is False:
        return f"chattr +i {point.path}" + (" (below what is mounted on it)" if point.mounted else "")
    return None


def make_points(points: Iterable[MountPoint], root: Path) -> tuple[list[str], dict[str, str]]:
    """Make what is absent, and on a live node set the flag, below what is mounted.

    Returns the mount points that are as they can be, and a message for each that is not: NO_FLAG or a failure.
    """
    wanted = [point.path for point in points if point.kind in ("absent", "folder")]
    if root != NODE:
        for path in wanted:
            inside(root, path).mkdir(parents=True, exist_ok=True)
        return wanted, {}
    failures = dict.fromkeys(wanted, f"no answer in {POINT_SECONDS:g} s")
    for answer in _each(wanted, set(mount_points()), lambda paths: {path: _make(path) for path in paths}, POINT_SECONDS):
        failures |= answer.found or {}
    return [path for path in wanted if failures[path] in ("", NO_FLAG)], {
        path: reason for path, reason in failures.items() if reason
    }


def _make(path: str) -> str:
    """Empty, or why it is not as it should be."""
    target = Path(path)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if immutable(target, make=True) is None:
            return NO_FLAG
    except OSError as error:
        if not target.is_dir():
            return f"could not be made: {error.strerror}; see what is mounted above it, and how"
        hint = "; a container may not, the machine itself may" if error.errno == errno.EPERM else ""
        return f"could not be made immutable: {error.strerror}{hint}"
    return ""


# --- block devices of bricks: whether one is blank, and the command that would format it -----------------------------


MKFS = {"xfs": ("mkfs.xfs",), "ext4": ("mkfs.ext4", "-m", "0"), "btrfs": ("mkfs.btrfs",)}
"""``-m 0``: ext4 would keep 5 % of a brick for root, 0.7 TB of 14."""
DEVICE_SECONDS = 10
_START = 1 << 20


@dataclass(frozen=True)
class BlockDevice:
    """What is on a block device."""

    path: str
    state: str
    """``absent``, ``other`` (no block device), ``blank``, ``holds`` (a file system, a table, a member of an array), ``busy``,
    ``silent`` (it does not answer) or ``unknown`` (only root can look)."""
    holds: str = ""
    """blkid's word: ``xfs``, ``LVM2_member``, ``gpt``."""

    def __str__(self) -> str:
        reasons = {
            "holds": f"holds {self.holds}",
            "absent": "does not exist",
            "other": "is not a block device",
            "busy": "is in use",
            "silent": "does not answer",
        }
        return f"{self.path} {reasons.get(self.state, 'cannot be looked at')}"


def look_at_device(path: str) -> BlockDevice:
    """What a device holds, by blkid's low-level probe and wipefs: both must find nothing for it to be blank."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        return BlockDevice(path, "absent" if isinstance(error, FileNotFoundError) else "unknown")
    if not stat.S_ISBLK(mode):
        return BlockDevice(path, "other")
    if os.geteuid() != 0:
        return BlockDevice(path, "unknown")
    # In a child: a process that reads a disk which does not answer hangs for ever.
    answer = ask(partial(_content, path), 3 * DEVICE_SECONDS)
    return BlockDevice(path, **(answer.found or {"state": "silent" if answer.silent else "unknown"}))


def _content(path: str) -> dict[str, str]:
    """The state of a block device, and what it holds."""
    blkid = ("blkid", "-p", "-o", "value", "-s", "TYPE", "-s", "PTTYPE", path)
    wipefs = ("wipefs", "--no-act", "--noheadings", "--output", "TYPE", path)
    try:
        probe, signatures = (captured([tool(name) or name, *words], DEVICE_SECONDS) for name, *words in (blkid, wipefs))
    except subprocess.SubprocessError:
        return {"state": "silent"}
    if signatures_found := [*probe.stdout.split(), *signatures.stdout.split()]:
        return {"state": "holds", "holds": signatures_found[0]}
    # blkid: 2 says that nothing was found, 8 that it found several things at once.
    if probe.returncode != 2 or signatures.returncode != 0:
        return {"state": "unknown"}
    try:
        # O_EXCL: refused where the kernel holds it, mounted or as a part of something (open(2)).
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC), "rb") as file:
            data = any(file.read(_START))  # a disk of ciphertext bears no signature
    except OSError as error:
        if error.errno == errno.EBUSY:
            return {"state": "busy"}
        data = True
    return {"state": "holds", "holds": "data without a known signature"} if data else {"state": "blank"}


def device_steps(mount: FstabMount) -> Iterator[StorageStep]:
    """The command that a blank device needs first; only a person or ``--format`` runs it."""
    assert mount.brick
    device, filesystem = look_at_device(mount.source), mount.brick.filesystem
    if device.state == "holds" and device.holds == filesystem:
        return
    absent = (("lsblk", "-f"), f"{device}: fix storage.bricks.device")
    blank = f"the device is blank; clustertune ops storage apply --format {mount.source} runs it"
    other = f"{device}, not {filesystem}: check whether this is the brick's device"
    steps = {
        "blank": ((*MKFS[filesystem], mount.source), blank),
        "holds": (("wipefs", "--no-act", mount.source), other),
        "absent": absent,
        "other": absent,
        "silent": (("dmesg",), f"{device}: look for errors of the disk"),
        "busy": (("lsblk", "-f", mount.source), f"{device} already"),
    }
    if device.state in steps:
        yield StorageStep(*steps[device.state], by_hand=True)


def require_blank(requested: str, known: list[FstabMount]) -> FstabMount:
    """The mount whose device may be formatted. Raises UserError where ``--format`` names another one, or it is not blank."""
    key = "--format"
    mount = next((mount for mount in known if mount.source == requested), None)
    if mount is None:
        names = ", ".join(mount.source for mount in known) or "none"
        raise UserError(Problem(f"{requested} is not a device of this node's bricks ({names})", file="command line", key=key))
    device = look_at_device(requested)
    if device.state != "blank":
        message = f"{device}: only a blank device is formatted"
        fix = f"leave {key} out, or make sure that nothing on it is needed and run wipefs yourself"
        raise UserError(Problem(message, file="command line", key=key, fix=fix))
    return mount


# --- step -----------------------------------------------------------------------------------------------------------------

# One command of an operator's work.


@dataclass(frozen=True)
class StorageStep:
    """One command, and why."""

    argv: tuple[str, ...]
    why: str
    by_hand: bool = False
    """``apply`` never runs it."""
    target: str | None = None
    """What it mounts."""

    def __str__(self) -> str:
        return shlex.join(self.argv)


# --- what fstab and exports hold that is not ours, and whether it is at odds with what is ----------------------------


FSTAB = "/etc/fstab"
_BLANKS = re.compile(r"[ \t]+")
"""What parts the fields of fstab; other blanks are letters of a path."""
_BY = {"UUID": "by-uuid", "LABEL": "by-label", "PARTUUID": "by-partuuid", "PARTLABEL": "by-partlabel"}


@dataclass(frozen=True)
class FstabEntry:
    """One line of fstab that mounts something."""

    number: int
    text: str
    source: str
    target: str
    """Without needless slashes; ``none`` for swap."""


def fstab_entries(text: bytes | None) -> list[FstabEntry]:
    """The mounts of fstab that are not ours; comments and what is not an entry are skipped."""
    found = []
    for number, line in foreign(text, BLOCK, shown=FSTAB):
        fields = _BLANKS.split(line.strip(" \t\r"))
        if len(fields) < 2 or fields[0].startswith("#"):
            continue
        source, target = (unescape(field) for field in fields[:2])
        found.append(FstabEntry(number, line.strip(), source, os.path.normpath(target).replace("//", "/", 1)))
    return found


def taken(found: Iterable[FstabEntry], targets: Iterable[str]) -> Iterator[Problem]:
    """Lines that mount something else where we would: a second line for one place is an error for systemd."""
    ours = set(targets)
    for entry in found:
        if entry.target in ours:
            fix = "remove that line, or choose another path in the cluster file"
            yield Problem(
                f"{entry.target} is mounted by this line already: {entry.text[:200]}", f"{FSTAB}:{entry.number}", fix=fix
            )


def elsewhere(
    found: Iterable[FstabEntry], mounted: Iterable[MountLine], bricks: Iterable[Brick], *, live: bool
) -> dict[str, str]:
    """Devices of bricks that are mounted above the exported folder by other means, and where.

    ``live``: the lines are this machine's own, so a device's other names (``UUID=``, links of ``/dev``) can be followed.
    """
    places = [(entry.source, entry.target) for entry in found] + [(m.source, m.point) for m in mounted if m.root == "/"]
    result: dict[str, str] = {}
    for brick in bricks:
        for source, target in places:
            if brick.device and brick.path.startswith(target.rstrip("/") + "/") and _same(source, brick.device, live=live):
                result.setdefault(brick.device, target)
    return result


def _same(one: str, other: str, *, live: bool) -> bool:
    if one == other:
        return True
    key, _, value = one.partition("=")
    if key in _BY:
        one = f"/dev/disk/{_BY[key]}/{value.strip(chr(34))}"
    return live and one.startswith("/dev/") and os.path.realpath(one) == os.path.realpath(other)


# --- exports -----------------------------------------------------------------------------------------------------------


def exported(root: Path, paths: Iterable[str]) -> Iterator[Problem]:
    """Other files that export one of our folders: the server would serve it as one of them says, and it is unknown which."""
    ours, files = set(paths), ["/etc/exports"]
    folder, _, own = EXPORT_FILE.rpartition("/")
    with contextlib.suppress(OSError):
        names = sorted(found.name for found in inside(root, folder).iterdir())
        # Those that exportfs reads beside ours.
        files += [f"{folder}/{name}" for name in names if name.endswith(".exports") and name[0] != "." and name != own]
    for file in files:
        for number, line, exported_folder in export_lines((read(root, file) or b"").decode(errors="replace")):
            if exported_folder in ours:
                fix = "remove that line: the cluster file says to whom the folder is exported"
                yield Problem(f"{exported_folder} is exported by this line already: {line[:200]}", f"{file}:{number}", fix=fix)


def serves(proc: Path = Path("/proc")) -> bool:
    """Whether this machine's NFS server runs: the number of its threads, which only root reads where nfsd(7) has it."""
    with contextlib.suppress(OSError, ValueError):
        return int((proc / "fs/nfsd/threads").read_text()) > 0
    with contextlib.suppress(OSError):
        for line in (proc / "net/rpc/nfsd").read_text().splitlines():
            if (fields := line.split())[:1] == ["th"]:
                return fields[1:2] not in ([], ["0"])
    return False


# --- what the NFS server exports now: /var/lib/nfs/etab, which exportfs writes (exportfs(8)) --------------------------

ETAB = "/var/lib/nfs/etab"
_CLIENT = re.compile(r"(\S+?)\(([^)]*)\)")
_REQUIRED = ("rw", "sync", "root_squash", "no_subtree_check")
"""The options that etab writes as exports does."""


def read_etab(path: Path = Path(ETAB)) -> str:
    """The text of etab; empty where there is none."""
    return read_text(path)


def clients(text: str) -> dict[tuple[str, str], frozenset[str]]:
    """The options of each exported folder and client."""
    found = {}
    for line in text.splitlines():
        folder, *rest = line.split(None, 1)
        for client, options in _CLIENT.findall(rest[0] if rest else ""):
            found[folder, client] = frozenset(options.split(","))
    return found


def faults(lines: Iterable[str], text: str, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Folders that the server does not export as our ``lines`` say, each with what is wrong; ``names`` of :func:`canonical`."""
    now = clients(text)
    for (folder, client), options in clients("\n".join(lines)).items():
        seen = now.get((folder, _written(client, folder, now, names)))
        if seen is None:
            yield folder, f"is not exported to {client}"
        elif lost := [option for option in _REQUIRED if option in options and option not in seen]:
            yield folder, f"is exported to {client} without {', '.join(lost)}"


def others(lines: Iterable[str], text: str, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Our folders that the server exports to machines that our ``lines`` do not name, with their names."""
    now = clients(text)
    ours = {(folder, _written(client, folder, now, names)) for folder, client in clients("\n".join(lines))}
    folders = {folder for folder, _ in ours}
    yield from ((folder, client) for folder, client in now if folder in folders and (folder, client) not in ours)


def _written(client: str, folder: str, now: Mapping[tuple[str, str], frozenset[str]], names: Mapping[str, str]) -> str:
    """The client as etab writes it: a network may stand there with its mask written out, a host by its full name."""
    if (folder, client) in now:
        return client
    if "/" not in client:
        return names.get(client, client)
    network = ipaddress.ip_network(client)
    return f"{network.network_address}/{network.netmask}"


def canonical(lines: Iterable[str], text: str, seconds: float) -> dict[str, str]:
    """Full names of those clients of our ``lines`` that etab does not name as we do: exportfs asks the resolver for them."""
    now = {client for _, client in clients(text)}
    requested = {client for _, client in clients("\n".join(lines)) if "/" not in client and client not in now}
    answers = ask_all({client: partial(_resolve, client) for client in requested}, seconds)
    return {client: answer.found["name"] for client, answer in answers.items() if answer.found}


def _resolve(client: str) -> dict[str, str]:
    return {"name": socket.getaddrinfo(client, None, flags=socket.AI_CANONNAME)[0][3] or client}
