"""Recomputation of decoder layers: ``activation_checkpointing`` of a recipe, and whether it is the only one at work."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers.modeling_layers import GradientCheckpointingLayer

from clustertune.config import derive, recomputation
from clustertune.config.resolved import Resolved
from clustertune.errors import Problem, UserError
from clustertune.training.recompute_ops import context_function


@dataclass(frozen=True)
class Recomputed:
    """How many of a model's decoder layers are recomputed, and by what."""

    layers: int
    by_model: int
    """Layers that transformers recomputes (``gradient_checkpointing`` of the layer)."""
    by_wrapper: int
    """Layers inside a wrapper of torch's, which accelerate's ``fsdp_activation_checkpointing`` puts around them.

    Under FSDP1 PEFT's policy has each matrix of an adapter wrapped as well: what lies in a wrapped layer is not counted."""

    def __str__(self) -> str:
        count = max(self.by_model, self.by_wrapper)
        return f"{count} of {self.layers}"


def choose_layers(model: Any, ratio: float, save: Sequence[str] = ()) -> tuple[int, int]:
    """Leave recomputation on for ``ratio`` of a model's decoder layers, spread evenly. Returns how many, and of how many.

    The Trainer has switched it on for all of them by then; each layer reads its own flag in every forward pass
    (transformers/modeling_layers.py:93), whatever FSDP, DeepSpeed or DDP has wrapped around it. ``save``: what these keep.
    """
    layers = _layers(model)
    chosen = set(derive.recomputed_layers(ratio, len(layers)))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen
    _keep(layers, save)
    return len(chosen), len(layers)


def _keep(layers: Sequence[Any], save: Sequence[str]) -> None:
    """Have the layers that are recomputed keep some results."""
    for layer in layers if save else ():
        if layer.gradient_checkpointing:
            recompute = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = functools.partial(recompute, context_fn=context_function(save))


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def inspect(model: Any) -> Recomputed:
    """What is at work in a model that is ready to train."""
    layers = _layers(model)
    wrappers = _wrappers(model)
    within = {id(inner) for wrapper in wrappers for inner in wrapper._checkpoint_wrapped_module.modules()}
    outer = sum(id(wrapper) not in within for wrapper in wrappers)
    return Recomputed(len(layers), sum(bool(layer.gradient_checkpointing) for layer in layers), outer)


def _wrappers(model: Any) -> list[CheckpointWrapper]:
    return [module for module in model.modules() if isinstance(module, CheckpointWrapper)]


def _draw_the_same_again(model: Any) -> None:
    """Have wrapped layers drop the same values when they are computed again.

    accelerate 1.15 wraps them for FSDP2 with ``preserve_rng_state=False`` (utils/fsdp_utils.py:722): the gradients of a layer
    with dropout would then belong to another forward pass. torch's default costs a copy of the generators' states per layer.
    """
    for wrapper in _wrappers(model):
        wrapper.checkpoint_fn = functools.partial(wrapper.checkpoint_fn, preserve_rng_state=True)


def apply(model: Any, resolved: Resolved) -> Recomputed:
    """Set what the recipe asks for in a model that the Trainer has prepared, and look what is really at work.

    Raises UserError where that is another share, by another means, or by two at once.
    """
    section = resolved.recipe.activation_checkpointing
    on = bool(resolved.train_args.get("activation_checkpointing"))
    save = recomputation.saved(section, resolved.train_args)
    if on and section is not None:
        choose_layers(model, section.ratio, save)
    elif on:
        _keep(_layers(model), save)
    _draw_the_same_again(model)
    found = inspect(model)
    by_fsdp = derive.by_fsdp(resolved.accelerate)
    wanted = len(derive.recomputed_layers(section.ratio, found.layers)) if section is not None and on else None
    dropped = getattr(getattr(model, "config", None), "attention_dropout", None)
    if found.by_model and dropped and "attention" in save:
        # Dropout behind the kept kernel would get the random numbers that the kernel took in the first pass.
        text = f"save has attention, and the model drops {dropped:g} of its attention: other values would be dropped again"
        fix = "leave attention out of activation_checkpointing.save"
    elif found.by_model and found.by_wrapper:
        text = f"{found.by_wrapper} layers are recomputed by FSDP's wrapper and {found.by_model} by the model: twice"
        fix = "keep one: accelerate.fsdp_config.fsdp_activation_checkpointing, or activation_checkpointing"
    elif on and not found.by_model:
        text = f"{type(model).__name__} has no decoder layer that recomputes its activations, and the recipe asks for it"
        fix = "activation_checkpointing.ratio=0, or accelerate.fsdp_config.fsdp_activation_checkpointing=true under FSDP"
    elif by_fsdp and not found.by_wrapper:
        text = "accelerate has wrapped no layer, and fsdp_activation_checkpointing is true"
        fix = "look at fsdp_transformer_layer_cls_to_wrap in the accelerate file"
    elif not on and found.by_model:
        text, fix = f"{found.by_model} layers are recomputed by the model, and the recipe asks for none", None
    elif wanted is not None and wanted != found.by_model:
        text, fix = f"{found.by_model} layers are recomputed, and the recipe asks for {wanted} of {found.layers}", None
    else:
        return found
    raise UserError(Problem(text, key="activation_checkpointing", fix=fix))
