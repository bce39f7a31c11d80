"""Recomputation of decoder layers: ``activation_checkpointing`` of a recipe, and whether it is the only one at work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from clustertune.errors import Problem, UserError
from clustertune.recipe.sections import ActivationCheckpointing
from clustertune.resolve.resolved import Resolved, recomputed_layers

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""The operations that scaled_dot_product_attention becomes, one for each kind of kernel."""
_MATMUL = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
"""What linear layers become, with a bias and without, and experts' and float8 ones. Not ``bmm``: a batched product here is one
of scores, which are larger than all else."""


def _overloads(names: Sequence[str]) -> frozenset[Any]:
    """The default overloads of those that this build of torch has."""
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


def is_attention(operator: Any, known: frozenset[Any]) -> bool:
    """Whether an operation is an attention kernel: torch's (``known``), or by its name."""
    # flash-attn and the kernels from the Hub register under names such as _flash_attn2_cuda_f12afc9::varlen_fwd, torch its
    # variable-length attention as torch_attn::_varlen_attn.
    name = str(operator)
    return operator in known or "flash_attn" in name or name.startswith(("flex_attention", "torch_attn._varlen_attn"))


def make_policy(save: Sequence[str]) -> Callable[..., CheckpointPolicy]:
    """Make the selective-checkpointing policy of one forward pass. It counts products, so each pass needs its own.

    torch calls it for every operation of a checkpointed forward pass below autograd, compiled or not, and keeps the results
    that it names (``torch.utils.checkpoint.create_selective_checkpoint_contexts``). Kernels that are not operations of torch
    are recomputed.
    """
    attention, products = _overloads(_ATTENTION), _overloads(_MATMUL)
    # Counted as torchtitan does: of the products the first is kept, the second is not.
    step = 1 if "matmul" in save else 2 if "every_second_matmul" in save else 0
    seen = 0

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
        nonlocal seen
        must_save = False
        if operator in products:
            seen += 1
            must_save = step > 0 and seen % step == 1 % step
        elif "attention" in save:
            must_save = is_attention(operator, attention)
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _contexts(save: tuple[str, ...]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(make_policy(save))
    return contexts


def layers_of(model: Any) -> list[Any]:
    """The decoder layers of a model, whatever is wrapped around it."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def choose_layers(model: Any, ratio: float, save: Sequence[str] = ()) -> int:
    """Leave recomputation on for ``ratio`` of a model's decoder layers, spread evenly. Returns for how many.

    The Trainer has switched it on for all of them by then; each layer reads its own flag in every forward pass
    (transformers/modeling_layers.py:93), whatever FSDP, DeepSpeed or DDP has wrapped around it. ``save``: what these keep.
    """
    layers = layers_of(model)
    chosen = set(recomputed_layers(ratio, len(layers)))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen
        if save and index in chosen:
            recompute = layer._gradient_checkpointing_func
            # A partial of a function of this module: torch.compile reads through it.
            layer._gradient_checkpointing_func = functools.partial(
                recompute, context_fn=functools.partial(_contexts, tuple(save))
            )
    return len(chosen)


def apply(model: Any, resolved: Resolved) -> str:
    """Set what the recipe asks for in a model that the Trainer has prepared, and look what is really at work: ``16 of 32``
    decoder layers are recomputed (``gradient_checkpointing`` of the layer).

    Raises UserError where that is another share.
    """
    section = resolved.recipe.activation_checkpointing or ActivationCheckpointing()
    on = bool(resolved.train_args["activation_checkpointing"])
    save = resolved.distribution.recompute.save
    count = choose_layers(model, section.ratio, save) if on else 0
    layers = layers_of(model)
    recomputed = sum(bool(layer.gradient_checkpointing) for layer in layers)
    dropped = getattr(getattr(model, "config", None), "attention_dropout", None)
    if recomputed and dropped and "attention" in save:
        # Dropout behind the kept kernel would get the random numbers that the kernel took in the first pass.
        text = f"save has attention, and the model drops {dropped:g} of its attention: other values would be dropped again"
        fix: str | None = "leave attention out of activation_checkpointing.save"
    elif on and not layers:
        text = f"{type(model).__name__} has no decoder layer that recomputes its activations, and the recipe asks for it"
        fix = "activation_checkpointing.ratio=0"
    elif count != recomputed:
        text, fix = f"{recomputed} layers are recomputed, and the recipe asks for {count} of {len(layers)}", None
    else:
        return f"{recomputed} of {len(layers)}"
    raise UserError(Problem(text, key="activation_checkpointing", fix=fix))
