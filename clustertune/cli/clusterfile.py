"""``clustertune show-cluster``: what is known of a cluster, and whether its file is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from clustertune import console
from clustertune.arguments import AsJson, path_option
from clustertune.console import reply, say
from clustertune.errors import UserError, storage_error


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command("show-cluster")(show_cluster)


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
    """Check and show a cluster file, or what this machine has."""
    from clustertune.cluster.load import load_cluster
    from clustertune.resolve.view import render_cluster

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
    reply(as_document, found.model_dump(mode="json"), lambda: render_cluster(found, console.stdout))


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
