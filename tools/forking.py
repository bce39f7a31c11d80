"""Commands by fork: the stack is imported once, and each command, launcher and rank of it takes no more than its own work.

A process that one of ours starts as ``python -m clustertune`` or ``python -m clustertune.launch.elastic`` is forked of it,
with the arguments, environment, files and session it would have had. Its id, its parent and its death are a real process's.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

REPO = Path(__file__).resolve().parent.parent
MODULES = ("clustertune", "clustertune.launch.elastic")
STACK = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama",
    "accelerate.commands.launch", "torch.distributed.run", "lm_eval", "clustertune.training.session", "clustertune.cli",
    "clustertune.chain", "clustertune.export.export", "clustertune.merge.streaming", "clustertune.evaluate.run",
    "clustertune.rank", "clustertune.resolve.resolve", "deepspeed", "sklearn.metrics", "nltk", "lm_eval.tasks", "sacrebleu",
    "langdetect", "matplotlib.backends.backend_svg", "torch.profiler", "peft.tuners.lora.model", "clustertune.cli.app",
)  # fmt: skip
"""The command line last: it defers what is not imported yet."""

_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def warm() -> None:
    """Import what the commands import, and fork from here on."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    for name in STACK:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it looks at
    subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]


def _execute(self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
             startupinfo: Any, creationflags: Any, shell: bool, *rest: Any) -> None:  # fmt: skip
    words: list[str] = [os.fsdecode(args)] if isinstance(args, str | bytes) else [os.fsdecode(word) for word in args]
    words = [word for word in words if word != "-u"]
    if shell or words[:2] != [sys.executable, "-m"] or words[2] not in MODULES:
        _start(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest)
        return
    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:6]
    new_session = rest[-2]
    sys.stdout.flush()
    sys.stderr.flush()
    self.pid = os.fork()
    if self.pid == 0:
        for source, target in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2)):
            if source not in (-1, target):
                os.dup2(source, target)
        if new_session:
            os.setsid()
        if preexec_fn:
            preexec_fn()
        become(words[2], words[3:], env, cwd)
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def become(module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None, cwd: Any = None) -> NoReturn:
    """Be ``python -m module arguments`` from here on, in a process that was just forked."""
    code = 1
    try:
        os.closerange(3, 4096)  # locks of the process before among them
        atexit._clear()
        for number in signal.valid_signals():  # as exec does: what is ignored stays ignored
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        sys.argv = [module, *arguments]
        random.seed()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


class ForkedCommand:
    """``clustertune`` with these arguments, started and not waited for. Its output goes to a file."""

    def __init__(self, *arguments: str | Path, out: Path, env: Mapping[str, str] | None = None, cwd: Path = REPO) -> None:
        self.started, self._out = time.time(), out
        with out.open("wb") as file:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "clustertune", *map(str, arguments)], cwd=cwd, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, env={**os.environ, **(env or {})},
            )  # fmt: skip
        self.pid = self.child.pid

    @property
    def text(self) -> str:
        return self._out.read_text(errors="replace")

    def until(self, condition: Callable[[], Any], seconds: float) -> bool:
        """Wait for a condition, at most so long; False where the command ended, or the time, before it held."""
        deadline = time.monotonic() + seconds
        while self.child.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.005)
        return False

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """The exit code and all output. Raises AssertionError for a hang and for a traceback."""
        try:
            self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            raise AssertionError(f"hangs: no end after {seconds} s; {self.text[-600:]}") from None
        assert "Traceback (most" not in self.text, f"traceback: {self.text[-1500:]}"
        return self.child.returncode, self.text


def run(*arguments: str | Path, out: Path, seconds: float = 120, **more: Any) -> tuple[int, str]:
    """A command to its end: exit code and output."""
    return ForkedCommand(*arguments, out=out, **more).end(seconds)
