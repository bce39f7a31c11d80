"""The state of a run, from its files alone: what watch, runs, the pages, compare and sweep say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode
from clustertune.manifest import read_object
from clustertune.report.cost import AttemptCost
from clustertune.report.metrics import Metrics
from clustertune.rundir import SCORES, RunDir

SILENT_SECONDS = 120.0
"""Without a sign of any rank for so long, an attempt that left no outcome counts as lost."""
EVALUATION_SILENT_SECONDS = 1800.0
"""Without news for so long, an evaluation counts as gone: a server that gives no answer for this long is given up."""
_ENDED = {int(ExitCode.OK): "trained", int(ExitCode.AGAIN): "interrupted", int(ExitCode.STOP): "stopped"}


@dataclass(frozen=True)
class RunState:
    """Where a run is."""

    word: str
    """``waiting``, ``training``, ``trained``, ``evaluating``, ``finished``, ``interrupted``, ``stopped``, ``failed`` or
    ``lost``."""
    stage: str = "train"
    """The one that failed, where one did."""
    code: int | None = None
    """Exit code of the newest attempt at training; None: it runs, was killed, or there was none."""

    @property
    def is_trained(self) -> bool:
        """Whether the training took its last step."""
        return self.code == ExitCode.OK or self.word in ("trained", "evaluating", "finished")

    def __str__(self) -> str:
        """In words; a failure with its stage."""
        if self.word != "failed":
            return self.word
        return f"{self.stage} failed" if self.stage != "train" or self.code is None else f"training failed, exit {self.code}"


@dataclass(frozen=True)
class EvaluationProgress:
    """How far an evaluation has come."""

    model: str
    """Which one answers: ``base`` or ``tuned``."""
    done: int
    total: int
    """Requests of all tasks: prompts to answer, and texts whose likelihood is asked."""
    eta_s: float | None
    """Seconds until this model has answered all, at the pace so far."""


def evaluation_of(run: RunDir, now: float) -> EvaluationProgress | None:
    """The evaluation under way at ``now``, by the file that it rewrites; a killed one leaves it. None: there is none."""
    body = read_object(run.evaluating)
    try:
        if now - float(body["time"]) > EVALUATION_SILENT_SECONDS:
            return None
        model = Path(body["model"]).resolve()
        tuned = model == run.merged.resolve() or model.is_relative_to(run.scores.resolve())
        which = "tuned" if tuned else "base"
        left = body["eta_s"]
        return EvaluationProgress(which, int(body["done"]), int(body["total"]), None if left is None else float(left))
    except (KeyError, TypeError, ValueError):
        return None


def read_stages(run: RunDir, metrics: Metrics) -> dict[str, dict[str, Any]]:
    """Each stage's status and seconds, by first start; the record of a finished one in ``stages/`` wins over the events."""
    stages: dict[str, dict[str, Any]] = {
        record.stage: {"status": record.status, "seconds": record.seconds, "tries": record.tries} for record in metrics.stages
    }
    for path in sorted((run.path / "stages").glob("*.json")):
        if (record := read_object(path)) and stages.get(path.stem, {}).get("status") != "failed":
            stage = stages.setdefault(path.stem, {"seconds": None, "tries": 1})
            stage["status"] = record.get("status", "done")
            stage["seconds"] = stage["seconds"] or record.get("seconds")
    return stages


def state_of(
    run: RunDir, stages: Mapping[str, Mapping[str, Any]], metrics: Metrics, attempts: Sequence[AttemptCost], now: float,
    seen: float = 0.0,
) -> RunState:  # fmt: skip
    """The state of a run at ``now``, Unix seconds; ``seen``: when a sampler wrote last.

    The outcome of the newest attempt, which judges all of its ranks, wins over what its first rank logged last.
    """
    newest, logged = (attempts[-1] if attempts else None), (metrics.attempts[-1] if metrics.attempts else None)
    code = newest.code if newest is not None and newest.code is not None else logged.exit_code if logged is not None else None
    if newest is not None and logged is not None and newest.code is None and logged.attempt < newest.attempt:
        code = None  # of the attempt before it
    status = {name: record.get("status") for name, record in stages.items()}
    apart = {"train", SCORES} if status.get("train") == "started" else {"train"}  # scores beside a trainer are tried again
    if failed := [name for name, what in status.items() if what == "failed" and name not in apart]:
        return RunState("failed", failed[-1], code)
    if evaluation_of(run, now) is not None:
        return RunState("evaluating", code=code)
    if any(status.get(name) in ("done", "reused") for name in ("eval", "report")) and status.get("train") != "started":
        return RunState("finished", code=code)
    if code is not None:
        return RunState(_ENDED.get(code, "failed"), code=code)
    return RunState(_without_code(status.get("train"), newest, logged is not None, now, seen))


def _without_code(recorded: str | None, newest: AttemptCost | None, logged: bool, now: float, seen: float) -> str:
    """The word for a training of which no attempt has left an exit code; ``recorded``: its stage's status."""
    if recorded in ("done", "reused", "failed"):
        return "failed" if recorded == "failed" else "trained"
    if newest is None:
        return "lost" if logged else "waiting"
    return "lost" if now - max(newest.seen, seen) > SILENT_SECONDS else "training"
