"""The status of a run's jobs: with the controller, after it has forgotten them, and without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from clustertune.cli import submit as command
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import slurm, submit
from clustertune.launch.plan import AttemptPlan, Node
from clustertune.rundir import RunDir
from clustertune.testbed.cluster import ThrowawayCluster as Throwaway
from tests.launch.job_record import job_record
from tests.launch.test_submit import Recorder, cluster_call, jobs_for, sender
from tests.slurm import slurm as slurm_cluster
from tests.slurm import slurm_session

__all__ = ["slurm_cluster", "slurm_session"]


def submitted(folder: Path) -> RunDir:
    """A run whose prepare, train and export were submitted as 101, 102 and 103."""
    recorder = Recorder()
    submit.submit_all(folder, jobs_for(folder, ["prepare", "train", "export"]), recorder.send, recorder.run)
    return RunDir(folder)


def controller(run: RunDir, states: Mapping[str, str]) -> slurm.Run:
    """A controller that knows the jobs of ``states``."""
    stages = {"101": "prepare", "102": "train", "103": "export"}

    def ask(words: Sequence[str]) -> str:
        job = words[-1]
        if job not in states:
            raise UserError(Problem("scontrol: slurm_load_jobs error: Invalid job id specified"))
        nodes = "n[1-2]" if states[job] == "RUNNING" else ""
        return job_record(job, f"x-{stages[job]}", states[job], f"{run.path}/jobs/{stages[job]}.sbatch /r/x", nodes)

    return ask


def away(words: Sequence[str]) -> str:
    raise slurm.Unreachable(Problem("scontrol: Unable to contact slurm controller"), ExitCode.AGAIN)


def states(found: submit.StagesStatus) -> dict[str, str]:
    return {row.stage: row.state for row in found.rows}


def test_live_and_forgotten_jobs(tmp_path: Path) -> None:
    """The controller drops ended jobs after MinJobAge; what they finished stands in the run folder."""
    run = submitted(tmp_path)
    run.finish_stage("prepare", 7.0)
    found = submit.read_status(run, controller(run, {"102": "RUNNING", "103": "PENDING"}))
    assert states(found) == {
        "prepare": "done", "train": "RUNNING", "export": "PENDING", "merge": "-", "eval": "-", "report": "-",
    }  # fmt: skip
    train = found.rows[1]
    assert (train.job, train.nodes, train.restarts, train.seconds) == ("102", "n[1-2]", 2, 90_005)
    assert found.live
    assert found.rows[2].seconds is None


def test_a_held_job_says_how_it_goes_on(tmp_path: Path) -> None:
    """Slurm holds a requeued job whose start failed, and no message is sent."""
    run = submitted(tmp_path)
    ask = controller(run, {"102": "PENDING"})
    held = submit.read_status(run, lambda words: ask(words).replace("Reason=None", "Reason=launch_failed_requeued_held"))
    assert held.rows[1].reason == "launch_failed_requeued_held -> scontrol release 102"


def test_forgotten_without_a_record(tmp_path: Path) -> None:
    """It failed, and nothing but the last attempt's outcome tells why."""
    run = submitted(tmp_path)
    attempt = tmp_path / "attempts" / "0001"
    attempt.mkdir(parents=True)
    AttemptPlan(1, (Node("n1", "n1"),), 1).write(attempt)
    (attempt / "outcome.json").write_text(json.dumps({"code": 75, "problems": [{"message": "rank 3 failed first"}]}))
    (tmp_path / "attempts" / "0002").mkdir()  # taken by a restarted job, which never planned it
    for name, whole in (("step-000020", True), ("step-000040.a2", True), ("step-000060", False)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if whole:
            (tmp_path / "checkpoints" / name / "MANIFEST.json").write_text("{}")
    train = submit.read_status(run, controller(run, {})).rows[1]
    assert (train.state, train.reason, train.attempts, train.step) == (submit.FORGOTTEN, "rank 3 failed first", 1, 40)


def test_a_record_is_not_the_controllers_word(tmp_path: Path) -> None:
    """A stage that was asked for again and failed is not done; without a controller, said once, the record is all there is."""
    run = submitted(tmp_path)
    run.finish_stage("prepare", 7.0)
    assert states(submit.read_status(run, controller(run, {"101": "FAILED"})))["prepare"] == "FAILED"
    found = submit.read_status(run, away)
    assert (states(found)["prepare"], states(found)["train"]) == ("done", submit.UNKNOWN)
    assert found.note is not None and not found.live


@pytest.mark.parametrize("text", ["{", '{"problems": 1}', '{"problems": [1]}', "[]"])
def test_a_damaged_outcome_is_passed_over(tmp_path: Path, text: str) -> None:
    """A status is asked for when something went wrong: it must not fall over what went wrong."""
    attempt = tmp_path / "attempts" / "0001"
    attempt.mkdir(parents=True)
    AttemptPlan(1, (Node("n1", "n1"),), 1).write(attempt)
    (attempt / "outcome.json").write_text(text)
    assert submit.last_words(tmp_path) == ""


def test_what_a_person_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a stage, never broken: states are searched for."""
    run = submitted(tmp_path)
    command._render(submit.read_status(run, controller(run, {"101": "COMPLETED", "102": "RUNNING", "103": "PENDING"})))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split() == ["stage", "job", "state", "time", "nodes", "restarts", "attempts"]
    assert [line.split()[1:3] for line in lines[1:4]] == [["101", "COMPLETED"], ["102", "RUNNING"], ["103", "PENDING"]]


def test_on_a_real_slurm(slurm_cluster: Throwaway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the queue to the end, and what a cancelled job looks like."""
    stand_in = tmp_path / "run.sbatch"
    stand_in.write_text("#!/bin/bash\nsleep 600\n")
    monkeypatch.setattr(submit, "SCRIPT", stand_in)
    run, ask = RunDir(tmp_path / "a b"), cluster_call(slurm_cluster)
    entries = submit.submit_all(run.path, jobs_for(run.path, ["prepare", "train"]), sender(slurm_cluster), ask)
    slurm_cluster.wait(entries[0]["id"], "RUNNING")
    found = submit.read_status(run, ask)
    assert states(found)["prepare"] == "RUNNING"
    assert (found.rows[1].state, found.rows[1].reason, found.rows[1].seconds) == ("PENDING", "Dependency", None)
    assert found.rows[0].nodes
    slurm.cancel([entry["id"] for entry in entries], ask)
    for entry in entries:
        slurm_cluster.wait(entry["id"], "CANCELLED")
    assert not submit.read_status(run, ask).live
