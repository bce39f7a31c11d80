"""Attention over packed conversations, each for itself, and the check that a packed batch keeps its conversations apart.

``packed_varlen`` is an attention implementation of transformers: torch's variable-length attention, whose CUDA kernel comes
with torch itself (``torch.nn.attention.varlen``). It takes where each conversation begins, and computes the causal half of
each. transformers' sdpa computes the whole square of a micro batch under a mask instead, as its fast kernel takes no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from clustertune.resolve.kernels import PACKED

_sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
_ARGUMENTS = inspect.signature(varlen.varlen_attn).parameters


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    position_ids: Tensor | None = None,
    *,
    types: Collection[torch.dtype],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each conversation; an implementation for transformers. Padded rows and generation go to sdpa.

    ``types``: what torch's kernel computes in here; in another one each conversation is a call of sdpa.

    Shapes: ``query`` [batch, heads, tokens, size], ``key`` and ``value`` the same with the key-value heads. ``cu_seq_lens_q``
    [conversations + 1], int32: where each one begins in the rows laid end to end, as TRL's collator counts them; without them
    it is where ``position_ids`` [batch, tokens] begin again. Returns [batch, tokens, heads, size].
    """
    batch, _, tokens, _ = query.shape
    if attention_mask is not None or tokens != key.shape[2] or not getattr(module, "is_causal", True):
        return _sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    begins = cu_seq_lens_q
    if begins is None and position_ids is not None and position_ids.ndim == 2 and tokens > 1:
        begins, max_length_q = _begins(position_ids.expand(batch, -1))
    if begins is None and (sliding_window is None or sliding_window >= tokens):
        return _sdpa(module, query, key, value, None, dropout, scaling, **kwargs)
    if begins is None:
        begins = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
        max_length_q = tokens
    if dropout or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError(f"{PACKED} computes no dropout, no soft cap and no sinks of attention: use attn_implementation: eager")
    flat = [tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (query, key, value)]
    if torch.is_autocast_enabled(query.device.type):  # sdpa is on autocast's list; an operation of its own is not
        flat = [tensor.to(torch.get_autocast_dtype(query.device.type)) for tensor in flat]
    before = -1 if sliding_window is None else sliding_window - 1
    if flat[0].dtype in types:
        longest = int(begins.diff().max()) if max_length_q is None else max_length_q
        heads = grouped(query.shape[1] != key.shape[1])
        result: Any = varlen.varlen_attn(
            *flat, begins, begins, longest, longest, scale=scaling, window_size=(before, 0), **heads
        )
    else:
        result = _one_by_one(begins, *flat, scale=scaling, before=before)
    return result.unflatten(0, (batch, tokens)), None


def grouped(fewer: bool) -> dict[str, bool]:
    """What tells torch's operation of fewer key-value heads; torch 2.11 has no such argument and takes them unasked."""
    return {"enable_gqa": fewer} if "enable_gqa" in _ARGUMENTS else {}


def _begins(positions: Tensor) -> tuple[Tensor | None, int | None]:
    """Where conversations begin in the rows of ``positions`` laid end to end, and the longest; None where each row is one."""
    first = torch.ones_like(positions, dtype=torch.bool)
    first[:, 1:] = positions.diff() != 1
    begins = F.pad(first.flatten().nonzero().flatten(), (0, 1), value=positions.numel()).to(torch.int32)
    if begins.numel() == len(positions) + 1:
        return None, None
    return begins, int(begins.diff().max())


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask where :func:`attend` finds the conversations itself; sdpa's for padded rows, with a cache, and any other kind."""
    plain = kwargs.get("attention_mask") is None and kwargs["q_length"] == kwargs["kv_length"] and not kwargs.get("use_vmap")
    if plain and "allow_is_bidirectional_skip" not in kwargs:
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def _one_by_one(begins: Tensor, *flat: Tensor, scale: float | None, before: int) -> Tensor:
    """The same without torch's kernel, in any type and on any GPU: conversation by conversation."""
    outputs = [
        F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **_band(q, before))
        for q, k, v in _each(begins, *flat)
    ]
    return torch.cat([out[0].transpose(0, 1) for out in outputs])


