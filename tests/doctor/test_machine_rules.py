"""Rules of a machine and of the nodes of a job: each fires on a bad one, on good ones nothing does, and few stop a job."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.check.machines import JobNodes, Machine, machine_findings
from clustertune.check.rule import FAIL, MACHINE, NODES, PASS, WARN, Finding, checks, rule_broken, run
from clustertune.cluster.load import load_cluster
from clustertune.doctor import preflight
from clustertune.host.facts import from_dict
from clustertune.launch.allocation import Allocation
from tests.doctor.machine_cases import CASES, COMPARED, EDGES, GOOD, LOGIN, TWO_PCIE_GPUS, XID, Patch, machine

RULES = {one.rule.id for one in checks(MACHINE)}
WELL: Patch = {"slurm_gres": {"gpu01": "gpu:h100:8"}, "slurm_scripts": {"/etc/slurm/prolog.sh": ""}}
BROKEN = rule_broken.rule.id


def numbered(cases: list[Any]) -> dict[str, Any]:
    """The words of parametrize for cases of which each begins with its rule."""
    return {"argvalues": cases, "ids": [f"{at}-{case[0]}" for at, case in enumerate(cases)]}


def faults(found: list[Finding]) -> set[tuple[str, str]]:
    return {(item.rule, item.status) for item in found if item.status in (WARN, FAIL)}


def looked(facts: Patch | None = None, cluster: Patch | None = None, **expects: Any) -> list[Finding]:
    """What is found on the good node, changed; no rule ends in an error."""
    found = machine_findings(machine(facts, cluster, **expects))
    assert BROKEN not in {item.rule for item in found}
    return found


def test_nothing_is_wrong_with_a_good_node() -> None:
    """A doctor that cries wolf is switched off. Most rules look at something here: they say so."""
    found = looked()
    assert faults(found) == set() and len({item.rule for item in found if item.status == PASS}) > 35


@pytest.mark.parametrize(("rule", "status", "facts", "cluster", "expects", "also"), **numbered(CASES))
def test_a_bad_one_is_found(rule: str, status: str, facts: Patch, cluster: Patch, expects: dict[str, Any], also: str) -> None:
    """One fact that differs gives one rule's fault, with a remedy, and no other's."""
    found = looked(facts, cluster, **expects)
    mine = [item for item in found if item.rule == rule and item.status == status]
    assert mine, [item for item in found if item.status != PASS]
    assert all(item.fix and item.found and item.where == facts.get("hostname", item.where) for item in mine)
    assert {name for name, _ in faults(found)} - {also} == {rule}


@pytest.mark.parametrize(("rule", "status", "facts", "cluster", "expects", "_"), **numbered(EDGES))
def test_where_a_rule_keeps_silent(
    rule: str, status: str, facts: Patch, cluster: Patch, expects: dict[str, Any], _: str
) -> None:
    """Next to each bad machine one that is well, or on which the same is worse, or less bad."""
    worst = {item.status for item in looked(facts, cluster, **expects) if item.rule == rule}
    assert (FAIL if FAIL in worst else WARN if WARN in worst else "") == status


def test_every_rule_has_a_bad_case_and_a_good_one() -> None:
    """A rule that nothing can set off, or that never says that all is well, is none."""
    assert {case[0] for case in CASES} == RULES
    pool = {"point": "/pool", "kind": "fuse.mergerfs", "options": ["rw", "branches=/tmp/a:/tmp/b"]}
    good: list[tuple[Patch, Patch, dict[str, Any]]] = [
        ({}, {}, {}),
        (TWO_PCIE_GPUS, {}, {"gpus": 2}),
        ({"environment.OMP_NUM_THREADS": "16", "container": "docker", "mounts.0.kind": "overlay"}, {}, {}),
        ({"+": "HERE", "slurm": {"+": "SLURM"}, "slurm_silent": "", **WELL}, {}, {}),
        ({"exports": {"/tmp/x": "*(rw,sync)"}}, {}, {}),
        ({"mounts.+": pool}, {"storage.pool": {"mount": "/pool"}}, {}),
        ({}, {"network": {"interface": "bond0", "kind": "roce", "gbit": 200}}, {}),
    ]
    found = [item for facts, cluster, expects in good for item in looked(facts, cluster, **expects)]
    assert RULES - {item.rule for item in found if item.status == PASS} == {"pool-options", "nfs-over-fuse", "inodes"}
    assert {name for name, _ in faults(found)} <= {"cuda-visible-devices", "rdma-verbs"}


def test_any_fact_may_be_missing() -> None:
    """What could not be seen is unknown: it must neither be taken for a fault nor break a rule."""
    empty: dict[type, Any] = {list: [], dict: {}, str: ""}
    allowed = {
        **{"rdma": {"rdma-port"}, "rdma_devices": {"rdma-verbs"}, "verbs_providers": {"rdma-verbs"}},
        **{"gpus": {"gpu-driver", "gpu-count"}, "cuda_devices": {"gpu-count"}, "own_addresses": {"hostname-loopback"}},
    }
    for key in set(GOOD) - {"hostname", "place"}:
        bad = {name for name, _ in faults(looked({key: empty.get(type(GOOD[key]))}))}
        assert bad <= allowed.get(key, set()), key


def test_facts_without_anything_are_no_fault() -> None:
    """An old kernel in an odd container."""
    m = machine()
    m.facts = from_dict({"hostname": "x", "place": "here"})
    expected = {("gpu-count", FAIL), ("hostname-loopback", WARN)}
    found = machine_findings(m)
    assert faults(found) == expected, "what the job counts on is not to be seen"
    absent = {"python-path", "library-path", "nccl-settings", "debug-settings", "proxy"}
    assert {item.rule for item in found if item.status == PASS} == absent, "what could not be looked at does not pass"
    m.cluster, m.expects.gpus, m.expects.nodes = {}, None, 1
    assert faults(machine_findings(m)) == set()


def test_a_login_node_is_no_compute_node() -> None:
    """It has no GPUs, small limits, a firewall of its own: none of this is a fault there."""
    poor: Patch = {
        "memlock_bytes": 65536, "nofile": 256, "nproc": 100, "shm_bytes": 64 << 20, "shm_free_bytes": 1, "affinity": 1,
        "memory_available_bytes": 10**9, "own_addresses": ["127.0.1.1"], "nics": [], "rdma_devices": [], "cuda_init": None,
        "glibc": "2.17", "kernel": "3.10.0", "driver": "", "environment.HF_HOME": "/shared/hf",
    }  # fmt: skip
    assert faults(looked({**LOGIN, **poor})) == set()
    assert len(faults(looked({**poor, "place": "step"}))) > 5


# --- between nodes -----------------------------------------------------------------------------------------------------


def several(odd: Patch) -> list[Machine]:
    """Three nodes, the last of which is another."""
    return [machine({"hostname": "gpu01"}), machine({"hostname": "gpu02"}), machine({"hostname": "gpu03", **odd})]


def between(machines: list[Machine]) -> list[Finding]:
    return list(run(checks(NODES), JobNodes(machines)))


def test_nodes_that_are_alike_pass() -> None:
    """Three of one kind."""
    found = between(several({}))
    assert {item.status for item in found} == {PASS}
    assert {item.rule for item in found} == {one.rule.id for one in checks(NODES)} - {"nodes-clock", "node-silent"}


@pytest.mark.parametrize(("rule", "status", "odd", "words"), **numbered(COMPARED))
def test_the_odd_node_is_named(rule: str, status: str, odd: Patch, words: str) -> None:
    """Which one it is, and by what it differs."""
    bad = [item for item in between(several(odd)) if item.status != PASS]
    assert {(item.rule, item.status) for item in bad} == {(rule, status)}
    assert words in "; ".join(item.found for item in bad) and all(item.fix for item in bad)


def test_clocks_are_judged_by_the_times_of_asking() -> None:
    """Asked at 1000, answered at 1003: what lies between is no skew that could be known."""
    for remote, status, words in (
        (1000.5, PASS, "within"), (1003.9, PASS, "within"), (1012.0, WARN, "gpu01 by +9.0 s"),
        (940.0, WARN, "gpu01 by -60.0 s"),
        (2000.0, FAIL, "gpu01 by +997.0 s"),
    ):  # fmt: skip
        job = JobNodes(
            [machine({"time": remote}), machine({"hostname": "gpu02", "time": 1001.0})], started=1000.0, ended=1003.0
        )
        found = [item for item in run(checks(NODES), job) if item.rule == "nodes-clock"]
        assert [(item.status, words in item.found) for item in found] == [(status, True)]


TWINS: list[Patch] = [
    {"memory_bytes": int(GOOD["memory_bytes"] * 0.99), "shm_bytes": int(GOOD["shm_bytes"] * 0.999)},
    {"mounts.3.source": "10.0.0.8:/export"},
    {"mounts": GOOD["mounts"][:3], "automounts": ["/shared"]},
    {"mounts.+": {"point": "/tmp/rootfs-17/root", "kind": "fuse.squashfuse_ll", "source": "x.sif"}},
    {"python": "3.11.4"},
    {"driver": "", "kernel": "", "memory_bytes": None, "nics": [], "packages": [], "shm_bytes": None, "python": ""},
]


@pytest.mark.parametrize("odd", TWINS)
def test_what_twins_differ_by_is_no_difference(odd: Patch) -> None:
    """Some MB that firmware keeps, another address of one server, what is mounted when it is used, an image's own mounts; and
    what a node does not tell: a container without lspci, a bond that hides its speed."""
    assert {item.status for item in between(several(odd))} <= {PASS}


# --- before a job ------------------------------------------------------------------------------------------------------


def before_a_job(monkeypatch: pytest.MonkeyPatch, facts: Patch) -> tuple[list[str], list[Any]]:
    """Preflight on one node with these facts: what it says."""
    found = machine_findings(machine(facts))
    monkeypatch.setattr(preflight, "look", lambda *_args, **_words: preflight.NodeReports({"gpu01": machine(facts).facts}))
    monkeypatch.setattr(preflight, "findings", lambda *_args: found)
    messages: list[str] = []
    given = Allocation("7", 0, ("gpu01",), 0, 2, 1, None)
    preflight.check(load_cluster(None), given, 8, gpus=True, binds=[], say=messages.append, log=lambda *_args, **_words: None)
    return messages, found


def test_what_may_be_harmless_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that was reset since, a full disk that the job does not write to, a name that no rank asks for."""
    locks = {"probes.1.ok": False, "probes.1.message": "No locks available"}
    harmless = {"gpu-xid": {"xids.+": XID.format(79)}, "gpu-ecc": {"gpus.5.ecc_uncorrected": 2}, "flock": locks}
    for rule, facts in {**harmless, "disk-full": {"mounts.0.free_bytes": 0}, "node-names": {"names.gpu02": []}}.items():
        messages, found = before_a_job(monkeypatch, facts)
        assert [item.rule for item in found if item.status == FAIL] == [rule]
        assert any(line.startswith(f"FAIL    {rule}") for line in messages) and any("continues" in line for line in messages)
