"""Collect what a node's storage is like now. Every look at a file system has a limit: one that hangs must not hang this."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clustertune.errors import UserError
from clustertune.host.mounts import MountLine
from clustertune.ops.bounded import Answer, Work, ask_all, mounts
from clustertune.ops.files import NODE, inside, read, with_block
from clustertune.ops.nodes import group_id
from clustertune.ops.storage import etab, points, probe
from clustertune.ops.storage.fstab import FSTAB
from clustertune.ops.storage.layout import DATA, EXPORT_FILE, StorageLayout
from clustertune.ops.storage.plan import BLOCK, serves


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
    points: list[points.MountPoint] = field(default_factory=list)
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
    found = {path: _mount_state(path, now.get(real_path)) for path, real_path in real.items()}
    facts.bricks = {brick.mount: found[brick.mount] for brick in wanted.bricks}
    for path, device in disks.items():
        facts.disks[path] = replace(found[path], as_meant=_same_device(found[path].source, device))
    for mount, path in binds.items():
        if found[path].fstype or path not in disks:
            found[mount].as_meant = _is_bind(now, real[path], real[mount])
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


def _reals(paths: Iterable[str], root: Path, now: Mapping[str, MountLine], seconds: float) -> dict[str, str]:
    """Where each path leads. One that is a mount point as it stands is not looked at: what is mounted there may hang."""
    known = now if root == NODE else {}
    answers = ask_all({path: partial(_real, root, path) for path in paths if path not in known}, seconds)
    return {path: (answers[path].found or {}).get("path", path) if path in answers else path for path in paths}


def _real(root: Path, path: str) -> dict[str, str]:
    return {"path": str(inside(root, path))}


def _mount_state(path: str, entry: MountLine | None) -> MountState:
    return MountState(path, entry.fstype, entry.source, options=list(entry.options)) if entry else MountState(path)


def _same_device(one: str, other: str) -> bool:
    return one == other or (one.startswith("/dev/") and os.path.realpath(one) == os.path.realpath(other))


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
    works: dict[str, Work] = {f"at {state.path}": partial(probe.state, root, state.path) for state in places}
    if wanted.pool:
        works["xattrs"] = partial(probe.xattrs, root, wanted.pool.target)
    if root == NODE:
        works |= {f"to {address}": partial(probe.connect, address, seconds) for address in _other_servers(wanted)}
    shared = wanted.shared
    paths = [f"{shared.rstrip('/')}/{name}" for name in wanted.names] if shared else []
    works |= {f"folder {path}": partial(probe.folder, root, path) for path in paths}
    answers = ask_all(works, seconds + 0.5)
    for state in places:
        _note(state, answers[f"at {state.path}"])
    facts.xattrs = dict((answers["xattrs"].found if "xattrs" in answers else None) or {})
    facts.servers = {
        address: _outcome(answers[f"to {address}"]) for address in _other_servers(wanted) if f"to {address}" in answers
    }
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
        if state.fstype is None or state.silent or state.errno or state.root_disk or (trap and state.path == pool):
            state.written = "not asked"
            continue
        if folders := _writable(wanted, state.path):
            works[state.path] = partial(probe.write, root, state.path, folders, gid)
        else:
            state.written = "not asked"
    answers = ask_all(works, seconds)
    for state in places:
        if state.path in works:
            _note_write(state, answers[state.path])


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


# --- answers -----------------------------------------------------------------------------------------------------------


def _outcome(answer: Answer) -> str:
    if answer.silent:
        return "silent"
    return errno.errorcode.get(answer.errno, str(answer.errno)) if answer.errno else "ok"


def _note(state: MountState, answer: Answer) -> None:
    state.silent, state.left = answer.silent, answer.left
    state.errno = "" if answer.silent or not answer.errno else _outcome(answer)
    for key, value in (answer.found or {}).items():
        setattr(state, key, value)


def _note_write(state: MountState, answer: Answer) -> None:
    if answer.found is None:
        state.written, state.left = _outcome(answer), state.left or answer.left
        return
    for key, value in answer.found.items():
        setattr(state, key, value)
    if state.written in ("EACCES", "EPERM") and os.geteuid() != 0:
        state.written = "forbidden"


def _stale(wanted: StorageLayout, root: Path, source: str) -> list[str]:
    found = []
    for path, lines in ((FSTAB, [mount.line for mount in wanted.mounts]), (EXPORT_FILE, list(wanted.exports))):
        try:
            text = read(root, path)
            if with_block(text, BLOCK, lines, shown=path, origin=Path(source).name) != (text or b""):
                found.append(f"{path} is not what the cluster file says")
        except UserError as error:
            found += [str(problem) for problem in error.problems]
    return found
