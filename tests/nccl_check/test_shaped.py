"""The whole check between machines whose links have rates that are known: nodes of a temporary Slurm, without a job."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clustertune.check.rule import EXIT
from clustertune.cluster.load import load_cluster
from clustertune.nccl_check import link_check
from clustertune.nccl_check.link_measure import SCOPES, CheckOptions
from clustertune.testbed.cluster import enter
from clustertune.testbed.spec import SUBNET
from tests.command import REPO
from tests.slurm import FaultyCluster, make

MIB = 1 << 20


def check(
    net: FaultyCluster, folder: Path, count: int, seconds: float, largest: int = 64 * MIB, gbit: float = 1.0, **changes: Any
) -> tuple[dict[str, Any], int]:
    """The document of a check on so many nodes, whose programs are started as srun starts them, and its exit code."""
    file = folder / "wires.yaml"
    hosts = "".join(f"  - {{name: node{n}, address: {SUBNET}.{n}, roles: [compute]}}\n" for n in range(1, count + 1))
    file.write_text(
        f"name: wires\nnodes:\n{hosts}"
        "compute: {gpus: 0, interconnect: none, cores: 2, threads: 2, memory_gb: 4}\n"
        f"network: {{interface: eth0, kind: ethernet, gbit: {gbit:g}, subnet: {SUBNET}.0/24}}\n"
    )
    cluster = load_cluster(str(file))

    def command(folder: Path) -> list[str]:
        program = [sys.executable, "-m", link_check.NODE_MODULE, "--folder", str(folder), "--node"]
        calls = [shlex.join([*enter(net._inits[n + 1], net.prefix, REPO), *program, str(n)]) for n in range(count)]
        return ["bash", "-c", f"trap 'kill $(jobs -p)' TERM; export OMP_NUM_THREADS=1; {' & '.join(calls)} & wait; wait"]

    target = link_check.CheckTarget(tuple(f"node{n}" for n in range(1, count + 1)), f"{SUBNET}.1", cluster, command)
    options = CheckOptions(
        backend="gloo", backend_why=link_check.REQUESTED, ranks_per_node=1, cpus_per_node=2, seconds=seconds, largest=largest,
        **{"collectives": ("all_gather", "all_reduce", "p2p"), "scopes": SCOPES, **changes},
    )  # fmt: skip
    began = time.monotonic()
    part = link_check.measure(target, options, folder / f"out-{len(list(folder.iterdir()))}")
    document = link_check.document(target, options, part, time.monotonic() - began)
    link_check.judge(document, cluster, part.logs())
    if not link_check.not_kept(document, cluster):
        link_check.keep(document, cluster)
    return document, EXIT[document["verdict"]["status"]]


def stop_rank(folder: Path, node: int) -> None:
    """Stop the rank of a node once it has measured something: what the stopping program does."""
    while not any('"event":"done"' in path.read_text() for path in folder.glob(f"out-*/records/rank-{node}.jsonl")):
        time.sleep(0.1)
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "nccl_check.link_rank" in words and str(folder) in words and f"--node {node}" in words:
            process.suspend()


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
def test_the_measured_rate_follows_the_shaped_one(net: FaultyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node of three at a quarter of the others' rate, in one run: no figure is above its line's, their ratio is that of the
    lines, and the verdict names that node and no other. gloo is called gloo.

    The rates are so low that a busy machine still fills the lines; what it does to one figure it does to the other.
    """
    monkeypatch.setattr(link_check, "START_SECONDS", (120.0, 120.0))
    monkeypatch.setattr(link_check, "CASE_SECONDS", (60.0, 60.0))
    slow, fast = 20, 80
    for node, mbit in ((1, fast), (2, fast), (3, slow)):
        shape(net, node, mbit)
    less = {"collectives": ("all_gather", "p2p"), "scopes": ("world", "pair"), "most_seconds": 400.0}
    document, code = check(net, tmp_path, 3, 15, MIB, gbit=fast / 1000, **less)
    assert (document["backend"], document["transport"]) == ("gloo", "gloo TCP on eth0") and not document["hung"]
    assert document["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [facts["hostname"] for facts in document["facts"]] == ["node1", "node2", "node3"]
    assert all(entry["correct"] for entry in document["results"])
    pairs = {tuple(pair["nodes"]): pair for pair in sorted(document["per_pair"], key=lambda pair: int(pair["bytes"]))}
    assert len(pairs) == 6
    gb_s = {ways: float(pair["busbw_gb_s"]) for ways, pair in pairs.items()}  # of the largest size of each
    for ways, found in gb_s.items():
        line = (slow if "node3" in ways else fast) / 8e3
        assert found < 1.1 * line, (ways, found)  # a burst of the shaper passes unlimited
    between = [gb_s["node1", "node2"], gb_s["node2", "node1"]]
    behind = [found for ways, found in gb_s.items() if "node3" in ways]
    assert sum(between) / 2 / (sum(behind) / 4) == pytest.approx(fast / slow, rel=0.35)
    assert best(document, "all_gather") < 1.1 * slow / 8e3, "everything waits for the slowest line"
    assert code == 2
    assert [item["where"] for item in rule(document, "slow-node") if item["status"] in ("fail", "warn")] == ["node3"]
    assert rule(document, "inter-speed")[0]["status"] == "fail", "all of them wait for it"
    assert (tmp_path / "wires.nccl-check.json").exists(), "a result of the cluster's own nodes is kept for plan"


@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "mbit"), [(2, 30), (2, 1000), (3, 60), (3, 500)])
def test_evenly_shaped_nodes_are_clean(net: FaultyCluster, tmp_path: Path, count: int, mbit: int) -> None:
    """Whatever the rate: nothing is called slow or hung where every line carries what the cluster file says."""
    for node in range(1, count + 1):
        shape(net, node, mbit)
    document, code = check(net, tmp_path, count, 20, gbit=mbit / 1000)
    assert code == 0, document["verdict"]["headline"]
    assert document["seconds"] <= 20 + 60
    ways = {tuple(entry["nodes"]) for entry in document["per_pair"] if entry["collective"] == "p2p"}
    assert len(ways) == count * (count - 1)


@pytest.mark.jobs
def test_a_stopped_rank_is_bounded_and_named(net: FaultyCluster, tmp_path: Path) -> None:
    """A stopped rank ends the check: its node and the collective are reported, and what was measured before is kept."""
    call = f"from tests.nccl_check.test_shaped import stop_rank, Path; stop_rank(Path({str(tmp_path)!r}), 1)"
    with subprocess.Popen([sys.executable, "-c", call], cwd=REPO) as stopping:
        document, code = check(net, tmp_path, 3, 30)
        stopping.kill()
    assert code == 2
    (hung,) = document["hung"]
    assert hung["hosts"] == ["node2"]
    finding = rule(document, "collective-hung")[0]
    assert finding["status"] == "fail" and hung["collective"] in finding["found"]
    assert document["results"]
    assert not (tmp_path / "wires.nccl-check.json").exists(), "a plan must not take the figures of a faulty cluster"
    assert document["seconds"] <= 30 + 60, "--seconds bounds all of it"
