"""What is tried to make it faster, and that a difference within the noise is not a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.launch.environment import environment
from clustertune.nccl_check import tune
from clustertune.nccl_check.tune import TuneCandidate
from tests.command import REPO
from tests.launch.machines import machine
from tests.nccl_check.test_result import document

CLUSTER = machine()


def nic(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "up": True, "addresses": ["10.0.0.1/24"], "kind": "ethernet", **more}


def made(baseline: list[float], *others: list[float], failed: str = "") -> dict[str, Any]:
    """The part of a document, of repeats."""
    tried = [TuneCandidate({"NCCL_X": str(n)}, values, failed) for n, values in enumerate(others)]
    return tune._document("world", 1 << 20, TuneCandidate({}, baseline), tried, "")


def test_sockets_are_tried_within_nccls_limit() -> None:
    """The product of threads and sockets is 64 at most; what is set already is the baseline."""
    now = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    found = tune.candidates(document(transport="NET/Socket", environment=now), "eth0")
    pairs = [(int(c["NCCL_SOCKET_NTHREADS"]), int(c["NCCL_NSOCKS_PERTHREAD"])) for c in found if "NCCL_SOCKET_NTHREADS" in c]
    assert pairs
    assert all(threads <= 16 and threads * sockets <= 64 for threads, sockets in pairs)
    assert (4, 4) not in pairs
    assert not any("NCCL_IB_QPS_PER_CONNECTION" in c for c in found)


def test_only_what_carries_the_bytes_is_tried() -> None:
    """InfiniBand has queue pairs, one node has neither them nor sockets, gloo has interfaces only."""
    assert any("NCCL_IB_QPS_PER_CONNECTION" in c for c in tune.candidates(document(transport="NET/IB"), None))
    inside = tune.candidates(document(nodes=1, transport="P2P/CUMEM"), None)
    assert {name for c in inside for name in c} == {"NCCL_MIN_NCHANNELS", "NCCL_BUFFSIZE"}
    assert tune.candidates(document(backend="gloo", nodes=1), None) == []
    now = {"NCCL_MIN_NCHANNELS": "16"}  # what is set already is the baseline
    found = tune.candidates(document(nodes=1, transport="P2P/CUMEM", environment=now), None)
    assert {"NCCL_MIN_NCHANNELS": "8"} in found and now not in found


def test_an_interface_must_be_on_every_node() -> None:
    """Bridges of containers and loopback reach no other node."""
    one = [nic("eth0"), nic("eth1"), nic("ib0"), nic("docker0"), nic("lo", kind="loopback"), nic("eth9", addresses=[])]
    other = [nic("eth0"), nic("eth1"), nic("docker0"), nic("lo", kind="loopback"), nic("eth9"), nic("ib0", up=False)]
    facts = [{"hostname": "n1", "nics": one}, {"hostname": "n2", "nics": other}]
    found = document(backend="gloo", facts=facts, environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert tune.candidates(found, "eth0") == [{"GLOO_SOCKET_IFNAME": "eth1"}]
    assert tune.candidates({**found, "facts": facts[:1]}, "eth0") == [], "of one node nothing is known"


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        ([1.0, 1.6, 1.05], [1.5, 1.6, 1.55]), ([1.0, 1.01, 1.02], [1.03, 1.03, 1.03]), ([1.0], [5.0, 5.0]), ([1.0, 1.0], [5.0]),
        ([2.0, 2.0], [1.0, 1.0]), ([], [1.0, 1.0]),
    ],
)  # fmt: skip
def test_no_claim_within_the_noise(baseline: list[float], candidate: list[float]) -> None:
    """Every repeat beats every one of the baseline, by more than nobody would notice; once is not enough."""
    found = made(baseline, candidate)
    assert not found["candidates"][0]["better"] and not found["lines"] and found["note"]
    found = made([1.0, 1.1, 1.05], [2.0, 2.1, 1.9])
    assert found["candidates"][0]["better"] and found["lines"] and not found["note"]


def test_the_best_is_recommended_and_a_failure_told() -> None:
    """With its lines to set; a candidate that made the ranks fail is not a candidate."""
    found = made([1.0, 1.0], [2.0, 2.0], [3.0, 3.0])
    assert found["lines"] == ["NCCL_X=1"]
    assert [row["ratio"] for row in found["candidates"]] == [2.0, 3.0]
    text = "\n".join(tune.lines(found, CLUSTER, None))
    assert "NCCL_X=1: 3.00 times" in text and "set for every rank:" in text
    assert "for training" not in text, "a cluster that was found by looking has no file"
    broken = made([1.0, 1.0], [], failed="no route to host")
    assert broken["candidates"][0]["status"] == "failed"
    assert "no route to host" in "\n".join(tune.lines(broken, CLUSTER, None))


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        ({}, {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "4"}),
        ({"NCCL_ALGO": "^Tree"}, {"NCCL_BUFFSIZE": "8388608"}),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, {"NCCL_SOCKET_IFNAME": "=eth1"}),
    ],
)
def test_what_is_printed_can_be_pasted(tmp_path: Path, own: dict[str, str], settings: dict[str, str]) -> None:
    """Into the cluster's file, from where training and the next check take it; what stands there already stays."""
    keys = {**own, **settings}
    cluster = CLUSTER.model_copy(update={"network": CLUSTER.network.model_copy(update={"environment": own})})
    shown = tune.lines(
        {**made([1.0, 1.0]), "lines": [f"{name}={value}" for name, value in settings.items()]}, cluster, "x.yaml"
    )
    printed = shown[shown.index("for training, in x.yaml:") + 1 :]
    at = [line.strip() for line in printed].index("environment:")
    text = (REPO / "ops/clusters/rno-rtxpro6000.yaml").read_text()
    old = "network: {interface: bond0, kind: ethernet, gbit: 100, subnet: 10.21.133.0/24}"
    new = "network:\n  interface: bond0\n  kind: ethernet\n  gbit: 100\n  subnet: 10.21.133.0/24\n"
    file = tmp_path / "rno-rtxpro6000.yaml"
    file.write_text(text.replace(old, new + "\n".join(line[2:] for line in printed[at : at + 1 + len(keys)])))
    found = load_cluster(str(file))
    assert found.network.environment == keys
    derived = environment(found, world_size=16, ranks_per_node=8, cpus_per_node=256, job="1", cpu_only=False)
    assert {setting.name: setting.value for setting in derived}.items() >= keys.items()


def test_another_interface_is_a_key_of_its_own() -> None:
    """Which both libraries and the checks before a job take it from."""
    assert tune.to_paste(["GLOO_SOCKET_IFNAME=eth1"], CLUSTER)[:1] == ["network:"]
    assert tune.to_paste(["NCCL_SOCKET_IFNAME==eth1"], CLUSTER)[1].startswith("  interface: eth1 ")
