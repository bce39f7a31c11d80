"""Trackers such as W&B mirror ``metrics.jsonl``; training does not end for one that fails under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MIRRORS = ("WandbCallback",)
"""Trainer callbacks that only report elsewhere."""


class Guarded:
    """A tracker's callback that is left out from its first failure on (wandb's service died, its socket was closed)."""

    def __init__(self, callback: Any, tell: Callable[[str], None]) -> None:
        self._callback, self._tell = callback, tell
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._callback, name)
        if not name.startswith("on_"):
            return found

        def event(*args: Any, **kwargs: Any) -> Any:
            if self._failed:
                return None
            try:
                return found(*args, **kwargs)
            except Exception as error:
                self._failed = True
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                self._tell(f"note: {type(self._callback).__name__} is left out from here on: {what}; metrics.jsonl is complete")
                return None

        return event


def guard(callbacks: list[Any], tell: Callable[[str], None]) -> None:
    """Wrap the trackers among a Trainer's callbacks, in place."""
    callbacks[:] = [Guarded(c, tell) if type(c).__name__ in MIRRORS else c for c in callbacks]
