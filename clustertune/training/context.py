"""Context parallelism: each rank of a group holds a part of every sequence, and attends to the keys and values of all.

torch's own context parallelism (which accelerate uses) rewrites three CUDA kernels of scaled_dot_product_attention and
knows none of the CPU. Here keys and values are gathered over the group before an attention that is an ordinary one, as in
Llama 3's training (arXiv 2407.21783, section 3.3.2): the same program with gloo and with NCCL, and exact.

A sequence is cut into 2 N pieces, and rank r has pieces r and 2 N - 1 - r, so that all ranks have the same number of
query-key pairs under the causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "clustertune_context"
"""The attention implementation's name in transformers' registry."""


def pieces_of(rank: int, size: int) -> tuple[int, int]:
    """The two of ``2 * size`` pieces that a rank holds."""
    return rank, 2 * size - 1 - rank


def in_order(size: int) -> list[int]:
    """Where each piece, in the order of the sequence, lies among those gathered rank by rank."""
    gathered = [piece for rank in range(size) for piece in pieces_of(rank, size)]
    return [gathered.index(piece) for piece in range(2 * size)]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    group: Any,
    rank: int,
    size: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,  # noqa: ARG001 - what other implementations take
) -> tuple[torch.Tensor, None]:
    """Causal attention of this rank's queries to the keys of the whole sequence; an implementation for transformers.

    Shapes: ``query`` [batch, heads, length / size, head_dim], ``key`` and ``value`` the same with the key-value heads.
    Returns [batch, length / size, heads, head_dim]. Padding stands behind every real token, which it cannot be seen from.
    """
    assert attention_mask is None
    repeats = query.shape[1] // key.shape[1]
    whole = []
    for tensor in (key, value):
        gathered = all_gather_tensor_autograd(tensor.contiguous(), 2, group)
        pieces = gathered.chunk(2 * size, dim=2)
        ordered = torch.cat([pieces[at] for at in in_order(size)], dim=2)
        whole.append(ordered.repeat_interleave(repeats, dim=1) if repeats > 1 else ordered)
    length = query.shape[2] // 2
    chance = dropout if module.training else 0.0
    outputs = []
    for part, piece in zip(query.chunk(2, dim=2), pieces_of(rank, size), strict=True):
        keys, values = (tensor[:, :, : (piece + 1) * length] for tensor in whole)
        # The queries are the last of the keys' positions: flash attention knows this mask and needs no tensor for it.
        mask = causal_lower_right(length, keys.shape[2])
        outputs.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=mask, dropout_p=chance, scale=scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def install(model: Any, mesh: Any) -> None:
    """Let a transformers model attend over the ranks of the one-dimensional ``mesh``."""
    settings = {"group": mesh.get_group(), "rank": mesh.get_local_rank(), "size": mesh.size()}
    AttentionInterface.register(NAME, partial(attend, **settings))
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # noqa: ARG005
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(NAME)


def share_of(inputs: Mapping[str, Any], rank: int, size: int, pad_token: int) -> dict[str, Any]:
    """This rank's part of a batch: ``input_ids``, ``attention_mask`` and, made here, ``position_ids`` and ``shift_labels``.

    The labels are moved before the cut, as the last token of a piece is followed by the first of another rank's. Sequences
    are padded to a multiple of ``2 * size``.
    """
    length = inputs["input_ids"].shape[1]
    lacking = -length % (2 * size)
    fill = {"input_ids": pad_token, "attention_mask": 0, "labels": -100}
    values = {key: F.pad(tensor, (0, lacking), value=fill[key]) for key, tensor in inputs.items() if key in fill}
    positions = torch.arange(length + lacking, device=inputs["input_ids"].device)
    values["position_ids"] = positions.expand(inputs["input_ids"].shape[0], -1)
    if "labels" in values:
        values["shift_labels"] = F.pad(values.pop("labels"), (0, 1), value=-100)[:, 1:]

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        pieces = tensor.chunk(2 * size, dim=1)
        return torch.cat([pieces[piece] for piece in pieces_of(rank, size)], dim=1).contiguous()

    return {**{key: value for key, value in inputs.items() if key not in fill}, **{k: mine(v) for k, v in values.items()}}
