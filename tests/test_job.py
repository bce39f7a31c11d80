"""What the program of a Slurm job decides: another attempt here, back into the queue, or the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertune import chain, job, manifest
from clustertune.cluster.schema import Container, Doctor, Storage
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import lease, progress, slurm
from clustertune.launch import outcome as outcomes
from clustertune.launch.allocation import Allocation
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.launch.outcome import Outcome
from clustertune.process import Stopped
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir

KILLED = Outcome(ExitCode.AGAIN, [Problem("rank 1 on gpu-b failed first: killed")])


def links_of(run: Path, restart: int = 0) -> job.JobChain:
    allocation = Allocation(
        "7", restart, ("gpu-a", "gpu-b"), gpus_per_node=1, cpus_per_node=4, tasks_per_node=1, memory_mb=None
    )
    plain = {"container": Container(), "doctor": Doctor(preflight=False), "nccl_check": None, "storage": Storage()}
    cluster: Any = SimpleNamespace(name="here", model_dump=lambda mode: {}, **plain)
    ours = {
        "model": SimpleNamespace(path=None),
        "eval": SimpleNamespace(during=None),
        "save": None,
        "server_nodes": 0,
        "rollout": None,
        "scores_beside": False,
    }
    recipe = SimpleNamespace(staged=None, budget=None, **ours)
    resolved: Any = SimpleNamespace(name="r", world_size=2, recipe=recipe, inputs={}, folder=str(chain.ROOT / "recipes/r"))
    return job.JobChain(RunDir(run), resolved, inputs=job.JobInputs(resolved, cluster, allocation, run, ("prepare", "export")))


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Attempts that end as given; returns the list in which they are counted."""
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(chain.source, "write", lambda body, path: None)
    monkeypatch.setattr(job.JobChain, "make_plan", lambda self, attempt, step: attempt)

    def give(*given: Outcome) -> list[int]:
        counted: list[int] = []

        def run_attempt(self: job.JobChain, attempt: int) -> Outcome:
            counted.append(attempt)
            outcome = given[len(counted) - 1]
            if outcome.code is ExitCode.OK:
                folder = self.run.checkpoints / "step-000008"
                folder.mkdir(parents=True)
                manifest.seal(folder, "checkpoint", {"step": 8, "final": True})
            return outcome

        monkeypatch.setattr(job.JobChain, "run_attempt", run_attempt)
        return counted

    return give


def test_a_killed_rank_begins_again_in_the_same_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: Callable[..., list[int]]
) -> None:
    """Back in the queue the job might wait for days. Each time it is asked whether the job gets anywhere."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(progress, "check_progress", lambda path, job, step: asked.append((job, step)))
    counted = attempts(KILLED, Outcome(ExitCode.FAILED, [Problem("NCCL")]), Outcome(ExitCode.OK))
    with lease.taken_over(RunDir(tmp_path), "7", 0, lambda job: False):
        assert links_of(tmp_path).train() == {"checkpoint": "step-000008"}
        assert links_of(tmp_path).train() == {"checkpoint": "step-000008"}, "nothing is left to train"
    assert counted == [1, 2, 3] and asked == [("7", 0)] * 3


@pytest.mark.parametrize(
    ("outcome", "signals"),
    [
        (Outcome(ExitCode.AGAIN, stop_requested=True), []),
        (Outcome(ExitCode.AGAIN, [Problem("gpu-b ended without a record")], nodes_gone=("gpu-b",)), []),
        (Outcome(ExitCode.STOP, [Problem("not finite")]), []),
        (Outcome(ExitCode.STORAGE, [Problem("full")]), []),
        (Outcome(ExitCode.CONFIG, [Problem("no interface")]), []),
        (KILLED, [signal.SIGUSR1]),  # while it saved: the time that is left is no time for a new attempt
    ],
)
def test_what_another_attempt_here_would_not_mend(
    tmp_path: Path, attempts: Callable[..., list[int]], outcome: Outcome, signals: list[int]
) -> None:
    counted, links = attempts(outcome, Outcome(ExitCode.OK)), links_of(tmp_path)
    links.signals += signals
    with pytest.raises(UserError) as caught:
        links.train()
    assert caught.value.code is outcome.code and counted == [1]


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that go back into the queue."""
    found: list[str] = []
    monkeypatch.setattr(slurm, "requeue", found.append)
    monkeypatch.setattr(slurm, "is_running", lambda job: job == "6")
    monkeypatch.setattr(job.signal, "signal", lambda *words: None)
    return found


