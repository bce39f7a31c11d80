"""What a submission decided: recorded in run.json, read by its jobs whatever the files say by then, never edited in place."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune import chain
from clustertune import job as program
from clustertune.cli import jobs as command
from clustertune.cluster.load import load_cluster
from clustertune.evaluate.servers import JOB, ServingJob
from clustertune.launch import allocation, cluster_paths, lease, serving, srun
from clustertune.recipe import eval_tasks
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir
from clustertune.submission import SubmissionPlan, plan_submission
from tests.command import REPO


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe and a cluster file that a test may edit."""
    shutil.copytree(REPO / "recipes" / "_base", tmp_path / "recipes" / "_base")
    shutil.copytree(REPO / "recipes" / "tiny-oasst2", tmp_path / "recipes" / "tiny-oasst2")
    shutil.copyfile(REPO / "ops" / "clusters" / "dgx-h100.yaml", tmp_path / "mine.yaml")
    return tmp_path / "recipes" / "tiny-oasst2"


def submitted(recipe: Path, *words: str) -> SubmissionPlan:
    cluster = str(recipe.parents[1] / "mine.yaml")
    return plan_submission(str(recipe), list(words), True, load_cluster(cluster), recipe.parents[1] / "run", None, "report")


def start_job(monkeypatch: pytest.MonkeyPatch, given: allocation.Allocation, *words: Any, **named: Any) -> None:
    """What Slurm starts, in an allocation, for the evaluation and the report."""
    monkeypatch.setattr(allocation, "read", lambda: given)
    monkeypatch.setattr(cluster_paths, "enter", lambda *words: [])
    command.job(*words, tiny=True, env=None, first="eval", last="report", **named)


def sent(recipe: Path, *words: str) -> None:
    """Record a submission as ``submit`` does, without Slurm."""
    made = submitted(recipe, *words)
    chain.open_run(made.resolved, made.path, []).describe(made.resolved, made.cluster, made.shapes, made.evaluation)
    assert all("--recorded" in job.arguments for job in made.jobs)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_job_reads_what_its_submission_recorded(recipe: Path) -> None:
    """Between submit and the first step hours may lie, in which recipe, accelerate file and cluster file are edited."""
    sent(recipe)
    run = RunDir(recipe.parents[1] / "run")
    before = run.description()
    files = {file: file.read_text() for file in run.path.glob("*.yaml")}
    edit(recipe / "accelerate.yaml", "fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: false")
    edit(recipe.parents[1] / "mine.yaml", "partition: ", "partition: other-")
    (recipe / "recipe.yaml").unlink()
    found = run.description()
    assert found == before and found.resolved.distribution.reshard
    assert found.cluster is not None and found.cluster.slurm is not None and found.cluster.slurm.partition == "gpu"
    run.write_own_files(found.resolved)
    assert {file: file.read_text() for file in files} == files and len(files) == 1, "what accelerate launch reads"


