"""The tiny layer: any recipe, small enough for a laptop, over its own model class and distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.recipe.accelerate_file import parallel_sizes
from clustertune.resolve.resolve import resolve
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
