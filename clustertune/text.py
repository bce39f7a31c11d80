"""Short texts about many things, for messages."""

from __future__ import annotations

from collections.abc import Iterable


def listed(items: Iterable[str], most: int, between: str = ", ", last: str = " and") -> str:
    """``a, b and 3 more``: the first ``most`` of the items, and how many more there are."""
    texts = list(items)
    return between.join(texts[:most]) + (f"{last} {len(texts) - most} more" if len(texts) > most else "")
