"""The verdict: every rule fires on a case of its own, and none on healthy machines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from clustertune.check.machines import machine_findings
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding, exit_code, worst
from clustertune.host.system import MIB
from clustertune.nccl_check.link_rules import VERDICT, headline_of, judge_log, ranked
from clustertune.nccl_check.nccl_log import Log, read
from tests.doctor.machine_cases import machine
from tests.nccl_check.healthy import (
    ETHERNET,
    ETHERNET_JOB,
    GIB,
    INFINIBAND,
    INFINIBAND_JOB,
    LAPTOP,
    copied,
    logs,
    pairs,
    results,
)
from tests.nccl_check.log_maker import Job, text
from tests.nccl_check.test_log_read import FAULTS, VERSIONS

RULES = [one.rule for one in ranked()]
Document = dict[str, Any]
Case = tuple[Any, ...]
"""A rule; the statuses of its findings and, behind a colon, words of one of them; and what is wrong: a change of the healthy
document, a job whose log goes with it, a whole log, or lines at the end of the healthy one."""


def curried(change: Callable[..., None]) -> Callable[..., Callable[[Document], object]]:
    """The change with all of its arguments but the document."""
    return lambda *args, **values: lambda document: change(document, *args, **values)


@curried
def facts(document: Document, **values: Any) -> None:
    """Another fact of the first node."""
    document["facts"][0].update(values)


@curried
def nic(document: Document, name: str, *, node: int | None = None, **values: Any) -> None:
    """Another fact of an interface, on one node or on all."""
    for index, one in enumerate(document["facts"]):
        for item in one["nics"]:
            if item["name"] == name and node in (None, index):
                item.update(values)


@curried
def measured(document: Document, scope: str, gb_s: float) -> None:
    """Another speed."""
    ranks = 8 if scope == "intra" else 16
    document["results"] = [item for item in document["results"] if item["scope"] != scope] + results(scope, gb_s, ranks)


@curried
def pair_speeds(document: Document, speeds: dict[str, float]) -> None:
    """``"ab": 5`` sends 5 GB/s from node a to node b."""
    entry = document["per_pair"][0]
    document["per_pair"] = [
        {**entry, "nodes": list(names), "busbw_gb_s": gb_s, "median_s": GIB / gb_s / 1e9} for names, gb_s in speeds.items()
    ]


@curried
def put(document: Any, value: Any, *keys: Any) -> None:
    """Sets a value in the document."""
    for key in keys[:-1]:
        document = document[key]
    document[keys[-1]] = value


@curried
def all_facts(document: Document, **values: object) -> None:
    """Another fact of every node."""
    for one in document["facts"]:
        one.update(values)


@curried
def environment(document: Document, **values: str) -> None:
    """Other variables."""
    document["environment"].update(values)


@curried
def updated(document: Document, **values: Any) -> None:
    """Other parts of the document."""
    document.update(values)


@curried
def only(document: Document, scope: str) -> None:
    """Results of one scope."""
    document["results"] = [item for item in document["results"] if item["scope"] == scope]


@curried
def pairs_of(document: Document, collective: str, seconds: float = 1.0) -> None:
    """Pairs with one collective of both nodes."""
    pair_speeds({"ab": 340, "ac": 100, "bc": 100})(document)
    for item in document["per_pair"]:
        item.update(collective=collective, median_s=seconds)


def lines(*texts: str) -> str:
    """Lines of NCCL at the end of the healthy log."""
    return "\n".join(f"node1:4000:4100 [0] NCCL INFO {line}" for line in texts)


def warn(kind: str) -> str:
    """A log in which NCCL says something."""
    return f"node1:4000:4100 [0] misc/file.cc:12 NCCL WARN {FAULTS[kind]}"


def ib(**changes: Any) -> Job:
    """Another job on InfiniBand."""
    return replace(INFINIBAND_JOB, **changes)


def eth(**changes: Any) -> Job:
    """Another job on Ethernet."""
    return replace(ETHERNET_JOB, **changes)


def kind(name: str) -> Callable[[Document], object]:
    """Another kind of network in the cluster file."""
    return put(name, "expected", "network", "kind")


def single(document: Document) -> None:
    """One node."""
    document.update(nodes=1, facts=document["facts"][:1])


def _per_node(speeds: dict[str, float]) -> list[Document]:
    return [{**item, "node": name} for name, gb_s in speeds.items() for item in results("intra", gb_s, 8)]


no_facts, _subnet = put([], "facts"), nic("eth0", node=1, addresses=["10.0.7.2/24"])
GLOO, ONE_RANK = put("gloo", "backend"), put(1, "gpus_per_node")
SOCKETS, ONE_NODE, ONE_GPU, ONE_ADAPTER = ib(net="Socket"), ib(nodes=1), ib(gpus=1), ib(adapters=("mlx5_0",))
ROCE = [{"device": "mlx5_0", "port": 1, "active": True, "gbit": 100.0, "link_layer": "Ethernet"}]
GDR_OFF = "node1:1:1 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'\n"
NO_DEVICE, LISTED = "NET/IB : No device found.", "NET/IB : Using [0]mlx5_0:1/IB"
OF_THREE = {"ab": 9.0, "ba": 9.0, "ac": 1.0, "ca": 1.0, "bc": 9.0, "cb": 9.0}
OF_FIVE = {a + b: 100.0 if "c" in a + b else 340.0 for a in "abcde" for b in "abcde" if a != b}
SLOW_PAIR = {**dict.fromkeys(OF_FIVE, 340.0), "bd": 100.0, "db": 105.0}

IB: dict[str, Case] = {
    "disabled though there": ("nccl-settings", "warn: NCCL_IB_DISABLE", environment(NCCL_IB_DISABLE="1")),
    "two networks": ("nodes-differ", "fail: IBext_v8 on node2", "node2:1:2 [0] NCCL INFO Using network IBext_v8"),
    "link-local": ("wrong-interface", "fail fail: eth0 with fe80",
        text(INFINIBAND_JOB).replace("10.0.0.1<", "fe80::1%eth0<").replace("10.0.0.2<", "fe80::2%eth0<")),
    "a fabric between nodes that is slow": ("fabric-health", "fail: healthMask 0xa9",
        lines("MNNVL busId 0x801000 fabric UUID 3f.9c cliqueId 0x7ffe state 3 healthMask 0xa9")),
    "protocol": ("nccl-settings", "warn: NCCL_PROTO=LL", environment(NCCL_PROTO="LL")),
    "no adapter by the log": ("socket-fallback", "fail: the cluster file says infiniband", SOCKETS, no_facts),
    "a bridge does not matter to RDMA": ("wrong-interface", "pass",
        lines("NET/Socket : Using [0]eth0:10.0.0.1<0> [1]br-1:172.1.0.1<0>")),
    "settings that a host had in turn": ("nodes-differ", "pass",
        lines("NCCL_PROTO set by environment to LL", "NCCL_PROTO set by environment to Simple")),
    "sockets though a port is active": ("socket-fallback", "fail", SOCKETS),
    "sockets though the file says infiniband": ("socket-fallback", "fail", SOCKETS, no_facts),
    "no libibverbs": ("rdma-verbs", "fail pass: libibverbs.so.1 cannot be loaded", facts(verbs=False)),
    "named adapter missing": ("rdma-port", "fail: mlx5_9:1 (not there)", put(["mlx5_9:1"], "expected", "network", "hca")),
    "plugin fails": ("net-plugin", "warn: any NET plugin", warn("net-plugin")),
    "no GPUDirect": ("gpudirect-rdma", "warn pass", ib(gdr=False), put("NET/IB", "transport"), facts(peermem=False)),
    "no such interface": ("interface", "fail: there is no ib7", put("ib7", "interface")),
    "not the subnet of the file": ("interface-subnet", "fail pass: 10.0.7.2/24, not in 10.0.0.0/24", _subnet),
    "MTUs differ": ("nodes-network", "fail: 1500: node1; 9000: node2", nic("eth0", node=0, mtu=1500)),
    "versions of torch": ("nodes-differ", "fail: 2.12.0 on node1", put("2.12.0", "facts", 0, "packages", 0, "version")),
    "versions of the driver": ("nodes-driver", "warn: 570.1: node1", facts(driver="570.1")),
    "tree": ("nccl-settings", "fail: NCCL_ALGO=Tree", environment(NCCL_ALGO="Tree")),
    "debug": ("debug-settings", "warn: NCCL_DEBUG=INFO", environment(NCCL_DEBUG="INFO")),
    "debug variable": ("nccl-settings", "warn: NCCL_NTHREADS=64", environment(NCCL_NTHREADS="64")),
    "settings differ": ("nodes-differ", "warn: NCCL_PROTO differs",
        lines("NCCL_PROTO set by environment to LL", "x\nnode2:1:1 [0] NCCL INFO NCCL_PROTO set by environment to Simple")),
    "shared memory for NVLink": ("nvlink-unused", "fail: SHM/direct", ib(inside="SHM/direct/direct")),
    "path over the CPU": ("nvlink-unused", "fail: PHB", ib(path="PHB")),
    "P2P off with NVLink": ("p2p-disabled", "fail: NCCL_P2P_DISABLE", environment(NCCL_P2P_DISABLE="1")),
    "lanes": ("gpu-pcie", "warn pass: x8 of x16", lambda d: d["facts"][0]["gpus"][0].update(pcie_width=8)),
    "little shm": ("shm", "fail pass: 67 MB", facts(shm_bytes=64 * 2**20, shm_free_bytes=64 * 2**20)),
    "slow inside": ("intra-speed", "fail: 40 GB/s inside a node, 8.9 % of nominal", measured("intra", 40)),
    "slow between": ("inter-speed", "fail: 24 GB/s between nodes, 6 % of nominal", measured("world", 24)),
    "somewhat slow between": ("inter-speed", "warn: 70 % of what", measured("world", 247)),
    "one of three nodes": ("slow-node", "fail: c sends 100 GB/s at best, the others 340",
        pair_speeds({"ab": 340, "ba": 340, "ac": 110, "ca": 100, "bc": 110, "cb": 100})),
    "one node sends slowly": ("slow-node", "warn: b sends 250 GB/s",
        pair_speeds({"ab": 340, "ba": 250, "ac": 340, "ca": 340, "bc": 250, "cb": 340})),
    "slow inside one node": ("slow-node", "fail", updated(per_node=_per_node({"node1": 360, "node2": 100, "node3": 355}))),
    "one way": ("slow-pair", "fail: a sends 50 GB/s to b, and receives 340", pair_speeds({"ab": 50, "ba": 340})),
    "one pair of good nodes": ("slow-pair", "warn: b sends 100 GB/s to d", pair_speeds(SLOW_PAIR)),
    "wrong values": ("wrong-result", "fail: wrong values", put(False, "results", 0, "correct")),
    "wrong values of nccl-tests": ("wrong-result", "fail: 7 values", "# Out of bounds values : 7 FAILED"),
    "hung": ("collective-hung", "fail: all_reduce (world, 1024 bytes) did not end within 60 s",
        put([{"scope": "world", "collective": "all_reduce", "bytes": 1024, "seconds": 60, "hosts": ["node1"]}], "hung")),
    "probe hung": ("p2p-hang", "fail pass: GPUs 0 and 1 did not end", put("hung", "p2p_probe", 0, "status")),
    "probe failed": ("p2p-hang", "fail pass: failed", put("failed", "p2p_probe", 0, "status")),
    "IOMMU by the log": ("other-warning", "warn: iommu=pt",
        'node1:4000:4100 [0] misc/file.cc:12 NCCL WARN Missing "iommu=pt" from kernel command line'),
    "no reason": ("unexplained-error", "fail: Internal check", warn("failed")),
    "another warning": ("other-warning", "warn: busid", warn("other")),
    # where a rule keeps silent, or says less
    "one node needs no interface": ("wrong-interface", "", replace(ONE_NODE, interface="docker0"), single),
    "one node needs no address": ("wrong-interface", "", single, text(ONE_NODE).replace("10.0.0.1<", "fe80::1<")),
    "RDMA may start over another interface": ("wrong-interface", "pass", put("ib0", "interface")),
    "a slow interface starts RDMA": ("wrong-interface", "pass", nic("eth0", mbit=1000)),
    "a name without facts": ("interface", "", environment(NCCL_SOCKET_IFNAME="eth"), no_facts),
    "small frames under RoCE": ("mtu", "warn", nic("eth0", mtu=1500), kind("roce")),
    "a switched-off adapter of NCCL": ("socket-fallback", "fail", no_facts, kind("unknown"),
        text(SOCKETS).replace(NO_DEVICE, LISTED)),
    "a port of many is down": ("rdma-port", "warn pass", lambda d: d["facts"][0]["rdma"][7].update(active=False)),
    "no adapter on one node": ("socket-fallback", "", single, text(replace(ONE_NODE, net="Socket"))),
    "a plugin that nobody needs": ("net-plugin", "", lines("NET/Plugin : No plugin found (libnccl-net.so)")),
    "EFA before it was used": ("net-plugin", "", kind("efa"), updated(transport=""), "NCCL version 2.28.9+cuda13.0\n" * 99),
    "no GPUDirect for no reason": ("gdr-off", "unknown", ib(gdr=False)),
    "GPUDirect is off by a new version": ("gdr-off", "warn", text(ib(gdr=False)) + GDR_OFF),
    "an old version with GPUDirect": ("gdr-off", "pass", ib(version="2.21.5")),
    "GPUDirect on one node": ("gdr-off", "", single, text(ONE_NODE) + GDR_OFF),
    "GPUDirect by the result": ("gdr-off", "pass", ib(gdr=False), put("NET/IB/GDRDMA", "transport")),
    "two libraries in one process": ("nodes-differ", "pass",
        "".join(text(Job(version=v, nodes=1, gpus=1)) for v in ("2.27.5", "2.28.9"))),
    "versions by the log": ("nodes-differ", "fail: 2.27.5 on node1", text(INFINIBAND_JOB).replace("2.28.9+", "2.27.5+", 1)),
    "no version anywhere": ("nodes-differ", "", no_facts, "x\n" * 2000),
    "no driver by the log": ("driver", "", text(INFINIBAND_JOB).replace("cudaDriverVersion", "cuda")),
    "NVLink by the driver": ("nvlink-unused", "fail",
        lines("P2P is disabled between connected GPUs 1 and 0. You can repress this")),
    "one GPU has no NVLink to use": ("nvlink-unused", "", ONE_GPU, ONE_RANK),
    "P2P level LOC": ("p2p-disabled", "fail", environment(NCCL_P2P_LEVEL="LOC")),
    "one GPU needs no P2P": ("p2p-disabled", "", ONE_GPU, environment(NCCL_P2P_DISABLE="1"), ONE_RANK),
    "one rank needs no shm": ("shm", "warn", ONE_GPU, ONE_RANK, all_facts(shm_bytes=1)),
    "memlock on one node": ("memlock", "warn", ONE_NODE, single, all_facts(memlock_bytes=65536)),
    "a probe that was skipped": ("p2p-hang", "", put([{"node": "node1", "status": "skipped"}], "p2p_probe")),
    "nothing was measured": ("collective-hung", "", put([], "results")),
    "a start without an end": ("collective-hung", "warn", dict.clear, text(INFINIBAND_JOB).replace("Init COMPLETE", "Init")),
    "a start that an error ended": ("collective-hung", "", dict.clear,
        text(INFINIBAND_JOB).replace("Init COMPLETE", "Init") + f"{warn('shm')}\n"),
    "no result was looked at": ("wrong-result", "", *(put([], key) for key in ("results", "per_node", "per_pair"))),
    "nothing expected": ("inter-speed", "unknown", put({}, "expected", "inter")),
    "no nominal speed": ("inter-speed", "pass", put(None, "expected", "inter", "nominal_gb_s")),
    "one NVLink domain over nodes": ("inter-speed", "", put(72, "expected", "compute", "nvlink_domain")),
    "a part of the adapters": ("inter-speed", "", updated(results=results("inter", 40, 2))),
    "the only adapter": ("inter-speed", "pass", put(1, "expected", "network", "ports"),
        updated(results=results("inter", 340, 2))),
    "nothing between nodes": ("inter-speed", "", only("intra")),
    "one node, all its ranks": ("intra-speed", "pass", ONE_NODE, single, updated(results=results("world", 360, 8))),
    "several nodes are not one": ("intra-speed", "", only("world")),
    "short pairs": ("slow-node", "", pairs_of("p2p", 1e-5), put([], "per_node")),
    "short gathers inside nodes": ("slow-node", "", put([], "per_pair"),
        lambda d: [item.update(median_s=1e-5) for item in d["per_node"]]),
    "a slow node is not a slow pair": ("slow-pair", "pass", pair_speeds(OF_FIVE)),
    "three nodes have no slow pair": ("slow-pair", "pass: in both directions", pair_speeds(OF_THREE)),
    "a slow node has no slow direction": ("slow-pair", "pass",
        pair_speeds({"ab": 340, "ba": 340, "ac": 340, "ca": 100, "bc": 340, "cb": 100})),
    "one direction alone": ("slow-pair", "", pair_speeds({"ab": 340})),
    "the echo of a refused peer": ("cuda", "", "\n".join(warn(name) for name in ("cuda", "p2p-refused"))),
    "the adapter's fault may be old": ("gdr-off", "unknown", ib(gdr=False, version="2.21.5")),
    "an all-reduce is not an all-gather": ("inter-speed", "pass",
        lambda d: d["results"].extend({**item, "collective": "all_reduce"} for item in results("world", 1, 16))),
    "inside a node comes first": ("intra-speed", "pass", ONE_NODE, single,
        updated(results=[*results("world", 1, 8), *results("intra", 360, 8)])),
}  # fmt: skip
ETH: dict[str, Case] = {
    "a bridge beside": ("wrong-interface", "fail pass: uses br-0a1b beside bond0",
        lines("NET/Socket : Using [0]bond0:10.0.0.1<0> [1]br-0a1b:172.18.0.1<0>")),
    "disabled, and nothing is there": ("nccl-settings", "pass", kind("unknown")),
    "RoCE idle": ("socket-fallback", "warn: although mlx5_0 port 1 (100 Gbit/s RoCE) is active", facts(rdma=ROCE),
        kind("unknown")),
    "1 GbE instead of the bond": ("wrong-interface", "fail fail: eth0 (1 Gbit/s) is used, while bond0 (100 Gbit/s) is up",
        eth(interface="eth0"), nic("eth0", mbit=1000), put("", "interface"), put("", "expected", "network", "interface")),
    "not the interface that was told": ("wrong-interface", "fail fail", eth(interface="eth0")),
    "docker's bridge": ("wrong-interface", "fail fail: docker0, which leads to no", eth(interface="docker0")),
    "a prefix": ("interface", "warn pass pass: NCCL_SOCKET_IFNAME=bond0 means bond0, bond0.2093",
        environment(NCCL_SOCKET_IFNAME="bond0"), lambda d: d["facts"][0]["nics"].append({"name": "bond0.2093"})),
    "layer2": ("bond", "warn pass: hash layer2", nic("bond0", node=0, bond_hash="layer2")),
    "P2P off on PCIe": ("p2p-disabled", "warn: NCCL_P2P_DISABLE", environment(NCCL_P2P_DISABLE="1")),
    "P2P off by the driver": ("p2p-disabled", "warn: 1 pairs",
        lines("P2P is disabled between connected GPUs 1 and 0. You can repress this message")),
    "ACS": ("pcie-p2p", "warn pass: 0000:00:03.1", facts(acs_redirect=["0000:00:03.1"])),
    "IOMMU and a hang": ("pcie-p2p", "fail pass: IOMMU", facts(iommu=True), put("hung", "p2p_probe", 0, "status")),
    "memory for RDMA that nobody can lock": ("low-memlock", "fail: Cannot allocate", warn("memlock")),
    # where a rule keeps silent, or says less
    "an adapter that NCCL lists": ("socket-fallback", "fail", no_facts,
        lines("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB bond0:10.0.0.1<0>")),
    "an IPoIB interface": ("socket-fallback", "fail", eth(interface="ib0"), no_facts),
    "adapters by a setting": ("socket-fallback", "fail", environment(NCCL_IB_HCA="mlx5_0"), kind("unknown")),
    "RDMA by a setting": ("socket-fallback", "fail", environment(NCCL_IB_DISABLE="0"), kind("unknown")),
    "a setting against the cluster file": ("socket-fallback", "pass", environment(NCCL_IB_HCA="mlx5_0")),
    "TCP, and nothing known": ("socket-fallback", "unknown", no_facts, kind("unknown")),
    "TCP by the cluster file": ("socket-fallback", "pass", no_facts),
    "two ways by the result": ("socket-fallback", "fail", updated(transport="NET/AWS Libfabric, NET/Socket"), kind("efa"),
        "x\n" * 2000),
    "nothing between nodes is known": ("socket-fallback", "", dict.clear, "NCCL version 2.28.9+cuda13.0\n" * 99),
    "RoCE that is not meant": ("socket-fallback", "pass", facts(rdma=ROCE)),
    "disabled, and RoCE is there": ("nccl-settings", "warn", facts(rdma=ROCE), kind("unknown")),
    "an IOMMU that does no harm": ("pcie-p2p", "pass", all_facts(iommu=True)),
    "an IOMMU, and no probe": ("pcie-p2p", "warn", all_facts(iommu=True), put([], "p2p_probe")),
    "shared memory over the CPU": ("p2p-disabled", "", eth(inside="SHM/direct/direct")),
    "gloo inside a node": ("intra-speed", "", GLOO, measured("intra", 0.1)),
    "gloo inside one of two nodes": ("slow-node", "", GLOO,
        lambda d: [item.update(busbw_gb_s=1) for item in d["per_node"][:3]]),
}  # fmt: skip
NAMED = {
    "refused": "port-refused", "no-algorithm": "forced-algorithm", "nccl-versions": "nodes-differ",
    "no-interface": "interface-down", "memlock": "low-memlock",
}  # fmt: skip
LOGGED = {
    kind: NAMED.get(kind, kind)
    for kind in FAULTS
    if kind in {rule.id for rule in RULES} | set(NAMED) and kind not in ("no-verbs", "net-plugin")
} | {"shm": "small-shm", "hung": "collective-hung", "no-transport": "p2p-refused", "p2p-broken": "nvlink-unused"}


reading = functools.cache(lambda log: read([log]))
"""Many cases have the healthy log."""


def judged(base: Document, base_job: Job, *changes: Any) -> tuple[Document, Log, list[Finding]]:
    """The findings over an ill document."""
    document, log = copied(base), f"{text(base_job)}\n"
    for change in changes:
        if isinstance(change, str):
            log = change if "\n" in change[2000:] else f"{text(base_job)}{change}\n"
        elif isinstance(change, Job):
            log = text(change)
        else:
            change(document)
    return document, reading(log), judge_log(document, reading(log))


CASES = {
    **{f"infiniband: {name}": (INFINIBAND, INFINIBAND_JOB, *case) for name, case in IB.items()},
    **{f"ethernet: {name}": (ETHERNET, ETHERNET_JOB, *case) for name, case in ETH.items()},
    **{
        f"NCCL says: {kind}": (INFINIBAND, INFINIBAND_JOB, rule, WARN if kind == "rdma-link" else FAIL, warn(kind))
        for kind, rule in LOGGED.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_on_its_case_and_keeps_to_its_edge(name: str) -> None:
    """A rule that never fires is none; what is absent is unknown, and what does not matter here is silent."""
    base, base_job, rule, expected, *changes = CASES[name]
    document, log, findings = judged(base, base_job, *changes)
    statuses, _, words = expected.partition(": ")
    mine = [item for item in findings if item.rule == rule]
    assert [item.status for item in mine] == statuses.split(), [(item.status, item.rule, item.found) for item in findings]
    assert not mine or any(words in item.found for item in mine), [item.found for item in mine]
    assert all(item.link.startswith("https://") and item.why for item in mine)
    assert all(item.fix for item in mine if item.status in (WARN, FAIL))
    if (bad := worst(findings)) != PASS:
        assert headline_of(document, log, findings).startswith(f"{bad.upper()}: ")


def test_every_rule_has_a_case() -> None:
    """A new rule without a case here would be believed and never tried."""
    fired = {rule for _, _, rule, expected, *_ in CASES.values() if {WARN, FAIL} & set(expected.partition(":")[0].split())}
    assert fired | {"shm", "memlock"} == {rule.id for rule in RULES}
    assert [rule.id for rule in RULES][: len(VERDICT)] == VERDICT, "a name without a rule, or one twice"


HEALTHY = {
    "infiniband": (INFINIBAND, logs(INFINIBAND_JOB)),
    "ethernet": (ETHERNET, logs(ETHERNET_JOB)),
    "laptop": (LAPTOP, {}),
    **{
        f"log of {version}": ({}, logs(replace(INFINIBAND_JOB, version=version))) for version in VERSIONS if version != "2.25.1"
    },
    "log of one node": ({}, logs(replace(INFINIBAND_JOB, nodes=1))),
    "log of one GPU": ({}, logs(Job(nodes=1, gpus=1, net="Socket", adapters=()))),
    "log over TCP": ({}, logs(ETHERNET_JOB)),
    "PCIe without P2P": ({}, logs(replace(ETHERNET_JOB, inside="SHM/direct/direct", path="SYS"))),
    "EFA": (
        {"expected": {"network": {"kind": "efa"}}},
        {
            "all": text(replace(INFINIBAND_JOB, net="AWS Libfabric"))
            + "node1:1:1 [0] NCCL INFO NET/OFI Selected Provider is efa\n"
        },
    ),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name: str) -> None:
    """A check that cries wolf is switched off."""
    document, log = HEALTHY[name]
    findings = judge_log(document, read(log.values()))
    assert [item for item in findings if item.status in (WARN, FAIL)] == [] and exit_code(findings) == 0
    assert headline_of(document, read(log.values()), findings).startswith("PASS: " if findings else "UNKNOWN: ")


def test_the_cause_comes_before_its_echo() -> None:
    """When one rank fails all others report lost connections; the headline must name the first."""
    said = "\n".join(warn(kind) for kind in ("peer-lost", "follows", "failed", "shm"))
    _, _, findings = judged(INFINIBAND, INFINIBAND_JOB, said)
    assert [item.rule for item in findings if item.status == FAIL] == ["small-shm", "peer-lost"]


def test_small_sizes_are_no_verdict() -> None:
    """A short check measures latency: a figure that is low for that reason must not fail a cluster."""
    document = copied(INFINIBAND)
    for item in document["results"]:
        item.update(bytes=item["bytes"] // 2**20, busbw_gb_s=1.0, median_s=1e-4)
    found = [
        item for item in judge_log(document, read(logs(INFINIBAND_JOB).values())) if item.rule in ("intra-speed", "inter-speed")
    ]
    assert [item.status for item in found] == [UNKNOWN, UNKNOWN]


def test_a_busy_machine_is_no_slow_node() -> None:
    """Where repetitions differ as much as nodes do, a difference between nodes means nothing."""
    document = copied(INFINIBAND)
    pair_speeds({"ab": 340, "ba": 200, "ac": 340, "ca": 340, "bc": 200, "cb": 340})(document)
    slow = {item.rule for item in judge_log(document, Log()) if item.status in (WARN, FAIL)}
    assert slow == {"slow-node"}
    for item in document["per_pair"]:
        item["spread"] = 0.7
    assert worst(judge_log(document, Log())) == PASS


def test_gloo_is_held_to_what_a_cpu_does() -> None:
    """gloo never fills 100 Gbit/s; it must find a line of a tenth of what is stated all the same."""
    document = copied(LAPTOP)
    document.update(
        nodes=2, expected={"network": {"kind": "ethernet", "gbit": 100}, "inter": {"expected_gb_s": 5.6, "nominal_gb_s": 12.5}}
    )
    assert worst(judge_log(document, Log())) == PASS
    document["results"] = [*results("world", 0.05, 4), *results("intra", 1.1, 2)]
    found = next(item for item in judge_log(document, Log()) if item.rule == "inter-speed")
    assert found.status == FAIL and "0.05 GB/s between nodes, 0.4 % of nominal" in found.found


@pytest.mark.parametrize(
    ("ways", "status"), [((0.104, 0.110), PASS), ((0.104, 0.05), FAIL), ((0.104,), FAIL), ((0.08, 0.08), WARN)]
)
def test_lines_that_carry_what_they_should_are_not_slow(ways: tuple[float, ...], status: str) -> None:
    """On a busy machine gloo's all-gather reaches a third of 1 Gbit/s; one way at a time shows the line where each is tried."""
    document = copied(LAPTOP)
    document.update(
        nodes=2,
        expected={"network": {"kind": "ethernet", "gbit": 1}, "inter": {"expected_gb_s": 0.1125, "nominal_gb_s": 0.125}},
    )
    document["results"] = results("world", 0.03, 2)
    document["per_pair"] = [{**way, "busbw_gb_s": gb_s} for way, gb_s in zip(pairs(1.0), ways, strict=False)]
    (found,) = [item for item in judge_log(document, Log()) if item.rule == "inter-speed"]
    assert found.status == status, found


@pytest.mark.parametrize(
    ("rule", "status", "values"),
    [("shm", FAIL, {"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB}), ("memlock", WARN, {"memlock_bytes": 1024 * MIB})],
)
def test_nccl_check_and_doctor_agree(rule: str, status: str, values: dict[str, int]) -> None:
    """One machine cannot be well for one command and broken for the other."""
    document = copied(INFINIBAND)
    all_facts(**values)(document)
    statuses = {item.status for item in judge_log(document, read(logs(INFINIBAND_JOB).values())) if item.rule == rule}
    doctor = {item.status for item in machine_findings(machine(values)) if item.rule == rule}
    assert statuses == doctor == {status}
