"""The judge of a node's storage on recorded facts: each fault is found, by its rule, and nothing is found where all is well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from clustertune.check.rule import FAIL, PASS, STORAGE, UNKNOWN, WARN, checks, exit_code
from clustertune.cluster.load import load_cluster
from clustertune.ops.storage import judge
from clustertune.ops.storage.layout import StorageLayout, layout
from clustertune.ops.storage.node import Facts, MountPoint, MountState
from tests import tree

TIB = 1 << 40
RULES = [one.rule for one in checks(STORAGE)]
ETAB = (
    "/data/shared\t10.21.133.0/24(rw,sync,wdelay,hide,nocrossmnt,secure,root_squash,no_all_squash,no_subtree_check,"
    "mountpoint,sec=sys)\n"
)
XATTRS = {
    "version": "2.33.5", "branches": "/shared/data=RW:/shared-b/data=RW", "srcmounts": "/shared/data:/shared-b/data",
    "cache.files": "auto-full", "minfreespace": "103079215104", "moveonenospc": "mfs", "category.create": "mfs",
}  # fmt: skip


def mount_state(path: str, **more: Any) -> MountState:
    found = MountState(
        path, "xfs", "/dev/mapper/vg_nvme-lv_scratch", options=["rw", "nosuid", "nodev"], root_disk=False, data=True
    )
    found.read_only, found.total, found.free = False, 13 * TIB, 5 * TIB
    found.inodes, found.free_inodes, found.written, found.mmap, found.skew = 10**9, 9 * 10**8, "ok", "ok", 0.0
    return replace(found, **more)


def wanted() -> StorageLayout:
    return layout(load_cluster("rno-rtxpro6000"), "rno-it-gpu0007-1")


def healthy() -> Facts:
    """The first NFS server of the reference cluster, as root sees it."""
    of = wanted()
    return Facts(
        node=of.node,
        root=True,
        seconds=5.0,
        bricks={
            "/shared": mount_state("/shared"),
            "/shared-b": mount_state(
                "/shared-b", fstype="nfs4", source="10.21.133.39:/data", options=["rw", "hard", "vers=4.2"]
            ),
        },
        disks={"/data/shared": mount_state("/data/shared", as_meant=True)},
        pool=mount_state("/pool", fstype="fuse.mergerfs", source="pool"),
        xattrs=dict(XATTRS),
        servers={"10.21.133.39": "ok"},
        points=[MountPoint(mount.target, "folder", (), True, mounted=True) for mount in of.mounts],
        folders={f"/pool/{name}": {"mode": 0o1777, "group": "root"} for name in of.names},
        serves=True,
        etab=ETAB,
    )


def test_nothing_is_found_where_all_is_well() -> None:
    """Every rule passes by name: a check that ends with 0 has looked."""
    found = judge.judge(healthy(), wanted())
    assert {item.status for item in found} == {PASS}
    assert {item.rule for item in found} == {rule.id for rule in RULES}
    assert exit_code(found) == 0


B, S = "/shared-b", "/shared"


def change(where: str, key: str | None = None, **more: Any) -> Callable[[Facts], None]:
    """A fault: other values of one place's state, or of the facts themselves."""

    def break_it(facts: Facts) -> None:
        states = getattr(facts, where)
        if key is None:
            setattr(facts, where, replace(states, **more))
        else:
            states[key] = replace(states[key], **more)

    return break_it


brick, disk, pool = partial(change, "bricks"), partial(change, "disks", "/data/shared"), partial(change, "pool")


def xattr(name: str, value: str) -> Callable[[Facts], None]:
    return lambda facts: facts.xattrs.update({name: value})


def put(**more: Any) -> Callable[[Facts], None]:
    return lambda facts: vars(facts).update(more)


def point(*of: Any, **more: Any) -> Callable[[Facts], None]:
    return lambda facts: facts.points.append(MountPoint("/x", *of, **more))


