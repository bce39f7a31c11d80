"""A run of the real command, its processes as the kernel shows them, and what its metrics say."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
RECIPE = "recipes/tiny-oasst2"
SMALL = ["train.save_steps=2", "train.eval_steps=5", "train.max_length=64"]
"""Steps so short that the moments between them are as likely to be hit as the steps."""
PATIENCE = 120
"""Seconds after a fault within which the command must have ended: more is a hang."""


class Command:
    """``clustertune run`` on one run folder, started and not waited for; ``path`` goes first on the module path."""

    def __init__(self, run_dir: Path, *arguments: str, to: str = "export", path: Path | None = None) -> None:
        self.run_dir = run_dir
        self.started = time.time()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "clustertune", "run", RECIPE, "--run-dir", str(run_dir), "--to", to, *SMALL, *arguments],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": f"{path}:{REPO}" if path else str(REPO), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid = self._child.pid

    def until(self, condition: Callable[[], Any], seconds: float = 240) -> bool:
        """Wait for a condition; False where the command ends before it holds."""
        deadline = time.monotonic() + seconds
        while self._child.poll() is None:
            if condition():
                return True
            assert time.monotonic() < deadline, "the moment never came"
            time.sleep(0.01)
        return False

    def signal(self, number: int, *pids: int) -> None:
        """Send a signal to the processes given, else to the command."""
        for pid in pids or (self.pid,):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def end(self, seconds: float = PATIENCE, *, alone: bool = True) -> tuple[int, str]:
        """The exit code and all output. No traceback is ever among it, and no process stays behind.

        ``alone``: no other command works in the run folder.
        """
        try:
            text, _ = self._child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            raise AssertionError(f"hangs: {processes(self.run_dir)}") from None
        assert "Traceback" not in text, text
        deadline = time.monotonic() + 10
        while (left := processes(self.run_dir)) and alone and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not (left and alone), f"left over: {left}"
        return self._child.returncode, text


def processes(run_dir: Path) -> dict[int, str]:
    """Launcher and ranks of a run folder that live now: process id to ``launcher`` or ``rank``."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
            dead = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0] == "Z"
        except (OSError, IndexError):
            continue
        if str(run_dir.resolve()) in words and "train" in words and not dead:
            found[int(folder.name)] = "launcher" if "accelerate.commands.launch" in words else "rank"
    return found


def pids(run_dir: Path, kind: str) -> list[int]:
    """Process ids of the launcher, or of the ranks."""
    return sorted(pid for pid, what in processes(run_dir).items() if what == kind)


def attempts(run_dir: Path) -> int:
    """How many attempts at training there have been."""
    folder = run_dir / "attempts"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def half_written(run_dir: Path) -> list[Path]:
    """Checkpoint folders that have no manifest (yet)."""
    folder = run_dir / "checkpoints"
    return [path for path in folder.iterdir() if not (path / "MANIFEST.json").exists()] if folder.is_dir() else []


def adapter_sha(run_dir: Path) -> str:
    """SHA-256 of the exported adapter."""
    return hashlib.sha256((run_dir / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
