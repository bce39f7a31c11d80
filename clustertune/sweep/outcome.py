"""What came out of a sweep, read from the run folders alone: no scheduler is asked."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clustertune.console import aligned, duration
from clustertune.errors import UserError
from clustertune.evaluate.scores import metrics as scores_of
from clustertune.evaluate.scores import read_result, shown
from clustertune.launch.attempt import read_attempts
from clustertune.recipe.eval_tasks import first_task
from clustertune.recipe.sections import FIRST_TASK
from clustertune.report.content import UNKNOWN, number
from clustertune.report.cost import of_attempts
from clustertune.report.metrics import Metrics, read_metrics
from clustertune.report.state import read_stages, state_of
from clustertune.rundir import RunDir
from clustertune.sweep.points import Point, Sweep

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
        found = self.metrics.get(metric, self.metrics.get(f"{FIRST_TASK}.{metric}"))
        return found if found is not None and math.isfinite(found) else None


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
    found = [_result(sweep, point) for point in sweep.points]
    order = {DONE: 0, OPEN: 1, WAITING: 2, FAILED: 3}

    def key(result: PointResult) -> tuple[int, bool, float, int]:
        value = result.value(metric)
        signed = 0.0 if value is None else value if LOWER.get(metric) else -value
        return (order[result.status], value is None, signed, result.index)

    return sorted(found, key=key)


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
        found = read_result(run.eval) or {}
    except (OSError, ValueError):
        found = {}
    for task, row in (found.get("tasks") or {}).items():
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
        lines = path.read_text(errors="replace").splitlines()
        return next((line.partition("error: ")[2][:500] for line in reversed(lines) if line.startswith("error: ")), "")
    return ""


# --- page -----------------------------------------------------------------------------------------------------------------

# A sweep as a table for people, and as one self-contained page.


def rows(sweep: Sweep, names: Sequence[str], results: Sequence[PointResult]) -> list[list[str]]:
    """One row a point: rank, number, settings, metrics, step, time, state."""
    found, rank = [], 0
    for result in results:
        ranked = result.status == DONE and result.value(names[0]) is not None
        rank += ranked
        state = " ".join(f"{result.status}: {result.reason}".split()) if result.reason else result.status
        settings = [result.values.get(key, UNKNOWN) for key in sweep.keys]
        metrics = [number(result.value(name)) for name in names]
        step = UNKNOWN if result.step is None else str(result.step)
        position = str(rank) if ranked else ""
        found.append([position, str(result.index), *settings, *metrics, step, duration(result.seconds), state])
    return found


def heads(sweep: Sweep, names: Sequence[str]) -> list[str]:
    """The columns' names; ``#`` in front of those with numbers."""
    return ["", "#point", *(f"#{key}" for key in sweep.keys), *(f"#{name}" for name in names), "#step", "#time", "state"]


def lines(sweep: Sweep, metric: str, results: Sequence[PointResult]) -> list[str]:
    """The table for a terminal: one line a point, never broken, the metric that sorts alone of all."""
    table = [heads(sweep, [metric]), *rows(sweep, [metric], results)]
    right = [at for at, head in enumerate(table[0]) if head.startswith("#")]
    table[0] = [head.lstrip("#").rpartition(".")[2] for head in table[0]]
    return aligned(table, right)
