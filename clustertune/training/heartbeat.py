"""A rank's heartbeat: one short line in its attempt's folder, rewritten in place while the main thread makes progress."""

from __future__ import annotations

import os
import time
from pathlib import Path

PHASES = ("start", "model", "resume", "train", "eval", "save", "end")
EVERY_SECONDS = 0.2
"""Between two heartbeats of one phase: each costs a system call, on NFS a message to the server."""
_WIDTH = 47


class Heartbeat:
    """``<counter> <phase> <step>``, padded with blanks to one length so that a shorter line leaves nothing of a longer one.

    Called by the main thread where it gets on, never by a thread of its own: a main thread that hangs must be seen.
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
        """Say that ``phase`` gets on. Written at once where the phase changes, else every :data:`EVERY_SECONDS` at most."""
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
