"""Which conversations are kept for evaluation where the input does not say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def choose_eval(keys: Iterable[str], seed: int, fraction: float) -> set[str]:
    """The keys (trees) that become the eval split: ``round(n * fraction)`` of them, at least 1 and at most n - 1.

    The order is that of SHA-256 over seed and key: it depends neither on the order in the file nor on a random generator,
    so the same data give the same split everywhere, and a tree that is added moves few others. One key is all train.
    """
    distinct = set(keys)
    count = min(max(round(len(distinct) * fraction), 1), len(distinct) - 1)
    return set(ranked(distinct, seed)[: max(count, 0)])


def ranked(keys: Iterable[str], seed: int) -> list[str]:
    """The keys in the order of SHA-256 over seed and key."""
    return sorted(keys, key=lambda key: hashlib.sha256(f"{seed}\0{key}".encode()).digest())
