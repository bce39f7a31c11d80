"""``clustertune nccl-check``: what the links carry, whether that is what they should, and what to do where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clustertune.cli.arguments import AsJson, ClusterOption, path_option, takes


@dataclass(frozen=True)
class NcclCheckArguments:
    """Runs on this machine, or inside a Slurm job on all its nodes; --submit submits such a job. Uses NCCL between GPUs, gloo
    between CPUs. Exit 0: nothing to fix; 1: warnings, or the verdict is unknown; 2: what would stop or spoil a job.
    """

    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="With --logs: recorded NCCL logs.", show_default=False)
    ] = None
    logs: Annotated[bool, typer.Option("--logs", help="Check recorded logs only; measure nothing.")] = False
    cluster: ClusterOption = None
    seconds: Annotated[
        float | None,
        typer.Option(
            min=10,
            max=86_400,
            help="Seconds to measure. Default: 300, on CPUs 60. The command ends at most 60 s later.",
            show_default=False,
        ),
    ] = None
    largest: Annotated[
        str | None, typer.Option("--max", metavar="SIZE", help="Largest message. Default: 1G, on CPUs 64M or less.")
    ] = None
    collectives: Annotated[str | None, typer.Option(metavar="A,B", help="Only these collectives.", show_default=False)] = None
    scopes: Annotated[
        str | None, typer.Option(metavar="A,B", help="Groups of ranks to measure: world,intra,inter,pair.", show_default=False)
    ] = None
    backend: Annotated[str, typer.Option(help="nccl, gloo, or auto: NCCL if there are GPUs.")] = "auto"
    ranks: Annotated[int | None, typer.Option(min=1, max=256, help="Ranks per node. Default: one per GPU.")] = None
    nodes: Annotated[int | None, typer.Option(min=1, help="With --submit: number of nodes.")] = None
    out: Annotated[Path | None, path_option("Folder for logs and result.", "--out")] = None
    save: Annotated[bool, typer.Option("--save", help="Save the result next to the cluster file, for plan.")] = False
    submit: Annotated[bool, typer.Option("--submit", help="Submit the check as a Slurm job on whole nodes.")] = False
    wait: Annotated[bool, typer.Option("--wait", help="With --submit: wait for the verdict and print it.")] = False
    time: Annotated[str | None, typer.Option("--time", help="With --submit: the job's time limit.", show_default=False)] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False
    as_json: AsJson = False


nccl_check = takes(NcclCheckArguments, "cli.nccl_answers:answer")
