"""How a machine is looked at: files below a root, which may be a recorded tree, and commands with a time limit each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

MAX_OUTPUT = 16 * 1024 * 1024
"""Bytes of a command's answer that are kept: eight GPUs in full take 0.5 MB, a kernel log some MB."""


@dataclass(frozen=True)
class CommandOutput:
    """What a command printed."""

    text: str = ""
    """Its standard output; also of a command that failed half-way."""
    fault: str = ""
    """Why it printed nothing, or not everything, in one line; empty where it ended well."""
    present: bool = True
    """Whether it is installed."""

    @property
    def good(self) -> bool:
        """Whether it ran and ended well."""
        return self.present and not self.fault


Ask = Callable[[Sequence[str], float], CommandOutput]
"""A command and its time limit in seconds in, its output out."""
ABSENT = CommandOutput(present=False)


def ask(command: Sequence[str], seconds: float) -> CommandOutput:
    """Run a command. Raises nothing.

    One that hangs is killed, and left where it cannot die: a process that waits for a GPU or for a server of files that is
    gone takes no signal, and waiting for it would hang as well. Its output goes into memory: no pipe, no disk.
    """
    if shutil.which(command[0]) is None:
        return ABSENT
    with open(os.memfd_create("out"), "w+b") as out, open(os.memfd_create("err"), "w+b") as err:  # noqa: PTH123
        try:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            return CommandOutput(fault=f"{command[0]}: {error.strerror or error}")
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            try:
                child.wait(1.0)
            except subprocess.TimeoutExpired:
                child.returncode = -int(signal.SIGKILL)  # else the interpreter would ask for it again and again, and warn
            return CommandOutput(_text(out), f"no answer within {seconds:.0f} s")
        text = _text(out)
        lines = [line for line in f"{_text(err)}\n{text}".splitlines() if line.strip()] if code else []
        return CommandOutput(text, (lines or [f"exit code {code}"])[0].strip()[:300] if code else "")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode(errors="replace")


@dataclass
class Probe:
    """One look at a machine."""

    root: Path = field(default_factory=lambda: Path("/"))
    ask: Ask = ask
    deadline: float = field(default_factory=lambda: time.monotonic() + 20.0)
    """By time.monotonic: no command is given longer."""

    @property
    def live(self) -> bool:
        """Whether this is the machine itself, and not a recorded tree."""
        return self.root == Path("/")

    def left(self, most: float) -> float:
        """Seconds that a command may take."""
        return max(0.5, min(most, self.deadline - time.monotonic()))

    def call(self, *command: str, seconds: float = 10.0) -> CommandOutput:
        """Run a command within the time that is left."""
        return self.ask(command, self.left(seconds))

    def path(self, path: str) -> Path:
        """Where a path of the machine lies."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """The text of a file of the kernel or of the system, without the last line end; empty where there is none."""
        try:
            return self.path(path).read_text(errors="replace").rstrip("\n")
        except (OSError, ValueError):
            return ""

    def number(self, path: str) -> int | None:
        """The number that a file holds; None where it holds none."""
        try:
            return int(self.read(path).split()[0])
        except (ValueError, IndexError):
            return None

    def numa(self, folder: str) -> int | None:
        """The NUMA node of a device; None where the kernel knows none (-1)."""
        node = self.number(f"{folder}/numa_node")
        return node if node is not None and node >= 0 else None

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none where there is no such folder."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []
