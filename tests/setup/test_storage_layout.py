"""What the cluster file means for one node: lines of fstab and exports, folders, and the figures in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.host.system import GIB
from clustertune.setup.rendered import complaints
from clustertune.setup.storage_layout import FstabMount, StorageLayout, layout

RNO = ("rno-it-gpu0006-1", "rno-it-gpu0007-1", "rno-it-gpu0008-1")


def lines(of: StorageLayout) -> list[str]:
    return [mount.line for mount in of.mounts]


def at(of: StorageLayout, target: str) -> FstabMount | None:
    return next((mount for mount in of.mounts if mount.target == target), None)


def options(line: str) -> list[str]:
    return line.split()[3].split(",")


NETWORK = {"kind": "ethernet", "gbit": 1, "interface": "eth0"}
CPU = {"gpus": 0, "cores": 2, "threads": 2, "memory_gb": 4}
TWO = [
    {"node": "one", "path": "/data/x", "mount": "/a", "filesystem": "xfs", "tb": 10, "device": "/dev/sdb"},
    {"node": "two", "path": "/data/y", "mount": "/b", "filesystem": "xfs", "tb": 10, "device": "/dev/sdc"},
]
THREE = {"one": "10.9.0.2", "two": "10.9.0.3", "three": "10.9.0.4"}


def made(tmp_path: Path, **changes: Any) -> StorageLayout:
    """The layout of the machine "two" of a cluster in which each of two has a brick; None removes a key of ``storage``."""
    addresses, bricks = changes.pop("addresses", THREE), changes.get("bricks", TWO)
    network, compute = changes.pop("network", {**NETWORK, "subnet": "10.9.0.0/24"}), changes.pop("compute", CPU)
    storage = {"bricks": TWO, "pool": {"mount": "/pool"}, "shared": "/pool", **changes}
    nodes = [
        {"name": name, "address": address, "roles": ["compute", *{"nfs" for brick in bricks if brick["node"] == name}]}
        for name, address in addresses.items()
    ]
    storage = {key: value for key, value in storage.items() if value is not None}
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"name": "test", "nodes": nodes, "compute": compute, "network": network, "storage": storage}))
    return layout(load_cluster(str(path)), "two")


def test_the_reference_cluster() -> None:
    """The lines that the described cluster runs with, on its three machines."""
    cluster = load_cluster("rno-rtxpro6000")
    login, first, second = (layout(cluster, name) for name in RNO)
    assert [mount.kind for mount in login.mounts] == ["nfs", "nfs", "pool"]
    assert [mount.kind for mount in first.mounts] == ["device", "bind", "nfs", "pool"]
    assert [mount.kind for mount in second.mounts] == ["bind", "nfs", "pool"]  # its device is not named
    assert first.exports == ("/data/shared 10.21.133.0/24(rw,sync,root_squash,no_subtree_check,sec=sys,mountpoint)",)
    assert second.exports == ("/data 10.21.133.0/24(rw,sync,root_squash,no_subtree_check,sec=sys)",)
    assert login.exports == ()
    for layout_found in (login, first, second):
        pool = layout_found.mounts[-1]
        assert (pool.kind, pool.source) == ("pool", "/shared/data:/shared-b/data")
        assert {
            "category.create=mfs", "moveonenospc=true", "cache.files=auto-full", "minfreespace=96G", "_netdev", "nofail",
            "x-systemd.requires=/shared", "x-systemd.requires=/shared-b", "nosuid", "nodev",
        } <= set(pool.options)  # fmt: skip
    remote = at(login, "/shared")
    assert remote is not None
    assert remote.source == "10.21.133.35:/data/shared"
    assert {"hard", "nosuid", "nodev", "_netdev", "nfsvers=4"} <= set(remote.options)
    assert "noexec" not in remote.options  # conda environments lie there
    assert [folder.path.removeprefix("/data/shared/data") for folder in first.folders] == [
        "", "/hf_cache", "/models", "/checkpoints", "/logs", "/images",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("filesystem", "fstype", "extra", "export"),
    [
        ("xfs", "xfs", None, "sec=sys,mountpoint)"),
        ("ext4", "ext4", "errors=remount-ro", "sec=sys,mountpoint)"),
        ("btrfs", "btrfs", None, "sec=sys,mountpoint,fsid="),
        ("zfs", None, None, "sec=sys,fsid="),
    ],
)
def test_each_file_system(tmp_path: Path, filesystem: str, fstype: str | None, extra: str | None, export: str) -> None:
    """ZFS mounts itself; file handles of ZFS and btrfs need a name that stays; ext4 must not write on after an error."""
    brick = {"node": "two", "path": "/y", "mount": "/b", "filesystem": filesystem, "tb": 1, "device": "/dev/sdc"}
    found = made(tmp_path, bricks=[brick])
    device = at(found, "/y")
    assert (device.fstype if device else None) == fstype
    assert extra is None or (device and extra in device.options)
    assert export in found.exports[0]
    assert made(tmp_path, bricks=[brick]).exports == found.exports  # the fsid stays


@pytest.mark.parametrize(
    ("changes", "free", "note"),
    [
        ({}, 5 * GIB, "largest shard"),
        ({"compute": {**CPU, "gpus": 8, "gpu": "h100-sxm", "interconnect": "nvlink4", "memory_gb": 900}}, 80 * GIB, "h100-sxm"),
        ({"pool": {"mount": "/pool", "min_free_gb": 200}}, 187 * GIB, None),
        ({"pool": {"mount": "/pool", "min_free_gb": 1}}, 954 << 20, "falls short of 5 GiB"),
        ({"pool": None, "shared": "/a"}, 0, None),
        # Of a brick of 10 GB, 5 GiB would be half.
        ({"bricks": [{**TWO[1], "tb": 0.01}]}, 477 << 20, "5 % of the smallest brick"),
    ],
)
def test_a_brick_keeps_free_more_than_the_largest_file(
    tmp_path: Path, changes: dict[str, Any], free: int, note: str | None
) -> None:
    """moveonenospc moves a whole file: where no other brick holds it, the write fails after all."""
    found = made(tmp_path, **changes)
    notes = [text for text in found.notes if "minfreespace" in text]
    assert (note is None and not notes) or (note and note in notes[0])
    sizes = [o.partition("=")[2] for mount in found.mounts for o in mount.options if o.startswith("minfreespace=")]
    assert [int(size[:-1]) * {"G": GIB, "M": 1 << 20}[size[-1]] for size in sizes] == [free] * bool(free)


# --- what systemd says -------------------------------------------------------------------------------------------------


def complaints_of(text: str, of: StorageLayout, old: str = "") -> list[str]:
    found = complaints(old.encode(), text.encode(), of.mounts)
    if found is None:
        pytest.skip("needs systemd-fstab-generator and systemd-analyze")
    return found


@pytest.mark.parametrize("name", RNO)
def test_systemd_boots_with_the_lines(name: str) -> None:
    """Its own generator and verifier: every required mount is there, and nothing is ordered in a circle.

    An old fstab with a fault of its own must not keep ours from being written.
    """
    found = layout(load_cluster("rno-rtxpro6000"), name)
    text, old = "\n".join(lines(found)) + "\n", "/dev/sda1 /x xfs x-systemd.requires=/absent 0 0\n"
    assert complaints_of(text, found) == [] == complaints_of(old + text, found, old)
    assert complaints_of(old + text, found) != []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nofail,_netdev,x-systemd.requires=/shared,", "x-systemd.requires=/shared,", "ordering cycle"),
        ("x-systemd.requires=/shared-b", "x-systemd.requires=/shared-c", "not found"),
        (" /pool fuse", " /shared fuse", "Duplicate"),
    ],
)
def test_systemd_finds_what_would_not_boot(old: str, new: str, words: str) -> None:
    """Each mutation of the lines is seen: what finds nothing above does look."""
    found = layout(load_cluster("rno-rtxpro6000"), RNO[0])
    text = "\n".join(lines(found)) + "\n"
    assert old in text
    assert any(words in line for line in complaints_of(text.replace(old, new), found))
