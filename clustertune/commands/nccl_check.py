"""``clustertune nccl-check``: what the links carry, whether that is what they should, and what to do where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clustertune.arguments import AsJson, ClusterOption, path_argument


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command("nccl-check")(nccl_check)


def nccl_check(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="With --logs: recorded logs of NCCL.", show_default=False)
    ] = None,
    logs: Annotated[bool, typer.Option("--logs", help="Judge recorded logs only; nothing is measured.")] = False,
    cluster: ClusterOption = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=10, max=86_400, help="Time to measure; without it 300, on CPUs 60. All is over 60 s later.", show_default=False
        ),
    ] = None,
    smallest: Annotated[str, typer.Option("--min", metavar="SIZE", help="Smallest size.")] = "1K",
    largest: Annotated[
        str | None, typer.Option("--max", metavar="SIZE", help="Largest; without it 1G, on CPUs 64M or less.")
    ] = None,
    factor: Annotated[int, typer.Option(min=2, max=1024, help="From one size to the next.")] = 4,
    iterations: Annotated[int, typer.Option(min=3, max=10_000, help="Of each size.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, max=1000, help="Before them.")] = 5,
    collectives: Annotated[str | None, typer.Option(metavar="A,B", help="Only these.", show_default=False)] = None,
    scopes: Annotated[str | None, typer.Option(metavar="A,B", help="Of world,intra,inter,pair.", show_default=False)] = None,
    backend: Annotated[str, typer.Option(help="nccl, gloo, or auto: NCCL where there are GPUs.")] = "auto",
    ranks: Annotated[int | None, typer.Option(min=1, max=256, help="On each node; without it one per GPU.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="With --submit or --node-rank: how many.")] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="Without Slurm: the same call on each node, with its number.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", parser=path_argument, help="Folder for logs and result.")
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep the result beside the cluster file, for plan.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Try variables that may make it faster.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="As a Slurm job on whole nodes.")] = False,
    time: Annotated[str | None, typer.Option("--time", help="With --submit: the job's limit.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the links carry, and judge it.

    On this machine, or on the nodes of the Slurm job that it is called in; --submit makes such a job. NCCL between GPUs, gloo
    between CPUs. Exit 0: nothing to fix; 1: warnings, or the verdict is unknown; 2: what would stop or spoil a job.
    """
    given = dict(locals())  # the options by their names, which are those of Asked
    from clustertune.commands import nccl_checking

    asked = nccl_checking.Asked(**given)
    raise typer.Exit(nccl_checking.submit(asked) if submit else nccl_checking.answer(asked))
