"""The edges of the rules: what must not fire, what is unknown, and what is reported of healthy machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clustertune.check.report import machine_findings
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN
from clustertune.nccl_check.judge import judge
from tests.doctor.machine_cases import machine
from tests.nccl_check.healthy import ETHERNET, ETHERNET_JOB, INFINIBAND, INFINIBAND_JOB, copied, logs, results
from tests.nccl_check.log_maker import Job, text
from tests.nccl_check.test_judge import (
    HEALTHY,
    ROCE,
    SOCKETS,
    Change,
    Document,
    does,
    facts,
    gpus,
    job,
    judged,
    measured,
    nic,
    pair_speeds,
    put,
    warn,
)


def all_facts(document: Document, **values: object) -> None:
    """Another fact of every node."""
    for one in document["facts"]:
        one.update(values)


def environment(**values: str) -> Change:
    """Other variables."""
    return lambda d: d["environment"].update(values)


def lines(*texts: str) -> Change:
    """Lines of NCCL at the end of the healthy log."""
    return lambda _: "\n".join(f"node1:4000:4100 [0] NCCL INFO {line}" for line in texts)


def no_facts(document: Document) -> None:
    """Nodes that told nothing."""
    document["facts"] = []


def kind(name: str) -> Change:
    """Another kind of network in the cluster file."""
    return put(name, "expected", "network", "kind")


def single(document: Document) -> None:
    """One node."""
    document.update(nodes=1, facts=document["facts"][:1])


def only(document: Document, scope: str) -> None:
    """Results of one scope."""
    document["results"] = [item for item in document["results"] if item["scope"] == scope]


def pairs_of(document: Document, collective: str, seconds: float = 1.0) -> None:
    """Pairs with one collective of both nodes."""
    pair_speeds(document, {"ab": 340, "ac": 100, "bc": 100})
    for item in document["per_pair"]:
        item.update(collective=collective, median_s=seconds)


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
IB: dict[str, tuple[str, list[str], Change]] = {
    # name: rule, the statuses of its findings, what is different from a healthy InfiniBand cluster
    "one node needs no interface": ("wrong-interface", [], job(replace(ONE_NODE, interface="docker0"), single)),
    "one node needs no subnet": ("several-subnets", [], job(ONE_NODE, single)),
    "one node needs no MTU": ("nodes-network", [], job(ONE_NODE, single)),
    "one node needs no address": ("link-local", [], lambda d: single(d) or text(ONE_NODE).replace("10.0.0.1<", "fe80::1<")),
    "RDMA may start over another interface": ("wrong-interface", [PASS], does(put("ib0", "interface"))),
    "a slow interface starts RDMA": ("wrong-interface", [PASS], does(lambda d: nic(d, "eth0", mbit=1000))),
    "no interfaces were told": ("interface", [], does(lambda d: all_facts(d, nics=[]))),
    "not known whether it is up": ("interface", [PASS, PASS], does(lambda d: nic(d, "eth0", up=None, carrier=None))),
    "an excluding name": ("interface", [PASS, PASS], does(environment(NCCL_SOCKET_IFNAME="^docker"))),
    "a name without facts": ("interface", [], does(environment(NCCL_SOCKET_IFNAME="eth"), no_facts)),
    "a name without interfaces": (
        "interface",
        [],
        does(environment(NCCL_SOCKET_IFNAME="eth"), lambda d: all_facts(d, nics=[])),
    ),
    "a prefix that matches once": ("interface", [PASS, PASS], does(environment(NCCL_SOCKET_IFNAME="eth"))),
    "a bridge does not matter to RDMA": (
        "extra-interfaces",
        [],
        lines("NET/Socket : Using [0]eth0:10.0.0.1<0> [1]br-1:172.1.0.1<0>"),
    ),
    "no MTU was told": ("mtu", [], does(lambda d: nic(d, "eth0", mtu=None))),
    "small frames beside RDMA": ("mtu", [], does(lambda d: nic(d, "eth0", mtu=1500))),
    "small frames under RoCE": ("mtu", [WARN], does(lambda d: nic(d, "eth0", mtu=1500), kind("roce"))),
    "a switched-off adapter of NCCL": (
        "socket-fallback",
        [FAIL],
        lambda d: no_facts(d) or kind("unknown")(d) or text(SOCKETS).replace(NO_DEVICE, LISTED),
    ),
    "libibverbs not looked for": (
        "rdma-verbs",
        [FAIL],
        does(lambda d: all_facts(d, verbs=None, rdma_devices=[], verbs_providers=[])),
    ),
    "libibverbs by the log": (
        "no-verbs",
        [FAIL],
        lambda d: no_facts(d) or "n1:1:1 [0] NCCL INFO Failed to open libibverbs.so[.1]",
    ),
    "a port of many is down": ("rdma-port", [WARN, PASS], does(lambda d: d["facts"][0]["rdma"][7].update(active=False))),
    "a good port by name": ("rdma-port", [PASS], does(put(["mlx5_3"], "expected", "network", "hca"))),
    "a node without adapters": ("rdma-port", [FAIL, PASS], does(lambda d: facts(d, rdma=[]))),
    "no adapter by the log": ("rdma-port-down", [FAIL], job(SOCKETS, no_facts)),
    "no adapter on one node": ("rdma-port-down", [], lambda d: single(d) or text(replace(ONE_NODE, net="Socket"))),
    "a plugin that nobody needs": ("net-plugin", [], lines("NET/Plugin : No plugin found (libnccl-net.so)")),
    "EFA before it was used": (
        "net-plugin",
        [],
        lambda d: kind("efa")(d) or d.update(transport="") or "NCCL version 2.28.9+cuda13.0\n" * 99,
    ),
    "no GPUDirect for no reason": ("gdr-off", [UNKNOWN], job(replace(INFINIBAND_JOB, gdr=False))),
    "GPUDirect is off by a new version": ("gdr-off", [WARN], lambda d: text(replace(INFINIBAND_JOB, gdr=False)) + GDR_OFF),
    "an old version with GPUDirect": ("gdr-off", [PASS], job(replace(INFINIBAND_JOB, version="2.21.5"))),
    "GPUDirect on one node": ("gdr-off", [], lambda d: single(d) or text(ONE_NODE) + GDR_OFF),
    "GPUDirect by the result": ("gdr-off", [PASS], job(replace(INFINIBAND_JOB, gdr=False), put("NET/IB/GDRDMA", "transport"))),
    "ports by the cluster file": ("adapters-unused", [WARN], job(ONE_ADAPTER, no_facts)),
    "one adapter, one port": ("adapters-unused", [PASS], job(ONE_ADAPTER, no_facts, put(1, "expected", "network", "ports"))),
    "one adapter, one GPU": ("adapters-unused", [PASS], job(replace(INFINIBAND_JOB, gpus=1, adapters=("mlx5_0",)), ONE_RANK)),
    "slow ports count for nothing": (
        "adapters-unused",
        [PASS],
        job(ONE_ADAPTER, lambda d: [p.update(gbit=25.0) for f in d["facts"] for p in f["rdma"][1:]]),
    ),
    "settings that a host had in turn": (
        "mixed-settings",
        [],
        lines("NCCL_PROTO set by environment to LL", "NCCL_PROTO set by environment to Simple"),
    ),
    "two libraries in one process": (
        "mixed-nccl",
        [PASS],
        lambda d: d.pop("software") and "".join(text(Job(version=v, nodes=1, gpus=1)) for v in ("2.27.5", "2.28.9")),
    ),
    "versions by the log": (
        "mixed-nccl",
        [FAIL],
        lambda d: d.pop("software") and text(INFINIBAND_JOB).replace("2.28.9+", "2.27.5+", 1),
    ),
    "no version anywhere": ("mixed-nccl", [], lambda d: d.pop("software") and "x\n" * 2000),
    "no versions were told": ("mixed-torch", [], does(put([{"node": "node1", "torch": ""}], "software"))),
    "drivers by the log": (
        "mixed-driver",
        [FAIL],
        lambda d: (
            all_facts(d, driver="") or text(INFINIBAND_JOB).replace("cudaDriverVersion 13000", "cudaDriverVersion 13010", 1)
        ),
    ),
    "a newer minor version of CUDA": (
        "driver",
        [PASS],
        lambda d: text(replace(INFINIBAND_JOB, version="2.25.1")).replace("+cuda12.4", "+cuda12.9"),
    ),
    "no driver by the log": ("driver", [], lambda d: text(INFINIBAND_JOB).replace("cudaDriverVersion", "cuda")),
    "a fault of ARM elsewhere": ("nccl-fault", [PASS], does(lambda d: all_facts(d, kernel="6.8.0-amd64"))),
    "a rank that is done": ("small-world", [PASS], does(put(0, "expected", "compute", "gpus"))),
    "one process alone": ("small-world", [PASS], lambda d: d.clear() or text(Job(nodes=1, gpus=1))),
    "GPUs that the facts show": (
        "small-world",
        [WARN],
        does(put(None, "expected", "compute", "gpus"), put(4, "gpus_per_node")),
    ),
    "NVLink by the driver": (
        "nvlink-unused",
        [FAIL],
        lines("P2P is disabled between connected GPUs 1 and 0. You can repress this"),
    ),
    "one GPU has no NVLink to use": ("nvlink-unused", [], job(ONE_GPU, ONE_RANK)),
    "P2P level LOC": ("p2p-disabled", [FAIL], does(environment(NCCL_P2P_LEVEL="LOC"))),
    "one GPU needs no P2P": ("p2p-disabled", [], job(ONE_GPU, environment(NCCL_P2P_DISABLE="1"), ONE_RANK)),
    "ACS behind NVLink": ("pcie-p2p", [], does(lambda d: all_facts(d, acs_redirect=["0000:00:03.1"], iommu=True))),
    "no PCIe was told": ("gpu-pcie", [PASS], does(lambda d: gpus(d, pcie_width=None, pcie_gen=None))),
    "no PCIe maximum was told": ("gpu-pcie", [PASS], does(lambda d: gpus(d, pcie_width_max=None, pcie_gen_max=None))),
    "no PCIe at all": ("gpu-pcie", [], does(lambda d: all_facts(d, gpus=[{"index": 0}]))),
    "no shm was told": ("shm", [], does(lambda d: all_facts(d, shm_bytes=None))),
    "one rank needs no shm": ("shm", [WARN], job(ONE_GPU, ONE_RANK, lambda d: all_facts(d, shm_bytes=1))),
    "no memlock was told": ("memlock", [], does(lambda d: all_facts(d, memlock_bytes=None))),
    "memlock without adapters": ("memlock", [FAIL], does(lambda d: all_facts(d, rdma=[], memlock_bytes=65536))),
    "memlock on one node": ("memlock", [WARN], job(ONE_NODE, single, lambda d: all_facts(d, memlock_bytes=65536))),
    "a probe that was skipped": ("p2p-hang", [], does(put([{"node": "node1", "status": "skipped"}], "p2p_probe"))),
    "nothing was measured": ("collective-hung", [], does(put([], "results"))),
    "a start without an end": (
        "collective-hung",
        [WARN],
        lambda d: d.clear() or text(INFINIBAND_JOB).replace("Init COMPLETE", "Init"),
    ),
    "a start that an error ended": (
        "collective-hung",
        [],
        lambda d: d.clear() or text(INFINIBAND_JOB).replace("Init COMPLETE", "Init") + f"{warn('shm')({})}\n",
    ),
    "no result was looked at": ("wrong-result", [], does(*(put([], key) for key in ("results", "per_node", "per_pair")))),
    "nothing expected": ("inter-speed", [UNKNOWN], does(put({}, "expected", "inter"))),
    "no nominal speed": ("inter-speed", [PASS], does(put(None, "expected", "inter", "nominal_gb_s"))),
    "one NVLink domain over nodes": ("inter-speed", [], does(put(72, "expected", "compute", "nvlink_domain"))),
    "a part of the adapters": ("inter-speed", [], does(lambda d: d.update(results=results("inter", 40, 2)))),
    "the only adapter": (
        "inter-speed",
        [PASS],
        does(put(1, "expected", "network", "ports"), lambda d: d.update(results=results("inter", 340, 2))),
    ),
    "nothing between nodes": ("inter-speed", [], does(lambda d: only(d, "intra"))),
    "one node, all its ranks": (
        "intra-speed",
        [PASS],
        job(ONE_NODE, single, lambda d: d.update(results=results("world", 360, 8))),
    ),
    "several nodes are not one": ("intra-speed", [], does(lambda d: only(d, "world"))),
    "gathers of pairs": ("slow-node", [FAIL], does(lambda d: pairs_of(d, "all_gather"), put([], "per_node"))),
    "short pairs": ("slow-node", [], does(lambda d: pairs_of(d, "p2p", 1e-5), put([], "per_node"))),
    "short gathers inside nodes": (
        "slow-node",
        [],
        does(put([], "per_pair"), lambda d: [item.update(median_s=1e-5) for item in d["per_node"]]),
    ),
    "half a pair": ("slow-node", [], does(put(HALF_A_PAIR, "per_pair"), put([], "per_node"))),
    "a slow node is not a slow pair": ("slow-pair", [PASS], does(lambda d: pair_speeds(d, OF_FIVE))),
    "three nodes have no slow pair": ("slow-pair", [], does(lambda d: pair_speeds(d, OF_THREE))),
    "a slow node is not asymmetric": (
        "asymmetric",
        [PASS],
        does(lambda d: pair_speeds(d, {"ab": 340, "ba": 340, "ac": 340, "ca": 100, "bc": 340, "cb": 100})),
    ),
    "one direction alone": ("asymmetric", [], does(lambda d: pair_speeds(d, {"ab": 340}))),
    "the echo of a refused peer": ("cuda", [], lambda d: "\n".join(warn(name)(d) for name in ("cuda", "p2p-refused"))),
    "the adapter's fault may be old": ("gdr-off", [UNKNOWN], job(replace(INFINIBAND_JOB, gdr=False, version="2.21.5"))),
    "an all-reduce is not an all-gather": (
        "inter-speed",
        [PASS],
        does(
            lambda d: d["results"].extend(
                {**item, "collective": "all_reduce", "busbw_gb_s": 1} for item in results("world", 1, 16)
            )
        ),
    ),
    "inside a node comes first": (
        "intra-speed",
        [PASS],
        job(ONE_NODE, single, lambda d: d.update(results=[*results("world", 1, 8), *results("intra", 360, 8)])),
    ),
    "jitter of short calls": ("jitter", [], does(lambda d: [item.update(spread=0.9, median_s=1e-5) for item in d["results"]])),
}

ETH: dict[str, tuple[str, list[str], Change]] = {
    "an adapter that NCCL lists": (
        "socket-fallback",
        [FAIL],
        lambda d: no_facts(d) or "node1:4000:4100 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB bond0:10.0.0.1<0>",
    ),
    "an IPoIB interface": ("socket-fallback", [FAIL], job(replace(ETHERNET_JOB, interface="ib0"), no_facts)),
    "adapters by a setting": ("socket-fallback", [FAIL], does(environment(NCCL_IB_HCA="mlx5_0"), kind("unknown"))),
    "RDMA by a setting": ("socket-fallback", [FAIL], does(environment(NCCL_IB_DISABLE="0"), kind("unknown"))),
    "a setting against the cluster file": ("socket-fallback", [PASS], does(environment(NCCL_IB_HCA="mlx5_0"))),
    "TCP, and nothing known": ("socket-fallback", [UNKNOWN], does(no_facts, kind("unknown"))),
    "TCP by the cluster file": ("socket-fallback", [PASS], does(no_facts)),
    "two ways by the result": (
        "socket-fallback",
        [FAIL],
        lambda d: d.update(transport="NET/AWS Libfabric, NET/Socket") or kind("efa")(d) or "x\n" * 2000,
    ),
    "nothing between nodes is known": ("socket-fallback", [], lambda d: d.clear() or "NCCL version 2.28.9+cuda13.0\n" * 99),
    "RoCE that is not meant": ("roce-unused", [PASS], does(lambda d: facts(d, rdma=ROCE))),
    "RoCE that is meant": ("roce-unused", [], does(lambda d: facts(d, rdma=ROCE), kind("roce"))),
    "RoCE is in use": ("roce-unused", [], job(OVER_ROCE, lambda d: facts(d, rdma=ROCE))),
    "disabled, as the cluster file says": ("ib-disabled", [], does(lambda d: facts(d, rdma=ROCE))),
    "disabled, and RoCE is there": ("ib-disabled", [WARN], does(lambda d: facts(d, rdma=ROCE), kind("unknown"))),
    "disabled, and nothing is there": ("ib-disabled", [], does(kind("unknown"))),
    "verbs that TCP does not need": ("rdma-verbs", [], does(lambda d: facts(d, rdma=ROCE, verbs=False))),
    "no libibverbs, and no adapter": ("no-verbs", [UNKNOWN], lines("Failed to open libibverbs.so[.1]")),
    "an adapter that cannot be opened": ("no-verbs", [FAIL], warn("no-verbs")),
    "an exact name": (
        "interface",
        [PASS, PASS],
        does(
            lambda d: [one["nics"].append({"name": "bond0.2093"}) for one in d["facts"]],
            environment(NCCL_SOCKET_IFNAME="==bond0"),
        ),
    ),
    "a bridge beside what was told": (
        "wrong-interface",
        [PASS],
        lines("NET/Socket : Using [0]bond0:10.0.0.1<0> [1]br-1:172.1.0.1<0>"),
    ),
    "no IOMMU, and no probe": ("pcie-p2p", [PASS], does(put([], "p2p_probe"))),
    "a bridge alone": ("extra-interfaces", [], job(replace(ETHERNET_JOB, interface="docker0"))),
    "the default of an idle link": (
        "bond",
        [PASS],
        does(lambda d: nic(d, "bond0", bond_mode="active-backup", bond_hash="layer2")),
    ),
    "round robin": ("bond", [PASS], does(lambda d: nic(d, "bond0", bond_mode="balance-rr", bond_hash="layer2"))),
    "a bond of one link": ("bond", [PASS], does(lambda d: nic(d, "bond0", bond_links=["ens1"], bond_hash="layer2"))),
    "a bond under RDMA": (
        "bond-hash",
        [],
        job(
            replace(ETHERNET_JOB, net="IB", adapters=("mlx5_bond_0",), link="RoCE"),
            lambda d: nic(d, "bond0", bond_hash="layer2"),
        ),
    ),
    "a spare link": ("bond", [WARN], does(lambda d: nic(d, "bond0", bond_mode="active-backup", bond_links_up=["ens1"]))),
    "a bond that is down": ("bond", [WARN], does(lambda d: nic(d, "bond0", up=False, bond_links_up=[]))),
    "links of no bond": ("bond", [], does(lambda d: nic(d, "bond0", bond_mode="", bond_links_up=[]))),
    "sockets that NCCL chose": (
        "one-socket",
        [PASS],
        lambda d: (
            environment(NCCL_SOCKET_NTHREADS="", NCCL_NSOCKS_PERTHREAD="")(d)
            or "node1:4000:4100 [0] NCCL INFO NET/Socket: Using 2 threads and 8 sockets per thread"
        ),
    ),
    "one socket on 25 Gbit/s": (
        "one-socket",
        [],
        does(environment(NCCL_SOCKET_NTHREADS="", NCCL_NSOCKS_PERTHREAD=""), put(25, "expected", "network", "gbit")),
    ),
    "memory for RDMA that TCP does not need": ("memlock", [], does(lambda d: all_facts(d, rdma=ROCE, memlock_bytes=65536))),
    "ACS that nobody could read": ("pcie-p2p", [UNKNOWN], does(lambda d: all_facts(d, acs_redirect=None, iommu=None))),
    "ACS read, IOMMU not": ("pcie-p2p", [PASS], does(lambda d: all_facts(d, iommu=None))),
    "an IOMMU that does no harm": ("pcie-p2p", [PASS], does(lambda d: all_facts(d, iommu=True))),
    "an IOMMU, and no probe": ("pcie-p2p", [WARN], does(lambda d: all_facts(d, iommu=True), put([], "p2p_probe"))),
    "one GPU behind ACS": ("pcie-p2p", [], does(lambda d: all_facts(d, gpus=[{"index": 0}], acs_redirect=["x"]))),
    "shared memory over the CPU": ("p2p-disabled", [], job(replace(ETHERNET_JOB, inside="SHM/direct/direct"))),
    "a network inside a node of one": ("shm-disabled", [], job(replace(ETHERNET_JOB, gpus=1), ONE_RANK)),
    "one GPU is measured with gloo": (
        "gloo-with-gpus",
        [PASS],
        does(put("gloo", "backend"), lambda d: d.update(facts=[{"hostname": "node1", "gpus": [{"index": 0}]}])),
    ),
    "gloo, and nothing known": ("gloo-with-gpus", [UNKNOWN], does(put("gloo", "backend"), no_facts)),
    "gloo has no world of GPUs": ("small-world", [], does(put("gloo", "backend"), put(2, "gpus_per_node"))),
    "gloo inside a node": ("intra-speed", [], does(put("gloo", "backend"), lambda d: measured(d, "intra", 0.1))),
    "gloo inside one of two nodes": (
        "slow-node",
        [],
        does(put("gloo", "backend"), lambda d: [item.update(busbw_gb_s=1) for item in d["per_node"][:3]]),
    ),
    "gloo's jitter": ("jitter", [], does(put("gloo", "backend"), lambda d: [item.update(spread=2.0) for item in d["results"]])),
}
CASES = {
    **{f"infiniband: {name}": (INFINIBAND, INFINIBAND_JOB, *case) for name, case in IB.items()},
    **{f"ethernet: {name}": (ETHERNET, ETHERNET_JOB, *case) for name, case in ETH.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_to_its_edge(name: str) -> None:
    """What is absent is unknown, what does not matter here is silent: else people switch the check off."""
    base, base_job, rule, statuses, change = CASES[name]
    _, _, findings = judged(base, base_job, change)
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
    all_facts(document, **values)
    statuses = {item.status for item in judge(document, logs(INFINIBAND_JOB)) if item.rule == rule}
    doctor = {item.status for item in machine_findings(machine(values)) if item.rule == rule}
    assert statuses == doctor == {status}
