"""Twenty faults of one kind at random moments of one job on a real Slurm: the adapter's bytes are those of a quiet job."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from clustertune.cluster.cluster import Cluster
from tests.slurm import slurm, slurm_session  # noqa: F401 - fixtures
from tests.slurm_job import RECIPE, SETTINGS, Job

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

FAULTS, SEED = 20, 20
WORDS = [RECIPE, "--tiny", "--to", "export", *SETTINGS, "train.max_steps=400", "train.num_train_epochs=100"]
"""Long enough that twenty faults fall into the training, most of them between two saves."""


@pytest.fixture(scope="module")
def reference(slurm_session: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:  # noqa: F811
    job = Job(slurm_session, tmp_path_factory.mktemp("campaign") / "reference", words=list(WORDS)).submit()
    assert job.end(1800)["JobState"] == "COMPLETED", job.text
    yield job.adapter()


def kill(cluster: Cluster, job: Job) -> None:
    os.kill(job.rank(random.choice([1, 2])), signal.SIGKILL)


def requeue(cluster: Cluster, job: Job) -> None:
    cluster.run(["scontrol", "requeue", str(job.id)])


def power_loss(cluster: Cluster, job: Job) -> None:
    node = random.choice([1, 2])
    cluster.kill_node(node)
    job.until(lambda: cluster.job(job.id)["JobState"] != "RUNNING", "the loss of the node")
    cluster.start_node(node)


def preempt(cluster: Cluster, job: Job) -> None:
    script = job.run.parent / "urgent.sbatch"
    script.write_text("#!/usr/bin/env bash\nsleep 1\n")
    options = ["--partition=urgent", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--mem=1G", "--output=/dev/null"]
    cluster.wait(cluster.submit(script, options=options, cwd=job.run.parent), timeout=300)


def running(job: Job) -> bool:
    """Released from the wait for its old credential where it has just been requeued."""
    found = job.cluster.job(job.id)
    if found["JobState"] == "PENDING" and found.get("Reason") == "BeginTime":
        job.cluster.release(job.id)
    return found["JobState"] == "RUNNING"


@pytest.mark.parametrize(("fault", "after_a_step"), [(kill, True), (requeue, False), (power_loss, False), (preempt, False)])
def test_twenty_faults(
    slurm: Cluster,  # noqa: F811
    reference: str,
    tmp_path: Path,
    fault: Callable[[Cluster, Job], None],
    after_a_step: bool,
) -> None:
    """``after_a_step``: three kills in a row before a new checkpoint rightly stop a job, so that these come under way."""
    random.seed(SEED)
    job = Job(slurm, tmp_path / "r", words=list(WORDS)).submit()
    hit = 0
    known = 0
    while hit < FAULTS:
        job.until(lambda: running(job) and job.attempts() > known, "another attempt")  # noqa: B023
        if after_a_step:
            job.until(lambda: job.steps(job.attempts()), "its first step")
        time.sleep(random.uniform(0, 6 if after_a_step else 25))
        if "done:" in job.text or not running(job):
            continue
        known = job.attempts()
        fault(slurm, job)
        hit += 1
    found = job.end(1800)
    steps = job.steps()
    Console(stderr=True).print(
        f"{fault.__name__}: {hit} faults, {job.attempts()} attempts, {found['Restarts']} restarts, "
        f"{len(steps) - len(set(steps))} of {len(set(steps))} steps done again"
    )
    assert found["JobState"] == "COMPLETED", job.text
    assert job.adapter() == reference
