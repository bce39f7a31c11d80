"""What must fit: a recipe that cannot is refused before the queue, one that can is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.config.resolve import resolve
from clustertune.config.resolved import Resolved
from clustertune.launch import fit, shape
from tests.launch.machines import machine


def with_distribution(resolved: Resolved, **accelerate: Any) -> Resolved:
    return Resolved.from_dict({**resolved.as_dict(), "accelerate": accelerate})


def fsdp1(strategy: str | int) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": strategy}}


def test_405b_needs_two_nodes_of_96_gb() -> None:
    """811.7 GB of bf16 weights over 8 ranks are 101.5 GB each, over 16 they are 50.7 GB."""
    one = resolve("llama405b-oasst2", ["slurm.nodes=1"])
    problems = shape.fit_problems(one, machine(), 1, 8)
    assert len(problems) == 1
    assert "slurm.nodes=2 is the least" in str(problems[0])
    assert "811.7 GB / 8 ranks 101.5 GB" in str(problems[0])
    assert shape.fit_problems(resolve("llama405b-oasst2"), machine(), 2, 8) == []


def test_a_tiny_run_always_fits() -> None:
    """Also where the recipe at full size would not, and where the node is small."""
    tiny = resolve("llama405b-oasst2", ["slurm.nodes=1", "slurm.gpus_per_node=1"], tiny=True)
    assert shape.fit_problems(tiny, machine(1, 1, memory_gb=1), 1, 1) == []


def test_host_memory_for_loading() -> None:
    """Rows of the 128,256 x 16,384 embedding, five at a time; FSDP1: all in rank 0; otherwise all in every rank of a node."""
    recipe = resolve("llama405b-oasst2")
    rows, own = fit.loading_parts(recipe, 8)
    assert rows.bytes == 8 * 5 * 128_256 * 16_384 * 2 / 16 and own.bytes == 16e9
    assert shape.fit_problems(recipe, machine(memory_gb=700), 2, 8) == []
    body = json.loads(json.dumps(recipe.accelerate))
    body["fsdp_config"]["fsdp_version"] = 1
    first = with_distribution(recipe, **body)
    assert [round(part.bytes / 1e9) for part in fit.loading_parts(first, 8)] == [812, 16]
    assert "host memory" in str(shape.fit_problems(first, machine(memory_gb=700), 2, 8)[0])
    body["fsdp_config"]["fsdp_version"] = 2
    body["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False
    every = with_distribution(recipe, **body)
    assert round(fit.total(fit.loading_parts(every, 8)) / 1e9) == 6510
    assert "each rank reads its rows" in str(shape.fit_problems(every, machine(), 2, 8)[0])


def test_host_memory_for_loading_under_deepspeed() -> None:
    """Stage 3 reads parts, also of a run whose record does not hold DeepSpeed's file; below it every rank loads all."""
    recipe = resolve("llama405b-oasst2")
    keys = {"zero_stage": 3}, {"deepspeed_config_file": "ds.json"}, {"zero_stage": 2}
    three, old, two = (with_distribution(recipe, distributed_type="DEEPSPEED", deepspeed_config=section) for section in keys)
    for found in (three, old):
        assert fit.loading_parts(found, 8) == fit.loading_parts(recipe, 8)
    assert round(fit.total(fit.loading_parts(two, 8)) / 1e9) == 6510
    problem = next(p for p in shape.fit_problems(two, machine(), 2, 8) if "host memory" in p.message)
    assert "stage 2" in str(problem.key) and "stage 3" in str(problem.fix)
    # A second part of it in each node: rank 0 sends. A quantised base: every rank has loaded all before it is parted.
    hpz = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    sent = Resolved.from_dict({**old.as_dict(), "deepspeed": hpz})
    packed = with_distribution(resolve("llama405b-oasst2-hsdp-qlora"), distributed_type="DEEPSPEED", deepspeed_config=keys[0])
    assert [round(fit.total(fit.loading_parts(found, 8)) / 1e9) for found in (sent, packed)] == [828, 6510]


