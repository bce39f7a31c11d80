"""What attention over one packed row costs, by kernel: ``python -m tools.attention_kernels [--small]``.

The row holds conversations of different lengths, as packing leaves them; the shape is that of an 8-billion-parameter Llama (32
query heads, 8 of keys and values, 128 elements each). The reference is one conversation at a time, each causal, in float32. A
kernel that this machine lacks ends with a message. One JSON document on stdout: milliseconds, MiB, and the largest difference.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

LENGTHS = (4096, 2816, 640, 2048, 384, 3072, 1024, 2304)
"""16,384 tokens: four rows of 4,096."""
HEADS, KV_HEADS, SIZE = 32, 8, 128
TOLERANCE = 0.02
"""Of bfloat16's 8 bits, as a share of the largest value."""


def make(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value of one row, ``[1, heads, tokens, size]``."""
    torch.manual_seed(0)
    total = sum(lengths)
    shapes = [(1, heads, total, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def each_alone(lengths: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """One conversation at a time."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pieces = zip(q.split(lengths, dim=2), k.split(lengths, dim=2), v.split(lengths, dim=2), strict=True)
        return torch.cat(
            [F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True) for a, b, c in pieces], dim=2
        )

    return run


def numbers(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The conversation of each token."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))


def dense_mask(lengths: tuple[int, ...], device: torch.device) -> Callable[..., torch.Tensor]:
    """``scaled_dot_product_attention`` with a mask of tokens times tokens."""
    owner = numbers(lengths, device)
    mask = (owner[:, None] == owner[None, :]).tril()[None, None]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return run


def flex(lengths: tuple[int, ...], device: torch.device) -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled, over the blocks that hold anything."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    owner, total = numbers(lengths, device), sum(lengths)

    def seen(_b: Any, _h: Any, q: Any, k: Any) -> Any:
        return (owner[q] == owner[k]) & (q >= k)

    blocks = create_block_mask(seen, None, None, total, total, device=device)
    compiled = torch.compile(flex_attention)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = compiled(q, k, v, block_mask=blocks, enable_gqa=True)
        return found

    return run


def varlen(lengths: tuple[int, ...], device: torch.device) -> Callable[..., torch.Tensor]:
    """torch's kernel for sequences of different lengths (``torch.nn.attention.varlen``)."""
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    longest = max(lengths)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = [t[0].transpose(0, 1).repeat_interleave(HEADS // t.shape[1], dim=1) for t in (q, k, v)]
        try:
            found = varlen_attn(*rows, starts, starts, longest, longest, is_causal=True)
        except TypeError:  # torch 2.11 has a window in its place
            found = varlen_attn(*rows, starts, starts, longest, longest, window_size=(-1, 0))
        return found.transpose(0, 1)[None]

    return run


def flash_attn(lengths: tuple[int, ...], device: torch.device) -> Callable[..., torch.Tensor]:
    """The package flash-attn."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    longest = max(lengths)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = [t[0].transpose(0, 1) for t in (q, k, v)]
        return flash_attn_varlen_func(*rows, starts, starts, longest, longest, causal=True).transpose(0, 1)[None]

    return run


def measure(
    kernel: Callable[..., torch.Tensor], inputs: list[torch.Tensor], want: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """Milliseconds of the forward and the backward pass, medians; the peak of memory; the difference from ``want``."""
    device = inputs[0].device
    cuda = device.type == "cuda"

    def clock() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    found: dict[str, Any] = {}
    out = kernel(*inputs)  # compiles
    found["apart"] = float((out.detach().float() - want).abs().max() / want.abs().max())
    found["wrong"] = not found["apart"] <= TOLERANCE
    grad = torch.ones_like(out)
    try:
        torch.autograd.grad(out, inputs, grad)
        backward = True
    except RuntimeError as error:
        backward, found["why"] = False, f"no backward pass: {str(error).splitlines()[0][:120]}"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times: dict[str, list[float]] = {"forward_ms": [], "backward_ms": []}
    for _ in range(repeats):
        began = clock()
        out = kernel(*inputs)
        middle = clock()
        times["forward_ms"].append(1e3 * (middle - began))
        if backward:
            torch.autograd.grad(out, inputs, grad)
            times["backward_ms"].append(1e3 * (clock() - middle))
    if cuda:
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found | {key: sorted(values)[len(values) // 2] for key, values in times.items() if values}


def main() -> None:
    """Measure every kernel."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    lengths = tuple(n // 64 for n in LENGTHS) if "--small" in sys.argv else LENGTHS
    inputs = make(lengths, device, torch.bfloat16 if cuda else torch.float32)
    with torch.no_grad():
        want = each_alone(lengths)(*(t.detach().float() for t in inputs))
    rows: dict[str, Any] = {}
    kernels: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
        "each conversation alone": lambda: each_alone(lengths),
        "dense mask": lambda: dense_mask(lengths, device),
        "flex_attention": lambda: flex(lengths, device),
        "varlen_attn": lambda: varlen(lengths, device),
        "flash-attn": lambda: flash_attn(lengths, device),
    }
    for name, make_kernel in kernels.items():
        try:
            rows[name] = measure(make_kernel(), inputs, want, 10 if cuda else 2)
        except Exception as error:  # one kernel must not stop the others
            rows[name] = {"why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"}
    sys.stdout.write(json.dumps({"torch": torch.__version__, "tokens": sum(lengths), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
