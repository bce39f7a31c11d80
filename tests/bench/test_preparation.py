"""What a benchmark makes of a recipe: its own steps, nothing between them, and no Hub where none is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune import bench
from clustertune.errors import UserError


def made(recipe: str = "tiny-oasst2", *overrides: str, **more: Any) -> bench.Bench:
    return bench.make(recipe, overrides, Path("runs/bench/x/1"), 2, 4, **more)


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
    assert data.format == "messages" and data.input == str(bench.made_file(Path("runs/bench/x/1"))) and data.expect is None
    assert found.measured.architecture == found.resolved.architecture and found.measured.train_args["pad_token"] is None
    assert bench.needed(found)[0] >= 6 * 32 * 2048, "enough tokens for every packed sequence of every step"
    assert found.lengths is not None and 400 < found.lengths.mean(2048) < 600, "a quarter of the longest"
