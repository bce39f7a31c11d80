"""Servers beside the trainer, as a job of a real Slurm: two nodes train, one serves with transformers on its CPU."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import events
from tests.launch.test_job_places import cluster_file
from tests.slurm import FaultyCluster, make, wait_for
from tests.slurm_job import Job

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
SERVER = Path(__file__).with_name("cpu_server.py")
SETTINGS = [
    "slurm.nodes=2", "slurm.gpus_per_node=1", "train.max_steps=6", "train.save_steps=2", "data.limit=40",
    "train.eval_strategy=no", "train.eval_on_start=false", "train.report_to=none",
]  # fmt: skip
ROLLOUTS = ["rollout=servers", "train.max_completion_length=8"]
SCORED = ["eval.during={every: 2, tasks: [ifeval], limit: 2}", "eval.max_gen_toks=8"]


@pytest.fixture(scope="module")
def three() -> Iterator[FaultyCluster]:
    with make(3) as cluster:
        yield cluster


def submitted(cluster: FaultyCluster, folder: Path, *recipe: str) -> Job:
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {SERVER} "$@"\n')
    program.chmod(0o700)
    machine = cluster_file(folder, "", "")
    machine.write_text(machine.read_text() + f"container: {{runtime: none, vllm: {program}}}\n")
    shape = ["--nodes=3", "--gpus-per-node=1", "--cpus-per-task=2", "--mem=8G", "--time=01:00:00"]
    words = [*recipe, *SETTINGS, "--to", "export", "--cluster", str(machine)]
    return Job(cluster, folder / "run", words=words, options=shape).submit()


def left(cluster: FaultyCluster) -> list[int]:
    return [pid for node in (1, 2, 3) for word in ("cpu_server", "evaluate.servers") for pid in cluster.processes(node, word)]


def test_two_nodes_train_and_one_serves(three: FaultyCluster, tmp_path: Path) -> None:
    """A server that is killed comes back; a rank that is killed resumes; at the end nothing runs, and no key is left."""
    job = submitted(three, tmp_path, "recipes/tiny-grpo", *ROLLOUTS)
    job.until(job.steps, "the first step")
    assert three.processes(3, "cpu_server") and not three.processes(1, "cpu_server") + three.processes(2, "cpu_server")
    ring = next((job.run / "servers").glob("*/ring.json"))
    assert json.loads(ring.read_text())["urls"][0].startswith("http://node3:") and ring.stat().st_mode & 0o077 == 0
    before = three.processes(3, "cpu_server", "serve")[-1]
    os.kill(before, signal.SIGKILL)
    job.until(lambda: before not in (three.processes(3, "cpu_server", "serve") or [before]), "another server")
    count = len(job.steps())
    job.until(lambda: len(job.steps()) > count, "a step with it")
    if len(job.steps()) < 5:
        os.kill(job.rank(2), signal.SIGKILL)
    found = job.end()
    assert found["JobState"] == "COMPLETED", job.text
    assert sorted(set(job.steps())) == list(range(1, 7)) and (job.run / "adapter" / "MANIFEST.json").exists()
    assert trained_on(job) == {"node1", "node2"}
    nothing_is_left(three, job)


@pytest.mark.parametrize(
    "recipe",
    [["recipes/llama70b-ifeval-grpo", "--tiny", *ROLLOUTS], ["recipes/tiny-oasst2", "servers.nodes=1"]],
    ids=["grpo", "sft"],
)
def test_the_servers_score_while_the_nodes_train(three: FaultyCluster, tmp_path: Path, recipe: list[str]) -> None:
    """The files of the recipe with two roles, tiny, and supervised fine-tuning: no attempt ends for its scores."""
    job = submitted(three, tmp_path, *recipe, *SCORED)
    job.until(job.steps, "the first step")
    assert three.processes(3, "cpu_server") and not three.processes(1, "cpu_server") + three.processes(2, "cpu_server")
    found = job.end()
    assert found["JobState"] == "COMPLETED", job.text
    scored = events(job.run, "scores")
    assert scored[-1]["step"] == 6 and all(event["beside"] for event in scored)
    assert len(events(job.run, "start")) == 1 and (job.run / "adapter" / "MANIFEST.json").exists()
    assert trained_on(job) == {"node1", "node2"}
    nothing_is_left(three, job)


def trained_on(job: Job) -> set[str]:
    """Hosts of the ranks."""
    records = [path.read_text().strip() for path in (job.run / "attempts").glob("*/rank-*.json")]
    return {json.loads(text)["host"] for text in records if text}  # a killed rank's is empty


def nothing_is_left(cluster: FaultyCluster, job: Job) -> None:
    wait_for(lambda: not left(cluster), "the end of all servers", 60)
    assert not list(job.run.glob("servers/*/key")) and not list(job.run.glob("servers/*/ring.json"))
