"""What Slurm starts: ``job`` on the first node of an allocation, ``node`` on every one of them for an attempt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clustertune import secrets
from clustertune.cli.arguments import ClusterOption, Overrides, RecipeArgument, path_option
from clustertune.errors import UserError, raise_if
from clustertune.rundir import STAGES, RunDir, default_run_dir, require_stage

if TYPE_CHECKING:
    from clustertune.sweep.points import Point


def job(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Scale the recipe down; one rank per GPU of the allocation.")] = False,
    cluster: ClusterOption = None,
    run_dir: Annotated[Path | None, path_option("The run's folder.")] = None,
    first: Annotated[str, typer.Option("--from", help="Begin with this stage.")] = STAGES[0],
    last: Annotated[str, typer.Option("--to", help="End after this stage.")] = STAGES[-1],
    sweep: Annotated[Path | None, path_option("Sweep folder; the array task picks the point.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A cache variable such as HF_HOME, for all stages.")
    ] = None,
    description: Annotated[
        int | None, typer.Option(metavar="N", help="Run what submit recorded under this number in the run's run.json.")
    ] = None,
    script: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Checks the allocation, runs the stages, and has the job requeued if it can continue later. With --description it uses the
    recipe and cluster as submitted, even if their files have changed since; without it as they were when the job first started.
    """
    from clustertune import chain
    from clustertune import job as program
    from clustertune.cluster import load
    from clustertune.launch import allocation, cluster_paths, serving

    require_stage(first, "--from")
    require_stage(last, "--to")
    remaining = list(overrides or [])
    if sweep is not None:
        chosen = _point(sweep)
        recipe, remaining, tiny, run_dir = chosen.recipe, list(chosen.overrides), chosen.tiny, chosen.run_dir
    secrets.read_env(secrets.DEFAULT)
    given = allocation.read()
    if given.restart and description is None and sweep is None:
        folders = [run_dir] if run_dir else sorted(cluster_paths.runs(load.load_cluster(cluster)).glob("*/*"))
        run_dir, description = program.begun(given.job_id, folders) or (run_dir, None)
    recorded = program.recorded(run_dir, description, of_sweep=sweep is not None)
    on = recorded.cluster if recorded and recorded.cluster else load.load_cluster(cluster)
    cluster_paths.load_modules(on)
    variables = cluster_paths.enter(on, cluster_paths.parse(env or []))
    if recorded:
        resolved = recorded.resolved
        found = recorded.evaluation
        evaluation = serving.Evaluation.of(found, RunDir(run_dir).run_json) if found and run_dir else None
    else:
        resolved = allocation.resolve_for(given, recipe, remaining, tiny=tiny)
        if (collected := program.collected(resolved, on)) is not None:
            remaining.append(f"staged={collected}")
            resolved = resolved.with_staged(collected)
        evaluation = serving.evaluation(resolved, on)
    arguments = [recipe, *remaining, *(["--tiny"] if tiny else []), *(["--cluster", cluster] if cluster else [])]
    arguments += [word for setting in env or [] for word in ("--env", setting)]
    if sweep is None:  # what is printed to be pasted must do the same, in the same folder
        arguments += ["--run-dir", str(run_dir)] if run_dir else []
        arguments += ["--from", first] if first != STAGES[0] else []
        arguments += ["--to", last] if last != STAGES[-1] else []
    path = run_dir or default_run_dir(resolved, cluster_paths.runs(on))
    inputs = program.JobInputs(resolved, on, given, path, (first, last), variables, evaluation)
    problems = allocation.check(given, resolved, on, arguments, (first, last))
    problems += allocation.first_node_problems(
        on, nodes=len(given.nodes), trains="train" in STAGES[STAGES.index(first) : STAGES.index(last) + 1]
    )
    raise_if(problems)
    program.start(inputs, script, chain.command_line())


def _point(sweep: Path) -> Point:
    """What this task of a job array works on."""
    from clustertune.sweep import points

    text = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not text.isdigit():
        raise UserError("--sweep runs as a task of a job array", fix="clustertune sweep submits it")
    return points.point(sweep, int(text))
