"""``clustertune stage``: models and data onto each node's own disk, or into one folder for machines without network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clustertune.cli.arguments import AsJson, ClusterOption, OptionalRecipe, Overrides, Tiny, path_option
from clustertune.errors import UserError


def stage(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    cluster: ClusterOption = None,
    run_dir: Annotated[Path | None, path_option("Run whose data is copied. Default: the recipe's.")] = None,
    to: Annotated[Path | None, path_option("Collect everything the recipe needs in this folder.", "--to")] = None,
    eval_data: Annotated[
        Path | None, path_option("Rows for a task that reads a file, for --to.", "--eval-data", metavar="FILE")
    ] = None,
    verify: Annotated[Path | None, path_option("Check such a folder, and test it without network.", "--verify")] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove the copies that no job uses.")] = False,
    tiny: Tiny = False,
    stall: Annotated[float | None, typer.Option(min=1, help="Give up after this many seconds without data.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """A bundle is for machines without network. Copies are made on this node; existing ones are verified and kept, the least
    recently used are removed to make room. Every training job copies by itself, on all of its nodes.
    """
    from clustertune.cluster import load
    from clustertune.resolve import resolve
    from clustertune.staging import hashed_copy, stage_command

    _check_modes(to, verify, clean, eval_data)
    stall = stall or hashed_copy.STALL_SECONDS
    if verify is not None:
        stage_command.verify(verify, recipe, overrides or [], tiny, stall, as_json)
        return
    if clean:
        stage_command.clean(stage_command.staging_of(load.load_cluster(cluster)), dry_run, as_json)
        return
    if recipe is None:
        raise UserError("a recipe is missing", file="command line", fix="clustertune stage RECIPE, --verify DIR, or --clean")
    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny)
    if to is not None:
        stage_command.collect(resolved, overrides or [], load.load_cluster(cluster), to, eval_data, stall, dry_run, as_json)
    else:
        staging = stage_command.staging_of(load.load_cluster(cluster))
        stage_command.copy_here(resolved, staging, run_dir, stall, dry_run, as_json)


def _check_modes(to: Path | None, verify: Path | None, clean: bool, rows: Path | None) -> None:
    modes = [name for name, given in (("--to", to), ("--verify", verify), ("--clean", clean)) if given]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} exclude each other", file="command line", fix="give one of them")
    if rows is not None and to is None:
        fix = "clustertune stage RECIPE --to DIR --eval-data FILE"
        raise UserError("--eval-data is for --to", file="command line", fix=fix)
