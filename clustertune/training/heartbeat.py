"""What a rank knows of the attempt that it is part of, and its heartbeat: one short line in the attempt's folder, rewritten in
place while the main thread makes progress.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from clustertune.launch.attempt import AttemptPlan
from clustertune.process import StopFlag
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir

PHASES = ("start", "model", "resume", "train", "eval", "save", "end")
EVERY_SECONDS = 0.2
"""Between two heartbeats of one phase: each costs a system call, on NFS a message to the server."""
_WIDTH = 47


class Heartbeat:
    """``<counter> <phase> <step>``, padded with blanks to one length so that a shorter line leaves nothing of a longer one.

    Called by the main thread while it makes progress, never by another thread: a hanging main thread must be noticed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.step = 0
        """The last step that was named."""
        self._phase, self._counter, self._last = "", 0, 0.0
        self._fd: int | None = None
        if path is not None:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError:  # it is not watched then; that is no reason not to train
                self._fd = None

    def __call__(self, phase: str, step: int | None = None) -> None:
        """Report progress in ``phase``. Written at once if the phase changes, else every :data:`EVERY_SECONDS` at most."""
        assert phase in PHASES, phase
        if step is not None:
            self.step = step
        now = time.monotonic()
        if phase == self._phase and now - self._last < EVERY_SECONDS:
            return
        self._phase, self._last = phase, now
        self._counter += 1
        if self._fd is not None:
            line = f"{self._counter} {phase} {self.step}".ljust(_WIDTH) + "\n"
            try:
                os.pwrite(self._fd, line.encode(), 0)
            except OSError:  # a save meets a full disk, and reports it
                return


@dataclass
class Attempt:
    """What the launcher's side of a rank gives to its training."""

    run: RunDir
    resolved: Resolved
    number: int
    stop: StopFlag
    heartbeat: Heartbeat
    fence: Callable[[], None]
    """Raises UserError where another attempt has taken over."""
    out: TextIO
    """Where people see what rank 0 says."""
    source: tuple[str, str | None]
    """The base model in HF's form: a folder or an id, and its revision."""
    notes: list[str] = field(default_factory=list)
    tokens: Mapping[str, str] = field(default_factory=dict)
    """The user's, by the names of their variables; rank 0 alone has them."""
    plan: AttemptPlan | None = None
    """None where the starter of the ranks left none."""
