"""The owner's end of a cluster's first process: start it, give it orders, end it by letting go."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clustertune.cluster import inside


class Failed(RuntimeError):
    """Something of the throw-away cluster did not do what it must."""


class Login:
    """The process of ``inside.py login``. It ends with all that it started when this process ends, however that happens."""

    def __init__(self, root: Path, prefix: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._rest = b""
        with (root / "log" / "login.out").open("ab") as log:
            # Its life hangs on the pipe and not on the death signal of a parent, which comes when the thread ends.
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-I", str(Path(inside.__file__)), "login", str(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"PATH": inside.PATH},
                cwd="/",
                start_new_session=True,
            )
        self.pid = 0
        """Its process id here; unshare(1) is its parent where there are namespaces."""

    def started(self, timeout: float) -> None:
        """Wait until it has made its place and started the controller."""
        self.pid = int(self._read(timeout)["pid"])

    def order(self, timeout: float = 60, **order: Any) -> str:
        """Have it do something with its rights. Returns the output. Raises Failed."""
        with self._lock:
            assert self.process.stdin is not None
            try:
                self.process.stdin.write(json.dumps(order).encode() + b"\n")
                self.process.stdin.flush()
            except OSError:
                raise Failed("the cluster's first process is gone") from None
            answer = self._read(timeout)
        if answer["code"]:
            raise Failed(f"{order}: {answer['err'].strip() or answer['code']}")
        return str(answer["out"])

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        end = time.monotonic() + timeout
        while b"\n" not in self._rest:
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Failed(f"no answer from the cluster's first process in {timeout:.0f} s")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise Failed("the cluster's first process ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self, timeout: float = 20) -> None:
        """Let go of it, and wait until nothing of it is left."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            inside.end_descendants(self.process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()


def inner_ids(pid: int) -> list[int]:
    """A process's id in each namespace that it is seen in, the outermost first; empty where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return [int(word) for word in line.split()[1:]]
    return []
