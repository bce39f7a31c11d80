"""The tiny layer: any recipe, small enough for a laptop, over its own model class and distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.config.resolve import resolve
from clustertune.config.tiny import tiny_layer


@pytest.mark.parametrize("name", ["tiny-oasst2", "llama405b-oasst2"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_tiny_run_needs_no_hub_and_few_steps(name: str, ranks: int) -> None:
    full, tiny = resolve(name, ranks=ranks), resolve(name, tiny=True, ranks=ranks)
    recipe, args = tiny.recipe, tiny.train_args
    assert (recipe.model.weights, recipe.model.revision, recipe.data.revision) == ("random", None, None)
    assert recipe.data.format == "oasst-tree" and recipe.data.language == "en" and recipe.data.expect is None
    assert tiny.input_path is not None and tiny.input_path.name == "conversations.jsonl"
    assert args["max_length"] <= 256 and args["max_steps"] <= 6 and args["logging_steps"] == 1
    assert args["save_steps"] <= 2 and args["eval_steps"] <= 2
    assert args["gradient_accumulation_steps"] <= 2
    assert recipe.eval.ifeval.max_gen_toks == 32 and recipe.eval.ifeval.pass_mark == {}
    assert recipe.expect.ifeval == {} and recipe.expect.trainable_parameters is None
    assert tiny.architecture["architectures"] == full.architecture["architectures"]
    assert tiny.accelerate == full.accelerate
    for key in ("learning_rate", "warmup_steps", "report_to", "lr_scheduler_type", "seed"):
        assert args[key] == full.train_args[key]
    assert recipe.lora == full.recipe.lora
    assert tiny.fingerprint() != full.fingerprint()


def test_each_tiny_value_says_so() -> None:
    origins = resolve("llama405b-oasst2", tiny=True).origins
    for key in ("model.weights", "train.max_steps", "train.max_length", "data.input", "eval.ifeval.max_gen_toks", "train.tf32"):
        assert origins[key] == "tiny"
    assert origins["train.seed"] == "base sft-lora"


def test_what_only_a_gpu_or_the_real_tokenizer_has_is_left_out() -> None:
    args = resolve("llama405b-oasst2", ["train.eos_token=<|eot_id|>"], tiny=True).train_args
    assert "tf32" not in args and "pad_token" not in args
    flash = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    layer = tiny_layer({"train": flash}, Path("/x"), 2)
    assert layer["train"]["model_init_kwargs"] == {"attn_implementation": "sdpa"}


def test_overrides_lie_over_the_tiny_layer() -> None:
    tiny = resolve("tiny-oasst2", ["train.max_steps=3", "data.input=/x/y.jsonl", "train.max_length=64"], tiny=True)
    assert tiny.train_args["max_steps"] == 3 and tiny.train_args["max_length"] == 64
    assert str(tiny.input_path) == "/x/y.jsonl"
    assert tiny.origins["train.max_steps"] == "override"


def test_a_smaller_number_of_the_recipe_stays() -> None:
    layer = tiny_layer({"train": {"max_steps": 2, "save_steps": 1, "max_length": 128}}, Path("/x"), 1)["train"]
    assert (layer["max_steps"], layer["save_steps"], layer["max_length"]) == (2, 1, 128)


@pytest.mark.parametrize(
    "train", [None, 3, {}, {"max_steps": "x", "save_steps": -1, "global_batch_size": None, "max_length": True}]
)
def test_a_wrong_recipe_does_not_break_the_layer(train: Any) -> None:
    layer = tiny_layer({"train": train}, Path("/x"), 4)["train"]
    assert layer["max_steps"] == 6 and layer["save_steps"] == 2 and layer["global_batch_size"] == 32


def test_a_recipe_elsewhere_finds_the_shipped_conversations(recipes: Path, repo: Path) -> None:
    tiny = resolve(recipes / "llama405b-oasst2", tiny=True)
    assert tiny.input_path == repo / "recipes" / "tiny-oasst2" / "conversations.jsonl"
