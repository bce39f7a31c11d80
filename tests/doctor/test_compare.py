"""What differs between nodes is found, with the names of the odd ones; nodes that are alike pass."""

from __future__ import annotations

import pytest

from clustertune.check import report
from clustertune.check.machine import Machine
from clustertune.check.nodes import JobNodes
from clustertune.check.rule import FAIL, NODES, PASS, WARN, Finding, checks
from tests.doctor.machine_cases import GOOD, Patch, machine

BRICKS = [{"node": "gpu02", "path": "/data", "mount": "/bricks/gpu02"}]
BRICK = {"point": "/bricks/gpu02", "kind": "nfs4", "source": "gpu02:/data", "options": ["rw", "hard"]}

CASES: list[tuple[str, str, Patch, str]] = [
    ("nodes-driver", WARN, {"driver": "570.124.06"}, "580.95.05: gpu01, gpu02; 570.124.06: gpu03"),
    ("nodes-driver", FAIL, {"cuda_driver": "12.8"}, "12.8: gpu03"),
    ("nodes-packages", FAIL, {"packages.2.version": "2.27.3"}, "nvidia-nccl-cu13: 2.29.7: gpu01, gpu02; 2.27.3: gpu03"),
    ("nodes-packages", FAIL, {"packages": GOOD["packages"][:-1]}, "trl: 1.16.0: gpu01, gpu02; none: gpu03"),
    ("nodes-packages", FAIL, {"python": "3.12.1"}, "Python: 3.11"),
    (
        "nodes-packages",
        WARN,
        {"packages.+": {"name": "wandb", "version": "0.1", "location": "/x"}},
        "wandb: none: gpu01, gpu02",
    ),
    ("nodes-gpus", FAIL, {"gpus": GOOD["gpus"][:7]}, "7 x NVIDIA H100 80GB HBM3: gpu03"),
    ("nodes-gpus", FAIL, {"gpus": []}, "none: gpu03"),
    ("nodes-system", WARN, {"kernel": "6.8.0-44-generic"}, "kernel: 6.8.0-45-generic: gpu01, gpu02"),
    ("nodes-system", WARN, {"memory_bytes": 1 << 40}, "1024 GiB: gpu03"),
    ("nodes-limits", WARN, {"memlock_bytes": 65536}, "memlock: unlimited: gpu01, gpu02; 66 kB: gpu03"),
    ("nodes-limits", WARN, {"shm_bytes": 64 << 20}, "shared memory: 1000 GB: gpu01, gpu02; 67 MB: gpu03"),
    ("nodes-limits", WARN, {"affinity": 1}, "cores: 192: gpu01, gpu02; 1: gpu03"),
    ("nodes-network", FAIL, {"nics.0.mtu": 1500}, "MTU: 9000: gpu01, gpu02; 1500: gpu03"),
    ("nodes-network", WARN, {"nics.0.mbit": 100000}, "speed in Mbit/s: 200000: gpu01, gpu02; 100000: gpu03"),
    ("nodes-network", WARN, {"rdma.0.active": False}, "RDMA: 8 active ports"),
    ("nodes-mounts", WARN, {"mounts": GOOD["mounts"][:3]}, "/shared is not mounted on gpu03"),
    (
        "nodes-mounts",
        WARN,
        {"mounts.3.source": "10.0.8.9:/export"},
        "/shared is mounted from 10.0.0.9:/export, 10.0.8.9:/export",
    ),
]


def several(odd: Patch) -> list[Machine]:
    """Three nodes, the last of which is another."""
    return [machine({"hostname": "gpu01"}), machine({"hostname": "gpu02"}), machine({"hostname": "gpu03", **odd})]


def between(machines: list[Machine]) -> list[Finding]:
    return list(report.run(checks(NODES), JobNodes(machines)))


def test_nodes_that_are_alike_pass() -> None:
    """Three of one kind."""
    found = between(several({}))
    assert {item.status for item in found} == {PASS}
    assert {item.rule for item in found} == {one.rule.id for one in checks(NODES)} - {"nodes-clock", "node-silent"}


@pytest.mark.parametrize(("rule", "status", "odd", "words"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_the_odd_node_is_named(rule: str, status: str, odd: Patch, words: str) -> None:
    """Which one it is, and by what it differs."""
    bad = [item for item in between(several(odd)) if item.status != PASS]
    assert {(item.rule, item.status) for item in bad} == {(rule, status)}
    assert words in "; ".join(item.found for item in bad) and all(item.fix for item in bad)


def test_one_node_has_nothing_to_differ_from() -> None:
    """A job of one node."""
    assert between([machine()]) == []


def test_a_node_that_does_not_tell_is_no_odd_one() -> None:
    """A container without lspci, a bond that hides its speed."""
    silent = {"driver": "", "kernel": "", "memory_bytes": None, "nics": [], "packages": [], "shm_bytes": None, "python": ""}
    bad = [item for item in between(several(silent)) if item.status != PASS]
    assert bad == []


def test_a_brick_is_local_on_its_own_node() -> None:
    """Every other node has it by NFS: that is not a difference."""
    cluster: Patch = {"storage.bricks": BRICKS}
    machines = [machine({"hostname": "gpu01", "mounts.+": BRICK}, cluster), machine({"hostname": "gpu02"}, cluster)]
    assert [item.status for item in between(machines) if item.rule == "nodes-mounts"] == [PASS]


@pytest.mark.parametrize(
    ("remote", "status", "words"),
    [
        (1000.5, PASS, "within"),
        (1003.9, PASS, "within"),
        (1012.0, WARN, "gpu01 by +9.0 s"),
        (940.0, WARN, "gpu01 by -60.0 s"),
        (2000.0, FAIL, "gpu01 by +997.0 s"),
    ],
)
def test_clocks_are_judged_by_the_times_of_asking(remote: float, status: str, words: str) -> None:
    """Asked at 1000, answered at 1003: what lies between is no skew that could be known."""
    job = JobNodes([machine({"time": remote}), machine({"hostname": "gpu02", "time": 1001.0})], started=1000.0, ended=1003.0)
    found = [item for item in report.run(checks(NODES), job) if item.rule == "nodes-clock"]
    assert [(item.status, words in item.found) for item in found] == [(status, True)]


def test_a_silent_node_fails() -> None:
    """With the reason that is known."""
    job = JobNodes([], {"gpu01": "no answer", "gpu02": "no answer within 80 s"})
    found = list(report.run(checks(NODES), job))
    assert [(item.rule, item.status, item.where) for item in found] == [
        ("node-silent", FAIL, "gpu01"),
        ("node-silent", FAIL, "gpu02"),
    ]
    assert found[1].found == "no answer within 80 s"


@pytest.mark.parametrize(
    "odd",
    [
        {"memory_bytes": int(GOOD["memory_bytes"] * 0.99), "shm_bytes": int(GOOD["shm_bytes"] * 0.999)},
        {"mounts.3.source": "10.0.0.8:/export"},
        {"mounts": GOOD["mounts"][:3], "automounts": ["/shared"]},
        {"mounts.+": {"point": "/tmp/rootfs-17/root", "kind": "fuse.squashfuse_ll", "source": "x.sif"}},
        {"python": "3.11.4"},
    ],
)
def test_what_twins_differ_by_is_no_difference(odd: Patch) -> None:
    """Some MB that firmware keeps, another address of one server, what is mounted when it is used, an image's own mounts."""
    assert {item.status for item in between(several(odd))} == {PASS}
