"""Recomputation of a share of the layers, and a distribution changed on the command line, on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.plan.strategy import strategy
from clustertune.resolve.distribution import recomputed_layers
from clustertune.resolve.resolve import resolve
from tests.command import events, run
from tests.training.conftest import RECIPE, SMALL

OFF = "accelerate.fsdp_config.fsdp_activation_checkpointing=false"


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
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoModelForCausalLM

    from clustertune.training.recompute import choose_layers

    class Count(TorchDispatchMode):
        products = attention = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            self.products += name in ("aten.mm.default", "aten.addmm.default")
            self.attention += "scaled_dot_product" in name and "backward" not in name
            return func(*args, **(kwargs or {}))

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.train()
    tokens, layers = torch.arange(24).reshape(2, 12), len(model.model.layers)

    def step(ratio: float, save: tuple[str, ...]) -> tuple[Any, list[Any]]:
        model.zero_grad()
        model.activation_checkpointing_enable()
        assert choose_layers(model, ratio, save) == (len(recomputed_layers(ratio, layers)), layers)
        with Count() as counted:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return counted, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain, gradients = step(0.0, ())
    for name, (ratio, save, products, attention) in POLICIES.items():
        counted, found = step(ratio, save)
        again = len(recomputed_layers(ratio, layers))
        assert counted.products - plain.products == products * again, name
        assert counted.attention - plain.attention == attention * again, name
        assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True)), name


OWN = [OFF, "activation_checkpointing.ratio=0.5"]
DROPOUT = 0.3


def with_dropout(folder: Path, *, wrapped: bool) -> Any:
    """The tiny model with LoRA whose input is dropped; ``wrapped``: its layers as accelerate wraps them for FSDP2."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], lora_dropout=DROPOUT, init_lora_weights=False)
    model = get_peft_model(base, lora).train()
    for index, layer in enumerate(list(base.model.layers) if wrapped else []):
        base.model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
    return model


def gradients_of(model: Any) -> tuple[float, Any]:
    """Loss and all gradients of one batch, from the same random state."""
    import torch

    tokens = torch.arange(24).reshape(2, 12)
    torch.manual_seed(1)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return float(loss), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_what_is_computed_again_drops_the_same_values(tiny_model: Path) -> None:
    """accelerate wraps layers for FSDP2 without the random state: the loss is the same, its gradients are of another one."""
    from clustertune.training import recompute

    plain = gradients_of(with_dropout(tiny_model, wrapped=False))
    as_accelerate = gradients_of(with_dropout(tiny_model, wrapped=True))
    assert as_accelerate[0] == plain[0] and not as_accelerate[1].equal(plain[1]), "no longer needed: accelerate keeps it"
    model = with_dropout(tiny_model, wrapped=True)
    assert str(recompute.apply(model, resolve(RECIPE))) == "2 of 2"
    fixed = gradients_of(model)
    assert fixed[0] == plain[0] and fixed[1].equal(plain[1])


def test_random_numbers_that_would_not_come_again_are_refused(tiny_model: Path) -> None:
    """By name where the recipe asks for it; by the model's attention_dropout where its kernel, with its numbers, is kept."""
    import torch
    from transformers import AutoModelForCausalLM

    from clustertune.training import recompute

    with pytest.raises(UserError, match="preserve_rng_state is false"):
        resolve(RECIPE, [OFF, "train.activation_checkpointing_kwargs={preserve_rng_state: false}"])
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attention_dropout=0.1)
    model.activation_checkpointing_enable()
    recompute.apply(model, resolve(RECIPE, [OFF, "activation_checkpointing.save=[every_second_matmul]"]))
    with pytest.raises(UserError, match=r"drops 0\.1 of its attention"):
        recompute.apply(model, resolve(RECIPE, [OFF, "activation_checkpointing.save=[attention]"]))


def test_a_wrapper_within_a_wrapped_layer_is_no_layer(tiny_model: Path) -> None:
    """Under FSDP1 PEFT's policy has each matrix of an adapter wrapped too: the report said 18 of 2 layers."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from transformers.modeling_layers import GradientCheckpointingLayer

    from clustertune.training import recompute

    model = with_dropout(tiny_model, wrapped=False)
    names = ("lora_A.default", "lora_B.default")
    chosen = {id(m) for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer) or name.endswith(names)}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    assert str(recompute.inspect(model)) == "2 of 2"


def test_exactly_one_recomputes(tiny_model: Path) -> None:
    """Two at once compute every layer three times; none where one is asked for ends in a lack of memory."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from transformers import AutoModelForCausalLM

    from clustertune.training import recompute

    def prepared(*, on: bool, wrapped: bool) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        if on:
            model.activation_checkpointing_enable()
        if wrapped:
            kind = type(model.model.layers[0])
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
        return model

    def message(words: list[str], **made: bool) -> str:
        with pytest.raises(UserError) as caught:
            recompute.apply(prepared(**made), resolve(RECIPE, words))
        return caught.value.problems[0].message

    own, plain, by_fsdp = resolve(RECIPE, OWN), resolve(RECIPE, [OFF, "train.activation_checkpointing=true"]), resolve(RECIPE)
    assert str(recompute.apply(prepared(on=True, wrapped=False), own)) == "1 of 2"
    assert str(recompute.apply(prepared(on=True, wrapped=False), plain)) == "2 of 2"
    assert str(recompute.apply(prepared(on=False, wrapped=True), by_fsdp)) == "2 of 2"
    assert "twice" in message(OWN, on=True, wrapped=True)
    assert "recipe asks for none" in message([OFF, "train.activation_checkpointing=false"], on=True, wrapped=False)
    assert "wrapped no layer" in message([], on=False, wrapped=False)
    off = resolve(RECIPE, [OFF, "activation_checkpointing.ratio=0"])
    assert str(recompute.apply(prepared(on=False, wrapped=False), off)) == "0 of 2"


def test_the_word_of_trl_is_the_same_policy(tiny_model: Path) -> None:
    """Under PEFT, TRL's own way ends in an error of torch's, which does not know the word."""
    import torch
    from transformers import AutoModelForCausalLM

    from clustertune.training import build, recompute

    words = [OFF, "train.activation_checkpointing=true", "train.activation_checkpointing_kwargs={selective: true}"]
    resolved = resolve(RECIPE, words)
    for cuda in (False, True):
        assert build.fit_to_device(resolved.train_args, cuda=cuda).values["activation_checkpointing_kwargs"] == {}
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.activation_checkpointing_enable()
    recompute.apply(model, resolved)
    policies = [layer._gradient_checkpointing_func.keywords["context_fn"].args for layer in model.model.layers]
    assert policies == [(("attention",),)] * len(model.model.layers)


def test_a_model_without_such_layers_is_told() -> None:
    """Its flags would be set on nothing, and the plan would be wrong by most of the memory."""
    import torch

    from clustertune.training import recompute

    with pytest.raises(UserError) as caught:
        recompute.apply(torch.nn.Linear(2, 2), resolve(RECIPE, OWN))
    assert "no decoder layer" in caught.value.problems[0].message


@pytest.mark.timeout(900)
@pytest.mark.jobs  # 34 s; tests/launch/test_recipes_slurm.py has recipes that do
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