@pytest.mark.parametrize(
    ("accelerate", "shards"),
    [
        (fsdp1("FULL_SHARD"), 16),
        (fsdp1(1), 16),
        (fsdp1("NO_SHARD"), 1),
        (fsdp1("HYBRID_SHARD"), 8),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, 16),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2},
                "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8},
            },
            8,
        ),
        ({"distributed_type": "MULTI_GPU"}, 1),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, 16),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, 1),
    ],
)
def test_over_how_many_ranks_weights_are_split(accelerate: dict[str, Any], shards: int) -> None:
    """The one figure that decides whether a large model fits."""
    recipe = with_distribution(resolve("llama405b-oasst2"), **accelerate)
    assert fit.spread(recipe, 16, 8).weights == shards
    weights = fit.rank_parts(recipe, 16, 8)[0]
    assert weights.bytes == pytest.approx(2 * 405_853_388_800 / shards)


def test_deepspeeds_own_file(tmp_path: Path) -> None:
    """The stage stands in the file that accelerate names; one that cannot be read refuses nobody."""
    recipe = resolve("llama405b-oasst2")
    body = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    moved = Resolved.from_dict({**recipe.as_dict(), "accelerate": body, "folder": str(tmp_path)})
    assert fit.spread(moved, 16, 8).weights == 16
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert fit.spread(moved, 16, 8).weights == 1
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": "auto"}}')
    assert fit.spread(moved, 16, 8).weights == 16


def test_sharding_without_resharding_gathers_everything() -> None:
    """SHARD_GRAD_OP saves the optimizer's memory, not the weights': the whole model is gathered."""
    recipe = resolve("llama405b-oasst2")
    assert fit.total(fit.rank_parts(with_distribution(recipe, **fsdp1("SHARD_GRAD_OP")), 16, 8)) > 800e9
    assert fit.smallest_nodes(with_distribution(recipe, **fsdp1("SHARD_GRAD_OP")), 8, 96e9) is None


def test_full_training_takes_16_bytes_a_parameter() -> None:
    """float32 weights, gradients and two moments: 16 bytes; 8-bit Adam 10."""
    recipe = resolve("llama405b-oasst2")
    full = Resolved.from_dict({**recipe.as_dict(), "recipe": {**recipe.as_dict()["recipe"], "lora": None}})
    states = sum(part.bytes for part in fit.rank_parts(full, 16, 8)[:2])
    assert states == pytest.approx(16 * 405_853_388_800 / 16)
    small = Resolved.from_dict({**full.as_dict(), "train_args": {**full.train_args, "optim": "adamw_bnb_8bit"}})
    assert sum(part.bytes for part in fit.rank_parts(small, 16, 8)[:2]) == pytest.approx(10 * 405_853_388_800 / 16)


def test_unknown_architectures_are_let_through() -> None:
    """A count that is not exact refuses what would run."""
    recipe = resolve("llama405b-oasst2")
    other = Resolved.from_dict({**recipe.as_dict(), "architecture": {**recipe.architecture, "model_type": "mamba"}})
    assert fit.rank_parts(other, 8, 8) == []
    assert shape.fit_problems(other, machine(), 1, 8) == []
    assert fit.loading_parts(other, 8) == []


def test_an_offloaded_optimizer_takes_no_gpu_memory() -> None:
    """70B on 8 GPUs of 80 GB: with state and float32 copy in host memory it fits, and without it is refused."""
    words = ["deepspeed.zero_optimization.offload_optimizer=null"]
    offloaded, kept = resolve("llama70b-zero3-offload"), resolve("llama70b-zero3-offload", words)
    assert shape.fit_problems(offloaded, machine(), 1, 8) == []
    assert [round(part.bytes / 1e9) for part in fit.rank_parts(offloaded, 8, 8)][:1] == [18]
    assert "12 B each" in str(shape.fit_problems(kept, machine(), 1, 8)[0])