def test_the_job_command_reads_no_file_of_the_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the front door: what Slurm starts after recipe and cluster file have been taken away."""
    sent(recipe)
    run = recipe.parents[1] / "run"
    wanted = RunDir(run).description()
    cluster = recipe.parents[1] / "mine.yaml"
    cluster.unlink()
    shutil.rmtree(recipe)
    got: list[Any] = []
    given = allocation.Allocation("7", 0, ("n1",), wanted.resolved.world_size, 8, 1, None, 600.0)
    monkeypatch.setattr(program, "run", lambda *words: got.extend(words))
    start_job(monkeypatch, given, str(recipe), [], cluster=str(cluster), run_dir=run, submitted=True)
    assert (got[0].resolved, got[0].cluster) == (wanted.resolved, wanted.cluster)


@pytest.fixture
def edited_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task file that a test may edit."""
    monkeypatch.setattr(eval_tasks, "FOLDER", shutil.copytree(eval_tasks.FOLDER, tmp_path / "eval"))
    return eval_tasks.FOLDER / "ifeval" / "task.yaml"


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("file", ["ops/hardware.yaml", "eval/ifeval/task.yaml"])
def test_a_job_starts_the_servers_that_its_submission_recorded(
    recipe: Path, edited_task: Path, monkeypatch: pytest.MonkeyPatch, file: str, recorded: bool
) -> None:
    """The figures of a GPU and the number of prompts decide them. Where none are recorded, they are derived."""
    cluster, run, got = recipe.parents[1] / "mine.yaml", RunDir(recipe.parents[1] / "run"), list[int]()
    sent(recipe, "eval.backend=vllm", "eval.limit=null")
    if not recorded:
        body = run.read()
        del body["evaluation"]
        run.run_json.write_text(json.dumps(body))
    if file == "ops/hardware.yaml":
        known = serving.read_hardware()
        others = known.model_copy(update={"gpus": {name: gpu for name, gpu in known.gpus.items() if name != "h100-sxm"}})
        monkeypatch.setattr(serving, "read_hardware", lambda: others)
    else:
        edit(edited_task, "documents: 541", "documents: 40")
        eval_tasks.read_task_file.cache_clear()  # a job is another process

    def go(links: program.JobChain, *_: str) -> None:
        with links.servers() as folder:
            got.append(ServingJob.read(folder / JOB).shape.servers if folder else 0)
        plan = links.make_plan(1, 0)
        assert not plan.sigterm_asks and plan.limit_minutes == 600.0, "what ranks must know of Slurm"

    monkeypatch.setattr(program.JobChain, "go", go)
    monkeypatch.setattr(srun, "begin", lambda command: subprocess.Popen(["sleep", "60"]))
    monkeypatch.setattr(chain, "keep_forecast", lambda *words: None)
    monkeypatch.setattr(program, "check_image", lambda *words: None)
    given = allocation.Allocation("7", 0, ("n1",), 8, 8, 1, None, limit_minutes=600.0)
    start_job(monkeypatch, given, str(recipe), [], cluster=str(cluster), run_dir=run.path, submitted=True)
    assert got == [8 if recorded else 0 if file == "ops/hardware.yaml" else 2]


def test_a_job_by_hand_that_starts_again_goes_on_as_it_began(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe was edited between its first start and the requeue: read again it would be another run, from step 0."""
    runs, got, cluster = recipe.parents[1] / "runs", list[Any](), recipe.parents[1] / "mine.yaml"
    edit(cluster, "storage: {", f"storage: {{runs: {runs}, ")

    def start(number: int, job: str = "7") -> tuple[Resolved, Path]:
        given = allocation.Allocation(job, number, ("n1",), 2, 8, 1, None, 600.0)
        start_job(monkeypatch, given, str(recipe), [], cluster=str(cluster), run_dir=None)
        return got[-1].resolved, got[-1].path

    def begin(inputs: program.JobInputs, _: Any) -> None:
        got.append(inputs)
        given = inputs.allocation
        with lease.taken_over(RunDir(inputs.path), given.job_id, given.restart, lambda job: False):
            chain.open_run(inputs.resolved, inputs.path, []).describe(inputs.resolved, inputs.cluster)

    monkeypatch.setattr(program, "run", begin)
    first = start(0)
    assert runs in first[1].parents
    edit(recipe / "accelerate.yaml", "fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: false")
    assert start(1) == (RunDir(first[1]).pinned(first[0]), first[1])
    assert start(0, job="8")[0] != first[0], "another job reads what the files say now"


def test_the_distribution_is_recorded(tmp_path: Path) -> None:
    found = resolve("tiny-oasst2")
    run = chain.open_run(found, tmp_path / "run", [])
    assert yaml.safe_load(run.accelerate_file.read_text()) == found.accelerate
    run.describe(found, load_cluster("dgx-h100"))
    assert run.read()["recipe"]["distribution"]["kind"] == "FSDP2"
