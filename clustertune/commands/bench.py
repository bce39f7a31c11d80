"""``clustertune bench``: how fast a recipe trains, against the planner and against other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clustertune.arguments import AsJson, ClusterOption, Overrides, RecipeArgument, Tiny, path_option

Rounds = Annotated[
    int | None, typer.Option(min=1, max=100, help="Whole trainings; 2 with --against, in turn.", show_default=False)
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="trl|trl-defaults|SCRIPT.py",
        help="Another program on the same model and data: TRL with the recipe's arguments, or as it comes. Repeatable.",
        show_default=False,
    ),
]
Interleave = Annotated[
    bool | None,
    typer.Option(
        "--interleave/--no-interleave",
        help="Take turns with TRL, a step each, both alive: steadier, needs the memory of both. Without it: on CPUs.",
        show_default=False,
    ),
]


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(bench)


def bench(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, max=100_000, help="Timed optimizer steps of a round.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, max=10_000, help="Steps before them, not timed.")] = 5,
    profile: Annotated[int, typer.Option(min=0, max=100, help="Steps behind them under the profiler.")] = 2,
    rounds: Rounds = None,
    against: Against = None,
    interleave: Interleave = None,
    ends: Annotated[bool, typer.Option("--ends/--no-ends", help="Evaluate and save once behind the steps.")] = True,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Full size with random weights and made-up conversations; needs no Hub.")
    ] = False,
    tiny: Tiny = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes here; without it, as clustertune run.")] = None,
    cluster: ClusterOption = None,
    out: Annotated[Path | None, path_option("For the result; without it docs/results/bench.", "--out")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write over another result of the same name.")] = False,
    run_dir: Annotated[Path | None, path_option("The run's new folder; else below runs/bench.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="As a Slurm job on the cluster.")] = False,
    time: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --submit: limit of the job.", show_default=False)
    ] = None,
    inside: Annotated[bool, typer.Option("--inside", hidden=True)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a recipe's training: speed, memory, communication, and what the whole of it will take.

    The ranks are those of clustertune run. Warm-up is left out; the result stands beside what plan says.
    """
    from clustertune.bench.ask import Asked
    from clustertune.bench.peer import take_turns, words_of
    from clustertune.commands.benching import Wanted, answer, new_run_path
    from clustertune.training.bench_schedule import BenchSchedule

    peers = words_of(against or ())
    asked = Asked(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        tiny=tiny,
        ranks=ranks,
        schedule=BenchSchedule(warmup, steps, profile, save=ends),
        ends=ends,
        rounds=rounds or (2 if peers else 1),
        against=peers,
        interleave=take_turns(peers, here=not (submit or inside)) if interleave is None else interleave,
        synthetic=synthetic,
        run_path=run_dir or new_run_path(recipe, cluster, submit or inside),
        elsewhere=submit or inside,
        replace=replace,
    )
    wanted = Wanted(asked, cluster, out or Path("docs", "results", "bench"), submit, time, inside, dry_run, as_json)
    raise typer.Exit(answer(wanted))
