"""One fault in each job, on a real Slurm: whatever happened, the adapter has the bytes of a job that nothing happened to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertune.testbed.cluster import TemporaryCluster
from tests.slurm import make
from tests.slurm_job import Job

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]


def warn_the_steps(cluster: TemporaryCluster, job: Job) -> None:
    """Without --batch the signal goes to the ranks, and the batch script hears nothing of it."""
    cluster.run(["scancel", "--signal=USR1", str(job.id)])


def requeue(cluster: TemporaryCluster, job: Job) -> None:
    cluster.run(["scontrol", "requeue", str(job.id)])


def preempt(cluster: TemporaryCluster, job: Job) -> None:
    script = job.run.parent / "urgent.sbatch"
    script.write_text("#!/usr/bin/env bash\nsleep 1\n")
    options = ["--partition=urgent", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--mem=1G", "--output=/dev/null"]
    urgent = cluster.submit(script, options=options, cwd=job.run.parent)
    assert cluster.wait(urgent, timeout=300)["JobState"] == "COMPLETED"


def stop_a_rank(cluster: TemporaryCluster, job: Job) -> None:
    os.kill(job.rank(2), signal.SIGSTOP)


def power_off(node: int) -> Callable[[TemporaryCluster, Job], None]:
    """The second node, or the first, where the batch script runs."""

    def act(cluster: TemporaryCluster, job: Job) -> None:
        cluster.kill_node(node)
        job.until(lambda: cluster.job(job.id)["JobState"] != "RUNNING", "the loss of the node")
        cluster.start_node(node)

    return act


def cut_off(node: int) -> Callable[[TemporaryCluster, Job], None]:
    """The old ranks live on, on the same storage, while Slurm gives their job to others."""

    def act(cluster: TemporaryCluster, job: Job) -> None:
        cluster.link(node, up=False)
        job.until(lambda: cluster.job(job.id)["JobState"] != "RUNNING", "the loss of the node")
        cluster.link(node, up=True)

    return act


def kill_slurmd(cluster: TemporaryCluster, job: Job) -> None:
    cluster.kill_slurmd(2)
    time.sleep(3)
    cluster.start_slurmd(2)


def kill_the_program(cluster: TemporaryCluster, job: Job) -> None:
    """The batch script is left, and has the job requeued."""
    os.kill(cluster.processes(1, "clustertune job", str(job.run))[0], signal.SIGKILL)


FAULTS = {
    "warned steps": warn_the_steps,
    "requeued": requeue,
    "preempted": preempt,
    "stopped rank": stop_a_rank,
    "power of the first node": power_off(1),
    "cut off": cut_off(2),
    "first node cut off": cut_off(1),
    "slurmd killed": kill_slurmd,
    "program killed": kill_the_program,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost(slurm: TemporaryCluster, quiet: Job, tmp_path: Path, fault: str) -> None:
    job = Job(slurm, tmp_path / "r").submit()
    job.until(lambda: len(job.steps()) >= 3, "the first steps")
    FAULTS[fault](slurm, job)
    found = job.end()
    assert found["JobState"] == "COMPLETED", job.text
    assert job.adapter() == quiet.adapter()


def test_a_cancelled_job_stays_cancelled(slurm: TemporaryCluster, tmp_path: Path) -> None:
    """Slurm would bring it back if asked to requeue it."""
    job = Job(slurm, tmp_path / "r").submit()
    job.until(lambda: len(job.steps()) >= 1, "the first step")
    slurm.run(["scancel", str(job.id)])
    assert job.end()["JobState"] == "CANCELLED"
    time.sleep(5)
    assert slurm.job(job.id)["JobState"] == "CANCELLED"


def test_two_jobs_share_a_node(tmp_path: Path) -> None:
    """Each has ports, run folder and temporary folders of its own."""
    with make(nodes=1, gpus=4) as cluster:
        options = ["--nodes=1", "--gpus-per-node=2", "--cpus-per-task=2", "--mem=8G"]
        jobs = [Job(cluster, tmp_path / name, options=options).submit() for name in ("a", "b")]
        jobs[0].until(lambda: all(cluster.job(job.id)["JobState"] == "RUNNING" for job in jobs), "both at once")
        assert [job.end()["JobState"] for job in jobs] == ["COMPLETED", "COMPLETED"], jobs[0].text + jobs[1].text
        assert jobs[0].adapter() == jobs[1].adapter()
