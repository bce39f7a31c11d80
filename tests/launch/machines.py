"""Clusters that tests make up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster

REPO = Path(__file__).resolve().parents[2]
CLUSTER_FILES = sorted(path.stem for path in (REPO / "ops" / "clusters").glob("*.yaml"))
FITTING = {
    "tiny-oasst2": "rno-rtxpro6000",
    "llama405b-oasst2": "rno-rtxpro6000",
    "llama405b-oasst2-hsdp-qlora": "rno-rtxpro6000",
    "mistral7b-alpaca": "nebius-h100",
    **dict.fromkeys((f"qwen2.5-{size}-tulu3" for size in ("14b", "32b", "72b")), "idris-jeanzay-h100"),
}
"""The cluster file that a recipe is planned and submitted for, where it is not dgx-h100."""
RECIPES = sorted(path.parent.name for path in (REPO / "recipes").glob("*/recipe.yaml"))
OURS = [name for name in RECIPES if "\nmegatron:" not in (REPO / "recipes" / name / "recipe.yaml").read_text()]
"""Those that our own program trains; for Megatron-Bridge there is no tiny run: it has no kernels for CPUs."""


def cluster_of(recipe: str) -> str:
    """The cluster file of the machine that a recipe is for."""
    return FITTING.get(recipe, "dgx-h100")


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
