"""What must fit: a recipe that cannot is refused before the queue, one that can is not, by the figures of ``plan``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.launch import shape
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.constants import Constants
from clustertune.plan.predict import footprint, make_plan
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from tests.launch.machines import RECIPES, machine


def with_distribution(resolved: Resolved, **accelerate: Any) -> Resolved:
    return replace(resolved, accelerate=accelerate)


def fsdp1(strategy: str) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": strategy}}


def loading(resolved: Resolved) -> int:
    """GB of host memory on a node for what loading takes beside the ranks themselves."""
    parts = footprint(resolved, Constants())[0].host
    return round(sum(part.value for part in parts if part.name == "loading") / 1e9)


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


def test_a_tiny_run_always_fits() -> None:
    """Also where the recipe at full size would not, and where the node is small."""
    tiny = resolve("llama405b-oasst2", ["slurm.nodes=1", "slurm.gpus_per_node=1"], tiny=True)
    assert shape.fit_problems(tiny, machine(1, 1, memory_gb=1)) == []


def test_host_memory_for_loading() -> None:
    """Rows of the 128,256 x 16,384 embedding, five at a time; FSDP1: all in rank 0; otherwise all in every rank of a node."""
    recipe = resolve("llama405b-oasst2")
    assert loading(recipe) == round(8 * 5 * 128_256 * 16_384 * 2 / 16 / 1e9)
    assert shape.fit_problems(recipe, machine(memory_gb=700)) == []
    body = json.loads(json.dumps(recipe.accelerate))
    body["fsdp_config"]["fsdp_version"] = 1
    first = with_distribution(recipe, **body)
    assert loading(first) == 812
    assert "host memory" in str(shape.fit_problems(first, machine(memory_gb=700)))
    body["fsdp_config"]["fsdp_version"] = 2
    body["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False
    every = with_distribution(recipe, **body)
    assert loading(every) == 6494
    assert "each rank reads its rows" in str(shape.fit_problems(every, machine())[-1])


def test_host_memory_for_loading_under_deepspeed() -> None:
    """Stage 3 reads parts, also of a run whose record does not hold DeepSpeed's file; below it every rank loads all."""
    recipe = resolve("llama405b-oasst2")
    keys = {"zero_stage": 3}, {"deepspeed_config_file": "ds.json"}, {"zero_stage": 2}
    three, old, two = (with_distribution(recipe, distributed_type="DEEPSPEED", deepspeed_config=section) for section in keys)
    assert loading(three) == loading(old) == loading(recipe)
    assert loading(two) == 6494
    problem = next(p for p in shape.fit_problems(two, machine()) if "host memory" in p.message)
    assert "stage 2" in str(problem.key) and "stage 3" in str(problem.fix)
    # A second part of it in each node: rank 0 sends. A quantised base: every rank has loaded all before it is parted.
    sent = replace(old, deepspeed={"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}})
    packed = with_distribution(resolve("llama405b-oasst2-hsdp-qlora"), distributed_type="DEEPSPEED", deepspeed_config=keys[0])
    assert [loading(sent), loading(packed)] == [812, 6494]


def test_sharding_without_resharding_gathers_everything() -> None:
    """SHARD_GRAD_OP saves the optimizer's memory, not the weights': the whole model is gathered."""
    recipe = with_distribution(resolve("llama405b-oasst2"), **fsdp1("SHARD_GRAD_OP"))
    assert footprint(recipe, Constants())[0].needed > 800e9
    assert shape.least_nodes(recipe, machine()) is None


def test_unknown_architectures_are_let_through() -> None:
    """A count that is not exact refuses what would run."""
    recipe = resolve("llama405b-oasst2")
    other = replace(recipe, architecture={**recipe.architecture, "model_type": "mamba"})
    assert shape.held(other, machine()) is None and shape.host_bytes(other, machine()) == 0
    assert shape.fit_problems(other, machine()) == []


def test_an_offloaded_optimizer_takes_no_gpu_memory() -> None:
    """70B on 8 GPUs of 96 GB: with state and float32 copy in host memory it fits, and without it is refused."""
    words = ["deepspeed.zero_optimization.offload_optimizer=null"]
    offloaded, on_gpus = resolve("llama70b-zero3-offload"), resolve("llama70b-zero3-offload", words)
    assert shape.fit_problems(offloaded, machine()) == []
    assert "optimizer" in str(shape.fit_problems(on_gpus, machine())[0])
