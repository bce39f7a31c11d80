"""Faults of the storage section: what would fail when it is mounted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clustertune.cluster.schema import Brick, Host, Pool
from clustertune.host.mounts import lies_below
from clustertune.recipe.findings import Found, parse_partial
from clustertune.recipe.layers import KeyPath, did_you_mean

_SYSTEM = re.compile(r"/(bin|boot|dev|etc|lib|lib64|proc|root|run|sbin|sys|tmp|usr|var)?")
"""A file system that is mounted there hides what a machine needs to run."""
_KERNEL = re.compile(r"/(dev|proc|run|sys)(/.*)?")
"""Nothing that is made there is there after the next boot."""


def check_storage(storage: Mapping[str, Any], hosts: Sequence[Host | None]) -> Iterator[Found]:
    """Everything that is wrong with bricks, pool and folders; a part that could not be read is None."""
    listed = storage.get("bricks", [])
    parsed = [parse_partial(Brick, item) for item in listed] if isinstance(listed, list) else []
    bricks = [(("storage", "bricks", str(index)), brick) for index, (brick, _) in enumerate(parsed) if brick]
    complete = isinstance(listed, list) and all(good for _, good in parsed)
    names = {host.name: host for host in hosts if host and host.name}
    for path, brick in bricks:
        host = names.get(brick.node)
        if host is None and all(host and host.name for host in hosts):
            yield (*path, "node"), f"there is no machine {brick.node}", did_you_mean(str(brick.node), names)
        elif host is not None and host.roles is not None and "nfs" not in host.roles:
            yield (*path, "node"), f"{brick.node} has a brick but not the role nfs", "add nfs to its roles"
        root = storage.get("root") if host and "compute" in (host.roles or ()) else None  # only compute nodes are alike
        yield from _check_brick(path, brick, root.get("device") if isinstance(root, dict) else None)
    yield from _clashes(bricks)
    owners = {brick.node for _, brick in bricks}
    for index, host in enumerate(hosts):
        if complete and host and "nfs" in (host.roles or ()) and host.name not in owners:
            message = f"{host.name} has the role nfs but no brick"
            yield ("nodes", str(index), "roles"), message, "add it to storage.bricks, or take the role away"
    pool, _ = parse_partial(Pool, storage.get("pool"))
    if pool and pool.mount:
        yield from _check_pool(pool, bricks, complete)
    mounts = [brick.mount for _, brick in bricks if brick.mount] + ([pool.mount] if pool and pool.mount else [])
    yield from _check_folders(storage, mounts, complete)


def _check_brick(path: KeyPath, brick: Brick, root: str | None) -> Iterator[Found]:
    """What one brick alone says. ``root``: the device that its machine boots from; None: unknown."""
    for key, value in (("mount", brick.mount), ("path", brick.path)):
        if value and _is_system(value):
            fix = "mount it elsewhere" if key == "mount" else "a folder of its own"
            yield (*path, key), f"{value} is the system's own", fix
    if brick.mount and brick.path and _nested(brick.mount, brick.path):
        message = f"{brick.path} and {brick.mount}, where it is seen, are inside one another"
        yield (*path, "mount"), message, "the same folder, or one beside it"
    if brick.device and not brick.device.startswith("/dev/"):
        yield (*path, "device"), f"{brick.device} is not a device", "write it as /dev/disk/by-id/...; lsblk shows them"
    if brick.device and brick.device == root:
        yield (*path, "device"), f"{brick.device} is storage.root.device, which the machine boots from", "the brick's own disk"


def _is_system(path: str) -> bool:
    return bool(_SYSTEM.fullmatch(path) or _KERNEL.fullmatch(path))


_ONCE = {
    "mount": "two file systems cannot be mounted there",
    "path": "one folder of one machine",
    "device": "its space would count twice",
}
"""Keys of which two bricks cannot have the same value, or one inside of the other, and why."""


def _clashes(bricks: Sequence[tuple[KeyPath, Brick]]) -> Iterator[Found]:
    """Bricks at one place, and one that is seen, on the machine of another one, where that has its own exported folder."""
    for number, (path, brick) in enumerate(bricks):
        for before, (_, other) in enumerate(bricks):
            for key, why in _ONCE.items() if before < number else ():
                mine, theirs = getattr(brick, key), getattr(other, key)
                if not (mine and theirs) or (key != "mount" and other.node != brick.node):
                    continue
                if mine == theirs:
                    yield (*path, key), f"{mine} is also the {key} of another brick: {why}", "give each its own"
                elif key != "device" and _nested(mine, theirs):
                    yield (*path, key), f"{mine} and {theirs} of another brick are inside one another", "give each its own"
            mine, theirs = brick.mount, other.path
            if before != number and mine and theirs and (mine == theirs or _nested(mine, theirs)):
                what = "is" if mine == theirs else f"lies in, or around, {theirs},"
                message = f"{mine} {what} the exported folder of another brick, on {other.node}"
                yield (*path, "mount"), message, "see each brick at a place of its own"


def _inside(inner: str, outer: str) -> bool:
    return inner != outer and lies_below(inner, outer)


def _nested(one: str, other: str) -> bool:
    return _inside(one, other) or _inside(other, one)


def _check_pool(pool: Pool, bricks: Sequence[tuple[KeyPath, Brick]], complete: bool) -> Iterator[Found]:
    path = ("storage", "pool", "mount")
    if not bricks and complete:
        yield ("storage", "pool"), "a pool without bricks", "name them in storage.bricks"
    if _is_system(pool.mount):
        yield path, f"{pool.mount} is the system's own", "mount it elsewhere"
    for _, brick in bricks:
        for value in filter(None, (brick.mount, brick.path)):
            if pool.mount == value or _nested(pool.mount, value):
                what = "is also" if pool.mount == value else "and"
                tail = f"a folder of the brick of {brick.node}" if pool.mount == value else f"{value} are inside one another"
                yield path, f"{pool.mount} {what} {tail}", "a pool has a mount point of its own"
                break
    if pool.min_free_gb and complete and bricks and pool.min_free_gb >= 1000 * min(brick.tb for _, brick in bricks):
        yield ("storage", "pool", "min_free_gb"), "more than the smallest brick holds: no file would go there", None


def _check_folders(storage: Mapping[str, Any], mounts: Sequence[str], complete: bool) -> Iterator[Found]:
    shared, scratch = storage.get("shared"), storage.get("scratch", "")
    staging = storage["staging"].get("path") if isinstance(storage.get("staging"), dict) else None
    if complete and mounts and isinstance(shared, str) and not any(_inside(shared, m) or shared == m for m in mounts):
        message = f"{shared} is on none of the mounts {', '.join(mounts)}: other machines do not see it"
        yield ("storage", "shared"), message, "choose a folder below one of them"
    if isinstance(staging, str) and _SYSTEM.fullmatch(staging):
        yield ("storage", "staging", "path"), f"{staging} is the system's own", "a folder of its own on a local disk"
    for key, folder in (("scratch", scratch), ("staging", staging)):
        for mount in mounts:
            if key == "staging" and isinstance(folder, str) and _inside(mount, folder):
                yield ("storage", key, "path"), f"{mount} lies in {folder}, where copies make room for others", "one beside it"
                break
            if isinstance(folder, str) and (folder == mount or _inside(folder, mount)):
                at = ("storage", key) if key == "scratch" else ("storage", key, "path")
                yield at, f"{folder} is on {mount}, which all machines share", "a folder of a local disk"
                break
