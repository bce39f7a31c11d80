"""The size of each stage's job, and what must fit: refused before the queue where ``plan`` says so, and nowhere else."""

from __future__ import annotations

import pytest

from clustertune.errors import UserError
from clustertune.launch import shape
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.predict import make_plan
from clustertune.resolve.resolve import resolve
from tests.launch.machines import RECIPES, machine


def test_a_tiny_run_takes_what_the_cluster_has() -> None:
    """A rehearsal runs on two GPUs as on sixteen, unless somebody names the number."""
    sizes = {
        (): (machine(1, 2), 1, 2),
        ("data.limit=9",): (machine(3, 0), 2, 2),
        ("slurm.nodes=4",): (machine(1, 2), 4, 2),
        ("slurm={nodes: 4, gpus_per_node: 3}",): (machine(1, 2), 4, 3),
    }
    for given, (cluster, nodes, ranks) in sizes.items():
        found, words = shape.resolve_on("llama405b-oasst2", given, cluster, tiny=True)
        assert (found.recipe.slurm.nodes, found.recipe.slurm.gpus_per_node) == (nodes, ranks)
        assert found.world_size == nodes * ranks and words[: len(given)] == list(given)
    assert shape.resolve_on("llama405b-oasst2", [], machine(1, 2), tiny=False)[1] == []
    assert shape.train_shape(resolve("tiny-oasst2", tiny=True), machine(memory_gb=6)).memory_gb is None


def test_the_merged_model_must_fit_for_its_evaluation() -> None:
    """One node scores it by transformers: more than its GPUs is said, not refused, layers can wait in host memory."""
    assert shape.stage_shapes(resolve("tiny-oasst2"), machine())["eval"].gpus_per_node == 1
    assert "9 GPUs" in shape.warnings(resolve("llama405b-oasst2", ["eval.backend=hf"]), machine())[0]
    assert shape.warnings(resolve("llama405b-oasst2", tiny=True), machine()) == []
    unknown = machine(compute={"gpus": 8, "cores": 64, "threads": 128, "memory_gb": 2000})
    assert "compute.gpu" in shape.warnings(resolve("llama405b-oasst2"), unknown)[0]


# --- what must fit -----------------------------------------------------------------------------------------------------


def test_405b_needs_two_nodes_of_96_gb() -> None:
    """811.7 GB of bf16 weights over 8 ranks are 94.5 GiB each, over 16 they are 47.2 GiB."""
    problems = shape.fit_problems(resolve("llama405b-oasst2", ["slurm.nodes=1"]), machine())
    assert len(problems) == 1
    assert "slurm.nodes=2 is the least" in str(problems[0])
    assert "weights 94.5" in str(problems[0])
    assert shape.fit_problems(resolve("llama405b-oasst2"), machine()) == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("nodes", [1, 16])
def test_submit_and_plan_agree(recipe: str, nodes: int) -> None:
    """A recipe is refused before the queue where the plan says that it does not fit, and nowhere else."""
    cluster = machine(nodes, gpus=8, memory_gb=1000)
    try:
        found = resolve(recipe, [f"slurm.nodes={nodes}", "train.global_batch_size=1024"])
        calibrated = find_calibrated(cluster)
        plan = make_plan(found, calibrated.machine(nodes), calibrated.constants)
    except UserError:
        return
    refused = {problem.key == shape.GPU_MEMORY for problem in shape.fit_problems(found, cluster)}
    assert (True in refused) == (plan.needed > plan.machine.usable_bytes)
    assert (False in refused) == (plan.host_bytes > plan.machine.host_bytes)
