"""Contradictions of a cluster file's storage section, as whoever mounts it would meet them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clustertune.config.cluster_schema import Brick, Host, Pool
from clustertune.config.cluster_words import Found, salvage
from clustertune.config.load import did_you_mean

_SYSTEM = re.compile(r"/(bin|boot|dev|etc|lib|lib64|proc|root|run|sbin|sys|tmp|usr|var)?")
"""A file system that is mounted there hides what a machine needs to run."""
_KERNEL = re.compile(r"/(dev|proc|run|sys)(/.*)?")
"""Nothing that is made there is there after the next boot."""


def check_storage(storage: Mapping[str, Any], hosts: Sequence[Host | None]) -> Iterator[Found]:
    """Everything that is wrong with bricks, pool and folders; a part that could not be read is None."""
    listed = storage.get("bricks", [])
    found = [salvage(Brick, item) for item in listed] if isinstance(listed, list) else []
    bricks = [(("storage", "bricks", str(index)), brick) for index, (brick, _) in enumerate(found) if brick]
    whole = isinstance(listed, list) and all(good for _, good in found)
    names = {host.name: host for host in hosts if host and host.name}
    for path, brick in bricks:
        host = names.get(brick.node)
        if host is None and all(host and host.name for host in hosts):
            yield (*path, "node"), f"there is no machine {brick.node}", did_you_mean(str(brick.node), names)
        elif host is not None and host.roles is not None and "nfs" not in host.roles:
            yield (*path, "node"), f"{brick.node} has a brick but not the role nfs", "add nfs to its roles"
        yield from _check_brick(path, brick, _root_device(storage, host))
    yield from _twice(bricks, "mount", "two file systems cannot be mounted there")
    yield from _twice(bricks, "path", "one folder of one machine", per_node=True)
    yield from _twice(bricks, "device", "its space would count twice", per_node=True)
    yield from _crossed(bricks)
    owners = {brick.node for _, brick in bricks}
    for index, host in enumerate(hosts):
        if whole and host and "nfs" in (host.roles or ()) and host.name not in owners:
            message = f"{host.name} has the role nfs but no brick"
            yield ("nodes", str(index), "roles"), message, "add it to storage.bricks, or take the role away"
    pool, _ = salvage(Pool, storage.get("pool"))
    if pool and pool.mount:
        yield from _check_pool(pool, bricks, whole)
    mounts = [brick.mount for _, brick in bricks if brick.mount] + ([pool.mount] if pool and pool.mount else [])
    yield from _check_folders(storage, mounts, whole)


def _root_device(storage: Mapping[str, Any], host: Host | None) -> str | None:
    """What a machine boots from; None: nobody said, as only compute nodes are alike."""
    root = storage.get("root")
    return root.get("device") if isinstance(root, dict) and host and "compute" in (host.roles or ()) else None


def _check_brick(path: tuple[str, ...], brick: Brick, root: str | None) -> Iterator[Found]:
    """What one brick alone says."""
    for key, place in (("mount", brick.mount), ("path", brick.path)):
        if place and _is_system(place):
            yield (
                (*path, key),
                f"{place} is the system's own",
                "mount it elsewhere" if key == "mount" else "a folder of its own",
            )
    if brick.mount and brick.path and (_inside(brick.mount, brick.path) or _inside(brick.path, brick.mount)):
        message = f"{brick.path} and {brick.mount}, where it is seen, lie in each other"
        yield (*path, "mount"), message, "the same folder, or one beside it"
    if brick.device and not brick.device.startswith("/dev/"):
        yield (*path, "device"), f"{brick.device} is no device", "write it as /dev/disk/by-id/...; lsblk shows them"
    if brick.device and brick.device == root:
        yield (*path, "device"), f"{brick.device} is storage.root.device, which the machine boots from", "the brick's own disk"


def _is_system(place: str) -> bool:
    return bool(_SYSTEM.fullmatch(place) or _KERNEL.fullmatch(place))


def _crossed(bricks: Sequence[tuple[tuple[str, ...], Brick]]) -> Iterator[Found]:
    """A brick that is seen, on the machine of another one, where that has its own exported folder."""
    for path, brick in bricks:
        for _, other in bricks:
            mine, theirs = brick.mount, other.path
            if other is brick or not (mine and theirs):
                continue
            if mine == theirs or _inside(mine, theirs) or _inside(theirs, mine):
                what = "is" if mine == theirs else f"lies in, or around, {theirs},"
                message = f"{mine} {what} the exported folder of another brick, on {other.node}"
                yield (*path, "mount"), message, "see each brick at a place of its own"


def _twice(bricks: Sequence[tuple[tuple[str, ...], Brick]], key: str, why: str, *, per_node: bool = False) -> Iterator[Found]:
    """Bricks at one place, or one inside of another."""
    for number, (path, brick) in enumerate(bricks):
        for _, other in bricks[:number]:
            if per_node and other.node != brick.node:
                continue
            mine, theirs = getattr(brick, key), getattr(other, key)
            if not (mine and theirs):
                continue
            if mine == theirs:
                yield (*path, key), f"{mine} is also the {key} of another brick: {why}", "give each its own"
            elif key != "device" and (_inside(mine, theirs) or _inside(theirs, mine)):
                yield (*path, key), f"{mine} and {theirs} of another brick lie in each other", "give each its own"


def _inside(inner: str, outer: str) -> bool:
    return inner != outer and inner.startswith(outer.rstrip("/") + "/")


def _check_pool(pool: Pool, bricks: Sequence[tuple[tuple[str, ...], Brick]], complete: bool) -> Iterator[Found]:
    path = ("storage", "pool", "mount")
    if not bricks and complete:
        yield ("storage", "pool"), "a pool without bricks", "name them in storage.bricks"
    if _is_system(pool.mount):
        yield path, f"{pool.mount} is the system's own", "mount it elsewhere"
    for _, brick in bricks:
        for place in filter(None, (brick.mount, brick.path)):
            if pool.mount == place or _inside(pool.mount, place) or _inside(place, pool.mount):
                what = "is also" if pool.mount == place else "and"
                tail = f"a folder of the brick of {brick.node}" if pool.mount == place else f"{place} lie in each other"
                yield path, f"{pool.mount} {what} {tail}", "a pool has a mount point of its own"
                break
    if pool.min_free_gb and complete and bricks and pool.min_free_gb >= 1000 * min(brick.tb for _, brick in bricks):
        yield ("storage", "pool", "min_free_gb"), "more than the smallest brick holds: no file would go there", None


def _check_folders(storage: Mapping[str, Any], mounts: Sequence[str], complete: bool) -> Iterator[Found]:
    shared, scratch = storage.get("shared"), storage.get("scratch", "")
    staging = storage["staging"].get("path") if isinstance(storage.get("staging"), dict) else None
    if complete and mounts and isinstance(shared, str) and not any(_inside(shared, m) or shared == m for m in mounts):
        message = f"{shared} lies on none of the mounts {', '.join(mounts)}: other machines do not see it"
        yield ("storage", "shared"), message, "choose a folder below one of them"
    if isinstance(staging, str) and _SYSTEM.fullmatch(staging):
        yield ("storage", "staging", "path"), f"{staging} is the system's own", "a folder of its own on a local disk"
    for key, place in (("scratch", scratch), ("staging", staging)):
        for mount in mounts:
            if key == "staging" and isinstance(place, str) and _inside(mount, place):
                yield ("storage", key, "path"), f"{mount} lies in {place}, where copies make room for others", "one beside it"
                break
            if isinstance(place, str) and (place == mount or _inside(place, mount)):
                at = ("storage", key) if key == "scratch" else ("storage", key, "path")
                yield at, f"{place} lies on {mount}, which all machines share", "a folder of a local disk"
                break
