"""The verdict: every rule fires on a case of its own, and none on healthy machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustertune.check.log_read import read
from clustertune.check.report import machine_findings
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding, exit_code, ranked, worst
from clustertune.nccl_check.judge import headline, judge
from tests.doctor.machine_cases import machine
from tests.nccl_check.healthy import (
    ETHERNET,
    ETHERNET_JOB,
    GIB,
    INFINIBAND,
    INFINIBAND_JOB,
    LAPTOP,
    PCIE_TOPOLOGY,
    copied,
    logs,
    pairs,
    results,
)
from tests.nccl_check.log_maker import Job, text
from tests.nccl_check.test_log_read import FAULTS, VERSIONS

RULES = [one.rule for one in ranked()]
Document = dict[str, Any]
Change = Callable[[Document], object]
"""Makes a healthy document ill."""
Wrong = Change | Job | str
"""A change, a job whose log goes with the document, a whole log, or lines at the end of the healthy one."""
Case = tuple[Any, ...]


def case(rule: str, status: Any, *rest: Any) -> Case:
    """A rule, the status that it must report, its words, and what is wrong; of an edge all statuses, and what is so."""
    return (rule, status, *rest)


def curried(change: Callable[..., None]) -> Callable[..., Change]:
    """The change with all of its arguments but the document."""
    return lambda *args, **values: lambda document: change(document, *args, **values)


@curried
def facts(document: Document, **values: Any) -> None:
    """Another fact of the first node."""
    document["facts"][0].update(values)


@curried
def gpus(document: Document, **values: Any) -> None:
    """Another fact of that node's first GPU."""
    document["facts"][0]["gpus"][0].update(values)


@curried
def nic(document: Document, name: str, *, node: int | None = None, **values: Any) -> None:
    """Another fact of an interface, on one node or on all."""
    for index, one in enumerate(document["facts"]):
        for item in one["nics"]:
            if item["name"] == name and node in (None, index):
                item.update(values)


@curried
def ports(document: Document, **values: Any) -> None:
    """Other facts of all RDMA ports."""
    for one in document["facts"]:
        for port in one["rdma"]:
            port.update(values)


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


def lines(*texts: str) -> str:
    """Lines of NCCL at the end of the healthy log."""
    return "\n".join(f"node1:4000:4100 [0] NCCL INFO {line}" for line in texts)


def warn(kind: str) -> str:
    """A log in which NCCL says something."""
    return f"node1:4000:4100 [0] misc/file.cc:12 NCCL WARN {FAULTS[kind]}"


def no_facts(document: Document) -> None:
    """Nodes that told nothing."""
    document["facts"] = []


def kind(name: str) -> Change:
    """Another kind of network in the cluster file."""
    return put(name, "expected", "network", "kind")


def single(document: Document) -> None:
    """One node."""
    document.update(nodes=1, facts=document["facts"][:1])


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


SOCKETS = replace(INFINIBAND_JOB, net="Socket")


def _one_adapter() -> str:
    log = text(INFINIBAND_JOB)
    for number in range(1, 8):
        log = log.replace(f"NET/IB/{number}/", "NET/IB/0/")
    return log


def _subnet(document: Document) -> None:
    nic("eth0", node=1, addresses=["10.0.7.2/24"])(document)


def _no_subnet(document: Document) -> None:
    document["expected"]["network"]["subnet"] = None


def _per_node(speeds: dict[str, float]) -> list[Document]:
    return [{**item, "node": name} for name, gb_s in speeds.items() for item in results("intra", gb_s, 8)]


def _slow_pair() -> dict[str, float]:
    speeds = {a + b: 340.0 for a in "abcde" for b in "abcde" if a != b}
    return {**speeds, "bd": 100.0, "db": 105.0}


SWITCH = PCIE_TOPOLOGY.replace("PHB", "PIX")
ROCE = [{"device": "mlx5_0", "port": 1, "active": True, "gbit": 100.0, "link_layer": "Ethernet"}]

