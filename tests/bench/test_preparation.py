"""What a benchmark makes of a recipe: its own steps, nothing between them, and no Hub where none is wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.bench import preparation
from clustertune.bench.preparation import BenchRequest
from clustertune.errors import UserError
from clustertune.training.bench_schedule import BenchSchedule


def made(recipe: str = "tiny-oasst2", *overrides: str, **more: Any) -> preparation.Bench:
    schedule = BenchSchedule(2, 4, 1)
    return preparation.make(BenchRequest(recipe, Path("runs/bench/x/1"), schedule, overrides, **more))


def test_so_many_steps_and_nothing_between_them() -> None:
    """An evaluation between timed steps would be timed, and a tracker would be told of a run that is none.

    train.max_steps on the command line is the recipe's: the benchmark has its own.
    """
    found = made("tiny-oasst2", "train.max_length=64", "train.max_steps=500")
    args = found.measured.train_args
    assert (args["max_steps"], args["eval_strategy"], args["save_strategy"], args["eval_on_start"]) == (7, "no", "no", False)
    assert args["max_length"] == 64 and args["report_to"] == "none"
    assert found.whole.train_args["max_steps"] == 500 and found.whole.train_args["eval_on_start"] is True


def test_a_large_recipe_needs_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a laptop the reference recipe is refused before anything is made, with both ways out."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError) as caught:
        made("llama405b-oasst2")
    assert "--tiny" in str(caught.value.problems[0]) and "clustertune submit" in str(caught.value.problems[0])
    assert made("llama405b-oasst2", tiny=True).measured.world_size == 2


def test_full_size_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Architecture and lengths stay, weights and data are made here; what the tokenizer lacks is left out."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = made("llama405b-oasst2", synthetic=True)
    model, data = found.measured.recipe.model, found.measured.recipe.data
    assert (model.weights, model.revision, model.path) == ("random", None, None)
    assert (
        data.format == "messages" and data.input == str(preparation.made_file(Path("runs/bench/x/1"))) and data.expect is None
    )
    assert found.measured.architecture == found.whole.architecture and found.measured.train_args["pad_token"] is None
    assert found.made is not None
    assert found.made[0] >= 7 * 32 * 2048, "enough tokens for every packed sequence of every step"
    assert found.lengths is not None and 400 < found.lengths.mean(2048) < 600, "a quarter of the longest"


def test_made_up_conversations_are_as_long_as_they_should_be(tmp_path: Path) -> None:
    """The mean decides how much a padded step wastes and how many a packed one needs."""
    count = preparation.write(tmp_path / "x.jsonl", 300.0, 2048, tokens=0, count=2000, seed=1)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    words = [sum(len(m["content"].split()) for m in row) + preparation.TEMPLATE_TOKENS for row in rows]
    assert count == len(rows) == 2000 and 0.9 < sum(words) / len(words) / 300 < 1.1
    assert max(words) <= 2048 and [m["role"] for m in rows[0]] == ["user", "assistant"]
    # Too few sequences would end an epoch in the middle of the steps, with a smaller one.
    packed = list(preparation.conversations(100.0, 256, tokens=50_000, count=2, seed=3))
    assert 50_000 <= sum(len(m["content"].split()) for row in packed for m in row) + 12 * len(packed) < 51_000
    again = list(preparation.conversations(300.0, 2048, tokens=0, count=2000, seed=1))
    assert again == rows and len(set(preparation.vocabulary())) == preparation.WORDS
