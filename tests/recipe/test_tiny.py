"""The tiny layer: any recipe, small enough for a laptop, over its own model class and distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.recipe.accelerate_file import parallel_sizes
from clustertune.resolve.resolve import resolve
from clustertune.resolve.tiny import ranks as tiny_ranks
from clustertune.resolve.tiny import tiny_layer


@pytest.mark.parametrize("name", ["tiny-oasst2", "llama405b-oasst2"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_tiny_run_needs_no_hub_and_few_steps(name: str, ranks: int) -> None:
    full, tiny = resolve(name, ranks=ranks), resolve(name, tiny=True, ranks=ranks)
    recipe, args = tiny.recipe, tiny.train_args
    assert (recipe.model.weights, recipe.model.revision, recipe.data.revision) == ("random", None, None)
    assert recipe.data.format == "oasst-tree" and recipe.data.language == "en" and recipe.data.expect is None
    assert tiny.inputs["data.input"].name == "conversations.jsonl"
    most = {"max_length": 256, "max_steps": 6, "logging_steps": 1, "save_steps": 2, "eval_steps": 2}
    assert all(args[key] <= value for key, value in most.items()) and args["gradient_accumulation_steps"] <= 2
    assert recipe.eval.max_gen_toks == 32 and recipe.eval.pass_mark == {}
    assert recipe.expect.tasks == {} and recipe.expect.trainable_parameters is None
    assert tiny.architecture["architectures"] == full.architecture["architectures"]
    assert tiny.accelerate == full.accelerate
    for key in ("learning_rate", "warmup_steps", "report_to", "lr_scheduler_type", "seed"):
        assert args[key] == full.train_args[key]
    assert tiny.lora == full.lora
    assert tiny.fingerprint() != full.fingerprint()
    for key in ("model.weights", "train.max_steps", "train.max_length", "data.input", "eval.max_gen_toks"):
        assert tiny.origins[key] == "tiny"


def test_what_only_a_gpu_or_the_real_tokenizer_has_is_left_out() -> None:
    args = resolve("llama405b-oasst2", ["train.eos_token=<|eot_id|>"], tiny=True).train_args
    assert args["tf32"] is args["pad_token"] is None
    flash = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    layer = tiny_layer({"train": flash}, Path("/x"), 2)
    assert layer["train"]["model_init_kwargs"] == {"attn_implementation": None}


def test_the_layer_follows_the_recipe() -> None:
    """A smaller number of it stays; what is wrong in it does not break the layer."""
    layer = tiny_layer({"train": {"max_steps": 2, "save_steps": 1, "max_length": 128}}, Path("/x"), 1)["train"]
    assert (layer["max_steps"], layer["save_steps"], layer["max_length"]) == (2, 1, 128)
    wrong: tuple[Any, ...] = (None, 3, {}, {"max_steps": "x", "save_steps": -1, "global_batch_size": None, "max_length": True})
    for train in wrong:
        layer = tiny_layer({"train": train}, Path("/x"), 4)["train"]
        assert layer["max_steps"] == 6 and layer["save_steps"] == 2 and layer["global_batch_size"] == 32


MESHES = [
    # recipe, ranks, axes that are left, ranks with different sequences
    ("llama405b-oasst2-hsdp-qlora", 16, {"dp_replicate": 2, "dp_shard": 8}, 16),
    ("llama405b-oasst2-hsdp-qlora", 4, {"dp_replicate": 2, "dp_shard": 2}, 4), ("llama405b-oasst2-hsdp-qlora", 2, {}, 2),
    ("llama70b-tp-fsdp2", 4, {"tp": 2, "dp_shard": 2}, 2), ("llama70b-tp-fsdp2", 3, {}, 3),
    ("llama8b-longcontext-32k", 4, {"cp": 2, "dp_shard": 2}, 2), ("llama8b-longcontext-32k", 2, {"cp": 2}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "axes", "different"), MESHES)
def test_each_axis_of_a_mesh_becomes_two(name: str, ranks: int, axes: dict[str, int], different: int) -> None:
    """As it stands in the file it fits the real machine alone; what is left out for want of ranks is reported."""
    full, tiny = resolve(name), resolve(name, tiny=True, ranks=ranks)
    assert parallel_sizes(tiny.accelerate) == axes
    assert tiny.data_parallel_size == different
    lost = set(parallel_sizes(full.accelerate)) - set(axes) - {"dp_shard"}
    (mesh,) = (item for item in tiny.derived if item.key == "accelerate.parallelism_config")
    assert ("too few for" in mesh.reason) is bool(lost) and all(axis in mesh.reason for axis in lost)


def test_sizes_on_the_command_line_are_meant() -> None:
    """Who writes a size knows how many ranks there are."""
    section = "accelerate.parallelism_config.parallelism_config"
    found = resolve("llama70b-tp-fsdp2", [f"{section}_tp_size=4", f"{section}_dp_shard_size=2"], tiny=True, ranks=8)
    assert parallel_sizes(found.accelerate) == {"tp": 4, "dp_shard": 2}
    assert found.architecture["num_key_value_heads"] == 4, "four ranks split the heads of a layer"
    assert resolve("llama70b-fsdp2", tiny=True, ranks=8).architecture["num_key_value_heads"] == 1


def test_one_machine_gets_ranks_for_the_mesh() -> None:
    """Two ranks are enough for one axis; a second needs four."""
    wanted = {"tiny-oasst2": 2, "llama8b-qlora-1gpu": 2, "llama70b-tp-fsdp2": 4, "llama405b-oasst2-hsdp-qlora": 4}
    assert {name: tiny_ranks(resolve(name).accelerate) for name in wanted} == wanted
    alone = resolve("llama8b-longcontext-32k").accelerate
    assert tiny_ranks(alone) == 2, "context parallelism alone leaves ranks to split over"


def test_offloading_needs_no_compiler_and_no_disk() -> None:
    """DeepSpeed's own Adam is compiled for minutes and NVMe takes libaio: a laptop has neither, and the sharding stays."""
    full, tiny = (resolve("llama70b-zero-infinity", tiny=tiny).deepspeed for tiny in (False, True))
    assert full and tiny
    assert full["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert tiny["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "nvme_path" not in tiny["zero_optimization"]["offload_param"] and tiny["zero_force_ds_cpu_optimizer"] is False
    assert tiny["zero_optimization"]["stage"] == 3 and tiny["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    meant = ["deepspeed.zero_force_ds_cpu_optimizer=true"]
    offloaded = resolve("llama70b-zero-infinity", meant, tiny=True)
    assert offloaded.deepspeed and offloaded.deepspeed["zero_force_ds_cpu_optimizer"] is True
    assert offloaded.deepspeed_overrides["zero_optimization.offload_param.device"] == "cpu", "ranks read the changed file"
    small = resolve("llama1b-oasst2", ["accelerate=accelerate-zero2.yaml"], tiny=True)
    assert small.deepspeed_overrides == {}