IB: dict[str, Case] = {
    "sockets though a port is active": case(
        "socket-fallback", FAIL, "NET/Socket on eth0 although mlx5_0 port 1 (400 Gbit/s InfiniBand) is active", SOCKETS
    ),
    "sockets though the file says infiniband": case(
        "socket-fallback", FAIL, "although the cluster file says infiniband", SOCKETS, no_facts
    ),
    "disabled though there": case("ib-disabled", FAIL, "NCCL_IB_DISABLE", environment(NCCL_IB_DISABLE="1")),
    "no libibverbs": case("rdma-verbs", FAIL, "libibverbs.so.1 cannot be loaded", facts(verbs=False)),
    "no provider": case("rdma-verbs", WARN, "no provider", facts(verbs_providers=[])),
    "no device files": case("rdma-verbs", FAIL, "/dev/infiniband/uverbs* cannot be", facts(rdma_devices=[])),
    "port down": case("rdma-port", FAIL, "no port is active: mlx5_0:1 DOWN", ports(active=False, state="DOWN")),
    "named adapter down": case(
        "rdma-port",
        FAIL,
        "mlx5_3 (DOWN)",
        put(["mlx5_3"], "expected", "network", "hca"),
        lambda d: d["facts"][0]["rdma"][3].update(active=False, state="DOWN"),
    ),
    "named adapter missing": case("rdma-port", FAIL, "mlx5_9:1 (not there)", put(["mlx5_9:1"], "expected", "network", "hca")),
    "plugin missing": case(
        "net-plugin", FAIL, "runs without a plugin", SOCKETS, put("efa", "expected", "network", "kind"), no_facts
    ),
    "plugin fails": case("net-plugin", WARN, "any NET plugin", warn("net-plugin")),
    "two networks": case("mixed-plugins", FAIL, "node2: IB, IBext_v8", "node2:1:2 [0] NCCL INFO Using network IBext_v8"),
    "no GPUDirect": case(
        "gpudirect-rdma",
        WARN,
        "nvidia_peermem is not loaded",
        replace(INFINIBAND_JOB, gdr=False),
        put("NET/IB", "transport"),
        facts(peermem=False),
    ),
    "GPUDirect by an old name": case(
        "gdr-off",
        WARN,
        "although nvidia_peermem is loaded",
        text(replace(INFINIBAND_JOB, version="2.21.5", gdr=False))
        + "node1:4000:4100 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'\n",
    ),
    "one adapter for eight GPUs": case(
        "adapters-unused", WARN, "NCCL uses mlx5_0:1 only, while mlx5_1:1", replace(INFINIBAND_JOB, adapters=("mlx5_0",))
    ),
    "adapters listed, one used": case("adapters-unused", WARN, "1 of 8 adapters", _one_adapter()),
    "interface down": case("interface", FAIL, "eth0 is down", nic("eth0", node=0, up=False)),
    "no carrier": case("interface", FAIL, "eth0 is down", nic("eth0", node=0, carrier=False)),
    "no address": case("interface", FAIL, "eth0 has no address", nic("eth0", node=0, addresses=[])),
    "no such interface": case("interface", FAIL, "there is no ib7", put("ib7", "interface")),
    "link-local": case(
        "link-local",
        FAIL,
        "eth0 is used with fe80",
        text(INFINIBAND_JOB).replace("10.0.0.1<", "fe80::1%eth0<").replace("10.0.0.2<", "fe80::2%eth0<"),
    ),
    "other subnets": case("several-subnets", WARN, "node2 in 10.0.7.0/24", _subnet, _no_subnet),
    "not the subnet of the file": case("interface-subnet", FAIL, "10.0.7.2/24, not in 10.0.0.0/24", _subnet),
    "MTUs differ": case("nodes-network", FAIL, "1500: node1; 9000: node2", nic("eth0", node=0, mtu=1500)),
    "versions of NCCL": case("mixed-nccl", FAIL, "2.27.5 on node2", put("2.27.5", "software", 1, "nccl")),
    "versions of torch": case("mixed-torch", FAIL, "2.12.0 on node1", put("2.12.0", "software", 0, "torch")),
    "versions of the driver": case("nodes-driver", WARN, "570.1: node1", facts(driver="570.1")),
    "driver too old": case(
        "driver",
        FAIL,
        "built for CUDA 13, the driver serves 12.4",
        text(INFINIBAND_JOB).replace("cudaDriverVersion 13000", "cudaDriverVersion 12040"),
    ),
    "known fault": case("nccl-fault", WARN, "NCCL 2.28.5", replace(INFINIBAND_JOB, version="2.28.5")),
    "known fault on ARM": case("nccl-fault", WARN, "hang on ARM", facts(kernel="6.8.0-1021-nvidia-64k.aarch64")),
    "tree": case("forced-algorithm", FAIL, "NCCL_ALGO=Tree", environment(NCCL_ALGO="Tree")),
    "protocol": case("forced-algorithm", WARN, "NCCL_PROTO=LL is set", environment(NCCL_PROTO="LL")),
    "debug": case("debug-left-on", WARN, "NCCL_DEBUG=INFO", environment(NCCL_DEBUG="INFO")),
    "debug variable": case("debug-variables", WARN, "NCCL_NTHREADS=64", environment(NCCL_NTHREADS="64")),
    "settings differ": case(
        "mixed-settings",
        WARN,
        "NCCL_PROTO differs",
        "\n".join(
            f"{node}:1:1 [0] NCCL INFO NCCL_PROTO set by environment to {value}"
            for node, value in (("node1", "LL"), ("node2", "Simple"))
        ),
    ),
    "half of the GPUs": case("small-world", WARN, "4 of the 8 GPUs", put(4, "gpus_per_node")),
    "ranks missing": case("small-world", FAIL, "8 ranks of 16", replace(INFINIBAND_JOB, nodes=1)),
    "worlds of one": case(
        "small-world",
        FAIL,
        "each with a communicator of one rank",
        "".join(text(Job(nodes=1, gpus=1)).replace(":4000:", f":{pid}:") for pid in (5, 6)),
    ),
    "shared memory for NVLink": case("nvlink-unused", FAIL, "SHM/direct", replace(INFINIBAND_JOB, inside="SHM/direct/direct")),
    "path over the CPU": case("nvlink-unused", FAIL, "PHB", replace(INFINIBAND_JOB, path="PHB")),
    "P2P off with NVLink": ("p2p-disabled", FAIL, "NCCL_P2P_DISABLE", environment(NCCL_P2P_DISABLE="1")),
    "SHM off": case("shm-disabled", WARN, "NCCL_SHM_DISABLE", environment(NCCL_SHM_DISABLE="1")),
    "network inside a node": case("shm-disabled", WARN, "NET/IB", replace(INFINIBAND_JOB, inside="NET/IB/0")),
    "lanes": case("gpu-pcie", WARN, "x8 of x16", gpus(pcie_width=8)),
    "generation": case("gpu-pcie", WARN, "PCIe 4 of 5", gpus(pcie_gen=4)),
    "little shm": case("shm", FAIL, "67 MB", facts(shm_bytes=64 * 2**20, shm_free_bytes=64 * 2**20)),
    "full shm": case("shm", FAIL, "1 MB left", facts(shm_free_bytes=2**20)),
    "half a GiB of shm": case("shm", WARN, "537 MB", facts(shm_bytes=GIB // 2, shm_free_bytes=GIB // 2)),
    "memlock": case("memlock", FAIL, "66 kB", facts(memlock_bytes=65536)),
    "slow inside": case("intra-speed", FAIL, "40 GB/s inside a node, 8.9 % of nominal", measured("intra", 40)),
    "slow between": case("inter-speed", FAIL, "24 GB/s between nodes, 6 % of nominal", measured("world", 24)),
    "somewhat slow between": case("inter-speed", WARN, "70 % of what", measured("world", 247)),
    "one of three nodes": case(
        "slow-node",
        FAIL,
        "c sends 100 GB/s at best, the others 340",
        pair_speeds({"ab": 340, "ba": 340, "ac": 110, "ca": 100, "bc": 110, "cb": 100}),
    ),
    "one node sends slowly": case(
        "slow-node", WARN, "b sends 250 GB/s", pair_speeds({"ab": 340, "ba": 250, "ac": 340, "ca": 340, "bc": 250, "cb": 340})
    ),
    "slow inside one node": case(
        "slow-node", FAIL, "100 GB/s inside node2", updated(per_node=_per_node({"node1": 360, "node2": 100, "node3": 355}))
    ),
    "one way": case("asymmetric", FAIL, "a sends 50 GB/s to b, and receives 340", pair_speeds({"ab": 50, "ba": 340})),
    "one pair of good nodes": case("slow-pair", WARN, "b and d reach 100", pair_speeds(_slow_pair())),
    "jitter": case("jitter", WARN, "90 %", lambda d: [item.update(spread=0.9) for item in d["results"]]),
    "left out": case("not-measured", UNKNOWN, "1 measurements", put([{"scope": "world", "reason": "no time"}], "left_out")),
    "wrong values": case("wrong-result", FAIL, "wrong values", put(False, "results", 0, "correct")),
    "wrong values of nccl-tests": case("wrong-result", FAIL, "7 values", "# Out of bounds values : 7 FAILED"),
    "hung": case(
        "collective-hung",
        FAIL,
        "all_reduce (world, 1024 bytes) did not end within 60 s",
        put([{"scope": "world", "collective": "all_reduce", "bytes": 1024, "seconds": 60, "hosts": ["node1"]}], "hung"),
    ),
    "probe hung": ("p2p-hang", FAIL, "GPUs 0 and 1 did not end", put("hung", "p2p_probe", 0, "status")),
    "probe failed": ("p2p-hang", FAIL, "failed", put("failed", "p2p_probe", 0, "status")),
    "gloo": case("gloo-with-gpus", WARN, "although there are 16 GPUs", put("gloo", "backend")),
    "no libibverbs by the log": case(
        "no-verbs", FAIL, "could not open libibverbs", "node1:4000:4100 [0] NCCL INFO Failed to open libibverbs.so[.1]"
    ),
    "no adapter by the log": case("rdma-port-down", FAIL, "NCCL found no adapter", SOCKETS, no_facts),
    "CUDA of the drivers by the log": case(
        "mixed-driver",
        FAIL,
        "13010 on node1",
        no_facts,
        text(INFINIBAND_JOB).replace("cudaDriverVersion 13000", "cudaDriverVersion 13010", 1),
    ),
    "IOMMU by the log": case(
        "acs-redirect",
        WARN,
        "iommu=pt",
        'node1:4000:4100 [0] misc/file.cc:12 NCCL WARN Missing "iommu=pt" from kernel command line',
    ),
    "no reason": case("unexplained-error", FAIL, "Internal check", warn("failed")),
    "another warning": case("other-warning", WARN, "busid", warn("other")),
}

ETH: dict[str, Case] = {
    "RoCE idle": case(
        "roce-unused",
        WARN,
        "although mlx5_0 port 1 (100 Gbit/s RoCE) is active",
        facts(rdma=ROCE),
        put("unknown", "expected", "network", "kind"),
    ),
    "1 GbE instead of the bond": case(
        "wrong-interface",
        FAIL,
        "eth0 is used, while bond0 (100 Gbit/s) is up".replace("is used", "(1 Gbit/s) is used"),
        replace(ETHERNET_JOB, interface="eth0"),
        nic("eth0", mbit=1000),
        put("", "interface"),
        put("", "expected", "network", "interface"),
    ),
    "not the interface that was told": case(
        "wrong-interface", FAIL, "traffic uses eth0 instead of bond0", replace(ETHERNET_JOB, interface="eth0")
    ),
    "docker's bridge": case("wrong-interface", FAIL, "docker0, which leads to no", replace(ETHERNET_JOB, interface="docker0")),
    "a bridge beside": case(
        "extra-interfaces",
        FAIL,
        "br-0a1b beside bond0",
        "node1:4000:4100 [0] NCCL INFO NET/Socket : Using [0]bond0:10.0.0.1<0> [1]br-0a1b:172.18.0.1<0>",
    ),
    "a prefix": case(
        "interface",
        WARN,
        "NCCL_SOCKET_IFNAME=bond0 means bond0, bond0.2093",
        environment(NCCL_SOCKET_IFNAME="bond0"),
        lambda d: d["facts"][0]["nics"].append({"name": "bond0.2093"}),
    ),
    "a name that is not there": case("interface", FAIL, "means none of", environment(NCCL_SOCKET_IFNAME="=ens9")),
    "a prefix by the log": case(
        "ifname-prefix",
        WARN,
        "NCCL_SOCKET_IFNAME=bond0 took bond0.2093",
        no_facts,
        environment(NCCL_SOCKET_IFNAME="bond0"),
        "node1:4000:4100 [0] NCCL INFO Bootstrap : Using bond0.2093:10.1.0.1<0>",
    ),
    "layer2": case("bond", WARN, "hash layer2", nic("bond0", node=0, bond_hash="layer2")),
    "layer2 at the speed of one link": case(
        "bond-hash",
        FAIL,
        "the speed of one link (3.12 GB/s)",
        nic("bond0", node=0, bond_hash="layer2+3", mbit=50_000),
        measured("world", 2.9),
    ),
    "a link of the bond is down": case("bond", WARN, "ens2 of ens1, ens2 down", nic("bond0", node=1, bond_links_up=["ens1"])),
    "small frames": case("mtu", WARN, "1500 bytes at 100 Gbit/s", nic("bond0", mtu=1500)),
    "one socket": case(
        "one-socket",
        WARN,
        "1 TCP connection for each channel",
        lambda d: [d["environment"].pop(name) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")],
    ),
    "P2P off on PCIe": ("p2p-disabled", WARN, "NCCL_P2P_DISABLE", environment(NCCL_P2P_DISABLE="1")),
    "P2P off by the driver": case(
        "p2p-disabled",
        WARN,
        "1 pairs",
        "node1:4000:4100 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can repress this message",
    ),
    "one switch, shared memory": case(
        "p2p-disabled",
        WARN,
        "GPU0 and GPU1 share a PCIe switch",
        replace(ETHERNET_JOB, inside="SHM/direct/direct"),
        facts(topology=SWITCH),
    ),
    "ACS": ("pcie-p2p", WARN, "0000:00:03.1", facts(acs_redirect=["0000:00:03.1"])),
    "IOMMU and a hang": ("pcie-p2p", FAIL, "IOMMU", facts(iommu=True), put("hung", "p2p_probe", 0, "status")),
    "memory for RDMA that nobody can lock": case("low-memlock", FAIL, "Cannot allocate", warn("memlock")),
}
NAMED = {
    "refused": "port-refused",
    "no-algorithm": "forced-algorithm",
    "nccl-versions": "mixed-nccl",
    "no-interface": "interface-down",
    "memlock": "low-memlock",
}
LOGGED = {
    kind: NAMED.get(kind, kind)
    for kind in FAULTS
    if kind in {rule.id for rule in RULES} | set(NAMED) and kind not in ("no-verbs", "net-plugin")
} | {"shm": "small-shm", "hung": "collective-hung", "no-transport": "p2p-refused", "p2p-broken": "nvlink-unused"}


def judged(base: Document, base_job: Job, *changes: Wrong) -> tuple[Document, dict[str, str], list[Finding]]:
    """The findings over an ill document."""
    document, log = copied(base), f"{text(base_job)}\n"
    for change in changes:
        if isinstance(change, str):
            log = change if "\n" in change[2000:] else f"{text(base_job)}{change}\n"
        elif isinstance(change, Job):
            log = text(change)
        else:
            change(document)
    return document, {"all": log}, judge(document, {"all": log})


CASES = {
    **{f"infiniband: {name}": (INFINIBAND, INFINIBAND_JOB, *case) for name, case in IB.items()},
    **{f"ethernet: {name}": (ETHERNET, ETHERNET_JOB, *case) for name, case in ETH.items()},
    **{
        f"NCCL says: {kind}": (INFINIBAND, INFINIBAND_JOB, rule, WARN if kind == "rdma-link" else FAIL, "", warn(kind))
        for kind, rule in LOGGED.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule_fires_on_its_case(name: str) -> None:
    """A rule that never fires is none; what it says names the thing and its value, and what to do."""
    base, base_job, rule, status, words, *changes = CASES[name]
    document, log, findings = judged(base, base_job, *changes)
    mine = [item for item in findings if item.rule == rule and item.status == status]
    assert mine, [(item.status, item.rule, item.found) for item in findings if item.status in (WARN, FAIL)]
    assert any(words in item.found for item in mine), [item.found for item in mine]
    assert all(item.link.startswith("https://") and item.why for item in mine)
    assert status == UNKNOWN or all(item.fix for item in mine)
    shown = headline(document, read(log.values()), findings)
    assert shown.startswith(f"{worst(findings).upper()}: ")


def test_every_rule_has_a_case() -> None:
    """A new rule without a case here would be believed and never tried."""
    assert {case[2] for case in CASES.values()} == {rule.id for rule in RULES}
    assert len(RULES) == len({rule.id for rule in RULES}) >= 24


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
    findings = judge(document, log)
    assert [item for item in findings if item.status in (WARN, FAIL)] == []
    assert exit_code(findings) == 0
    shown = headline(document, read(log.values()), findings)
    assert shown.startswith("PASS: " if findings else "UNKNOWN: ")


def test_the_headline_is_one_plain_sentence() -> None:
    """It is all that many people read."""
    document, log, findings = judged(INFINIBAND, INFINIBAND_JOB, SOCKETS)
    shown = headline(document, read(log.values()), findings)
    assert shown.startswith("FAIL: traffic between nodes goes through NET/Socket on eth0 although mlx5_0 port 1")
    good = headline(INFINIBAND, read(logs(INFINIBAND_JOB).values()), judge(INFINIBAND, logs(INFINIBAND_JOB)))
    assert good.startswith("PASS: 2 nodes of 8 ranks over NET/IB/GDRDMA, P2P/CUMEM: 360 GB/s inside a node")


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
    found = [item for item in judge(document, logs(INFINIBAND_JOB)) if item.rule in ("intra-speed", "inter-speed")]
    assert [item.status for item in found] == [UNKNOWN, UNKNOWN]


def test_one_small_size_among_large_ones_counts_little() -> None:
    """A budget may end in the middle: the median must be that of sizes that bandwidth bounds."""
    document = copied(INFINIBAND)
    document["results"] = [item for item in document["results"] if item["bytes"] == GIB] + [
        {**results("world", 0.5, 16)[0], "bytes": 1024},
        {**results("world", 1.0, 16)[0], "bytes": 4096},
    ]
    assert next(item for item in judge(document, {}) if item.rule == "inter-speed").status == PASS


def test_a_busy_machine_is_no_slow_node() -> None:
    """Where repetitions differ as much as nodes do, a difference between nodes means nothing."""
    document = copied(INFINIBAND)
    pair_speeds({"ab": 340, "ba": 200, "ac": 340, "ca": 340, "bc": 200, "cb": 340})(document)
    slow = {item.rule for item in judge(document, {}) if item.status in (WARN, FAIL)}
    assert slow == {"slow-node"}
    for item in document["per_pair"]:
        item["spread"] = 0.7
    assert worst(judge(document, {})) == PASS


def test_gloo_is_held_to_what_a_cpu_does() -> None:
    """gloo never fills 100 Gbit/s; it must find a line of a tenth of what is stated all the same."""
    document = copied(LAPTOP)
    document.update(
        nodes=2, expected={"network": {"kind": "ethernet", "gbit": 100}, "inter": {"expected_gb_s": 5.6, "nominal_gb_s": 12.5}}
    )
    assert worst(judge(document, {})) == PASS
    document["results"] = [*results("world", 0.05, 4), *results("intra", 1.1, 2)]
    found = next(item for item in judge(document, {}) if item.rule == "inter-speed")
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
    (found,) = [item for item in judge(document, {}) if item.rule == "inter-speed"]
    assert found.status == status, found


# --- the edges ---------------------------------------------------------------------------------------------------------


ONE_NODE = replace(INFINIBAND_JOB, nodes=1)
ONE_GPU = replace(INFINIBAND_JOB, gpus=1)
ONE_ADAPTER = replace(INFINIBAND_JOB, adapters=("mlx5_0",))
OVER_ROCE = replace(ETHERNET_JOB, net="IB", adapters=("mlx5_0",), link="RoCE")
ONE_RANK = put(1, "gpus_per_node")
GDR_OFF = "node1:1:1 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'\n"
NO_DEVICE, LISTED = "NET/IB : No device found.", "NET/IB : Using [0]mlx5_0:1/IB"
HALF_A_PAIR = [{"nodes": ["a"], "collective": "p2p", "bytes": 2**30, "busbw_gb_s": 1}]
OF_THREE = {"ab": 9.0, "ba": 9.0, "ac": 1.0, "ca": 1.0, "bc": 9.0, "cb": 9.0}
OF_FIVE = {a + b: 100.0 if "c" in a + b else 340.0 for a in "abcde" for b in "abcde" if a != b}
EDGES_IB: dict[str, Case] = {
    "one node needs no interface": case("wrong-interface", [], replace(ONE_NODE, interface="docker0"), single),
    "one node needs no subnet": case("several-subnets", [], ONE_NODE, single),
    "one node needs no MTU": case("nodes-network", [], ONE_NODE, single),
    "one node needs no address": case("link-local", [], single, text(ONE_NODE).replace("10.0.0.1<", "fe80::1<")),
    "RDMA may start over another interface": case("wrong-interface", [PASS], put("ib0", "interface")),
    "a slow interface starts RDMA": case("wrong-interface", [PASS], nic("eth0", mbit=1000)),
    "no interfaces were told": case("interface", [], all_facts(nics=[])),
    "not known whether it is up": case("interface", [PASS, PASS], nic("eth0", up=None, carrier=None)),
    "an excluding name": case("interface", [PASS, PASS], environment(NCCL_SOCKET_IFNAME="^docker")),
    "a name without facts": case("interface", [], environment(NCCL_SOCKET_IFNAME="eth"), no_facts),
    "a name without interfaces": case("interface", [], environment(NCCL_SOCKET_IFNAME="eth"), all_facts(nics=[])),
    "a prefix that matches once": case("interface", [PASS, PASS], environment(NCCL_SOCKET_IFNAME="eth")),
    "a bridge does not matter to RDMA": case(
        "extra-interfaces", [], lines("NET/Socket : Using [0]eth0:10.0.0.1<0> [1]br-1:172.1.0.1<0>")
    ),
    "no MTU was told": case("mtu", [], nic("eth0", mtu=None)),
    "small frames beside RDMA": case("mtu", [], nic("eth0", mtu=1500)),
    "small frames under RoCE": case("mtu", [WARN], nic("eth0", mtu=1500), kind("roce")),
    "a switched-off adapter of NCCL": case(
        "socket-fallback", [FAIL], no_facts, kind("unknown"), text(SOCKETS).replace(NO_DEVICE, LISTED)
    ),
    "libibverbs not looked for": case("rdma-verbs", [FAIL], all_facts(verbs=None, rdma_devices=[], verbs_providers=[])),
    "libibverbs by the log": case("no-verbs", [FAIL], no_facts, "n1:1:1 [0] NCCL INFO Failed to open libibverbs.so[.1]"),
    "a port of many is down": case("rdma-port", [WARN, PASS], lambda d: d["facts"][0]["rdma"][7].update(active=False)),
    "a good port by name": case("rdma-port", [PASS], put(["mlx5_3"], "expected", "network", "hca")),
    "a node without adapters": case("rdma-port", [FAIL, PASS], facts(rdma=[])),
    "no adapter by the log": case("rdma-port-down", [FAIL], SOCKETS, no_facts),
    "no adapter on one node": case("rdma-port-down", [], single, text(replace(ONE_NODE, net="Socket"))),
    "a plugin that nobody needs": case("net-plugin", [], lines("NET/Plugin : No plugin found (libnccl-net.so)")),
    "EFA before it was used": case("net-plugin", [], kind("efa"), updated(transport=""), "NCCL version 2.28.9+cuda13.0\n" * 99),
    "no GPUDirect for no reason": case("gdr-off", [UNKNOWN], replace(INFINIBAND_JOB, gdr=False)),
    "GPUDirect is off by a new version": case("gdr-off", [WARN], text(replace(INFINIBAND_JOB, gdr=False)) + GDR_OFF),
    "an old version with GPUDirect": case("gdr-off", [PASS], replace(INFINIBAND_JOB, version="2.21.5")),
    "GPUDirect on one node": case("gdr-off", [], single, text(ONE_NODE) + GDR_OFF),
    "GPUDirect by the result": case("gdr-off", [PASS], replace(INFINIBAND_JOB, gdr=False), put("NET/IB/GDRDMA", "transport")),
    "ports by the cluster file": case("adapters-unused", [WARN], ONE_ADAPTER, no_facts),
    "one adapter, one port": case("adapters-unused", [PASS], ONE_ADAPTER, no_facts, put(1, "expected", "network", "ports")),
    "one adapter, one GPU": case("adapters-unused", [PASS], replace(INFINIBAND_JOB, gpus=1, adapters=("mlx5_0",)), ONE_RANK),
    "slow ports count for nothing": case(
        "adapters-unused", [PASS], ONE_ADAPTER, lambda d: [p.update(gbit=25.0) for f in d["facts"] for p in f["rdma"][1:]]
    ),
    "settings that a host had in turn": case(
        "mixed-settings", [], lines("NCCL_PROTO set by environment to LL", "NCCL_PROTO set by environment to Simple")
    ),
    "two libraries in one process": case(
        "mixed-nccl",
        [PASS],
        lambda d: d.pop("software"),
        "".join(text(Job(version=v, nodes=1, gpus=1)) for v in ("2.27.5", "2.28.9")),
    ),
    "versions by the log": case(
        "mixed-nccl", [FAIL], lambda d: d.pop("software"), text(INFINIBAND_JOB).replace("2.28.9+", "2.27.5+", 1)
    ),
    "no version anywhere": case("mixed-nccl", [], lambda d: d.pop("software"), "x\n" * 2000),
    "no versions were told": case("mixed-torch", [], put([{"node": "node1", "torch": ""}], "software")),
    "drivers by the log": case(
        "mixed-driver",
        [FAIL],
        all_facts(driver=""),
        text(INFINIBAND_JOB).replace("cudaDriverVersion 13000", "cudaDriverVersion 13010", 1),
    ),
    "a newer minor version of CUDA": case(
        "driver", [PASS], text(replace(INFINIBAND_JOB, version="2.25.1")).replace("+cuda12.4", "+cuda12.9")
    ),
    "no driver by the log": case("driver", [], text(INFINIBAND_JOB).replace("cudaDriverVersion", "cuda")),
    "a fault of ARM elsewhere": case("nccl-fault", [PASS], all_facts(kernel="6.8.0-amd64")),
    "a rank that is done": case("small-world", [PASS], put(0, "expected", "compute", "gpus")),
    "one process alone": case("small-world", [PASS], dict.clear, text(Job(nodes=1, gpus=1))),
    "GPUs that the facts show": case("small-world", [WARN], put(None, "expected", "compute", "gpus"), put(4, "gpus_per_node")),
    "NVLink by the driver": case(
        "nvlink-unused", [FAIL], lines("P2P is disabled between connected GPUs 1 and 0. You can repress this")
    ),
    "one GPU has no NVLink to use": case("nvlink-unused", [], ONE_GPU, ONE_RANK),
    "P2P level LOC": ("p2p-disabled", [FAIL], environment(NCCL_P2P_LEVEL="LOC")),
    "one GPU needs no P2P": ("p2p-disabled", [], ONE_GPU, environment(NCCL_P2P_DISABLE="1"), ONE_RANK),
    "ACS behind NVLink": ("pcie-p2p", [], all_facts(acs_redirect=["0000:00:03.1"], iommu=True)),
    "no PCIe was told": case("gpu-pcie", [PASS], gpus(pcie_width=None, pcie_gen=None)),
    "no PCIe maximum was told": case("gpu-pcie", [PASS], gpus(pcie_width_max=None, pcie_gen_max=None)),
    "no PCIe at all": case("gpu-pcie", [], all_facts(gpus=[{"index": 0}])),
    "no shm was told": case("shm", [], all_facts(shm_bytes=None)),
    "one rank needs no shm": case("shm", [WARN], ONE_GPU, ONE_RANK, all_facts(shm_bytes=1)),
    "no memlock was told": case("memlock", [], all_facts(memlock_bytes=None)),
    "memlock without adapters": case("memlock", [FAIL], all_facts(rdma=[], memlock_bytes=65536)),
    "memlock on one node": case("memlock", [WARN], ONE_NODE, single, all_facts(memlock_bytes=65536)),
    "a probe that was skipped": ("p2p-hang", [], put([{"node": "node1", "status": "skipped"}], "p2p_probe")),
    "nothing was measured": case("collective-hung", [], put([], "results")),
    "a start without an end": case(
        "collective-hung", [WARN], dict.clear, text(INFINIBAND_JOB).replace("Init COMPLETE", "Init")
    ),
    "a start that an error ended": case(
        "collective-hung", [], dict.clear, text(INFINIBAND_JOB).replace("Init COMPLETE", "Init") + f"{warn('shm')}\n"
    ),
    "no result was looked at": case("wrong-result", [], *(put([], key) for key in ("results", "per_node", "per_pair"))),
    "nothing expected": case("inter-speed", [UNKNOWN], put({}, "expected", "inter")),
    "no nominal speed": case("inter-speed", [PASS], put(None, "expected", "inter", "nominal_gb_s")),
    "one NVLink domain over nodes": case("inter-speed", [], put(72, "expected", "compute", "nvlink_domain")),
    "a part of the adapters": case("inter-speed", [], updated(results=results("inter", 40, 2))),
    "the only adapter": case(
        "inter-speed", [PASS], put(1, "expected", "network", "ports"), updated(results=results("inter", 340, 2))
    ),
    "nothing between nodes": case("inter-speed", [], only("intra")),
    "one node, all its ranks": case("intra-speed", [PASS], ONE_NODE, single, updated(results=results("world", 360, 8))),
    "several nodes are not one": case("intra-speed", [], only("world")),
    "gathers of pairs": case("slow-node", [FAIL], pairs_of("all_gather"), put([], "per_node")),
    "short pairs": case("slow-node", [], pairs_of("p2p", 1e-5), put([], "per_node")),
    "short gathers inside nodes": case(
        "slow-node", [], put([], "per_pair"), lambda d: [item.update(median_s=1e-5) for item in d["per_node"]]
    ),
    "half a pair": case("slow-node", [], put(HALF_A_PAIR, "per_pair"), put([], "per_node")),
    "a slow node is not a slow pair": case("slow-pair", [PASS], pair_speeds(OF_FIVE)),
    "three nodes have no slow pair": case("slow-pair", [], pair_speeds(OF_THREE)),
    "a slow node is not asymmetric": case(
        "asymmetric", [PASS], pair_speeds({"ab": 340, "ba": 340, "ac": 340, "ca": 100, "bc": 340, "cb": 100})
    ),
    "one direction alone": case("asymmetric", [], pair_speeds({"ab": 340})),
    "the echo of a refused peer": case("cuda", [], "\n".join(warn(name) for name in ("cuda", "p2p-refused"))),
    "the adapter's fault may be old": case("gdr-off", [UNKNOWN], replace(INFINIBAND_JOB, gdr=False, version="2.21.5")),
    "an all-reduce is not an all-gather": case(
        "inter-speed",
        [PASS],
        lambda d: d["results"].extend(
            {**item, "collective": "all_reduce", "busbw_gb_s": 1} for item in results("world", 1, 16)
        ),
    ),
    "inside a node comes first": case(
        "intra-speed", [PASS], ONE_NODE, single, updated(results=[*results("world", 1, 8), *results("intra", 360, 8)])
    ),
    "jitter of short calls": case("jitter", [], lambda d: [item.update(spread=0.9, median_s=1e-5) for item in d["results"]]),
}

EDGES_ETH: dict[str, Case] = {
    "an adapter that NCCL lists": case(
        "socket-fallback",
        [FAIL],
        no_facts,
        "node1:4000:4100 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB bond0:10.0.0.1<0>",
    ),
    "an IPoIB interface": case("socket-fallback", [FAIL], replace(ETHERNET_JOB, interface="ib0"), no_facts),
    "adapters by a setting": case("socket-fallback", [FAIL], environment(NCCL_IB_HCA="mlx5_0"), kind("unknown")),
    "RDMA by a setting": case("socket-fallback", [FAIL], environment(NCCL_IB_DISABLE="0"), kind("unknown")),
    "a setting against the cluster file": case("socket-fallback", [PASS], environment(NCCL_IB_HCA="mlx5_0")),
    "TCP, and nothing known": case("socket-fallback", [UNKNOWN], no_facts, kind("unknown")),
    "TCP by the cluster file": case("socket-fallback", [PASS], no_facts),
    "two ways by the result": case(
        "socket-fallback", [FAIL], updated(transport="NET/AWS Libfabric, NET/Socket"), kind("efa"), "x\n" * 2000
    ),
    "nothing between nodes is known": case("socket-fallback", [], dict.clear, "NCCL version 2.28.9+cuda13.0\n" * 99),
    "RoCE that is not meant": case("roce-unused", [PASS], facts(rdma=ROCE)),
    "RoCE that is meant": case("roce-unused", [], facts(rdma=ROCE), kind("roce")),
    "RoCE is in use": case("roce-unused", [], OVER_ROCE, facts(rdma=ROCE)),
    "disabled, as the cluster file says": case("ib-disabled", [], facts(rdma=ROCE)),
    "disabled, and RoCE is there": case("ib-disabled", [WARN], facts(rdma=ROCE), kind("unknown")),
    "disabled, and nothing is there": case("ib-disabled", [], kind("unknown")),
    "verbs that TCP does not need": case("rdma-verbs", [], facts(rdma=ROCE, verbs=False)),
    "no libibverbs, and no adapter": case("no-verbs", [UNKNOWN], lines("Failed to open libibverbs.so[.1]")),
    "an adapter that cannot be opened": case("no-verbs", [FAIL], warn("no-verbs")),
    "an exact name": case(
        "interface",
        [PASS, PASS],
        lambda d: [one["nics"].append({"name": "bond0.2093"}) for one in d["facts"]],
        environment(NCCL_SOCKET_IFNAME="==bond0"),
    ),
    "a bridge beside what was told": case(
        "wrong-interface", [PASS], lines("NET/Socket : Using [0]bond0:10.0.0.1<0> [1]br-1:172.1.0.1<0>")
    ),
    "no IOMMU, and no probe": ("pcie-p2p", [PASS], put([], "p2p_probe")),
    "a bridge alone": case("extra-interfaces", [], replace(ETHERNET_JOB, interface="docker0")),
    "the default of an idle link": case("bond", [PASS], nic("bond0", bond_mode="active-backup", bond_hash="layer2")),
    "round robin": case("bond", [PASS], nic("bond0", bond_mode="balance-rr", bond_hash="layer2")),
    "a bond of one link": case("bond", [PASS], nic("bond0", bond_links=["ens1"], bond_hash="layer2")),
    "a bond under RDMA": case(
        "bond-hash",
        [],
        replace(ETHERNET_JOB, net="IB", adapters=("mlx5_bond_0",), link="RoCE"),
        nic("bond0", bond_hash="layer2"),
    ),
    "a spare link": case("bond", [WARN], nic("bond0", bond_mode="active-backup", bond_links_up=["ens1"])),
    "a bond that is down": case("bond", [WARN], nic("bond0", up=False, bond_links_up=[])),
    "links of no bond": case("bond", [], nic("bond0", bond_mode="", bond_links_up=[])),
    "sockets that NCCL chose": case(
        "one-socket",
        [PASS],
        environment(NCCL_SOCKET_NTHREADS="", NCCL_NSOCKS_PERTHREAD=""),
        "node1:4000:4100 [0] NCCL INFO NET/Socket: Using 2 threads and 8 sockets per thread",
    ),
    "one socket on 25 Gbit/s": case(
        "one-socket", [], environment(NCCL_SOCKET_NTHREADS="", NCCL_NSOCKS_PERTHREAD=""), put(25, "expected", "network", "gbit")
    ),
    "memory for RDMA that TCP does not need": case("memlock", [], all_facts(rdma=ROCE, memlock_bytes=65536)),
    "ACS that nobody could read": ("pcie-p2p", [UNKNOWN], all_facts(acs_redirect=None, iommu=None)),
    "ACS read, IOMMU not": ("pcie-p2p", [PASS], all_facts(iommu=None)),
    "an IOMMU that does no harm": ("pcie-p2p", [PASS], all_facts(iommu=True)),
    "an IOMMU, and no probe": ("pcie-p2p", [WARN], all_facts(iommu=True), put([], "p2p_probe")),
    "one GPU behind ACS": ("pcie-p2p", [], all_facts(gpus=[{"index": 0}], acs_redirect=["x"])),
    "shared memory over the CPU": ("p2p-disabled", [], replace(ETHERNET_JOB, inside="SHM/direct/direct")),
    "a network inside a node of one": case("shm-disabled", [], replace(ETHERNET_JOB, gpus=1), ONE_RANK),
    "one GPU is measured with gloo": case(
        "gloo-with-gpus", [PASS], put("gloo", "backend"), updated(facts=[{"hostname": "node1", "gpus": [{"index": 0}]}])
    ),
    "gloo, and nothing known": case("gloo-with-gpus", [UNKNOWN], put("gloo", "backend"), no_facts),
    "gloo has no world of GPUs": case("small-world", [], put("gloo", "backend"), put(2, "gpus_per_node")),
    "gloo inside a node": case("intra-speed", [], put("gloo", "backend"), measured("intra", 0.1)),
    "gloo inside one of two nodes": case(
        "slow-node", [], put("gloo", "backend"), lambda d: [item.update(busbw_gb_s=1) for item in d["per_node"][:3]]
    ),
    "gloo's jitter": case("jitter", [], put("gloo", "backend"), lambda d: [item.update(spread=2.0) for item in d["results"]]),
}
EDGES = {
    **{f"infiniband: {name}": (INFINIBAND, INFINIBAND_JOB, *edge) for name, edge in EDGES_IB.items()},
    **{f"ethernet: {name}": (ETHERNET, ETHERNET_JOB, *edge) for name, edge in EDGES_ETH.items()},
}


@pytest.mark.parametrize("name", EDGES)
def test_a_rule_keeps_to_its_edge(name: str) -> None:
    """What is absent is unknown, what does not matter here is silent: else people switch the check off."""
    base, base_job, rule, statuses, *changes = EDGES[name]
    _, _, findings = judged(base, base_job, *changes)
    assert [item.status for item in findings if item.rule == rule] == statuses


PASSING = {
    "infiniband": """
        socket-fallback driver p2p-hang shm memlock wrong-interface several-subnets interface interface
        interface-subnet nodes-network mixed-plugins gdr-off adapters-unused gpudirect-rdma rdma-port rdma-verbs
        mixed-nccl mixed-torch nccl-fault small-world debug-left-on nodes-driver nvlink-unused p2p-disabled gpu-pcie
        slow-node asymmetric intra-speed inter-speed jitter wrong-result collective-hung other-warning
    """,
    "ethernet": """
        socket-fallback driver p2p-hang shm wrong-interface several-subnets one-socket interface interface
        interface-subnet bond mtu nodes-network mixed-plugins mixed-nccl mixed-torch nccl-fault small-world
        debug-left-on nodes-driver p2p-disabled gpu-pcie pcie-p2p slow-node asymmetric intra-speed inter-speed jitter
        wrong-result collective-hung other-warning
    """,
    "laptop": "mixed-torch gloo-with-gpus wrong-result collective-hung",
    "log of one GPU": "driver mixed-nccl mixed-driver nccl-fault small-world other-warning",
    "nothing": "",
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passed_is_told(name: str) -> None:
    """A rule that did not look and one that found nothing are two things."""
    findings = judge(*HEALTHY[name])
    assert [item.rule for item in findings if item.status == PASS] == PASSING[name].split()


def test_a_log_alone_says_what_it_cannot_know() -> None:
    """TCP is right or wrong: that depends on the adapters, which a log does not show."""
    findings = judge({}, logs(ETHERNET_JOB))
    assert [item.rule for item in findings if item.status == UNKNOWN] == ["socket-fallback"]


MIB = 2**20


@pytest.mark.parametrize(
    ("rule", "status", "values"),
    [
        ("shm", FAIL, {"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB}),
        ("shm", FAIL, {"shm_bytes": 100 * MIB, "shm_free_bytes": 100 * MIB}),
        ("shm", WARN, {"shm_bytes": 128 * MIB, "shm_free_bytes": 128 * MIB}),
        ("shm", WARN, {"shm_bytes": 1023 * MIB, "shm_free_bytes": 1023 * MIB}),
        ("shm", PASS, {"shm_bytes": 1024 * MIB, "shm_free_bytes": 1024 * MIB}),
        ("shm", FAIL, {"shm_free_bytes": 100 * MIB}),
        ("shm", WARN, {"shm_free_bytes": 200 * MIB}),
        ("memlock", FAIL, {"memlock_bytes": 65536}),
        ("memlock", FAIL, {"memlock_bytes": 64 * MIB}),
        ("memlock", WARN, {"memlock_bytes": 64 * MIB + 1}),
        ("memlock", WARN, {"memlock_bytes": 4096 * MIB - 1}),
        ("memlock", PASS, {"memlock_bytes": 4096 * MIB}),
        ("memlock", PASS, {"memlock_bytes": 8192 * MIB}),
        ("memlock", PASS, {"memlock_bytes": -1}),
    ],
)
def test_nccl_check_and_doctor_agree(rule: str, status: str, values: dict[str, object]) -> None:
    """One machine cannot be well for one command and broken for the other."""
    document = copied(INFINIBAND)
    all_facts(**values)(document)
    statuses = {item.status for item in judge(document, logs(INFINIBAND_JOB)) if item.rule == rule}
    doctor = {item.status for item in machine_findings(machine(values)) if item.rule == rule}
    assert statuses == doctor == {status}


# --- anything ----------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**13) | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a document stands."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(path for key, item in inner for path in paths(item, (*prefix, key)))]


WHERE = {name: paths(HEALTHY[name][0])[1:] for name in ("infiniband", "ethernet", "laptop")}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(WHERE)), st.integers(0, 10**6), JSON)
def test_any_document_is_judged(name: str, index: int, value: Any) -> None:
    """A result of another version, or one that was edited: absent and odd values are unknown, never an exception."""
    document = copied(HEALTHY[name][0])
    put(value, *WHERE[name][index % len(WHERE[name])])(document)
    json.dumps([item.found for item in judge(document, {})])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*INFINIBAND, "hung", "left_out", "problems"]), JSON, max_size=6))
def test_any_section_is_judged(document: dict[str, Any]) -> None:
    """Also where nearly nothing is as it should be."""
    judge(document, logs(Job(nodes=2, gpus=1)))
