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
from typing import Annotated, Any

import typer

from clustertune import chain, secrets
from clustertune.bench import preparation, result
from clustertune.cli.arguments import AsJson, ClusterOption, Overrides, RecipeArgument, Tiny, path_option
from clustertune.cluster import load, schema
from clustertune.console import reply, say
from clustertune.errors import Problem, UserError, raise_if, storage_error, storing
from clustertune.launch import cluster_paths, node
from clustertune.manifest import write_durably
from clustertune.recipe import parameters
from clustertune.rundir import RunDir
from clustertune.training import bench_schedule

RESULT = "bench-result.json"
"""In the run folder: the document."""
_SPARE = 0.9
"""Share of the free memory that random weights may take here."""


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
    raise_if(_folder_problems(request.run_path))
    cluster_paths.enter(on)
    made = preparation.make(request)
    if synthetic and not chain.visible_gpus() and (large := _too_large(made)):
        fix = "run it where there are GPUs, or give a recipe folder with a smaller model.json"
        raise UserError(Problem(large, file=made.whole.name, key="model", fix=fix))
    for warning in made.whole.warnings:
        say(f"warning: {warning}")
    if dry_run:
        _show(made, on, as_json=as_json)
        return
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, where it is installed, logs its import to stdout
        run, records = result.train(made, chain.command_line())
        body = result.document(made, run, records, on)
    path = run.path / RESULT
    with storing("cannot hold the result", path):
        write_durably(path, json.dumps(body, indent=1) + "\n")
    for line in _lines(body):
        say(line)
    say(f"in {path}")
    reply(as_json, body)


def _new_run_path(recipe: str) -> Path:
    """A new folder for each benchmark, below this machine's runs."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(recipe).name).strip("._-")[:64] or "recipe"
    below = cluster_paths.runs(cluster_paths.local_cluster())
    return below / "bench" / name / (datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ") + f"-{os.getpid()}")


def _folder_problems(path: Path) -> list[Problem]:
    """Why the run folder cannot be made, or is not this benchmark's own."""
    try:
        nearest = next(part for part in (path, *path.absolute().parents) if part.exists())
        if not nearest.is_dir():
            return [Problem("is a file, a run needs a folder", file=str(nearest), key="--run-dir", fix="give a folder")]
        if nearest == path and any(path.iterdir()):
            text, fix = "is not empty: each benchmark needs a new folder", "give a new one, or leave it out"
            return [Problem(text, file=str(path), key="--run-dir", fix=fix)]
    except OSError as error:  # a name that is too long, a folder that is closed
        raise storage_error(error, "--run-dir cannot be read", path) from None
    return []


def _too_large(made: preparation.Bench) -> str | None:
    """Whether the weights alone, on every rank, exceed this machine's free memory."""
    needed = 2 * (parameters.parameter_count(made.whole.architecture) or 0)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    ranks = made.measured.world_size
    if needed * ranks <= _SPARE * free:
        return None
    return f"{ranks} ranks with {needed / 1e9:.0f} GB of weights each; {free / 1e9:.0f} GB are free"


def _show(made: preparation.Bench, cluster: schema.Cluster, *, as_json: bool) -> None:
    """What would be run: folder, steps, command, and what the planner says about it."""
    run, schedule, recipe = RunDir(made.request.run_path), made.request.schedule, made.measured
    command = node.ranks_command(run, recipe, 1)
    plan, why = result.predict(made.whole, cluster, made.lengths)
    body: dict[str, Any] = {
        "run_dir": str(run.path),
        "schedule": {"warmup": schedule.warmup, "steps": schedule.steps},
        "ranks": recipe.world_size,
        "train": command,
        "changes": {key: recipe.train_args[key] for key in ("max_steps", "eval_strategy", "save_strategy")},
        "synthetic": None if made.made is None else {"tokens": round(made.made[0]), "conversations": made.made[1]},
        "plan": result.brief(plan) if plan is not None else {"unknown": why},
    }
    say(f"run folder: {run.path}")
    say(f"{schedule.warmup} warm-up steps, {schedule.steps} timed, on {recipe.world_size} ranks")
    if plan is not None:
        say(f"planned on {plan.machine.name}: {plan.step.seconds:.3g} s a step")
    reply(as_json, body, f"$ {shlex.join(command)}")


def _lines(body: dict[str, Any]) -> list[str]:
    """The figures in words."""
    step, used, peak = body["step_s"], body["utilisation"], body["peak"]
    allocated = f"{peak['allocated_gib']:.3g} GiB on a GPU, " if peak["allocated_gib"] else ""
    lines = [
        f"step {step['median']:.3g} s (median of {step['n']}, standard deviation {step['stdev']:.2g}), "
        f"{body['tokens_per_s_per_gpu']:,.0f} tokens/s per rank, padding {body['padding_share']:.1%}",
        f"MFU {used['mfu']:.1%}, HFU {used['hfu']:.1%}: {used['why']}" if used["mfu"] else f"MFU unknown: {used['why']}",
        f"peak memory: {allocated}{peak['rss_gib'] or 0:.3g} GiB resident set of a rank",
    ]
    if "unknown" in body["plan"]:
        return [*lines, f"no plan to compare with: {body['plan']['unknown']}"]
    row = body["plan"]["rows"]["step_s"]
    return [*lines, f"planned on {body['plan']['cluster']}: {row['plan']:.3g} s a step; measured / planned {row['ratio']:.3g}"]
