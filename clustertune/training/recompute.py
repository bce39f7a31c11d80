"""Recomputation of a share of the decoder layers: ``activation_checkpointing.ratio`` of a recipe."""

from __future__ import annotations

from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from clustertune.config.derive import recomputed_layers


def choose_layers(model: Any, ratio: float) -> tuple[int, int]:
    """Leave recomputation on for ``ratio`` of a model's decoder layers, spread evenly. Returns how many, and of how many.

    The Trainer has switched it on for all of them by then; each layer reads its own flag in every forward pass
    (transformers/modeling_layers.py:93), whatever FSDP, DeepSpeed or DDP has wrapped around it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    chosen = set(recomputed_layers(ratio, len(layers)))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen
    return len(chosen), len(layers)
