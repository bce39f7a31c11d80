"""``ops slurm plan`` and ``apply`` on trees: what is shown, written, left alone and refused; and the steps around it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertune.check.rule import FAIL, PASS, SLURM, UNKNOWN, WARN, checks
from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.errors import UserError
from clustertune.host.credentials import mask_settings
from clustertune.ops import files as files_room
from clustertune.ops.nodes import choose_node, is_here, tool
from clustertune.ops.slurm import planning
from clustertune.ops.slurm.judge import BLOCKING, NodeFacts, PathState, SlurmSubject, judge
from clustertune.ops.slurm.planning import SlurmPlan, apply_plan, entries, make_plan
from clustertune.ops.slurm.texts import MUNGE_KEY, Version
from tests.command import REPO, Done, run
from tests.ops.slurm_clusters import HEAD, NO_GPU, load, nodes, write
from tests.refusal import problems

RNO, NODE = "rno-rtxpro6000", "rno-it-gpu0007-1"
CONF = "etc/slurm/slurm.conf"


@pytest.fixture
def rno() -> Cluster:
    return load_cluster(RNO)


def plan(cluster: Cluster, root: Path, node: str = NODE, **more: Any) -> SlurmPlan:
    return make_plan(cluster, choose_node(cluster, node), root=root, **more)


def put(root: Path, text: str, name: str = CONF, mode: int = 0o644) -> Path:
    """A file of the tree."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(text.encode(errors="surrogateescape"))
    (root / name).chmod(mode)
    return root / name


def ops(command: str, root: Path, *more: str, cluster: str | Path = RNO, node: str = NODE) -> Done:
    return run("ops", "slurm", command, "--cluster", cluster, "--node", node, "--root", root, *more)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_command_on_a_tree(tmp_path: Path) -> None:
    """Plan, apply, apply, plan: 1, written, nothing left, 0; and plan and a dry run write nothing."""
    first = ops("plan", tmp_path, "--accounting")
    assert first.code == 1
    assert "+NodeName=rno-it-gpu0008-1 NodeAddr=10.21.133.39" in first.out and "systemctl restart slurmctld" in first.out
    assert ops("apply", tmp_path, "--accounting", "--dry-run").out == first.out
    assert not list(tmp_path.iterdir())
    done = ops("apply", tmp_path, "--accounting", "--json")
    assert (done.code, done.json["exit_code"]) == (0, 0)
    assert set(done.json["written"]) == {f"/{name}" for name in everything(tmp_path)}
    assert next(step["where"] for step in done.json["steps"]) == "rno-it-gpu0006-1,rno-it-gpu0008-1", "the other machines"
    before = everything(tmp_path)
    again = ops("apply", tmp_path, "--accounting", "--json")
    assert (again.code, again.json["written"], again.json["steps"]) == (0, [], [])
    after = ops("plan", tmp_path, "--accounting", "--json")
    assert (after.code, after.json["files"], after.json["modes"], after.json["steps"]) == (0, [], [], [])
    assert everything(tmp_path) == before
    assert mode(tmp_path / "etc/slurm/slurmdbd.conf") == 0o600 and mode(tmp_path / "var/lib/slurm/slurmctld") == 0o700


@pytest.mark.parametrize(
    ("node", "roles", "wanted"),
    [
        ("rno-it-gpu0006-1", "login", {"hosts", "slurm.conf", "gres.conf", "cgroup.conf"}),
        (NODE, "all", {"hosts", "slurm.conf", "gres.conf", "cgroup.conf", "clustertune.conf", "slurmdbd.conf",
                       "60-clustertune-slurm.cnf"}),
        ("rno-it-gpu0008-1", "compute", {"hosts", "slurm.conf", "gres.conf", "cgroup.conf", "clustertune.conf"}),
    ],
)  # fmt: skip
def test_each_machine_gets_what_its_roles_need(node: str, roles: str, wanted: set[str], rno: Cluster, tmp_path: Path) -> None:
    """The database's file is on the controller alone, and slurm.conf is the same everywhere."""
    made = plan(rno, tmp_path, node, accounting=True)
    assert {item.change.path.rpartition("/")[2] for item in made.files} == wanted, roles
    assert made.after["/etc/slurm/slurm.conf"] == plan(rno, tmp_path, NODE, accounting=True).after["/etc/slurm/slurm.conf"]


