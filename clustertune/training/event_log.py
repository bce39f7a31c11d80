"""``metrics.jsonl``, the truth of a run: one event a line, written by rank 0. The console shows the same."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clustertune.console import duration
from clustertune.manifest import open_plain


class EventLog:
    """Append events to ``metrics.jsonl``; each line is whole or, after a crash, a torn last line that readers skip.

    ``fence`` raises where another attempt has taken over; it is asked before each write.
    """

    def __init__(self, path: Path, attempt: int, fence: Callable[[], object] = lambda: None) -> None:
        self._attempt, self._path, self._fence = attempt, path, fence
        fence()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a killed writer's torn line: keep it, start a new one
                self._file.write(b"\n")

    def write(self, event: str, **values: Any) -> None:
        """One event, flushed to the file (not to the device: :meth:`sync` does that). Raises what the fence raises."""
        self._fence()
        line = {"event": event, "time": round(time.time(), 3), "attempt": self._attempt, **values}
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
        except OSError as error:  # a write, other than an open, does not say to which file
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def sync(self) -> None:
        """Flush to the device."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


class TrainingConsole:
    """Rank 0's lines for a person: a bar on a terminal, a line per step otherwise."""

    def __init__(self, out: TextIO, total_steps: int) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None
        """The first step that was shown, and when: what is left is counted from there."""
        self._console = Console(file=out, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = (
                TextColumn("train"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, redirect_stdout=False, redirect_stderr=False)
            self._task = self._progress.add_task("train", total=total_steps, shown="")
            self._progress.start()

    def say(self, message: str) -> None:
        (self._progress.console if self._progress else self._console).print(message, markup=False)

    def step(self, step: int, shown: str) -> None:
        """Show the figures of one optimizer step."""
        if self._progress:
            self._progress.update(self._task, completed=step, shown=shown)
            return
        now = time.monotonic()
        first, began = self._first = self._first or (step, now)
        left = (self._total - step) * (now - began) / (step - first) if step > first else 0.0
        self.say(f"step {step}/{self._total}  {shown}" + (f"  about {duration(left)} left" if left else ""))

    def close(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None
