"""The whole check between machines whose links have rates that are known: nodes of a temporary Slurm, without a job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from clustertune.testbed.cluster import enter
from clustertune.testbed.files import SUBNET
from tests.command import REPO
from tests.slurm import FaultyCluster, make, wait_for

ONE_WAY = ["--collectives", "all_gather,all_reduce,p2p", "--min", "256K", "--max", "4M", "--iterations", "6"]
WIRE = 0.95
"""What is left of a rate beside the headers of Ethernet, IP and TCP, with frames of 1500 or 1400 bytes."""
PATIENCE = 300.0
"""Seconds that a check may take on a loaded machine."""


class Check:
    """``clustertune nccl-check`` on every node at once; the first one has the result."""

    def __init__(self, net: FaultyCluster, folder: Path, count: int, words: Sequence[str], gbit: float = 1.0) -> None:
        self.file, self.out, self.calls = folder / "wires.yaml", folder / f"out-{len(list(folder.iterdir()))}", []
        hosts = "".join(f"  - {{name: node{n}, address: {SUBNET}.{n}, roles: [compute]}}\n" for n in range(1, count + 1))
        self.file.write_text(
            f"name: wires\nnodes:\n{hosts}"
            "compute: {gpus: 0, interconnect: none, cores: 2, threads: 2, memory_gb: 4}\n"
            f"network: {{interface: eth0, kind: ethernet, gbit: {gbit:g}, subnet: {SUBNET}.0/24}}\n"
        )
        for index in range(count):
            options = ["--cluster", str(self.file), "--node-rank", str(index), "--out", str(self.out), *words]
            command = [sys.executable, "-m", "clustertune", "nccl-check", *options, *(["--json"] if index == 0 else [])]
            with Path(f"{self.out}-{index}.err").open("wb") as err:
                self.calls.append(
                    subprocess.Popen(
                        [*enter(net._inits[index + 1], net.prefix, REPO), *command], cwd=REPO, stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=err, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )  # fmt: skip

    def rank_pid(self, rank: int) -> int:
        """The process of a rank, once it has begun to measure."""
        path = self.out / "round-1" / f"rank-{rank}.jsonl"
        wait_for(lambda: path.exists() and '"event":"done"' in path.read_text(), "the first measurement", PATIENCE)
        below = psutil.Process(self.calls[rank].pid).children(recursive=True)
        alive = [child for child in below if child.status() != psutil.STATUS_ZOMBIE]
        return next(child.pid for child in alive if any("nccl_check.rank" in word for word in child.cmdline()))

    def end(self) -> tuple[dict[str, Any], int]:
        """The document of the first node and its exit code; all calls are over then."""
        try:
            answer = self.calls[0].communicate(timeout=PATIENCE)[0]
            for call in self.calls[1:]:
                call.communicate(timeout=60)
        finally:
            for call in self.calls:
                if call.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(call.pid, signal.SIGKILL)
                    call.communicate()
        errors = "".join(path.read_text() for path in self.out.parent.glob(f"{self.out.name}-*.err"))
        assert answer.startswith(b"{"), f"no document: {answer[:200]!r} {errors}"
        return json.loads(answer), self.calls[0].returncode


@pytest.fixture(scope="module")
def nodes() -> Iterator[FaultyCluster]:
    """Three nodes."""
    with make(3) as cluster:
        yield cluster


@pytest.fixture
def net(nodes: FaultyCluster) -> Iterator[FaultyCluster]:
    """The same, whose links are whole and fast again afterwards."""
    yield nodes
    for index in (1, 2, 3):
        nodes.run(["tc", "qdisc", "del", "dev", "eth0", "root"], node=index, check=False)
        with contextlib.suppress(Exception):
            nodes._network_order("tc", "qdisc", "del", "dev", f"v{index}", "root")
        nodes.run(["ip", "link", "set", "eth0", "up"], node=index)


def shape(net: FaultyCluster, index: int, mbit: float, interface: str = "eth0", port: str = "v{}") -> None:
    """Limit what a node sends and, at its port of the switch, what it gets (Mbit/s). Only a small burst passes unlimited."""
    rule = f"root tbf rate {mbit:g}mbit burst 16kb latency 100ms".split()
    net.run(["tc", "qdisc", "replace", "dev", interface, *rule], node=index)
    if port:
        net._network_order("tc", "qdisc", "replace", "dev", port.format(index), *rule)


def best(document: dict[str, Any], collective: str) -> float:
    """Bus bandwidth of the largest size between all ranks, GB/s."""
    found = [e for e in document["results"] if (e["scope"], e["collective"]) == ("world", collective)]
    return float(max(found, key=lambda e: e["bytes"])["busbw_gb_s"])


def rule(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The findings of one rule."""
    return [finding for finding in document["verdict"]["findings"] if finding["rule"] == name]


