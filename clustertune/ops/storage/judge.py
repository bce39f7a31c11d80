"""What is wrong with a node's storage, from what was collected; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from clustertune.check.machine_storage import nfs_fault
from clustertune.check.rule import FAIL, PASS, STORAGE, UNKNOWN, WARN, Finding, Seen, checks, finding, in_order
from clustertune.cluster.schema import Brick
from clustertune.ops.storage.layout import CACHE_FILES, DATA, StorageLayout, mode_of, size_text
from clustertune.ops.storage.node import Facts, MountState, faults, others

SKEW_WARN, SKEW_FAIL = 2.0, 300.0
"""Seconds: more than a probe may be off; munge's default time to live (munge(7), 5 minutes)."""
INODES = 0.01
"""The share of inodes that must be free."""


@dataclass(frozen=True)
class StorageSubject:
    """What the rules look at."""

    facts: Facts
    wanted: StorageLayout


class SeenBrick(NamedTuple):
    """One brick as this node sees it."""

    brick: Brick
    state: MountState
    address: str
    """Of its server."""
    own: bool
    """Its disk is in this node."""
    absent: bool
    """Nothing is mounted there, though a line of ours would."""

    @property
    def where(self) -> str:
        """How findings name it."""
        return f"{self.brick.mount} ({self.brick.node})"

    @property
    def silent(self) -> bool:
        """It does not answer, or not to a write."""
        return self.state.silent or self.state.written == "silent"


def judge(facts: Facts, wanted: StorageLayout) -> list[Finding]:
    """Every finding, worst first. A rule says ``unknown`` where what it looks at was not seen."""
    found: list[Finding] = []
    for one in checks(STORAGE):
        seen = list(one(StorageSubject(facts, wanted)))
        if not seen and _applies(one.rule.id, facts, wanted):
            unseen = _unseen(one.rule.id, facts, wanted)
            seen = [finding(one.rule, UNKNOWN, f"not seen: {unseen}") if unseen else finding(one.rule, PASS, "as it should be")]
        found += seen
    return in_order(found)


def _applies(name: str, facts: Facts, wanted: StorageLayout) -> bool:
    if name.startswith("pool-") or name == "brick-data":
        return wanted.pool is not None
    if name == "nfs-export":
        return facts.serves is not None
    if name in ("nfs-server-answers", "brick-options", "storage-clock"):
        return any(brick.node != wanted.node for brick in wanted.bricks)
    return name != "shared-folders" or bool(facts.folders)


def _unseen(name: str, facts: Facts, wanted: StorageLayout) -> str:
    """What a rule that found nothing could not look at: a brick that is absent or hangs is not healthy in all else."""
    if (name.startswith("brick-") and name != "brick-mounted") or name == "storage-clock":
        bricks = [brick for brick in wanted.bricks if brick.mount in facts.bricks]
        if name in ("brick-options", "storage-clock"):
            bricks = [brick for brick in bricks if brick.node != wanted.node]
        places, written = [facts.bricks[brick.mount] for brick in bricks], name in ("brick-writable", "storage-clock")
        return ", ".join(state.path for state in places if not _seen(state, wanted, written=written))
    if name.startswith("pool-") and name != "pool-mounted" and facts.pool:
        pool, wrote = facts.pool, name in ("pool-writable", "pool-mappable")
        seen = pool.fstype == "fuse.mergerfs" and not (wrote and (pool.silent or pool.errno or pool.written != "ok"))
        return "" if seen and (name != "pool-options" or facts.xattrs) else pool.path
    return "" if name != "nfs-server-answers" or facts.servers else "no server was asked"


def _seen(state: MountState, wanted: StorageLayout, *, written: bool) -> bool:
    if (state.fstype is None and wanted.at(state.path)) or state.silent or state.errno:
        return False
    return not written or state.written in ("ok", "ENOSPC", "EDQUOT")


# --- bricks ------------------------------------------------------------------------------------------------------------


