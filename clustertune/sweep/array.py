"""A sweep on Slurm: one job array of launch/run.sbatch, whose task N works on point N."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from clustertune import chain, lock
from clustertune.cluster.load import reference
from clustertune.cluster.schema import Cluster
from clustertune.console import emit_json, say
from clustertune.errors import Problem, UserError, raise_if
from clustertune.host.system import format_cpu_list
from clustertune.launch import bill, cluster_paths, serving, shape, signal_margin, stage_jobs
from clustertune.launch.stage_jobs import StageJob
from clustertune.plan import explanation
from clustertune.process import end
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import STAGES, keep_private
from clustertune.staging import bundle
from clustertune.sweep.points import Point, Sweep, make_sweep, missing_inputs
from clustertune.tree import ROOT


def indices(points: Sequence[Point]) -> str:
    """The numbers of points as ``--array`` takes them: ``0-3,7``."""
    return format_cpu_list(point.index for point in points)


def find_problems(sweep: Sweep, resolved: Sequence[Resolved], cluster: Cluster) -> list[Problem]:
    """What keeps the points from running on a cluster, each problem once."""
    found: dict[Problem, None] = dict.fromkeys(missing_inputs(sweep, resolved))
    for item in resolved:
        minutes = shape.train_shape(item, cluster).minutes
        found.update(dict.fromkeys(shape.find_problems(item, cluster)))
        found.update(dict.fromkeys(signal_margin.find_problems(item.recipe.slurm.signal_seconds, minutes, file=item.name)))
    if cluster.slurm is None:
        fix = "add a slurm section to its file, --cluster names another one, --here runs the points on this machine"
        found[Problem(f"cluster {cluster.name} has no Slurm", file=cluster.source, fix=fix)] = None
    return list(found)


def make_job(
    sweep: Sweep, resolved: Sequence[Resolved], cluster: Cluster, *, at_once: int | None = None, flags: Sequence[str] = ()
) -> stage_jobs.StageJob:
    """The job array for the points that are left; ``at_once`` limits how many run side by side.

    ``flags`` follow ``--sweep DIR``. All points have the training's shape. Raises UserError where shapes differ.
    """
    shapes = {shape.train_shape(item, cluster) for item in resolved}
    if len(shapes) > 1:
        text = "the points ask for nodes, GPUs or memory of different size, and one job array has one shape"
        raise UserError(text, file=sweep.name, fix="a sweep for each: " + "; ".join(map(str, shapes)))
    limit = f"%{at_once}" if at_once else ""
    folder = sweep.path.absolute()
    logs = stage_jobs.escape_pattern(folder / "logs")
    arguments = ["--sweep", str(folder), "--from", STAGES[0], "--to", sweep.last]
    return stage_jobs.StageJob(
        stage="sweep",
        shape=shapes.pop(),
        script=stage_jobs.render(
            f"{sweep.name}-sweep",
            shape.train_shape(resolved[0], cluster),
            max(item.recipe.slurm.signal_seconds for item in resolved),
            extra=[f"--array={indices(sweep.left())}{limit}"],
        ),
        path=folder / "jobs" / "sweep.sbatch",
        options=("--export=NIL", f"--chdir={ROOT}", f"--output={logs}/%x-%A_%a.log"),
        arguments=(sweep.points[0].recipe, *arguments, *flags),
    )


def send(sweep: Sweep, resolved: Sequence[Resolved], cluster: Cluster, job: stage_jobs.StageJob) -> str:
    """Submit the array and keep its id in ``jobs/jobs.json``; returns the id. Refused where tasks of the sweep are queued.

    What every task runs is recorded in its point's ``run.json`` before: an edit while it waits changes nothing.
    """
    keep_private(cluster)
    with lock.held(sweep.path / "jobs" / "lock", "submits this sweep", shown=sweep.path, fix="wait for it"):
        sweep.write()
        stage_jobs.require_none_live(sweep.path, "tasks of this sweep", "clustertune sweep --results")
        for point in sweep.left():
            run = chain.open_run(resolved[point.index], point.run_dir, chain.command_line())
            item = resolved[point.index]
            run.describe(item, cluster, {"train": job.shape}, serving.evaluation(item, cluster))
        entries = stage_jobs.submit_all(sweep.path, [job])
    return str(entries[0]["id"])


# --- local ----------------------------------------------------------------------------------------------------------------

# A sweep on this machine: one point after the other, each as a process of its own.

STOP_SECONDS = 300.0
"""For a run that is asked to stop: it ends the step it is in and saves."""


def run_command(sweep: Sweep, point: Point) -> list[str]:
    """``clustertune run`` of one point."""
    return [
        sys.executable,
        "-m",
        "clustertune",
        "run",
        point.recipe,
        *point.overrides,
        *(["--tiny"] if point.tiny else []),
        "--run-dir",
        str(point.run_dir),
        "--to",
        sweep.last,
    ]


def run_all(sweep: Sweep) -> list[int]:
    """Run the points that are left; one that fails does not hold up the others. Returns the numbers of those that failed."""
    failed = []
    keep_private()
    with lock.held(sweep.path / "lock", "works on this sweep", shown=sweep.path, fix="wait for it"):
        sweep.write()
        (sweep.path / "logs").mkdir(exist_ok=True)
        left = sweep.left()
        for number, point in enumerate(left, 1):
            began = time.perf_counter()
            say(f"point {point.index} ({number} of {len(left)}): {point.settings}")
            code = _run(sweep, point, run_command(sweep, point))
            state = "done" if code == 0 else f"ended with exit code {code}, see {_log(sweep, point)}"
            say(f"point {point.index}: {state} ({time.perf_counter() - began:.1f} s)")
            if code:
                failed.append(point.index)
    return failed


def _log(sweep: Sweep, point: Point) -> str:
    return str(sweep.path / "logs" / f"point-{point.index:04d}.log")


def _run(sweep: Sweep, point: Point, command: Sequence[str]) -> int:
    with open(_log(sweep, point), "ab") as log:  # noqa: PTH123
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        # A session of its own: Ctrl-C reaches this process only, which then asks the run to save and stop.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            return child.wait()
        finally:
            end(child, STOP_SECONDS)


def plan_array(
    recipe: str,
    settings: list[str],
    at_once: int | None,
    cluster: Cluster,
    options: dict[str, Any],
    dry_run: bool,
) -> tuple[Sweep, list[Resolved], StageJob | None]:
    """The sweep and its job array (None where nothing is left), everything checked that can be before it is submitted."""
    # Every task sees the ranks of a tiny training, whatever the allocation.
    shaped = [word for word in settings if word.startswith("slurm.")]
    more = shape.tiny_size(recipe, shaped, cluster) if options["tiny"] else []
    made, resolved = make_sweep(recipe, settings, more=more, **options, runs=cluster_paths.runs(cluster))
    models = cluster_paths.folder(cluster, "models")
    offers = [bundle.offered(item, models) for item in resolved]
    resolved = [item.with_staged(found) if found else item for item, (found, _) in zip(resolved, offers, strict=True)]
    for note in dict.fromkeys(note for _, notes in offers for note in notes):
        say(f"warning: {note}")
    problems = find_problems(made, resolved, cluster)
    if not dry_run:
        fix = "call this on a login node; --here runs the points on this machine, --dry-run needs no Slurm"
        problems += stage_jobs.find_missing(cluster, [("the sweep folder", made.path.absolute())], fix)
    raise_if(problems)
    flags = ["--cluster", reference(cluster)]
    flags += cluster_paths.flags(cluster_paths.of_jobs(cluster))
    job = make_job(made, resolved, cluster, at_once=at_once, flags=flags) if made.left() else None
    return made, resolved, job


def total(made: Sweep, resolved: list[Resolved], cluster: Cluster) -> dict[str, Any] | None:
    """GPU-hours and money of the points that are left, up to their last stage; None where a point cannot be planned."""
    left = {point.index for point in made.left()}
    planned = [bill.of_recipe(item, cluster) for point, item in zip(made.points, resolved, strict=True) if point.index in left]
    bills = [found[1] for found in planned if found is not None]
    evaluates = STAGES.index(made.last) >= STAGES.index("eval")
    hours = [whole.gpu_hours if evaluates else whole.training for whole in bills]
    if not hours or len(hours) != len(planned) or None in hours:
        return None
    gpu_hours = sum(value for value in hours if value is not None)
    return {"gpu_hours": gpu_hours, "cost": explanation.spent(gpu_hours, bills[0].price)}


def plan_here(recipe: str, settings: list[str], options: dict[str, Any]) -> tuple[Sweep, list[Resolved]]:
    """The sweep on this machine. Raises UserError with what keeps it from running here."""
    made, resolved = make_sweep(recipe, settings, **options, runs=cluster_paths.enter_local())
    raise_if(missing_inputs(made, resolved))
    ranks_needed = max(item.world_size for item in resolved)
    if not options["tiny"] and resolved[0].recipe.model.weights == "hub" and ranks_needed > chain.visible_gpus():
        text = f"needs {ranks_needed} GPUs, this machine has {chain.visible_gpus()}"
        raise UserError(text, file=recipe, key="slurm", fix="--tiny runs it here scaled down; without --here it is a job")
    return made, resolved


def show_plan(made: Sweep, job: StageJob | None, total: dict[str, Any] | None, as_json: bool) -> None:
    """Print the points, and the job or the commands here."""
    commands = [] if job else [run_command(made, point) for point in made.left()]
    if as_json:
        points = [{"index": p.index, "values": p.values, "overrides": list(p.overrides)} for p in made.points]
        script = {"script": job.script, "file": str(job.path), "command": job.command(None)} if job else None
        emit_json(
            {
                "sweep_dir": str(made.path),
                "points": points,
                "left": len(made.left()),
                "job": script,
                "here": commands,
                "total": total,
            }
        )
        return
    say(f"sweep folder: {made.path}")
    for point in made.points:
        say(f"point {point.index}: {point.settings}")
    if job:
        say(f"# {job.shape}\n# {job.path}\n{job.script.rstrip()}\n$ {shlex.join(job.command(None))}")
    for command in commands:
        say(f"$ {shlex.join(command)}")
    if total is not None:
        cost = explanation.money(total["cost"])
        say(f"planned: {total['gpu_hours']:,.1f} GPU-hours of {len(made.left())} points{f', {cost}' if cost else ''}")
    if not made.left():
        say("every point is finished")
