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


# --- what must fit -----------------------------------------------------------------------------------------------------


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
