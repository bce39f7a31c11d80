"""``clustertune sweep``: one recipe under varied settings, as a job array or here, and what came out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from clustertune import chain
from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Tiny, path_option
from clustertune.cluster import load
from clustertune.cluster.schema import Cluster
from clustertune.console import emit_json, reply, say
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.launch import cluster_paths
from clustertune.launch.named_runs import existing_folder
from clustertune.plan import explanation
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import require_stage
from clustertune.sweep import array
from clustertune.sweep import points as sweep_points
from clustertune.sweep import results as outcome
from clustertune.sweep.points import Sweep


def sweep(
    recipe: OptionalRecipe = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="section.key=a,b", help="Values to vary.")] = None,
    at_once: Annotated[int | None, typer.Option("--max-parallel", min=1, help="Most jobs that run at the same time.")] = None,
    tiny: Tiny = False,
    cluster: ClusterOption = None,
    here: Annotated[bool, typer.Option("--here", help="Run on this machine, one after the other, without Slurm.")] = False,
    last: Annotated[
        str | None,
        typer.Option("--to", metavar="STAGE", help="End each after this stage. Default: the stage that produces --metric."),
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="Sort by: eval_loss, loss, or a score: TASK.METRIC.")] = "eval_loss",
    sweep_dir: Annotated[Path | None, path_option("Sweep folder. Default: below runs/.")] = None,
    results: Annotated[Path | None, path_option("Show the results of this sweep instead.", "--results")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the points and the job; needs no Slurm.")] = False,
    as_json: AsJson = False,
) -> None:
    """Runs the grid of all values as one job array. Each point is a separate run; finished ones are not run again."""
    outcome.check_metric(metric)
    if results is not None:
        _show_results(sweep_points.read_sweep(existing_folder(results, "a sweep")), metric, as_json)
        return
    if recipe is None:
        raise UserError("a recipe is missing", file="command line", fix="clustertune sweep RECIPE section.key=a,b")
    if last is not None:
        require_stage(last, "--to")
    last = last or ("train" if metric in ("eval_loss", "loss", "eval_token_accuracy") else "eval")
    options: dict[str, Any] = {"tiny": tiny, "last": last, "path": sweep_dir}
    if here:
        made, resolved = _locally(recipe, settings or [], at_once, cluster, options)
    else:
        on = load.load_cluster(cluster)
        made, resolved, job = array.plan_array(recipe, settings or [], at_once, on, options, dry_run)
    for warning in sweep_points.same_weights(made, resolved):
        say(f"warning: {warning}")
    if dry_run:
        _show_plan(made, None if here else job, None if here else array.total(made, resolved, on), as_json)
    elif here:
        _run_here(made, metric, as_json)
    else:
        _submit(made, resolved, on, job, as_json)


def _locally(
    recipe: str, settings: list[str], at_once: int | None, cluster: str | None, options: dict[str, Any]
) -> tuple[Sweep, list[Resolved]]:
    problems = [
        Problem("has no meaning with --here: points run here, one after the other", file="command line", key=key)
        for key, value in (("--max-parallel", at_once), ("--cluster", cluster))
        if value is not None
    ]
    raise_if(problems)
    made, resolved = sweep_points.make_sweep(recipe, settings, **options, runs=cluster_paths.enter_local())
    raise_if(sweep_points.missing_inputs(made, resolved))
    ranks_needed = max(item.world_size for item in resolved)
    if not options["tiny"] and resolved[0].recipe.model.weights == "hub" and ranks_needed > chain.visible_gpus():
        text = f"needs {ranks_needed} GPUs, this machine has {chain.visible_gpus()}"
        raise UserError(text, file=recipe, key="slurm", fix="--tiny runs it here scaled down; without --here it is a job")
    return made, resolved


def _show_plan(made: Sweep, job: Any, total: dict[str, Any] | None, as_json: bool) -> None:
    commands = [] if job else [array.run_command(made, point) for point in made.left()]
    if as_json:
        points = [{"index": p.index, "values": p.values, "overrides": list(p.overrides)} for p in made.points]
        script = {"script": job.script, "file": str(job.path), "command": job.command(None)} if job else None
        emit_json(
            {
                "sweep_dir": str(made.path),
                "points": points,
                "left": len(made.left()),
                "job": script,
                "here": commands,
                "total": total,
            }
        )
        return
    say(f"sweep folder: {made.path}")
    for point in made.points:
        say(f"point {point.index}: {point.settings}")
    if job:
        say(f"# {job.shape}\n# {job.path}\n{job.script.rstrip()}\n$ {shlex.join(job.command(None))}")
    for command in commands:
        say(f"$ {shlex.join(command)}")
    if total is not None:
        cost = explanation.money(total["cost"])
        say(f"planned: {total['gpu_hours']:,.1f} GPU-hours of {len(made.left())} points{f', {cost}' if cost else ''}")
    if not made.left():
        say("every point is finished")


def _run_here(made: Sweep, metric: str, as_json: bool) -> None:
    failed = array.run_all(made)
    _show_results(made, metric, as_json)
    if failed:
        raise typer.Exit(int(ExitCode.FAILED))


def _submit(made: Sweep, resolved: list[Resolved], cluster: Cluster, job: Any, as_json: bool) -> None:
    number = array.send(made, resolved, cluster, job) if job else None
    document = {"sweep_dir": str(made.path), "job": number, "points": len(made.points), "left": len(made.left())}
    text = f"job {number}: {document['left']} of {document['points']} points" if number else "every point is finished"
    reply(as_json, document, text, f"clustertune sweep --results {shlex.quote(str(made.path))}")


def _show_results(made: Sweep, metric: str, as_json: bool) -> None:
    found = outcome.collect(made, metric)
    reply(as_json, outcome.as_json(made, metric, found), *outcome.lines(made, metric, found))
