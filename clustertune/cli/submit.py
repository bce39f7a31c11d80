"""``clustertune submit``: the chain as dependent jobs on Slurm, and how they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clustertune import submission
from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Overrides, Tiny, existing_run, path_option
from clustertune.cluster.load import load_cluster
from clustertune.console import aligned, duration, reply, say
from clustertune.errors import UserError, raise_if
from clustertune.report import state as states
from clustertune.rundir import STAGES, RunDir


def submit(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    tiny: Tiny = False,
    cluster: ClusterOption = None,
    run_dir: Annotated[
        Path | None, path_option("Run folder. Default: <recipe>/<fingerprint> below storage.runs, else below ./runs.")
    ] = None,
    first: Annotated[str | None, typer.Option("--from", metavar="STAGE", help="Begin with this stage.")] = None,
    last: Annotated[str, typer.Option("--to", metavar="STAGE", help="End after this stage.")] = STAGES[-1],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; needs no Slurm.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --dry-run: the scripts, the environment with its reasons, and all commands.")
    ] = False,
    status: Annotated[Path | None, path_option("Show the jobs of a run instead.", "--status", metavar="RUN")] = None,
    as_json: AsJson = False,
) -> None:
    """Every sbatch option is derived from the recipe and the cluster file. Finished stages are not submitted again."""
    if status is not None:
        _show_status(status, as_json)
        return
    if recipe is None:
        raise UserError("a recipe is missing", file="command line", fix="clustertune submit RECIPE, or --status RUN")
    plan = submission.plan_submission(recipe, overrides or [], tiny, load_cluster(cluster), run_dir, first, last)
    problems, image, notes = submission.check(plan, dry_run=dry_run)
    raise_if(problems)
    for warning in submission.warnings(plan, notes):
        say(f"warning: {warning}")
    if dry_run:
        submission.show(plan, as_json, verbose)
    else:
        submission.send(plan, image, as_json)


def _show_status(path: Path, as_json: bool) -> None:
    run = RunDir(existing_run(path))
    if not run.run_json.exists() and not (path / "jobs").is_dir():
        run.read()  # says that it is none
    found = states.read_status(run)
    reply(as_json, {"run_dir": str(path), **found.as_dict()}, lambda: _render(found), f"run folder: {path}")


def _render(found: states.StagesStatus) -> None:
    """A table whose lines are never broken: job states are looked for by programs and people alike."""
    names = ("stage", "job", "state", "time", "nodes", "restarts", "attempts", "step", "reason")
    lines: list[tuple[str, ...]] = [names]
    for row in found.rows:
        numbers = (str(row.restarts or ""), *("" if n is None else str(n) for n in (row.attempts, row.step)))
        took = "" if row.seconds is None else duration(row.seconds)
        lines.append((row.stage, row.job or "", row.state, took, row.nodes, *numbers, row.reason))
    used = [i for i in range(len(names)) if any(line[i] for line in lines[1:])]
    for text in aligned([[line[i] for i in used] for line in lines]):
        say(text)
    if found.note:
        say(f"note: Slurm could not be asked: {found.note}")