def run_job(path: Path, error: type[BaseException] = UserError, match: str | None = None) -> None:
    """The program of a job, which ends with ``error``."""
    with pytest.raises(error, match=match):
        job.run(links_of(path).inputs, [])


def chain_ends(monkeypatch: pytest.MonkeyPatch, path: Path, end: Callable[[job.JobChain], None]) -> None:
    """The stages of every job end as ``end`` does."""
    quiet: Any = SimpleNamespace(update=lambda **values: None, describe=lambda *parts: 1, path=path)
    monkeypatch.setattr(chain, "open_run", lambda resolved, path, command: quiet)
    monkeypatch.setattr(chain, "keep_forecast", lambda *words: None)
    monkeypatch.setattr(job.JobChain, "go", lambda self, *stages: end(self))


ENDED = UserError("stopped as asked", ExitCode.AGAIN)
RUNNING, CANCELLED = {"JobState": "RUNNING", "Reason": "None"}, {"JobState": "COMPLETING", "Reason": "None"}
OUT_OF_TIME = {"JobState": "COMPLETING", "Reason": "TimeLimit"}


@pytest.mark.parametrize(
    ("error", "signals", "state", "again"),
    [
        (ENDED, [signal.SIGUSR1], CANCELLED, True),
        (ENDED, [], CANCELLED, True),  # a node is gone
        (ENDED, [signal.SIGTERM], CANCELLED, False),
        (ENDED, [signal.SIGTERM], None, False),
        (ENDED, [signal.SIGTERM], OUT_OF_TIME, True),
        (ENDED, [signal.SIGTERM], RUNNING, True),  # hit by what ended another start of the job on this node
        (ENDED, [signal.SIGUSR1, signal.SIGTERM], CANCELLED, False),  # told to save, then cancelled
        (ENDED, [signal.SIGUSR1, signal.SIGTERM], OUT_OF_TIME, True),  # the save took until the limit
        (ENDED, [signal.SIGUSR1, signal.SIGTERM], RUNNING, True),  # preempted, with time to save
        (Stopped("SIGUSR1"), [], CANCELLED, True),
        (Stopped("SIGTERM"), [], CANCELLED, False),
        (UserError("not finite", ExitCode.STOP), [], CANCELLED, False),
        (UserError("full", ExitCode.STORAGE), [], CANCELLED, False),
        (UserError("a bug", ExitCode.FAILED), [], CANCELLED, False),
    ],
)
def test_who_goes_back_into_the_queue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requeued: list[str],
    error: BaseException,
    signals: list[int],
    state: dict[str, str] | None,
    again: bool,
) -> None:
    """A cancelled job is not brought back; a decision is not tried again; all else continues."""

    def end(links: job.JobChain) -> None:
        links.signals += signals
        raise error

    monkeypatch.setattr(slurm, "show_job", lambda job: state)
    chain_ends(monkeypatch, tmp_path, end)
    run_job(tmp_path, type(error))
    assert requeued == (["7"] if again else [])


def test_a_start_that_was_followed_by_another_requeues_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeued: list[str]
) -> None:
    """It would pull the job from under the feet of its own successor."""

    def another_start(_: job.JobChain) -> None:
        monkeypatch.setattr(lease, "WAIT_SECONDS", 0.0)
        with lease.taken_over(RunDir(tmp_path), "7", 1, lambda job: False):
            raise ENDED

    chain_ends(monkeypatch, tmp_path, another_start)
    run_job(tmp_path)
    assert requeued == []


