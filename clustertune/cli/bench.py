"""``clustertune bench``: how fast a recipe trains, beside what the planner predicts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from clustertune import secrets
from clustertune.cli.arguments import AsJson, ClusterOption, Overrides, RecipeArgument, Tiny, path_option
from clustertune.console import reply, say
from clustertune.errors import Problem, UserError, raise_if, storing
from clustertune.manifest import write_durably

RESULT = "bench-result.json"
"""In the run folder: the document."""


def bench(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, max=100_000, help="Timed optimizer steps.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, max=10_000, help="Untimed warm-up steps.")] = 5,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Full size with random weights and generated conversations; needs no Hub."),
    ] = False,
    tiny: Tiny = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine. Default: as for clustertune run.")] = None,
    cluster: ClusterOption = None,
    run_dir: Annotated[Path | None, path_option("New run folder. Default: below runs/bench.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Step time, tokens/s, MFU and memory.
    Uses the ranks of clustertune run. Prints the figures beside those of plan, and writes them into the run folder.
    """
    from clustertune import chain
    from clustertune.bench import bench_output, preparation, result
    from clustertune.cluster import load
    from clustertune.launch import cluster_paths
    from clustertune.training import bench_schedule

    secrets.read_env(secrets.DEFAULT)
    if tiny and synthetic:
        text, fix = "--tiny scales the model down, --synthetic keeps its size", "give one of them"
        raise UserError(Problem(text, file="command line", key="--synthetic", fix=fix))
    on = load.load_cluster(cluster)
    request = preparation.BenchRequest(
        recipe=recipe,
        run_path=run_dir or _new_run_path(recipe),
        schedule=bench_schedule.BenchSchedule(warmup, steps),
        overrides=tuple(overrides or ()),
        tiny=tiny,
        ranks=ranks,
        synthetic=synthetic,
    )
    raise_if(bench_output.folder_problems(request.run_path))
    cluster_paths.enter(on)
    made = preparation.make(request)
    if synthetic and not chain.visible_gpus() and (large := bench_output.too_large(made)):
        fix = "run it where there are GPUs, or give a recipe folder with a smaller model.json"
        raise UserError(Problem(large, file=made.whole.name, key="model", fix=fix))
    for warning in made.whole.warnings:
        say(f"warning: {warning}")
    if dry_run:
        bench_output.show(made, on, as_json=as_json)
        return
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, where it is installed, logs its import to stdout
        run, records = result.train(made, chain.command_line())
        body = result.document(made, run, records, on)
    path = run.path / RESULT
    with storing("cannot hold the result", path):
        write_durably(path, json.dumps(body, indent=1) + "\n")
    for line in bench_output.lines(body):
        say(line)
    say(f"in {path}")
    reply(as_json, body)


def _new_run_path(recipe: str) -> Path:
    """A new folder for each benchmark, below this machine's runs."""
    from clustertune.launch import cluster_paths

    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(recipe).name).strip("._-")[:64] or "recipe"
    below = cluster_paths.runs(cluster_paths.local_cluster())
    return below / "bench" / name / (datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ") + f"-{os.getpid()}")
