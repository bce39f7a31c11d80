"""``clustertune plan``: memory, time and money of a recipe before the hours are spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from clustertune.cli.arguments import AsJson, ClusterOption, DataOption, GpusOption, MethodOption, ModelOption, Tiny, takes

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [section.key=value]...",
        help="A recipe, two with --compare, or run folders with --calibrate; and overrides.",
    ),
]


@dataclass(frozen=True)
class PlanArguments:
    """--advise ranks alternatives. --model plans a model without a recipe."""

    targets: Targets = None
    model: ModelOption = None
    gpus: GpusOption = None
    method: MethodOption = "lora"
    data: DataOption = None
    cluster: ClusterOption = None
    clusters: Annotated[
        str | None, typer.Option(metavar="all|A,B", help="One row a cluster, the cheapest first; --gpus counts as one.")
    ] = None
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="With --clusters: a page (HTML) of the rows. With --simulate: a picture (SVG)."
        ),
    ] = None
    tiny: Tiny = False
    why: Annotated[
        str | None,
        typer.Option(metavar="PART", help="Show the arithmetic of one part: step, memory, communication, hours, mfu ..."),
    ] = None
    advise: Annotated[bool, typer.Option("--advise", help="Search the strategies that fit and rank them.")] = False
    goal: Annotated[str, typer.Option(metavar="time|cost|memory", help="What --advise ranks by.")] = "time"
    nodes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Node counts that --advise tries; the recipe's by default.")
    ] = None
    compare: Annotated[bool, typer.Option("--compare", help="Compare two recipes.")] = False
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the planner to measured runs and save the result next to the cluster file.")
    ] = False
    nccl_check: Annotated[str | None, typer.Option(metavar="FILE", help="Use the result of an nccl-check on this cluster.")] = (
        None
    )
    lengths: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with tokens per conversation, one number a line.")
    ] = None
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run two training steps of one rank at full size on fake tensors, without a GPU.")
    ] = False
    depth: Annotated[
        int | None,
        typer.Option(metavar="N", help="Layers that --simulate makes, each as wide as the recipe's; all by default."),
    ] = None
    ranks: Annotated[
        str | None,
        typer.Option(metavar="R[,R...]", help="Ranks that --simulate runs, compared: numbers, first, last, each-node."),
    ] = None
    as_document: AsJson = False

    @property
    def names(self) -> list[str]:
        """Recipes, or runs."""
        return [text for text in self.targets or [] if "=" not in text]

    @property
    def overrides(self) -> list[str]:
        return [text for text in self.targets or [] if "=" in text]


plan = takes(PlanArguments, "cli.plan_answers:answer")
