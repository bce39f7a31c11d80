"""``clustertune sweep``: one recipe under varied settings, as a job array or here, and what came out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Tiny, path_option
from clustertune.console import reply
from clustertune.errors import ExitCode, Problem, UserError, raise_if
from clustertune.rundir import Stage

if TYPE_CHECKING:
    from clustertune.cluster.schema import Cluster
    from clustertune.resolve.resolved import Resolved
    from clustertune.sweep import Sweep


def sweep(
    recipe: OptionalRecipe = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="section.key=a,b", help="Values to vary.")] = None,
    at_once: Annotated[int | None, typer.Option("--max-parallel", min=1, help="Most jobs that run at the same time.")] = None,
    tiny: Tiny = False,
    cluster: ClusterOption = None,
    here: Annotated[bool, typer.Option("--here", help="Run on this machine, one after the other, without Slurm.")] = False,
    last: Annotated[
        Stage | None,
        typer.Option("--to", help="End each after this stage. Default: the stage that produces --metric."),
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="Sort by: eval_loss, loss, or a score: TASK.METRIC.")] = "eval_loss",
    sweep_dir: Annotated[Path | None, path_option("Sweep folder. Default: below runs/.")] = None,
    results: Annotated[Path | None, path_option("Show the results of this sweep instead.", "--results")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the points and the job; needs no Slurm.")] = False,
    as_json: AsJson = False,
) -> None:
    """Runs the grid of all values as one job array. Each point is a separate run; finished ones are not run again."""
    from clustertune import sweep as sweeps
    from clustertune.cluster import load
    from clustertune.launch.cluster_paths import existing_folder

    sweeps.check_metric(metric)
    if results is not None:
        _show_results(sweeps.read_sweep(existing_folder(results, "a sweep")), metric, as_json)
        return
    if recipe is None:
        raise UserError("a recipe is missing", file="command line", fix="clustertune sweep RECIPE section.key=a,b")
    last = last or ("train" if metric in ("eval_loss", "loss", "eval_token_accuracy") else "eval")
    options: dict[str, Any] = {"tiny": tiny, "last": last, "path": sweep_dir}
    if here:
        problems = [
            Problem("has no meaning with --here: points run here, one after the other", file="command line", key=key)
            for key, value in (("--max-parallel", at_once), ("--cluster", cluster))
            if value is not None
        ]
        raise_if(problems)
        made, resolved = sweeps.plan_here(recipe, settings or [], options)
    else:
        on = load.load_cluster(cluster)
        made, resolved, job = sweeps.plan_array(recipe, settings or [], at_once, on, options, dry_run)
    if dry_run:
        sweeps.show_plan(made, None if here else job, None if here else sweeps.total(made, resolved, on), as_json)
    elif here:
        _run_here(made, metric, as_json)
    else:
        _submit(made, resolved, on, job, as_json)


def _run_here(made: Sweep, metric: str, as_json: bool) -> None:
    from clustertune import sweep as sweeps

    failed = sweeps.run_all(made)
    _show_results(made, metric, as_json)
    if failed:
        raise typer.Exit(int(ExitCode.FAILED))


def _submit(made: Sweep, resolved: list[Resolved], cluster: Cluster, job: Any, as_json: bool) -> None:
    from clustertune import sweep as sweeps

    number = sweeps.send(made, resolved, cluster, job) if job else None
    document = {"sweep_dir": str(made.path), "job": number, "points": len(made.points), "left": len(made.left())}
    text = f"job {number}: {document['left']} of {document['points']} points" if number else "every point is finished"
    reply(as_json, document, text, f"clustertune sweep --results {shlex.quote(str(made.path))}")


def _show_results(made: Sweep, metric: str, as_json: bool) -> None:
    from clustertune import sweep as sweeps

    found = sweeps.collect(made, metric)
    reply(as_json, sweeps.as_json(made, metric, found), *sweeps.lines(made, metric, found))
