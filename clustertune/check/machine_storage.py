"""File systems: whether they answer, how they are mounted, what can be done on them, how full they are."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence

from clustertune.check.machines import Machine, first_part, gigabytes
from clustertune.check.rule import FAIL, MACHINE, PASS, WARN, Rules, Seen, either
from clustertune.host.facts import Mount
from clustertune.host.mounts import lies_below

RULES = Rules(MACHINE, __file__)

TIGHT, FEW_INODES = 10**10, 10_000
PATIENT = 100
"""Tenths of a second before NFS asks again, the least that is sensible over TCP; its own is 600 (nfs(5), timeo)."""


def _named(m: Machine) -> dict[str, str]:
    """Folders of the cluster file that are mounted, or written to: path to what it is."""
    storage = m.section("storage")
    named = {}
    for brick in storage.get("bricks") or ():
        named[str(brick.get("mount"))] = "brick"
    if pool := storage.get("pool"):
        named[str(pool.get("mount"))] = "pool"
    if storage.get("shared"):
        named.setdefault(str(storage["shared"]), "shared")
    return named


def _pools(m: Machine) -> list[Mount]:
    return [mount for mount in m.facts.mounts if mount.kind == "fuse.mergerfs"]


@RULES("mount-silent")
def mount_silent(m: Machine) -> Iterator[Seen]:
    """Every file system answers."""
    hung = [mount for mount in m.facts.mounts if mount.silent or mount.fault]
    storage = m.section("storage")
    named = (storage.get("scratch"), m.environ("HOME"), m.environ("TMPDIR"), m.environ("HF_HOME"), "/tmp")  # noqa: S108
    touched = [str(path) for path in (*_named(m), *named) if path]
    for mount in hung:
        fix = f"look at the server of {mount.source or 'it'}; if it is gone for good: umount -l {mount.point} as root"
        needed = m.computes and any(lies_below(path, mount.point) for path in touched)
        fault = mount.fault or "gave no answer"
        yield Seen(FAIL if needed else WARN, f"{mount.point} ({mount.kind}, {mount.source}): {fault}", fix)
    if m.facts.mounts and not hung:
        yield Seen(PASS, f"{len(m.facts.mounts)} file systems answer")


@RULES("mount-missing")
def mount_missing(m: Machine) -> Iterator[Seen]:
    """What the cluster file mounts is mounted, on the machines of the file. In a container it is a bind of it."""
    named = {path: what for path, what in _named(m).items() if what in ("brick", "pool")}
    if not named or not m.facts.mounts or not (m.is_member or m.in_step) or m.rehearsal:
        return
    bricks = m.section("storage").get("bricks") or ()
    own = {str(brick.get("mount")) for brick in bricks if first_part(str(brick.get("node"))) == first_part(m.facts.hostname)}
    points = {mount.point for mount in m.facts.mounts}
    for path, what in named.items():
        # in a container it is a bind; a brick of its own may lie on a larger disk
        below = any(lies_below(path, point) for point in points - {"/"})
        if path in points or (below and (m.in_container or path in own)):
            yield Seen(PASS, f"{path} is mounted")
        elif m.mounts_later(path):
            continue
        elif m.in_container:
            yield Seen(WARN, f"the container does not see the {what} {path}", "bind it: container.binds of the cluster file")
        else:
            fix = f"mount {path}; clustertune setup storage renders its line; an immutable mount point keeps writes off"
            yield Seen(FAIL if m.computes else WARN, f"nothing is mounted on {path} ({what} of the cluster file)", fix)


@RULES("mount-read-only")
def mount_read_only(m: Machine) -> Iterator[Seen]:
    """Bricks, pool, scratch and /tmp are writable."""
    named = _named(m)
    paths = [*named, str(m.section("storage").get("scratch") or ""), "/tmp"]  # noqa: S108 - it is looked at
    mounts = [mount for path in paths if path and (mount := m.mount_of(path)) and "ro" in mount.options]
    bad = {mount.point: mount for mount in mounts if mount.point != "/" or not m.in_container}
    for mount in bad.values():
        hard = m.computes and not m.in_container and named.get(mount.point) != "brick"  # a pool passes over such a brick
        yield Seen(FAIL if hard else WARN, f"{mount.point} ({mount.kind}) is read-only")
    if m.facts.mounts and not bad:
        yield Seen(PASS, "no file system that jobs write to is read-only")


def nfs_fault(options: Sequence[str]) -> tuple[str, str]:
    """The status of an NFS mount's options, and the harmful ones as text; PASS and an empty text if there are none.

    A soft mount gives up on writes: nfs(5) warns of silent data corruption. A read-only soft mount loses no writes.
    ``softreval`` serves outdated entries; ``nolock`` and ``local_lock`` hide locks from other nodes.
    """
    soft = [word for word in options if word in ("soft", "softerr")]
    other = [word for word in options if word in ("softreval", "nolock", "local_lock=all", "local_lock=flock")]
    return FAIL if soft and "ro" not in options else WARN if soft or other else PASS, ", ".join(soft + other)


@RULES("nfs-options")
def nfs_options(m: Machine) -> Iterator[Seen]:
    """NFS is mounted hard, with locks, and patiently; branches by the version that the cluster file says."""
    storage = m.section("storage")
    branches = {str(brick.get("mount")) for brick in storage.get("bricks") or ()}
    for mount in m.facts.mounts:
        if not mount.kind.startswith("nfs"):
            continue
        status, bad = nfs_fault(mount.options)
        values = dict(word.partition("=")[::2] for word in mount.options)
        stated, spoken = str(storage.get("nfs_version") or ""), values.get("vers", values.get("nfsvers", ""))
        hurried = f"timeo={values['timeo']}" if values.get("timeo", "").isdigit() and int(values["timeo"]) < PATIENT else ""
        other = (
            f"version {spoken}, the cluster file says {stated}"
            if mount.point in branches and spoken not in ("", stated)
            else ""
        )
        bad = ", ".join(filter(None, (bad, hurried, other if stated else "")))
        yield from either(status if status != PASS else WARN, f"{mount.point}: {bad}" if bad else "", f"{mount.point}: hard")


@RULES("pool-options")
def pool_options(m: Machine) -> Iterator[Seen]:
    """Pools can map files, move what outgrows its branch, and choose branches as the cluster file says."""
    pool = m.section("storage").get("pool") or {}
    for mount in _pools(m):
        off = [word for word in mount.options if word in ("cache.files=off", "direct_io")]
        tried = [p.ok for p in m.facts.probes if p.what == "mmap" and p.ok is not None and m.mount_of(p.folder) is mount]
        # What was tried is known, with kernels that map such files too: the rule mmap tells.
        bad = ([] if tried else off) + [word for word in mount.options if word == "moveonenospc=false"]
        chosen = next((word for word in mount.options if word.startswith("category.create=")), "")
        if chosen and mount.point == pool.get("mount") and chosen != f"category.create={pool.get('create', 'epmfs')}":
            bad.append(f"{chosen}, the cluster file says {pool.get('create', 'epmfs')}")
        if bad:
            yield Seen(WARN, f"{mount.point}: {', '.join(bad)}")


@RULES("nfs-over-fuse")
def nfs_over_fuse(m: Machine) -> Iterator[Seen]:
    """No FUSE file system is exported."""
    for path in m.facts.exports:
        mount = m.mount_of(path)
        if mount is not None and mount.kind.startswith("fuse."):
            yield Seen(FAIL, f"/etc/exports: {path} is on {mount.kind} at {mount.point}")


@RULES("export-options")
def export_options(m: Machine) -> Iterator[Seen]:
    """Exports write before they answer; root is mapped away, but where a pool has to make folders as root."""
    create = str((m.section("storage").get("pool") or {}).get("create") or "ep")
    for path, text in m.facts.exports.items():
        options = set(re.split(r"[(),\s]+", text))
        lost = f"{path}: async" if "async" in options else ""
        # mergerfs makes a folder that another branch has as root (github.com/trapexit/mergerfs/issues/1218).
        needed = not create.startswith("ep") and m.several
        root = f"{path}: no_root_squash" if "no_root_squash" in options and not needed else ""
        yield from either(FAIL if lost else WARN, lost or root, f"{path}: {text}" if text else "")


@RULES("pool-branch")
def pool_branch(m: Machine) -> Iterator[Seen]:
    """No branch of a pool is on the root disk."""
    for pool in _pools(m):
        listed = next((word[len("branches=") :] for word in pool.options if word.startswith("branches=")), "")
        paths = [part.partition("=")[0] for part in listed.split(":") if part.startswith("/")]
        bare = [path for path in paths if (under := m.mount_of(path)) is not None and under.point == "/"]
        good = f"{pool.point}: {len(paths)} branches, each on a disk of its own" if paths else ""
        yield from either(FAIL, f"{pool.point}: {', '.join(bare)} on the root disk" if bare else "", good)


def _tried(m: Machine, what: str, fix: str, *, stops: Container[str]) -> Iterator[Seen]:
    """The results of one probe in several folders: an error is FAIL in a folder of ``stops``, WARN in others."""
    probes = [one for one in m.facts.probes if one.what == what]
    for probe in probes:
        if probe.ok is False:
            mount = m.mount_of(probe.folder)
            on = f" ({mount.kind} at {mount.point})" if mount else ""
            yield Seen(FAIL if m.computes and probe.folder in stops else WARN, f"{probe.folder}{on}: {probe.message}", fix)
    if done := sum(bool(probe.ok) for probe in probes):
        yield Seen(PASS, f"works in {done} folders")


@RULES("mmap")
def mmap(m: Machine) -> Iterator[Seen]:
    """Files can be mapped shared in the folders of runs and of libraries."""
    fix = "cache.files=auto-full for a mergerfs pool, or move the folder to another file system"
    yield from _tried(m, "mmap", fix, stops=_named(m))


@RULES("flock")
def flock(m: Machine) -> Iterator[Seen]:
    """Files can be locked in the folders of libraries: without locks they end with an error."""
    fix = "mount with locks (local_lock=none, lockd for NFSv3), or HF_HOME on a disk of the node"
    yield from _tried(m, "flock", fix, stops=[probe.folder for probe in m.facts.probes])


def _written(m: Machine) -> list[Mount]:
    """The file systems to which jobs write, as far as their free space is known."""
    storage = m.section("storage")
    scratch, staging = storage.get("scratch"), (storage.get("staging") or {}).get("path")
    named = [*_named(m), scratch, staging, m.environ("TMPDIR") or "/tmp", "" if m.in_container else "/"]  # noqa: S108
    seen = {mount.point: mount for path in named if path and (mount := m.mount_of(str(path))) and not mount.silent}
    known = (mount for mount in seen.values() if mount.free_bytes is not None and mount.total_bytes)
    return [mount for mount in known if "ro" not in mount.options]


@RULES("disk-full")
def disk_full(m: Machine) -> Iterator[Seen]:
    """There is room where jobs write."""
    mounts, bad = _written(m), 0
    for mount in mounts:
        total, free = mount.total_bytes or 0, mount.free_bytes or 0
        if free < min(TIGHT, total // 20):  # a tmpfs or a quota of some GB is meant to be so small
            hard = free < 100_000_000
            text = f"{mount.point} ({mount.kind}): {gigabytes(free)} of {gigabytes(total)} left"
            fix = f"remove what is not needed: du -xh -d 2 {mount.point} | sort -h | tail"
            bad += 1
            yield Seen(FAIL if hard else WARN, text, fix)
    if len(mounts) > bad:
        yield Seen(PASS, f"{len(mounts) - bad} file systems have room")


@RULES("inodes")
def inodes(m: Machine) -> Iterator[Seen]:
    """There are inodes where jobs write."""
    for mount in _written(m):
        if mount.free_inodes is not None and mount.free_inodes < FEW_INODES and mount.kind != "tmpfs":
            fix = f"remove small files: du --inodes -x -d 2 {mount.point} | sort -n | tail"
            status = FAIL if mount.free_inodes < 100 else WARN
            yield Seen(status, f"{mount.point} ({mount.kind}): {mount.free_inodes} inodes left", fix)


@RULES("secret-mode")
def secret_mode(m: Machine) -> Iterator[Seen]:
    """Secrets are read by their owner only."""
    bad = [file for file in m.facts.files if file.mode & 0o077]
    for file in bad:
        yield Seen(WARN, f"{file.path} has mode {file.mode:04o}", f"chmod 600 {file.path}")
    if m.facts.files and not bad:
        yield Seen(PASS, f"{len(m.facts.files)} files")
