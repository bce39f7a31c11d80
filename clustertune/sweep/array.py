"""A sweep on Slurm: one job array of launch/run.sbatch, whose task N works on point N."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from clustertune import chain, lock
from clustertune.config.cluster_schema import Cluster
from clustertune.config.resolved import Resolved
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import shape, signal_margin, slurm, submit
from clustertune.launch.records import parse_jobs
from clustertune.rundir import STAGES, keep_private
from clustertune.sweep.points import Point, Sweep, missing_inputs
from clustertune.tree import ROOT


def indices(points: Sequence[Point]) -> str:
    """The numbers of points as ``--array`` takes them: ``0-3,7``."""
    parts: list[list[int]] = []
    for index in sorted(point.index for point in points):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def find_problems(sweep: Sweep, resolved: Sequence[Resolved], cluster: Cluster) -> list[Problem]:
    """What keeps the points from running on a cluster, each problem once."""
    found: dict[Problem, None] = dict.fromkeys(missing_inputs(sweep, resolved))
    for point, item in zip(sweep.points, resolved, strict=True):
        minutes = shape.train_shape(item, cluster).minutes
        found.update(dict.fromkeys(shape.find_problems(item, cluster)))
        found.update(
            dict.fromkeys(signal_margin.find_problems(signal_margin.needed(point.run_dir, item), minutes, file=item.name))
        )
    if cluster.slurm is None:
        fix = "add a slurm section to its file, --cluster names another one, --here runs the points on this machine"
        found[Problem(f"cluster {cluster.name} has no Slurm", file=cluster.source, fix=fix)] = None
    return list(found)


def make_job(
    sweep: Sweep, resolved: Sequence[Resolved], cluster: Cluster, *, at_once: int | None = None, flags: Sequence[str] = ()
) -> submit.StageJob:
    """The job array for the points that are left; ``at_once`` limits how many run side by side.

    ``flags`` follow ``--sweep DIR``. All points have the training's shape. Raises UserError where shapes differ.
    """
    shapes = {shape.train_shape(item, cluster) for item in resolved}
    if len(shapes) > 1:
        text = "the points ask for nodes, GPUs or memory of different size, and one job array has one shape"
        raise UserError(Problem(text, file=sweep.name, fix="a sweep for each: " + "; ".join(map(str, shapes))))
    needed = max(signal_margin.needed(point.run_dir, item).seconds for point, item in zip(sweep.points, resolved, strict=True))
    limit = f"%{at_once}" if at_once else ""
    folder = sweep.path.absolute()
    logs = submit.escape_pattern(folder / "logs")
    words = ["--sweep", str(folder), "--from", STAGES[0], "--to", sweep.last]
    return submit.StageJob(
        stage="sweep",
        shape=shapes.pop(),
        script=submit.render(
            f"{sweep.name}-sweep",
            shape.train_shape(resolved[0], cluster),
            min(needed, signal_margin.LONGEST_SECONDS),
            extra=[f"--array={indices(sweep.left())}{limit}"],
        ),
        path=folder / "jobs" / "sweep.sbatch",
        options=("--export=NIL", f"--chdir={ROOT}", f"--output={logs}/%x-%A_%a.log"),
        arguments=(sweep.points[0].recipe, *words, *flags),
    )


def live_jobs(path: Path, run: slurm.Run = slurm.call) -> list[str]:
    """Ids of the sweep's job arrays that have tasks which run or may run yet. Raises UserError where Slurm does not answer."""
    live = []
    for entry in submit.read_jobs(path)["jobs"]:
        number = str(entry.get("id"))
        if slurm.show_job(number, run) is None:  # forgotten
            continue
        tasks = parse_jobs(run(["scontrol", "show", "job", number]))
        if any(submit.is_ours(entry, task) and task.get("JobState") not in slurm.ENDED for task in tasks):
            live.append(number)
    return live


def send(sweep: Sweep, resolved: Sequence[Resolved], cluster: Cluster, job: submit.StageJob) -> str:
    """Submit the array and keep its id in ``jobs/jobs.json``; returns the id. Refused where tasks of the sweep are queued.

    What every task runs is recorded in its point's ``run.json`` before: an edit while it waits changes nothing.
    """
    keep_private(cluster)
    with lock.held(sweep.path / "jobs" / "lock", "submits this sweep", shown=sweep.path, fix="wait for it"):
        sweep.write()
        if live := live_jobs(sweep.path):
            fix = f"clustertune sweep --results {shlex.quote(str(sweep.path))} shows it; scancel {' '.join(live)} ends it"
            problem = Problem(f"tasks of this sweep are in the queue: {', '.join(live)}", file=str(sweep.path), fix=fix)
            raise UserError(problem, ExitCode.AGAIN)
        for point in sweep.left():
            run = chain.open_run(resolved[point.index], point.run_dir, chain.command_line())
            run.describe(resolved[point.index], cluster, {"train": job.shape})
        entries = submit.submit_all(
            sweep.path, [job], lambda options, script, words: slurm.submit(options, script, words, os.environ)
        )
    return str(entries[0]["id"])
