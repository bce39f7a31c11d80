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
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding, exit_code, ranked, worst
from clustertune.nccl_check.judge import headline, judge
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
Change = Callable[[Document], Job | str | None]
"""Makes a healthy document ill; what it returns is the job whose log goes with it, or lines at the end of the healthy log."""


def facts(document: Document, **values: Any) -> None:
    """Another fact of the first node."""
    document["facts"][0].update(values)


def gpus(document: Document, **values: Any) -> None:
    """Another fact of that node's first GPU."""
    document["facts"][0]["gpus"][0].update(values)


def nic(document: Document, name: str, *, node: int | None = None, **values: Any) -> None:
    """Another fact of an interface, on one node or on all."""
    for index, one in enumerate(document["facts"]):
        for item in one["nics"]:
            if item["name"] == name and node in (None, index):
                item.update(values)


def ports(document: Document, **values: Any) -> None:
    """Other facts of all RDMA ports."""
    for one in document["facts"]:
        for port in one["rdma"]:
            port.update(values)


def measured(document: Document, scope: str, gb_s: float) -> None:
    """Another speed."""
    ranks = 8 if scope == "intra" else 16
    document["results"] = [item for item in document["results"] if item["scope"] != scope] + results(scope, gb_s, ranks)


def pair_speeds(document: Document, speeds: dict[str, float]) -> None:
    """``"ab": 5`` sends 5 GB/s from node a to node b."""
    entry = document["per_pair"][0]
    document["per_pair"] = [
        {**entry, "nodes": list(names), "busbw_gb_s": gb_s, "median_s": GIB / gb_s / 1e9} for names, gb_s in speeds.items()
    ]


SOCKETS = replace(INFINIBAND_JOB, net="Socket")


def warn(kind: str) -> Callable[[Document], str]:
    """A log in which NCCL says something."""
    return lambda _: f"node1:4000:4100 [0] misc/file.cc:12 NCCL WARN {FAULTS[kind]}"


def does(*changes: Any) -> Change:
    """A change that needs no log of its own."""

    def change(document: Document) -> None:
        for one in changes:
            one(document)

    return change


def job(after: Job, *changes: Any) -> Change:
    """A change with another job."""

    def change(document: Document) -> Job:
        for one in changes:
            one(document)
        return after

    return change


def put(value: Any, *keys: Any) -> Callable[[Document], None]:
    """Sets a value in the document."""

    def change(document: Document) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def _one_adapter() -> str:
    log = text(INFINIBAND_JOB)
    for number in range(1, 8):
        log = log.replace(f"NET/IB/{number}/", "NET/IB/0/")
    return log


def _subnet(document: Document) -> None:
    nic(document, "eth0", node=1, addresses=["10.0.7.2/24"])


def _no_subnet(document: Document) -> None:
    document["expected"]["network"]["subnet"] = None


def _per_node(speeds: dict[str, float]) -> list[Document]:
    return [{**item, "node": name} for name, gb_s in speeds.items() for item in results("intra", gb_s, 8)]


def _slow_pair() -> dict[str, float]:
    speeds = {a + b: 340.0 for a in "abcde" for b in "abcde" if a != b}
    return {**speeds, "bd": 100.0, "db": 105.0}


SWITCH = PCIE_TOPOLOGY.replace("PHB", "PIX")
ROCE = [{"device": "mlx5_0", "port": 1, "active": True, "gbit": 100.0, "link_layer": "Ethernet"}]

