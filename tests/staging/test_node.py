"""A training job copies before its ranks start, tells what it did, and trains all the same where it could not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune import manifest
from clustertune.cluster.load import load_cluster
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir
from clustertune.staging import staging_step
from clustertune.testbed.cluster import TemporaryCluster
from tests.command import REPO, events
from tests.slurm_job import Job
from tests.staging.conftest import MIB, Bench, fill, flip, same, write_cluster

Begin = Callable[..., RunDir]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    """A run whose first stage is done, of a cluster with a staging folder."""

    def make(*overrides: str, gb: float = 10, shared: bool = True) -> RunDir:
        run = RunDir(tmp_path / "pool/run")
        resolved = resolve("recipes/tiny-oasst2", list(overrides))
        (tmp_path / "local").mkdir(exist_ok=True)
        text = write_cluster(tmp_path / "c.yaml", tmp_path / "local", gb).read_text()
        if shared:
            text = text.replace("storage: {", f"storage: {{shared: {tmp_path}/pool, ")
        (tmp_path / "c.yaml").write_text(text)
        cluster = load_cluster(str(tmp_path / "c.yaml"))
        run.attempt(1).mkdir(parents=True)
        body = {"recipe": resolved.as_dict(), "fingerprint": resolved.fingerprint(), "cluster": cluster.model_dump(mode="json")}
        run.run_json.write_text(json.dumps(body))
        for folder, kind in ((run.local_model("tiny-llama"), "model"), (run.tokens, "tokens")):
            fill(folder, {"one": MIB, "two": 300})
            manifest.seal(folder, kind, {})
        return run

    return make


def plan(nodes: int = 1) -> AttemptPlan:
    return AttemptPlan(attempt=1, nodes=tuple(Node(f"node{n}", f"node{n}") for n in range(nodes)), ranks_per_node=1)


def record(run: RunDir, number: int = 0) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(staging_step.record_file(run.attempt(1), number).read_bytes())
    return body


def test_the_ranks_find_their_copies(begin: Begin, tmp_path: Path) -> None:
    """With what it took, and leased for as long as the ranks run."""
    run = begin()
    staging_step.stage(run.path, 1, 0)
    with staging_step.leased(run.path, plan(), 0):
        near = staging_step.local_folders(run.attempt(1), 0)
        assert same(near["model"], run.local_model("tiny-llama")) and near["model"].name == "tiny-llama"
        assert same(near["data"], run.tokens) and near["data"].is_relative_to(tmp_path / "local")
        bench = Bench(tmp_path / "local")
        assert not any(bench.cache.remove(tree, print, "") for tree in bench.cache.trees())
    body = record(run)
    assert body["warnings"] == [] and [tree["reused"] for tree in body["trees"]] == [False, False]
    assert body["trees"][0]["copied"] == MIB + 300 + (run.local_model("tiny-llama") / manifest.MANIFEST).stat().st_size
    assert all(bench.cache.remove(tree, print, "") for tree in bench.cache.trees())
    assert staging_step.local_folders(run.attempt(1), 0) == {}, "what is gone is not read from"


@pytest.mark.parametrize(
    ("words", "shared", "copied"),
    [([], True, True), ([], False, False), (["slurm.staging=true"], False, True), (["slurm.staging=false"], True, False)],
)
def test_what_lies_on_a_local_disk_is_not_copied(begin: Begin, words: list[str], shared: bool, copied: bool) -> None:
    """Unless the recipe says so; and the recipe may say that nothing is."""
    run = begin(*words, shared=shared)
    staging_step.stage(run.path, 1, 0)
    with staging_step.leased(run.path, plan(), 0):
        assert bool(staging_step.local_folders(run.attempt(1), 0)) is copied


FAULTS = {"no room": "do not fit into", "wrong digest": "its content differs", "no folder": "nothing is staged"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_that_fails_leaves_the_shared_storage(begin: Begin, tmp_path: Path, fault: str) -> None:
    """With a warning that says why, and the rest is copied all the same where it can be."""
    run = begin(gb=0.0001 if fault == "no room" else 10)
    if fault == "wrong digest":
        flip(run.local_model("tiny-llama") / "one", 77)
    if fault == "no folder":
        (tmp_path / "local").rmdir()
        (tmp_path / "local").write_text("a file")
    staging_step.stage(run.path, 1, 0)
    with staging_step.leased(run.path, plan(), 0):
        near = staging_step.local_folders(run.attempt(1), 0)
    assert "model" not in near and ("data" in near) is (fault == "wrong digest")
    assert FAULTS[fault] in " ".join(record(run)["warnings"])


def test_a_copy_that_was_removed_before_the_ranks_start_is_not_read(begin: Begin, tmp_path: Path) -> None:
    """Between the step that copies and the ranks another job of this user may need the room."""
    run = begin()
    staging_step.stage(run.path, 1, 0)
    bench = Bench(tmp_path / "local")
    gone = next(tree for tree in bench.cache.trees() if tree.key.startswith("model"))
    assert bench.cache.remove(gone, print, "")
    with staging_step.leased(run.path, plan(), 0):
        assert set(staging_step.local_folders(run.attempt(1), 0)) == {"data"}
        assert not any(bench.cache.remove(tree, print, "") for tree in bench.cache.trees())
    assert [tree["what"] for tree in record(run)["trees"]] == ["data"]


NODES = """\
name: two
nodes:
  - {{name: node1, address: node1, roles: [login, slurmctld, compute]}}
  - {{name: node2, address: node2, roles: [compute]}}
