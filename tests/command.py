"""The real command, started as a user starts it."""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.warm import SECONDS, Warm
from tools import runs

REPO = Path(__file__).resolve().parent.parent
events = runs.events

SHORT = ["train.max_steps=8", "train.save_steps=2", "train.eval_steps=3", "eval.max_gen_toks=8"]
"""A training of seconds: enough for three checkpoints."""

NO_NETWORK = [sys.executable, str(REPO / "tests" / "loopback.py")]
"""Ahead of a command: it has nothing but loopback."""


@dataclass(frozen=True)
class Done:
    """What a finished command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: str | Path, network: bool = True, cwd: Path = REPO, stack: bool = False) -> Done:
    """Run ``clustertune`` to its end; with ``network=False`` in a network namespace that has nothing but loopback, where there
    can be one. ``stack``: the command needs torch, and is forked of a process that has it."""
    words, isolated = [*map(str, arguments)], not network and _can_isolate()
    if (stack or not isolated) and warm(stack=stack).fits():
        done = _forked([*["clustertune"] * stack, *words], cwd, stack, isolated=isolated)
    else:
        done = _started(words, isolated, cwd)
    assert "Traceback" not in done.err, done.err
    return done


@functools.cache
def warm(*, stack: bool = False) -> Warm:
    """The process of this one that forks commands."""
    return Warm(stack=stack)


def _forked(
    arguments: list[str], cwd: Path, stack: bool, wait: Callable[[socket.socket], None] = lambda _: None, isolated: bool = False
) -> Done:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with warm(stack=stack).start(arguments, cwd, out.fileno(), err.fileno(), isolated=isolated) as answer:
            wait(answer)
            answer.settimeout(SECONDS + 30)
            code = os.waitstatus_to_exitcode(int(answer.recv(64)))
        texts = [file.read().decode() for file in (out, err) if file.seek(0) == 0]
    return Done(code, *texts)


@functools.cache
def _can_isolate() -> bool:
    """Whether this machine lets us make a network namespace; a container without privileges does not."""
    return subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0


def _started(arguments: list[str], isolated: bool, cwd: Path) -> Done:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [*(NO_NETWORK if isolated else []), sys.executable, "-m", "clustertune", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def run_until(condition: Callable[[], bool], act: Callable[[int], None], *arguments: str | Path, stack: bool = False) -> Done:
    """Start ``clustertune``, call ``act(pid)`` as soon as ``condition`` holds, and wait for the end. ``stack``: as of ``run``;
    nobody knows the process then, and ``act`` is called with 0."""
    if stack:

        def wait(answer: socket.socket) -> None:
            while not select.select([answer], [], [], 0.02)[0] and not condition():
                pass
            act(0)

        done = _forked(["clustertune", *map(str, arguments)], REPO, True, wait)
        assert "Traceback" not in done.err, done.err
        return done
    with subprocess.Popen(
        [sys.executable, "-m", "clustertune", *map(str, arguments)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as child:
        deadline = time.monotonic() + 400
        while child.poll() is None and time.monotonic() < deadline and not condition():
            time.sleep(0.02)
        if child.poll() is None:
            act(child.pid)
        out, err = child.communicate(timeout=400)
    assert "Traceback" not in err, err
    return Done(child.returncode, out, err)


def rank_pid(run_dir: Path, rank: int) -> int:
    """The process of a rank of the newest attempt."""
    newest = max((run_dir / "attempts").iterdir())
    return int((newest / f"rank-{rank}.pid").read_text())
