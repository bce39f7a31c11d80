"""Collect what a node's storage is like now. Every look at a file system has a limit: one that hangs must not hang this."""

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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.errors import UserError
from clustertune.ops.bounded import Answer, Mounted, Work, ask_all, mounts
from clustertune.ops.files import NODE, inside, read, with_block
from clustertune.ops.storage import etab, points
from clustertune.ops.storage.fstab import FSTAB
from clustertune.ops.storage.layout import DATA, EXPORT_FILE, NFS_PORT, Layout
from clustertune.ops.storage.plan import BLOCK, serves

NOBODY = 65534
"""Root writes as this user, with the group's right: as root, root_squash would answer for everybody."""
XATTRS = ("version", "branches", "srcmounts", "cache.files", "minfreespace", "moveonenospc", "category.create", "func.create")
_PROBE, _MOST = ".clustertune-check.", 5000
"""How our files begin, and how many entries of a folder are passed over to find old ones."""
_SIZE = 256 * 1024
"""Bytes of the probe: several pages, and more than one NFS write where wsize is small."""


@dataclass
class Place:
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
    """Whether what is seen there lies on the disk of ``/``."""
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
    bricks: dict[str, Place] = field(default_factory=dict)
    """By mount point."""
    disks: dict[str, Place] = field(default_factory=dict)
    """Where this node's own devices are mounted, by the exported folder."""
    pool: Place | None = None
    xattrs: dict[str, str] = field(default_factory=dict)
    """mergerfs' settings at run time, without ``user.mergerfs.``."""
    servers: dict[str, str] = field(default_factory=dict)
    """Of each address whether its NFS port answers: ``ok``, ``silent`` or an errno's name."""
    points: list[points.Point] = field(default_factory=list)
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
    """Disks that the next boot does not mount, in words."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def collect(wanted: Layout, root: Path, seconds: float, source: str = "") -> Facts:
    """Look at everything that ``wanted`` names, each for at most ``seconds``; a probe file is written and removed."""
    facts = Facts(wanted.node, os.geteuid() == 0, seconds)
    now = {entry.point: entry for entry in mounts()}
    pool = [wanted.pool.target] if wanted.pool else []
    disks = {mount.target: mount.source for mount in wanted.mounts if mount.kind == "device"}
    found = {
        path: _place(path, entry) for path, entry in _entries([*wanted.mounted, *disks, *pool], root, now, seconds).items()
    }
    facts.bricks = {brick.mount: found[brick.mount] for brick in wanted.bricks}
    for path, device in disks.items():
        facts.disks[path] = replace(found[path], as_meant=_same_device(found[path].source, device))
    for brick in wanted.own:
        if brick.path != brick.mount and (brick.path in now or brick.path not in disks):
            found[brick.mount].as_meant = _is_bind(now, brick.path, brick.mount)
    facts.pool = found[pool[0]] if pool else None
    places = [*facts.bricks.values(), *([facts.pool] if facts.pool else [])]
    _first_round(wanted, facts, places, root, seconds)
    _second_round(wanted, places, root, seconds)
    facts.points = points.look((mount.target for mount in wanted.mounts), root, seconds)
    if root == NODE and wanted.exports:
        facts.serves, facts.etab = serves(), etab.read()
        facts.names = etab.canonical(wanted.exports, facts.etab, seconds)
    facts.stale = _stale(wanted, root, source)
    return facts


def _entries(paths: list[str], root: Path, now: Mapping[str, Mounted], seconds: float) -> dict[str, Mounted | None]:
    """What is mounted at each path. One that is a mount point as it stands is not looked at: what is mounted there may hang."""
    known = now if root == NODE else {}
    answers = ask_all({path: partial(_real, root, path) for path in paths if path not in known}, seconds)
    seen = {path: (answer.found or {}).get("path", "") for path, answer in answers.items()}
    return {path: now.get(seen.get(path, path)) for path in paths}


def _real(root: Path, path: str) -> dict[str, str]:
    return {"path": str(inside(root, path))}


def _place(path: str, entry: Mounted | None) -> Place:
    return Place(path, entry.fstype, entry.source, options=list(entry.options)) if entry else Place(path)


def _same_device(one: str, other: str) -> bool:
    return one == other or (one.startswith("/dev/") and os.path.realpath(one) == os.path.realpath(other))


def _is_bind(now: Mapping[str, Mounted], path: str, mount: str) -> bool | None:
    """Whether ``mount`` shows the folder ``path``, by the file system and its folder that are mounted; None: not mounted."""
    bind, above = now.get(mount), next((str(p) for p in (Path(path), *Path(path).parents) if str(p) in now), None)
    if bind is None or above is None:
        return None
    below = str(Path(path).relative_to(above))
    folder = os.path.normpath(f"{now[above].root}/{below}").replace("//", "/", 1)
    return (bind.device, bind.root) == (now[above].device, folder)


def _first_round(wanted: Layout, facts: Facts, places: list[Place], root: Path, seconds: float) -> None:
    """Whatever only reads."""
    works: dict[str, Work] = {f"at {place.path}": partial(_state, root, place.path) for place in places}
    if wanted.pool:
        works["xattrs"] = partial(_xattrs, root, wanted.pool.target)
    if root == NODE:
        works |= {f"to {address}": partial(_connect, address, seconds) for address in _asked(wanted)}
    shared = wanted.shared
    paths = [f"{shared.rstrip('/')}/{name}" for name in wanted.names] if shared else []
    works |= {f"folder {path}": partial(_folder, root, path) for path in paths}
    answers = ask_all(works, seconds + 0.5)
    for place in places:
        _note(place, answers[f"at {place.path}"])
    facts.xattrs = dict((answers["xattrs"].found if "xattrs" in answers else None) or {})
    facts.servers = {address: _outcome(answers[f"to {address}"]) for address in _asked(wanted) if f"to {address}" in answers}
    for path in paths:
        answer = answers[f"folder {path}"]
        facts.folders[path] = answer.found or {"errno": _outcome(answer)}


def _asked(wanted: Layout) -> list[str]:
    """The servers of the other nodes' bricks."""
    pairs = zip(wanted.bricks, wanted.addresses, strict=True)
    return list(dict.fromkeys(address for brick, address in pairs if brick.node != wanted.node))