FAULTS: list[tuple[Callable[[Facts], Any], str, str, str]] = [
    (brick(B, fstype=None, data=False), "brick-mounted", FAIL, "nothing is mounted"),
    (brick(B, fstype=None, data=False), "pool-bricks", FAIL, "/shared-b is not mounted"),
    (brick(B, fstype=None, data=True), "brick-not-on-root-disk", FAIL, "the pool writes there"),
    (brick(B, silent=True, left=77), "brick-answers", FAIL, "process 77"),
    (brick(B, written="silent"), "brick-answers", FAIL, "to a write"),
    (brick(B, errno="ESTALE"), "brick-answers", FAIL, "stale file handle"),
    (brick(B, errno="EACCES"), "brick-answers", UNKNOWN, "EACCES"),
    (brick(S, errno="EIO"), "brick-answers", FAIL, "EIO"),
    (brick(S, root_disk=True), "brick-not-on-root-disk", FAIL, "root disk"),
    (brick(B, read_only=True), "brick-writable", FAIL, "read-only"),
    (brick(B, written="EROFS", write_step="create"), "brick-writable", FAIL, "read-only"),
    (brick(B, written="EACCES", write_step="create"), "brick-writable", FAIL, "may not create"),
    (brick(B, written="EIO", write_step="fsync"), "brick-writable", FAIL, "fsync of a file fails with EIO"),
    (brick(B, written="forbidden"), "brick-writable", UNKNOWN, "this user"),
    (brick(B, free=90 << 30), "brick-space", WARN, "less than minfreespace (96 GiB)"),
    (brick(B, free=0), "brick-space", FAIL, "full"),
    (brick(B, written="ENOSPC", write_step="write"), "brick-space", FAIL, "full"),
    (brick(B, free_inodes=10**6), "brick-space", WARN, "inodes"),
    (brick(B, free_inodes=0), "brick-space", FAIL, "0 of 1000000000 inodes"),
    (brick(B, data=False), "brick-data", FAIL, "no /shared-b/data"),
    (brick(B, source="10.21.133.31:/data"), "brick-source", FAIL, "not 10.21.133.39:/data"),
    (brick(B, fstype="xfs"), "brick-source", FAIL, "not NFS"),
    (disk(as_meant=False), "brick-source", FAIL, "is mounted, not /dev"),
    (disk(fstype=None), "brick-mounted", FAIL, "not exported"),
    (brick(B, options=["rw", "soft"]), "brick-options", FAIL, "soft"),
    (brick(B, options=["rw", "softerr"]), "brick-options", FAIL, "softerr"),
    (brick(B, options=["rw", "hard", "nolock"]), "brick-options", WARN, "nolock"),
    (brick(S, as_meant=False), "brick-source", FAIL, "it shows something else than /data/shared"),
    (brick(B, silent=True), "brick-space", UNKNOWN, "not seen: /shared-b"),
    (brick(B, written="silent"), "brick-writable", UNKNOWN, "not seen: /shared-b"),
    (brick(B, errno="ESTALE"), "storage-clock", UNKNOWN, "not seen: /shared-b"),
    (brick(S, fstype=None), "brick-writable", UNKNOWN, "not seen: /shared"),
    (put(servers={}), "nfs-server-answers", UNKNOWN, "no server was asked"),
    (pool(fstype=None), "pool-options", UNKNOWN, "not seen: /pool"),
    (pool(silent=True), "pool-mappable", UNKNOWN, "not seen: /pool"),
    (brick(B, skew=-3.5), "storage-clock", WARN, "3.5 s behind"),
    (brick(B, skew=400.0), "storage-clock", FAIL, "ahead of"),
    (put(servers={"10.21.133.39": "silent"}), "nfs-server-answers", FAIL, "no answer in 5 s"),
    (put(servers={"10.21.133.39": "ECONNREFUSED"}), "nfs-server-answers", FAIL, "ECONNREFUSED"),
    (put(serves=False), "nfs-export", FAIL, "does not run"),
    (put(etab=""), "nfs-export", FAIL, "not exported to 10.21.133.0/24"),
    (put(etab=ETAB.replace("root_squash", "no_root_squash")), "nfs-export", FAIL, "without root_squash"),
    (put(etab=ETAB + "/data/shared\t*(rw,no_root_squash)\n"), "nfs-export", WARN, "also exported to *"),
    (pool(fstype=None), "pool-mounted", FAIL, "bare mount point"),
    (pool(fstype="ext4"), "pool-mounted", FAIL, "ext4"),
    (pool(silent=True), "pool-answers", FAIL, "no answer in 5 s"),
    (pool(errno="ENOTCONN"), "pool-answers", FAIL, "died"),
    (pool(errno="EIO"), "pool-answers", FAIL, "EIO"),
    (pool(written="ENOSPC", write_step="create"), "pool-writable", FAIL, "no brick takes"),
    (pool(written="EACCES", write_step="create"), "pool-writable", FAIL, "may not create"),
    (pool(written="EIO", write_step="read"), "pool-writable", FAIL, "read fails with EIO"),
    (pool(written="forbidden"), "pool-writable", UNKNOWN, "this user"),
    (pool(read_only=True), "pool-writable", FAIL, "read-only"),
    (pool(mmap="ENODEV"), "pool-mappable", FAIL, "ENODEV"),
    (xattr("branches", "/shared/data=RW"), "pool-bricks", FAIL, "lacks /shared-b/data"),
    (xattr("branches", "/shared/data=RW:/shared-b/data=NC"), "pool-bricks", FAIL, "=NC"),
    (xattr("branches", "/shared/data=RW:/shared-b/data=RO,4G"), "pool-bricks", FAIL, "=RO"),
    (xattr("branches", "/shared/data=RW:/shared-b/data=RW:/x=RW"), "pool-bricks", FAIL, "also has /x"),
    (put(xattrs={}), "pool-bricks", UNKNOWN, "did not report"),
    (xattr("cache.files", "off"), "pool-options", WARN, "cache.files is off"),
    (xattr("cache.files", "partial"), "pool-options", WARN, "cache.files is partial"),
    (xattr("minfreespace", "4G"), "pool-options", WARN, "minfreespace is 4G"),
    (xattr("moveonenospc", "false"), "pool-options", WARN, "moveonenospc is false"),
    (xattr("category.create", "ff"), "pool-options", WARN, "category.create is ff"),
    (point("folder", (), False), "mount-point-immutable", WARN, "root can write"),
    (point("folder", ("a",), True, True), "mount-point-immutable", WARN, "hidden now"),
    (point("absent"), "mount-point-immutable", WARN, "absent"),
    (point("link", leads="/y"), "mount-point-immutable", WARN, "leads to /y"),
    (point("unknown"), "mount-point-immutable", UNKNOWN, "only root"),
    (put(folders={"/pool/logs": {"mode": 0o755, "group": "root"}}), "shared-folders", WARN, "mode 0755"),
    (put(folders={"/pool/logs": {"errno": "ENOENT"}}), "shared-folders", FAIL, "does not exist"),
    (put(stale=["/etc/fstab is not what"]), "files-current", WARN, "/etc/fstab"),
    (put(by_hand=["/dev/sdb is mounted"]), "files-current", WARN, "/dev/sdb"),
]


