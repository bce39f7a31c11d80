"""The command by fork, from a process that has imported it: the half second that Python takes for that is spent once.

A second such process has imported the stack too (torch, transformers, lm-eval: 10 s), and forks what a command starts in its
turn (:mod:`tools.forking`): launchers and ranks.

A process forked of a forked one: what a command leaves behind (threads, handlers, a changed folder) ends with it, and what
``clustertune/__main__.py`` does at its end is done. Where a test has changed the environment, which libraries read when they
are imported, and where a fork cannot do what is asked, :func:`tests.command.run` starts Python again.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
SECONDS = 600
"""After which a command that hangs is killed, and its test fails."""
READ_AT_IMPORT = re.compile(r"(PYTHON|PYDANTIC|TYPER|LD_|LC_|MALLOC)\w*|LANG|TZ")
"""Variables that Python and the packages of the command read before it runs."""
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
"""glibc keeps what a rank frees: of the 5 s of CPU that eight steps take, 0.8 s went into handing pages back and forth."""
READ_BY_COMMANDS = re.compile(
    r"(CLUSTERTUNE|SLURM|CT|FAKE|PYTEST)_\w*|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|TORCHINDUCTOR_CACHE_DIR|PYTORCH_NVML_\w*"
)
"""Those that nothing of the stack reads when it is imported, or that it sets then; CUDA is begun by no import."""


class Warm:
    """The process that forks, for as long as this one and those that were forked of it live.

    ``stack``: it has imported torch and the libraries above it.
    """

    def __init__(self, *, stack: bool = False) -> None:
        self._differs = READ_BY_COMMANDS if stack else None
        self.environment = self._comparable()
        folder = tempfile.mkdtemp(prefix="clustertune-warm-")  # nobody else may ask
        self._address = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
            requests.bind(self._address)
            requests.listen(64)  # who asks before the imports are done waits
            subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(requests.fileno()), *["stack"] * stack],
                cwd=REPO,
                env={**os.environ, **KEEPS_MEMORY, "PYTHONPATH": str(REPO)},
                stdin=subprocess.PIPE,  # whose end is that of the last process that may ask
                stdout=subprocess.DEVNULL,
                pass_fds=(requests.fileno(),),
            )

    def fits(self) -> bool:
        """Whether what was imported read the environment that a command started now would find."""
        return self._comparable() == self.environment

    def _comparable(self) -> dict[str, str]:
        given = os.environ.items()
        if self._differs:
            return {key: value for key, value in given if not self._differs.fullmatch(key)}
        return {key: value for key, value in given if READ_AT_IMPORT.fullmatch(key)}

    def start(
        self,
        arguments: Sequence[str],
        cwd: Path,
        out: int,
        err: int,
        env: Mapping[str, str] | None = None,
        isolated: bool = False,
    ) -> socket.socket:
        """Start the command with these as its stdout and stderr; what is returned gives its wait status once it has ended.

        Of a process with the stack the arguments begin with the module, and ``isolated`` leaves the command nothing but
        loopback. ``env``: in place of this process' environment.
        """
        environment = dict(env) if env is not None else {**os.environ, "PYTHONPATH": str(REPO)}
        request = {"arguments": [*arguments], "cwd": str(cwd), "env": environment, "isolated": isolated}
        answer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answer.connect(self._address)
        socket.send_fds(answer, [json.dumps(request).encode()], [out, err])
        return answer


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Returns in each process that is to run a command what it is; ends when nobody is there to ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for commands are waited for by nobody
    address = requests.getsockname()
    while True:
        if sys.stdin in select.select([requests, sys.stdin], [], [])[0]:
            shutil.rmtree(Path(address).parent)
            os._exit(0)
        answer, _ = requests.accept()
        request, descriptors, _, _ = socket.recv_fds(answer, 1 << 20, 2)
        if request and os.fork() == 0:
            break
        answer.close()
        for descriptor in descriptors:
            os.close(descriptor)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out, err = descriptors
    child = os.fork()
    if child:
        os.close(out)
        os.close(err)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.alarm(SECONDS)
        _, status = os.waitpid(child, 0)
        with answer:
            answer.send(str(status).encode())
        os._exit(0)
    answer.close()
    for descriptor, number in ((out, 1), (err, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    request_read: dict[str, Any] = json.loads(request)
    return request_read


PRELOADED = ("chain", "job", "resolve.resolve", "plan.predict", "report.comparison", "report.metrics", "cli.app")
"""What commands import; nothing of it imports torch. The command line last: it defers what is not imported yet."""


def main() -> None:
    """Import the command, then wait for what to run."""
    if sys.argv[2:]:
        from tests import loopback
        from tools import forking

        os.umask(0o022)  # a shell's: what a command makes is private all the same
        given = dict(os.environ)
        forking.warm()
        importlib.import_module("tests.command")  # what tests.training.forked imports
        importlib.import_module("tests.damage")
        os.environ.clear()
        os.environ.update(given)
        request = _serve(socket.socket(fileno=int(sys.argv[1])))
        if request["isolated"]:
            loopback.isolate()
        forking.become(request["arguments"][0], request["arguments"][1:], request["env"], request["cwd"])
    for name in (*(f"clustertune.{name}" for name in PRELOADED), "rich.console", "rich.table"):
        importlib.import_module(name)
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]  # as python -m does
    sys.argv = ["clustertune", *request["arguments"]]
    runpy.run_module("clustertune", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
