"""``clustertune demo-slurm``: a job on a temporary Slurm."""

from __future__ import annotations

import re
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from clustertune.arguments import AsJson, RecipeArgument, path_option
from clustertune.cli.deferred import deferred
from clustertune.console import reply
from clustertune.errors import UserError

with deferred():
    from clustertune.launch import cluster_paths
    from clustertune.testbed import rehearsal as rehearsing
    from clustertune.testbed import spec

DEMO = "recipes/llama405b-oasst2"
SCRIPT = Path("launch", "run.sbatch")


class Isolation(StrEnum):
    """How the nodes are kept apart."""

    auto = "auto"
    netns = "netns"
    none = "none"


Nodes = Annotated[str, typer.Option(metavar="N|NAME,NAME", help="How many nodes (1 to 16), or their names.")]
IsolationOption = Annotated[
    Isolation, typer.Option(help="netns: each node in its own namespaces; none: not isolated; auto: netns if possible.")
]


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command("demo-slurm")(demo_slurm)


def demo_slurm(
    recipe: RecipeArgument = DEMO,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="section.key=value", help="Settings that replace the recipe's.")
    ] = None,
    nodes: Nodes = "2",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per node; each is one CPU process.")] = 1,
    isolation: IsolationOption = Isolation.auto,
    run_dir: Annotated[Path | None, path_option("Run folder. Default: a new one in runs/rehearsal/.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a scaled-down recipe on a temporary Slurm.

    Starts the cluster, submits the real job script launch/run.sbatch, follows the job to its end, and stops the cluster.
    """
    if not SCRIPT.is_file():
        raise UserError("no such file", file=str(SCRIPT), fix="call this in the checkout of clustertune")
    if "=" in recipe:  # the recipe is left out, and this is the first of the overrides
        recipe, overrides = DEMO, [recipe, *(overrides or [])]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(recipe).name)
    new = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = run_dir or cluster_paths.runs(cluster_paths.local_cluster()) / "rehearsal" / new
    arguments = [recipe, *(overrides or []), "--tiny", "--run-dir", str(folder.resolve())]
    ended = rehearsing.rehearse(_spec(nodes, gpus, isolation), SCRIPT, arguments, folder)
    document = {"job": ended.job, "state": ended.state, "run_dir": str(folder), "log": str(ended.log)}
    reply(as_json, {**document, "exit_code": ended.code})
    if ended.code:
        raise typer.Exit(ended.code)


def _spec(nodes: str, gpus: int, isolation: Isolation) -> spec.ClusterSpec:
    wanted = int(nodes) if re.fullmatch(r"[0-9]{1,9}", nodes) else tuple(nodes.split(","))
    return spec.ClusterSpec(nodes=wanted, gpus=gpus, isolation=isolation.value)