def test_a_machine_that_only_exports_gets_names_alone(tmp_path: Path) -> None:
    """It has no part in Slurm."""
    extra = [*nodes(["n1"]), {"name": "box", "address": "10.99.1.9", "roles": ["nfs"]}]
    brick = {"node": "box", "path": "/data", "mount": "/shared", "filesystem": "xfs", "tb": 1}
    cluster = load(tmp_path / "c", {"nodes": [HEAD, *extra], "storage": {"bricks": [brick], "shared": "/shared"}})
    made = plan(cluster, tmp_path, "box")
    assert [item.change.path for item in made.files] == ["/etc/hosts"]
    assert (made.modes, len(made.steps())) == ((), 2)


# --- what others wrote ---------------------------------------------------------------------------------------------------

FOREIGN = """\
# theirs
ClusterName=old
SlurmctldHost=head
PriorityType=priority/multifactor   # fair share
AccountingStoragePass=hunter2
SlurmdTimeout=300
JobRequeue = 1
NodeName=n[1-2] CPUs=64 \\
   RealMemory=1000
PartitionName=debug Nodes=n1
PartitionName=gpu Nodes=n[1-2] Default=YES
include /etc/slurm/more.conf
"""


LOST = [
    "line 4 is lost: PriorityType=priority/multifactor", "line 5 is lost: AccountingStoragePass=(hidden)",
    "line 6 changes: SlurmdTimeout=300 becomes SlurmdTimeout=120", "line 8 changes: NodeName=n[1-2] CPUs=64 RealMemory=1000",
    "line 10 is lost: PartitionName=debug Nodes=n1", "line 12 is lost: include /etc/slurm/more.conf",
]  # fmt: skip


def test_a_foreign_slurm_conf_is_never_overwritten(tmp_path: Path) -> None:
    """--adopt takes it over, keeps a backup, and before it says what of it would be lost; no password is shown."""
    root = tmp_path / "root"
    on: dict[str, Any] = {"cluster": write(tmp_path / "c"), "node": "head"}
    conf = put(root, FOREIGN)
    shown, text = ops("plan", root, "--json", **on), ops("plan", root, **on)
    assert shown.code == 2 and "! /etc/slurm/slurm.conf: line 4 is lost" in text.out
    lost = next(item["lost"] for item in shown.json["files"] if item["path"] == "/etc/slurm/slurm.conf")
    assert all(any(words in line for line in lost) for words in LOST) and not any("JobRequeue" in line for line in lost)
    refused = ops("apply", root, **on)
    assert (refused.code, conf.read_text(), "--adopt" in refused.err) == (2, FOREIGN, True)
    assert list(everything(root)) == [CONF], "nothing at all was written"
    done = ops("apply", root, "--adopt", "--json", **on)
    assert done.code == 0 and "theirs" not in conf.read_text()
    assert not [one for one in (shown, text, refused, done) if "hunter2" in one.out + one.err]
    (backup,) = conf.parent.glob("slurm.conf.clustertune-*")
    assert (backup.read_text(), mode(backup)) == (FOREIGN, mode(conf))
    assert any("rm /var/lib/slurm/slurmctld/clustername" in line for step in done.json["steps"] for line in step["commands"])


def test_comments_alone_are_nobodys(rno: Cluster, tmp_path: Path) -> None:
    """A packaged file that holds nothing but comments needs no --adopt, and keeps them."""
    conf = put(tmp_path, "# see slurm.conf(5)\n\n")
    apply_plan(plan(rno, tmp_path), tmp_path)
    assert conf.read_text().startswith("# see slurm.conf(5)\n\n# >>> clustertune slurm")


