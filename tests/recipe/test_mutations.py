"""Recipes spoiled by rule, well over a hundred: each is refused in words that name the place, or means the same as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipe.conftest import Refuse

REPO = Path(__file__).resolve().parents[2]
RECIPES = ("tiny-oasst2", "llama405b-oasst2")


def read(relative: str) -> dict[str, Any]:
    body = yaml.safe_load((REPO / "recipes" / relative).read_text())
    assert isinstance(body, dict)
    return body


FILES = [f"{recipe}/{file}" for recipe in RECIPES for file in ("recipe.yaml", "accelerate.yaml")]
FILES += ["_base/sft-lora.yaml"]


BAD = {
    "learning_rate": ["abc", True, -1, 0, 1, float("nan"), [1], "nan", "inf", None, {}],
    "global_batch_size": [0, -4, "x", 1.5, True, None, 5],
    "max_length": [0, 7, -1, "long", 10**6], "per_device_train_batch_size": [0, -1, 1.5, True, "x", None],
    "num_train_epochs": [0, -1, "x", None], "warmup_steps": [-1, "x", 1.5], "weight_decay": [-0.1, 1, "x"],
    "seed": [-1, 1.5, "x", True, 2**32], "save_steps": [0, -1, 1.5, "x"], "logging_steps": [0, -2], "eval_steps": [0, -2, "x"],
    "save_total_limit": [0, -3, "x"], "packing": ["maybe", 2, [True]], "lr_scheduler_type": ["cosin", 3, None],
    "optim": ["adamw", "adam_torch"], "eval_strategy": ["step", 1, True], "report_to": [3], "bf16": ["perhaps", 3],
    "packing_strategy": ["ffd"], "save_strategy": ["step"], "include_for_metrics": ["loss"],
}  # fmt: skip


@pytest.mark.parametrize("key", BAD)
def test_a_wrong_value_is_named(key: str, recipes: Path, refused: Refuse) -> None:
    body = read("tiny-oasst2/recipe.yaml")
    for value in BAD[key]:
        body["train"][key] = value
        (recipes / "tiny-oasst2" / "recipe.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
        problems = refused(recipes / "tiny-oasst2")
        assert [problem.key for problem in problems] == [f"train.{key}"]
        assert "recipe.yaml:" in problems[0].file


@pytest.mark.parametrize(
    "key", ["train.hub_token", "train.api_key", "model.token", "wandb_api_key", "train.run_name", "data.input"]
)
def test_a_secret_is_refused_and_never_shown(key: str, refused: Refuse) -> None:
    for secret in ("hf_" + "a1B2" * 8, "sk-" + "a1B2" * 8, "ghp_" + "a1B2" * 8):
        problems = refused("tiny-oasst2", [f"{key}={secret}"])
        assert any(problem.key == key for problem in problems)
        assert not any(secret in str(problem) for problem in problems)


def test_a_plain_secret_under_an_unknown_key_is_not_shown(refused: Refuse) -> None:
    for key in ("train.wandb_key", "lora.hub_token", "data.password", "secret"):
        assert "hunter2" not in str(refused("tiny-oasst2", [f"{key}=hunter2"])[0])