@pytest.mark.jobs
def test_the_measured_rate_follows_the_shaped_one(net: FaultyCluster, tmp_path: Path) -> None:
    """Two rates: the figures are those of the wire, and their ratio is that of the rates. gloo is called gloo."""
    found = {}
    for mbit in (100, 400):
        for node in (1, 2):
            shape(net, node, mbit)
        found[mbit], code = Check(net, tmp_path, 2, [*ONE_WAY, "--seconds", "12"]).end()
        assert code in (0, 1, 2)
    for mbit, document in found.items():
        assert (document["backend"], document["transport"]) == ("gloo", "gloo TCP on eth0") and not document["hung"]
        assert document["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"
        assert [facts["hostname"] for facts in document["facts"]] == ["node1", "node2"]
        pairs = {tuple(pair["nodes"]): pair for pair in sorted(document["per_pair"], key=lambda pair: int(pair["bytes"]))}
        assert set(pairs) == {("node1", "node2"), ("node2", "node1")}
        for pair in pairs.values():  # the largest size of each
            assert pair["busbw_gb_s"] == pytest.approx(WIRE * mbit / 8e3, rel=0.15), pair
        # All of gloo's all-reduce is on the wire in both directions at once.
        assert 0.6 < best(document, "all_reduce") / (mbit / 8e3) < 1.0
        assert all(entry["correct"] for entry in document["results"])
    for collective in ("all_gather", "all_reduce"):
        assert best(found[400], collective) / best(found[100], collective) == pytest.approx(4.0, rel=0.25), collective
    assert (tmp_path / "wires.nccl-check.json").exists(), "a result of the cluster's own nodes is kept for plan"


def test_the_slow_node_of_three_is_found(net: FaultyCluster, tmp_path: Path) -> None:
    """One node at a quarter of the others' rate: the verdict names it, and no other."""
    for node, mbit in ((1, 400), (2, 400), (3, 100)):
        shape(net, node, mbit)
    words = ["--collectives", "all_gather,p2p", "--scopes", "world,pair", "--min", "1M", "--max", "1M", "--iterations", "5"]
    document, code = Check(net, tmp_path, 3, [*words, "--seconds", "12"], gbit=0.4).end()
    assert code == 2
    assert [item["where"] for item in rule(document, "slow-node") if item["status"] in ("fail", "warn")] == ["node3"]
    assert rule(document, "inter-speed")[0]["status"] == "fail", "all of them wait for it"
    assert len({tuple(pair["nodes"]) for pair in document["per_pair"]}) == 6


@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "mbit"), [(2, 30), (2, 1000), (3, 60), (3, 500)])
def test_evenly_shaped_nodes_are_clean(net: FaultyCluster, tmp_path: Path, count: int, mbit: int) -> None:
    """Whatever the rate: nothing is called slow or hung where every line carries what the cluster file says."""
    for node in range(1, count + 1):
        shape(net, node, mbit)
    document, code = Check(net, tmp_path, count, ["--seconds", "20"], gbit=mbit / 1000).end()
    assert code == 0, document["verdict"]["headline"]
    assert document["seconds"] <= 20 + 60
    ways = {tuple(entry["nodes"]) for entry in document["per_pair"] if entry["collective"] == "p2p"}
    assert len(ways) == count * (count - 1)


@pytest.mark.jobs
def test_one_slow_direction_is_found(net: FaultyCluster, tmp_path: Path) -> None:
    """What a node sends is slow, what it gets is not: it is named, and that it is the sending."""
    for node in (1, 2):
        shape(net, node, 400)
    shape(net, 2, 80, port="")
    document, code = Check(net, tmp_path, 2, ["--seconds", "20"], gbit=0.4).end()
    assert code == 2
    (found,) = [finding for finding in rule(document, "asymmetric") if finding["status"] == "fail"]
    assert found["where"] == "node2" and "node2 sends" in found["found"]


@pytest.mark.jobs
def test_a_stopped_rank_is_bounded_and_named(net: FaultyCluster, tmp_path: Path) -> None:
    """A stopped rank ends the check: its node and the collective are reported, and what was measured before is kept."""
    checking = Check(net, tmp_path, 3, ["--seconds", "30", "--max", "4M"])
    os.kill(checking.rank_pid(1), signal.SIGSTOP)
    document, code = checking.end()
    assert code == 2
    (hung,) = document["hung"]
    assert hung["hosts"] == ["node2"]
    finding = rule(document, "collective-hung")[0]
    assert finding["status"] == "fail" and hung["collective"] in finding["found"]
    assert document["results"]
    assert not (tmp_path / "wires.nccl-check.json").exists(), "a plan must not take the figures of a faulty cluster"
    assert document["seconds"] <= 30 + 60, "--seconds bounds all of it"


@pytest.mark.jobs
def test_an_interface_that_is_down_is_named(net: FaultyCluster, tmp_path: Path) -> None:
    """Nobody reaches that node: the check ends within its time and says which one it is."""
    net.run(["ip", "link", "set", "eth0", "down"], node=2)
    document, code = Check(net, tmp_path, 2, ["--seconds", "10", "--max", "1M"]).end()
    assert code == 2 and document["verdict"]["status"] == "fail" and document["results"] == []
    assert [(entry["collective"], entry["hosts"]) for entry in document["hung"]] == [("init", ["node2"])]
    assert document["seconds"] <= 10 + 60


@pytest.mark.jobs
def test_too_little_time_is_told(net: FaultyCluster, tmp_path: Path) -> None:
    """On 20 Mbit/s ten seconds are not enough for 64 MiB: what is left out is reported, nothing is called hung."""
    for node in (1, 2):
        shape(net, node, 20)
    document, _ = Check(net, tmp_path, 2, ["--seconds", "10", "--max", "64M"]).end()
    assert document["hung"] == [] and document["results"], "small sizes had time"
    assert {entry["bytes"] for entry in document["left_out"]} >= {64 << 20, 16 << 20}
    assert all(entry["reason"] for entry in document["left_out"])
