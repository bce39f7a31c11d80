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
from tests.command import REPO, run
from tests.ops.slurm_clusters import HEAD, NO_GPU, load, nodes, write

RNO, NODE = "rno-rtxpro6000", "rno-it-gpu0007-1"
CONF = "etc/slurm/slurm.conf"


@pytest.fixture
def rno() -> Cluster:
    return load_cluster(RNO)


def plan(cluster: Cluster, root: Path, node: str = NODE, **more: Any) -> SlurmPlan:
    return make_plan(cluster, choose_node(cluster, node), root=root, **more)


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_command_on_a_tree(tmp_path: Path) -> None:
    """Plan, apply, apply, plan: 1, written, nothing left, 0; and plan and a dry run write nothing."""
    arguments = ["--cluster", RNO, "--node", NODE, "--root", tmp_path, "--accounting"]
    first = run("ops", "slurm", "plan", *arguments)
    assert first.code == 1
    assert "+NodeName=rno-it-gpu0008-1 NodeAddr=10.21.133.39" in first.out
    assert "systemctl restart slurmctld" in first.out
    assert run("ops", "slurm", "apply", "--dry-run", *arguments).out == first.out
    assert not list(tmp_path.iterdir())
    done = run("ops", "slurm", "apply", *arguments, "--json")
    assert (done.code, done.json["exit_code"]) == (0, 0)
    assert set(done.json["written"]) == {f"/{name}" for name in everything(tmp_path)}
    assert next(step["where"] for step in done.json["steps"]) == "rno-it-gpu0006-1,rno-it-gpu0008-1", "the other machines"
    before = everything(tmp_path)
    again = run("ops", "slurm", "apply", *arguments, "--json")
    assert (again.code, again.json["written"], again.json["steps"]) == (0, [], [])
    after = run("ops", "slurm", "plan", *arguments, "--json")
    assert (after.code, after.json["files"], after.json["modes"], after.json["steps"]) == (0, [], [], [])
    assert everything(tmp_path) == before
    assert oct((tmp_path / "etc/slurm/slurmdbd.conf").stat().st_mode)[-3:] == "600"
    assert oct((tmp_path / "var/lib/slurm/slurmctld").stat().st_mode)[-3:] == "700"


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


def test_a_foreign_slurm_conf_is_never_overwritten(tmp_path: Path) -> None:
    """--adopt takes it over, keeps a backup, and before it says what of it would be lost; no password is shown."""
    root, cluster = tmp_path / "root", write(tmp_path / "c")
    conf = root / CONF
    conf.parent.mkdir(parents=True)
    conf.write_text(FOREIGN)
    arguments = ["--cluster", cluster, "--node", "head", "--root", root]
    shown = run("ops", "slurm", "plan", *arguments, "--json")
    assert shown.code == 2
    assert "hunter2" not in shown.out + shown.err
    lost = next(item["lost"] for item in shown.json["files"] if item["path"] == "/etc/slurm/slurm.conf")
    for words in (
        "line 4 is lost: PriorityType=priority/multifactor",
        "line 5 is lost: AccountingStoragePass=(hidden)",
        "line 6 changes: SlurmdTimeout=300 becomes SlurmdTimeout=120",
        "line 8 changes: NodeName=n[1-2] CPUs=64 RealMemory=1000",
        "line 10 is lost: PartitionName=debug Nodes=n1",
        "line 12 is lost: include /etc/slurm/more.conf",
    ):
        assert any(words in line for line in lost), words
    assert not any("JobRequeue" in line for line in lost)
    refused = run("ops", "slurm", "apply", *arguments)
    assert (refused.code, conf.read_text()) == (2, FOREIGN)
    assert "--adopt" in refused.err
    assert list(everything(root)) == [CONF], "nothing at all was written"
    text = run("ops", "slurm", "plan", *arguments)
    assert "! /etc/slurm/slurm.conf: line 4 is lost" in text.out
    assert "hunter2" not in text.out + text.err
    done = run("ops", "slurm", "apply", *arguments, "--adopt", "--json")
    assert done.code == 0
    assert "hunter2" not in done.out + done.err
    assert "theirs" not in conf.read_text()
    (backup,) = conf.parent.glob("slurm.conf.clustertune-*")
    assert (backup.read_text(), backup.stat().st_mode & 0o777) == (FOREIGN, conf.stat().st_mode & 0o777)
    assert any("rm /var/lib/slurm/slurmctld/clustername" in line for step in done.json["steps"] for line in step["commands"])


