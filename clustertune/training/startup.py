"""Where the time goes before the first step is done: parts of the start-up, timed and written to ``metrics.jsonl``.

The events, one a part and then the sum, all written by rank 0 at the end of the first step (so none of a start that died)::

    {"event": "startup", "part": "imports", "seconds": 6.81, ...}
    {"event": "startup", "part": "total", "seconds": 41.2, "read_bytes": [...], "host_bytes": [...], "loading": "slices"}

``seconds`` of the parts add up to the total's, but for rounding. ``read_bytes`` is what each rank read of the weights,
``host_bytes`` its peak resident memory, both in rank order; ``loading`` says how (:data:`HOW`).
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from clustertune.process import process_age

PARTS = (
    "imports",
    "process group",
    "digests",
    "data",
    "model",
    "reading",
    "sharding",
    "resume",
    "evaluation",
    "first step",
    "other",
)
"""In the order in which they are reported.

``digests``: waiting until data and weights are compared with theirs.
``model``: built without weights, LoRA added, trainer made.
``reading``: weights from storage to where they stay. ``first step``: compilation included.
``evaluation``: the one before the first step."""

HOW = {
    "slices": "each rank read its own slices",
    "whole": "transformers read the files, whole",
}


def peak_host_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Startup:
    """Times parts of the start-up. A part inside another one stops the outer one's clock, so that nothing counts twice."""

    def __init__(self, age: Callable[[], float] = process_age, clock: Callable[[], float] = time.perf_counter) -> None:
        """Create it when the imports are done: the process's time until then counts as theirs."""
        self._clock = clock
        self.seconds: dict[str, float] = {"imports": age()}
        self._stack = ["other"]
        self._since = clock()
        self.read_bytes = 0
        """Bytes of weights that this rank read."""
        self.loading = "whole"
        """A key of :data:`HOW`."""
        self.done = False

    def _turn(self) -> None:
        now = self._clock()
        if not self.done:
            self.seconds[self._stack[-1]] = self.seconds.get(self._stack[-1], 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside as ``name``, one of :data:`PARTS`."""
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def begin(self, name: str) -> None:
        """:meth:`part` for code that begins and ends in two places."""
        self._turn()
        self._stack.append(name)

    def end(self) -> None:
        """The innermost part is over."""
        self._turn()
        self._stack.pop()

    def finish(self) -> None:
        """The first step is done: what comes now is not a start-up."""
        self._turn()
        self.done = True

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def summary(self) -> str:
        """One line: ``start-up 41.2 s: imports 6.8, data 0.4, ...``; parts below a tenth of a second are left out."""
        shown = [f"{name} {self.seconds[name]:.1f}" for name in PARTS if self.seconds.get(name, 0.0) >= 0.05]
        return f"start-up {self.total:.1f} s: {', '.join(shown)}"

    def events(self, read: list[int], held: list[int]) -> Iterator[Mapping[str, Any]]:
        """The values of the ``startup`` events: one a part in the order of :data:`PARTS`, then the total.

        ``read``, ``held``: every rank's bytes of weights and peak memory, in rank order.
        """
        for name in PARTS:
            if name in self.seconds:
                yield {"part": name, "seconds": round(self.seconds[name], 3)}
        figures = {"read_bytes": read, "host_bytes": held, "loading": self.loading}
        yield {"part": "total", "seconds": round(self.total, 3), **figures}