def test_own_lines_of_an_operator_stay(rno: Cluster, tmp_path: Path) -> None:
    """A second partition below our block lives through every apply; a setting that is set twice is reported."""
    apply_plan(plan(rno, tmp_path), tmp_path)
    conf = tmp_path / CONF
    put(tmp_path, conf.read_text() + "PartitionName=urgent Nodes=ALL PriorityTier=20\nKillWait=60\n")
    made = plan(rno, tmp_path)
    twice = [(item.status, "KillWait=60" in item.found) for item in made.findings if item.rule == "slurm-own-lines"]
    assert (made.changes, twice) == (0, [(WARN, True)])
    apply_plan(plan(rno, tmp_path, accounting=True), tmp_path)
    assert "PartitionName=urgent" in conf.read_text() and "accounting_storage/slurmdbd" in conf.read_text()


def test_what_slurm_cannot_read_is_not_written(rno: Cluster, tmp_path: Path) -> None:
    """An operator's line with a key that the Slurm of this machine does not know: its parser is asked before anything is.

    It quotes a line that it cannot read, such as one that lacks its sign: its own words hide passwords, too.
    """
    if not (tool("slurmd") and tool("scontrol")):
        pytest.skip("not installed: slurmd, slurm-client (apt-get install)")
    apply_plan(plan(rno, tmp_path), tmp_path)
    whole = (tmp_path / CONF).read_text() + "include more.conf\nPartitionName=more Nodes=ALL\n"
    put(tmp_path, whole)
    assert ops("plan", tmp_path).code == 0
    put(tmp_path, whole + "BackfillFaster=yes\n")
    shown = ops("plan", tmp_path)
    assert (shown.code, "BackfillFaster" in shown.out) == (2, True)
    before = everything(tmp_path)
    assert ops("apply", tmp_path, "--accounting").code == 2
    assert everything(tmp_path) == before
    put(tmp_path, whole + "AccountingStoragePass hunter2\n")
    shown = ops("plan", tmp_path, "--json")
    assert (shown.code, "AccountingStoragePass (hidden)" in shown.out, "hunter2" in shown.out + shown.err) == (2, True, False)


def test_what_was_edited_between_our_markers_is_told(rno: Cluster, tmp_path: Path) -> None:
    """All files at once; --force replaces it."""
    apply_plan(plan(rno, tmp_path), tmp_path)
    for name in (CONF, "etc/slurm/gres.conf"):
        put(tmp_path, (tmp_path / name).read_text().replace("Name=", "Name= "), name)
    assert ["--force" in problem.fix for problem in problems(plan, rno, tmp_path)] == [True, True]
    apply_plan(plan(rno, tmp_path, force=True), tmp_path)
    assert plan(rno, tmp_path).changes == 0


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("127.0.1.1 rno-it-gpu0007-1", WARN), ("10.0.0.9 RNO-IT-GPU0008-1 other", FAIL),
        ("10.21.133.39 rno-it-gpu0008-1", None), ("10.0.0.9 rno-it-gpu0008-10", None), ("# 10.0.0.9 rno-it-gpu0008-1", None),
    ],
)  # fmt: skip
def test_another_address_for_a_machine(line: str, status: str | None, rno: Cluster, tmp_path: Path) -> None:
    """The first line of /etc/hosts wins: ours would be without effect. Debian's own line for 127.0.1.1 is the usual one."""
    put(tmp_path, f"127.0.0.1 localhost\n{line}\n", "etc/hosts")
    made = plan(rno, tmp_path)
    assert [item.status for item in made.findings if item.rule == "slurm-hosts"] == ([status] if status else [])
    if status == FAIL:
        with pytest.raises(UserError, match="line 2"):
            apply_plan(made, tmp_path)
        assert [*everything(tmp_path)] == ["etc/hosts"]


# --- refusals and kills ---------------------------------------------------------------------------------------------------


def test_another_machine_is_not_written_to() -> None:
    """plan shows it as if it were bare; apply refuses, before anything else."""
    shown = run("ops", "slurm", "plan", "--cluster", RNO, "--node", NODE)
    assert shown.code == 1
    assert "as if it were bare" in shown.err
    refused = run("ops", "slurm", "apply", "--cluster", RNO, "--node", NODE, "--json")
    assert (refused.code, refused.json["exit_code"]) == (2, 2)
    assert socket.gethostname() in refused.json["problems"][0]["message"]


