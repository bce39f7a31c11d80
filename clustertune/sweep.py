"""Many runs of one recipe under varied settings: a grid, as one job array of launch/run.sbatch or one after the other here.

The sweep folder: ``sweep.json`` (the numbered points, written before anything runs), ``points/0000/`` (run folders),
``tokens/`` (which points share), ``logs/``, ``jobs/``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clustertune import chain, lock
from clustertune.cluster.load import reference
from clustertune.cluster.schema import Cluster
from clustertune.console import aligned, duration, emit_json, say
from clustertune.errors import Problem, UserError, raise_if
from clustertune.evaluate.scores import metrics as scores_of
from clustertune.evaluate.scores import read_result, shown
from clustertune.host.system import format_cpu_list
from clustertune.launch import bill, cluster_paths, serving, shape, stage_jobs
from clustertune.launch.attempt import read_attempts
from clustertune.launch.stage_jobs import StageJob
from clustertune.manifest import read_whole, write_durably
from clustertune.plan import explanation
from clustertune.process import end
from clustertune.recipe.eval_tasks import first_task
from clustertune.recipe.layers import COMMAND_LINE, find_folder, parse_value
from clustertune.recipe.sections import FIRST_TASK
from clustertune.report.content import UNKNOWN, number
from clustertune.report.cost import of_attempts
from clustertune.report.metrics import Metrics, read_metrics
from clustertune.report.state import read_stages, state_of
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import STAGES, RunDir, keep_private
from clustertune.staging import bundle
from clustertune.tree import ROOT

SWEEP = "sweep.json"


@dataclass(frozen=True)
class Point:
    """One run of a sweep: what ``clustertune run`` and ``job`` need."""

    index: int
    """Its number, from 0: the index in the job array."""
    recipe: str
    """The recipe folder, as an absolute path."""
    overrides: tuple[str, ...]
    tiny: bool
    run_dir: Path
    values: dict[str, str]
    """What was varied, by key."""

    @property
    def settings(self) -> str:
        """``learning_rate=1e-5 r=16``: what was varied, for people."""
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Sweep:
    """A sweep as its folder holds it."""

    path: Path
    name: str
    """The recipe's name."""
    last: str
    """The stage after which a point is finished."""
    keys: tuple[str, ...]
    """The settings that are varied."""
    points: tuple[Point, ...]

    def left(self) -> list[Point]:
        """The points that are not finished."""
        return [point for point in self.points if RunDir(point.run_dir).stage(self.last) is None]

    def write(self) -> None:
        """Write ``sweep.json``, durably. Raises UserError where the folder holds another sweep or something else."""
        points = [{key: getattr(one, key) for key in ("recipe", "overrides", "tiny", "values")} for one in self.points]
        known = {key: getattr(self, key) for key in ("name", "last", "keys")}
        body = {**known, "points": points}
        if (self.path / SWEEP).exists():
            before = read_sweep(self.path)
            if before.points != self.points:
                fix = "give another --sweep-dir, or leave it out: each sweep has its own folder"
                raise UserError("holds another sweep", file=str(self.path), fix=fix)
            if before.last == self.last:
                return
        elif self.path.is_dir() and any(entry.name not in ("lock", "jobs") for entry in self.path.iterdir()):
            raise UserError("holds something else than a sweep", file=str(self.path), fix="give another --sweep-dir")
        self.path.mkdir(parents=True, exist_ok=True)
        write_durably(self.path / SWEEP, json.dumps(body, indent=1) + "\n")


def read_sweep(path: Path) -> Sweep:
    """The sweep of a folder. Raises UserError where there is none."""
    file = path / SWEEP
    try:
        body: dict[str, Any] = json.loads(read_whole(file))
        points = tuple(
            Point(
                index=index,
                recipe=str(entry["recipe"]),
                overrides=tuple(map(str, entry["overrides"])),
                tiny=bool(entry["tiny"]),
                run_dir=run_dir(path, index),
                values={str(key): str(value) for key, value in entry["values"].items()},
            )
            for index, entry in enumerate(body["points"])
        )
        keys = tuple(map(str, body["keys"]))
        return Sweep(path, str(body["name"]), str(body["last"]), keys, points)
    except FileNotFoundError:
        fix = "clustertune sweep RECIPE section.key=value,value makes one"
        raise UserError(f"is not a sweep: it has no {SWEEP}", file=str(path), fix=fix) from None
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"unreadable: {error!r}", file=str(file)) from None


def run_dir(path: Path, index: int) -> Path:
    """The run folder of a point."""
    return path.absolute() / "points" / f"{index:04d}"


