"""``clustertune compare``: runs and published metrics side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clustertune import console
from clustertune.arguments import AsJson, path_argument, path_option
from clustertune.console import reply, say
from clustertune.manifest import replace_ours


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(compare)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN_OR_JSON", help="Two or more: run folders, metrics.json files."),
    ],
    out: Annotated[
        Path | None, path_option("Write a page with plots (.html) or the table as Markdown.", "--out", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs side by side, and list what differs.

    Shows world size, wall time, tokens per second, memory, cost. Missing values are left empty and named; runs of other
    recipes or hardware are compared with a warning.
    """
    from clustertune.report import comparison as room

    found = room.compare([path_argument(text) for text in runs])
    reply(as_json, found.as_dict(), lambda: console.stderr.print(room.table(found), soft_wrap=True))
    for note in found.notes:
        say(f"note: {note}")
    if out is not None:
        if out.suffix == ".html":
            replace_ours(out, room.page(found), room.PAGE_MARK)
        else:
            replace_ours(out, room.markdown(found), room.MARK)
        say(f"in {out}")
