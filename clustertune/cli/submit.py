"""``clustertune submit``: the chain as dependent jobs on Slurm, and how they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Overrides, Tiny, path_option
from clustertune.console import say
from clustertune.errors import UserError, raise_if
from clustertune.rundir import STAGES


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
    from clustertune import submission
    from clustertune.cluster.load import load_cluster
    from clustertune.launch.named_runs import existing_run

    if status is not None:
        submission.show_status(existing_run(status), as_json)
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