@pytest.mark.parametrize(("break_it", "rule", "status", "words"), FAULTS)
def test_each_fault_is_found(break_it: Callable[[Facts], Any], rule: str, status: str, words: str) -> None:
    """By its rule, with what was seen, and with what to do where something is to be done."""
    facts = healthy()
    break_it(facts)
    found = [item for item in judge.judge(facts, wanted()) if item.rule == rule]
    assert [item.status for item in found if words in item.found] == [status], found
    assert all(item.fix for item in found if item.status in (WARN, FAIL))


def test_every_rule_has_a_fault_here() -> None:
    """A rule without one may be a rule that never speaks."""
    assert {rule for _, rule, _, _ in FAULTS} == {rule.id for rule in RULES}
    assert not [rule.id for rule in RULES if f"`{rule.id}`" not in tree.texts()["docs/storage.md"]]


@pytest.mark.parametrize(
    ("name", "value"),
    # A branch with a minfreespace of its own takes files; 2.33 says bytes, 2.40 units.
    [("branches", "/shared/data=RW,4G:/shared-b/data=RW"), ("minfreespace", "96G"), ("minfreespace", "98304M")],
)
def test_mergerfs_tells_the_same_in_several_ways(name: str, value: str) -> None:
    facts = healthy()
    facts.xattrs[name] = value
    assert {item.status for item in judge.judge(facts, wanted())} == {PASS}


def test_a_hung_pool_names_the_brick_and_a_group_is_asked_for() -> None:
    """The pool waits for the brick: the remedy is there, not in mounting the pool again. 2775 without the group is useless."""
    facts = healthy()
    facts.folders = {path: {"mode": 0o2775, "group": "root"} for path in facts.folders}
    found = [item.found for item in judge.judge(facts, replace(wanted(), group="train")) if item.rule == "shared-folders"]
    assert len(found) == len(facts.folders) and all("should be train" in text for text in found)
    brick(B, silent=True)(facts)
    pool(silent=True)(facts)
    assert ["/shared-b" in item.fix for item in judge.judge(facts, wanted()) if item.rule == "pool-answers"] == [True]
