"""Whose run folder it is: one job at a time, and a restarted job takes over from its former self."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.launch import progress
from clustertune.launch.plan import newest_attempt
from clustertune.rundir import RunDir


def nobody(job: str) -> bool:
    return False


def test_a_second_job_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with progress.taken_over(run, "7", 0, nobody):
        assert progress.still_mine(tmp_path, "7", 0)
        with pytest.raises(UserError) as caught, progress.taken_over(run, "8", 0, lambda job: job == "7"):
            pass
        assert caught.value.code is ExitCode.AGAIN and "scancel 7" in str(caught.value)
        # Even where Slurm does not know job 7 any more, the lock does.
        with pytest.raises(UserError, match="works in this run folder"), progress.taken_over(run, "8", 0, nobody):
            pass
        assert progress.still_mine(tmp_path, "7", 0), "a refused job changes nothing"
    with progress.taken_over(run, "8", 0, nobody):
        assert newest_attempt(tmp_path) == 0, "a finished job holds nobody off, and nothing of it is left to be fenced off"


def test_a_restarted_job_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its former self may live on a node that was cut off: it is fenced first, then its lock is waited for, not for ever."""
    monkeypatch.setattr(progress, "WAIT_SECONDS", 1.0)
    run = RunDir(tmp_path)
    with progress.taken_over(run, "7", 0, nobody):
        before = newest_attempt(tmp_path)
        with progress.taken_over(run, "7", 1, nobody):
            assert newest_attempt(tmp_path) == before + 1
            assert not progress.still_mine(tmp_path, "7", 0)
            assert progress.still_mine(tmp_path, "7", 1)


def test_a_late_start_does_not_take_over_from_its_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script that hung on a cut-off node until the job ran elsewhere."""
    monkeypatch.setattr(progress, "WAIT_SECONDS", 0.0)
    run = RunDir(tmp_path)
    with progress.taken_over(run, "7", 1, nobody):
        before = newest_attempt(tmp_path)
        with pytest.raises(UserError, match="a later start of job 7"), progress.taken_over(run, "7", 0, nobody):
            pass
        assert newest_attempt(tmp_path) == before and progress.still_mine(tmp_path, "7", 1)


def test_an_unreadable_owner_is_no_successor(tmp_path: Path) -> None:
    """A stale handle or a time-out of NFS, once in a training of days."""
    with progress.taken_over(RunDir(tmp_path), "7", 0, nobody):
        (tmp_path / progress.OWNER).unlink()
        assert progress.still_mine(tmp_path, "7", 0)
