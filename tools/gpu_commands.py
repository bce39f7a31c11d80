"""How a part of ``make gpu-check`` runs commands: where it works, what they find in their environment, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.testbed.inside import end_descendants

REPO = Path(__file__).resolve().parent.parent
LONGEST = 480.0
"""Seconds of a part at most."""
GRACE = 10.0
"""Seconds between asking a command to end and killing it."""


class Failed(Exception):
    """A part found a fault."""


class NotHere(Exception):
    """A part cannot be done on this machine; the message says why."""


@dataclass(frozen=True)
class EndedCommand:
    """A command that has ended."""

    code: int
    out: str
    log: Path
    """What it wrote to stderr."""

    @property
    def err(self) -> str:
        return self.log.read_text(errors="replace")

    def last_error(self) -> str:
        """The last line that names an error, or the last line."""
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror: |Error: |Error$", line) and "ChildFailedError" not in line]
        return (errors or lines or ["it wrote nothing"])[-1][:300]

    def document(self) -> dict[str, Any]:
        """The JSON document on stdout. Raises Failed."""
        try:
            body = json.loads(self.out)
        except ValueError:
            raise Failed(f"no document on stdout (exit code {self.code}): {self.last_error()}") from None
        if not isinstance(body, dict):
            raise Failed(f"a document that is not an object (exit code {self.code})")
        return body


@dataclass
class GpuCheck:
    """One call: where it works and what it may use."""

    name: str
    folder: Path
    """State and logs; small."""
    work: Path
    """Run folders; a bench of 8 billion parameters needs 20 GB here until it ends."""
    python: str
    backend: str
    """``nccl`` or ``gloo``."""
    gpus: int
    short: bool = False
    """Small models in place of large ones."""
    deadline: float = 0.0
    part: str = ""
    _count: int = field(default=0, repr=False)

    @property
    def ranks(self) -> int:
        """Ranks of a training here: one a GPU; two without GPUs."""
        return self.gpus if self.backend == "nccl" else 2

    def environment(self, **more: str) -> dict[str, str]:
        """Of every command: this checkout before an installed package, no Hub, no GPU under gloo."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        path = os.pathsep.join(part for part in (str(REPO), os.environ.get("PYTHONPATH", "")) if part)
        variables |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
        if self.backend == "gloo":
            variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return variables | more

    def start(self, words: Sequence[str], **env: str) -> tuple[subprocess.Popen[str], Path]:
        """Start a command in a process group of its own. Returns it and the file of its stderr."""
        self._count += 1
        log = self.folder / "logs" / f"{self.part}-{self._count}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as err, log.with_suffix(".out").open("w") as out:
            err.write(f"$ {' '.join(words)}\n")
            err.flush()
            child = subprocess.Popen(
                list(words), cwd=REPO, env=self.environment(**env), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                text=True, start_new_session=True,
            )  # fmt: skip
        return child, log

    def wait(self, child: subprocess.Popen[str], log: Path) -> EndedCommand:
        """Wait for a command until the part's time is over, then end it with all that it started. Raises Failed then."""
        try:
            code = child.wait(max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f"not done within {LONGEST:.0f} s: {EndedCommand(1, '', log).last_error()}") from None
        finally:
            end_tree(child)
        return EndedCommand(code, log.with_suffix(".out").read_text(errors="replace"), log)

    def run(self, *words: str, **env: str) -> EndedCommand:
        """Run a command to its end. Raises Failed where the part's time is over."""
        return self.wait(*self.start(words, **env))

    def clustertune(self, *words: str, **env: str) -> EndedCommand:
        """Run a command of the project."""
        return self.run(self.python, "-m", "clustertune", *words, **env)

    def has(self, *packages: str) -> list[str]:
        """Those of the Python packages that are not installed for the Python in use."""
        script = "import importlib.util as u, sys; print(*(p for p in sys.argv[1:] if u.find_spec(p) is None))"
        return self.run(self.python, "-c", script, *packages).out.split()

    def need(self, *packages: str) -> None:
        """Raises NotHere where a Python package is missing."""
        if missing := self.has(*packages):
            raise NotHere(f"not installed: {', '.join(missing)}")


# --- processes ----------------------------------------------------------------------------------------------------------


def end_tree(child: subprocess.Popen[str]) -> None:
    """End a command and everything that it started, in whatever session (torch's agent gives each rank one of its own), asked
    first."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    end_descendants(os.getpid())
    child.poll()


def output_of(words: Sequence[str]) -> str:
    """What a program prints, without blanks around it; empty where it fails or is not installed."""
    try:
        done = subprocess.run(list(words), capture_output=True, text=True, check=False, cwd=REPO)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
