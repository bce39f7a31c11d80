"""Whether a job still makes progress: attempts that end without a new checkpoint are counted, and the reason is looked for."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.attempt import PLAN, PastAttempt, read_attempts
from clustertune.manifest import read_whole, write_durably

FAILED_LIMIT = 3
"""Attempts in a row that failed by themselves without a new checkpoint, after which a job stops (NVRx: 3 cycles)."""
ENDED_LIMIT = 10
"""The same for attempts that were ended from outside (node lost, preempted, requeued), once they used up :data:`ENDED_SECONDS`:
not the job's fault, but no end. Ten losses within minutes are a bad hour of the cluster, not of the job."""
ENDED_SECONDS = 30 * 60
ENDED_MOST = 60
"""So many however short they were: what ends a job as soon as it starts would send it round for ever."""

REQUEUED = "requeued.json"
_PLACE = re.compile(r"rank \d+ on [A-Za-z0-9._-]+")


def without_progress(attempts: Sequence[PastAttempt], job: str | None, step: int) -> list[PastAttempt]:
    """The attempts of this job at the end of the list that began at the step at which the next one would begin."""
    stuck: list[PastAttempt] = []
    for attempt in reversed(attempts):
        if attempt.plan.job != job or attempt.plan.from_step != step:
            break
        stuck.append(attempt)
    return stuck[::-1]


def check_progress(run_path: Path, job: str | None, step: int) -> None:
    """Refuse another attempt of a job that makes no progress. A new job, submitted after a look, begins to count again.

    Raises UserError (exit 93) with what the attempts have in common.
    """
    stuck = without_progress(read_attempts(run_path), job, step)
    failed = [attempt for attempt in stuck if not attempt.ended_outside]
    lost = sum(attempt.seconds for attempt in stuck)
    often = len(stuck) >= ENDED_MOST or (len(stuck) >= ENDED_LIMIT and lost >= ENDED_SECONDS)
    if len(failed) < FAILED_LIMIT and not often:
        return
    where = f"since step {step}" if step else "from the beginning"
    if len(failed) >= FAILED_LIMIT:
        head = f"{len(failed)} attempts {where} failed without a new checkpoint: the job stops"
    else:
        spent = f"{lost / 60:.0f} minutes"
        head = f"{len(stuck)} attempts {where}, {spent} in all, were ended from outside before a new checkpoint: the job stops"
    problems = [Problem(head, file=str(run_path / "attempts"), fix=_advice(failed or stuck))]
    for attempt in (failed or stuck)[-FAILED_LIMIT:]:
        reason = "; ".join(attempt.messages) or "ended from outside, without a message"
        problems.append(Problem(f"attempt {attempt.plan.attempt}: {reason}", file=str(attempt.folder)))
    raise UserError(problems, ExitCode.STOP)


def check_requeue(run_path: Path, job: str) -> None:
    """Count a requeue; refuse one more of a job that has begun no attempt and finished no stage or file for ten of them.

    A warning that comes as soon as the job has started (its time limit is shorter than ``--signal``), or a stage that is longer
    than the limit, would send it round for ever. Raises UserError (exit 93).
    """
    path, mark = run_path / REQUEUED, _mark(run_path)
    try:
        before = json.loads(read_whole(path))
        same = before["job"] == job and all(now <= then for now, then in zip(mark, before["mark"], strict=True))
        count = int(before["count"]) + 1 if same else 1
        mark = [max(pair) for pair in zip(mark, before["mark"], strict=True)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        count = 1
    if count > ENDED_LIMIT:
        fix = "give it more time: --time must be far longer than --signal; a new job counts from zero"
        text = f"requeued {ENDED_LIMIT} times before it began an attempt or finished anything: the job stops"
        raise UserError(text, file=str(run_path), fix=fix, code=ExitCode.STOP)
    with contextlib.suppress(OSError):
        write_durably(path, json.dumps({"job": job, "count": count, "mark": mark}) + "\n")


def _mark(run_path: Path) -> list[int]:
    """What grows only with a job's progress: attempts, finished stages, files of the merged model, bytes of the evaluation."""

    def sizes(name: str) -> list[int]:
        with contextlib.suppress(OSError):
            return [entry.stat().st_size for entry in (run_path / name).iterdir() if not entry.name.startswith(".")]
        return []

    attempts = len(list((run_path / "attempts").glob(f"*/{PLAN}")))
    return [attempts, len(sizes("stages")), len(sizes("merged")), sum(sizes("eval"))]


def _advice(attempts: Sequence[PastAttempt]) -> str:
    """What the messages of the attempts have in common."""
    texts = [" ".join(attempt.messages) for attempt in attempts]
    places = Counter(word for text in texts for word in set(_PLACE.findall(text)))
    if places:
        location, count = places.most_common(1)[0]
        if count == len(texts) and " on " in location:
            node = location.rpartition(" on ")[2]
            return f"{location} failed each time: try without that node (sbatch --exclude={node}), and look at its log"
    if texts and all("SIGKILL" in text or "killed" in text for text in texts):
        return "killed each time: most often memory; more memory, more nodes, or a smaller train.max_length"
    if len(set(texts)) == 1 and texts[0]:
        return "the same each time: not the machine; fix it, then submit again"
    return "look at the logs of the attempts, fix it, then submit again: a new job counts from zero"