def test_comments_alone_are_nobodys(rno: Cluster, tmp_path: Path) -> None:
    """A packaged file that holds nothing but comments needs no --adopt, and keeps them."""
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / CONF).write_text("# see slurm.conf(5)\n\n")
    apply_plan(plan(rno, tmp_path), tmp_path)
    assert (tmp_path / CONF).read_text().startswith("# see slurm.conf(5)\n\n# >>> clustertune slurm")


def test_own_lines_of_an_operator_stay(rno: Cluster, tmp_path: Path) -> None:
    """A second partition below our block lives through every apply; a setting that is set twice is reported."""
    apply_plan(plan(rno, tmp_path), tmp_path)
    conf = tmp_path / CONF
    conf.write_text(conf.read_text() + "PartitionName=urgent Nodes=ALL PriorityTier=20\nKillWait=60\n")
    made = plan(rno, tmp_path)
    assert made.changes == 0
    assert [(item.status, "KillWait=60" in item.found) for item in made.findings if item.rule == "slurm-own-lines"] == [
        (WARN, True)
    ]
    apply_plan(plan(rno, tmp_path, accounting=True), tmp_path)
    assert "PartitionName=urgent" in conf.read_text()
    assert "accounting_storage/slurmdbd" in conf.read_text()


def test_what_slurm_cannot_read_is_not_written(rno: Cluster, tmp_path: Path) -> None:
    """An operator's line with a key that the Slurm of this machine does not know: its parser is asked before anything is."""
    if not tool("slurmd"):
        pytest.skip("not installed: slurmd (apt-get install)")
    apply_plan(plan(rno, tmp_path), tmp_path)
    conf = tmp_path / CONF
    conf.write_text(conf.read_text() + "include more.conf\nPartitionName=more Nodes=ALL\n")
    arguments = ["--cluster", RNO, "--node", NODE, "--root", tmp_path]
    assert run("ops", "slurm", "plan", *arguments).code == 0
    conf.write_text(conf.read_text() + "BackfillFaster=yes\n")
    shown = run("ops", "slurm", "plan", *arguments)
    assert (shown.code, "BackfillFaster" in shown.out) == (2, True)
    before = everything(tmp_path)
    assert run("ops", "slurm", "apply", *arguments, "--accounting").code == 2
    assert everything(tmp_path) == before


def test_what_was_edited_between_our_markers_is_told(rno: Cluster, tmp_path: Path) -> None:
    """All files at once; --force replaces it."""
    apply_plan(plan(rno, tmp_path), tmp_path)
    for name in (CONF, "etc/slurm/gres.conf"):
        file = tmp_path / name
        file.write_text(file.read_text().replace("Name=", "Name= "))
    with pytest.raises(UserError) as caught:
        plan(rno, tmp_path)
    assert len(caught.value.problems) == 2
    assert all("--force" in (problem.fix or "") for problem in caught.value.problems)
    apply_plan(plan(rno, tmp_path, force=True), tmp_path)
    assert plan(rno, tmp_path).changes == 0


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("127.0.1.1 rno-it-gpu0007-1", WARN),
        ("10.0.0.9 RNO-IT-GPU0008-1 other", FAIL),
        ("10.21.133.39 rno-it-gpu0008-1", None),
        ("10.0.0.9 rno-it-gpu0008-10", None),
        ("# 10.0.0.9 rno-it-gpu0008-1", None),
    ],
)
def test_another_address_for_a_machine(line: str, status: str | None, rno: Cluster, tmp_path: Path) -> None:
    """The first line of /etc/hosts wins: ours would be without effect. Debian's own line for 127.0.1.1 is the usual one."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hosts").write_text(f"127.0.0.1 localhost\n{line}\n")
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
    with pytest.raises(UserError) as caught:
        planning.require_right_to_apply(made, files_room.NODE)
    assert [(problem.fix or "").split(":")[0] for problem in caught.value.problems][1:] == ["run it as root"]


def test_a_machine_that_is_not_in_the_file(tmp_path: Path) -> None:
    """Neither this one nor the one that is named; and a tree that is not there."""
    done = run("ops", "slurm", "plan", "--cluster", RNO)
    assert (done.code, socket.gethostname() in done.err) == (2, True)
    assert (
        "rno-it-gpu0006-1" in run("ops", "slurm", "plan", "--cluster", RNO, "--node", "n9", "--json").json["problems"][0]["fix"]
    )
    assert run("ops", "slurm", "plan", "--cluster", RNO, "--node", NODE, "--root", tmp_path / "no").code == 2


@pytest.mark.parametrize("fails_at", range(1, 8))
def test_killed_at_any_step_the_next_run_completes(
    fails_at: int, rno: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is whole, and the same command brings the rest."""
    count = 0
    put = files_room.put

    def dying(root: Path, change: files_room.Change) -> Path | None:
        nonlocal count
        count += 1
        if count == fails_at:
            raise KeyboardInterrupt
        return put(root, change)

    monkeypatch.setattr(planning, "put", dying)
    with pytest.raises(KeyboardInterrupt):
        apply_plan(plan(rno, tmp_path, accounting=True), tmp_path)
    monkeypatch.setattr(planning, "put", put)
    apply_plan(plan(rno, tmp_path, accounting=True), tmp_path)
    assert plan(rno, tmp_path, accounting=True).changes == 0
    (tmp_path / "other").mkdir()
    apply_plan(plan(rno, tmp_path / "other", accounting=True), tmp_path / "other")
    assert {f"other/{name}": data for name, data in everything(tmp_path).items() if not name.startswith("other")} == {
        name: data for name, data in everything(tmp_path).items() if name.startswith("other")
    }


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
]  # fmt: skip


