"""A real node: loop disks with XFS, mergerfs from the generated line, and the faults that bricks have, under load too."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ops.node import Node, checked, node, two_bricks

WRITER = """
import hashlib, json, os, sys, time
folder, log, stop = sys.argv[1:]
with open(log, "w") as said:
    for n in range(100_000):
        if os.path.exists(stop):
            break
        data = os.urandom(1 << 20)
        path = f"{folder}/f{n}"
        try:
            with open(path, "wb") as out:
                out.write(data)
                os.fsync(out.fileno())
            said.write(json.dumps({"path": path, "sum": hashlib.sha256(data).hexdigest()}) + "\\n")
        except OSError as error:
            said.write(json.dumps({"path": path, "errno": error.errno}) + "\\n")
        said.flush()
        time.sleep(0.02)
"""
"""Writes files through the pool, and tells of each whether the system said that it is safe."""


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Node, Path]]:
    """A node with its storage set up. Each test gives it back as it was."""
    with node("bindfs") as made:
        cluster = two_bricks(made)
        done = made.command("apply", "--cluster", cluster)
        assert done.code == 0, done.err
        yield made, cluster


FORGET = "umount {b}/pool; mount {b}/pool"
"""The kernel remembers what FUSE told of a file for a second, which is longer than this takes."""

FAULTS = {
    "the disk below is not mounted": ("umount -l {b}/d1", "mount {b}/d1", {"brick-mounted": "fail"}),
    "a brick is read-only": ("mount -o remount,ro {b}/d1", "mount -o remount,rw {b}/d1", {"brick-writable": "fail"}),
    "a brick is full": (
        "dd if=/dev/zero of={b}/d1/data/big bs=1M oflag=direct status=none || true; "
        "dd if=/dev/zero of={b}/d1/data/big2 bs=4k status=none || true", "rm {b}/d1/data/big*",
        {"brick-space": "fail"},
    ),
    "both are below minfreespace": (
        "for d in d0 d1; do fallocate -l $(($(df -B1 --output=avail {b}/$d | tail -1) - 20000000)) {b}/$d/data/big; done",
        "rm {b}/d?/data/big", {"brick-space": "warn", "pool-writable": "fail"},
    ),
    "a brick is frozen": ("fsfreeze -f {b}/d1", "fsfreeze -u {b}/d1", {"brick-answers": "fail", "pool-answers": "fail"}),
    "a brick is gone in the kernel": (
        "xfs_io -x -c shutdown {b}/d1", "umount -l {b}/b1; umount -l {b}/d1; mount {b}/d1; mount {b}/b1",
        {"brick-answers": "fail", "pool-writable": "?"},
    ),
    "a brick's folder is closed to users": (
        "chmod 700 {b}/d1", "chmod 755 {b}/d1", {"brick-writable": "fail", "pool-writable": "?"},
    ),
    "a brick shows another folder": (
        "umount {b}/pool; umount {b}/b1; mount --bind {b}/d0 {b}/b1; mount {b}/pool",
        "umount {b}/pool; umount {b}/b1; mount {b}/b1; mount {b}/pool", {"brick-source": "fail"},
    ),
    "the pool is stopped": (
        f"{FORGET}; kill -STOP $(pidof mergerfs)", "kill -CONT $(pidof mergerfs)", {"pool-answers": "fail"},
    ),
    "the pool is not mounted": ("umount {b}/pool", "mount {b}/pool", {"pool-mounted": "fail"}),
    "the pool has one brick and cannot be mapped": (
        "umount {b}/pool; mergerfs -o allow_other,cache.files=off,category.create=mfs,moveonenospc=true,minfreespace=39M "
        "-o fsname=pool {b}/b0/data {b}/pool", "umount {b}/pool; mount {b}/pool",
        {"pool-bricks": "fail", "pool-mappable": "fail", "pool-options": "warn"},
    ),
    "mergerfs has died": ("kill -9 $(pidof mergerfs)", "umount -l {b}/pool; mount {b}/pool", {"pool-answers": "fail"}),
    "the absent brick's folder exists below": (
        "umount -l {b}/b1; chattr -i {b}/b1; mkdir {b}/b1/data", "rmdir {b}/b1/data; chattr +i {b}/b1; mount {b}/b1",
        {"brick-mounted": "fail", "brick-not-on-root-disk": "fail", "pool-bricks": "fail", "mount-point-immutable": "warn"},
    ),
    "users may not write": (
        f"chmod 755 {{b}}/d?/data/logs; {FORGET}", f"chmod 1777 {{b}}/d?/data/logs; {FORGET}",
        {"brick-writable": "fail", "pool-writable": "fail", "shared-folders": "warn"},
    ),
    "a folder is missing, a mount point can be written to, fstab was edited": (
        "sed -i s/nosuid,// /etc/fstab; umount {b}/pool; chattr -i {b}/pool; rmdir {b}/d?/data/models; mount {b}/pool",
        "cp {b}/own/fstab /etc/fstab; umount {b}/pool; chattr +i {b}/pool; "
        "mkdir -m 1777 {b}/d0/data/models {b}/d1/data/models; mount {b}/pool",
        {"shared-folders": "fail", "mount-point-immutable": "warn", "files-current": "warn"},
    ),
    "a brick has no data": (
        f"mv {{b}}/d1/data {{b}}/d1/x; {FORGET}", f"mv {{b}}/d1/x {{b}}/d1/data; {FORGET}",
        {"brick-data": "fail"},
    ),
}  # fmt: skip


UNSEEN = {
    "a brick is frozen", "a brick is gone in the kernel", "the pool is not mounted", "mergerfs has died",
    "the absent brick's folder exists below", "a brick has no data", "the pool is stopped", "users may not write",
    "both are below minfreespace",
}  # fmt: skip
"""Where rules cannot look: they say so."""


@pytest.mark.parametrize("name", FAULTS)
def test_check_finds_what_is_wrong(shared: tuple[Node, Path], name: str) -> None:
    """Each fault by its rules and no other, in bounded time; what is not seen is not called well."""
    made, cluster = shared
    base = made.base
    made.shell(f"cp /etc/fstab {base}/own/fstab")
    do, undo, expected = FAULTS[name]
    made.shell(do.format(b=base))
    try:
        code, found = checked(made, cluster)
    finally:
        made.shell(undo.format(b=base))
    optional = {rule for rule, status in expected.items() if status == "?"}
    sure = {rule: status for rule, status in found.items() if rule not in optional and status != "unknown"}
    assert sure == {rule: status for rule, status in expected.items() if rule not in optional}
    unknown = {rule for rule, status in found.items() if status == "unknown"}
    assert bool(unknown) == (name in UNSEEN), unknown
    assert code == (2 if "fail" in found.values() else 1 if "warn" in found.values() else 0)


@pytest.mark.parametrize(("hung", "other"), [("1", "0"), ("0", "1")])
def test_a_brick_that_hangs_is_found_and_hangs_nobody(shared: tuple[Node, Path], hung: str, other: str) -> None:
    """Even its folder is not answered: what asks is left behind, and check ends, whichever brick mergerfs asks first."""
    made, cluster = shared
    base = made.base
    made.shell(f"umount {base}/pool; umount {base}/b{hung}; bindfs {base}/d{hung} {base}/b{hung}; mount {base}/pool")
    pid = made.shell("pidof bindfs").strip()
    made.shell(f"head -c 1M /dev/zero > {base}/b{other}/data/here; {FORGET.format(b=base)}; kill -STOP {pid}")
    try:
        code, found = checked(made, cluster, 1)
        assert made.run("cat", f"{base}/b{other}/data/here").code == 0
        assert made.command("plan", "--cluster", cluster).code == 0
    finally:
        made.shell(f"kill -CONT {pid}")
    assert code == 2
    assert (found["brick-answers"], found["pool-answers"], found["brick-space"]) == ("fail", "fail", "unknown")
    # What still waited needs a moment to end.
    made.shell(f"rm {base}/b{other}/data/here; until umount {base}/pool; do sleep 0.1; done")
    made.shell(f"until umount {base}/b{hung}; do sleep 0.1; done; mount {base}/b{hung}; mount {base}/pool")
    assert checked(made, cluster) == (0, {})


def test_what_hung_looks_left_is_removed(shared: tuple[Node, Path]) -> None:
    """A look that was killed while the brick was frozen makes its file once that answers: the next look takes it away."""
    made, cluster = shared
    base = made.base
    made.shell(f"touch {base}/d1/data/logs/.clustertune-check.elsewhere.99")
    made.shell(f"fsfreeze -f {base}/d1")
    code, _ = checked(made, cluster, 1)
    made.shell(f"fsfreeze -u {base}/d1; touch {base}/d1/data/logs/.clustertune-check.$(hostname).999999")
    made.shell(f"chown nobody {base}/d1/data/logs/.clustertune-check.*")
    assert code == 2
    assert checked(made, cluster) == (0, {})
    left = made.shell(f"find {base}/d0 {base}/d1 -name '.clustertune-check*'").split()
    assert left == [f"{base}/d1/data/logs/.clustertune-check.elsewhere.99"]
    made.shell(f"rm {left[0]}")


def test_apply_does_not_wait_for_a_frozen_brick(shared: tuple[Node, Path]) -> None:
    """It holds a lock: whoever comes next would be told to wait for it, for ever."""
    made, cluster = shared
    base = made.base
    made.shell(f"rmdir {base}/d1/data/models; fsfreeze -f {base}/d1")
    code = """
