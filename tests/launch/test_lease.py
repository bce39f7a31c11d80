"""The lease of a run folder: a second job is refused, a restarted one takes over, a late start does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.errors import ExitCode, UserError
from clustertune.launch import lease
from clustertune.launch.attempt import newest_attempt
from clustertune.rundir import RunDir


def nobody(job: str) -> bool:
    return False


def test_a_second_job_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with lease.taken_over(run, "7", 0, nobody):
        assert lease.still_mine(tmp_path, "7", 0)
        with pytest.raises(UserError) as caught, lease.taken_over(run, "8", 0, lambda job: job == "7"):
            pass
        assert caught.value.code is ExitCode.AGAIN and "scancel 7" in str(caught.value)
        # Even where Slurm does not know job 7 any more, the lock does.
        with pytest.raises(UserError, match="works in this run folder"), lease.taken_over(run, "8", 0, nobody):
            pass
        assert lease.still_mine(tmp_path, "7", 0), "a refused job changes nothing"
    with lease.taken_over(run, "8", 0, nobody):
        assert newest_attempt(tmp_path) == 0, "a finished job holds nobody off, and nothing of it is left to be fenced off"


def test_a_restarted_job_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its former self may live on a node that was cut off: it is fenced first, then its lock is waited for, not for ever."""
    monkeypatch.setattr(lease, "WAIT_SECONDS", 1.0)
    run = RunDir(tmp_path)
    with lease.taken_over(run, "7", 0, nobody):
        before = newest_attempt(tmp_path)
        with lease.taken_over(run, "7", 1, nobody):
            assert newest_attempt(tmp_path) == before + 1
            assert not lease.still_mine(tmp_path, "7", 0)
            assert lease.still_mine(tmp_path, "7", 1)


def test_a_late_start_does_not_take_over_from_its_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script that hung on a cut-off node until the job ran elsewhere."""
    monkeypatch.setattr(lease, "WAIT_SECONDS", 0.0)
    run = RunDir(tmp_path)
    with lease.taken_over(run, "7", 1, nobody):
        before = newest_attempt(tmp_path)
        with pytest.raises(UserError, match="a later start of job 7"), lease.taken_over(run, "7", 0, nobody):
            pass
        assert newest_attempt(tmp_path) == before and lease.still_mine(tmp_path, "7", 1)
