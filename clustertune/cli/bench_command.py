"""``clustertune bench``: how fast a recipe trains, beside what the planner predicts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from clustertune import secrets
from clustertune.cli.arguments import AsJson, ClusterOption, Overrides, RecipeArgument, Tiny, path_option
from clustertune.console import reply, say
from clustertune.errors import UserError, storing
from clustertune.manifest import write_durably
from clustertune.rundir import RunDir

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
    from clustertune import bench as benches
    from clustertune import chain
    from clustertune.cluster import load
    from clustertune.launch import cluster_paths, node

    secrets.read_env(secrets.DEFAULT)
    if tiny and synthetic:
        text, fix = "--tiny scales the model down, --synthetic keeps its size", "give one of them"
        raise UserError(text, file="command line", key="--synthetic", fix=fix)
    on, path = load.load_cluster(cluster), run_dir or _new_run_path(recipe)
    with storing("--run-dir cannot be read", path):
        if path.is_dir() and any(path.iterdir()):
            text, fix = "is not empty: each benchmark needs a new folder", "give a new one, or leave it out"
            raise UserError(text, file=str(path), key="--run-dir", fix=fix)
        if above := next((part for part in (path, *path.absolute().parents) if part.exists() and not part.is_dir()), None):
            raise UserError("is a file, a run needs a folder", file=str(above), key="--run-dir", fix="give a folder")
    cluster_paths.enter(on)
    made = benches.make(recipe, overrides or (), path, warmup, steps, tiny=tiny, ranks=ranks, synthetic=synthetic)
    if synthetic and not chain.visible_gpus() and (large := benches.too_large(made)):
        fix = "run it where there are GPUs, or give a recipe folder with a smaller model.json"
        raise UserError(large, file=made.whole.name, key="model", fix=fix)
    for warning in made.whole.warnings:
        say(f"warning: {warning}")
    if dry_run:
        command = node.ranks_command(RunDir(path), made.measured, 1)
        plan, why = benches.predict(made, on)
        planned = f"planned on {plan.machine.name}: {plan.step.seconds:.3g} s a step" if plan else f"no plan: {why}"
        body = {"run_dir": str(path), "warmup": warmup, "steps": steps, "ranks": made.measured.world_size, "train": command}
        body["plan"] = {"step_s": plan.step.seconds, "fits": plan.fits} if plan else {"unknown": why}
        what = f"{warmup} warm-up steps, {steps} timed, on {made.measured.world_size} ranks"
        reply(as_json, body, f"run folder: {path}", what, planned, f"$ {shlex.join(command)}")
        return
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, where it is installed, logs its import to stdout
        run = benches.train(made, chain.command_line())
        body = benches.document(made, run, on)
    file = run.path / RESULT
    with storing("cannot hold the result", file):
        write_durably(file, json.dumps(body, indent=1) + "\n")
    for line in [*benches.lines(body), f"in {file}"]:
        say(line)
    reply(as_json, body)


def _new_run_path(recipe: str) -> Path:
    """A new folder for each benchmark, below this machine's runs."""
    from clustertune.launch import cluster_paths

    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(recipe).name).strip("._-")[:64] or "recipe"
    below = cluster_paths.runs(cluster_paths.local_cluster())
    return below / "bench" / name / (datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ") + f"-{os.getpid()}")
