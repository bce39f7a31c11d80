"""A server over two nodes as a job of a real Slurm, with a program in vLLM's place: it scores, and ends by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from clustertune.testbed.cluster import TemporaryCluster
from tests.command import SHORT, Done
from tests.launch.test_job_places import cluster_file
from tests.serving.conftest import program
from tests.slurm import wait_for
from tests.slurm_job import Job

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1200)]
EVAL = ["eval.backend=vllm", "eval.tensor_parallel_size=2", "eval.base=true"]


def trained(folder: Path, finished: tuple[Path, Done]) -> Path:
    """A run whose model has not been scored yet."""
    run = shutil.copytree(finished[0], folder / "run")
    for path in (run / "eval", run / "stages" / "eval.json"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return run


def evaluation(slurm: TemporaryCluster, folder: Path, run: Path, *more: str, **variables: object) -> Job:
    """The stage ``eval`` of a run, on both nodes, with the fake as vLLM."""
    exports = "".join(f"export {name}='{value}'\n" for name, value in {"FAKE_MEET": 1, **variables}.items())
    vllm = program(folder, exports)
    machine = cluster_file(folder, "", "")
    machine.write_text(machine.read_text() + f"container: {{runtime: none, vllm: {vllm}}}\n")
    words = ["recipes/tiny-oasst2", *SHORT, *EVAL, *more, "--cluster", str(machine), "--from", "eval", "--to", "eval"]
    return Job(slurm, run, words=words).submit()


def left(slurm: TemporaryCluster) -> list[int]:
    """Servers and clients on the nodes."""
    return [pid for node in (1, 2) for word in ("fake_vllm", "evaluate.servers") for pid in slurm.processes(node, word)]


def test_a_job_scores_with_a_server_over_two_nodes(
    slurm: TemporaryCluster, tmp_path: Path, finished: tuple[Path, Done]
) -> None:
    job = evaluation(slurm, tmp_path, trained(tmp_path, finished), FAKE_DELAY="0.2")
    job.until(lambda: slurm.processes(2, "fake_vllm", "--node-rank"), "the follower")
    follower = Path(f"/proc/{slurm.processes(2, 'fake_vllm', '--node-rank')[0]}/environ").read_text().split("\0")
    assert "SLURM_CPUS_PER_TASK=2" in follower
    assert "VLLM_HOST_IP=10.99.0.2" in follower
    found = job.end()
    assert found["JobState"] == "COMPLETED", job.text
    result = json.loads((job.run / "eval" / "results.json").read_bytes())
    backend = result["backend"]
    assert (backend["name"], backend["tensor_parallel_size"], backend["servers"]) == ("vllm", 2, 1)
    assert result["tasks"]["ifeval"]["n"] > 0 and "paired" in result
    assert "over 2 nodes" in job.text
    assert not left(slurm)


@pytest.mark.parametrize("node", [1, 2])
def test_a_node_that_loses_its_part_is_named(
    slurm: TemporaryCluster, tmp_path: Path, finished: tuple[Path, Done], node: int
) -> None:
    job = evaluation(slurm, tmp_path, trained(tmp_path, finished), FAKE_DELAY="2")
    job.until(lambda: any(path.stat().st_size for path in job.run.glob("eval*/**/.answers-*.tmp")), "answers")
    os.kill(slurm.processes(node, "fake_vllm", f"--node-rank {node - 1}")[0], signal.SIGKILL)
    found = job.end()
    assert found["JobState"] == "FAILED", job.text
    assert re.search(rf"node {node - 1} \(node{node}\) ended: ended with SIGKILL", job.text), job.text
    wait_for(lambda: not left(slurm), "the end of all processes")


def test_a_server_that_hangs_ends_the_job(slurm: TemporaryCluster, tmp_path: Path, finished: tuple[Path, Done]) -> None:
    """Nothing dies: only the deadline can end it. The error has the last words of both nodes."""
    run = trained(tmp_path, finished)
    job = evaluation(slurm, tmp_path, run, "eval.stall_seconds=10", FAKE_MODES='{"*": ["hang", 3]}')
    found = job.end()
    assert found["JobState"] == "FAILED", job.text
    for message in ("no answer within 10", "node 0: last wrote", "node 1: last wrote", ": met"):
        assert message in job.text
    wait_for(lambda: not left(slurm), "the end of all processes")
