"""``clustertune show-cluster``: what is known of a cluster, and whether its file is right."""

from __future__ import annotations

from typing import Annotated

import typer

from clustertune import console
from clustertune.arguments import AsJson
from clustertune.console import emit_json


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command("show-cluster")(show_cluster)


def show_cluster(
    cluster: Annotated[
        str | None, typer.Argument(help="A name in ops/clusters, a YAML file, or local; without it: the one of this place.")
    ] = None,
    as_document: AsJson = False,
) -> None:
    """Check a cluster file and show what it says; without one, what is found by looking."""
    from clustertune.config.cluster import load_cluster
    from clustertune.config.cluster_show import as_json, render

    found = load_cluster(cluster)
    if as_document:
        emit_json(as_json(found))
    else:
        render(found, console.stderr)