def _bricks(s: StorageSubject, *, healthy: bool = False) -> Iterator[SeenBrick]:
    """The bricks that were looked at; ``healthy``: of them those that are mounted and answer."""
    for brick, address in zip(s.wanted.bricks, s.wanted.addresses, strict=True):
        state = s.facts.bricks.get(brick.mount)
        if state is None:
            continue
        absent = state.fstype is None and s.wanted.at(brick.mount) is not None
        seen = SeenBrick(brick, state, address, brick.node == s.wanted.node, absent)
        if not healthy or not (absent or seen.silent or state.errno):
            yield seen


def brick_mounted(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: a brick is mounted

    Why: the pool shrinks without a message: its files vanish, new ones go elsewhere
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    for seen in _bricks(s):
        if seen.absent:
            fix = f"mount {seen.brick.mount}; journalctl -u '*.mount' says why it did not"
            fix += "" if seen.own else f"; on {seen.brick.node}: clustertune ops storage check"
            yield Seen(FAIL, "nothing is mounted there", fix, seen.where)
    for path, state in s.facts.disks.items():
        if state.fstype is None:
            device = _device(s, path)
            yield Seen(FAIL, f"{device} is not mounted, and not exported", f"lsblk -f {device}; mount {path}", path)


def _device(s: StorageSubject, path: str) -> str:
    return next(mount.source for mount in s.wanted.mounts if mount.target == path)


def brick_answers(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: a brick answers

    Why: ls, df and every new file in the pool wait for it, and cannot be killed
    See: https://man7.org/linux/man-pages/man5/nfs.5.html
    """
    for seen in _bricks(s):
        if seen.absent:
            continue
        if seen.silent:
            yield _hung(s, seen)
        elif seen.state.errno:
            yield _answered(seen)


def _hung(s: StorageSubject, seen: SeenBrick) -> Seen:
    state, node = seen.state, seen.brick.node
    what = f"no answer in {s.facts.seconds:g} s" + ("" if state.silent else " to a write, while it can be read")
    if state.left:
        what += f"; process {state.left} still waits for it, unkillable until it answers, and does no harm"
    if seen.own:
        fix = "dmesg for errors of the disk; xfs_freeze -u where it is frozen"
    else:
        fix = f"see whether {node} is up and serves (systemctl status nfs-server there); all continues when it answers"
    return Seen(FAIL, what, fix, seen.where)


def _answered(seen: SeenBrick) -> Seen:
    state, node = seen.state, seen.brick.node
    if state.errno == "ESTALE":
        fix = f"umount -l {state.path} && mount {state.path}, then the pool likewise"
        return Seen(FAIL, f"stale file handle: {node} exports another file system than when it was mounted", fix, seen.where)
    if state.errno in ("EACCES", "EPERM"):
        return Seen(UNKNOWN, f"this user may not look there ({state.errno})", where=seen.where)
    at_home = "dmesg for errors of the disk; then umount, xfs_repair, mount"
    return Seen(
        FAIL, f"answers {state.errno}", at_home if seen.own else f"on {node}: clustertune ops storage check", seen.where
    )


def brick_not_on_root_disk(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: a brick is not part of the root disk

    Why: writes fill the disk the node boots from
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    for seen in _bricks(s):
        mount = seen.brick.mount
        if seen.absent and seen.state.data and s.wanted.pool:
            fix = f"unmount the pool, move {mount}/{DATA} away, then clustertune ops storage apply"
            yield Seen(FAIL, f"{mount}/{DATA} exists below the mount point: the pool writes there", fix, seen.where)
    for seen in _bricks(s, healthy=True):
        if seen.state.root_disk:
            at = seen.brick.path if seen.own else seen.brick.mount
            fix = f"mount the brick's file system at {at}, then move what was written here"
            yield Seen(FAIL, "what is seen there is on the root disk", fix, seen.where)


def brick_writable(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: a brick takes writes

    Why: checkpoints that were to go there fail
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    for seen in _bricks(s, healthy=True):
        state, at = seen.state, "here" if seen.own else f"on {seen.brick.node}"
        if state.read_only or "ro" in state.options or state.written == "EROFS":
            folder = seen.brick.path if seen.own else seen.brick.mount
            fix = f"dmesg {at}: the kernel goes read-only on errors; then mount -o remount,rw {folder}"
            yield Seen(FAIL, "read-only", fix, seen.where)
        elif state.written in ("EACCES", "EPERM"):
            fix = f"clustertune ops storage apply {at} makes the folders; where they are there, fix their modes"
            yield Seen(FAIL, f"a user may not {state.write_step} a file ({state.written})", fix, seen.where)
        elif state.written in ("forbidden", "absent", "not asked"):
            reasons = {"absent": "there is no shared folder on it", "forbidden": "this user may not write there"}
            yield Seen(UNKNOWN, reasons.get(state.written, "no write was tried"), where=seen.where)
        elif state.written not in ("ok", "", "ENOSPC", "EDQUOT"):
            fix = f"dmesg {at}; xfs_repair after umount where the disk is healthy"
            yield Seen(FAIL, f"{state.write_step} of a file fails with {state.written}", fix, seen.where)


def brick_space(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: a brick has room

    Why: below minfreespace it takes no new file; with none left, training stops
    Fix: remove old checkpoints (clustertune keeps what retention says), or add a brick
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    for seen in _bricks(s, healthy=True):
        state, least = seen.state, s.wanted.minfreespace
        if state.free is None or state.total is None:
            continue
        room = f"{size_text(state.free)} of {size_text(state.total)} are free"
        if state.written in ("ENOSPC", "EDQUOT") or state.free == 0:
            yield Seen(FAIL, f"full: {room}", where=seen.where)
        elif least and state.free < least:
            yield Seen(WARN, f"{room}, less than minfreespace ({size_text(least)}): it takes no new file", where=seen.where)
        if state.inodes and state.free_inodes is not None and state.free_inodes < INODES * state.inodes:
            status = FAIL if state.free_inodes == 0 else WARN
            text = f"{state.free_inodes} of {state.inodes} inodes are free"
            yield Seen(status, text, "remove small files: caches, logs, extracted archives", seen.where)


def brick_data(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: a brick has the pool's folder

    Why: without it the pool passes the brick over
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    for seen in _bricks(s, healthy=True):
        if s.wanted.pool and seen.state.data is False:
            fix = f"on {seen.brick.node}: clustertune ops storage apply"
            yield Seen(FAIL, f"there is no {seen.brick.mount}/{DATA}", fix, seen.where)


def brick_source(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: a brick is mounted from where the cluster file says

    Why: nodes see different files at one path
    See: https://man7.org/linux/man-pages/man5/nfs.5.html
    """
    for seen in _bricks(s, healthy=True):
        mount, state = s.wanted.at(seen.brick.mount), seen.state
        again = f"umount {seen.brick.mount} && mount {seen.brick.mount}"
        if mount and mount.kind == "bind" and state.as_meant is False:
            yield Seen(FAIL, f"it shows something else than {seen.brick.path}", again, seen.where)
        if mount and mount.kind == "nfs" and state.fstype:
            if not state.fstype.startswith("nfs"):
                yield Seen(FAIL, f"{state.fstype} from {state.source}, not NFS from {mount.source}", again, seen.where)
            elif state.source.rstrip("/") != mount.source.rstrip("/"):
                yield Seen(FAIL, f"mounted from {state.source}, not {mount.source}", again, seen.where)
    for path, state in s.facts.disks.items():
        if state.fstype is not None and state.as_meant is False:
            fix = f"see which disk is meant: lsblk -f; then umount {path} && mount {path}, or fix storage.bricks.device"
            yield Seen(FAIL, f"{state.source} is mounted, not {_device(s, path)}", fix, path)


def brick_options(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: an NFS brick is mounted hard, and with locks

    Why: soft mounts give up, and lose what was written
    See: https://man7.org/linux/man-pages/man5/nfs.5.html
    """
    for seen in _bricks(s, healthy=True):
        status, bad = nfs_fault(seen.state.options)
        if seen.state.fstype and seen.state.fstype.startswith("nfs") and bad:
            fix = f"umount {seen.brick.mount} && mount {seen.brick.mount}"
            yield Seen(status, f"mounted {bad}", fix, seen.where)


def nfs_server_answers(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: a server answers on TCP 2049

    Why: every access waits until it does
    See: https://man7.org/linux/man-pages/man5/nfs.5.html
    """
    for address, answer in s.facts.servers.items():
        if answer != "ok":
            node = next(b.node for b, other in zip(s.wanted.bricks, s.wanted.addresses, strict=True) if other == address)
            what = f"no answer in {s.facts.seconds:g} s" if answer in ("silent", "ETIMEDOUT") else f"answers {answer}"
            fix = f"see whether {node} is up, its nfs-server runs, and no firewall stands between"
            yield Seen(FAIL, what, fix, f"{address}:2049")


def nfs_export(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: this node exports its bricks

    Why: other nodes cannot mount them, or see them with other rights
    See: https://man7.org/linux/man-pages/man5/exports.5.html
    """
    facts, wanted = s.facts, s.wanted
    if facts.serves is False:
        yield Seen(FAIL, "the NFS server does not run", "systemctl enable --now nfs-server.service", wanted.node)
    elif facts.serves:
        for folder, what in faults(wanted.exports, facts.etab, facts.names):
            yield Seen(FAIL, f"{folder} {what}", "clustertune ops storage apply, or exportfs -ra", wanted.node)
        for folder, client in others(wanted.exports, facts.etab, facts.names):
            text = f"{folder} is also exported to {client}, whom the cluster file does not name"
            yield Seen(WARN, text, f"exportfs -u {client}:{folder}, or name it in the cluster file", wanted.node)


# --- pool --------------------------------------------------------------------------------------------------------------


def _pool(s: StorageSubject) -> MountState | None:
    """The pool, where mergerfs is mounted there."""
    pool = s.facts.pool if s.wanted.pool else None
    return pool if pool and pool.fstype == "fuse.mergerfs" else None


def pool_mounted(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: the pool is mounted

    Why: what is written goes to the disk below, and is hidden later
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    pool = s.facts.pool if s.wanted.pool else None
    if pool and pool.fstype is None:
        fix = f"do not write there; mount {pool.path} once all bricks are mounted"
        yield Seen(FAIL, "nothing is mounted there: it is the bare mount point", fix, pool.path)
    elif pool and pool.fstype != "fuse.mergerfs":
        yield Seen(FAIL, f"{pool.fstype} is mounted there", f"umount {pool.path} && mount {pool.path}", pool.path)


def pool_answers(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: the pool answers

    Why: training waits for it for ever
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    pool = _pool(s)
    if pool is None:
        return
    again = f"umount -l {pool.path} && mount {pool.path}"
    if pool.silent or pool.written == "silent":
        hung = [brick.path for brick in s.facts.bricks.values() if brick.silent or brick.written == "silent"]
        what = f"no answer in {s.facts.seconds:g} s" + (f"; process {pool.left} still waits" if pool.left else "")
        yield Seen(FAIL, what, f"fix {' and '.join(hung)}: it waits for that" if hung else again, pool.path)
    elif pool.errno == "ENOTCONN":
        yield Seen(FAIL, "mergerfs has died (ENOTCONN)", f"{again}; dmesg shows whether memory ran out", pool.path)
    elif pool.errno:
        yield Seen(FAIL, f"answers {pool.errno}", again, pool.path)


def pool_bricks(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: the pool has all bricks

    Why: files on the missing one are not there for anybody
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    pool, attributes = _pool(s), s.facts.xattrs
    if pool is None or s.wanted.pool is None:
        return
    if not attributes:
        yield Seen(UNKNOWN, "mergerfs did not report its settings", where=pool.path)
        return
    again, meant = _anew(pool), s.wanted.pool.source.split(":")
    text = attributes.get("branches") or attributes.get("srcmounts") or ""
    # A branch may have a minfreespace of its own after its mode: /a=RW,4G.
    now = {path: mode.partition(",")[0] or "RW" for path, _, mode in (part.partition("=") for part in text.split(":") if part)}
    if absent := [branch for branch in meant if branch not in now]:
        yield Seen(FAIL, f"it lacks {', '.join(absent)}", again, pool.path)
    if extra := [branch for branch in now if branch not in meant]:
        yield Seen(FAIL, f"it also has {', '.join(extra)}, which the cluster file does not name", again, pool.path)
    if limited := [f"{branch}={mode}" for branch, mode in now.items() if branch in meant and mode != "RW"]:
        yield Seen(FAIL, f"{', '.join(limited)}: no new files", again, pool.path)
    if gone := [brick.path for brick in s.facts.bricks.values() if brick.fstype is None and s.wanted.at(brick.path)]:
        text = f"{', '.join(gone)} is not mounted: its files are not in the pool"
        yield Seen(FAIL, text, f"mount {' '.join(gone)}", pool.path)


def _anew(pool: MountState) -> str:
    return f"umount {pool.path} && mount {pool.path}, when no job uses it; clustertune ops storage apply first"


def pool_options(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: the pool runs with the options meant

    Why: files outgrow a brick, or go where they should not
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    pool, attributes = _pool(s), s.facts.xattrs
    if pool is None or s.wanted.pool is None:
        return
    meant = dict(option.partition("=")[::2] for option in s.wanted.pool.options)
    for key, same in _COMPARED.items():
        value = attributes.get(key) or attributes.get("func.create" if key == "category.create" else key)
        if value is not None and not same(meant[key], value):
            yield Seen(WARN, f"{key} is {value}, it should be {meant[key]}", _anew(pool), pool.path)


def _size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper())
    digits = text[:-1] if unit else text
    return int(digits) * (unit or 1) if digits.isdigit() else -1


_COMPARED: dict[str, Callable[[str, str], bool]] = {
    "category.create": lambda meant, now: now in (meant, ""),
    "minfreespace": lambda meant, now: _size(meant) == _size(now),
    # It is reported as the policy that chooses the brick.
    "moveonenospc": lambda meant, now: (meant == "true") == (now != "false"),
    "cache.files": lambda meant, now: meant == now,
}


def pool_mappable(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: files of the pool can be mapped

    Why: memory maps and SQLite need them: ranks map the tokens of their run
    See: https://manpages.ubuntu.com/manpages/lunar/man1/mergerfs.1.html
    """
    pool = _pool(s)
    if pool and pool.mmap not in ("", "ok"):
        fix = f"cache.files={CACHE_FILES} in fstab, then umount {pool.path} && mount {pool.path}"
        yield Seen(FAIL, f"a shared mapping fails with {pool.mmap}", fix, pool.path)


def pool_writable(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: the pool takes writes

    Why: no checkpoint can be written
    See: https://github.com/trapexit/mergerfs/issues/1218
    """
    pool = _pool(s)
    if pool is None:
        return
    written = pool.written
    if pool.read_only or "ro" in pool.options:
        yield Seen(FAIL, "read-only", f"mount -o remount,rw {pool.path}", pool.path)
    elif written in ("ENOSPC", "EDQUOT"):
        fix = "make room on a brick: each needs more than minfreespace"
        yield Seen(FAIL, "no brick takes a new file (ENOSPC)", fix, pool.path)
    elif written in ("EACCES", "EPERM"):
        fix = "storage.pool.create=epmfs, where only one brick has the folder; else fix the folders' modes"
        yield Seen(FAIL, f"a user may not {pool.write_step} a file ({written})", fix, pool.path)
    elif written in ("forbidden", "not asked") and not (pool.silent or pool.errno):
        reasons = {"forbidden": "this user may not write to the shared folders"}
        yield Seen(UNKNOWN, reasons.get(written, "no write was tried: it could go to the root disk"), where=pool.path)
    elif written not in ("ok", "", "silent", "not asked", "absent"):
        yield Seen(FAIL, f"{pool.write_step} fails with {written}", "fix the brick that says so above", pool.path)


# --- the rest ----------------------------------------------------------------------------------------------------------


def mount_point_immutable(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: nothing can be written below a mount

    Why: an absent brick takes writes on the root disk
    Fix: clustertune ops storage apply
    See: https://man7.org/linux/man-pages/man1/chattr.1.html
    """
    for point in s.facts.points:
        if point.mounted and point.entries:
            text = f"below the mount lie {', '.join(point.entries[:5])}: written to the root disk, hidden now"
            yield Seen(WARN, text, f"unmount {point.path}, move them away, mount again", point.path)
        elif point.kind == "folder" and point.immutable is False and s.facts.root:
            yield Seen(WARN, "root can write there while nothing is mounted", where=point.path)
        elif point.kind == "link":
            fix = f"make it a folder, or write {point.leads} into the cluster file"
            yield Seen(WARN, f"a symbolic link leads to {point.leads}: systemd mounts nothing there", fix, point.path)
        elif point.kind == "absent":
            yield Seen(WARN, "the mount point is absent", where=point.path)
        elif point.kind == "unknown" or point.immutable is None:
            yield Seen(UNKNOWN, "not seen: only root can, where the file system has the flag", where=point.path)


def shared_folders(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: the shared folders are there, with their modes

    Why: users cannot write, or not share
    See: https://man7.org/linux/man-pages/man1/chattr.1.html
    """
    pool, group, mode = s.facts.pool, s.wanted.group, mode_of(s.wanted.group)
    owners = " and ".join(dict.fromkeys(brick.node for brick in s.wanted.bricks))
    if pool and (pool.fstype is None or pool.silent or pool.errno):
        yield Seen(UNKNOWN, "the pool was not seen")
        return
    for path, seen in s.facts.folders.items():
        if seen.get("errno") == "ENOENT":
            yield Seen(FAIL, "does not exist", f"clustertune ops storage apply on {owners}", path)
        elif "errno" in seen:
            yield Seen(UNKNOWN, f"not seen ({seen['errno']})", where=path)
        elif seen["mode"] != mode:
            fix = f"chmod {mode:04o} it on each of {owners}, below {DATA} of the brick"
            yield Seen(WARN, f"mode {seen['mode']:04o}, it should be {mode:04o}", fix, path)
        elif group and seen["group"] != group:
            yield Seen(WARN, f"group {seen['group']}, should be {group}", f"chgrp {group} it on each of {owners}", path)


def storage_clock(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: server and client agree on the time

    Why: munge refuses jobs, make and caches go wrong
    Fix: chronyc tracking on both; systemctl enable --now chrony where it does not run
    See: https://man7.org/linux/man-pages/man5/nfs.5.html
    """
    for seen in _bricks(s, healthy=True):
        skew = seen.state.skew or 0.0
        if not seen.own and abs(skew) >= SKEW_WARN:
            text = f"the clock of {seen.address} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this node's"
            yield Seen(FAIL if abs(skew) >= SKEW_FAIL else WARN, text, where=seen.where)


def files_current(s: StorageSubject) -> Iterator[Seen]:
    """Looks at: fstab and exports are what the cluster file says

    Why: the next boot mounts something else
    Fix: clustertune ops storage plan shows the difference, apply fixes it
    See: https://man7.org/linux/man-pages/man5/systemd.mount.5.html
    """
    yield from (Seen(WARN, text) for text in s.facts.stale)
    yield from (Seen(WARN, text, "write a line for it into /etc/fstab") for text in s.facts.by_hand)
