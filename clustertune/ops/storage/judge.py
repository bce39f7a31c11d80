"""What is wrong with a node's storage, from what was collected; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding, Rule, finding, in_order
from clustertune.config.cluster_schema import Brick
from clustertune.ops.storage import etab
from clustertune.ops.storage.layout import CACHE_FILES, DATA, Layout, mode_of, words
from clustertune.ops.storage.look import Facts, Place
from clustertune.ops.storage.rules import (
    ANSWERS,
    CLOCK,
    CURRENT,
    DATA_RULE,
    EXPORT,
    FOLDERS,
    MOUNTED,
    OPTIONS,
    POINT,
    POOL_ANSWERS,
    POOL_BRICKS,
    POOL_MMAP,
    POOL_MOUNTED,
    POOL_OPTIONS,
    POOL_WRITES,
    ROOT_DISK,
    RULES,
    SERVER,
    SOURCE,
    SPACE,
    WRITABLE,
)

SKEW_WARN, SKEW_FAIL = 2.0, 300.0
"""Seconds: more than a probe may be off; munge's default time to live (munge(7), 5 minutes)."""
INODES = 0.01
"""The share of inodes that must be free."""

Found = Iterator[Finding]


def judge(facts: Facts, wanted: Layout) -> list[Finding]:
    """Every finding, worst first. A rule says ``unknown`` where what it looks at was not seen."""
    found: list[Finding] = []
    for brick, address in zip(wanted.bricks, wanted.addresses, strict=True):
        place = facts.bricks.get(brick.mount)
        if place:
            found += _brick(facts, wanted, brick, address, place)
    found += _disks(facts, wanted)
    found += _servers(facts, wanted)
    if facts.pool and wanted.pool:
        found += _pool(facts, wanted, facts.pool)
    found += _points(facts)
    found += _folders(facts, wanted)
    found += [
        finding(CURRENT, WARN, text, "clustertune ops storage plan shows the difference, apply fixes it")
        for text in facts.stale
    ]
    found += [finding(CURRENT, WARN, text, "write a line for it into /etc/fstab") for text in facts.by_hand]
    said = {item.rule for item in found}
    for rule in RULES:
        if rule.id not in said and _applies(rule, facts, wanted):
            unseen = _unseen(rule, facts, wanted)
            found.append(finding(rule, UNKNOWN, f"not seen: {unseen}") if unseen else finding(rule, PASS, "as it should be"))
    return in_order(found)


def _applies(rule: Rule, facts: Facts, wanted: Layout) -> bool:
    if rule.id.startswith("pool-") or rule is DATA_RULE:
        return wanted.pool is not None
    if rule is EXPORT:
        return facts.serves is not None
    if rule in (SERVER, OPTIONS, CLOCK):
        return any(brick.node != wanted.node for brick in wanted.bricks)
    return not (rule is FOLDERS and not facts.folders)


def _unseen(rule: Rule, facts: Facts, wanted: Layout) -> str:
    """What a rule that found nothing could not look at: a brick that is absent or hangs is not well in all else."""
    if rule in (WRITABLE, SPACE, DATA_RULE, ROOT_DISK, OPTIONS, SOURCE, ANSWERS, CLOCK):
        places = [place for brick, place in ((brick, facts.bricks.get(brick.mount)) for brick in wanted.bricks) if place]
        if rule in (OPTIONS, CLOCK):
            others = {brick.mount for brick in wanted.bricks if brick.node != wanted.node}
            places = [place for place in places if place.path in others]
        written = rule in (WRITABLE, CLOCK)
        return ", ".join(place.path for place in places if not _seen(place, wanted, written=written))
    if rule in (POOL_ANSWERS, POOL_WRITES, POOL_MMAP, POOL_BRICKS, POOL_OPTIONS) and facts.pool:
        pool, wrote = facts.pool, rule in (POOL_WRITES, POOL_MMAP)
        seen = pool.fstype == "fuse.mergerfs" and not (wrote and (pool.silent or pool.errno or pool.written != "ok"))
        return "" if seen and (rule is not POOL_OPTIONS or facts.xattrs) else pool.path
    return "" if rule is not SERVER or facts.servers else "no server was asked"