def point(path: Path, index: int) -> Point:
    """The point that a task of the job array works on. Raises UserError where the sweep has none of that number."""
    points = read_sweep(path).points
    if not 0 <= index < len(points):
        raise UserError(f"has no point {index}: {len(points)} points, from 0", file=str(path / SWEEP))
    return points[index]


def make_sweep(
    recipe: str,
    arguments: Sequence[str],
    *,
    tiny: bool,
    last: str,
    more: Sequence[str] = (),
    path: Path | None = None,
    runs: Path = Path("runs"),
) -> tuple[Sweep, list[Resolved]]:
    """All points of a sweep, each resolved before anything is made; nothing is written.

    ``more`` are overrides that every point gets. Without ``path`` the folder is ``runs/<recipe>/sweep-<12 hex>``: the same
    command finds the same sweep. Raises UserError with the problems of all points at once.
    """
    folder, _ = find_folder(recipe)
    axes = parse_axes(arguments)
    values = combinations(axes)
    varied = [axis.key for axis in axes if len(axis.values) > 1]
    resolved: list[Resolved] = []
    problems: dict[Problem, None] = {}
    chosen: list[tuple[str, ...]] = []
    for combination in values:
        overrides = tuple(f"{axis.key}={value}" for axis, value in zip(axes, combination, strict=True))
        chosen.append((*overrides, *more))
        try:
            resolved.append(resolve(recipe, chosen[-1], tiny=tiny))
        except UserError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise UserError(list(problems))
    where = path or runs / folder.name / f"sweep-{_identity(chosen, resolved, tiny)}"
    points = tuple(
        Point(
            index=index,
            recipe=str(folder),
            overrides=overrides,
            tiny=tiny,
            run_dir=run_dir(where, index),
            values={axis.key: value for axis, value in zip(axes, values[index], strict=True) if axis.key in varied},
        )
        for index, overrides in enumerate(chosen)
    )
    return Sweep(where, folder.name, last, tuple(varied), points), resolved


def _identity(chosen: Sequence[Sequence[str]], resolved: Sequence[Resolved], tiny: bool) -> str:
    body = [tiny, [list(point) for point in chosen], [item.fingerprint() for item in resolved]]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:12]


def missing_inputs(sweep: Sweep, resolved: Sequence[Resolved]) -> list[Problem]:
    """The files and folders of ``data.input`` that are not there, of the points that have not read them yet."""
    problems: dict[Problem, None] = {}
    for item, one in zip(resolved, sweep.points, strict=True):
        if RunDir(one.run_dir).stage("prepare") is None:
            problems |= dict.fromkeys(bundle.missing_inputs(item))
    return list(problems)


# --- space ----------------------------------------------------------------------------------------------------------------

# What is varied: ``key=a,b`` arguments as axes, and their grid.

MAX_POINTS = 1000
"""Slurm's own MaxArraySize of 1001 allows the indices 0 to 1000."""
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True)
class Axis:
    """One setting and the values that it takes; one value alone is the same for all points."""

    key: str
    values: tuple[str, ...]
    """As they stand on the command line: YAML."""


def parse_axes(arguments: Sequence[str]) -> list[Axis]:
    """The axes of ``key=value,value`` arguments. Raises UserError with everything that is wrong."""
    axes: list[Axis] = []
    problems: list[Problem] = []
    for word in arguments:
        key, equals, text = word.partition("=")
        if not equals or not _KEY.fullmatch(key):
            fix = "write section.key=value,value, as train.learning_rate=1e-5,5e-5"
            problems.append(Problem(f"{(key if equals else word)[:60]!r} is not a setting", file=COMMAND_LINE, fix=fix))
            continue
        if any(axis.key == key for axis in axes):
            problems.append(Problem("appears twice", file=COMMAND_LINE, key=key, fix="name all values in one: key=a,b,c"))
            continue
        try:
            axes.append(_axis(key, text))
        except ValueError as error:
            problems.append(Problem(str(error), file=COMMAND_LINE, key=key))
    problems += [
        Problem("cannot be varied: one job array has one shape", file=COMMAND_LINE, key=axis.key, fix="a sweep for each")
        for axis in axes
        if axis.key.startswith("slurm.") and len(axis.values) > 1
    ]
    raise_if(problems)
    return axes


def _axis(key: str, text: str) -> Axis:
    """The values between commas, as a list of YAML: those inside of brackets or quotes do not split. Raises ValueError."""
    values = parse_value(f"[{text}]") if "," in text else [parse_value(text)]
    words = [value if isinstance(value, str) and parse_value(value) == value else json.dumps(value) for value in values]
    if len(set(words)) < len(words):
        raise ValueError(f"{next(word for word in words if words.count(word) > 1)} appears twice")
    return Axis(key, tuple(words))


