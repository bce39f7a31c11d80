"""``ops storage apply`` on a real node from nothing: killed, refused, twice, by hand before it, with each kind of brick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.ops.node import brick, checked, cluster_file, node, pooled, two_bricks

STEPWISE = """
import os, sys
from pathlib import Path
from clustertune.cluster.load import load_cluster
from clustertune.ops.storage import plan as module
from clustertune.ops.storage.plan import make_plan
cluster, fstab, was = load_cluster(sys.argv[1]), Path("/etc/fstab"), Path("/etc/fstab").read_bytes()
node, died = cluster.nodes[0].name, 0

def run(folders):
    count = 0
    def told(text):
        nonlocal count
        count += 1
        if count > 1 and not folders:
            os._exit(9)  # as a power loss: nothing is cleaned up
    module._verify = lambda *_: None  # systemd is asked in other tests
    if folders:
        module.os.chown = lambda *_: os.kill(os.getppid(), 9) or os._exit(9)  # folders are made by a child
    module.apply(cluster, node, Path("/"), report=told)
    os._exit(0)

while True:
    pid = os.fork()
    if pid == 0:
        run(died == 12)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break
    died += 1
    assert died < 100
    assert fstab.read_bytes().startswith(was)
assert died > 20, died
assert not make_plan(cluster, node, Path("/")).needed
assert {path.read_bytes() for path in Path("/etc").glob("fstab.clustertune-*")} == {was}
"""


def test_killed_after_every_step_any_run_completes_it() -> None:
    """Each run makes one step more and dies, once between making a folder and giving it its mode; the end is the same."""
    with node() as made:
        cluster = two_bricks(made)
        made.shell("printf 'proc /proc proc defaults 0 0\\r\\n# x y' > /etc/fstab")
        done = made.python(STEPWISE, cluster)
        assert done.code == 0, done.err
        assert checked(made, cluster) == (0, {})
        assert not made.shell(f"find /etc {made.base}/pool -name '.*clustertune-new'")


def test_only_a_blank_disk_is_formatted_and_only_when_told() -> None:
    """Whatever a disk holds was somebody's: a file system, a partition table, data without a name."""
    with node() as made:
        blank, other = made.disk("d0", make=None), made.disk("d1", make="mkfs.ext4 -q")
        cluster = two_bricks(made, [blank, other])
        planned = made.command("plan", "--cluster", cluster, "--json")
        by_hand = {item["command"]: item["why"] for item in planned.json["commands"] if item["by_hand"]}
        assert f"mkfs.xfs {blank}" in by_hand
        assert "holds ext4, not xfs" in by_hand[f"wipefs --no-act {other}"]
        left = made.command("apply", "--cluster", cluster)
        assert left.code == 1
        assert f"mkfs.xfs {blank}" in left.err
        assert f"{made.base}/b0 is not mounted: {made.base}/d0 is missing" in left.err  # the bare folder must not be bound
        assert made.run("blkid", "-p", blank).code == 2
        slow = "d.DEVICE_SECONDS = 0.2; d._content = lambda _: time.sleep(99)"
        hung = made.python(
            f"import time; from clustertune.ops.storage import node as d; {slow}; print(d.look_at_device({blank!r}).state)"
        )
        assert hung.out == "silent\n", hung.err
        for device, words in ((other, "holds ext4"), ("/dev/null", "is not a device of this node")):
            refused = made.command("apply", "--cluster", cluster, "--format", device)
            assert refused.code == 2
            assert words in refused.err
        made.shell(f"printf secret | dd of={blank} bs=1 seek=70000 conv=notrunc status=none")
        assert "without a known signature" in made.command("apply", "--cluster", cluster, "--format", blank).err
        made.shell(f"dd if=/dev/zero of={blank} bs=1M count=1 conv=notrunc status=none")
        hold = "import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_EXCL); print('held', flush=True); sys.stdin.read()"
        holder = made.start(sys.executable, "-c", hold, blank, stdin=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert "is in use" in made.command("apply", "--cluster", cluster, "--format", blank).err
        holder.communicate("")
        made.shell(f"wipefs -qa {other}; mkfs.xfs -q -f {other}")
        done = made.command("apply", "--cluster", cluster, "--format", blank)
        assert done.code == 0, done.err
        assert checked(made, cluster) == (0, {})


def test_a_disk_that_somebody_mounted_by_hand() -> None:
    """Above the exported folder it stays, and the next boot leaves it out: that is reported, until a line of fstab has it."""
    with node() as made:
        base, device = made.base, made.disk("d0")
        made.shell(f"mkdir {base}/h; mount {device} {base}/h; mkdir {base}/h/export")
        cluster = pooled(made, [brick(made, 0, path=f"{base}/h/export", device=device)], shared=f"{base}/pool/team")
        done = made.command("apply", "--cluster", cluster)
        assert done.code == 0, done.err
        assert f"{device} is mounted at {base}/h by hand: the next boot leaves it out" in done.err
        assert made.command("plan", "--cluster", cluster).code == 0
        assert checked(made, cluster) == (1, {"files-current": "warn"})
        made.shell(f"echo '{device} {base}/h xfs defaults 0 0' >> /etc/fstab")
        assert checked(made, cluster) == (0, {})
        made.shell(
            f"sed -i /defaults/d /etc/fstab; mkdir -p /etc/systemd/system; echo > '/etc/systemd/system/{unit_of(base / 'h')}'"
        )
        assert checked(made, cluster) == (0, {})


def unit_of(path: Path) -> str:
    """As systemd itself names it."""
    argv = ["systemd-escape", "--path", "--suffix=mount", str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def test_bricks_of_ext4_without_a_pool_by_several_at_once() -> None:
    """One does it, the others have to wait; root's own umask closes no folder on the way; the same again is nothing."""
    with node() as made:
        base = made.base
        devices = [made.disk(f"d{n}", 64, make="mkfs.ext4 -q") for n in (0, 1)]
        ext4 = [{"filesystem": "ext4", "path": f"{base}/way/d{n}", "device": device} for n, device in enumerate(devices)]
        bricks = [brick(made, n, **facts) for n, facts in enumerate(ext4)]
        cluster = cluster_file(base / "c.yaml", {"bricks": bricks, "shared": f"{base}/b0/team"})
        command = f"umask 077; {sys.executable} -m clustertune ops storage apply --cluster {cluster}"
        several = [made.start("bash", "-c", command) for _ in range(3)]
        outputs = [child.communicate()[1] for child in several]
        codes = [child.returncode for child in several]
        assert set(codes) <= {0, 75} and 0 in codes, outputs
        assert made.command("apply", "--cluster", cluster, "--json").json["did"] == []
        assert made.shell(f"stat -c %a {base}/way {base}/b0/team {base}/b0/team/models").split() == ["755", "1777", "1777"]
        assert len(made.shell("ls /etc/fstab.clustertune-*").split()) == 1
        assert made.shell("cat /etc/fstab").count("errors=remount-ro") == 2
        assert checked(made, cluster) == (0, {"brick-writable": "unknown"})  # no shared folder is on the second


def test_a_mount_point_that_cannot_be_made_immutable_is_left() -> None:
    """In a container without the capability: plan would ask for it again and again, so apply must not call it done."""
    with node("setpriv") as made:
        cluster = two_bricks(made)
        argv = [sys.executable, "-m", "clustertune", "ops", "storage", "apply", "--cluster", str(cluster)]
        done = made.run("setpriv", "--bounding-set=-linux_immutable", *argv)
        assert done.code == 1
        assert f"left: {made.base}/pool could not be made immutable: Operation not permitted; a container may" in done.err
        assert made.command("apply", "--cluster", cluster).code == 0
        assert checked(made, cluster) == (0, {})


def test_a_brick_on_the_root_disk_gets_no_folders() -> None:
    """Its file system is not mounted: what is made there would be on the disk that the node boots from."""
    with node() as made:
        base = made.base
        # A view of the root disk that nobody can write to, should the guard be gone.
        made.shell(f"mkdir {base}/d0; mount --bind / {base}/d0; mount -o remount,bind,ro {base}/d0")
        cluster = pooled(made, [brick(made, 0)])
        done = made.command("apply", "--cluster", cluster)
        assert f"{base}/d0 is on the root disk, or is not there: mount its file system; no folders" in done.err
        assert not Path("/data/hf_cache").exists()
        code, found = checked(made, cluster)
        assert (code, found["brick-mounted"]) == (2, "fail")  # a bind would show the root disk as the brick
        made.shell(f"mount --bind {base}/d0 {base}/b0")
        code, found = checked(made, cluster)
        assert (code, found["brick-not-on-root-disk"]) == (2, "fail")


def test_what_stands_in_the_way_is_refused_before_anything_is_written() -> None:
    """Then a group shares what is made: 2775, a file of one member is the group's.

    A disk would be formatted and then be nowhere; systemd mounts nothing behind a link; somebody's local mount waits for our
    pool, which waits for the network, which waits for local mounts; the node lacks the group.
    """
    with node() as made:
        base = made.base
        cluster = two_bricks(made, [made.disk("d0", make=None), made.disk("d1")], group="train", staging={
            "path": f"{base}/stage", "gb": 1,
        })  # fmt: skip

        def refused(words: str, do: str, undo: str, *options: str) -> None:
            made.shell(do)
            before = made.shell("cat /etc/fstab")
            done = made.command("apply", "--cluster", cluster, *options)
            assert (done.code, words in done.err) == (2, True), done.err
            assert made.shell("cat /etc/fstab") == before
            assert made.run("ls", "/etc/exports.d").code != 0
            made.shell(undo)

        refused("groupadd train", "true", "groupadd -g 7777 train")
        mounted = f"mkdir {base}/d0; mount -t tmpfs tmpfs {base}/d0"
        refused("something else is mounted", mounted, f"umount {base}/d0", "--format", made.loops[0])
        assert made.run("blkid", "-p", made.loops[0]).code == 2
        link = f"mkdir {base}/real; ln -s {base}/real {base}/pool"
        refused(f"a symbolic link leads to {base}/real: systemd mounts nothing there", link, f"rm {base}/pool")
        line = f"echo 'tmpfs /mnt tmpfs x-systemd.requires={base}/pool 0 0' > /etc/fstab"
        refused("ordering cycle", line, ": > /etc/fstab")
        done = made.command("apply", "--cluster", cluster, "--format", made.loops[0])
        assert done.code == 0, done.err
        for folder in (f"{base}/pool/models", f"{base}/pool", f"{base}/stage"):
            assert made.shell(f"stat -c '%a %G' {folder}") == "2775 train\n"
        assert made.shell(f"touch {base}/pool/models/x; stat -c %G {base}/pool/models/x; rm {base}/pool/models/x") == "train\n"
        assert checked(made, cluster) == (0, {})


def test_two_nodes_first_one_alone() -> None:
    """The other server is not there yet: what can be done is done, the rest is reported, and the command ends."""
    with node() as made:
        base = made.base
        bricks = [brick(made, 0, device=made.disk("d0")), brick(made, 1, node="other", path="/data")]
        other = {"name": "other", "address": "10.9.0.7", "roles": ["compute", "nfs"]}
        cluster = pooled(made, bricks, nodes=[other])
        done = made.command("apply", "--cluster", cluster, "--json")
        assert done.code == 1, done.err
        left = "\n".join(done.json["left"])
        assert f"mount -o fg,retry=0 {base}/b1" in left
        assert f"the pool is not mounted: {base}/b1 is missing" in left
        assert made.shell(f"stat -c %a {base}/d0/data/models") == "1777\n"
        text = made.shell("cat /etc/exports.d/clustertune.exports")
        assert f"{base}/d0 10.9.0.0/24(rw,sync,root_squash,no_subtree_check,sec=sys,mountpoint)" in text
        code, found = checked(made, cluster)
        assert code == 2
        assert {"brick-mounted", "nfs-server-answers", "nfs-export", "pool-mounted"} <= found.keys()
