"""Servers, ranks and the process of the rewards are killed at random moments: the same bytes, and nothing is left running.

The servers generate with transformers on the CPU, seeded. ``pytest -m jobs -s`` prints how often each was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from clustertune.launch.server_requests import ask
from tests.command import REPO, rank_pid
from tests.serving.conftest import alive, gone

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(7200)]
KILLS = {"server": 20, "reward": 20, "rank": 20}
STEPS = 40
SERVER = Path(__file__).with_name("cpu_server.py")
WORDS = [
    "run", "recipes/tiny-grpo", "--ranks", "1", "--to", "train", "rollout=servers", "train.save_steps=4",
    "train.report_to=none",
    "train.eval_strategy=no", "train.eval_on_start=false", "train.max_completion_length=8", "train.warmup_steps=0",
    "train.learning_rate=1e-2", "data.limit=40",
]  # fmt: skip


def begin(
    folder: Path, pids: Path, steps: int = STEPS, *more: str, words: Sequence[str] = tuple(WORDS)
) -> subprocess.Popen[bytes]:
    """The real command (``words``) with ``more`` settings, and servers that generate on the CPU in vLLM's place."""
    pids.mkdir(parents=True, exist_ok=True)
    program = pids.parent / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {SERVER} "$@"\n')
    program.chmod(0o700)
    environ = {**os.environ, "CLUSTERTUNE_VLLM": str(program), "CPU_SERVER_PIDS": str(pids)}
    command = [sys.executable, "-m", "clustertune", *words, *more, f"train.max_steps={steps}", "--run-dir", str(folder)]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=REPO, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def servers(pids: Path) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in pids.iterdir()]


def trained(folder: Path) -> str:
    """Digest of the last checkpoint's adapter and optimizer state."""
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: (path / "MANIFEST.json").exists() and path.name)
    assert json.loads((newest / "MANIFEST.json").read_text())["meta"]["final"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(newest.glob("*.safetensors")))).hexdigest()


def is_serving(folder: Path) -> bool:
    """The newest ring's server answers."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ring = json.loads(max((folder / "servers").glob("*/ring.json")).read_text())
        return ask(ring["urls"][0], "/health", ring["key"], 2) is not None
    return False


def kill(role: str, folder: Path, pids: Path) -> bool:
    """One process of a role, where there is one now."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        rank = rank_pid(folder, 0)
        if role == "server":
            os.kill(alive(servers(pids))[-1], signal.SIGKILL)
        elif role == "rank":
            os.kill(rank, signal.SIGKILL)
        else:
            children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
        return True
    return False


def until_done(folder: Path, pids: Path) -> tuple[dict[str, int], int]:
    """Start the command, kill, and start it again until it has ended well; kills by role, and starts again."""
    draw, left, done, starts = random.Random(7), dict(KILLS), dict.fromkeys(KILLS, 0), 0
    child, code = begin(folder, pids), None
    while code != 0:
        time.sleep(0.2)
        if (code := child.poll()) is not None:
            assert code in (0, 75), folder.with_suffix(".log").read_text()[-3000:]
            if code == 75:
                child, starts = begin(folder, pids), starts + 1
            continue
        heart = next(iter(sorted((folder / "attempts").glob("*/rank-0.heartbeat"))[-1:]), None)
        roles = [role for role, count in left.items() if count]
        if not roles or not is_serving(folder) or heart is None or heart.read_text().split()[1:2] not in (["train"], ["save"]):
            continue
        role = draw.choice(roles)
        time.sleep(draw.uniform(0, 3))
        if child.poll() is None and kill(role, folder, pids):
            left[role], done[role] = left[role] - 1, done[role] + 1
    return done, starts


def test_kills_leave_the_same_bytes(tmp_path: Path) -> None:
    plain, folder, pids = tmp_path / "plain", tmp_path / "killed", tmp_path / "pids"
    assert begin(plain, tmp_path / "plain-pids").wait() == 0, (tmp_path / "plain.log").read_text()[-3000:]
    done, starts = until_done(folder, pids)
    sys.stdout.write(f"killed {done}, {starts} starts again, {STEPS} steps\n")
    assert done == KILLS
    assert gone(servers(pids)) and not list(folder.glob("servers/*/key"))
    assert trained(folder) == trained(plain)