def test_only_root_writes_on_a_machine(rno: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so at once, together with all else that stands in the way."""
    made = plan(rno, files_room.NODE)
    monkeypatch.setattr(planning.os, "geteuid", lambda: 1000)
    found = problems(planning.require_right_to_apply, made, files_room.NODE)
    assert [problem.fix.split(":")[0] for problem in found[1:]] == ["run it as root"]


def test_a_machine_that_is_not_in_the_file(tmp_path: Path) -> None:
    """Neither this one nor the one that is named; and a tree that is not there."""
    done = run("ops", "slurm", "plan", "--cluster", RNO)
    assert (done.code, socket.gethostname() in done.err) == (2, True)
    assert "rno-it-gpu0006-1" in ops("plan", tmp_path, "--json", node="n9").json["problems"][0]["fix"]
    assert ops("plan", tmp_path / "no").code == 2


def test_killed_at_any_step_the_next_run_completes(rno: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is whole, and the same command brings the rest."""
    put_file, left = files_room.put, 0

    def dying(root: Path, change: files_room.Change) -> Path | None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return put_file(root, change)

    def apply(name: str) -> dict[str, bytes]:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        apply_plan(plan(rno, root, accounting=True), root)
        return everything(root)

    monkeypatch.setattr(planning, "put", dying)
    whole = apply("whole")
    assert len(whole) == 7
    for fails_at in range(1, len(whole) + 1):
        left = fails_at
        with pytest.raises(KeyboardInterrupt):
            apply(str(fails_at))
        assert apply(str(fails_at)) == whole
        assert plan(rno, tmp_path / str(fails_at), accounting=True).changes == 0


# --- findings: facts in, findings out -------------------------------------------------------------------------------------

SHAPE = (
    "NodeName=n CPUs=256 Boards=1 SocketsPerBoard=2 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=4000000\nUpTime=0-10:08:53"
)
GOOD = NodeFacts(
    True,
    versions=("slurm-wlm 22.05.8",),
    shape=SHAPE,
    devices=tuple(range(8)),
    minors={f"0000:{10 + number:02x}:00.0": number for number in range(8)},
    cgroup="v2",
    users={"slurm": (64030, 64030), "munge": (111, 111)},
    places={MUNGE_KEY: PathState(False, 0o400, 111, 1024)},
)
KEY = GOOD.places[MUNGE_KEY]
JUDGED: list[tuple[Any, ...]] = [
    ("all well", GOOD, (22, 5), {}),
    ("fewer cores", replace(GOOD, shape=SHAPE.replace("CPUs=256", "CPUs=128").replace("Core=2", "Core=1")), (22, 5),
     {"slurm-shape": FAIL}),
    ("other sockets", replace(GOOD, shape=SHAPE.replace("Board=2 CoresPerSocket=64", "Board=8 CoresPerSocket=16")), (22, 5),
     {"slurm-shape": WARN}),
    ("less memory", replace(GOOD, shape=SHAPE.replace("4000000", "3900000")), (22, 5), {"slurm-memory": FAIL}),
    ("no slurmd", replace(GOOD, shape=""), (22, 5), {"slurm-shape": UNKNOWN}),
    ("a GPU is gone", replace(GOOD, devices=(0, 1, 2, 4, 5, 6, 7)), (22, 5), {"slurm-gpu-devices": FAIL}),
    ("no driver", replace(GOOD, devices=(), minors={}), (22, 5), {"slurm-gpu-devices": FAIL}),
    ("other numbers", replace(GOOD, minors={"0000:0a:00.0": 1, "0000:0b:00.0": 0}), (22, 5), {"slurm-gpu-order": WARN}),
    ("cgroup v2, old Slurm", GOOD, (21, 8), {"slurm-cgroup": FAIL, "slurm-version": WARN}),
    ("cgroup v1, old Slurm", replace(GOOD, cgroup="v1"), (21, 8), {"slurm-version": WARN}),
    ("no cgroups", replace(GOOD, cgroup=""), (22, 5), {"slurm-cgroup": WARN}),
    ("a release of the future", GOOD, (27, 5), {"slurm-version": WARN}),
    ("no release", GOOD, None, {"slurm-version": UNKNOWN}),
    ("no slurm", replace(GOOD, users={"munge": (111, 111)}), (22, 5), {"slurm-user": FAIL}),
    ("no list of users", replace(GOOD, users=None), (22, 5), {"slurm-user": UNKNOWN}),
    ("no key", replace(GOOD, places={}), (22, 5), {"munge-key": FAIL}),
    ("key for all", replace(GOOD, places={MUNGE_KEY: replace(KEY, mode=0o644)}), (22, 5), {"munge-key": FAIL}),
    ("root's key", replace(GOOD, places={MUNGE_KEY: replace(KEY, uid=0)}), (22, 5), {"munge-key": FAIL}),
    ("empty key", replace(GOOD, places={MUNGE_KEY: replace(KEY, size=0)}), (22, 5), {"munge-key": FAIL}),
    ("another address", GOOD, (22, 5), {"slurm-hosts": FAIL}, {"hosts": [(2, "10.0.0.9 rno-it-gpu0008-1")]}),
    ("a foreign file", GOOD, (22, 5), {"slurm-foreign-file": FAIL}, {"foreign": {"/etc/slurm/slurm.conf": 3}}),
    ("set twice", GOOD, (22, 5), {"slurm-own-lines": WARN}, {"repeated": [("/etc/slurm/slurm.conf", 9, "KillWait=60")]}),
    ("an unknown key", GOOD, (22, 5), {"slurm-parser": FAIL}, {"parser": "slurmd: error: unrecognized key: X"}),
    ("no munge yet", GOOD, (22, 5), {"slurm-parser": UNKNOWN}, {"parser": "slurmd: error: auth/munge: no socket"}),
    # What is installed counts here, and the cluster file everywhere else: the machines would get different files.
    ("another release than stated", GOOD, (22, 5), {"slurm-version": WARN}, {"stated": "24.11"}),
    ("the release that is stated", replace(GOOD, versions=("slurm 24.11.5",)), (24, 11), {}, {"stated": "24.11"}),
    # A login node has neither GPUs nor slurmd nor the user slurm's folders, but it must have munge's key.
    ("a login node", NodeFacts(True, versions=("slurm-wlm 22.05.8",), users={}), (22, 5), {"munge-key": FAIL},
     {"node": "rno-it-gpu0006-1"}),
]  # fmt: skip


@pytest.mark.parametrize("row", JUDGED, ids=[row[0] for row in JUDGED])
def test_what_a_machine_or_its_files_lack(row: tuple[Any, ...], rno: Cluster) -> None:
    """Each rule on recorded facts: found where it is, silent where it is not, with a remedy."""
    _, facts, version, expected, *more = row
    files = dict(more[0]) if more else {}
    node, release = choose_node(rno, files.pop("node", NODE)), Version(*version) if version else None
    assert rno.slurm
    stated = rno.model_copy(update={"slurm": rno.slurm.model_copy(update={"version": files.pop("stated", rno.slurm.version)})})
    found = judge(SlurmSubject(stated, node, facts, release, **files))
    assert {item.rule: item.status for item in found} == expected
    assert all(item.fix or item.status in (PASS, UNKNOWN) for item in found)


def test_every_rule_has_a_case() -> None:
    ids = {check.rule.id for check in checks(SLURM)}
    assert {rule for row in JUDGED for rule in row[3]} == ids > BLOCKING


# --- reading a foreign file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "StoragePass=hunter2", "AccountingStoragePass = hunter2 x", "storagepass=hunter2", "  StoragePass=hunter2",
        "#StoragePass=hunter2", "# the old password is hunter2", "StorageUser=x StoragePass=hunter2",
        'StoragePass="a hunter2"', "StoragePass hunter2", "StoragePass=\\\n hunter2",
        "\n" * 1_000_000 + "StoragePass=hunter2",  # a pattern that looks at each line from each other one would take hours
    ],
)  # fmt: skip
def test_passwords_are_hidden(line: str) -> None:
    """In every place where lines of a file are shown."""
    masked = mask_settings(f"a=1\n{line}\nb=2")
    assert "hunter2" not in masked and masked.startswith("a=1\n") and masked.endswith("\nb=2")
    assert "hunter2" not in str(entries(line.lstrip("\n")))


