"""Conversations made up for a benchmark that has no data at hand: as long as real ones, of words that are a token each."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

from clustertune.plan.lengths import SIGMA

WORDS = 1000
SHORTEST = 8
TEMPLATE_TOKENS = 12
"""Header and end of two turns in the chat template."""
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru")


def words() -> list[str]:
    """The vocabulary: each word ends in another one's beginning, so that a tokenizer learns whole words."""
    return [a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in _SYLLABLES][:WORDS]


def lengths(mean: float, longest: int, seed: int) -> Iterator[int]:
    """Tokens of one conversation after the other: log-normal with this mean before the cut at ``longest``."""
    draw = random.Random(seed)  # noqa: S311 - nothing secret
    center = mean / math.exp(SIGMA**2 / 2)
    while True:
        yield max(SHORTEST, min(longest, round(center * math.exp(draw.gauss(0, SIGMA)))))


def conversations(mean: float, longest: int, *, tokens: float, count: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """At least ``count`` conversations with at least ``tokens`` tokens together; each answers one question."""
    draw, known = random.Random(seed + 1), words()  # noqa: S311 - nothing secret
    made, total = 0, 0
    for length in lengths(mean, longest, seed):
        if made >= count and total >= tokens:
            return
        body = max(2, length - TEMPLATE_TOKENS)
        text = draw.choices(known, k=body)
        cut = max(1, body // 4)
        yield [
            {"role": "user", "content": " ".join(text[:cut])},
            {"role": "assistant", "content": " ".join(text[cut:])},
        ]
        made, total = made + 1, total + length


def write(path: Path, mean: float, longest: int, *, tokens: float, count: int, seed: int) -> int:
    """A JSON Lines file of ``messages``. Returns how many conversations it holds. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = 0
    with path.open("w", encoding="utf-8") as out:
        for made, messages in enumerate(conversations(mean, longest, tokens=tokens, count=count, seed=seed), start=1):  # noqa: B007
            out.write(json.dumps({"messages": messages}) + "\n")
    return made