@pytest.mark.parametrize("row", JUDGED, ids=[row[0] for row in JUDGED])
def test_what_a_machine_or_its_files_lack(row: tuple[Any, ...], rno: Cluster) -> None:
    """Each rule on recorded facts: found where it is, silent where it is not, with a remedy."""
    _, facts, version, expected, *files = row
    node, release = choose_node(rno, NODE), Version(*version) if version else None
    found = judge(SlurmSubject(rno, node, facts, release, **(files[0] if files else {})))
    assert {item.rule: item.status for item in found} == expected
    assert all(item.fix or item.status in (PASS, UNKNOWN) for item in found)


def test_every_rule_has_a_case() -> None:
    ids = {check.rule.id for check in checks(SLURM)}
    assert {rule for row in JUDGED for rule in row[3]} == ids > BLOCKING


def test_what_a_login_node_is_not_asked_for(rno: Cluster) -> None:
    """It has neither GPUs nor slurmd nor the user slurm's folders, but it must have munge's key."""
    bare = NodeFacts(True, versions=("slurm-wlm 22.05.8",), users={})
    found = judge(SlurmSubject(rno, choose_node(rno, "rno-it-gpu0006-1"), bare, Version(22, 5)))
    assert [item.rule for item in found] == ["munge-key"]


# --- reading a foreign file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "StoragePass=hunter2",
        "AccountingStoragePass = hunter2 x",
        "storagepass=hunter2",
        "  StoragePass=hunter2",
        "#StoragePass=hunter2",
        "# the old password is hunter2",
        "StorageUser=x StoragePass=hunter2",
        'StoragePass="a hunter2"',
        "StoragePass hunter2",
        "StoragePass=\\\n hunter2",
        "\n" * 1_000_000 + "StoragePass=hunter2",  # a pattern that looks at each line from each other one would take hours
    ],
)
def test_passwords_are_hidden(line: str) -> None:
    """In every place where lines of a file are shown."""
    masked = mask_settings(f"a=1\n{line}\nb=2")
    assert "hunter2" not in masked and masked.startswith("a=1\n") and masked.endswith("\nb=2")
    assert "hunter2" not in str(entries(line.lstrip("\n")))


def test_the_parsers_own_words_hide_passwords(rno: Cluster, tmp_path: Path) -> None:
    """It quotes a line that it cannot read, such as one that lacks its sign."""
    if not tool("scontrol"):
        pytest.skip("not installed: slurm-client (apt-get install)")
    apply_plan(plan(rno, tmp_path), tmp_path)
    (tmp_path / CONF).write_text((tmp_path / CONF).read_text() + "AccountingStoragePass hunter2\n")
    shown = run("ops", "slurm", "plan", "--cluster", RNO, "--node", NODE, "--root", tmp_path, "--json")
    assert (shown.code, "AccountingStoragePass (hidden)" in shown.out) == (2, True)
    assert "hunter2" not in shown.out + shown.err