RUNTIME = """#!/usr/bin/env bash
set -euo pipefail
# Stands in for apptainer: the words after the image are the command. Nothing of the caller's environment is here.
echo "$*" >> {recorded}
env >> {recorded}
while [[ $1 != *.sif ]]; do shift; done
shift 2
exec {python} "$@"
"""


@pytest.mark.jobs
def test_every_stage_runs_in_the_container_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the training: what prepares the data and merges must be the pinned stack too."""
    runtime, recorded, image = tmp_path / "bin" / "apptainer", tmp_path / "recorded", tmp_path / "train.sif"
    runtime.parent.mkdir()
    image.touch()
    runtime.write_text(RUNTIME.format(recorded=recorded, python=sys.executable))
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", f"{runtime.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "canary-7d1e")
    resolved = resolve("tiny-oasst2", tiny=True)
    run = chain.open_run(resolved, tmp_path / "run", [])
    links = links_of(run.path)
    container = Container(runtime="apptainer", image=str(image), binds=(str(tmp_path),))
    cluster: Any = SimpleNamespace(container=container, storage=Storage())
    links.inputs = replace(links.inputs, cluster=cluster)
    links.run_stage("prepare")
    assert links.results["prepare"]["status"] == "done" and (run.data / "train.jsonl").is_file()
    text = recorded.read_text()
    assert "--nv --containall --cleanenv --no-home" in text and f"--bind {run.path}" in text and "canary-7d1e" not in text
    with pytest.raises(UserError, match="export failed in the container") as caught:
        links.run_stage("export")
    assert caught.value.code is ExitCode.CONFIG


@pytest.mark.parametrize("where", [(RunDir, "lock"), (chain, "open_run")])
def test_a_warning_before_the_first_stage_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeued: list[str], where: tuple[Any, str]
) -> None:
    """A job that is preempted in its first seconds must not end as failed."""

    def warned(*words: Any) -> Any:
        raise Stopped("SIGUSR1")

    monkeypatch.setattr(*where, warned)
    run_job(tmp_path, Stopped)
    assert requeued == ["7"]


@pytest.mark.parametrize("by", ["job 6", "process"])
def test_a_job_refused_for_another_is_not_requeued(tmp_path: Path, requeued: list[str], by: str) -> None:
    """It would come again and again for as long as the other job, or a person's command, works there."""
    run = RunDir(tmp_path)
    with lease.taken_over(run, "6", 0, lambda job: False) if by == "job 6" else run.lock():
        run_job(tmp_path, match=f"{by}.* works")
    assert requeued == []


@pytest.mark.parametrize(("state", "again"), [("RUNNING", True), ("COMPLETING", False)])
def test_a_controller_that_is_away_is_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    requeued: list[str],
    state: str,
    again: bool,
) -> None:
    """It is restarted now and then; a job that was cancelled meanwhile does not come back."""
    away = [slurm.Unreachable("down", ExitCode.AGAIN)] * 2

    def requeue(number: str) -> None:
        if away:
            raise away.pop()
        requeued.append(number)

    monkeypatch.setattr(slurm, "requeue", requeue)
    monkeypatch.setattr(slurm, "show_job", lambda number: {"JobState": state})
    monkeypatch.setattr(job, "ASK_SECONDS", 0.01)
    job._requeue(links_of(tmp_path).allocation, tmp_path, [signal.SIGUSR1])
    assert requeued == (["7"] if again else [])
    assert ("is requeued" if again else "no longer runs") in capfd.readouterr().err


def test_a_full_disk_does_not_hide_what_an_attempt_had_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Outcome, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    outcome = Outcome(ExitCode.STORAGE, [Problem("the checkpoint of step 8 was not saved")])
    monkeypatch.setattr(Outcome, "write", full)
    monkeypatch.setattr(outcomes, "judge", lambda *words, **named: outcome)
    monkeypatch.setattr(job.JobInputs, "step_command", lambda *words: ["true"])
    run = RunDir(tmp_path)
    run.attempt(1).mkdir(parents=True)
    plan = AttemptPlan(attempt=1, nodes=(Node("gpu-a", "gpu-a"),), ranks_per_node=1)
    assert links_of(tmp_path).run_attempt(plan) == outcome