def _seen(place: Place, wanted: Layout, *, written: bool) -> bool:
    if (place.fstype is None and wanted.at(place.path)) or place.silent or place.errno:
        return False
    return not written or place.written in ("ok", "ENOSPC", "EDQUOT")


# --- bricks ------------------------------------------------------------------------------------------------------------


def _brick(facts: Facts, wanted: Layout, brick: Brick, address: str, place: Place) -> Found:
    where = f"{brick.mount} ({brick.node})"
    own = brick.node == wanted.node
    mount = wanted.at(brick.mount)
    if place.fstype is None and mount is not None:
        fix = f"mount {brick.mount}; journalctl -u '*.mount' says why it did not"
        if not own:
            fix += f"; on {brick.node}: clustertune ops storage check"
        yield finding(MOUNTED, FAIL, "nothing is mounted there", fix, where)
        if place.data and wanted.pool:
            fix = f"unmount the pool, move {brick.mount}/{DATA} away, then clustertune ops storage apply"
            yield finding(
                ROOT_DISK, FAIL, f"{brick.mount}/{DATA} exists below the mount point: the pool writes there", fix, where
            )
        return
    if place.silent or place.written == "silent":
        yield _hung(facts, place, where, own, brick.node)
        return
    if place.errno:
        yield _answered(place, where, own, brick.node)
        return
    if place.root_disk:
        fix = f"mount the brick's file system at {brick.path if own else brick.mount}, then move what was written here"
        yield finding(ROOT_DISK, FAIL, "what is seen there lies on the root disk", fix, where)
    yield from _source(wanted, brick, place, where)
    if place.fstype and place.fstype.startswith("nfs") and (soft := {"soft", "softerr"} & set(place.options)):
        yield finding(OPTIONS, FAIL, f"mounted {soft.pop()}", f"umount {brick.mount} && mount {brick.mount}", where)
    yield from _writes(place, where, own, brick)
    yield from _space(wanted, place, where)
    if wanted.pool and place.data is False:
        fix = f"on {brick.node}: clustertune ops storage apply"
        yield finding(DATA_RULE, FAIL, f"there is no {brick.mount}/{DATA}", fix, where)
    yield from _clock(place, where, address, own)


def _disks(facts: Facts, wanted: Layout) -> Found:
    for path, place in facts.disks.items():
        device = next(mount.source for mount in wanted.mounts if mount.target == path)
        if place.fstype is None:
            fix = f"lsblk -f {device}; mount {path}"
            yield finding(MOUNTED, FAIL, f"{device} is not mounted, and not exported", fix, path)
        elif place.as_meant is False:
            fix = f"see which disk is meant: lsblk -f; then umount {path} && mount {path}, or fix storage.bricks.device"
            yield finding(SOURCE, FAIL, f"{place.source} is mounted, not {device}", fix, path)


def _hung(facts: Facts, place: Place, where: str, own: bool, node: str) -> Finding:
    what = f"no answer in {facts.seconds:g} s" + ("" if place.silent else " to a write, while it can be read")
    if place.left:
        what += f"; process {place.left} still waits for it, unkillable until it answers, and does no harm"
    if own:
        fix = "dmesg for errors of the disk; xfs_freeze -u where somebody froze it"
    else:
        fix = f"see whether {node} is up and serves (systemctl status nfs-server there); all goes on when it answers"
    return finding(ANSWERS, FAIL, what, fix, where)


def _answered(place: Place, where: str, own: bool, node: str) -> Finding:
    if place.errno == "ESTALE":
        fix = f"umount -l {place.path} && mount {place.path}, then the pool likewise"
        what = f"stale file handle: {node} exports another file system than when it was mounted"
        return finding(ANSWERS, FAIL, what, fix, where)
    if place.errno in ("EACCES", "EPERM"):
        return finding(ANSWERS, UNKNOWN, f"this user may not look there ({place.errno})", "", where)
    fix = "dmesg for errors of the disk; then umount, xfs_repair, mount" if own else f"on {node}: clustertune ops storage check"
    return finding(ANSWERS, FAIL, f"answers {place.errno}", fix, where)