IB: dict[str, tuple[str, str, str, Change]] = {
    # name of the case: rule, status, words that it says, what is wrong
    "sockets though a port is active": (
        "socket-fallback",
        FAIL,
        "NET/Socket on eth0 although mlx5_0 port 1 (400 Gbit/s InfiniBand) is active",
        job(SOCKETS),
    ),
    "sockets though the file says infiniband": (
        "socket-fallback",
        FAIL,
        "although the cluster file says infiniband",
        job(SOCKETS, lambda d: d.update(facts=[])),
    ),
    "disabled though there": ("ib-disabled", FAIL, "NCCL_IB_DISABLE", does(put("1", "environment", "NCCL_IB_DISABLE"))),
    "no libibverbs": ("rdma-verbs", FAIL, "libibverbs.so.1 cannot be loaded", does(lambda d: facts(d, verbs=False))),
    "no provider": ("rdma-verbs", WARN, "no provider", does(lambda d: facts(d, verbs_providers=[]))),
    "no device files": ("rdma-verbs", FAIL, "/dev/infiniband/uverbs* cannot be", does(lambda d: facts(d, rdma_devices=[]))),
    "port down": ("rdma-port", FAIL, "no port is active: mlx5_0:1 DOWN", does(lambda d: ports(d, active=False, state="DOWN"))),
    "named adapter down": (
        "rdma-port",
        FAIL,
        "mlx5_3 (DOWN)",
        does(
            put(["mlx5_3"], "expected", "network", "hca"), lambda d: d["facts"][0]["rdma"][3].update(active=False, state="DOWN")
        ),
    ),
    "named adapter missing": ("rdma-port", FAIL, "mlx5_9:1 (not there)", does(put(["mlx5_9:1"], "expected", "network", "hca"))),
    "plugin missing": (
        "net-plugin",
        FAIL,
        "runs without a plugin",
        job(SOCKETS, put("efa", "expected", "network", "kind"), lambda d: d.update(facts=[])),
    ),
    "plugin fails": ("net-plugin", WARN, "any NET plugin", warn("net-plugin")),
    "two networks": ("mixed-plugins", FAIL, "node2: IB, IBext_v8", lambda d: "node2:1:2 [0] NCCL INFO Using network IBext_v8"),
    "no GPUDirect": (
        "gpudirect-rdma",
        WARN,
        "nvidia_peermem is not loaded",
        job(replace(INFINIBAND_JOB, gdr=False), put("NET/IB", "transport"), lambda d: facts(d, peermem=False)),
    ),
    "GPUDirect by an old name": (
        "gdr-off",
        WARN,
        "although nvidia_peermem is loaded",
        lambda d: (
            text(replace(INFINIBAND_JOB, version="2.21.5", gdr=False))
            + "node1:4000:4100 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'\n"
        ),
    ),
    "one adapter for eight GPUs": (
        "adapters-unused",
        WARN,
        "NCCL uses mlx5_0:1 only, while mlx5_1:1",
        job(replace(INFINIBAND_JOB, adapters=("mlx5_0",))),
    ),
    "adapters listed, one used": ("adapters-unused", WARN, "1 of 8 adapters", lambda d: _one_adapter()),
    "interface down": ("interface", FAIL, "eth0 is down", does(lambda d: nic(d, "eth0", node=0, up=False))),
    "no carrier": ("interface", FAIL, "eth0 is down", does(lambda d: nic(d, "eth0", node=0, carrier=False))),
    "no address": ("interface", FAIL, "eth0 has no address", does(lambda d: nic(d, "eth0", node=0, addresses=[]))),
    "no such interface": ("interface", FAIL, "there is no ib7", does(put("ib7", "interface"))),
    "link-local": (
        "link-local",
        FAIL,
        "eth0 is used with fe80",
        lambda d: text(INFINIBAND_JOB).replace("10.0.0.1<", "fe80::1%eth0<").replace("10.0.0.2<", "fe80::2%eth0<"),
    ),
    "other subnets": ("several-subnets", WARN, "node2 in 10.0.7.0/24", does(lambda d: (_subnet(d), _no_subnet(d)))),
    "not the subnet of the file": ("interface-subnet", FAIL, "10.0.7.2/24, not in 10.0.0.0/24", does(_subnet)),
    "MTUs differ": ("nodes-network", FAIL, "1500: node1; 9000: node2", does(lambda d: nic(d, "eth0", node=0, mtu=1500))),
    "versions of NCCL": ("mixed-nccl", FAIL, "2.27.5 on node2", does(put("2.27.5", "software", 1, "nccl"))),
    "versions of torch": ("mixed-torch", FAIL, "2.12.0 on node1", does(put("2.12.0", "software", 0, "torch"))),
    "versions of the driver": ("nodes-driver", WARN, "570.1: node1", does(lambda d: facts(d, driver="570.1"))),
    "driver too old": (
        "driver",
        FAIL,
        "built for CUDA 13, the driver serves 12.4",
        lambda d: text(INFINIBAND_JOB).replace("cudaDriverVersion 13000", "cudaDriverVersion 12040"),
    ),
    "known fault": ("nccl-fault", WARN, "NCCL 2.28.5", job(replace(INFINIBAND_JOB, version="2.28.5"))),
    "known fault on ARM": ("nccl-fault", WARN, "hang on ARM", does(lambda d: facts(d, kernel="6.8.0-1021-nvidia-64k.aarch64"))),
    "tree": ("forced-algorithm", FAIL, "NCCL_ALGO=Tree", does(put("Tree", "environment", "NCCL_ALGO"))),
    "protocol": ("forced-algorithm", WARN, "NCCL_PROTO=LL is set", does(put("LL", "environment", "NCCL_PROTO"))),
    "debug": ("debug-left-on", WARN, "NCCL_DEBUG=INFO", does(put("INFO", "environment", "NCCL_DEBUG"))),
    "debug variable": ("debug-variables", WARN, "NCCL_NTHREADS=64", does(put("64", "environment", "NCCL_NTHREADS"))),
    "settings differ": (
        "mixed-settings",
        WARN,
        "NCCL_PROTO differs",
        lambda d: "\n".join(
            f"{node}:1:1 [0] NCCL INFO NCCL_PROTO set by environment to {value}"
            for node, value in (("node1", "LL"), ("node2", "Simple"))
        ),
    ),
    "half of the GPUs": ("small-world", WARN, "4 of the 8 GPUs", does(put(4, "gpus_per_node"))),
    "ranks missing": ("small-world", FAIL, "8 ranks of 16", job(replace(INFINIBAND_JOB, nodes=1))),
    "worlds of one": (
        "small-world",
        FAIL,
        "each with a communicator of one rank",
        lambda d: "".join(text(Job(nodes=1, gpus=1)).replace(":4000:", f":{pid}:") for pid in (5, 6)),
    ),
    "shared memory for NVLink": ("nvlink-unused", FAIL, "SHM/direct", job(replace(INFINIBAND_JOB, inside="SHM/direct/direct"))),
    "path over the CPU": ("nvlink-unused", FAIL, "PHB", job(replace(INFINIBAND_JOB, path="PHB"))),
    "P2P off with NVLink": ("p2p-disabled", FAIL, "NCCL_P2P_DISABLE", does(put("1", "environment", "NCCL_P2P_DISABLE"))),
    "SHM off": ("shm-disabled", WARN, "NCCL_SHM_DISABLE", does(put("1", "environment", "NCCL_SHM_DISABLE"))),
    "network inside a node": ("shm-disabled", WARN, "NET/IB", job(replace(INFINIBAND_JOB, inside="NET/IB/0"))),
    "lanes": ("gpu-pcie", WARN, "x8 of x16", does(lambda d: gpus(d, pcie_width=8))),
    "generation": ("gpu-pcie", WARN, "PCIe 4 of 5", does(lambda d: gpus(d, pcie_gen=4))),
    "little shm": ("shm", FAIL, "67 MB", does(lambda d: facts(d, shm_bytes=64 * 2**20, shm_free_bytes=64 * 2**20))),
    "full shm": ("shm", FAIL, "1 MB left", does(lambda d: facts(d, shm_free_bytes=2**20))),
    "half a GiB of shm": ("shm", WARN, "537 MB", does(lambda d: facts(d, shm_bytes=GIB // 2, shm_free_bytes=GIB // 2))),
    "memlock": ("memlock", FAIL, "66 kB", does(lambda d: facts(d, memlock_bytes=65536))),
    "slow inside": ("intra-speed", FAIL, "40 GB/s inside a node, 8.9 % of nominal", does(lambda d: measured(d, "intra", 40))),
    "slow between": ("inter-speed", FAIL, "24 GB/s between nodes, 6 % of nominal", does(lambda d: measured(d, "world", 24))),
    "somewhat slow between": ("inter-speed", WARN, "70 % of what", does(lambda d: measured(d, "world", 247))),
    "one of three nodes": (
        "slow-node",
        FAIL,
        "c sends 100 GB/s at best, the others 340",
        does(lambda d: pair_speeds(d, {"ab": 340, "ba": 340, "ac": 110, "ca": 100, "bc": 110, "cb": 100})),
    ),
    "one node sends slowly": (
        "slow-node",
        WARN,
        "b sends 250 GB/s",
        does(lambda d: pair_speeds(d, {"ab": 340, "ba": 250, "ac": 340, "ca": 340, "bc": 250, "cb": 340})),
    ),
    "slow inside one node": (
        "slow-node",
        FAIL,
        "100 GB/s inside node2",
        does(lambda d: d.update(per_node=_per_node({"node1": 360, "node2": 100, "node3": 355}))),
    ),
    "one way": (
        "asymmetric",
        FAIL,
        "a sends 50 GB/s to b, and receives 340",
        does(lambda d: pair_speeds(d, {"ab": 50, "ba": 340})),
    ),
    "one pair of good nodes": ("slow-pair", WARN, "b and d reach 100", does(lambda d: pair_speeds(d, _slow_pair()))),
    "jitter": ("jitter", WARN, "90 %", does(lambda d: [item.update(spread=0.9) for item in d["results"]])),
    "left out": ("not-measured", UNKNOWN, "1 measurements", does(put([{"scope": "world", "reason": "no time"}], "left_out"))),
    "wrong values": ("wrong-result", FAIL, "wrong values", does(put(False, "results", 0, "correct"))),
    "wrong values of nccl-tests": ("wrong-result", FAIL, "7 values", lambda d: "# Out of bounds values : 7 FAILED"),
    "hung": (
        "collective-hung",
        FAIL,
        "all_reduce (world, 1024 bytes) did not end within 60 s",
        does(put([{"scope": "world", "collective": "all_reduce", "bytes": 1024, "seconds": 60, "hosts": ["node1"]}], "hung")),
    ),
    "probe hung": ("p2p-hang", FAIL, "GPUs 0 and 1 did not end", does(put("hung", "p2p_probe", 0, "status"))),
    "probe failed": ("p2p-hang", FAIL, "failed", does(put("failed", "p2p_probe", 0, "status"))),
    "gloo": ("gloo-with-gpus", WARN, "although there are 16 GPUs", does(put("gloo", "backend"))),
    "no libibverbs by the log": (
        "no-verbs",
        FAIL,
        "could not open libibverbs",
        lambda d: "node1:4000:4100 [0] NCCL INFO Failed to open libibverbs.so[.1]",
    ),
    "no adapter by the log": ("rdma-port-down", FAIL, "NCCL found no adapter", job(SOCKETS, lambda d: d.update(facts=[]))),
    "CUDA of the drivers by the log": (
        "mixed-driver",
        FAIL,
        "13010 on node1",
        lambda d: d.update(facts=[]) or text(INFINIBAND_JOB).replace("cudaDriverVersion 13000", "cudaDriverVersion 13010", 1),
    ),
    "IOMMU by the log": (
        "acs-redirect",
        WARN,
        "iommu=pt",
        lambda d: 'node1:4000:4100 [0] misc/file.cc:12 NCCL WARN Missing "iommu=pt" from kernel command line',
    ),
    "no reason": ("unexplained-error", FAIL, "Internal check", warn("failed")),
    "another warning": ("other-warning", WARN, "busid", warn("other")),
}

ETH: dict[str, tuple[str, str, str, Change]] = {
    "RoCE idle": (
        "roce-unused",
        WARN,
        "although mlx5_0 port 1 (100 Gbit/s RoCE) is active",
        does(lambda d: facts(d, rdma=ROCE), put("unknown", "expected", "network", "kind")),
    ),
    "1 GbE instead of the bond": (
        "wrong-interface",
        FAIL,
        "eth0 is used, while bond0 (100 Gbit/s) is up".replace("is used", "(1 Gbit/s) is used"),
        job(
            replace(ETHERNET_JOB, interface="eth0"),
            lambda d: nic(d, "eth0", mbit=1000),
            put("", "interface"),
            put("", "expected", "network", "interface"),
        ),
    ),
    "not the interface that was told": (
        "wrong-interface",
        FAIL,
        "traffic uses eth0 instead of bond0",
        job(replace(ETHERNET_JOB, interface="eth0")),
    ),
    "docker's bridge": ("wrong-interface", FAIL, "docker0, which leads to no", job(replace(ETHERNET_JOB, interface="docker0"))),
    "a bridge beside": (
        "extra-interfaces",
        FAIL,
        "br-0a1b beside bond0",
        lambda d: "node1:4000:4100 [0] NCCL INFO NET/Socket : Using [0]bond0:10.0.0.1<0> [1]br-0a1b:172.18.0.1<0>",
    ),
    "a prefix": (
        "interface",
        WARN,
        "NCCL_SOCKET_IFNAME=bond0 means bond0, bond0.2093",
        does(put("bond0", "environment", "NCCL_SOCKET_IFNAME"), lambda d: d["facts"][0]["nics"].append({"name": "bond0.2093"})),
    ),
    "a name that is not there": ("interface", FAIL, "means none of", does(put("=ens9", "environment", "NCCL_SOCKET_IFNAME"))),
    "a prefix by the log": (
        "ifname-prefix",
        WARN,
        "NCCL_SOCKET_IFNAME=bond0 took bond0.2093",
        lambda d: (
            d.update(facts=[])
            or put("bond0", "environment", "NCCL_SOCKET_IFNAME")(d)
            or "node1:4000:4100 [0] NCCL INFO Bootstrap : Using bond0.2093:10.1.0.1<0>"
        ),
    ),
    "layer2": ("bond", WARN, "hash layer2", does(lambda d: nic(d, "bond0", node=0, bond_hash="layer2"))),
    "layer2 at the speed of one link": (
        "bond-hash",
        FAIL,
        "the speed of one link (3.12 GB/s)",
        does(lambda d: nic(d, "bond0", node=0, bond_hash="layer2+3", mbit=50_000), lambda d: measured(d, "world", 2.9)),
    ),
    "a link of the bond is down": (
        "bond",
        WARN,
        "ens2 of ens1, ens2 down",
        does(lambda d: nic(d, "bond0", node=1, bond_links_up=["ens1"])),
    ),
    "small frames": ("mtu", WARN, "1500 bytes at 100 Gbit/s", does(lambda d: nic(d, "bond0", mtu=1500))),
    "one socket": (
        "one-socket",
        WARN,
        "1 TCP connection for each channel",
        does(lambda d: [d["environment"].pop(name) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]),
    ),
    "P2P off on PCIe": ("p2p-disabled", WARN, "NCCL_P2P_DISABLE", does(put("1", "environment", "NCCL_P2P_DISABLE"))),
    "P2P off by the driver": (
        "p2p-disabled",
        WARN,
        "1 pairs",
        lambda d: "node1:4000:4100 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can repress this message",
    ),
    "one switch, shared memory": (
        "p2p-disabled",
        WARN,
        "GPU0 and GPU1 share a PCIe switch",
        job(replace(ETHERNET_JOB, inside="SHM/direct/direct"), lambda d: facts(d, topology=SWITCH)),
    ),
    "ACS": ("pcie-p2p", WARN, "0000:00:03.1", does(lambda d: facts(d, acs_redirect=["0000:00:03.1"]))),
    "IOMMU and a hang": (
        "pcie-p2p",
        FAIL,
        "IOMMU",
        does(lambda d: facts(d, iommu=True), put("hung", "p2p_probe", 0, "status")),
    ),
    "memory for RDMA that nobody can lock": ("low-memlock", FAIL, "Cannot allocate", warn("memlock")),
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


def judged(base: Document, base_job: Job, change: Change) -> tuple[Document, dict[str, str], list[Finding]]:
    """The findings over an ill document."""
    document = copied(base)
    after = change(document)
    if isinstance(after, Job):
        log = text(after)
    elif after and "\n" in after[2000:]:
        log = after
    else:
        log = f"{text(base_job)}{after or ''}\n"
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
    base, base_job, rule, status, words, change = CASES[name]
    document, log, findings = judged(base, base_job, change)
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
    document, log, findings = judged(INFINIBAND, INFINIBAND_JOB, job(SOCKETS))
    shown = headline(document, read(log.values()), findings)
    assert shown.startswith("FAIL: traffic between nodes goes through NET/Socket on eth0 although mlx5_0 port 1")
    good = headline(INFINIBAND, read(logs(INFINIBAND_JOB).values()), judge(INFINIBAND, logs(INFINIBAND_JOB)))
    assert good.startswith("PASS: 2 nodes of 8 ranks over NET/IB/GDRDMA, P2P/CUMEM: 360 GB/s inside a node")


def test_the_cause_comes_before_its_echo() -> None:
    """When one rank fails all others report lost connections; the headline must name the first."""
    _, _, findings = judged(
        INFINIBAND,
        INFINIBAND_JOB,
        lambda d: "\n".join(str(warn(kind)(d)) for kind in ("peer-lost", "follows", "failed", "shm")),
    )
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
    pair_speeds(document, {"ab": 340, "ba": 200, "ac": 340, "ca": 340, "bc": 200, "cb": 340})
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