def combinations(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """The values of every point of the grid, in the order of ``axes``. Raises UserError where it is empty or too large."""
    size = math.prod(len(axis.values) for axis in axes)
    if size < 2:
        raise UserError("nothing is varied", file=COMMAND_LINE, fix="give several values: train.learning_rate=1e-5,5e-5")
    if size > MAX_POINTS:
        raise UserError(f"a grid of {size:,} points", file=COMMAND_LINE, fix=f"fewer values: {MAX_POINTS} points at most")
    return list(itertools.product(*(axis.values for axis in axes)))


# --- outcome --------------------------------------------------------------------------------------------------------------

# What came out, read from the run folders alone: no scheduler is asked.

LOWER = {"eval_loss": True, "loss": True, "eval_token_accuracy": False}
"""The metrics of training that points can be sorted by, and whether less is better; of a score more is better."""
SCORE = re.compile(r"[\w.:+-]+[.]\w[\w,.-]*")
"""``TASK.METRIC``."""
DONE, FAILED, OPEN, WAITING = "done", "failed", "unfinished", "waiting"


@dataclass(frozen=True)
class PointResult:
    """One point and what it reached."""

    index: int
    values: dict[str, str]
    status: str
    """``done``, ``failed``, ``unfinished`` (it runs, or it was ended and continues) or ``waiting`` (nothing is there yet)."""
    reason: str
    """Why it failed; empty otherwise."""
    step: int | None
    """The last optimizer step."""
    seconds: float | None
    """Of all stages together."""
    metrics: dict[str, float]
    """The last value of each; losses in nats per token, scores and accuracies from 0 to 1."""
    run_dir: str

    def value(self, metric: str) -> float | None:
        """Its value of a metric, where it is a number."""
        value = self.metrics.get(metric, self.metrics.get(f"{FIRST_TASK}.{metric}"))
        return value if value is not None and math.isfinite(value) else None


def check_metric(metric: str) -> None:
    """Raises UserError for what can be no metric; which scores the points have is known when they end.

    Scores of the first task are known without its name, as before there were tasks.
    """
    first = first_task()
    if metric not in (*LOWER, *first.metrics) and not SCORE.fullmatch(metric):
        fix = f"one of {', '.join(LOWER)}, or a score: TASK.METRIC, such as {first.task}.{first.metrics[0]}"
        raise UserError(f"there is no metric {metric!r}", file="command line", key="--metric", fix=fix)


def collect(sweep: Sweep, metric: str) -> list[PointResult]:
    """The results of all points, the best first; then the unfinished ones, and the failed ones last."""
    results = [_result(sweep, point) for point in sweep.points]
    order = {DONE: 0, OPEN: 1, WAITING: 2, FAILED: 3}

    def key(result: PointResult) -> tuple[int, bool, float, int]:
        value = result.value(metric)
        signed = 0.0 if value is None else value if LOWER.get(metric) else -value
        return (order[result.status], value is None, signed, result.index)

    return sorted(results, key=key)


def as_json(sweep: Sweep, metric: str, results: Sequence[PointResult]) -> dict[str, Any]:
    """The ``--json`` form."""
    counts = {status: sum(r.status == status for r in results) for status in (DONE, OPEN, WAITING, FAILED)}
    best = next((r.index for r in results if r.status == DONE and r.value(metric) is not None), None)
    return {
        "sweep_dir": str(sweep.path),
        "recipe": sweep.name,
        "metric": metric,
        "keys": list(sweep.keys),
        "counts": counts,
        "best": best,
        "points": [asdict(result) for result in results],
    }


def _result(sweep: Sweep, point: Point) -> PointResult:
    run = RunDir(point.run_dir)
    try:
        metrics = read_metrics(run.metrics)
        status, reason = _status(sweep, point, metrics)
    except (OSError, UserError) as error:
        problem = f"metrics.jsonl cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        return PointResult(point.index, point.values, FAILED, problem, None, None, {}, str(point.run_dir))
    seconds = [stage.seconds for stage in metrics.stages if stage.seconds is not None]
    return PointResult(
        index=point.index,
        values=point.values,
        status=status,
        reason=reason,
        step=metrics.steps[-1].step if metrics.steps else None,
        seconds=round(sum(seconds), 3) if seconds else None,
        metrics=_values(run, metrics),
        run_dir=str(point.run_dir),
    )


def _values(run: RunDir, metrics: Metrics) -> dict[str, float]:
    last: dict[str, float | None] = {"loss": metrics.steps[-1].loss if metrics.steps else None}
    if metrics.evals:
        last["eval_loss"] = metrics.evals[-1].eval_loss
        last["eval_token_accuracy"] = metrics.evals[-1].eval_token_accuracy
    try:
        result = read_result(run.eval) or {}
    except (OSError, ValueError):
        result = {}
    for task, row in (result.get("tasks") or {}).items():
        for key, value, _ in scores_of(row):
            last[f"{task}.{shown(key)}"] = float(value) if isinstance(value, int | float) else None
    return {name: value for name, value in last.items() if value is not None}


def _status(sweep: Sweep, point: Point, metrics: Metrics) -> tuple[str, str]:
    run = RunDir(point.run_dir)
    if run.stage(sweep.last) is not None:
        return DONE, ""
    logged = _last_error(sweep, point)
    if not run.metrics.exists():  # submit writes run.json before the point begins
        return (FAILED, logged) if logged else (WAITING, "")
    attempts, stages = read_attempts(run.path), read_stages(run, metrics)
    state = state_of(run, stages, metrics, of_attempts(run.path), time.time())
    if state.word not in ("failed", "stopped"):
        return OPEN, ""
    messages = attempts[-1].messages if attempts and state.stage == "train" else ()
    return FAILED, next(iter(messages), logged or f"{state.stage} failed: its log says why")


def _last_error(sweep: Sweep, point: Point) -> str:
    """The last error line in the point's newest log: a point that ends before it has a run folder speaks only there."""
    names = (f"*_{point.index}.log", f"point-{point.index:04d}.log")
    logs = [path for name in names for path in (sweep.path / "logs").glob(name)]
    for path in sorted(logs, key=lambda p: p.stat().st_mtime_ns, reverse=True)[:1]:
        lines = read_whole(path).decode(errors="replace").splitlines()
        return next((line.partition("error: ")[2][:500] for line in reversed(lines) if line.startswith("error: ")), "")
    return ""


# --- table ----------------------------------------------------------------------------------------------------------------


def rows(sweep: Sweep, names: Sequence[str], results: Sequence[PointResult]) -> list[list[str]]:
    """One row a point: rank, number, settings, metrics, step, time, state."""
    table, rank = [], 0
    for result in results:
        ranked = result.status == DONE and result.value(names[0]) is not None
        rank += ranked
        state = " ".join(f"{result.status}: {result.reason}".split()) if result.reason else result.status
        settings = [result.values.get(key, UNKNOWN) for key in sweep.keys]
        metrics = [number(result.value(name)) for name in names]
        step = UNKNOWN if result.step is None else str(result.step)
        position = str(rank) if ranked else ""
        table.append([position, str(result.index), *settings, *metrics, step, duration(result.seconds), state])
    return table


def heads(sweep: Sweep, names: Sequence[str]) -> list[str]:
    """The columns' names; ``#`` in front of those with numbers."""
    return ["", "#point", *(f"#{key}" for key in sweep.keys), *(f"#{name}" for name in names), "#step", "#time", "state"]


def lines(sweep: Sweep, metric: str, results: Sequence[PointResult]) -> list[str]:
    """The table for a terminal: one line a point, never broken, the metric that sorts alone of all."""
    table = [heads(sweep, [metric]), *rows(sweep, [metric], results)]
    right = [at for at, head in enumerate(table[0]) if head.startswith("#")]
    table[0] = [head.lstrip("#").rpartition(".")[2] for head in table[0]]
    return aligned(table, right)


# --- Slurm ----------------------------------------------------------------------------------------------------------------

# One job array of launch/run.sbatch, whose task N works on point N.


def indices(points: Sequence[Point]) -> str:
    """The numbers of points as ``--array`` takes them: ``0-3,7``."""
    return format_cpu_list(point.index for point in points)


def find_problems(sweep: Sweep, resolved: Sequence[Resolved], cluster: Cluster) -> list[Problem]:
    """What keeps the points from running on a cluster, each problem once."""
    problems: dict[Problem, None] = dict.fromkeys(missing_inputs(sweep, resolved))
    for item in resolved:
        problems.update(dict.fromkeys(shape.find_problems(item, cluster)))
    if cluster.slurm is None:
        fix = "add a slurm section to its file, --cluster names another one, --here runs the points on this machine"
        problems[Problem(f"cluster {cluster.name} has no Slurm", file=cluster.source, fix=fix)] = None
    return list(problems)


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
    resolved = [item.with_staged(folder) if folder else item for item, (folder, _) in zip(resolved, offers, strict=True)]
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
    bills = [pair[1] for pair in planned if pair is not None]
    evaluates = STAGES.index(made.last) >= STAGES.index("eval")
    hours = [billed.gpu_hours if evaluates else billed.training for billed in bills]
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