def _source(wanted: Layout, brick: Brick, place: Place, where: str) -> Found:
    mount = wanted.at(brick.mount)
    again = f"umount {brick.mount} && mount {brick.mount}"
    if mount and mount.kind == "bind" and place.as_meant is False:
        yield finding(SOURCE, FAIL, f"it shows something else than {brick.path}", again, where)
    if mount and mount.kind == "nfs":
        if place.fstype and not place.fstype.startswith("nfs"):
            yield finding(SOURCE, FAIL, f"{place.fstype} from {place.source}, not NFS from {mount.source}", again, where)
        elif place.fstype and place.source.rstrip("/") != mount.source.rstrip("/"):
            yield finding(SOURCE, FAIL, f"mounted from {place.source}, not {mount.source}", again, where)


def _writes(place: Place, where: str, own: bool, brick: Brick) -> Found:
    at = "here" if own else f"on {brick.node}"
    if place.read_only or "ro" in place.options or place.written == "EROFS":
        fix = f"dmesg {at}: the kernel goes read-only on errors; then mount -o remount,rw {brick.path if own else brick.mount}"
        yield finding(WRITABLE, FAIL, "read-only", fix, where)
    elif place.written in ("EACCES", "EPERM"):
        fix = f"clustertune ops storage apply {at} makes the folders; where they are there, fix their modes"
        yield finding(WRITABLE, FAIL, f"a user may not {place.write_step} a file ({place.written})", fix, where)
    elif place.written not in ("ok", "", "not asked", "forbidden", "absent", "ENOSPC", "EDQUOT"):
        fix = f"dmesg {at}; xfs_repair after umount where the disk is well"
        yield finding(WRITABLE, FAIL, f"{place.write_step} of a file fails with {place.written}", fix, where)
    elif place.written in ("forbidden", "absent", "not asked"):
        said = {"absent": "there is no shared folder on it", "forbidden": "this user may not write there"}
        yield finding(WRITABLE, UNKNOWN, said.get(place.written, "no write was tried"), "", where)


def _space(wanted: Layout, place: Place, where: str) -> Found:
    if place.free is None or place.total is None:
        return
    room = f"{words(place.free)} of {words(place.total)} are free"
    fix = "remove old checkpoints (clustertune keeps what retention says), or add a brick"
    if place.written in ("ENOSPC", "EDQUOT") or place.free == 0:
        yield finding(SPACE, FAIL, f"full: {room}", fix, where)
    elif wanted.minfreespace and place.free < wanted.minfreespace:
        yield finding(
            SPACE, WARN, f"{room}, less than minfreespace ({words(wanted.minfreespace)}): it takes no new file", fix, where
        )
    if place.inodes and place.free_inodes is not None and place.free_inodes < INODES * place.inodes:
        status = FAIL if place.free_inodes == 0 else WARN
        text = f"{place.free_inodes} of {place.inodes} inodes are free"
        yield finding(SPACE, status, text, "remove small files: caches, logs, extracted archives", where)


def _clock(place: Place, where: str, address: str, own: bool) -> Found:
    if own or place.skew is None or abs(place.skew) < SKEW_WARN:
        return
    word = "ahead of" if place.skew > 0 else "behind"
    status = FAIL if abs(place.skew) >= SKEW_FAIL else WARN
    fix = "chronyc tracking on both; systemctl enable --now chrony where it does not run"
    yield finding(CLOCK, status, f"the clock of {address} is {abs(place.skew):.1f} s {word} this node's", fix, where)


# --- servers -----------------------------------------------------------------------------------------------------------


def _servers(facts: Facts, wanted: Layout) -> Found:
    for address, said in facts.servers.items():
        nodes = [brick.node for brick, other in zip(wanted.bricks, wanted.addresses, strict=True) if other == address]
        if said != "ok":
            what = f"no answer in {facts.seconds:g} s" if said in ("silent", "ETIMEDOUT") else f"answers {said}"
            fix = f"see whether {nodes[0]} is up, its nfs-server runs, and no firewall stands between"
            yield finding(SERVER, FAIL, what, fix, f"{address}:2049")
    if facts.serves is False:
        yield finding(EXPORT, FAIL, "the NFS server does not run", "systemctl enable --now nfs-server.service", wanted.node)
    elif facts.serves:
        again = "clustertune ops storage apply, or exportfs -ra"
        for folder, what in etab.faults(wanted.exports, facts.etab, facts.names):
            yield finding(EXPORT, FAIL, f"{folder} {what}", again, wanted.node)
        for folder, client in etab.others(wanted.exports, facts.etab, facts.names):
            fix = f"exportfs -u {client}:{folder}, or name it in the cluster file"
            yield finding(
                EXPORT, WARN, f"{folder} is also exported to {client}, whom the cluster file does not name", fix, wanted.node
            )