def _each(begins: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors [tokens, heads, size] cut into conversations, as [1, heads, tokens, size]."""
    sizes = begins.diff().tolist()
    for parts in zip(*(tensor.split(sizes) for tensor in tensors), strict=True):
        yield tuple(part.transpose(0, 1).unsqueeze(0) for part in parts)


def _band(query: Tensor, window: int) -> dict[str, Any]:
    """What sdpa takes for a window of ``window`` tokens before each one (-1: all): a mask where not all are within it."""
    tokens = query.shape[2]
    if window < 0 or window >= tokens - 1:
        return {"is_causal": True}
    hidden = torch.full((tokens, tokens), float("-inf"), dtype=query.dtype, device=query.device)
    return {"is_causal": False, "attn_mask": hidden.triu(1) + hidden.tril(-window - 1)}


def register() -> None:
    """Make ``packed_varlen`` known to transformers; before a model is built."""
    types = [torch.bfloat16, torch.float16]
    if not torch.cuda.is_available():
        types += [torch.float32, torch.float64]  # by the kernel below
    elif torch.cuda.get_device_capability() < (8, 0):
        types = []  # FlashAttention 2 begins with Ampere
    AttentionInterface.register(PACKED, partial(attend, types=frozenset(types)))
    AttentionMaskInterface.register(PACKED, _mask)


# -- the CPU kernel of torch's operation ----------------------------------------------------------------------------------


def _wide(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")  # type: ignore[untyped-decorator]
def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,  # noqa: ARG001
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None, *args: Any, **kwargs: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """torch has no CPU kernel for its variable-length attention: this one attends conversation by conversation. Causal only."""
    left, right = window_size or (-1, -1)
    assert right == 0, "causal attention"
    outputs = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _wide(k, q.shape[1]), _wide(v, q.shape[1]), scale=scale, **_band(q, left)
        )
        for q, k, v in _each(cu_seq_q, query, key, value)
    ]
    out = torch.cat([out[0].transpose(0, 1) for out, _ in outputs])
    return out, torch.cat([lse[0] for _, lse in outputs], dim=-1), torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")  # type: ignore[untyped-decorator]
def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,  # noqa: ARG001
    max_q: int, max_k: int, is_causal: bool, rng_state: Tensor, scale: float | None = None,  # noqa: ARG001
    window_size: list[int] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of query, key and value; those of a group of heads are added up."""
    left = (window_size or (-1, -1))[0]
    heads, held = query.shape[1], key.shape[1]
    parts: list[list[Tensor]] = [[], [], []]
    for grad, q, k, v, o, sums in _each(cu_seq_q, grad_out, query, key, value, out, lse.transpose(0, 1).unsqueeze(-1)):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, _wide(k, heads), _wide(v, heads), o, sums.squeeze(-1), 0.0, scale=scale, **_band(q, left)
        )
        for index, tensor in enumerate(gradients):
            gradient = tensor if index == 0 else tensor.unflatten(1, (held, -1)).sum(2)
            parts[index].append(gradient[0].transpose(0, 1))
    return tuple(torch.cat(tensors) for tensors in parts)


# -- the check ------------------------------------------------------------------------------------------------------------


def is_isolated(small_architecture: Mapping[str, Any], attention: str) -> bool:
    """True where the logits of a conversation do not depend on the one packed in front of it.

    A model of the same class, two layers small, sees a conversation alone and packed behind another one. It runs where
    training runs (FlashAttention needs the GPU) and leaves the random state as it was. ``attention`` is transformers'
    ``attn_implementation``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from clustertune.training import deepspeed_engine

    register()
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    # TF32 rounds what float32 products read to 10 bits, as far as the difference that is looked for; float64 is left alone.
    # On a GPU flex_attention is a kernel of Triton's for 16 and 32 bits.
    half = "flash" in attention or (attention in (PACKED, "flex_attention") and device.type == "cuda")
    dtype = torch.bfloat16 if half else torch.float64
    skipped = ("architectures", "model_type", "dtype", "torch_dtype")
    keys = {key: value for key, value in small_architecture.items() if key not in skipped}
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        config = AutoConfig.for_model(small_architecture["model_type"], **keys)
        with deepspeed_engine.whole_models():
            # The grouped product of experts takes no float64.
            kernels = {"attn_implementation": attention, "experts_implementation": "eager"}
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kernels).to(device).eval()
        tokens = torch.randint(10, int(config.vocab_size), (3, 12)).tolist()
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

        def last_logits(*conversations: list[int]) -> Any:
            row = {"input_ids": [t for c in conversations for t in c], "seq_lengths": [len(c) for c in conversations]}
            batch = {key: value.to(device) if hasattr(value, "to") else value for key, value in collate([row]).items()}
            batch.pop("labels")
            return model(**batch, use_cache=False).logits[0, -len(conversations[-1]) :].double()

        alone, behind_one, behind_other = (last_logits(*c) for c in (tokens[2:], tokens[0::2], tokens[1:]))
    # bf16 keeps 8 bits: two decimal places separate its rounding from attention to another conversation.
    tolerance = (2e-2 if half else 1e-4) * float(alone.abs().max())
    return max(float((alone - other).abs().max()) for other in (behind_one, behind_other)) <= tolerance
