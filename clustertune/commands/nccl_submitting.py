"""``clustertune nccl-check --submit``: the check as a job."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clustertune.commands.nccl_checking import CPU_SECONDS, GPU_SECONDS, Asked, check_usage, new_folder
from clustertune.config.cluster import argument, named
from clustertune.console import emit_json, say
from clustertune.errors import Problem, UserError, storage_error

if TYPE_CHECKING:
    from clustertune.config.cluster_schema import Cluster


def submit(asked: Asked) -> int:
    """Submit the job, or show it. Returns the exit code. Raises UserError."""
    from clustertune.config.cluster import load_cluster
    from clustertune.launch import slurm
    from clustertune.manifest import write_durably
    from clustertune.nccl_check import batch

    check_usage(asked)
    cluster = load_cluster(asked.cluster)
    folder = new_folder(asked, cluster, "NEW" if asked.dry_run else None)
    seconds = asked.seconds or (GPU_SECONDS if cluster.compute.gpus else CPU_SECONDS)
    wanted = batch.shape(cluster, asked.nodes, asked.time, seconds * (2 if asked.tune else 1))
    job = batch.make(wanted, folder, arguments(asked, cluster))
    if asked.dry_run:
        if asked.as_json:
            emit_json({"file": str(job.path), "script": job.script, "command": job.command()})
        else:
            typer.echo(f"# {wanted}\n# {job.path}\n{job.script}$ {shlex.join(job.command())}")
        return 0
    if shutil.which("sbatch") is None:
        fix = "call this on a login node of the cluster; --dry-run needs no Slurm"
        raise UserError(Problem("sbatch is not on PATH", fix=fix))
    _check_visible(folder, cluster)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(job.path, job.script)
    except OSError as error:
        raise storage_error(error, "cannot hold the job", error.filename or folder) from None
    number = slurm.submit(job.options, str(job.path), job.arguments, os.environ)
    if asked.as_json:
        emit_json({"job": number, "folder": str(folder), "command": job.command()})
    say(f"job {number}: {wanted}")
    say(f"its log and result.json: {folder}")
    return 0


def _check_visible(folder: Path, cluster: Cluster) -> None:
    from clustertune.launch import visible
    from clustertune.tree import ROOT

    mounts = visible.MOUNTS.read_text(errors="replace") if visible.MOUNTS.exists() else ""
    problems = visible.find_problems([("the folder", folder), ("the checkout", ROOT)], cluster, platform.node(), mounts)
    if problems:
        raise UserError(problems)


def arguments(asked: Asked, cluster: Cluster) -> list[str]:
    """The command line of the job: what was given here, and the cluster in a form that another folder understands."""
    word = argument(asked.cluster or named(cluster))
    given: list[tuple[str, Any, Any]] = [
        ("--seconds", asked.seconds, None),
        ("--min", asked.smallest, "1K"),
        ("--max", asked.largest, None),
        ("--factor", asked.factor, 4),
        ("--iterations", asked.iterations, 20),
        ("--warmup", asked.warmup, 5),
        ("--collectives", asked.collectives, None),
        ("--scopes", asked.scopes, None),
        ("--backend", asked.backend, "auto"),
        ("--ranks", asked.ranks, None),
    ]
    words = ["--cluster", word]
    for key, value, default in given:
        if value != default:
            words += [key, f"{value:g}" if isinstance(value, float) else str(value)]
    return [*words, *(["--save"] if asked.save else []), *(["--tune"] if asked.tune else [])]
