"""What Slurm gave a job, the exact line to use where it is not what the recipe asks for, and what the first node lacks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

import pytest

from clustertune.errors import Problem, UserError
from clustertune.launch import allocation
from clustertune.resolve.resolve import resolve
from tests.launch.machines import machine

ENVIRONMENT = {
    "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8",
    "SLURM_GPUS_PER_NODE": "rtx_pro_6000:8", "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7", "SLURM_CPUS_ON_NODE": "256",
    "SLURM_JOB_CPUS_PER_NODE": "256(x2)", "SLURM_CPUS_PER_TASK": "256", "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_PARTITION": "gpu", "SLURM_RESTART_COUNT": "3", "SLURM_JOB_NAME": "x-train",
}  # fmt: skip
"""As recorded in a job on Slurm 22.05 with --mem=0."""


def absent(words: Sequence[str]) -> str:
    raise UserError(Problem("no Slurm here"))


def slurm_says(words: Sequence[str]) -> str:
    return "2-00:00:00|1-23:00:00\n" if words[0] == "squeue" else "n1\nn2\n"


def read(**changes: str | None) -> allocation.Allocation:
    env = {**ENVIRONMENT, **changes}
    return allocation.from_environment({k: v for k, v in env.items() if v is not None}, absent)


def options(problem: Problem) -> list[str]:
    assert problem.fix is not None
    return shlex.split(problem.fix.removeprefix("use: "))


def test_the_whole_environment() -> None:
    """Every figure that the checks rest on."""
    found = allocation.from_environment(ENVIRONMENT, slurm_says)
    assert found == allocation.Allocation(
        job_id="42", restart=3, nodes=("n1", "n2"), gpus_per_node=8, cpus_per_node=256, tasks_per_node=1, memory_mb=None,
        limit_minutes=2880, left_minutes=2820, partition="gpu", array_task=None, name="x-train",
    )  # fmt: skip
    assert read() == replace(found, limit_minutes=None, left_minutes=None)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"SLURM_GPUS_ON_NODE": None}, "gpus_per_node", 8),
        ({"SLURM_GPUS_ON_NODE": None, "SLURM_JOB_GPUS": None}, "gpus_per_node", 8),
        ({"SLURM_GPUS_ON_NODE": None, "SLURM_JOB_GPUS": None, "SLURM_GPUS_PER_NODE": "a:2,b:1"}, "gpus_per_node", 3),
        ({"SLURM_GPUS_ON_NODE": None, "SLURM_JOB_GPUS": None, "SLURM_GPUS_PER_NODE": None}, "gpus_per_node", 0),
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x2),32"}, "cpus_per_node", 32),
        ({"SLURM_JOB_CPUS_PER_NODE": None}, "cpus_per_node", 256),
        ({"SLURM_NTASKS_PER_NODE": None, "SLURM_TASKS_PER_NODE": "8(x2)"}, "tasks_per_node", 8),
        ({"SLURM_MEM_PER_NODE": "5120"}, "memory_mb", 5120),
        ({"SLURM_MEM_PER_NODE": "0"}, "memory_mb", None),
        ({"SLURM_MEM_PER_CPU": "100"}, "memory_mb", 25600),
        ({"SLURM_MEM_PER_GPU": "1000"}, "memory_mb", 8000),
        ({"SLURM_RESTART_COUNT": None}, "restart", 0),
        ({"SLURM_ARRAY_TASK_ID": "5"}, "array_task", 5),
        ({"SLURM_JOB_NODELIST": "a-[01-02],b"}, "nodes", ("a-01", "a-02", "b")),
    ],
)
def test_each_way_of_asking(changes: dict[str, str | None], field: str, value: object) -> None:
    """Sites and users ask for the same in different options, and Slurm says it in different variables."""
    assert getattr(read(**changes), field) == value


def test_the_fix_is_the_line_to_use() -> None:
    """Whole, quoted, with the user's own words in their order, and the margin of this recipe: the script's own is another's."""
    words = ["recipes/llama405b-oasst2", "data.input=/a b/$x", "--run-dir", "/r x"]
    given = read(SLURM_JOB_NODELIST="n1", SLURM_GPUS_ON_NODE="4", SLURM_NTASKS_PER_NODE="8")
    problems = allocation.check(given, resolve("llama405b-oasst2"), machine(), words)
    assert [problem.key for problem in problems] == ["slurm.nodes", "slurm.gpus_per_node", "--ntasks-per-node"]
    assert all(problem.file == "job 42" for problem in problems)
    assert options(problems[0]) == [
        "sbatch", "--nodes=2", "--gpus-per-node=rtx_pro_6000:8", "--cpus-per-task=256", "--mem=0", "--time=24:00:00",
        "--partition=gpu", "--signal=B:USR1@1500", "launch/run.sbatch", *words,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama405b-oasst2", "tiny-oasst2"])
def test_the_line_gives_the_allocation_that_it_promises(name: str) -> None:
    """Whoever follows it must not be sent back again."""
    recipe, cluster = resolve(name), machine()
    line = allocation.sbatch_line(recipe, cluster, [name])
    options = dict(word[2:].split("=", 1) for word in shlex.split(line) if word.startswith("--"))
    nodes, gpus = f"n[1-{options['nodes']}]", options["gpus-per-node"].rpartition(":")[2]
    memory = str(int(options["mem"].rstrip("G")) * 1024)
    given = read(SLURM_JOB_NODELIST=nodes, SLURM_GPUS_ON_NODE=gpus, SLURM_MEM_PER_NODE=memory)
    assert allocation.check(given, recipe, cluster, [name]) == []


def test_what_cannot_fit_gets_the_line_that_does() -> None:
    """The allocation is as large as the recipe asks, which is too small: the suggested command has more nodes."""
    words = ["llama405b-oasst2", "slurm.nodes=1", "--run-dir", "r"]
    recipe = resolve("llama405b-oasst2", ["slurm.nodes=1"])
    problems = allocation.check(read(SLURM_JOB_NODELIST="n1"), recipe, machine(), words)
    assert len(problems) == 1
    found = options(problems[0])
    assert found[1] == "--nodes=2"
    assert found[found.index("launch/run.sbatch") + 1 :] == ["llama405b-oasst2", "slurm.nodes=2", "--run-dir", "r"]


@pytest.mark.parametrize(
    ("nodes", "gpus", "overrides", "world"),
    [
        ("n1", "3", [], 3),
        ("n[1-3]", "1", [], 3),
        ("n[1-2]", None, [], 4),
        ("n1", "4", ["slurm.gpus_per_node=2"], 2),
        ("n1", "4", ["slurm.nodes=2"], 8),
    ],
)
def test_a_tiny_run_takes_any_allocation(nodes: str, gpus: str | None, overrides: list[str], world: int) -> None:
    """One rank per GPU that there is; what is named stays as it is named."""
    given = read(SLURM_JOB_NODELIST=nodes, SLURM_GPUS_ON_NODE=gpus, SLURM_JOB_GPUS=None, SLURM_GPUS_PER_NODE=None)
    recipe = allocation.resolve_for(given, "llama405b-oasst2", overrides, tiny=True)
    assert recipe.world_size == world
    problems = allocation.check(given, recipe, machine(), ["llama405b-oasst2", *overrides, "--tiny"])
    assert [problem.key for problem in problems] == [override.partition("=")[0] for override in overrides]


# --- nodes that are not those of the cluster file ----------------------------------------------------------------------
