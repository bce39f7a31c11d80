"""Recomputation of a share of the layers: what is kept, what is dropped again, and that nothing recomputes twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from clustertune.errors import UserError
from clustertune.plan.strategy import strategy
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import recomputed_layers
from clustertune.training import recompute
from tests.command import events, run
from tests.training.benches import Operations
from tests.training.conftest import RECIPE, SMALL

OWN = ["activation_checkpointing.ratio=0.5"]
TOKENS = torch.arange(24).reshape(2, 12)


def load(folder: Path, *, on: bool = True, **more: Any) -> Any:
    """The tiny model; ``on``: it recomputes its layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **more}).train()
    if on:
        model.activation_checkpointing_enable()
    return model


POLICIES: dict[str, tuple[float, tuple[str, ...], int, int]] = {
    "all": (1.0, (), 6, 1),  # the last product's result is not needed again: recomputation stops before it
    "attention": (1.0, ("attention",), 6, 0),
    "products": (1.0, ("matmul",), 0, 1),
    "torchtitan's": (1.0, ("attention", "every_second_matmul"), 3, 0),
    "of every second layer": (0.5, ("attention", "every_second_matmul"), 3, 0),
}
"""Ratio and policy, and how many of a recomputed layer's 7 products and of its attention run twice."""


def test_what_is_kept_is_not_computed_twice(tiny_model: Path) -> None:
    """Counted where operations run, below the policy; and the gradients are those of a model that keeps everything."""
    model = load(tiny_model, dtype=torch.bfloat16)
    layers = len(model.model.layers)

    def step(ratio: float, save: tuple[str, ...]) -> tuple[int, int, list[Any]]:
        model.zero_grad()
        model.activation_checkpointing_enable()
        assert recompute.choose_layers(model, ratio, save) == len(recomputed_layers(ratio, layers))
        with Operations() as seen:
            model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        products = sum(name in ("aten.mm.default", "aten.addmm.default") for name in seen.names)
        attention = sum("scaled_dot_product" in name and "backward" not in name for name in seen.names)
        return products, attention, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    *plain, gradients = step(0.0, ())
    for name, (ratio, save, *more) in POLICIES.items():
        *counted, found = step(ratio, save)
        again = len(recomputed_layers(ratio, layers))
        assert counted == [before + count * again for before, count in zip(plain, more, strict=True)], name
        assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True)), name


def test_random_numbers_that_would_not_come_again_are_refused(tiny_model: Path) -> None:
    """By the model's attention_dropout where its kernel, with its numbers, is kept."""
    model = load(tiny_model, attention_dropout=0.1)
    recompute.apply(model, resolve(RECIPE, ["activation_checkpointing.save=[every_second_matmul]"]))
    with pytest.raises(UserError, match=r"drops 0\.1 of its attention"):
        recompute.apply(model, resolve(RECIPE, ["activation_checkpointing.save=[attention]"]))


@pytest.mark.timeout(900)
@pytest.mark.jobs  # 34 s; tests/launch/test_recipes_slurm.py has recipes that do
def test_ranks_read_what_the_command_line_says(tmp_path: Path) -> None:
    """The run's own accelerate file, the ratio, and the bytes that the plan counts with are those of the real ranks."""
    words = [*SMALL, "train.max_steps=2", *OWN, "train.bf16=true", "train.model_init_kwargs={dtype: bfloat16}"]
    done = run("run", RECIPE, "--run-dir", tmp_path, "--to", "train", *words)
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "run.json").read_text())["distributed"]
    assert found["recomputed_layers"] == "2 of 4"
    planned, sizes = strategy(resolve(RECIPE, words)), {"bfloat16": 2, "float32": 4}
    held = {sizes[name]: count for name, count in found["dtypes"].items()}
    trained = found["trainable_parameters"]
    assert held == {planned.trained_bytes: trained, planned.weight_bytes: found["total_parameters"] - trained}
    assert planned.recompute.share == 0.5 and len(events(tmp_path, "step")) == 2