import sys
from clustertune.ops.storage import plan
plan.FOLDER_SECONDS = 1
from clustertune.cli.app import main
sys.exit(main())
"""
    try:
        done = made.python(code, "ops", "storage", "apply", "--cluster", cluster)
    finally:
        made.shell(f"fsfreeze -u {base}/d1")
    assert done.code == 1
    assert f"left: {base}/d1/data/models: no answer in 1 s" in done.err
    made.command("apply", "--cluster", cluster)
    assert checked(made, cluster) == (0, {})
    assert made.shell(f"stat -c %a {base}/d1/data/models; ls -A {base}/d1/data").split()[0] == "1777"


def test_an_ordinary_user_may_look(shared: tuple[Node, Path]) -> None:
    """What only root sees is unknown, and no error."""
    made, cluster = shared
    for command, expected in (("check", 0), ("plan", 0), ("apply", 2)):
        done = made.command(command, "--cluster", cluster, "--json", user=65534)
        assert done.code == expected, done.err
        if command == "check":
            statuses = {item["rule"]: item["status"] for item in done.json["findings"]}
            assert (statuses["mount-point-immutable"], statuses["pool-writable"]) == ("unknown", "pass")
        assert ("needs root" in done.err) == (command == "apply")


def test_nothing_can_be_written_where_nothing_is_mounted(shared: tuple[Node, Path]) -> None:
    """Root is refused too: that is what keeps the root disk from filling."""
    made, cluster = shared
    base = made.base
    made.shell(f"umount {base}/pool; umount {base}/b1")
    for folder in ("pool", "b1"):
        assert made.run("touch", f"{base}/{folder}/x").code != 0
    made.shell(f"mount {base}/b1; mount {base}/pool")
    assert checked(made, cluster) == (0, {})


LOADS = {
    "removed": ("umount -l {b}/b1", "mount {b}/b1"),
    "frozen": ("fsfreeze -f {b}/d1; sleep 1; fsfreeze -u {b}/d1", ""),
    "filled": ("dd if=/dev/zero of={b}/d1/data/big bs=1M status=none || true", "rm {b}/d1/data/big"),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_brick_fails_while_files_are_written(shared: tuple[Node, Path], name: str) -> None:
    """What the system called safe is there afterwards with the same bytes, and the root disk has taken nothing."""
    made, cluster = shared
    base = made.base
    log, stop = base / "own/log", base / "own/stop"
    made.shell(f"rm -f {stop} {log}; mkdir {base}/pool/checkpoints/{name}")
    writer = made.start(sys.executable, "-c", WRITER, f"{base}/pool/checkpoints/{name}", log, stop)

    def count() -> int:
        return int(made.shell(f"grep -c sum {log} || true").strip() or 0)

    def wait_for(more: int) -> None:
        goal, deadline = count() + more, time.monotonic() + 60
        while count() < goal and time.monotonic() < deadline:
            time.sleep(0.1)
        assert count() >= goal

    do, undo = LOADS[name]
    try:
        wait_for(5)
        made.shell(do.format(b=base))
        code, _ = checked(made, cluster)
        assert (code == 0) == (name == "frozen")
        wait_for(3)  # files go to the other brick
        hidden = made.python(LOOK, base)
    finally:
        made.shell(f"touch {stop}")
        made.shell(undo.format(b=base))
        writer.communicate(timeout=60)
    entries = [json.loads(line) for line in made.shell(f"cat {log}").splitlines()]
    safe = [item for item in entries if "sum" in item]
    assert len(safe) >= 8
    for item in safe:
        data = made.run("sha256sum", item["path"])
        assert data.out.split()[:1] == [item["sum"]], data.err
    assert json.loads(hidden.out) == {}, "something was written below a mount point"
    assert checked(made, cluster) == (0, {})
    made.shell(f"rm -r {base}/d?/data/checkpoints/{name}")


LOOK = """
import json, sys
from pathlib import Path
from clustertune.ops.storage.node import look_at_points
base = sys.argv[1]
found = look_at_points([f"{base}/{name}" for name in ("b0", "b1", "d0", "d1", "pool")], Path("/"))
assert all(point.kind == "folder" for point in found), found
print(json.dumps({point.path: point.entries for point in found if point.entries}))
"""


GROWING = """
import os, subprocess, sys
path, data = sys.argv[1], os.urandom(1 << 20)
with open(path, "wb") as out:
    out.write(data)
    out.flush()
    first = os.getxattr(path, "user.mergerfs.basepath").decode()
    free = os.statvfs(first)
    subprocess.run(["fallocate", "-l", str(free.f_bavail * free.f_frsize - (4 << 20)), first + "/big"], check=True)
    for _ in range(19):
        out.write(data)
assert open(path, "rb").read() == data * 20
assert first != os.getxattr(path, "user.mergerfs.basepath").decode(), first
os.unlink(first + "/big")
os.unlink(path)
"""


def test_a_file_that_outgrows_its_brick_is_moved(shared: tuple[Node, Path]) -> None:
    """moveonenospc with minfreespace above the file: the writer sees nothing, the content is right."""
    made, cluster = shared
    done = made.python(GROWING, f"{made.base}/pool/models/grows")
    assert done.code == 0, done.err
    assert checked(made, cluster) == (0, {})
