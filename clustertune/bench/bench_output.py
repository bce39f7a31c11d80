"""What ``clustertune bench`` refuses before it begins, shows in a dry run, and says at its end."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from clustertune.bench import preparation, result
from clustertune.cluster import schema
from clustertune.console import reply, say
from clustertune.errors import Problem, storage_error
from clustertune.launch import node
from clustertune.recipe import parameters
from clustertune.rundir import RunDir

_SPARE = 0.9
"""Share of the free memory that random weights may take here."""


def folder_problems(path: Path) -> list[Problem]:
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


def too_large(made: preparation.Bench) -> str | None:
    """Whether the weights alone, on every rank, exceed this machine's free memory."""
    needed = 2 * (parameters.parameter_count(made.whole.architecture) or 0)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    ranks = made.measured.world_size
    if needed * ranks <= _SPARE * free:
        return None
    return f"{ranks} ranks with {needed / 1e9:.0f} GB of weights each; {free / 1e9:.0f} GB are free"


def show(made: preparation.Bench, cluster: schema.Cluster, *, as_json: bool) -> None:
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


def lines(body: dict[str, Any]) -> list[str]:
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
