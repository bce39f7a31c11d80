"""CPU seconds of one layer's attention over packed conversations, under sdpa's mask and each for itself.

``python -m tests.training.measure_packing``: forward and backward, 4,096 tokens, 8 heads of 64, float32, the two in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from clustertune.training.packing import attend

HEADS, SIZE, ROUNDS = 8, 64, 7
CASES = {
    "five of 776 and one of 216": [776] * 5 + [216],
    "one of 4,096": [4096],
    "two rows, ten of 776 and two of 216": [776] * 10 + [216] * 2,
}


def seconds(attention: Callable[..., torch.Tensor], tokens: int) -> float:
    """CPU seconds of a forward and a backward pass."""
    torch.manual_seed(0)
    given = [torch.randn(1, HEADS, tokens, SIZE, requires_grad=True) for _ in range(3)]
    begin = time.process_time()
    attention(*given).sum().backward()
    return time.process_time() - begin


def main() -> None:
    module = torch.nn.Module()
    for name, lengths in CASES.items():
        tokens, longest, sizes = sum(lengths), max(lengths), torch.tensor(lengths)
        begins = torch.tensor([0, *sizes.cumsum(0).tolist()], dtype=torch.int32)
        number = torch.arange(len(lengths)).repeat_interleave(sizes)
        mask = (number[:, None] == number[None]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        ways = {
            "mask": lambda q, k, v, mask=mask: sdpa_attention_forward(module, q, k, v, mask[None, None])[0],
            "each": lambda q, k, v, begins=begins, longest=longest: attend(
                module, q, k, v, None, cu_seq_lens_q=begins, max_length_q=longest, types=(torch.float32,)
            )[0],
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for index in range(ROUNDS + 1):
            for way, attention in ways.items():
                taken = seconds(attention, tokens)
                found[way] += [taken] if index else []  # the first round warms up
        ratio = statistics.median(a / b for a, b in zip(found["mask"], found["each"], strict=True))
        shown = ", ".join(f"{way} {statistics.median(taken):.2f} s" for way, taken in found.items())
        sys.stdout.write(f"{name}: {shown}, ratio {ratio:.2f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
