"""Every node of a job is looked at by one step: on a real Slurm, with a node that differs, and with one that says nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.check.rule import FAIL, Finding
from clustertune.cluster.load import load_cluster
from clustertune.doctor import preflight
from clustertune.errors import ExitCode, UserError
from clustertune.host import collect
from clustertune.host.facts import from_dict
from clustertune.launch.allocation import Allocation
from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO, events
from tests.doctor.machine_cases import GOOD
from tests.folders import program
from tests.nccl_check.test_submit import cluster_file
from tests.slurm_job import Job

PYTHON = str(REPO / ".venv/bin/python")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The cluster file of the temporary Slurm."""
    return cluster_file(tmp_path)


@pytest.fixture
def odd(slurm: TemporaryCluster) -> Iterator[TemporaryCluster]:
    """A Slurm whose second node has smaller frames and a small /dev/shm."""
    slurm.run(["ip", "link", "set", "eth0", "mtu", "1400"], node=2)
    slurm.run(["mount", "-o", "remount,size=48m", "/dev/shm"], node=2)
    yield slurm
    slurm.run(["ip", "link", "set", "eth0", "mtu", "1500"], node=2)
    slurm.run(["mount", "-o", "remount,size=50%", "/dev/shm"], node=2)


def in_a_job(cluster: TemporaryCluster, tmp_path: Path, *words: str) -> tuple[str, str]:
    """What ``clustertune doctor WORDS`` says in a batch script of two nodes, and its exit code."""
    script, log = tmp_path / "job.sbatch", tmp_path / "job.log"
    command = " ".join([PYTHON, "-m", "clustertune", "doctor", *words])
    script.write_text(f"#!/bin/bash\n#SBATCH --time=5\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n{command}\necho $?\n")
    options = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--mem=1G", f"--output={log}"]
    cluster.wait(cluster.submit(script, options=options, cwd=REPO))
    text, _, code = log.read_text().rstrip("\n").rpartition("\n")
    return text, code


def test_nodes_that_are_alike_are_well(slurm: TemporaryCluster, file: Path, tmp_path: Path) -> None:
    """Two nodes of one machine: nothing is said against them, each was looked at in its step."""
    text, code = in_a_job(slurm, tmp_path, "--cluster", str(file), "--json")
    document = json.loads(text)
    assert code == "0", [item for item in document["findings"] if item["status"] in ("warn", "fail")]
    assert (document["place"], document["hosts"], document["verdict"]) == ("step", ["node1", "node2"], "pass")
    passed = {(item["rule"], item["where"]) for item in document["findings"] if item["status"] == "pass"}
    assert {("interface", "node1"), ("interface", "node2"), ("node-names", "node2"), ("nodes-clock", "")} <= passed
    assert {("nodes-packages", ""), ("nodes-network", ""), ("cores-in-step", "node1")} <= passed


def test_the_odd_node_is_found(odd: TemporaryCluster, file: Path, tmp_path: Path) -> None:
    """One node's frames and shared memory differ, for real: which node, and by what."""
    text, code = in_a_job(odd, tmp_path, "--cluster", str(file), "--json")
    bad = {(item["rule"], item["status"]): item for item in json.loads(text)["findings"] if item["status"] in ("warn", "fail")}
    assert code == "2" and set(bad) == {("shm", "warn"), ("nodes-network", "fail"), ("nodes-limits", "warn")}
    assert bad["shm", "warn"]["where"] == "node2"
    assert bad["nodes-network", "fail"]["found"] == "MTU: 1400: node2; 1500: node1"
    assert "node2" in bad["nodes-limits", "warn"]["found"]
    text, code = in_a_job(odd, tmp_path, "--cluster", str(file), "--ignore", "nodes-network")
    assert code == "1" and "WARN    shm: node2: 50 MB in all" in text and "ignored: nodes-network" in text


