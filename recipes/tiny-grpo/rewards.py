"""A reward of the recipe's own, in TRL's form: a number, or None, for each completion."""

from __future__ import annotations

from typing import Any


def letters(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Share of an answer's characters that are letters from a to z."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum("a" <= char.lower() <= "z" for char in text) / max(len(text), 1) for text in texts]
