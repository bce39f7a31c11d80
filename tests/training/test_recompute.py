"""Recomputation of a share of the layers, and a distribution changed on the command line, on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune.config.derive import recomputed_layers
from clustertune.config.resolve import resolve
from clustertune.plan.strategy import strategy
from tests.command import events, run
from tests.training.conftest import RECIPE, SMALL

OFF = "accelerate.fsdp_config.fsdp_activation_checkpointing=false"


def test_only_the_chosen_layers_run_twice(tiny_model: Path) -> None:
    """And nothing else changes: the gradients are those of a model that keeps all activations."""
    import torch
    from transformers import AutoModelForCausalLM

    from clustertune.training.recompute import choose_layers

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.train()
    layers = model.model.layers
    calls = [0] * len(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    tokens = torch.arange(12).reshape(1, 12)
    found = {}
    for ratio in (0.0, 0.5, 1.0):
        model.zero_grad()
        calls[:] = [0] * len(layers)
        model.activation_checkpointing_enable()
        chosen = recomputed_layers(ratio, len(layers))
        assert choose_layers(model, ratio) == (len(chosen), len(layers))
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert calls == [2 if index in chosen else 1 for index in range(len(layers))]
        found[ratio] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for ratio in (0.5, 1.0):
        assert all(torch.equal(a, b) for a, b in zip(found[0.0], found[ratio], strict=True))


@pytest.mark.timeout(900)
def test_ranks_read_what_the_command_line_says(tmp_path: Path) -> None:
    """The run's own accelerate file, the ratio, and the bytes that the plan counts with are those of the real ranks."""
    words = [*SMALL, "train.max_steps=2", OFF, "activation_checkpointing.ratio=0.5", "train.bf16=true"]
    words += ["train.model_init_kwargs={dtype: bfloat16}"]
    done = run("run", RECIPE, "--run-dir", tmp_path, "--to", "train", *words)
    assert done.code == 0, done.err
    assert "fsdp_activation_checkpointing: false" in (tmp_path / "accelerate.yaml").read_text()
    found = json.loads((tmp_path / "run.json").read_text())["distributed"]
    assert found["recomputed_layers"] == "2 of 4"
    planned = strategy(resolve(RECIPE, words))
    sizes = {"bfloat16": 2, "float32": 4}
    held = {sizes[name]: count for name, count in found["dtypes"].items()}
    trained = found["trainable_parameters"]
    assert held == {planned.trained_bytes: trained, planned.weight_bytes: found["total_parameters"] - trained}
    assert planned.checkpointed == 0.5 and len(events(tmp_path, "step")) == 2
