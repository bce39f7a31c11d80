"""Cluster files for the tests of Slurm's files: the one of the project, and odd ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster


def at(*addresses: str) -> list[dict[str, Any]]:
    """A head and two nodes at these addresses."""
    roles = (["login", "slurmctld"], ["compute"], ["compute"])
    names = ("head", "n1", "n2")
    return [{"name": n, "address": a, "roles": r} for n, a, r in zip(names, addresses, roles, strict=True)]


BASE: dict[str, Any] = {
    "name": "odd",
    "nodes": at("10.99.1.1", "10.99.1.11", "10.99.1.12"),
    "compute": {
        "gpus": 4, "gpu": "h100-sxm", "interconnect": "nvlink4", "sockets": 2, "cores": 32, "threads": 64, "memory_gb": 512,
        "numa_gpus": [[0, 1], [2, 3]], "numa_cpus": ["0-15,32-47", "16-31,48-63"],
    },
    "network": {"interface": "eth0", "kind": "ethernet", "gbit": 100},
    "slurm": {"partition": "gpu", "gres": "h100"},
}  # fmt: skip


def nodes(names: list[str], start: int = 0) -> list[dict[str, Any]]:
    """Compute nodes of these names, each with an address of its own."""
    found = []
    for index, name in enumerate(names, start):
        found.append({"name": name, "address": f"10.99.{2 + index // 200}.{1 + index % 200}", "roles": ["compute"]})
    return found


def write(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """BASE with other sections (a dict changes the keys of one; None removes it) as a file."""
    data = copy.deepcopy(BASE)
    for key, value in (changes or {}).items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            data[key] = {name: part for name, part in {**data[key], **value}.items() if part is not None}
        elif value is None:
            data.pop(key, None)
        else:
            data[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def load(folder: Path, changes: dict[str, Any] | None = None) -> Cluster:
    """The same, read."""
    return load_cluster(str(write(folder, changes)))


HEAD = BASE["nodes"][0]
NO_GPU = {"gpus": 0, "gpu": None, "interconnect": None, "numa_gpus": None, "numa_cpus": None}
ODD: dict[str, dict[str, Any]] = {
    "CPU only": {"compute": NO_GPU, "slurm": {"gres": None}},
    "one machine is all": {"nodes": [{"name": "solo", "address": "10.99.1.5", "roles": ["login", "compute", "slurmctld"]}]},
    "a thousand": {"nodes": [HEAD, *nodes([f"gpu{index:04d}" for index in range(1, 1001)])]},
    "a thousand with a suffix": {"nodes": [HEAD, *nodes([f"gpu{index:04d}-x" for index in range(1, 1001)])]},
    "widths": {"nodes": [HEAD, *nodes(["n8", "n9", "n10", "n11", "m08", "m09", "m10", "n08"])]},
    "no type": {"slurm": {"gres": None}},
    "a number as type": {"slurm": {"gres": "4090"}},
    "hyphens": {"nodes": [HEAD, *nodes(["rno-it-gpu0007-1", "rno-it-gpu0008-1", "a-b-1", "a-b-2"])]},
    "IPv6": {"nodes": at("fd00:99::1", "fd00:99::11", "fd00:99::12")},
    "names for addresses": {"nodes": at("head", "n1", "n2")},
    "four NUMA nodes": {
        "compute": {"numa_gpus": [[0], [1], [2], [3]], "numa_cpus": ["0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"]}
    },
    "one GPU": {"compute": {"gpus": 1, "numa_gpus": [[0], []], "interconnect": "none"}},
    "other partition": {"slurm": {"partition": "big", "max_time": "2-00:00:00"}},
}
