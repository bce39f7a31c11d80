"""The command line of launch/ray_train.py."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from clustertune import chain
from clustertune.cli.arguments import AsJson, Overrides, RecipeArgument, SharedRunDir, Tiny
from clustertune.cli.stages import finish_run
from clustertune.errors import UserError
from clustertune.launch import cluster_paths
from clustertune.resolve import resolve
from clustertune.rundir import default_run_dir


def ray_train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Ranks. Default: the recipe's number, or 2 on CPUs.")
    ] = None,
    max_failures: Annotated[int, typer.Option(min=-1, help="Restarts by Ray; -1: restart while there is progress.")] = -1,
    tiny: Tiny = False,
    run_dir: SharedRunDir = None,
    as_json: AsJson = False,
) -> None:
    """Run the whole chain, the training on Ray Train: launch/ray_train.py calls this."""
    if importlib.util.find_spec("ray") is None:
        fix = "make setup installs it (DEV_RAY in containers/versions.env)"
        raise UserError("Ray is not installed", file=sys.executable, fix=fix)
    from clustertune.experimental import raytrain

    resolved = resolve.resolve(recipe, overrides or [], tiny=tiny, ranks=workers)
    resolved.require_startable()
    if workers is None and (tiny or resolved.recipe.model.weights == "random"):
        resolved = resolve.resolve(
            recipe, overrides or [], tiny=tiny, ranks=min(resolved.world_size, chain.visible_gpus() or 2)
        )
    below = cluster_paths.enter_local()
    with chain.taken(resolved, run_dir or default_run_dir(resolved, below)) as run:
        links = raytrain.RayChain(run, resolved, quiet=as_json, max_failures=max_failures)
        links.go(last="prepare")
        with raytrain.cluster(resolved.world_size) if links.train_is_due() else nullcontext(False) as gpus:
            links.use_gpu = gpus
            links.go(first="train", last="train")
        links.go(first="export")
    finish_run(run, links.results, as_json)