def test_several_settings_in_one_line_are_several() -> None:
    """As Slurm reads them: each would be lost, or says again what the block says."""
    found = entries("KillWait = 60 ReturnToService=1\nNodeName=n1 CPUs=4\nA=1 junk")
    assert [entry.key for entry in found] == ["killwait", "returntoservice", "nodename=n1", "a"]


def test_bytes_that_are_no_text_are_shown_in_any_locale(tmp_path: Path) -> None:
    """LC_ALL=C is what sudo and cron leave; and JSON contains no half of a character."""
    put(tmp_path, "ClusterName=caf\udce9\nPartitionName=d\xe9bug Nodes=n1\n")
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "clustertune", "ops", "slurm", "plan", "--cluster", RNO]
    command += ["--node", NODE, "--root", str(tmp_path)]
    for more in ([], ["--json"]):
        done = subprocess.run([*command, *more], env=plain, cwd=REPO, capture_output=True, timeout=120, check=False)
        assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
        assert b"caf" in done.stdout and b"udce9" not in done.stdout


@pytest.mark.parametrize("was", [0o600, 0o646])
def test_slurm_conf_is_everybodys_to_read_and_nobodys_to_write(was: int, rno: Cluster, tmp_path: Path) -> None:
    """sbatch of a user ends without it, and whoever writes it is root; taken over or ours, in a folder that is closed too."""
    conf = put(tmp_path, FOREIGN, mode=was)
    conf.parent.chmod(0o700)
    apply_plan(plan(rno, tmp_path, adopt=True), tmp_path)
    assert (mode(conf), mode(conf.parent)) == (0o644, 0o755)
    conf.chmod(was)
    made = plan(rno, tmp_path)
    assert ([item.path for item in made.modes], made.exit_code()) == (["/etc/slurm/slurm.conf"], 1)
    apply_plan(made, tmp_path)
    assert (mode(conf), plan(rno, tmp_path).changes) == (0o644, 0)