# --- pool --------------------------------------------------------------------------------------------------------------


def _pool(facts: Facts, wanted: Layout, place: Place) -> Found:
    path = place.path
    if place.fstype is None:
        fix = f"do not write there; mount {path} once all bricks are mounted"
        yield finding(POOL_MOUNTED, FAIL, "nothing is mounted there: it is the bare mount point", fix, path)
        return
    if place.fstype != "fuse.mergerfs":
        yield finding(POOL_MOUNTED, FAIL, f"{place.fstype} is mounted there", f"umount {path} && mount {path}", path)
        return
    if place.silent or place.written == "silent":
        hung = [brick.path for brick in facts.bricks.values() if brick.silent or brick.written == "silent"]
        fix = f"fix {' and '.join(hung)}: it waits for that" if hung else f"umount -l {path} && mount {path}"
        what = f"no answer in {facts.seconds:g} s" + (f"; process {place.left} still waits" if place.left else "")
        yield finding(POOL_ANSWERS, FAIL, what, fix, path)
    elif place.errno == "ENOTCONN":
        fix = f"umount -l {path} && mount {path}; dmesg shows whether memory ran out"
        yield finding(POOL_ANSWERS, FAIL, "mergerfs has died (ENOTCONN)", fix, path)
    elif place.errno:
        yield finding(POOL_ANSWERS, FAIL, f"answers {place.errno}", f"umount -l {path} && mount {path}", path)
    yield from _settings(facts, wanted, path)
    if place.read_only or "ro" in place.options:
        yield finding(POOL_WRITES, FAIL, "read-only", f"mount -o remount,rw {path}", path)
    elif place.written in ("ENOSPC", "EDQUOT"):
        fix = "make room on a brick: each needs more than minfreespace"
        yield finding(POOL_WRITES, FAIL, "no brick takes a new file (ENOSPC)", fix, path)
    elif place.written in ("EACCES", "EPERM"):
        fix = "storage.pool.create=epmfs, where only one brick has the folder; else fix the folders' modes"
        yield finding(POOL_WRITES, FAIL, f"a user may not {place.write_step} a file ({place.written})", fix, path)
    elif place.written in ("forbidden", "not asked") and not (place.silent or place.errno):
        said = {"forbidden": "this user may not write to the shared folders"}
        yield finding(
            POOL_WRITES, UNKNOWN, said.get(place.written, "no write was tried: it could go to the root disk"), "", path
        )
    elif place.written not in ("ok", "", "silent", "not asked", "absent"):
        yield finding(
            POOL_WRITES, FAIL, f"{place.write_step} fails with {place.written}", "fix the brick that says so above", path
        )
    if place.mmap not in ("", "ok"):
        fix = f"cache.files={CACHE_FILES} in fstab, then umount {path} && mount {path}"
        yield finding(POOL_MMAP, FAIL, f"a shared mapping fails with {place.mmap}", fix, path)


