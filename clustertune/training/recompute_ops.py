"""What a recomputed layer keeps beside its input: ``activation_checkpointing.save`` as torch's selective checkpointing.

A policy sees every operation of a checkpointed forward pass below autograd, compiled or not, and says which results are kept
(``torch.utils.checkpoint.create_selective_checkpoint_contexts``). Kernels that are no operations of torch are recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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
    """The policy of one forward pass: it counts products, so that each pass needs its own."""
    attention, products = _overloads(_ATTENTION), _overloads(_MATMUL)
    # Counted as torchtitan does: of the products the first is kept, the second is not.
    step = 1 if "matmul" in save else 2 if "every_second_matmul" in save else 0
    seen = 0

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
        nonlocal seen
        kept = False
        if operator in products:
            seen += 1
            kept = step > 0 and seen % step == 1 % step
        elif "attention" in save:
            kept = is_attention(operator, attention)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _contexts(save: tuple[str, ...]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(make_policy(save))
    return contexts


def context_function(save: Sequence[str]) -> functools.partial[Any]:
    """What ``torch.utils.checkpoint.checkpoint`` takes as its ``context_fn``; a partial, which torch.compile reads through."""
    return functools.partial(_contexts, tuple(save))
