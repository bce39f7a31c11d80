"""``clustertune plan``: memory, time and money of a recipe before the hours are spent."""

from __future__ import annotations

from typing import Annotated

import typer

from clustertune.arguments import AsJson, ClusterOption, Tiny
from clustertune.commands.new import DataOption, GpusOption, MethodOption, ModelOption

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [section.key=value]...",
        help="A recipe, two with --compare, or run folders with --calibrate; and overrides.",
    ),
]


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan")(plan)


def plan(
    targets: Targets = None,
    model: ModelOption = None,
    gpus: GpusOption = None,
    method: MethodOption = "lora",
    data: DataOption = None,
    cluster: ClusterOption = None,
    tiny: Tiny = False,
    why: Annotated[
        str | None, typer.Option(metavar="PART", help="The arithmetic of one part: step, memory, communication, hours, mfu ...")
    ] = None,
    advise: Annotated[bool, typer.Option("--advise", help="Search the strategies that fit and rank them.")] = False,
    goal: Annotated[str, typer.Option(metavar="time|cost|memory", help="What --advise ranks by.")] = "time",
    nodes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Node counts that --advise tries; the recipe's by default.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Two recipes side by side.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Learn from the runs given, and keep it beside the cluster file.")
    ] = False,
    nccl_check: Annotated[str | None, typer.Option(metavar="FILE", help="The result of an nccl-check on this cluster.")] = None,
    lengths: Annotated[str | None, typer.Option(metavar="FILE", help="Tokens per conversation, one number a line.")] = None,
    as_document: AsJson = False,
) -> None:
    """Does a recipe fit, how long does it take, what does it cost, what limits it, what would be better.

    --model plans a model that no recipe describes.
    """
    from clustertune.commands import planning

    request = planning.PlanRequest(
        names=[t for t in targets or [] if "=" not in t], overrides=[t for t in targets or [] if "=" in t], cluster=cluster,
        model=model, gpus=gpus, method=method, data=data, tiny=tiny, why=why, advise=advise, goal=goal, nodes=nodes,
        compare=compare, calibrate=calibrate, nccl_check=nccl_check,
        lengths=lengths, as_document=as_document,
    )  # fmt: skip
    planning.answer(request)
