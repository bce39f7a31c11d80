"""When a job makes no progress: what counts, what does not, and what is said."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import progress
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.outcome import Outcome

KILLED = Problem("rank 3 on gpu-b failed first: killed (SIGKILL: out of memory, kill -9, or a node fault)")


def attempt(run: Path, number: int, step: int, outcome: Outcome | None, job: str = "7", minutes: float = 0) -> None:
    folder = run / "attempts" / f"{number:04d}"
    folder.mkdir(parents=True)
    AttemptPlan(attempt=number, nodes=(Node("gpu-b", "gpu-b"),), ranks_per_node=4, job=job, from_step=step).write(folder)
    if outcome:
        outcome.write(folder)
    log = folder / "rank-0.log"
    log.touch()
    os.utime(log, (time.time() + 60 * minutes,) * 2)


FAILED = Outcome(ExitCode.AGAIN, [KILLED])
STOPPED = Outcome(ExitCode.AGAIN, stop_requested=True)
GONE = Outcome(ExitCode.AGAIN, nodes_gone=("gpu-b",))


def test_three_failures_at_one_step_stop_the_job(tmp_path: Path) -> None:
    for number in (1, 2):
        attempt(tmp_path, number, 20, FAILED)
        progress.check_progress(tmp_path, "7", 20)
    attempt(tmp_path, 3, 20, FAILED)
    with pytest.raises(UserError) as caught:
        progress.check_progress(tmp_path, "7", 20)
    assert caught.value.code is ExitCode.STOP
    text = str(caught.value)
    assert "3 attempts since step 20 failed" in text and "--exclude=gpu-b" in text and "attempt 1: rank 3 on gpu-b" in text


def test_a_new_checkpoint_and_a_new_job_begin_the_count_anew(tmp_path: Path) -> None:
    """Somebody has looked, and submitted again."""
    for number, step in ((1, 20), (2, 20), (3, 22), (4, 22)):
        attempt(tmp_path, number, step, FAILED)
    progress.check_progress(tmp_path, "7", 22)
    progress.check_progress(tmp_path, "7", 24)
    attempt(tmp_path, 5, 22, FAILED)
    progress.check_progress(tmp_path, "8", 22)


@pytest.mark.parametrize("outcome", [None, STOPPED, GONE, Outcome(ExitCode.AGAIN, port_taken=True)])
def test_what_comes_from_outside_is_not_the_job_s_fault(tmp_path: Path, outcome: Outcome | None) -> None:
    """Preempted or on lost nodes a job may start often; not for ever."""
    for number in range(1, 10):
        attempt(tmp_path, number, 0, outcome, minutes=20)
        progress.check_progress(tmp_path, "7", 0)
    attempt(tmp_path, 10, 0, outcome, minutes=20)
    with pytest.raises(UserError) as caught:
        progress.check_progress(tmp_path, "7", 0)
    assert caught.value.code is ExitCode.STOP and "200 minutes in all, were ended from outside" in str(caught.value)


def test_ten_losses_within_minutes_are_the_cluster_s_bad_hour(tmp_path: Path) -> None:
    """Ten power losses, each before the first save, stopped a job in the campaign; short ones end it only at sixty."""
    for number in range(1, progress.ENDED_MOST):
        attempt(tmp_path, number, 0, None, minutes=0.4)
        progress.check_progress(tmp_path, "7", 0)
    attempt(tmp_path, progress.ENDED_MOST, 0, None)
    with pytest.raises(UserError, match="60 attempts from the beginning"):
        progress.check_progress(tmp_path, "7", 0)


@pytest.mark.parametrize("what", ["attempts/0003/plan.json", "stages/prepare.json", "merged/model-00002.safetensors"])
def test_a_job_goes_round_only_while_it_gets_on(tmp_path: Path, what: str) -> None:
    """Warned as soon as it starts, each time, it begins no attempt that could be counted; twenty preemptions are no fault of a
    job that gets somewhere in between."""
    for _ in range(progress.ENDED_LIMIT):
        progress.check_requeue(tmp_path, "7")
    (tmp_path / "attempts" / "0002").mkdir(parents=True)  # what a restarted job makes to fence off its former self
    with pytest.raises(UserError, match="--signal") as caught:
        progress.check_requeue(tmp_path, "7")
    assert caught.value.code is ExitCode.STOP
    (tmp_path / what).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / what).write_text("{}")
    progress.check_requeue(tmp_path, "7")
    progress.check_requeue(tmp_path, "7")
    progress.check_requeue(tmp_path, "8")