def test_the_host_of_another_domain_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """n1 may be either of two: what is written onto the wrong one stops its slurmd."""
    cluster = load(tmp_path, {"nodes": [HEAD, *nodes(["n1.a", "n1.b"])]})
    for name, here in (("n1.a", [False, True, False]), ("n1", [False] * 3)):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert [is_here(cluster, host) for host in cluster.nodes] == here


def test_a_queue_elsewhere_is_moved(tmp_path: Path) -> None:
    """A file that is taken over has it at another place: with the new one slurmctld would begin with nothing."""
    root, cluster = tmp_path / "root", load(tmp_path / "c")
    root.mkdir()
    new = plan(cluster, root, "head").after["/etc/slurm/slurm.conf"]
    old = new.replace("/var/lib/slurm/slurmctld", "/var/spool/slurm ctld").replace("/var/spool/slurmd", "/var/spool/d")
    put(root, "\n".join(line for line in old.splitlines() if ">>>" not in line and "<<<" not in line))
    lines = commands(plan(cluster, root, "head", adopt=True))
    stop = lines.index("systemctl stop slurmctld")
    assert lines[stop + 1] == "cp -a '/var/spool/slurm ctld'/. /var/lib/slurm/slurmctld/"
    assert in_order(lines, ["DRAIN", "systemctl stop slurmctld", "systemctl restart slurmctld", "RESUME"])
    put(root, new.replace("KillWait=30", "KillWait=31"))
    assert not [line for line in commands(plan(cluster, root, "head", force=True)) if "cp -a" in line]


def test_the_password_of_a_foreign_slurmdbd_is_not_shown(rno: Cluster, tmp_path: Path) -> None:
    """Its diff has the line, without the value; mode 644 on such a file is fixed."""
    file = put(tmp_path, "StorageType=accounting_storage/mysql\nStoragePass=hunter2\n", "etc/slurm/slurmdbd.conf")
    made = plan(rno, tmp_path, accounting=True)
    assert "hunter2" not in str(made.as_json())
    assert any("-StoragePass=(hidden)" in line for item in made.files for line in item.diff())
    apply_plan(plan(rno, tmp_path, accounting=True, adopt=True), tmp_path)
    (backup,) = file.parent.glob("slurmdbd.conf.*")
    assert (mode(file), mode(backup), b"hunter2" in backup.read_bytes()) == (0o600, 0o600, True)
    file.chmod(0o644)
    made = plan(rno, tmp_path, accounting=True)
    assert [item.path for item in made.modes] == ["/etc/slurm/slurmdbd.conf"]
    apply_plan(made, tmp_path)
    assert mode(file) == 0o600


