"""What a recipe says with every value resolved, and what is known of a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from clustertune import console
from clustertune.cli.arguments import AsJson, Overrides, Ranks, RecipeArgument, Tiny, path_option
from clustertune.console import reply, say
from clustertune.errors import UserError, raise_if, storage_error


def show(
    recipe: RecipeArgument, overrides: Overrides = None, tiny: Tiny = False, ranks: Ranks = None, as_json: AsJson = False
) -> None:
    """Each value is shown with its origin: base, recipe, override, derived (and from what), or default."""
    from clustertune.plan import schedule
    from clustertune.resolve import resolve, view

    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny, ranks=ranks)
    raise_if(schedule.find_idle_schedule(resolved))
    resolved.warnings.extend(schedule.check_schedule_end(resolved))
    reply(as_json, view.as_json(resolved), lambda: view.render(resolved, console.stdout))


def show_cluster(
    cluster: Annotated[
        str | None,
        typer.Argument(
            help="A name in ops/clusters, a file, or local: inspect this machine. Default: the file of this host, else local."
        ),
    ] = None,
    write: Annotated[
        Path | None, path_option("Draft a cluster file from Slurm and one inspected node; overwrites nothing.", metavar="FILE")
    ] = None,
    as_document: AsJson = False,
) -> None:

    from clustertune.cluster.load import load_cluster
    from clustertune.resolve import view

    if write is not None:
        if cluster not in (None, "local"):
            raise UserError("has a cluster file already", file="command line", key=cluster, fix="leave it out")
        text, file = _draft(write), write.absolute()
        say(f"wrote {write}: {text.count('# unknown')} lines say what could not be found out")
        cluster = str(file)
    try:
        found = load_cluster(cluster)
    except UserError as error:
        if write is None:
            raise
        for one in error.problems:
            say(f"still to write: {one}")
        return
    reply(as_document, found.model_dump(mode="json"), lambda: view.render_cluster(found, console.stdout))


def _draft(file: Path) -> str:
    """Write a cluster file and return its text. Raises UserError where there is no Slurm, or the file is there."""
    from clustertune.cluster.load import LOCAL, load_cluster
    from clustertune.doctor import cluster_file
    from clustertune.recipe.sections import NAME

    if file.suffix not in (".yaml", ".yml") or not re.fullmatch(NAME, file.stem):
        raise UserError("is not a NAME.yaml", file=str(file), fix="as ops/clusters/my-cluster.yaml")
    seen = load_cluster(LOCAL)
    if seen.slurm is None:
        fix = "call this on a login node of the cluster"
        raise UserError("no Slurm answers here: there is nothing to draft from", file=seen.source, fix=fix)
    say(f"looking at one node of partition {seen.slurm.partition} (a job of seconds)")
    facts, fault = cluster_file.look_at_one(seen)
    if facts is None:
        say(f"warning: no node was inspected: {fault}")
    text = cluster_file.draft(seen, facts, fault, file.stem, cluster_file.accounts())
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise UserError("exists already", file=str(file), fix="name another file, or move it away") from None
        raise storage_error(error, "cannot be written", file) from None
    return text
