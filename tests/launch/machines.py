"""Clusters that tests make up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertune.config.cluster_schema import Cluster

REPO = Path(__file__).resolve().parents[2]
CLUSTER_FILES = sorted(path.stem for path in (REPO / "ops" / "clusters").glob("*.yaml"))
RECIPES = sorted(path.parent.name for path in (REPO / "recipes").glob("*/recipe.yaml"))


def machine(nodes: int = 2, gpus: int = 8, *, memory_gb: float = 3900, threads: int = 256, **facts: Any) -> Cluster:
    """``nodes`` nodes n1, n2, ... with ``gpus`` GPUs of 96 GB each."""
    compute: dict[str, Any] = {"gpus": gpus, "cores": max(1, threads // 2), "threads": threads, "memory_gb": memory_gb}
    if gpus:
        compute["gpu"] = "rtx-pro-6000-blackwell-server"
    body: dict[str, Any] = {
        "name": "made-up",
        "nodes": [{"name": f"n{i}", "address": f"10.0.0.{i}", "roles": ("compute",)} for i in range(1, nodes + 1)],
        "compute": compute,
        "network": {"kind": "ethernet", "interface": "eth0", "gbit": 100},
        "slurm": {"partition": "gpu", "gres": "rtx_pro_6000" if gpus else None},
        "source": "a test",
    }
    return Cluster(**{**body, **facts})
