"""A recipe as Megatron-Bridge 0.5.1 takes it: its names, nothing lost unsaid, and sizes judged as Megatron-Core does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clustertune.megatron import settings
from clustertune.resolve.resolve import resolve
from tests.command import REPO
from tests.megatron.standin import NAMES

RECIPES = ("llama70b-megatron", "llama405b-megatron")
LORA = ("llama405b-oasst2", "megatron.tensor_model_parallel_size=8", "megatron.pipeline_model_parallel_size=2")
PATHS = {"base": "B", "data": "D", "tokenizer": "T", "save": "S", "load": None}
SECTIONS = {
    "train": "TrainingConfig", "validation": "ValidationConfig", "optimizer": "OptimizerConfig", "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig", "dataset": "FinetuningDatasetConfig", "tokenizer": "TokenizerConfig",
    "checkpoint": "CheckpointConfig", "logger": "LoggerConfig", "rng": "RNGConfig", "peft": "CanonicalLoRA",
}  # fmt: skip


def made(name: str, *words: str, rows: tuple[int, int] | None = (5000, 300)) -> dict[str, dict[str, Any]]:
    """The sections of a recipe."""
    return settings.build(resolve(name, list(words)), PATHS, settings.Counts(*rows) if rows else None)


@pytest.mark.parametrize("words", [(name,) for name in RECIPES] + [LORA])
def test_every_name_is_one_of_the_release(words: tuple[str, ...]) -> None:
    """Against the sources of the wheels, read by record_names.py."""
    found = made(*words)
    model = {*NAMES["classes"]["TransformerConfig"], *NAMES["classes"]["GPTModelProvider"]}
    assert set(found["model"]) <= model
    assert set(found["mixed_precision"]) - {"recipe"} <= set(NAMES["classes"]["MixedPrecisionConfig"])
    for section, name in SECTIONS.items():
        assert set(found.get(section, {})) <= set(NAMES["classes"][name]), section
    assert set(found) <= {*SECTIONS, "model", "mixed_precision"} and set(found) <= set(NAMES["classes"]["ConfigContainer"])
    packed = found["dataset"]["packed_sequence_specs"]
    assert set(packed) <= set(NAMES["classes"]["PackedSequenceSpecs"])
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("name", "sizes", "ranks"), [("llama70b-megatron", (8, 4, 1, 2), 64), ("llama405b-megatron", (8, 8, 2, 2), 256)]
)
def test_the_recipes_are_cut_as_the_sources_have_it(name: str, sizes: tuple[int, ...], ranks: int) -> None:
    """Tensor, pipeline, context and data parallelism."""
    resolved = resolve(name)
    m = resolved.recipe.megatron
    assert m is not None and settings.find_problems(resolved) == []
    found = (m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size)
    assert (*found, resolved.data_parallel_size) == sizes and resolved.world_size == ranks


def test_what_a_recipe_says_arrives() -> None:
    found = made(*LORA, "train.warmup_steps=0.1", "train.weight_decay=0.02", "train.seed=7", "train.max_grad_norm=0.5")
    assert found["train"]["train_iters"] == 5000 // 32 and found["train"]["global_batch_size"] == 32
    assert found["scheduler"]["lr_warmup_iters"] == 16 and found["scheduler"]["lr_decay_iters"] == 156
    assert found["scheduler"]["lr_decay_style"] == "cosine" and found["scheduler"]["end_weight_decay"] == 0.02
    assert found["optimizer"]["lr"] == 5e-5 and found["optimizer"]["clip_grad"] == 0.5 and found["rng"]["seed"] == 7
    assert found["validation"] == {"eval_interval": 2, "eval_iters": 9, "eval_global_batch_size": 32}
    assert found["peft"]["target_modules"] == ["linear_q", "linear_k", "linear_v", "linear_proj"]
    assert found["checkpoint"]["save_interval"] == 20 and found["dataset"]["dataset_kwargs"]["answer_only_loss"] is False
    assert made(*LORA, "train.max_steps=3")["train"]["train_iters"] == 3
    assert made(*LORA, "train.assistant_only_loss=true")["dataset"]["dataset_kwargs"]["answer_only_loss"] is True


def test_a_mean_over_tokens_is_not_averaged_again() -> None:
    """TRL's loss: ranks add their losses and their tokens, so a collective must sum (Megatron-Core asserts the pair)."""
    for name in RECIPES:
        found = made(name)
        assert (found["model"]["calculate_per_token_loss"], found["ddp"]["average_in_collective"]) == (True, False)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train.optim=adafactor"], "train.optim"),
        (["train.lr_scheduler_type=polynomial"], "train.lr_scheduler_type"),
        (["train.neftune_noise_alpha=5"], "train.neftune_noise_alpha"),
        (["train.per_device_train_batch_size=2"], "train.per_device_train_batch_size"),
        (["train.bf16=false"], "train.bf16"),
        (["lora.use_rslora=true"], "lora.use_rslora"),
        (["lora.init_lora_weights=gaussian"], "lora.init_lora_weights"),
    ],
)
def test_what_is_not_carried_is_refused(words: list[str], key: str) -> None:
    """A setting that has no effect is a training that nobody asked for."""
    problems = settings.find_problems(resolve(LORA[0], [*LORA[1:], *words]))
    assert [problem.key for problem in problems] == [key] and all(problem.fix for problem in problems)


def test_what_a_recipe_leaves_out_is_trls_own(tmp_path: Path) -> None:
    """A recipe without a micro batch trained with an eighth of its batch, one without a length ended in a traceback."""
    folder = tmp_path / "plain"
    folder.mkdir()
    shutil.copy(REPO / "recipes" / "llama8b-lima" / "model.json", folder)
    (folder / "recipe.yaml").write_text(f"""
model: {{name: meta-llama/Llama-3.1-8B, revision: "{"0" * 40}"}}
data: {{name: OpenAssistant/oasst2, revision: "{"0" * 40}", format: oasst-tree, language: en}}
train: {{global_batch_size: 128, assistant_only_loss: true}}
megatron: {{tensor_model_parallel_size: 8}}
slurm: {{nodes: 1, gpus_per_node: 8, time: "04:00:00"}}
""")
    resolved = resolve(folder)
    found = settings.build(resolved, PATHS, settings.Counts(5000, 300))
    assert found["train"]["global_batch_size"] == 128 and found["train"]["micro_batch_size"] == 8
    assert found["train"]["train_iters"] == 5000 * 3 // 128
    assert (found["model"]["seq_length"], found["logger"]["log_interval"], found["rng"]["seed"]) == (1024, 10, 42)
    assert (found["optimizer"]["lr"], found["checkpoint"]["save_interval"]) == (2e-5, 500)
    assert settings.find_problems(resolved) == []
    lora = resolve(folder, ["lora.target_modules=[q_proj]"])
    assert settings.build(lora, PATHS)["peft"]["dim"] == 8 and settings.find_problems(lora) == []
