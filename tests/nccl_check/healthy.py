"""Results of healthy machines, as ``nccl-check`` writes them: an InfiniBand cluster, an Ethernet one, a laptop."""

from __future__ import annotations

import copy
from typing import Any

from clustertune.host.system import GIB
from tests.nccl_check.log_maker import Job, text

NVLINK_TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n"
PCIE_TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tPHB\t0-31\nGPU1\tPHB\t X \t0-31\n"


def results(scope: str, gb_s: float, ranks: int) -> list[dict[str, Any]]:
    """All-gathers of large sizes at one speed."""
    factor = (ranks - 1) / ranks
    about = {"scope": scope, "collective": "all_gather", "ranks": ranks, "iterations": 20, "spread": 0.04, "correct": True}
    speed = {"algbw_gb_s": gb_s / factor, "busbw_gb_s": gb_s}
    return [{**about, **speed, "bytes": size, "median_s": size * factor / gb_s / 1e9} for size in (2**26, 2**28, GIB)]


def node(name: str, number: int, *, infiniband: bool) -> dict[str, Any]:
    """What one node tells of itself."""
    gpu, gen = ("NVIDIA H100 80GB HBM3", 5) if infiniband else ("NVIDIA L40S", 4)
    pcie = {"pcie_gen": gen, "pcie_gen_max": gen, "pcie_width": 16, "pcie_width_max": 16}
    up = {"up": True, "carrier": True, "mtu": 9000}
    links = ["ens1", "ens2"]
    bond = {"bond_mode": "802.3ad", "bond_hash": "layer3+4", "bond_links": links, "bond_links_up": links}
    nics = [
        {"name": "lo", "up": True, "addresses": ["127.0.0.1/8"]},
        {"name": "eth0", **up, "mbit": 25_000, "addresses": [f"10.0.0.{number}/24"]},
        {"name": "bond0", **up, "mbit": 100_000, "addresses": [f"10.1.0.{number}/24"], **bond},
    ]
    port = {"port": 1, "active": True, "state": "ACTIVE", "physical": "LinkUp", "gbit": 400.0, "link_layer": "InfiniBand"}
    return {
        "packages": [{"name": "torch", "version": "2.13.0", "location": "/venv"}],
        "hostname": name, "kernel": "5.15.0-119-generic", "driver": "580.95.05", "memlock_bytes": -1,
        "shm_bytes": 500 * GIB, "shm_free_bytes": 499 * GIB, "iommu": False, "acs_redirect": [],
        "gpus": [{"index": index, "name": gpu, **pcie} for index in range(8)],
        "topology": NVLINK_TOPOLOGY if infiniband else PCIE_TOPOLOGY,
        "peermem": infiniband or None,
        "nics": nics[:2] if infiniband else nics,
        "rdma": [{**port, "device": f"mlx5_{n}"} for n in range(8)] if infiniband else [],
        "rdma_devices": ["uverbs0", "uverbs1"] if infiniband else [],
        "verbs": True if infiniband else None,
        "verbs_providers": ["mlx5"] if infiniband else [],
    }  # fmt: skip


def pairs(gb_s: float) -> list[dict[str, Any]]:
    """What two nodes send each other."""
    speed = {"algbw_gb_s": gb_s, "busbw_gb_s": gb_s, "median_s": GIB / gb_s / 1e9, "correct": True}
    both = (["node1", "node2"], ["node2", "node1"])
    return [{"collective": "p2p", "bytes": GIB, **speed, "nodes": nodes} for nodes in both]


def _cluster(*, infiniband: bool) -> dict[str, Any]:
    inside, between = (360.0, 340.0) if infiniband else (15.0, 5.5)
    interface = "eth0" if infiniband else "bond0"
    kind, gbit, ports, subnet = ("infiniband", 400, 8, "10.0.0.0/24") if infiniband else ("ethernet", 100, 1, "10.1.0.0/24")
    names = ("node1", "node2")
    return {
        "schema": "clustertune.nccl-check/1", "cluster": "healthy", "nodes": 2, "gpus_per_node": 8, "backend": "nccl",
        "transport": "NET/IB" if infiniband else "NET/Socket", "interface": interface, "hosts": list(names),
        "results": [*results("world", between, 16), *results("intra", inside, 8)],
        "per_node": [{**entry, "node": name} for name in names for entry in results("intra", inside, 8)],
        "per_pair": pairs(between),
        "p2p_probe": [{"node": name, "gpus": [0, 1], "status": "ok"} for name in names],
        "facts": [node(name, number, infiniband=infiniband) for number, name in enumerate(names, 1)],
        "environment": {"NCCL_DEBUG": "WARN"},
        "expected": {
            "compute": {"gpus": 8, "interconnect": "nvlink4" if infiniband else "pcie4", "nvlink_domain": 0},
            "network": {"kind": kind, "gbit": gbit, "ports": ports, "interface": interface, "subnet": subnet, "hca": []},
            "intra": {"nominal_gb_s": 450 if infiniband else 32, "expected_gb_s": 360 if infiniband else 16},
            "inter": {"nominal_gb_s": 400 if infiniband else 12.5, "expected_gb_s": 352 if infiniband else 5.6},
        },
    }  # fmt: skip


INFINIBAND = _cluster(infiniband=True)
INFINIBAND_JOB = Job()
"""Two nodes of 8 GPUs with NVLink and 8 InfiniBand adapters each."""

ETHERNET = _cluster(infiniband=False)
ETHERNET["environment"] |= {
    "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=bond0", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_P2P_DISABLE": "0",
}  # fmt: skip
ETHERNET_JOB = Job(inside="P2P/IPC", net="Socket", interface="bond0", adapters=(), path="PHB")
"""Two nodes of 8 GPUs on PCIe with a bond of 100 Gbit/s, and the environment that clustertune gives them."""

LAPTOP = {
    "schema": "clustertune.nccl-check/1", "nodes": 1, "gpus_per_node": 2, "backend": "gloo", "backend_why": "no GPUs",
    "transport": "gloo TCP", "hosts": ["laptop"], "environment": {}, "expected": {},
    "results": [*results("world", 1.1, 2), *results("intra", 1.1, 2)],
    "per_node": [{**entry, "node": "laptop"} for entry in results("intra", 1.1, 2)],
    "facts": [{"hostname": "laptop", "shm_bytes": 64 * 2**20, "memlock_bytes": 65536, "nics": [{"name": "lo", "up": True}]}],
}  # fmt: skip
"""Two gloo ranks on a machine without a GPU, as a desktop and its containers are set up."""


def copied(document: dict[str, Any]) -> dict[str, Any]:
    """One that a test may change."""
    return copy.deepcopy(document)


def logs(job: Job) -> dict[str, str]:
    """The log of a job as the judge takes it."""
    return {"all": text(job)}
