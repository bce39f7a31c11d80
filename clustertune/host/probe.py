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
from typing import TYPE_CHECKING

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


if TYPE_CHECKING:  # 3.8 cannot subscript collections.abc
    Ask = Callable[[Sequence[str], float], CommandOutput]
    """A command and its time limit in seconds in, its output out."""

ABSENT = CommandOutput(present=False)


def ask(command: Sequence[str], seconds: float, text: str = "") -> CommandOutput:
    """Run a command; ``text`` is what it reads. Raises nothing.

    One that hangs is killed, and left where it cannot die: a process that waits for a GPU or for a server of files that is
    gone takes no signal, and waiting for it would hang as well.
    """
    if shutil.which(command[0]) is None:
        return ABSENT
    try:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if text else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        return CommandOutput(fault=f"{command[0]}: {error.strerror or error}")
    try:
        out, err = child.communicate(text.encode() or None, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        output = _after_the_end(child) or late.output or b""
        return CommandOutput(_text(output), f"no answer within {seconds:.0f} s")
    if child.returncode == 0:
        return CommandOutput(_text(out))
    lines = [line for line in (_text(err) + "\n" + _text(out)).splitlines() if line.strip()]
    return CommandOutput(_text(out), (lines or [f"exit code {child.returncode}"])[0].strip()[:300])


def _after_the_end(child: subprocess.Popen[bytes]) -> bytes:
    """What a killed command had printed, where it dies at once."""
    try:
        return child.communicate(timeout=1.0)[0]
    except subprocess.TimeoutExpired as late:
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        child.returncode = -int(signal.SIGKILL)  # else the interpreter would ask for it again and again, and warn
        return late.output or b""
    except (OSError, ValueError):
        return b""


def _text(data: bytes) -> str:
    return data[:MAX_OUTPUT].decode(errors="replace")


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

    def target(self, path: str) -> str:
        """The last part of what a link leads to; empty where it is none."""
        try:
            return os.path.basename(os.readlink(self.path(path)))  # noqa: PTH115, PTH119 - pathlib has no readlink in 3.8
        except OSError:
            return ""