def _settings(facts: Facts, wanted: Layout, path: str) -> Found:
    """What mergerfs says of itself."""
    said = facts.xattrs
    again = f"umount {path} && mount {path}, when no job uses it; clustertune ops storage apply first"
    if not said:
        yield finding(POOL_BRICKS, UNKNOWN, "mergerfs did not tell its settings", "", path)
        return
    assert wanted.pool
    meant = wanted.pool.source.split(":")
    text = said.get("branches") or said.get("srcmounts") or ""
    # A branch may have a minfreespace of its own after its mode: /a=RW,4G.
    now = {path: mode.partition(",")[0] or "RW" for path, _, mode in (part.partition("=") for part in text.split(":") if part)}
    if absent := [branch for branch in meant if branch not in now]:
        yield finding(POOL_BRICKS, FAIL, f"it lacks {', '.join(absent)}", again, path)
    if extra := [branch for branch in now if branch not in meant]:
        yield finding(POOL_BRICKS, FAIL, f"it also has {', '.join(extra)}, which the cluster file does not name", again, path)
    if limited := [f"{branch}={mode}" for branch, mode in now.items() if branch in meant and mode != "RW"]:
        yield finding(POOL_BRICKS, FAIL, f"{', '.join(limited)}: no new files", again, path)
    gone = [brick.path for brick in facts.bricks.values() if brick.fstype is None and wanted.at(brick.path)]
    if gone:
        yield finding(
            POOL_BRICKS,
            FAIL,
            f"{', '.join(gone)} is not mounted: its files are not in the pool",
            f"mount {' '.join(gone)}",
            path,
        )
    options = dict(option.partition("=")[::2] for option in wanted.pool.options)
    for key, same in _COMPARED.items():
        value = said.get(key) or said.get("func.create" if key == "category.create" else key)
        if value is not None and not same(options[key], value):
            status = FAIL if key == "cache.files" and value in ("off", "direct") else WARN
            yield finding(POOL_OPTIONS, status, f"{key} is {value}, {options[key]} is meant", again, path)


def _size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper())
    digits = text[:-1] if unit else text
    return int(digits) * (unit or 1) if digits.isdigit() else -1


_COMPARED: dict[str, Callable[[str, str], bool]] = {
    "category.create": lambda meant, now: now in (meant, ""),
    "minfreespace": lambda meant, now: _size(meant) == _size(now),
    # It is told as the policy that chooses the brick.
    "moveonenospc": lambda meant, now: (meant == "true") == (now != "false"),
    "cache.files": lambda meant, now: meant == now,
}


# --- the rest ----------------------------------------------------------------------------------------------------------


def _points(facts: Facts) -> Found:
    for point in facts.points:
        if point.mounted and point.entries:
            fix = f"unmount {point.path}, move them away, mount again"
            text = f"below the mount lie {', '.join(point.entries[:5])}: written to the root disk, hidden now"
            yield finding(POINT, WARN, text, fix, point.path)
        elif point.kind == "folder" and point.immutable is False and facts.root:
            yield finding(
                POINT, WARN, "root can write there while nothing is mounted", "clustertune ops storage apply", point.path
            )
        elif point.kind == "link":
            fix = f"make it a folder, or write {point.leads} into the cluster file"
            yield finding(POINT, WARN, f"a symbolic link leads to {point.leads}: systemd mounts nothing there", fix, point.path)
        elif point.kind == "absent":
            yield finding(POINT, WARN, "the mount point is absent", "clustertune ops storage apply", point.path)
        elif point.kind == "unknown" or point.immutable is None:
            yield finding(POINT, UNKNOWN, "not seen: only root can, where the file system has the flag", "", point.path)


def _folders(facts: Facts, wanted: Layout) -> Found:
    mode = mode_of(wanted.group)
    owners = " and ".join(dict.fromkeys(brick.node for brick in wanted.bricks))
    if facts.pool and (facts.pool.fstype is None or facts.pool.silent or facts.pool.errno):
        yield finding(FOLDERS, UNKNOWN, "the pool was not seen")
        return
    for path, seen in facts.folders.items():
        if seen.get("errno") == "ENOENT":
            yield finding(FOLDERS, FAIL, "does not exist", f"clustertune ops storage apply on {owners}", path)
        elif "errno" in seen:
            yield finding(FOLDERS, UNKNOWN, f"not seen ({seen['errno']})", "", path)
        elif seen["mode"] != mode:
            fix = f"chmod {mode:04o} it on each of {owners}, below {DATA} of the brick"
            yield finding(FOLDERS, WARN, f"mode {seen['mode']:04o}, {mode:04o} is meant", fix, path)
        elif wanted.group and seen["group"] != wanted.group:
            fix = f"chgrp {wanted.group} it on each of {owners}"
            yield finding(FOLDERS, WARN, f"group {seen['group']}, {wanted.group} is meant", fix, path)
