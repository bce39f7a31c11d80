# ruff: noqa: E501 (a table of one mistake a line)
"""DeepSpeed's file before the queue: what it ignores, what contradicts the recipe, and what stands in the place of ``auto``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertune.resolve import view
from clustertune.resolve.resolve import resolve
from tests.recipe.conftest import Refuse

AUTO: dict[str, Any] = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
AUTO["bf16"] = {"enabled": "auto"}
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
ZERO3 = {"stage": 3, **dict.fromkeys(SIZES, "auto")}
NVME = {"device": "nvme", "nvme_path": "auto"}
PARAMS = {**NVME, "buffer_size": 2 * 10**8}
FULL = ["lora=null"]
Write = Callable[..., Path]


@pytest.fixture
def write(recipes: Path) -> Write:
    """The reference recipe under a DeepSpeed file of these contents: ``None`` takes a key out."""

    def made(zero: dict[str, Any] | None = None, **top: Any) -> Path:
        folder = recipes / "llama405b-oasst2"
        body = {**AUTO, "zero_optimization": {**ZERO3, **(zero or {})}, **top}
        (folder / "ds.json").write_text(json.dumps({key: value for key, value in body.items() if value is not None}))
        text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}\n"
        (folder / "accelerate.yaml").write_text(text)
        return folder

    return made


def test_auto_is_what_the_recipe_says(write: Write) -> None:
    """Shown with its reason, before anything is started; what stays auto says who fills it in."""
    folder = write(
        {"offload_param": PARAMS},
        scheduler={"type": "WarmupCosineLR", "params": {"warmup_type": "linear", "total_num_steps": "auto"}},
    )
    values = view.as_json(resolve(folder, FULL))["values"]
    found = {key.removeprefix("deepspeed."): item["value"] for key, item in values.items() if key.startswith("deepspeed.")}
    assert [found[key] for key in list(AUTO)[:3]] == [32, 1, 2]
    assert (found["gradient_clipping"], found["bf16.enabled"], found["zero_optimization.stage"]) == (1.0, True, 3)
    zero = "zero_optimization"
    assert found[f"{zero}.reduce_bucket_size"] == "auto", "transformers fills it in"
    assert values["deepspeed.zero_optimization.stage"]["origin"] == "ds.json"
    assert "micro batch 1 x accumulation 2 x 16" in values["deepspeed.train_batch_size"]["origin"]


@pytest.mark.parametrize(
    ("zero", "top", "key", "says"),
    [
        ({}, {"zero_optimisation": {}}, "zero_optimisation", "did you mean zero_optimization?"),
        ({"overlap_comm": "auto"}, {}, "zero_optimization.overlap_comm", "nothing fills in"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, {}, "zero_optimization.offload_param.device", "from stage 3"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, {}, "zero_optimization.offload_optimizer.device", "from stage 1"),
        ({"stage": 2, "offload_optimizer": NVME}, {}, "zero_optimization.offload_optimizer.device", "use cpu"),
        ({"offload_param": {**PARAMS, "nvme_path": "/scratch"}}, {}, "zero_optimization.offload_param.nvme_path", "the path of one site"),
        ({"offload_param": {"device": "nvme", "buffer_size": 200000000}}, {}, "zero_optimization.offload_param.nvme_path", 'write "auto"'),
        ({"cpu_offload": True}, {}, "zero_optimization.cpu_offload", "offload_optimizer"),
        ({"compute_grad_norm": False}, {}, "zero_optimization.compute_grad_norm", "would be taken"),
        ({"zenflow": {}}, {}, "zero_optimization.zenflow", "exported"),
        ({}, {"bf16": {"enabled": False}}, "bf16.enabled", "train.bf16 is True"),
        ({}, {"fp16": {"enabled": True}}, "fp16.enabled", "use bf16"),
        ({}, {"train_batch_size": 64}, "train_batch_size", "train.global_batch_size is 32"),
        ({}, {"train_micro_batch_size_per_gpu": None}, "train_micro_batch_size_per_gpu", "missing"),
        ({}, {"gradient_accumulation_steps": None}, "gradient_accumulation_steps", "would take 1"),
        ({}, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "is 2"),
        ({}, {"gradient_clipping": None}, "gradient_clipping", "would not clip"),
        ({}, {"gradient_clipping": 0.5}, "gradient_clipping", "train.max_grad_norm is 1.0"),
        ({}, {"optimizer": {"type": "Lamb", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}}, "optimizer.type", "train.optim"),
        ({}, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": "auto", "eps": "auto", "weight_decay": "auto"}}}, "optimizer.params.lr", "train.learning_rate is"),
        ({}, {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "weight_decay": "auto"}}}, "optimizer.params.betas", "its own default"),
        ({}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}}, "scheduler.type", "lr_scheduler_type is cosine"),
        ({}, {"scheduler": {"type": "WarmupCosineLR", "params": {}}}, "scheduler.params.warmup_type", "logarithm"),
        ({}, {"checkpoint": {"load_universal": True}}, "checkpoint.load_universal", "hashed"),
        ({}, {"wandb": {"enabled": True}}, "wandb", "report_to"),
        ({}, {"activation_checkpointing": {}}, "activation_checkpointing", "activation_checkpointing.ratio"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(
    write: Write, refused: Refuse, zero: dict[str, Any], top: dict[str, Any], key: str, says: str
) -> None:
    """By file and key, and what to do: DeepSpeed ignores half of these and meets the rest when the model is loaded."""
    problems = refused(write(zero, **top), FULL if "nvme" in str(zero.get("offload_param")) else [])
    assert [(p.key, p.file.split("/")[-1]) for p in problems if p.file] == [(key, "ds.json")], [str(p) for p in problems]
    assert says in str(problems[0])
