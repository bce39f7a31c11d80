"""The jobs of a run: from the controller while it knows them, else from what they left in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clustertune.checkpoint.store import newest_step
from clustertune.errors import UserError
from clustertune.launch import slurm
from clustertune.launch.attempt import read_attempts
from clustertune.launch.stage_jobs import is_ours, read_jobs
from clustertune.recipe.sections import parse_minutes
from clustertune.rundir import STAGES, RunDir

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
