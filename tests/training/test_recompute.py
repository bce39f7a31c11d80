"""Recomputation of a share of the layers: what is kept, what is dropped again, and that nothing recomputes twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from clustertune.errors import UserError
from clustertune.plan.strategy import strategy
from clustertune.resolve.distribution import recomputed_layers
from clustertune.resolve.resolve import resolve
from clustertune.training import build, recompute
from tests.command import events, run
from tests.training.benches import Operations
from tests.training.conftest import RECIPE, SMALL

OFF = "accelerate.fsdp_config.fsdp_activation_checkpointing=false"
OWN = [OFF, "activation_checkpointing.ratio=0.5"]
TOKENS = torch.arange(24).reshape(2, 12)


def load(folder: Path, *, on: bool = True, wrapped: bool = False, **more: Any) -> Any:
    """The tiny model, recomputed by itself (``on``), its layers ``wrapped`` as accelerate does."""
    model = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **more}).train()
    if on:
        model.activation_checkpointing_enable()
    if wrapped:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, GradientCheckpointingLayer))
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
        assert recompute.choose_layers(model, ratio, save) == (len(recomputed_layers(ratio, layers)), layers)
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


def with_dropout(folder: Path, *, wrapped: bool) -> Any:
    """The tiny model with LoRA whose input is dropped; ``wrapped``: its layers as accelerate wraps them for FSDP2."""
    torch.manual_seed(0)
    base = load(folder, on=False)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], lora_dropout=0.3, init_lora_weights=False)
    model = get_peft_model(base, lora).train()
    for index, layer in enumerate(list(base.model.layers) if wrapped else []):
        base.model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
    return model


def gradients_of(model: Any) -> tuple[float, Any]:
    """Loss and all gradients of one batch, from the same random state."""
    torch.manual_seed(1)
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    return float(loss), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_what_is_computed_again_drops_the_same_values(tiny_model: Path) -> None:
    """accelerate wraps layers for FSDP2 without the random state: the loss is the same, its gradients are of another one."""
    plain, as_accelerate = (gradients_of(with_dropout(tiny_model, wrapped=wrapped)) for wrapped in (False, True))
    assert as_accelerate[0] == plain[0] and not as_accelerate[1].equal(plain[1]), "no longer needed: accelerate keeps it"
    model = with_dropout(tiny_model, wrapped=True)
    assert str(recompute.apply(model, resolve(RECIPE))) == "2 of 2"
    fixed = gradients_of(model)
    assert fixed[0] == plain[0] and fixed[1].equal(plain[1])


def test_random_numbers_that_would_not_come_again_are_refused(tiny_model: Path) -> None:
    """By name where the recipe asks for it; by the model's attention_dropout where its kernel, with its numbers, is kept."""
    with pytest.raises(UserError, match="preserve_rng_state is false"):
        resolve(RECIPE, [OFF, "train.activation_checkpointing_kwargs={preserve_rng_state: false}"])
    model = load(tiny_model, attention_dropout=0.1)
    recompute.apply(model, resolve(RECIPE, [OFF, "activation_checkpointing.save=[every_second_matmul]"]))
    with pytest.raises(UserError, match=r"drops 0\.1 of its attention"):
        recompute.apply(model, resolve(RECIPE, [OFF, "activation_checkpointing.save=[attention]"]))


@pytest.mark.parametrize(
    ("words", "on", "wrapped", "found"),
    [
        (OWN, True, False, "1 of 2"),
        ([OFF, "train.activation_checkpointing=true"], True, False, "2 of 2"),
        ([], False, True, "2 of 2"),
        ([OFF, "activation_checkpointing.ratio=0"], False, False, "0 of 2"),
        (OWN, True, True, "twice"),
        ([OFF, "train.activation_checkpointing=false"], True, False, "recipe asks for none"),
        ([], False, False, "wrapped no layer"),
        (OWN, None, False, "no decoder layer"),
    ],
)
def test_exactly_one_recomputes(words: list[str], on: bool | None, wrapped: bool, found: str, tiny_model: Path) -> None:
    """Two at once compute every layer three times; none where one is asked for ends in a lack of memory."""
    model = load(tiny_model, on=on, wrapped=wrapped) if on is not None else torch.nn.Linear(2, 2)
    if found.endswith("of 2"):
        assert str(recompute.apply(model, resolve(RECIPE, words))) == found
        return
    with pytest.raises(UserError, match=found):
        recompute.apply(model, resolve(RECIPE, words))


def test_the_word_of_trl_is_the_same_policy(tiny_model: Path) -> None:
    """Under PEFT, TRL's own way ends in an error of torch's, which does not know the word."""
    words = [OFF, "train.activation_checkpointing=true", "train.activation_checkpointing_kwargs={selective: true}"]
    resolved = resolve(RECIPE, words)
    for cuda in (False, True):
        assert build.fit_to_device(resolved.train_args, cuda=cuda).values["activation_checkpointing_kwargs"] == {}
    model = load(tiny_model)
    recompute.apply(model, resolved)
    policies = [layer._gradient_checkpointing_func.keywords["context_fn"].args for layer in model.model.layers]
    assert policies == [(("attention",),)] * len(model.model.layers)


@pytest.mark.timeout(900)
@pytest.mark.jobs  # 34 s; tests/launch/test_recipes_slurm.py has recipes that do
def test_ranks_read_what_the_command_line_says(tmp_path: Path) -> None:
    """The run's own accelerate file, the ratio, and the bytes that the plan counts with are those of the real ranks."""
    words = [*SMALL, "train.max_steps=2", *OWN, "train.bf16=true", "train.model_init_kwargs={dtype: bfloat16}"]
    done = run("run", RECIPE, "--run-dir", tmp_path, "--to", "train", *words)
    assert done.code == 0, done.err
    assert "fsdp_activation_checkpointing: false" in (tmp_path / "accelerate.yaml").read_text()
    found = json.loads((tmp_path / "run.json").read_text())["distributed"]
    assert found["recomputed_layers"] == "2 of 4"
    planned, sizes = strategy(resolve(RECIPE, words)), {"bfloat16": 2, "float32": 4}
    held = {sizes[name]: count for name, count in found["dtypes"].items()}
    trained = found["trainable_parameters"]
    assert held == {planned.trained_bytes: trained, planned.weight_bytes: found["total_parameters"] - trained}
    assert planned.recompute.share == 0.5 and len(events(tmp_path, "step")) == 2
