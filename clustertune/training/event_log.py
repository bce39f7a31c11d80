"""What a rank tells others while it trains: its heartbeat to the launcher, and its events to files, people and trackers.

``metrics.jsonl`` is the truth of a run: one event a line, written by rank 0. The console shows the same, and trackers such as
W&B mirror it: training neither waits for one nor ends for one that fails. The heartbeat is one short line in the attempt's
folder, rewritten in place while the main thread makes progress. :class:`Attempt` is what a rank knows of the attempt that it
is part of.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clustertune.console import duration, escape
from clustertune.launch.attempt import AttemptPlan
from clustertune.manifest import open_plain
from clustertune.process import StopFlag
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir

PHASES = ("start", "model", "resume", "train", "eval", "save", "end")
EVERY_SECONDS = 0.2
"""Between two heartbeats of one phase: each costs a system call, on NFS a message to the server."""
_WIDTH = 47
MIRRORS = ("WandbCallback",)
"""Trainer callbacks that only report elsewhere."""
INIT_SECONDS = 20.0
"""How long W&B's server may take for its first answer; compute nodes often have no way out."""
FINISH_SECONDS = 30.0
"""How long a rank waits at its end for what is not uploaded yet; it stays in the run folder and can be synced later."""
_SYNC = "'wandb sync' sends the run folder's wandb/offline-run-* later"


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
        self._console = Console(file=out, highlight=False, soft_wrap=True, markup=False, emoji=False)
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
        (self._progress.console if self._progress else self._console).print(escape(message))

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


class GuardedCallback:
    """A tracker's callback that is left out from its first failure on (wandb's service died, its socket was closed)."""

    def __init__(self, callback: Any, tell: Callable[[str], None]) -> None:
        self._callback, self._tell = callback, tell
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._callback, name)
        if not name.startswith("on_"):
            return attribute

        def event(*args: Any, **kwargs: Any) -> Any:
            if self._failed:
                return None
            try:
                return attribute(*args, **kwargs)
            except Exception as error:
                self._failed = True
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                self._tell(f"note: {type(self._callback).__name__} is left out from here on: {what}; metrics.jsonl is complete")
                return None

        return event


def guard(callbacks: list[Any], tell: Callable[[str], None]) -> None:
    """Wrap the trackers among a Trainer's callbacks, in place."""
    callbacks[:] = [GuardedCallback(c, tell) if type(c).__name__ in MIRRORS else c for c in callbacks]


def set_tracker_environment(run_dir: Path, run_id: str, project: str, *, has_key: bool = False) -> None:
    """The trackers' own variables: below the run folder, W&B as one run across attempts, offline unless someone is logged in.

    ``has_key``: an API key is available that is not in the environment.
    """
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    logged_in = has_key or bool(os.environ.get("WANDB_API_KEY")) or _netrc_has(host)
    settings = {
        "WANDB_DIR": str(run_dir),
        "WANDB_PROJECT": project,
        "WANDB_RUN_ID": run_id,
        "WANDB_RESUME": "allow",
        "WANDB_CONSOLE": "off",  # captured output could hold what a library prints of its environment
        "WANDB_DISABLE_CODE": "true",
        "WANDB_DISABLE_GIT": "true",  # a remote URL may hold credentials
        "WANDB_SILENT": "true",
        "WANDB_LOG_MODEL": "false",
        "MLFLOW_TRACKING_URI": (run_dir / "mlruns").absolute().as_uri(),  # else mlflow.db in the working folder
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 asks for a word of consent
        "TENSORBOARD_LOGGING_DIR": str(run_dir / "tensorboard"),
        "TRACKIO_DIR": str(run_dir / "trackio"),
    }
    if not logged_in:
        settings["WANDB_MODE"] = "offline"
    for key, value in settings.items():
        os.environ.setdefault(key, value)


def _netrc_has(host: str) -> bool:
    import netrc

    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def start_wandb(key: str | None) -> tuple[bool, list[str]]:
    """Open this run at W&B, or in a folder below ``wandb/`` where its server does not answer; never raises.

    ``key`` is handed over in memory: as a variable it would be inherited by W&B's service process. Returns whether W&B is
    on, and a note for each thing that is not as asked. :func:`set_tracker_environment` comes
    first.
    """
    try:
        import wandb

        notes: list[str] = []
        offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
        if not offline:
            try:
                wandb.init(settings=wandb.Settings(init_timeout=INIT_SECONDS, api_key=key))
                return True, notes
            except Exception as error:
                wandb.teardown()
                notes = [f"W&B is offline: {_first_line(error, key)}; {_SYNC}"]
        if os.environ.get("WANDB_MODE") != "disabled":
            os.environ["WANDB_MODE"] = "offline"
        wandb.init(settings=wandb.Settings(init_timeout=INIT_SECONDS, mode=os.environ["WANDB_MODE"]))
        return True, notes
    except Exception as error:
        return False, [f"W&B is left out: {_first_line(error, key)}; metrics.jsonl is complete"]


def _first_line(error: Exception, key: str | None) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text.replace(key, "***") if key else text


def finish_wandb(code: int, seconds: float = FINISH_SECONDS) -> bool:
    """Close the run at W&B, or its offline file. False where that takes longer: the caller must not wait at exit either."""
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return True

    def finish() -> None:
        with contextlib.suppress(Exception):  # the training is over, and metrics.jsonl has all of it
            wandb.finish(exit_code=code)

    closing = threading.Thread(target=finish, daemon=True)
    closing.start()
    closing.join(seconds)
    return not closing.is_alive()
