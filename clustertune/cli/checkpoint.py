"""``clustertune checkpoint verify``: whether what was saved is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clustertune.arguments import AsJson, existing_run, path_given
from clustertune.console import emit_json, say, show_error
from clustertune.errors import ExitCode, Problem, UserError


def add(app: typer.Typer) -> None:
    """Register the commands."""
    group = typer.Typer(no_args_is_help=True, help="Check checkpoints.")
    group.command("verify")(verify)
    app.add_typer(group, name="checkpoint")


def verify(path: Annotated[Path, path_given("A checkpoint folder, or a run.", "PATH")], as_json: AsJson = False) -> None:
    """Compare a checkpoint's files with its manifest.

    Reads no pickle. Given a run, checks every checkpoint that has a manifest; one without was never finished.
    """
    try:
        checkpoint, problems, notes = _look(existing_run(path, "a checkpoint or a run folder"))
    except UserError as error:
        checkpoint, problems, notes = None, error.problems, []
    for note in notes:
        say(f"note: {note}")
    if problems:
        show_error(UserError(problems))
    else:
        say(f"{checkpoint}: whole")
    if as_json:
        newest = str(checkpoint) if checkpoint else None
        emit_json({"checkpoint": newest, "whole": not problems, "problems": [str(p) for p in problems]})
    if problems:
        raise typer.Exit(int(ExitCode.CONFIG))


def _look(path: Path) -> tuple[Path | None, list[Problem], list[str]]:
    """A checkpoint (the newest whole one of several), everything that is wrong, and what was left unfinished."""
    from clustertune.checkpoint import store
    from clustertune.manifest import MANIFEST

    if (path / MANIFEST).exists() or store.parse(path):
        return path, store.verify(path), list(map(str, store.find_open(path)[:1]))
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    problems, notes, newest = [], list[str](), None
    for checkpoint in store.list_checkpoints(folder):
        if not (checkpoint.path / MANIFEST).exists():
            notes.append(f"{checkpoint.path} has no manifest: it was never finished, and is not used")
        elif found := store.verify(checkpoint.path):
            problems += found
        else:
            newest = newest or checkpoint.path
            notes += map(str, store.find_open(checkpoint.path)[:1])
    if newest is None and not problems:
        problems.append(
            Problem("no complete checkpoint in this folder", file=str(folder), fix="train first: clustertune run RECIPE")
        )
    return newest, problems, notes
