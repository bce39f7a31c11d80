"""The state of a run, from its files alone: what watch, runs, the pages, compare and sweep say; and of its jobs, from Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.checkpoint.store import newest_step
from clustertune.errors import ExitCode, UserError
from clustertune.launch import slurm
from clustertune.launch.attempt import read_attempts
from clustertune.launch.stage_jobs import is_ours, read_jobs
from clustertune.manifest import read_object
from clustertune.recipe.sections import parse_minutes
from clustertune.report.cost import AttemptCost
from clustertune.report.metrics import Metrics
from clustertune.rundir import SCORES, STAGES, RunDir

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


# --- jobs: from the controller while it knows them, else from what they left in the run folder -------------------------

FORGOTTEN = "FORGOTTEN"
"""The controller does not know the job any more, and the run folder does not tell how it ended."""
UNKNOWN = "UNKNOWN"
"""The controller cannot be asked."""


@dataclass(frozen=True)
class StageRow:
    """One stage."""

    stage: str
    job: str | None = None
    state: str = "-"
    """Slurm's word in capitals; ``done`` where the stage's record is there."""
    reason: str = ""
    seconds: float | None = None
    """Run time of the job's newest start, or of the finished stage; None for one that never began."""
    nodes: str = ""
    restarts: int = 0
    attempts: int | None = None
    """Of the training: its attempts so far."""
    step: int | None = None
    """Of the training: step of the newest whole checkpoint."""


@dataclass(frozen=True)
class StagesStatus:
    """All stages of a run."""

    rows: tuple[StageRow, ...]
    note: str | None = None
    """Why Slurm could not be asked."""

    @property
    def live(self) -> bool:
        """Whether a job runs or may run yet."""
        outside = {*slurm.ENDED, FORGOTTEN, UNKNOWN, "done", "-"}
        return any(row.state not in outside for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The ``--json`` form."""
        return {"stages": [vars(row) for row in self.rows], "live": self.live, "note": self.note}


def read_status(run: RunDir, run_command: slurm.Run = slurm.call) -> StagesStatus:
    """The status of a run. Raises UserError where the folder's own files cannot be read; never for lack of Slurm."""
    newest: dict[str, Mapping[str, Any]] = {str(entry.get("stage")): entry for entry in read_jobs(run.path)["jobs"]}
    note: str | None = None
    rows = []
    for stage in STAGES:
        entry = newest.get(stage)
        record: dict[str, str] | None = None
        if entry is not None and note is None:
            try:
                record = slurm.show_job(str(entry.get("id")), run_command)
            except UserError as error:
                note = error.problems[0].message
        if record is not None and entry is not None and not is_ours(entry, record):
            record = None
        rows.append(_row(run, stage, entry, record, requested=note is None))
    return StagesStatus(tuple(rows), note)


def _row(
    run: RunDir, stage: str, entry: Mapping[str, Any] | None, slurm_record: Mapping[str, str] | None, *, requested: bool
) -> StageRow:
    record = run.stage(stage) or {}
    training: dict[str, Any] = {}
    if stage == "train":
        training = {"attempts": len(read_attempts(run.path)), "step": newest_step(run.checkpoints)}
    job = str(entry["id"]) if entry is not None else None
    if slurm_record is not None:
        return StageRow(
            stage,
            job,
            slurm_record.get("JobState", UNKNOWN),
            _reason(slurm_record.get("Reason"), job),
            _seconds(slurm_record.get("RunTime")) if slurm_record.get("NodeList") else None,
            _shown(slurm_record.get("NodeList")),
            int(slurm_record.get("Restarts", "0") or 0) if slurm_record.get("Restarts", "0").isdigit() else 0,
            **training,
        )
    if record:  # a controller that has forgotten a job, or is down, does not undo what the job finished
        return StageRow(stage, job, "done", "", _float(record.get("seconds")), **training)
    if job is None:
        return StageRow(stage, **training)
    reason = _last_outcome(run) if stage == "train" else ""
    return StageRow(stage, job, FORGOTTEN if requested else UNKNOWN, reason, **training)


def _reason(value: str | None, job: str | None) -> str:
    """Slurm's word for why a job waits, with what to do where it waits for a person.

    It holds a requeued job whose start fails: seen where a cut-off node came back and still had the old one (22.05).
    """
    text = _shown(value)
    return f"{text} -> scontrol release {job}" if "held" in text.lower() else text


def _shown(value: str | None) -> str:
    return "" if value in (None, "None", "(null)") else str(value)


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _seconds(text: str | None) -> float | None:
    minutes = parse_minutes(text or "")
    return None if minutes is None else round(minutes * 60)


def _last_outcome(run: RunDir) -> str:
    """What the newest attempt's outcome says, in one line; empty where there is none."""
    for attempt in reversed(read_attempts(run.path)):
        if attempt.code is not None:
            return next(iter(attempt.messages), f"attempt {attempt.plan.attempt} ended with code {attempt.code}")
    return ""
