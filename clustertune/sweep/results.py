"""What came out of a sweep, read from the run folders alone: no scheduler is asked."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.evaluate.scores import metrics as scores_of
from clustertune.evaluate.scores import read_result, shown
from clustertune.events import read_object
from clustertune.report.metrics import Metrics, read_metrics
from clustertune.rundir import RunDir
from clustertune.sweep.points import Point, Sweep

LOWER = {"eval_loss": True, "loss": True, "eval_token_accuracy": False}
"""The metrics of training that points can be sorted by, and whether less is better; of a score more is better."""
SCORE = re.compile(r"[\w.:+-]+[.]\w[\w,.-]*|(prompt|inst)_level_(strict|loose)_acc")
"""``TASK.METRIC``; IFEval's four scores are known without their task, as before there were tasks."""
DONE, FAILED, OPEN, WAITING = "done", "failed", "unfinished", "waiting"


@dataclass(frozen=True)
class Result:
    """One point and what it reached."""

    index: int
    values: dict[str, str]
    status: str
    """``done``, ``failed``, ``unfinished`` (it runs, or it was ended and goes on) or ``waiting`` (nothing is there yet)."""
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
        found = self.metrics.get(metric, self.metrics.get(f"ifeval.{metric}"))
        return found if found is not None and math.isfinite(found) else None


def check_metric(metric: str) -> None:
    """Raises UserError for what can be no metric; which scores the points have is known when they end."""
    if metric not in LOWER and not SCORE.fullmatch(metric):
        fix = f"one of {', '.join(LOWER)}, or a score: TASK.METRIC, such as ifeval.prompt_level_strict_acc"
        raise UserError(Problem(f"there is no metric {metric!r}", file="command line", key="--metric", fix=fix))


def collect(sweep: Sweep, metric: str) -> list[Result]:
    """The results of all points, the best first; then the unfinished ones, and the failed ones last."""
    found = [_result(sweep, point) for point in sweep.points]
    order = {DONE: 0, OPEN: 1, WAITING: 2, FAILED: 3}

    def key(result: Result) -> tuple[int, bool, float, int]:
        value = result.value(metric)
        signed = 0.0 if value is None else value if LOWER.get(metric) else -value
        return (order[result.status], value is None, signed, result.index)

    return sorted(found, key=key)


def as_json(sweep: Sweep, metric: str, results: Sequence[Result]) -> dict[str, Any]:
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


def _result(sweep: Sweep, point: Point) -> Result:
    run = RunDir(point.run_dir)
    try:
        metrics = read_metrics(run.metrics)
    except OSError as error:
        problem = f"metrics.jsonl cannot be read: {error.strerror or error}"
        return Result(point.index, point.values, FAILED, problem, None, None, {}, str(point.run_dir))
    status, reason = _status(sweep, point, metrics)
    seconds = [stage.seconds for stage in metrics.stages if stage.seconds is not None]
    return Result(
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
    failed = next((stage.stage for stage in reversed(metrics.stages) if stage.status == "failed"), None)
    logged = _last_error(sweep, point)
    if not run.metrics.exists():  # submit writes run.json before the point begins
        return (FAILED, logged) if logged else (WAITING, "")
    outcome = _outcome(run.path)
    if failed is None or (failed == "train" and outcome.get("code") == ExitCode.AGAIN):
        return OPEN, ""
    problems = outcome.get("problems") if failed == "train" else None
    if isinstance(problems, list) and problems and isinstance(problems[0], dict):
        return FAILED, str(problems[0].get("message"))
    return FAILED, logged or f"{failed} failed: its log says why"


def _outcome(run_path: Path) -> dict[str, Any]:
    """How the newest attempt at training ended."""
    found = sorted(run_path.glob("attempts/*/outcome.json"))
    return read_object(found[-1]) if found else {}


def _last_error(sweep: Sweep, point: Point) -> str:
    """The last error line in the point's newest log: a point that ends before it has a run folder speaks only there."""
    names = (f"*_{point.index}.log", f"point-{point.index:04d}.log")
    logs = [path for name in names for path in (sweep.path / "logs").glob(name)]
    for path in sorted(logs, key=lambda p: p.stat().st_mtime_ns, reverse=True)[:1]:
        lines = path.read_text(errors="replace").splitlines()
        return next((line.partition("error: ")[2][:500] for line in reversed(lines) if line.startswith("error: ")), "")
    return ""