@pytest.mark.jobs
def test_a_job_does_not_start_its_ranks_on_nodes_that_fail(odd: TemporaryCluster, file: Path, tmp_path: Path) -> None:
    """The words stand in the job's log, and the exit code keeps it out of the queue."""
    words = ["recipes/tiny-oasst2", "--tiny", "--to", "train", "train.max_steps=2", "--cluster", str(file)]
    job = Job(odd, tmp_path / "run", words)
    job.options = ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=2", "--mem=2G", "--time=01:00:00"]
    ended = job.submit().end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0"), job.text
    assert "error: nodes-network: MTU: 1400: node2; 1500: node1" in job.text
    assert "doctor: {ignore: [nodes-network]} in the cluster file" in job.text
    (event,) = events(job.run, "doctor")
    assert job.attempts() == 0 and event["verdict"] == "fail" and "nodes-network" in event["faults"]


# --- an srun that is none ----------------------------------------------------------------------------------------------


def given(*names: str) -> Allocation:
    return Allocation("7", 0, names, 0, 2, 1, None)


def before_a_job(file: Path, say: Callable[[str], None]) -> None:
    """What every job of two nodes begins with."""
    words: dict[str, Any] = {"gpus": False, "binds": [], "say": say, "log": lambda *_, **__: None, "seconds": 1}
    preflight.check(load_cluster(str(file)), given("node1", "node2"), 1, **words)


def looked_at(file: Path) -> preflight.NodeReports:
    return preflight.look(load_cluster(str(file)), given("node1", "node2"), seconds=1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An ``srun`` that runs a text of bash."""

    def make(text: str) -> None:
        program(tmp_path / "srun", text, "/bin/bash")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    monkeypatch.setattr(preflight, "START_SECONDS", 0.5)
    monkeypatch.setattr(preflight, "END_SECONDS", 0.5)
    return make


def lines_of(name: str, tmp_path: Path) -> Path:
    path = tmp_path / f"{name}.lines"
    path.write_text("".join(f"{line}\n" for line in collect.encode(from_dict({**GOOD, "hostname": name}), name)))
    return path


def test_a_node_that_fails_does_not_silence_the_others(fake: Any, file: Path, tmp_path: Path) -> None:
    """One image is missing on one node: its own words are reported, the others are judged."""
    fake(f"cat {lines_of('node1', tmp_path)}; echo 'srun: error: node2: task 1: Exited with exit code 255' >&2; exit 1")
    looked = looked_at(file)
    assert set(looked.facts) == {"node1"} and "Exited with exit code 255" in looked.faults["node2"]
    found = preflight.findings(looked, load_cluster(str(file)), ["node1", "node2"], preflight.Expects(nodes=2))
    assert [(item.rule, item.where) for item in found if item.rule == "node-silent"] == [("node-silent", "node2")]


def test_a_step_that_hangs_is_ended(fake: Any, file: Path, tmp_path: Path) -> None:
    """What came until then is kept; the job is stopped with the name of the node, not after hours."""
    fake(f"trap '' TERM; cat {lines_of('node1', tmp_path)}; sleep 200 & exec sleep 600")
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        before_a_job(file, [].append)
    assert time.monotonic() - began < 100, "what its child holds open was waited for"
    problems = [problem for problem in caught.value.problems if problem.message.startswith("node-silent")]
    assert [problem.file for problem in problems] == ["node2"]
    assert "no answer within" in problems[0].message


@pytest.mark.parametrize("rules", ["node-silent", "node-silent nodes-packages", "nodes-packages", "nodes-network"])
def test_a_node_that_is_gone_may_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rules: str) -> None:
    """A lost node sends the job back into the queue, as everywhere; what a person has to fix does not. What the cluster file
    leaves out stops nothing."""
    file = cluster_file(tmp_path, "doctor: {ignore: [nodes-network]}\n")
    found = [Finding(rule, FAIL, "node2", "bad", "look", "why", "link") for rule in rules.split()]
    monkeypatch.setattr(preflight, "look", lambda *_, **__: preflight.NodeReports())
    monkeypatch.setattr(preflight, "findings", lambda *_: found)
    messages: list[str] = []
    if rules == "nodes-network":
        before_a_job(file, messages.append)
        assert messages[-1].endswith("ignored: nodes-network")
        return
    with pytest.raises(UserError) as caught:
        before_a_job(file, messages.append)
    assert caught.value.code is (ExitCode.CONFIG if "packages" in rules else ExitCode.AGAIN)
    assert len(caught.value.problems) == len(found)
    assert messages[-1].startswith("doctor: 0 of 2 nodes")
