"""Each rule of a machine fires on the facts of a bad one, and on those of a good one nothing does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from clustertune.check.machine_cuda import INIT_CODES, MINIMUM_DRIVER

from clustertune.check import report
from clustertune.check.machine_gpu import XIDS, read_xid
from clustertune.check.machine_network import matches
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Finding, checks
from clustertune.host.facts import from_dict
from tests.doctor.machine_cases import CASES, GOOD, LOGIN, TWO_PCIE_GPUS, Patch, machine
from tests.doctor.machine_edges import EDGES

RULES = [one.rule for one in checks(MACHINE)]


def faults(found: list[Finding]) -> set[tuple[str, str]]:
    return {(item.rule, item.status) for item in found if item.status in (WARN, FAIL)}


def test_nothing_is_wrong_with_a_good_node() -> None:
    """A doctor that cries wolf is switched off. Most rules look at something here: they say so."""
    found = report.machine_findings(machine())
    assert faults(found) == set() and report.broken.rule.id not in {item.rule for item in found}
    passed = {item.rule for item in found if item.status == PASS}
    assert len(passed) > 45, sorted({rule.id for rule in RULES} - passed)


@pytest.mark.parametrize(
    ("rule", "status", "facts", "cluster", "expects", "also"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_a_bad_one_is_found(rule: str, status: str, facts: Patch, cluster: Patch, expects: dict[str, Any], also: str) -> None:
    """One fact that differs gives one rule's fault, with a remedy, and no other's."""
    m = machine(facts, cluster, **expects)
    found = report.machine_findings(m)
    mine = [item for item in found if item.rule == rule and item.status == status]
    assert mine, [item for item in found if item.status != PASS]
    assert all(item.fix and item.found and item.where == m.facts.hostname for item in mine)
    assert {name for name, _ in faults(found)} - {also} == {rule}
    assert report.broken.rule.id not in {item.rule for item in found}


@pytest.mark.parametrize(
    ("rule", "status", "facts", "cluster", "expects"), EDGES, ids=[f"{i}-{case[0]}" for i, case in enumerate(EDGES)]
)
def test_where_a_rule_keeps_silent(rule: str, status: str, facts: Patch, cluster: Patch, expects: dict[str, Any]) -> None:
    """Next to each bad machine one that is well, or on which the same is worse, or less bad."""
    found = report.machine_findings(machine(facts, cluster, **expects))
    worst = {item.status for item in found if item.rule == rule}
    assert (FAIL if FAIL in worst else WARN if WARN in worst else "") == status, [i for i in found if i.rule == rule]
    assert report.broken.rule.id not in {item.rule for item in found}


def test_every_rule_has_a_bad_case_and_a_good_one() -> None:
    """A rule that nothing can set off, or that never says that all is well, is none."""
    bad = {case[0] for case in CASES}
    assert {rule.id for rule in RULES} - bad == set() and bad - {rule.id for rule in RULES} == set()
    good = [
        machine(),
        machine(TWO_PCIE_GPUS, gpus=2),
        machine({"environment.OMP_NUM_THREADS": "16", "container": "docker", "mounts.0.kind": "overlay"}),
        machine({"place": "here", "slurm_silent": "", "slurm": {"AccountingStorageType": "accounting_storage/slurmdbd",
                 "GresTypes": "gpu", "ConstrainDevices": "yes", "TaskPlugin": "task/cgroup"}}),
        machine({"mounts.+": {"point": "/pool", "kind": "fuse.mergerfs", "options": ["rw", "branches=/tmp/a:/tmp/b"]}},
                {"storage.pool": {"mount": "/pool"}}),
        machine({}, {"network": {"interface": "bond0", "kind": "roce", "gbit": 200}}),
    ]  # fmt: skip
    found = [item for one in good for item in report.machine_findings(one)]
    passed = {item.rule for item in found if item.status == PASS}
    silent_when_good = {"pool-mmap", "nfs-over-fuse", "inodes"}
    assert {rule.id for rule in RULES} - passed == silent_when_good
    assert {name for name, _ in faults(found)} <= {"cuda-visible-devices", "rdma-verbs"}


@pytest.mark.parametrize("key", sorted(GOOD))
def test_any_fact_may_be_missing(key: str) -> None:
    """What could not be seen is unknown: it must neither be taken for a fault nor break a rule."""
    if key in ("hostname", "place"):
        return
    empty: dict[type, Any] = {list: [], dict: {}, str: ""}
    m = machine({key: empty.get(type(GOOD[key]))})
    found = report.machine_findings(m)
    assert report.broken.rule.id not in {item.rule for item in found}
    allowed = {"rdma": {"rdma-port"}, "rdma_devices": {"rdma-verbs"}, "verbs_providers": {"rdma-verbs"}, "gpus": {"gpu-driver"},
               "own_addresses": {"hostname-loopback"}, "nics": set()}  # fmt: skip
    bad = {name for name, _ in faults(found)} - allowed.get(key, set())
    assert bad - ({"gpu-count"} if key in ("gpus", "cuda_devices") else set()) == set()


def test_facts_without_anything_are_no_fault() -> None:
    """An old kernel in an odd container."""
    m = machine()
    m.facts = from_dict({"hostname": "x", "place": "here"})
    expected = {("gpu-count", FAIL), ("hostname-loopback", WARN)}
    found = report.machine_findings(m)
    assert faults(found) == expected, "what the job counts on is not to be seen"
    absent = {"python-path", "library-path", "preload", "nccl-settings", "debug-settings", "rank-variables", "proxy"}
    assert {item.rule for item in found if item.status == PASS} == absent, "what could not be looked at does not pass"
    m.cluster, m.expects.gpus, m.expects.nodes = {}, None, 1
    assert faults(report.machine_findings(m)) == set()


def test_a_login_node_is_no_compute_node() -> None:
    """It has no GPUs, small limits, a firewall of its own: none of this is a fault there."""
    poor: Patch = {
        "memlock_bytes": 65536, "nofile": 256, "nproc": 100, "shm_bytes": 64 << 20, "shm_free_bytes": 1, "affinity": 1,
        "memory_available_bytes": 10**9, "own_addresses": ["127.0.1.1"], "nics": [], "rdma_devices": [], "cuda_init": None,
        "glibc": "2.17", "kernel": "3.10.0", "driver": "", "environment.HF_HOME": "/shared/hf",
    }  # fmt: skip
    assert faults(report.machine_findings(machine({**LOGIN, **poor}))) == set()
    assert len(faults(report.machine_findings(machine({**poor, "place": "step"})))) > 8


def test_a_rehearsal_claims_more_than_there_is() -> None:
    """The throw-away Slurm has GPUs that are names, and more cores than the machine."""
    patch: Patch = {
        "environment.SLURM_CLUSTER_NAME": "rehearsal", "gpus": [], "driver": "", "nvidia_devices": 0, "cuda_devices": None,
        "cuda_init": None, "gpu_files": [], "rdma": [], "rdma_devices": [], "cpus": 2, "affinity": 2, "affinity_list": "0-1",
        "shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20, "memlock_bytes": 65536,
    }  # fmt: skip
    found = report.machine_findings(machine(patch, {"network": {"kind": "unknown"}}))
    assert {name for name, _ in faults(found)} == {"shm"} and ("shm", WARN) in faults(found)
    assert ("gpu-count", UNKNOWN) in {(item.rule, item.status) for item in found}


def test_harmless_xids_and_other_lines_are_passed_over() -> None:
    """A program's own fault (13, 31, 43, 45) is not the GPU's."""
    for line in ("[1.0] NVRM: Xid (PCI:0000:18:00): 31, pid=1", "NVRM: Xid (0000:03:00): 14, Channel 1", "nonsense"):
        found = report.machine_findings(machine({"xids.+": line}))
        assert faults(found) == set() and report.broken.rule.id not in {item.rule for item in found}
    assert read_xid("kernel: NVRM: Xid (PCI:0002:00:00): 79, GPU has fallen") == ("0002:00:00", 79, None)
    assert read_xid("[ 12.5] NVRM: Xid (PCI:0000:01:00): 48, pid") == ("0000:01:00", 48, 12.5)
    assert read_xid("NVRM: GPU at PCI:0000:01:00") is None
    assert all(status in (WARN, FAIL) and meaning and fix for status, meaning, fix in XIDS.values())


def test_interfaces_are_matched_as_nccl_does() -> None:
    """Prefixes, exact names after =, others after ^: its guide's own examples."""
    names = ["lo", "eth0", "eth1", "docker0", "bond0", "bond0.2093"]
    assert matches("eth", names) == ["eth0", "eth1"]
    assert matches("=eth0", names) == ["eth0"]
    assert matches("=eth0,eth1", names) == ["eth0", "eth1"]
    assert matches("bond0", names) == ["bond0", "bond0.2093"]
    assert matches("^docker", names) == ["eth0", "eth1", "bond0", "bond0.2093"]
    assert matches("^=docker0", names) == ["eth0", "eth1", "bond0", "bond0.2093"]
    assert matches("ib", names) == []


def test_tables_are_whole() -> None:
    """Each code has words and a remedy; each CUDA a driver that is newer than the one before."""
    assert all(meaning and fix for meaning, fix in INIT_CODES.values())
    assert [MINIMUM_DRIVER[k] for k in sorted(MINIMUM_DRIVER)] == sorted(MINIMUM_DRIVER.values())


def test_the_recorded_node_is_whole() -> None:
    """Facts survive JSON: what a node prints is what is judged."""
    assert json.loads(json.dumps(from_dict(GOOD).as_dict())) == from_dict(GOOD).as_dict()