compute: {{gpus: 1, gpu: rtx-4090, interconnect: none, cores: 2, threads: 2, memory_gb: 16}}
network: {{kind: ethernet, interface: eth0, gbit: 1}}
storage: {{shared: {shared}, staging: {{path: {staging}, gb: 5}}}}
slurm: {{partition: {partition}}}
"""


@pytest.fixture(scope="module")
def jobs(slurm_session: TemporaryCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Job, Path]]:
    """The same job with copies and without, on a Slurm of two nodes. Read only."""
    shared = tmp_path_factory.mktemp("staged")
    (shared / "local").mkdir()
    partition = slurm_session.run(["sinfo", "-h", "-o", "%R"]).stdout.split()[0]
    file = shared / "two.yaml"
    file.write_text(NODES.format(shared=shared / "pool", staging=shared / "local", partition=partition))
    made = []
    for name, word in (("near", "slurm.staging=true"), ("far", "slurm.staging=false")):
        job = Job(slurm_session, shared / "pool" / name)
        job.words += [word, "--cluster", str(file)]
        job.submit()
        assert job.end()["JobState"] == "COMPLETED", job.text
        made.append(job)
    yield made[0], made[1], shared / "local"


@pytest.mark.jobs
@pytest.mark.timeout(1200)
def test_a_job_on_copies_trains_the_same_weights(jobs: tuple[Job, Job, Path]) -> None:
    """Both nodes copy, their ranks read the copies, and the adapter is that of the job without."""
    near, far, local = jobs
    staged = events(near.run, "staged")
    assert sorted(event["host"] for event in staged) == ["node1", "node2"]
    assert all({tree["what"] for tree in event["trees"]} == {"model", "data"} and not event["warnings"] for event in staged)
    assert json.loads((near.run / "run.json").read_bytes())["staged"][0]["trees"][0]["path"].startswith(str(local))
    for rank in (0, 1):
        assert f"base model from {local}/" in (near.run / f"attempts/0001/rank-{rank}.log").read_text()
    assert "staged on node1: tiny-llama" in near.text
    assert not events(far.run, "staged") and "base model from" in (far.run / "attempts/0001/rank-0.log").read_text()
    assert near.adapter() == far.adapter()


@pytest.mark.jobs
@pytest.mark.timeout(600)
def test_by_hand_in_an_allocation(slurm: TemporaryCluster, jobs: tuple[Job, Job, Path], tmp_path: Path) -> None:
    """In a job's shell ``clustertune stage`` names the way to all nodes; by srun it copies on every node."""
    near, _, _ = jobs
    cluster = near.words[near.words.index("--cluster") + 1]
    script, out = tmp_path / "stage.sh", tmp_path / "out"
    command = (
        f"{REPO}/.venv/bin/python -m clustertune stage recipes/tiny-oasst2 --tiny --cluster {cluster} --run-dir {near.run}"
    )
    script.write_text(f"#!/bin/bash\n{command}\nsrun --ntasks-per-node=1 --output={out}-%n.json {command} --json\n")
    options = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={tmp_path}/log"]
    number = slurm.submit(script, options=options, cwd=REPO)
    ended = slurm.wait(number)
    log = (tmp_path / "log").read_text()
    assert ended["ExitCode"] == "0:0" and "on all 2 nodes: srun --ntasks-per-node=1" in log, log
    for number in range(2):
        text = Path(f"{out}-{number}.json").read_text()
        body = json.loads(text[text.index("{") : text.rindex("}") + 1])
        assert body["host"] == f"node{number + 1}" and all(tree["reused"] for tree in body["trees"])
