"""The whole check between machines whose links have rates that are known: network namespaces at a switch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.nccl_check.wires import wires

ONE_WAY = ["--collectives", "all_gather,all_reduce,p2p", "--min", "256K", "--max", "4M", "--iterations", "6"]
WIRE = 0.95
"""What is left of a rate beside the headers of Ethernet, IP and TCP, with frames of 1500 or 1400 bytes."""


def best(document: dict, collective: str, scope: str = "world") -> float:  # type: ignore[type-arg]
    """Bus bandwidth of the largest size, GB/s."""
    found = [e for e in document["results"] if (e["scope"], e["collective"]) == (scope, collective)]
    return float(max(found, key=lambda e: e["bytes"])["busbw_gb_s"])


def rule(document: dict, name: str) -> list[dict]:  # type: ignore[type-arg]
    """The findings of one rule."""
    return [finding for finding in document["verdict"]["findings"] if finding["rule"] == name]


@pytest.mark.jobs
def test_the_measured_rate_follows_the_shaped_one(tmp_path: Path) -> None:
    """Two rates: the figures are those of the wire, and their ratio is that of the rates. gloo is called gloo."""
    with wires(tmp_path, 2) as net:
        file, found = net.cluster_file(), {}
        for mbit in (100, 400):
            for node in (0, 1):
                net.shape(node, mbit)
            found[mbit], code = net.check([*ONE_WAY, "--seconds", "12"], out=f"at-{mbit}").end()
            assert code in (0, 1, 2)
    for mbit, document in found.items():
        assert document["backend"] == "gloo"
        assert document["transport"] == "gloo TCP on eth0"
        assert document["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"
        assert {tuple(pair["nodes"]) for pair in document["per_pair"]} == {("n1", "n2"), ("n2", "n1")}
        largest = {tuple(pair["nodes"]): pair for pair in sorted(document["per_pair"], key=lambda pair: int(pair["bytes"]))}
        for pair in largest.values():
            assert pair["busbw_gb_s"] == pytest.approx(WIRE * mbit / 8e3, rel=0.15), pair
        # All of gloo's all-reduce is on the wire in both directions at once.
        assert 0.6 < best(document, "all_reduce") / (mbit / 8e3) < 1.0
        assert [facts["hostname"] for facts in document["facts"]] == ["n1", "n2"]
        assert not document["hung"]
        assert all(entry["correct"] for entry in document["results"])
    for collective in ("all_gather", "all_reduce"):
        ratio = best(found[400], collective) / best(found[100], collective)
        assert ratio == pytest.approx(4.0, rel=0.25), collective
    assert (tmp_path / "wires.nccl-check.json").exists(), "a result of the cluster's own nodes is kept for plan"
    assert file.exists()


def test_the_slow_node_of_three_is_found(tmp_path: Path) -> None:
    """One node at a quarter of the others' rate: the verdict names it, and no other."""
    words = ["--collectives", "all_gather,p2p", "--scopes", "world,pair", "--min", "1M", "--max", "1M", "--iterations", "5"]
    with wires(tmp_path, 3) as net:
        net.cluster_file(gbit=0.4)
        for node, mbit in enumerate((400, 400, 100)):
            net.shape(node, mbit)
        document, code = net.check([*words, "--seconds", "12"]).end()
    assert code == 2
    slow = [finding for finding in rule(document, "slow-node") if finding["status"] in ("fail", "warn")]
    assert [finding["where"] for finding in slow] == ["n3"]
    assert rule(document, "inter-speed")[0]["status"] == "fail", "all of them wait for it"
    assert len({tuple(pair["nodes"]) for pair in document["per_pair"]}) == 6


@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "mbit"), [(2, 30), (2, 300), (2, 1000), (3, 60), (3, 500)])
def test_evenly_shaped_nodes_are_clean(tmp_path: Path, count: int, mbit: int) -> None:
    """Whatever the rate: nothing is called slow or hung where every line carries what the cluster file says."""
    with wires(tmp_path, count) as net:
        net.cluster_file(gbit=mbit / 1000)
        for node in range(count):
            net.shape(node, mbit)
        document, code = net.check(["--seconds", "20"]).end()
    assert code == 0, document["verdict"]["headline"]
    assert document["seconds"] <= 20 + 60
    ways = [entry for entry in document["per_pair"] if entry["collective"] == "p2p"]
    assert len({tuple(entry["nodes"]) for entry in ways}) == count * (count - 1)


@pytest.mark.jobs
def test_one_slow_direction_is_found(tmp_path: Path) -> None:
    """What a node sends is slow, what it gets is not: it is named, and that it is the sending."""
    with wires(tmp_path, 2) as net:
        net.cluster_file(gbit=0.4)
        for node in (0, 1):
            net.shape(node, 400)
        net.do(1, "tc qdisc replace dev eth0 root tbf rate 80mbit burst 16kb latency 100ms")
        document, code = net.check(["--seconds", "20"]).end()
    assert code == 2
    (found,) = [finding for finding in rule(document, "asymmetric") if finding["status"] == "fail"]
    assert found["where"] == "n2" and "n2 sends" in found["found"]


@pytest.mark.jobs
def test_a_stopped_rank_is_bounded_and_named(tmp_path: Path) -> None:
    """A rank that is stopped in a collective ends that collective only: the others are measured, without it."""
    with wires(tmp_path, 3) as net:
        net.cluster_file()
        checking = net.check(["--seconds", "30", "--max", "4M"])
        os.kill(checking.rank_pid(1), signal.SIGSTOP)
        document, code = checking.end()
    assert code == 2
    (hung,) = document["hung"]
    assert hung["hosts"] == ["n2"]
    finding = rule(document, "collective-hung")[0]
    assert (finding["status"], hung["collective"] in finding["found"]) == ("fail", True)
    measured = {entry["collective"] for entry in document["results"]}
    assert {"all_gather", "all_reduce", "broadcast", "p2p", "reduce_scatter"} - measured <= {hung["collective"]}
    assert not (tmp_path / "wires.nccl-check.json").exists(), "a plan must not take the figures of a faulty cluster"
    assert document["seconds"] <= 30 + 60, "--seconds bounds all of it"


@pytest.mark.jobs
def test_an_interface_that_is_down_is_named(tmp_path: Path) -> None:
    """Nobody reaches that node: the check ends within its time and says which one it is."""
    with wires(tmp_path, 2) as net:
        net.cluster_file()
        net.do(1, "ip link set eth0 down")
        document, code = net.check(["--seconds", "10", "--max", "1M"]).end()
    assert code == 2
    assert [(entry["collective"], entry["hosts"]) for entry in document["hung"]] == [("init", ["n2"])]
    assert document["results"] == []
    assert document["verdict"]["status"] == "fail"
    assert document["seconds"] <= 10 + 60


@pytest.mark.jobs
def test_too_little_time_is_told(tmp_path: Path) -> None:
    """On 20 Mbit/s ten seconds are not enough for 64 MiB: what is left out is reported, nothing is called hung."""
    with wires(tmp_path, 2) as net:
        net.cluster_file()
        for node in (0, 1):
            net.shape(node, 20)
        document, _ = net.check(["--seconds", "10", "--max", "64M"]).end()
    assert document["hung"] == []
    assert {entry["bytes"] for entry in document["left_out"]} >= {64 << 20, 16 << 20}
    assert all(entry["reason"] for entry in document["left_out"])
    assert document["results"], "small sizes had time"