def test_several_settings_in_one_line_are_several() -> None:
    """As Slurm reads them: each would be lost, or says again what the block says."""
    found = entries("KillWait = 60 ReturnToService=1\nNodeName=n1 CPUs=4\nA=1 junk")
    assert [entry.key for entry in found] == ["killwait", "returntoservice", "nodename=n1", "a"]


def test_bytes_that_are_no_text_are_shown_in_any_locale(tmp_path: Path) -> None:
    """LC_ALL=C is what sudo and cron leave; and JSON contains no half of a character."""
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / CONF).write_bytes(b"ClusterName=caf\xe9\nPartitionName=d\xc3\xa9bug Nodes=n1\n")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "clustertune", "ops", "slurm", "plan"]
    command += ["--cluster", RNO, "--node", NODE, "--root", str(tmp_path)]
    for words in (command, [*command, "--json"]):
        done = subprocess.run(words, env={**os.environ, **plain}, cwd=REPO, capture_output=True, timeout=120, check=False)
        assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
        assert b"caf" in done.stdout
        assert b"udce9" not in done.stdout


@pytest.mark.parametrize("mode", [0o600, 0o646])
def test_slurm_conf_is_everybodys_to_read_and_nobodys_to_write(mode: int, rno: Cluster, tmp_path: Path) -> None:
    """sbatch of a user ends without it, and whoever writes it is root; taken over or ours, in a folder that is closed too."""
    conf = tmp_path / CONF
    conf.parent.mkdir(parents=True)
    conf.write_text(FOREIGN)
    conf.chmod(mode)
    conf.parent.chmod(0o700)
    apply_plan(plan(rno, tmp_path, adopt=True), tmp_path)
    assert (conf.stat().st_mode & 0o777, conf.parent.stat().st_mode & 0o777) == (0o644, 0o755)
    conf.chmod(mode)
    made = plan(rno, tmp_path)
    assert ([item.path for item in made.modes], made.exit_code()) == (["/etc/slurm/slurm.conf"], 1)
    apply_plan(made, tmp_path)
    assert (conf.stat().st_mode & 0o777, plan(rno, tmp_path).changes) == (0o644, 0)


def test_the_host_of_another_domain_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """n1 may be either of two: what is written onto the wrong one stops its slurmd."""
    both = [
        {"name": f"n1.{domain}", "address": f"10.99.1.{number}", "roles": ["compute"]}
        for number, domain in ((7, "a"), (8, "b"))
    ]
    cluster = load(tmp_path, {"nodes": [HEAD, *both]})
    monkeypatch.setattr(socket, "gethostname", lambda: "n1.a")
    assert [is_here(cluster, host) for host in cluster.nodes] == [False, True, False]
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    assert not any(is_here(cluster, host) for host in cluster.nodes)


def test_a_release_that_the_file_does_not_say(rno: Cluster) -> None:
    """What is installed counts here, and the cluster file everywhere else: the machines would get different files."""
    assert rno.slurm
    cluster = rno.model_copy(update={"slurm": rno.slurm.model_copy(update={"version": "24.11"})})
    found = judge(SlurmSubject(cluster, choose_node(cluster, NODE), GOOD, Version(22, 5)))
    assert [(item.rule, item.status) for item in found] == [("slurm-version", WARN)]
    same = replace(GOOD, versions=("slurm 24.11.5",))
    assert judge(SlurmSubject(cluster, choose_node(cluster, NODE), same, Version(24, 11))) == []


def test_the_other_machines_get_the_same_slurm_conf(tmp_path: Path) -> None:
    """--accounting here and not there are two files, and Slurm wants one."""
    lines = change(tmp_path, {}, accounting=True)
    assert all("--accounting" in line for line in lines if "ops slurm apply" in line)
    assert not [line for line in change(tmp_path / "2", {}) if "accounting" in line and "ops slurm apply" in line]


