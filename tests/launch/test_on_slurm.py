"""The one sbatch file on a real Slurm of two nodes: it trains, refuses, restarts and loses nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO
from tests.slurm_job import CANARY, Job

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.jobs
def test_a_job_trains_over_two_nodes(quiet: Job) -> None:
    """One rank a GPU, on both nodes, meeting on the first at a port that nobody else is given."""
    body = json.loads((quiet.run / "run.json").read_bytes())
    assert body["distributed"]["world_size"] == 2 and body["cluster"]["name"] == "local"
    hosts = [json.loads((quiet.run / f"attempts/0001/rank-{rank}.json").read_bytes())["host"] for rank in (0, 1)]
    assert hosts == ["node1", "node2"]
    meeting = json.loads((quiet.run / "attempts/0001/rendezvous.json").read_bytes())
    assert meeting["address"] == "node1" and 20_000 <= meeting["port"] < 32_000
    assert quiet.steps() == list(range(1, 17))
    assert "OMP_NUM_THREADS=" in quiet.text and "  # " in quiet.text, "the plan gives a reason for each variable"


@pytest.mark.jobs
def test_a_job_leaves_no_foreign_variable_anywhere(quiet: Job) -> None:
    """Login shells hold tokens; a job's environment is shown, logged and spooled."""
    shown = quiet.cluster.run(["scontrol", "-dd", "show", "job", str(quiet.id)]).stdout
    spool = b"".join(p.read_bytes() for p in quiet.cluster.root.rglob("*") if p.is_file() and "log" not in p.parts)
    value = CANARY[1]
    left = [path for path in quiet.run.rglob("*") if path.is_file() and value.encode() in path.read_bytes()]
    assert value not in shown + quiet.text and left == [] and value.encode() not in spool


def test_the_wrong_allocation_is_refused_with_the_line_to_use(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """At once, before weights are looked for: the whole line can be pasted."""
    job = Job(
        slurm,
        tmp_path / "r",
        words=["recipes/llama405b-oasst2", "--to", "train"],
        options=["--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1"],
    )
    found = job.submit().end()
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0")
    line = next(line for line in job.text.splitlines() if "sbatch --" in line)
    for word in ("--nodes=2", "--gpus-per-node=", ":8 ", "--time=24:00:00", "launch/run.sbatch recipes/llama405b-oasst2"):
        assert word in line.replace("=8 ", "=:8 ")
    assert f"--run-dir {job.run}" in line and "--to train" in line, "pasted it must not run elsewhere, nor continue to the end"
    assert not job.run.exists()


def test_outside_of_a_checkout(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """Slurm runs a copy of the script from its spool: where the project is, only the working folder tells."""
    log = tmp_path / "x.log"
    options = ["--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1", f"--output={log}"]
    number = slurm.submit(REPO / "launch/run.sbatch", "recipes/tiny-oasst2", options=options, cwd=tmp_path)
    assert slurm.wait(number)["ExitCode"] == "2:0"
    assert "is not a checkout of clustertune" in log.read_text()


@pytest.mark.jobs
def test_warned_killed_and_powered_off_a_job_ends_with_the_same_bytes(
    slurm: TemporaryCluster, quiet: Job, tmp_path: Path
) -> None:
    """One job, one after the other: the warning ahead of a limit, a killed rank, a node that loses power."""
    job = Job(slurm, tmp_path / "r").submit()
    job.until(lambda: len(job.steps()) >= 3, "the first steps")
    slurm.run(["scancel", "--batch", "--signal=USR1", str(job.id)])  # what --signal=B:USR1@N does near the limit
    slurm.release(job.id)
    job.until(lambda: "resume from" in job.text, "the resume after the warning")
    warned = job.attempts()
    job.until(lambda: len(job.steps(warned)) >= 3, "steps of the second start")
    assert min(job.steps(warned)) == max(job.steps(1)) + 1, "warned in time nothing is lost"
    os.kill(job.rank(2), signal.SIGKILL)
    job.until(lambda: job.attempts() > warned and len(job.steps(job.attempts())) >= 1, "a step after the kill")
    assert "rank 1 on node2 failed first: killed (SIGKILL" in job.text
    assert slurm.job(job.id)["Restarts"] == "1", "a killed rank begins again in the same allocation"
    slurm.kill_node(2)
    job.until(lambda: slurm.job(job.id)["JobState"] != "RUNNING", "the loss of the node")
    slurm.start_node(2)
    found = job.end()
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "2"), job.text
    assert job.adapter() == quiet.adapter()


@pytest.mark.jobs
def test_three_attempts_without_progress_stop_the_job(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """Else a job that dies at its first step burns its nodes until the time limit."""
    job = Job(slurm, tmp_path / "r").submit()
    for number in (1, 2, 3):
        job.until(lambda number=number: (job.run / f"attempts/{number:04d}/rank-1.pid").exists(), f"rank 1 of attempt {number}")  # type: ignore[misc]
        os.kill(job.rank(2), signal.SIGKILL)
    found = job.end()
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "93:0", "0")
    assert (
        "3 attempts from the beginning failed without a new checkpoint" in job.text and "attempt 3: rank 1 on node2" in job.text
    )
