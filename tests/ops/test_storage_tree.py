"""``ops storage plan`` and ``apply`` on a tree: what is written, what is refused, and that nothing else is touched."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clustertune.cluster.load import load_cluster
from clustertune.ops.storage.layout import EXPORT_FILE
from clustertune.ops.storage.node import elsewhere, fstab_entries
from clustertune.ops.storage.plan import apply, make_plan
from tests.command import Done
from tests.ops.node import served

CLUSTER, NODE_NAME = "rno-rtxpro6000", "rno-it-gpu0007-1"
ROOT_LINE = b"UUID=0a1b / ext4 defaults 0 1\n"


def tree(tmp_path: Path, fstab: bytes | None = ROOT_LINE) -> Path:
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    if fstab is not None:
        (root / "etc/fstab").write_bytes(fstab)
    return root


def ops(*arguments: str | Path, root: Path, node: str = NODE_NAME) -> Done:
    return served("ops", "storage", *arguments, "--cluster", CLUSTER, "--node", node, "--root", root)


def state(root: Path) -> dict[str, bytes | None]:
    """Every path below a tree, with what its files hold."""
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def test_the_commands_one_after_the_other(tmp_path: Path) -> None:
    """plan says what apply then does; the second apply does nothing; each exit code is the one that was announced."""
    root = tree(tmp_path)
    before = state(root)
    planned = ops("plan", root=root)
    assert planned.code == 1
    assert "+/shared/data:/shared-b/data /pool fuse.mergerfs" in planned.out
    assert "mkfs.xfs /dev/mapper/vg_nvme-lv_scratch   # only if it is blank" in planned.out
    assert "chattr +i /pool" in planned.out
    assert state(root) == before
    assert ops("apply", "--dry-run", root=root).out == planned.out
    assert state(root) == before
    applied = ops("apply", "--json", root=root)
    assert applied.code == 0, applied.err
    (backup,) = applied.json["backups"]
    assert Path(backup).read_bytes() == ROOT_LINE
    once = state(root)
    assert (once["etc/fstab"] or b"").startswith(ROOT_LINE)
    assert once["pool"] is None and "data/shared/data" not in once  # it would be on the image's own disk: the trap
    again = ops("apply", "--json", root=root)
    assert (again.code, again.json["did"], again.json["backups"]) == (0, [], [])
    assert state(root) == once
    done = ops("plan", "--json", root=root)
    assert (done.code, done.json["needed"], done.json["files"]) == (0, False, [])
    assert {"node", "mount_points", "folders", "commands", "on_the_node", "notes"} <= done.json.keys()


def test_another_machine_is_shown_from_nothing_and_never_touched(tmp_path: Path) -> None:
    """plan of another machine is worth reading anywhere; apply and check would look at, or change, the wrong one."""
    planned = served("ops", "storage", "plan", "--cluster", CLUSTER, "--node", NODE_NAME)
    assert planned.code == 1 and "--- /dev/null" in planned.out
    assert "install -d -m 1777 /data/shared/data/hf_cache" in planned.out
    for command in ("apply", "check"):
        refused = served("ops", "storage", command, "--cluster", CLUSTER, "--node", NODE_NAME)
        assert (refused.code, f"not {NODE_NAME}" in refused.err) == (2, True)
    refused = served("ops", "storage", "plan", "--cluster", CLUSTER, "--json")
    assert (refused.code, "--node" in refused.err, len(refused.json["problems"])) == (2, True, 1)
    assert served("ops", "storage", "plan", "--cluster", CLUSTER, "--node", "rno-it-gpu0007-2").code == 2
    refused = ops("apply", "--format", "/dev/sdb", root=tree(tmp_path))
    assert (refused.code, "--format" in refused.err) == (2, True)
    assert ops("plan", root=tmp_path / "absent").code == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60).filter(lambda line: not any(place in line for place in (b"/pool", b"/shared", b"/data"))),
            st.sampled_from([
                b"LABEL=x /mnt ext4 ro 0 2", b"tmpfs /run/x tmpfs size=1g 0 0\r", b"# /pool", b"\t\tproc /proc proc",
                b"//nas/s /nas cifs x 0 0", b"none swap", b"a", b"/dev/x /p\\040q xfs", b"server:/x /poolside nfs hard",
                b"/dev/x /pool\xc2\xa0x xfs", b"/dev/x /pool\x0cx xfs",
            ]),
        ),
        max_size=8,
    ),
    st.booleans(),
)  # fmt: skip
def test_lines_of_others_are_the_same_bytes(tmp_path: Path, lines: list[bytes], newline: bool) -> None:
    """Whatever fstab holds: comments, CRLF, bytes that are not text, a last line without an end."""
    text = b"\n".join(lines) + (b"\n" if newline else b"")
    cluster = load_cluster(CLUSTER)
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True, exist_ok=True)
    fstab = root / "etc/fstab"
    fstab.write_bytes(text)
    for backup in root.glob("etc/fstab.clustertune-*"):
        backup.unlink()
    done = apply(cluster, NODE_NAME, root)
    after = fstab.read_bytes()
    assert after.startswith(text)
    assert b" /pool fuse.mergerfs " in after
    assert [Path(backup).read_bytes() for backup in done.backups] == [text]
    assert not make_plan(cluster, NODE_NAME, root).needed


TAKEN = [
    "/dev/sdz /pool xfs defaults 0 0", "/dev/sdz //pool/ xfs defaults 0 0", "/dev/sdz /shared\\055b xfs defaults 0 0",
    "  /dev/sdz\t/pool\txfs\r", "10.21.133.39:/data /shared-b nfs4 hard 0 0",
]  # fmt: skip


def test_everything_in_the_way_is_refused_at_once(tmp_path: Path) -> None:
    """A second line for a place would be an error of systemd's, which mounts nothing behind a link either; of two exports of a
    folder the server takes one; a mount would hide what lies below it. The first of each is somebody's decision.
    """
    root = tree(tmp_path, ROOT_LINE + "\n".join(TAKEN).encode() + b"\n")
    (root / "etc/exports").write_text('# /data/shared *(rw)\n"/data/shared" \\\n  *(rw,no_root_squash)\n')
    (root / "etc/exports.d").mkdir()
    (root / "etc/exports.d/a.exports").write_text("/data/shared 10.0.0.1(ro)\n")
    (root / "etc/exports.d/a.disabled").write_text("/data/shared 10.0.0.1(ro)\n")
    (root / "mnt/big").mkdir(parents=True)
    (root / "data").symlink_to("/mnt/big")
    (root / "pool/models").mkdir(parents=True)
    (root / "shared").write_text("a file")
    before = state(root)
    refused = ops("apply", "--json", root=root)
    assert (refused.code, state(root)) == (2, before)
    found = [(problem["file"], problem["message"]) for problem in refused.json["problems"]]
    by_file = dict(found)
    for number, line in enumerate(TAKEN, 2):
        assert by_file[f"/etc/fstab:{number}"].startswith(
            f"{'/pool' if 'pool' in line else '/shared-b'} is mounted by this line"
        )
    assert {file for file, _ in found} - {f"/etc/fstab:{n}" for n in range(2, 7)} == {
        "/etc/exports:2", "/etc/exports.d/a.exports:1", "/data/shared", "/pool", "/shared",
    }  # fmt: skip
    assert len(found) == 10 and "leads to /mnt/big/shared" in by_file["/data/shared"]


def test_our_lines_change_with_the_cluster_file_and_by_hand_only_by_force(tmp_path: Path) -> None:
    """Only our lines move, the old text is in the backup, and what somebody changed is not thrown away unless they say so."""
    root = tree(tmp_path)
    assert ops("apply", root=root).code == 0
    fstab = root / "etc/fstab"
    good = fstab.read_bytes()
    fstab.write_bytes(good.replace(b"minfreespace=96G", b"minfreespace=9G"))
    refused = ops("apply", root=root)
    assert (refused.code, "edited by hand" in refused.err, b"minfreespace=9G" in fstab.read_bytes()) == (2, True, True)
    assert ops("apply", "--force", root=root).code == 0
    assert fstab.read_bytes() == good
    fstab.write_bytes(good + b"tmpfs /scratch tmpfs x 0 0\n")
    assert ops("apply", root=root, node="rno-it-gpu0006-1").code == 0
    text = fstab.read_bytes()
    assert text.startswith(ROOT_LINE) and text.endswith(b"tmpfs /scratch tmpfs x 0 0\n") and b"/dev/mapper" not in text
    assert (root / EXPORT_FILE[1:]).read_bytes() == b""  # nothing is exported by the login node


def test_a_device_that_somebody_mounts_above(tmp_path: Path) -> None:
    """The exported folder is a part of that file system then: our line would mount its root over the folder."""
    root = tree(tmp_path, ROOT_LINE + b"/dev/mapper/vg_nvme-lv_scratch /data xfs defaults 0 0\n")
    made = make_plan(load_cluster(CLUSTER), NODE_NAME, root)
    assert [mount.kind for mount in made.layout.mounts] == ["bind", "nfs", "pool"]
    assert "mountpoint=/data)" in made.layout.exports[0]
    assert any("by other means" in note for note in made.notes)
    assert "x-systemd.requires-mounts-for=/data/shared" in made.layout.mounts[0].options


def test_other_names_of_a_device_are_followed_on_the_node_itself(tmp_path: Path) -> None:
    """fstab mostly names a file system by its UUID; in a tree, this machine's links mean nothing."""
    device, link = tmp_path / "sdb", tmp_path / "link"
    device.touch()
    link.symlink_to(device)
    cluster = load_cluster(CLUSTER)
    brick = cluster.storage.bricks[0].model_copy(update={"device": f"/dev/../{device}"})
    lines = fstab_entries(f"/dev/../{link} /data xfs".encode())
    assert elsewhere(lines, [], [brick], live=True) == {brick.device: "/data"}
    assert elsewhere(lines, [], [brick], live=False) == {}


def test_one_at_a_time(tmp_path: Path) -> None:
    """Two would each write a text that was made of the same old one."""
    import fcntl

    root = tree(tmp_path)
    lock = root / "etc/.clustertune-storage.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = ops("apply", root=root)
    assert refused.code == 75
    assert "sets up storage here" in refused.err