def test_a_queue_elsewhere_is_moved(tmp_path: Path) -> None:
    """A file that is taken over has it at another place: with the new one slurmctld would begin with nothing."""
    conf = tmp_path / "root" / CONF
    conf.parent.mkdir(parents=True)
    cluster = load(tmp_path / "c")
    new = plan(cluster, tmp_path / "root", "head").after["/etc/slurm/slurm.conf"]
    old = new.replace("/var/lib/slurm/slurmctld", "/var/spool/slurm ctld").replace("/var/spool/slurmd", "/var/spool/d")
    conf.write_text("\n".join(line for line in old.splitlines() if ">>>" not in line and "<<<" not in line))
    lines = commands(plan(cluster, tmp_path / "root", "head", adopt=True))
    drain = next(index for index, line in enumerate(lines) if "DRAIN" in line)
    stop = lines.index("systemctl stop slurmctld")
    assert lines[stop + 1] == "cp -a '/var/spool/slurm ctld'/. /var/lib/slurm/slurmctld/"
    assert drain < stop < lines.index("systemctl restart slurmctld") < len(lines) - 1
    assert any("RESUME" in line for line in lines)
    conf.write_text(new.replace("KillWait=30", "KillWait=31"))
    assert not [line for line in commands(plan(cluster, tmp_path / "root", "head", force=True)) if "cp -a" in line]


def test_the_password_of_a_foreign_slurmdbd_is_not_shown(rno: Cluster, tmp_path: Path) -> None:
    """Its diff has the line, without the value; mode 644 on such a file is fixed."""
    file = tmp_path / "etc/slurm/slurmdbd.conf"
    file.parent.mkdir(parents=True)
    file.write_text("StorageType=accounting_storage/mysql\nStoragePass=hunter2\n")
    made = plan(rno, tmp_path, accounting=True)
    assert "hunter2" not in str(made.as_json())
    assert any("-StoragePass=(hidden)" in line for item in made.files for line in item.diff())
    file.chmod(0o644)
    apply_plan(plan(rno, tmp_path, accounting=True, adopt=True), tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    (backup,) = file.parent.glob("slurmdbd.conf.*")
    assert (b"hunter2" in backup.read_bytes(), backup.stat().st_mode & 0o777) == (True, 0o600)
    file.chmod(0o644)
    assert [item.path for item in plan(rno, tmp_path, accounting=True).modes] == ["/etc/slurm/slurmdbd.conf"]
    apply_plan(plan(rno, tmp_path, accounting=True), tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600


# --- the steps ------------------------------------------------------------------------------------------------------------


def commands(made: SlurmPlan) -> list[str]:
    return [line for step in made.steps() for line in step.commands]


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
    places = [next(index for index, line in enumerate(lines) if word in line) for word in wanted]
    assert places == sorted(places)
    assert not [line for line in lines for word in unwanted if word in line]


def test_accounting_is_switched_on(tmp_path: Path) -> None:
    """The database and slurmdbd are there before slurmctld looks for them, and no password is in any command."""
    lines = change(tmp_path, {}, accounting=True)
    order = ["systemctl restart mariadb", "IDENTIFIED VIA unix_socket", "restart slurmdbd", "restart slurmctld"]
    places = [next(index for index, line in enumerate(lines) if word in line) for word in order]
    assert places == sorted(places)
    assert not re.search(r"IDENTIFIED BY|StoragePass", " ".join(lines))


def test_the_munge_key_is_never_made_by_us_nor_shown(rno: Cluster, tmp_path: Path) -> None:
    """On a new cluster the steps say how one key comes to all machines; apply leaves it alone."""
    key = tmp_path / "etc/munge/munge.key"
    key.parent.mkdir(parents=True)
    key.write_bytes(b"secretkey" * 20)
    key.chmod(0o400)
    made = plan(rno, tmp_path)
    lines = commands(made)
    assert any(line.startswith("munge -n | ssh HOST unmunge") for line in lines)
    assert "rno-it-gpu0006-1,rno-it-gpu0008-1" in next(
        step.why for step in made.steps() if "munge -n" in " ".join(step.commands)
    )
    apply_plan(made, tmp_path)
    assert key.read_bytes() == b"secretkey" * 20
    assert "secretkey" not in str(made.as_json())
    (tmp_path / "bare").mkdir()
    apply_plan(plan(rno, tmp_path / "bare"), tmp_path / "bare")
    assert not (tmp_path / "bare/etc/munge").exists()
