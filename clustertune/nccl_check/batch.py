"""The check as a Slurm job: a header for whole nodes over the body of ops/nccl-check/nccl-check.sbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from clustertune.config.cluster_schema import Cluster
from clustertune.config.schema import parse_minutes
from clustertune.errors import Problem, UserError
from clustertune.launch import batch
from clustertune.launch.shape import JobShape
from clustertune.nccl_check.setup import MARGIN_SECONDS
from clustertune.tree import ROOT

SCRIPT = ROOT / "ops" / "nccl-check" / "nccl-check.sbatch"
START_MINUTES = 5
"""For the start of the job, of containers and Python, and what is ended late."""


def shape(cluster: Cluster, nodes: int | None, time: str | None, seconds: float) -> JobShape:
    """Whole nodes, all of the cluster by default: a neighbour's traffic would be measured, too. Raises UserError."""
    there, problems = len(cluster.compute_nodes), []
    if cluster.slurm is None:
        fix = "add a slurm section to its file, or --cluster names another one; without --submit it runs here"
        raise UserError(Problem(f"cluster {cluster.name} has no Slurm", file=cluster.source, key="slurm", fix=fix))
    wanted = there if nodes is None else nodes
    if wanted > there:
        text = f"{wanted} nodes, cluster {cluster.name} has {there}"
        problems.append(Problem(text, file="command line", key="--nodes", fix=f"at most --nodes {there}"))
    minutes = math.ceil(seconds / 60) + START_MINUTES if time is None else parse_minutes(time)
    longest = parse_minutes(cluster.slurm.max_time)
    if minutes is None or minutes < 1:
        fix = "write --time MINUTES or HH:MM:SS"
        problems.append(Problem(f"{time!r} is not a time limit", file="command line", key="--time", fix=fix))
    elif minutes * 60 < seconds + MARGIN_SECONDS:
        text = f"{minutes:g} min are too short for --seconds {seconds:g} and the start of a job"
        problems.append(
            Problem(text, file="command line", key="--time", fix=f"--time {math.ceil(seconds / 60) + START_MINUTES}")
        )
    elif longest is not None and minutes > longest:
        text = f"{minutes:g} min, jobs of {cluster.name} run {longest:g} min at most"
        problems.append(Problem(text, file="command line", key="--time", fix="ask for less time, or give fewer --seconds"))
    if problems:
        raise UserError(problems)
    compute = cluster.compute
    return JobShape(
        nodes=wanted,
        gpus_per_node=compute.gpus,
        ranks_per_node=compute.gpus or 1,
        cpus_per_node=compute.threads,
        memory_gb=None,
        minutes=math.ceil(minutes or 0),
        partition=cluster.slurm.partition,
        gres=cluster.slurm.gres,
        site=cluster.slurm.site_options(),
        modules=cluster.slurm.modules,
    )


def render(wanted: JobShape, source: str | None = None) -> str:
    """The sbatch file. ``source``: the text of its body's file where it was read already."""
    note = "Derived by clustertune nccl-check --submit from the cluster file."
    return batch.render("nccl-check", wanted, note, SCRIPT.read_text() if source is None else source)


def make(wanted: JobShape, folder: Path, arguments: Sequence[str]) -> batch.BatchJob:
    """The job. ``arguments`` are those of the command that it runs; its folder is added."""
    job_arguments = (*arguments, "--out", str(folder.absolute()))
    return batch.BatchJob(shape=wanted, script=render(wanted), folder=folder.absolute(), arguments=job_arguments)