def _second_round(wanted: Layout, places: list[Place], root: Path, seconds: float) -> None:
    """A write through every mount that answered and is mounted: on the root disk nothing is ever written."""
    gid = _gid(wanted.group)
    works: dict[str, Work] = {}
    pool = wanted.pool.target if wanted.pool else None
    trap = any(place.data if place.fstype is None else place.root_disk for place in places if place.path != pool)
    for place in places:
        if place.fstype is None or place.silent or place.errno or place.root_disk or (trap and place.path == pool):
            place.written = "not asked"
            continue
        if folders := _writable(wanted, place.path):
            works[place.path] = partial(_write, root, place.path, folders, gid)
        else:
            place.written = "not asked"
    answers = ask_all(works, seconds)
    for place in places:
        if place.path in works:
            _note_write(place, answers[place.path])


def _writable(wanted: Layout, mount: str) -> list[str]:
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


def _gid(group: str | None) -> int | None:
    with contextlib.suppress(KeyError):
        return grp.getgrnam(group).gr_gid if group else None
    return None


# --- what the children do ----------------------------------------------------------------------------------------------


def _state(root: Path, path: str) -> dict[str, Any]:
    place = inside(root, path)
    found = os.statvfs(place)
    with os.scandir(place) as entries:
        next(entries, None)  # a stale handle shows where the folder is read
    data: bool | None = True
    seen = place
    try:
        (place / DATA).stat()
        seen = place / DATA
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


def _xattrs(root: Path, pool: str) -> dict[str, str]:
    control, found = inside(root, pool) / ".mergerfs", {}
    for name in XATTRS:
        with contextlib.suppress(OSError):
            found[name] = os.getxattr(control, f"user.mergerfs.{name}").decode(errors="replace")
    return found


def _connect(address: str, seconds: float) -> dict[str, Any]:
    with socket.create_connection((address, NFS_PORT), timeout=seconds):
        return {"ok": True}


def _folder(root: Path, path: str) -> dict[str, Any]:
    seen = inside(root, path).stat()
    try:
        group = grp.getgrgid(seen.st_gid).gr_name
    except KeyError:
        group = str(seen.st_gid)
    return {"mode": seen.st_mode & 0o7777, "group": group}


def _write(root: Path, mount: str, folders: list[str], gid: int | None) -> dict[str, Any]:
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
            kept = os.fstat(fd).st_mtime
        step = "rename"
        os.rename(first, second, src_dir_fd=folder, dst_dir_fd=folder)
        step = "read"
        with os.fdopen(os.open(second, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            if file.read() != data:
                return {"written": "EIO", "write_step": "read"}
            mapped = _map(file.fileno(), data)
        return {"written": "ok", "mmap": mapped, "skew": _skew(before, kept, after)}
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
            if entry.name.startswith(mine) and number.isdecimal() and not Path(f"/proc/{number}").exists():
                os.unlink(entry.name, dir_fd=folder)


def _reached_by_all(mount: Path) -> bool:
    """Whether another user can come as far as what is mounted: storage below somebody's private folder is tried as root."""
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


def _skew(before: float, kept: float, after: float) -> float:
    """How far a file's time lies outside of the interval in which it was written, seconds; file systems round down."""
    tick = 0.02
    if kept < before - tick:
        return kept - before
    return max(0.0, kept - after)


# --- answers -----------------------------------------------------------------------------------------------------------


def _outcome(answer: Answer) -> str:
    if answer.silent:
        return "silent"
    return errno.errorcode.get(answer.errno, str(answer.errno)) if answer.errno else "ok"


def _note(place: Place, answer: Answer) -> None:
    place.silent, place.left = answer.silent, answer.left
    place.errno = "" if answer.silent or not answer.errno else _outcome(answer)
    for key, value in (answer.found or {}).items():
        setattr(place, key, value)


def _note_write(place: Place, answer: Answer) -> None:
    if answer.found is None:
        place.written, place.left = _outcome(answer), place.left or answer.left
        return
    for key, value in answer.found.items():
        setattr(place, key, value)
    if place.written in ("EACCES", "EPERM") and os.geteuid() != 0:
        place.written = "forbidden"


def _stale(wanted: Layout, root: Path, source: str) -> list[str]:
    found = []
    for path, lines in ((FSTAB, [mount.line for mount in wanted.mounts]), (EXPORT_FILE, list(wanted.exports))):
        try:
            text = read(root, path)
            if with_block(text, BLOCK, lines, shown=path, origin=Path(source).name) != (text or b""):
                found.append(f"{path} is not what the cluster file says")
        except UserError as error:
            found += [str(problem) for problem in error.problems]
    return found
