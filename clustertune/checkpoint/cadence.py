"""When the next checkpoint is due: the recipe's ``save`` section.

``auto`` weighs what saving costs against what a failure costs: J. T. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps (Future Generation Computer Systems 22, 2006), equation 37, which refines J. W. Young's
(Communications of the ACM 17, 1974) ``sqrt(2 C M)``. C, the cost of a save, is the time that training stands still for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from clustertune.config.schema import Save

NODE_MTBF_HOURS = 1000 * 24 / 6.5
"""Hours between two failures of one node where the cluster file does not say: 6.5 failures in 1,000 days of a node (Kokolis et
al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024, RSC-1)."""
COPY_BYTES_PER_S, WRITE_BYTES_PER_S = 5e9, 1e9
"""Of one rank's copy to host memory, and of its write, until they were measured. Assumed."""
_UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds_between_ends(nodes: int, mtbf_hours: float | None, limit_minutes: float | None) -> float:
    """Mean seconds between two ends of a job that a warning does not announce.

    The time limit counts as one: its warning may come too late. ``mtbf_hours``: of one node.
    """
    rate = nodes / ((mtbf_hours or NODE_MTBF_HOURS) * 3600)
    return 1 / (rate + (1 / (60 * limit_minutes) if limit_minutes and math.isfinite(limit_minutes) else 0.0))


def best_seconds(cost: float, write: float, between: float) -> float:
    """Seconds from one save to the next that lose the least. ``cost``: training's for a save; ``write``: until it is whole."""
    cost = max(cost, 1e-3)
    share = cost / (2 * between)
    daly = math.sqrt(2 * cost * between) * (1 + math.sqrt(share) / 3 + share / 9) - cost if share < 1 else between
    return max(daly, write)


def given_seconds(every: str | int) -> float | None:
    """The seconds of ``30m``; None for a number of steps and ``auto``."""
    return float(every[:-1]) * _UNITS[every[-1]] if isinstance(every, str) and every != "auto" else None


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

    def is_due(self, step: int) -> bool:
        """Whether to save behind this step. The first one starts the clock."""
        now = self.clock()
        if math.isnan(self._last):
            self._last = now
        if step in self.save.milestones:
            return True
        every = self.seconds()
        return now - self._last >= every if every is not None else step % int(self.save.every) == 0

    def began(self) -> None:
        """A save begins."""
        self._last = self.clock()

    def measured(self, stall: float, write: float) -> None:
        """What the save before took."""
        self._cost, self._write = stall, write
