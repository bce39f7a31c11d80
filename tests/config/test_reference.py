"""The reference recipe has every setting of the published run, under the pinned stack's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertune.config.resolve import resolve

SOURCE: dict[str, Any] = {
    "optim": "adamw_torch", "learning_rate": 5e-5, "lr_scheduler_type": "cosine", "warmup_steps": 0.03, "weight_decay": 0.01,
    "seed": 42, "num_train_epochs": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
    "max_length": 2048, "packing": True, "bf16": True, "tf32": True, "activation_checkpointing": False,
    "ddp_find_unused_parameters": False, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1,
    "logging_first_step": True, "save_strategy": "steps", "save_steps": 20, "save_total_limit": 3,
    "save_only_model": False, "report_to": "wandb",
}  # fmt: skip
LORA = {
    "r": 32, "lora_alpha": 64, "lora_dropout": 0.05, "bias": "none", "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}  # fmt: skip


def test_training_settings() -> None:
    resolved = resolve("llama405b-oasst2")
    assert {key: resolved.train_args.get(key) for key in SOURCE} == SOURCE
    assert resolved.train_args["model_init_kwargs"]["attn_implementation"] == "sdpa"
    assert resolved.recipe.lora == LORA
    assert resolved.world_size == 16 and resolved.recipe.train["global_batch_size"] == 32
    assert resolved.recipe.slurm.time == "24:00:00"
    # The source padded with EOS where no pad token was set, which masks EOS in the labels.
    assert "<|finetune_right_pad_id|>" in resolved.train_args.values()


def test_data_and_expectations() -> None:
    recipe = resolve("llama405b-oasst2").recipe
    assert (recipe.data.name, recipe.data.format, recipe.data.language) == ("OpenAssistant/oasst2", "oasst-tree", "en")
    assert recipe.data.expect is not None and (recipe.data.expect.train, recipe.data.expect.eval) == (5125, 275)
    figures = recipe.expect.model_dump(include={"train_loss", "eval_loss", "token_accuracy", "hours", "steps"})
    assert figures == {"train_loss": 1.111, "eval_loss": 1.139, "token_accuracy": 0.705, "hours": 8.4, "steps": 36}
    scores = {"prompt_level_strict_acc": 0.7098, "prompt_level_loose_acc": 0.7449}
    assert recipe.expect.tasks == {"ifeval": {**scores, "inst_level_strict_acc": 0.783, "inst_level_loose_acc": 0.8106}}


def test_the_readme_maps_every_key_of_both_files(repo: Path) -> None:
    folder = repo / "recipes" / "llama405b-oasst2"
    text = (folder / "README.md").read_text()
    for file in ("accelerate.yaml", "accelerate-fsdp1.yaml"):
        keys = resolve(folder, [f"accelerate={file}"]).accelerate["fsdp_config"]
        missing = [key for key in keys if key not in text and key not in {"fsdp_version", "fsdp_transformer_layer_cls_to_wrap"}]
        assert missing == []
    for word in ("theirs, not ours", "70.98", "1.139", "8 h 24"):
        assert word in text
