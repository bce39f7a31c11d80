"""What launchers start: ``train`` for one rank, ``node`` for the ranks of a node, ``part`` for a stage in a container."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from clustertune import secrets
from clustertune.cli.arguments import path_option
from clustertune.errors import UserError
from clustertune.rundir import SCORES, RunDir, require_stage


def train(
    run_dir: Annotated[Path, path_option("A prepared run folder.")],
    attempt: Annotated[int, typer.Option(min=1, help="Number of this attempt, the same for every rank.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Write to the log only.")] = False,
) -> None:
    from clustertune import rank

    RunDir(run_dir).read()
    raise typer.Exit(rank.main(run_dir, attempt, quiet=quiet))


def node(
    run_dir: Annotated[Path, path_option("A prepared run folder.")],
    attempt: Annotated[int, typer.Option(min=1, help="Number of the attempt.")],
    node_rank: Annotated[int | None, typer.Option("--node", min=0, help="Number of this node. Default: SLURM_NODEID.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write to the log only.")] = False,
) -> None:
    from clustertune.launch import node as launch_node
    from clustertune.staging import staging_step

    if node_rank is None:
        text = os.environ.get("SLURM_NODEID", "")
        if not text.isdigit():
            raise UserError(
                "the node's number is missing: SLURM_NODEID is not set", key="--node", fix="give --node, or start it with srun"
            )
        node_rank = int(text)
    raise typer.Exit(launch_node.main(run_dir, attempt, node_rank, quiet=quiet, around=staging_step.leased))


def part(
    stage: Annotated[str, typer.Argument(help="One stage of the chain.")],
    run_dir: Annotated[Path, path_option("A run folder.")],
    servers: Annotated[Path | None, path_option("The job's vLLM servers, for eval and scores.")] = None,
) -> None:
    from clustertune import chain
    from clustertune.evaluate import servers as eval_servers

    if stage != SCORES:
        require_stage(stage)
    run = RunDir(run_dir)
    with secrets.lent({eval_servers.GIVEN: str(servers)} if servers else {}):
        chain.Chain(run, run.resolved()).run_stage(stage)
