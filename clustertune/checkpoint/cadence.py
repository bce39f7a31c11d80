"""When the next checkpoint is due: the recipe's ``save`` section."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from clustertune.plan.schedule import COPY_BYTES_PER_S, WRITE_BYTES_PER_S, best_seconds, given_seconds
from clustertune.recipe.sections import Save


@dataclass
class Cadence:
    """Rank 0's answer, at the end of each step, to whether a save is due."""

    save: Save
    between: float
    """As :func:`seconds_between_ends` gives it."""
    state_bytes: float = 0.0
    """Of a rank's part of the state: what a save is planned by until one was measured."""
    clock: Callable[[], float] = time.monotonic
    _cost: float | None = None
    _write: float | None = None
    _last: float = field(default=math.nan)

    def seconds(self) -> float | None:
        """Between two saves; None where they come by steps."""
        if self.save.every != "auto":
            return given_seconds(self.save.every)
        cost = self._cost if self._cost is not None else self.state_bytes / COPY_BYTES_PER_S
        write = self._write if self._write is not None else self.state_bytes / WRITE_BYTES_PER_S
        return best_seconds(cost, write, self.between)

    def is_due(self, step: int, *, busy: bool = False) -> bool:
        """Whether to save behind this step. The first one starts the clock.

        ``busy``: the previous save is still being written. A save that is due by time begins after it. A save that is due at
        a step cannot move to another step, so training waits for the previous one.
        """
        now = self.clock()
        if math.isnan(self._last):
            self._last = now
        if step in self.save.milestones:
            return True
        every = self.seconds()
        return now - self._last >= every and not busy if every is not None else step % int(self.save.every) == 0

    def began(self) -> None:
        """A save begins."""
        self._last = self.clock()

    def measured(self, stall: float, write: float) -> None:
        """What the save before took."""
        self._cost, self._write = stall, write
