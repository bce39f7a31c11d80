"""Facts of a node on which nothing is wrong, and for each rule what a bad one differs by."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from clustertune.check.machine import Expects, Machine
from clustertune.host.facts import from_dict

GOOD: dict[str, Any] = json.loads(Path(__file__).with_name("good_node.json").read_text())
"""A node of eight H100 with InfiniBand, in an srun step."""
CLUSTER: dict[str, Any] = {
    "name": "lab",
    "nodes": [
        {"name": "head", "roles": ["login", "slurmctld"]},
        {"name": "gpu01", "roles": ["compute"]},
        {"name": "gpu02", "roles": ["compute"]},
    ],
    "compute": {"gpus": 8, "interconnect": "nvlink4"},
    "network": {
        "interface": "bond0",
        "kind": "infiniband",
        "gbit": 200,
        "subnet": "10.0.0.0/24",
        "hca": ["mlx5_0:1", "mlx5_4"],
        "ports": 8,
    },
    "storage": {"shared": "/shared", "scratch": "/tmp", "bricks": [], "pool": None},
    "slurm": {"accounting": True},
    "container": {"runtime": "none"},
}
EXPECTS = {"gpus": 8, "cpus": 192, "nodes": 2, "launched": True}
Patch = dict[str, Any]


def patched(document: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """A copy with values replaced by their paths: ``gpus.0.ecc``, ``mounts.+`` adds one, ``gpus.*.mig`` all of a list."""
    found = copy.deepcopy(document)
    for path, value in patch.items():
        _set(found, path.split("."), value)
    return found


def _set(node: Any, words: list[str], value: Any) -> None:
    head, *rest = words
    if head == "*":
        for item in node:
            _set(item, rest, value)
    elif head == "+":
        node.append(value)
    elif not rest:
        node[int(head) if isinstance(node, list) else head.replace("~", ".")] = value
    else:
        _set(node[int(head) if isinstance(node, list) else head], rest, value)


def machine(facts: Patch | None = None, cluster: Patch | None = None, **expects: Any) -> Machine:
    """The good node, changed."""
    return Machine(from_dict(patched(GOOD, facts or {})), patched(CLUSTER, cluster or {}), Expects(**{**EXPECTS, **expects}))


ETHERNET: Patch = {"network": {"interface": "bond0", "kind": "ethernet", "gbit": 200, "subnet": "10.0.0.0/24"}}
PCIE_TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNODE\t0-47\nGPU1\tNODE\t X \t0-47\n"
TWO_PCIE_GPUS: Patch = {"gpus": GOOD["gpus"][:2], "topology": PCIE_TOPOLOGY, "nvidia_devices": 2, "cuda_devices": 2,
                        "environment.CUDA_VISIBLE_DEVICES": "0,1", "iommu": False}  # fmt: skip
NFS = {
    "point": "/net",
    "kind": "nfs4",
    "source": "10.0.0.9:/x",
    "options": ["rw", "hard"],
    "free_bytes": 10**13,
    "total_bytes": 10**14,
}
POOL = {**NFS, "point": "/pool", "kind": "fuse.mergerfs", "source": "a:b"}
LOGIN: Patch = {"place": "login", "hostname": "head", "nvidia_devices": 0, "gpus": [], "rdma": []}
DOCKER: Patch = {"container": "docker", "place": "container"}
USER_SITE_PACKAGE = {"name": "transformers", "version": "4.40.0", "location": GOOD["user_site"]}
OTHER_PACKAGE = {"name": "torch", "version": "2.11.0", "location": "/usr/local/torch"}
XID = "[863000.000000] NVRM: Xid (PCI:0000:18:00): {}, pid=1234, name=python"

Case = tuple[str, str, Patch, Patch, dict[str, Any]]
"""Rule, status, what facts differ by, what the cluster differs by, what is expected instead."""

_CASES: list[tuple[Any, ...]] = [
    # GPUs
    ("gpu-driver", "fail", {"gpus": [], "nvidia_smi": "Failed to initialize NVML: Driver/library version mismatch"}),
    ("gpu-driver", "fail", {"gpus": [], "nvidia_smi": "no answer within 45 s"}),
    ("gpu-driver", "fail", {"nvidia_smi": "Unable to determine the device handle for GPU1: 0000:28:00.0: Unknown Error"}),
    ("gpu-driver", "fail", {"gpus": [], "cuda_devices": None}, {}, {"gpus": None}),
    ("gpu-driver", "fail", {"gpus": [], **DOCKER}, {}, {"gpus": None}),
    ("gpu-count", "fail", {"cuda_devices": 7}),
    ("gpu-count", "fail", {"gpus": GOOD["gpus"][:7], "cuda_devices": None}),
    ("gpu-count", "fail", {"gpus": [], "nvidia_devices": 0, "cuda_devices": None, "driver": ""}),
    ("gpu-count", "warn", {"environment.CUDA_VISIBLE_DEVICES": "0,1"}, {}, {"gpus": 2}),
    ("gpu-mixed", "warn", {"gpus.3.name": "NVIDIA A100-SXM4-80GB"}),
    ("gpu-mixed", "warn", {"gpus.3.memory_mib": 40960}),
    ("gpu-in-use", "fail", {"gpus.2.used_mib": 40000, "gpus.2.pids": [77]}),
    ("gpu-in-use", "warn", {"gpus.2.pids": [77]}),
    ("gpu-compute-mode", "fail", {"gpus.0.compute_mode": "Prohibited"}),
    ("gpu-compute-mode", "warn", {"gpus.0.compute_mode": "Exclusive_Process"}),
    ("gpu-mig", "fail", {"gpus.1.mig": True}),
    ("gpu-persistence", "warn", {"gpus.7.persistence": False}),
    ("gpu-throttled", "warn", {"gpus.5.throttle": ["hw_thermal_slowdown"]}),
    ("gpu-throttled", "warn", {"gpus.5.throttle": ["sw_power_cap"]}),
    ("gpu-ecc", "fail", {"gpus.5.ecc_uncorrected": 2}),
    ("gpu-ecc", "warn", {"gpus.5.ecc": False}),
    ("gpu-row-remap", "warn", {"gpus.5.remap_pending": True}),
    ("gpu-row-remap", "fail", {"gpus.5.remap_failed": True}),
    ("gpu-xid", "fail", {"xids.+": XID.format(79)}),
    ("gpu-xid", "fail", {"xids.+": "kernel: NVRM: Xid (PCI:0000:18:00): 119, Timeout after 6s of waiting for RPC"}),
    ("gpu-xid", "warn", {"xids.+": XID.format(63)}),
    ("gpu-xid", "warn", {"xids.+": "[    100.000000] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."}),
    # CUDA and PCIe
    ("cuda-init", "fail", {"cuda_init": 802, "cuda_devices": None}),
    ("cuda-init", "fail", {"cuda_init": 7777, "cuda_devices": None}),
    ("driver-cuda", "fail", {"driver": "570.124.06", "cuda_driver": "12.8"}),
    ("driver-cuda", "fail", {"driver": "470.57.02", "torch_cuda": "12.8"}),
    ("cuda-compat", "warn", {"cuda_library": "/usr/local/cuda/compat/libcuda.so.580.65"}),
    ("cuda-compat", "fail", {"cuda_library": "/usr/local/cuda/compat/libcuda.so.1", "cuda_init": 804}, {}, {}, "cuda-init"),
    ("cuda-visible-devices", "fail", {"environment.CUDA_VISIBLE_DEVICES": "0"}),
    ("cuda-visible-devices", "warn", {"environment.CUDA_VISIBLE_DEVICES": "", "place": "here"}),
    ("gpu-pcie", "warn", {"gpus.6.pcie_width": 8}),
    ("gpu-pcie", "warn", {"gpus.6.pcie_gen": 4}),
    ("pcie-p2p", "warn", {**TWO_PCIE_GPUS, "acs_redirect": ["0000:17:01.0"]}, {}, {"gpus": 2}),
    ("pcie-p2p", "warn", {**TWO_PCIE_GPUS, "iommu": True}, {}, {"gpus": 2}),
    ("gpudirect-rdma", "warn", {"peermem": False}),
    ("gpu-numa", "warn", {"affinity_list": "0-47,96-143", "affinity": 96, "environment.SLURM_CPUS_PER_TASK": "96"}),
    # the network
    ("interface", "fail", {"nics.0.name": "bond1"}),
    ("interface", "fail", {"nics.0.up": False}),
    ("interface", "fail", {"nics.0.carrier": False}),
    ("interface", "fail", {"nics.0.addresses": []}),
    ("interface", "warn", {"environment.NCCL_SOCKET_IFNAME": "ens1"}, {}, {"launched": False}),
    ("interface", "fail", {"environment.NCCL_SOCKET_IFNAME": "=ens1"}, {}, {"launched": False}),
    ("interface", "fail", {"nics.3.up": False, "environment.NCCL_SOCKET_IFNAME": "ib0"}, {}, {"launched": False}),
    ("interface-subnet", "fail", {"nics.0.addresses": ["192.168.7.3/24"]}),
    ("interface-speed", "warn", {"nics.0.mbit": 100000, "rdma": []}, ETHERNET),
    ("bond", "warn", {"nics.0.bond_links_up": ["ens1f0"]}),
    ("bond", "warn", {"nics.0.bond_hash": "layer2", "rdma": []}, ETHERNET),
    ("mtu", "warn", {"nics.0.mtu": 1500, "rdma": []}, ETHERNET),
    ("rdma-port", "warn", {"rdma.4.active": False, "rdma.4.state": "DOWN"}),
    ("rdma-port", "fail", {"rdma.0.active": False, "rdma.4.active": False}),
    ("rdma-port", "fail", {"rdma": [], "rdma_devices": []}),
    ("rdma-port", "fail", {"rdma.*.active": False}, {"network.hca": []}),
    ("rdma-port", "warn", {"rdma.7.active": False}),
    ("rdma-verbs", "fail", {"rdma_devices": ["/dev/infiniband/rdma_cm"]}),
    ("rdma-verbs", "fail", {"verbs": False}),
    ("rdma-verbs", "warn", {"verbs_providers": []}),
    ("rdma-verbs", "warn", {"verbs_providers": ["efa"]}),
    ("network-kind", "warn", {}, ETHERNET),
    ("network-kind", "fail", {"environment.NCCL_IB_DISABLE": "1"}, {}, {}, "nccl-settings"),
    ("ephemeral-ports", "warn", {"port_range": [1024, 65535]}),
    ("ephemeral-ports", "warn", {"environment.MASTER_PORT": "40000"}, {}, {}, "rank-variables"),
    ("hostname-loopback", "warn", {"own_addresses": ["127.0.1.1"]}, {"network.interface": None}),
    ("hostname-loopback", "warn", {"own_addresses": []}),
    ("node-names", "fail", {"names.gpu02": []}),
    ("node-names", "fail", {"names.gpu02": ["127.0.0.1"]}),
    # limits
    ("shm", "fail", {"shm_bytes": 67108864, "shm_free_bytes": 67108864}),
    ("shm", "fail", {"shm_bytes": 0, "shm_free_bytes": 0}),
    ("shm", "warn", {"shm_bytes": 512 << 20, "shm_free_bytes": 512 << 20}),
    ("shm", "fail", {"shm_free_bytes": 100 << 20}),
    ("shm", "warn", {"shm_free_bytes": 200 << 20}),
    ("memlock", "fail", {"memlock_bytes": 65536}),
    ("memlock", "fail", {"memlock_bytes": 8 << 20}),
    ("memlock", "warn", {"memlock_bytes": 1 << 30}),
    ("memlock", "warn", {**LOGIN, "memlock_bytes": 65536, "slurm": {"PropagateResourceLimits": "ALL"}}),
    ("open-files", "warn", {"nofile": 1024}),
    ("open-files", "fail", {"nofile": 128}),
    ("processes", "warn", {"nproc": 1024}),
    ("cores-in-step", "fail", {"affinity": 1, "affinity_list": "0"}, {}, {}, "gpu-numa"),
    ("cores-in-step", "warn", {"affinity": 190, "affinity_list": "0-189"}),
    ("memory", "warn", {"memory_available_bytes": 500 * 10**9}),
    ("swap", "warn", {"swap_used_bytes": 8 << 30}),
    ("huge-pages", "warn", {"thp_defrag": "always"}),
    ("kernel", "warn", {"kernel": "4.18.0-553.el8_10.x86_64"}),
    ("glibc", "fail", {"glibc": "2.17"}),
    ("clock", "warn", {"clock_synchronised": False, "clock_offset_s": None}),
    ("clock", "warn", {"clock_offset_s": 42.0}),
    # storage
    ("mount-silent", "fail", {"mounts.3.silent": True}),
    ("mount-silent", "warn", {"mounts.+": {**NFS, "silent": True}}),
    ("mount-silent", "fail", {"mounts.3.fault": "Stale file handle"}),
    ("gpu-driver", "warn", {"gpus": [], "nvidia_smi": "no answer within 20 s"}),
    ("mount-missing", "fail", {}, {"storage.bricks": [{"node": "gpu02", "path": "/data", "mount": "/bricks/gpu02"}]}),
    ("mount-missing", "fail", {}, {"storage.pool": {"mount": "/pool"}}),
    ("mount-missing", "warn", {"container": "apptainer", "place": "container+step"}, {"storage.pool": {"mount": "/pool"}}),
    ("mount-read-only", "fail", {"mounts.1.options": ["ro"]}),
    ("nfs-options", "warn", {"mounts.3.options": ["rw", "soft", "vers=4.2"]}),
    ("nfs-options", "warn", {"mounts.3.options": ["rw", "hard", "nolock"]}),
    ("pool-mmap", "warn", {"mounts.+": {**POOL, "options": ["rw", "cache.files=off"]}}),
    ("pool-branch", "fail", {"mounts.+": {**POOL, "options": ["rw", "branches=/bricks/a=RW:/tmp/b=RW"]}}),
    ("nfs-over-fuse", "fail", {"mounts.+": POOL, "exports": ["/pool/data"]}),
    ("mmap", "warn", {"probes.6.ok": False, "probes.6.said": "No such device"}),
    ("flock", "fail", {"probes.1.ok": False, "probes.1.said": "No locks available"}),
    ("noexec", "warn", {"probes.5.ok": False, "probes.5.said": "Operation not permitted"}),
    ("compiler-cache", "warn", {"environment.TRITON_CACHE_DIR": "/shared/triton"}),
    ("compiler-cache", "warn", {"mounts.4.kind": "nfs4"}, {}, {"launched": False}, "hub-cache"),
    ("hub-cache", "warn", {"environment.HF_HOME": "/shared/hf"}),
    ("disk-full", "warn", {"mounts.1.free_bytes": 5 * 10**9}),
    ("disk-full", "fail", {"mounts.1.free_bytes": 0}),
    ("inodes", "warn", {"mounts.1.free_inodes": 500}),
    ("inodes", "fail", {"mounts.1.free_inodes": 0}),
    ("scratch", "warn", {}, {"storage.scratch": "/shared"}),
    ("scratch", "fail", {"probes.*.ok": None, "probes.*.said": "Permission denied"}),
    ("container-root", "warn", {**DOCKER, "mounts.0.kind": "overlay", "mounts.0.free_bytes": 1 << 20}),
    ("secret-mode", "warn", {"files.0.mode": 0o644}),
    ("program-mode", "warn", {"files.1.mode": 0o666}),
    # the stack
    ("user-site", "warn", {"packages.+": USER_SITE_PACKAGE}),
    ("user-site", "fail", {"packages.+": USER_SITE_PACKAGE, "container": "apptainer", "place": "container+step"}),
    ("python-path", "warn", {"environment.PYTHONPATH": "/users/alice/src"}),
    ("scattered-packages", "warn", {"packages.4": OTHER_PACKAGE}),
    ("library-path", "warn", {"libraries": ["/usr/local/nccl/lib/libnccl.so.2"]}),
    ("library-path", "fail", {"libraries": ["/usr/local/cuda/lib64/stubs/libcuda.so"]}),
    ("nccl-twice", "warn", {"packages.+": {"name": "nvidia-nccl-cu12", "version": "2.27.3", "location": "/x"}}),
    ("preload", "warn", {"environment.LD_PRELOAD": "/usr/lib/libjemalloc.so"}),
    ("nccl-settings", "fail", {"environment.NCCL_ALGO": "Tree"}),
    ("nccl-settings", "warn", {"environment.NCCL_ALGO": "Ring"}),
    ("nccl-settings", "fail", {"environment.NCCL_P2P_DISABLE": "1"}),
    ("nccl-settings", "warn", {"nccl_conf.NCCL_P2P_DISABLE": "1 (/etc/nccl.conf)", "topology": ""}),
    ("debug-settings", "warn", {"environment.CUDA_LAUNCH_BLOCKING": "1"}),
    ("debug-settings", "warn", {"environment.TORCH_DISTRIBUTED_DEBUG": "detail"}),
    ("rank-variables", "warn", {"environment.WORLD_SIZE": "2"}),
    ("proxy", "warn", {"environment.https_proxy": "http://***@proxy:3128", "environment.NO_PROXY": "10.0.0.0/8"}),
    ("threads", "warn", {"environment.OMP_NUM_THREADS": "999"}),
    # Slurm
    ("slurm-controller", "fail", {**LOGIN, "slurm_silent": "slurm_load_ctl_conf error: Unable to contact slurm controller"}),
    ("slurm-nodes", "warn", {**LOGIN, "slurm": {"AccountingStorageType": "x/slurmdbd"}, "slurm_nodes": {"gpu02": "down* (x)"}}),
    ("slurm-accounting", "warn", {**LOGIN, "slurm": {"AccountingStorageType": "accounting_storage/none"}}),
    (
        "slurm-devices",
        "warn",
        {**LOGIN, "slurm": {"GresTypes": "gpu", "TaskPlugin": "task/affinity", "AccountingStorageType": "x/slurmdbd"}},
    ),
    (
        "slurm-affinity",
        "warn",
        {
            **LOGIN,
            "slurm": {
                "GresTypes": "gpu",
                "TaskPlugin": "task/none",
                "ConstrainDevices": "yes",
                "AccountingStorageType": "x/slurmdbd",
            },
        },
    ),
    ("srun-cpus", "warn", {"place": "here", "environment.SRUN_CPUS_PER_TASK": ""}),
]

CASES: list[tuple[str, str, Patch, Patch, dict[str, Any], str]] = [
    (rule, status, facts, *(rest + ({}, {}, "")[len(rest) :]))  # type: ignore[misc]
    for rule, status, facts, *rest_ in _CASES
    for rest in [tuple(rest_)]
]
"""Rule, its status, what facts and cluster differ by, what is expected, and the one other rule that may speak as well."""