# --- the steps ------------------------------------------------------------------------------------------------------------


def commands(made: SlurmPlan) -> list[str]:
    return [line for step in made.steps() for line in step.commands]


def in_order(lines: list[str], words: list[str]) -> bool:
    """Whether a line has each of the words, one behind the other."""
    places = [next(index for index, line in enumerate(lines) if word in line) for word in words]
    return places == sorted(places)


def change(tmp_path: Path, second: dict[str, Any], **more: Any) -> list[str]:
    """The steps from one cluster file, applied, to another."""
    root = tmp_path / "root"
    root.mkdir()
    first = load(tmp_path / "1")
    apply_plan(plan(first, root, "head"), root)
    return commands(plan(load(tmp_path / "2", second), root, "head", **more))


CHANGES = [
    ("a time limit", {"slurm": {"max_time": "1-00:00:00"}}, ["scontrol reconfigure"], ["restart slurm", "DRAIN"]),
    ("a node more", {"nodes": [HEAD, *nodes(["n1", "n2", "n3"])]},
     ["systemctl restart slurmctld", "systemctl restart slurmd"], ["DRAIN", "reconfigure"]),
    ("more memory", {"compute": {"memory_gb": 1024}},
     ["State=DRAIN", "systemctl restart slurmctld", "systemctl restart slurmd", "State=RESUME"], ["reconfigure"]),
    ("no GPUs", {"compute": NO_GPU, "slurm": {"gres": None}}, ["State=DRAIN", "restart slurmctld", "State=RESUME"], []),
    ("other cores for GPUs", {"compute": {"numa_gpus": [[2, 3], [0, 1]]}},
     ["State=DRAIN", "restart slurmctld", "restart slurmd"], []),
    ("nothing", {}, [], ["systemctl", "scontrol"]),
]  # fmt: skip


@pytest.mark.parametrize(("second", "wanted", "unwanted"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_what_a_change_needs(second: dict[str, Any], wanted: list[str], unwanted: list[str], tmp_path: Path) -> None:
    """Reconfigure where that is enough; else the controller before the nodes; drained first where a node's shape changes."""
    lines = change(tmp_path, second)
    assert in_order(lines, wanted)
    assert not [line for line in lines for word in unwanted if word in line]


def test_accounting_is_switched_on(tmp_path: Path) -> None:
    """The database and slurmdbd are there before slurmctld looks for them, and no password is in any command.

    --accounting here and not on the other machines would be two files, and Slurm wants one.
    """
    lines = change(tmp_path, {}, accounting=True)
    assert in_order(lines, ["restart mariadb", "IDENTIFIED VIA unix_socket", "restart slurmdbd", "restart slurmctld"])
    assert not re.search(r"IDENTIFIED BY|StoragePass", " ".join(lines))
    assert {"--accounting" in line for line in lines if "ops slurm apply" in line} == {True}
    assert not [line for line in change(tmp_path / "2", {}) if "accounting" in line and "ops slurm apply" in line]


def test_the_munge_key_is_never_made_by_us_nor_shown(rno: Cluster, tmp_path: Path) -> None:
    """On a new cluster the steps say how one key comes to all machines; apply leaves it alone."""
    key = put(tmp_path / "root", "secretkey" * 20, "etc/munge/munge.key", 0o400)
    made = plan(rno, tmp_path / "root")
    (step,) = [step for step in made.steps() if any(line.startswith("munge -n | ssh HOST unmunge") for line in step.commands)]
    assert "rno-it-gpu0006-1,rno-it-gpu0008-1" in step.why
    apply_plan(made, tmp_path / "root")
    assert key.read_bytes() == b"secretkey" * 20 and "secretkey" not in str(made.as_json())
    (tmp_path / "bare").mkdir()
    apply_plan(plan(rno, tmp_path / "bare"), tmp_path / "bare")
    assert not (tmp_path / "bare/etc/munge").exists()
