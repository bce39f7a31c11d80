"""Facts of a node on which nothing is wrong, and for each rule what a bad one differs by: machine_cases.yaml."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from clustertune.check.machines import Expects, Machine
from clustertune.host.facts import from_dict

GOOD: dict[str, Any] = json.loads(Path(__file__).with_name("good_node.json").read_text())
"""A node of eight H100 with InfiniBand, in an srun step."""
CLUSTER: dict[str, Any] = {
    "name": "lab",
    "nodes": [{"name": "head", "roles": ["login", "slurmctld"]}, *({"name": f"gpu0{n}", "roles": ["compute"]} for n in (1, 2))],
    "compute": {"gpus": 8, "interconnect": "nvlink4"},
    "network": {"interface": "bond0", "kind": "infiniband", "gbit": 200, "subnet": "10.0.0.0/24", "hca": ["mlx5_0:1", "mlx5_4"],
                "ports": 8},
    "storage": {"shared": "/shared", "scratch": "/tmp", "bricks": [], "pool": None},
    "slurm": {"accounting": True},
    "container": {"runtime": "none"},
}  # fmt: skip
EXPECTS = {"gpus": 8, "cpus": 192, "nodes": 2, "launched": True}
Patch = dict[str, Any]

LOGIN: Patch = {"place": "login", "hostname": "head", "nvidia_devices": 0, "gpus": [], "rdma": []}
TWO_PCIE_GPUS: Patch = {
    "gpus": {"keep": 2}, "topology": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNODE\t0-47\nGPU1\tNODE\t X \t0-47\n",
    "nvidia_devices": 2, "cuda_devices": 2, "environment.CUDA_VISIBLE_DEVICES": "0,1", "iommu": False,
}  # fmt: skip
NFS = {
    **{"point": "/net", "kind": "nfs4", "source": "10.0.0.9:/x", "options": ["rw", "hard"]},
    **{"free_bytes": 10**13, "total_bytes": 10**14},
}
NAMED: dict[str, Patch] = {
    "LOGIN": LOGIN,
    "HERE": {"place": "here"},
    "DOCKER": {"container": "docker", "place": "container"},
    "REHEARSAL": {"environment.SLURM_CLUSTER_NAME": "rehearsal"},
    "NO_GPU": {"gpus": [], "nvidia_devices": 0, "cuda_devices": None},
    "TWO_PCIE_GPUS": TWO_PCIE_GPUS,
    "ETHERNET": {"network": {"interface": "bond0", "kind": "ethernet", "gbit": 200, "subnet": "10.0.0.0/24"}},
    "NFS": NFS,
    "POOL": {**NFS, "point": "/pool", "kind": "fuse.mergerfs", "source": "a:b"},
    "BOND": GOOD["nics"][0],
    "SLURM": {
        **{"AccountingStorageType": "accounting_storage/slurmdbd", "GresTypes": "gpu", "ConstrainDevices": "yes"},
        **{"TaskPlugin": "task/cgroup", "PropagateResourceLimits": "ALL", "PropagateResourceLimitsExcept": "MEMLOCK"},
        **{"StateSaveLocation": "/var/spool/slurm", "SlurmdSpoolDir": "/var/spool/slurmd", "KillWait": "30 sec"},
    },
}
"""What a ``+`` in a patch stands for."""


def plain(value: Any) -> Any:
    """A patch with what its ``+`` names in front of its own keys."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {key: item for name in value.get("+", "").split() for key, item in NAMED[name].items()}
    return {**named, **{key: plain(item) for key, item in value.items() if key != "+"}}


def patched(document: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """A copy with values replaced by their paths: ``gpus.0.ecc``, ``mounts.+`` adds one, ``gpus.*.mig`` all of a list.

    ``{"keep": 3}``: the first three of the list that stands there in ``document``.
    """
    found = copy.deepcopy(document)
    for path, value in plain(patch).items():
        kept = isinstance(value, dict) and set(value) == {"keep"}
        _set(found, path.split("."), copy.deepcopy(document[path][: value["keep"]]) if kept else value)
    return found


def _set(node: Any, words: list[str], value: Any) -> None:
    head, *rest = words
    if head == "*":
        for item in node:
            _set(item, rest, value)
    elif head == "+":
        node.append(value)
    else:
        key = int(head) if isinstance(node, list) else head
        if rest:
            _set(node[key], rest, value)
        else:
            node[key] = value


def machine(facts: Patch | None = None, cluster: Patch | None = None, **expects: Any) -> Machine:
    """The good node, changed."""
    return Machine(from_dict(patched(GOOD, facts or {})), patched(CLUSTER, cluster or {}), Expects(**{**EXPECTS, **expects}))


XID = "[863000.000000] NVRM: Xid (PCI:0000:18:00): {}, pid=1234, name=python"
_TABLE = yaml.load(Path(__file__).with_name("machine_cases.yaml").read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
CASES, EDGES = ([(*row, *({}, {}, {}, "")[len(row) - 2 :]) for row in _TABLE[key]] for key in ("bad", "near"))
"""Rule, status, what facts and cluster differ by, what is expected, and the one other rule that may speak as well."""
COMPARED: list[tuple[str, str, Patch, str]] = [tuple(row) for row in _TABLE["compared"]]
"""Rule, status, what the third of three nodes differs by, and words of what is found."""
