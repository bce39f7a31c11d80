"""One command of an operator's work."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One command, and why."""

    argv: tuple[str, ...]
    why: str
    by_hand: bool = False
    """``apply`` never runs it."""
    target: str | None = None
    """What it mounts."""

    def __str__(self) -> str:
        return shlex.join(self.argv)
