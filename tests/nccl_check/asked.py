"""``nccl-check --submit`` as a command line asks for it."""

from __future__ import annotations

from pathlib import Path

from clustertune.commands import nccl_checking as program
from clustertune.config.cluster import load_cluster
from clustertune.launch.batch import BatchJob
from clustertune.nccl_check import batch


def asked(**changes: object) -> program.Asked:
    """A command line with its defaults."""
    values: dict[str, object] = {
        "files": [], "logs": False, "cluster": None, "seconds": None, "smallest": "1K", "largest": None, "factor": 4,
        "iterations": 20, "warmup": 5, "collectives": None, "scopes": None, "backend": "auto", "ranks": None, "nodes": None,
        "node_rank": None, "out": None, "save": False, "tune": False, "submit": True, "time": None, "dry_run": True,
        "as_json": False,
    }  # fmt: skip
    return program.Asked(**{**values, **changes})  # type: ignore[arg-type]


def job(name: str) -> BatchJob:
    cluster = load_cluster(name)
    wanted = batch.shape(cluster, None, None, program.GPU_SECONDS)
    return batch.make(wanted, Path("/folder"), program.arguments(asked(cluster=name), cluster))
