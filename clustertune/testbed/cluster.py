"""A real Slurm on one machine, thrown away after use: nodes that lose power, links that are cut or slow, preemption."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from clustertune.launch.slurm import ENDED as DONE
from clustertune.launch.slurm import parse_jobs
from clustertune.testbed import inside, spec
from clustertune.testbed.files import ClusterFolder
from clustertune.testbed.spec import LOGIN, ClusterSpec

_STRIPPED = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SINFO", "SQUEUE", "SCONTROL", "SCANCEL")
"""Variables of a job in which this runs, or of the user's real cluster: they would steer the commands given here."""
_READY = ("idle", "mixed", "allocated", "planned")
_LONGEST_ROOT = 40
"""Bytes: what a socket's path of 107 leaves beside a node's name, a job and a step."""


def commands_environment(conf: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for the cluster's commands."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_STRIPPED)}
    return {**inherited, "SLURM_CONF": str(conf), "PATH": spec.search_path(), **(extra or {})}


def enter(pid: int, prefix: Sequence[str] | None, cwd: Path) -> list[str]:
    """What stands before a command that is to run in the namespaces of process ``pid``; nothing without namespaces."""
    if prefix is None:
        return []
    user = ["--user", "--preserve-credentials"] if "--user" in prefix else []
    spaces = ["nsenter", f"--target={pid}", *user, "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
    # nsenter forks to be in the namespace of processes: without the death signal a killed command would continue in there.
    return [*spaces, "setpriv", "--pdeathsig", "KILL", "env", f"--chdir={cwd}", "--"]


class TemporaryCluster:
    """A temporary Slurm. A context manager; everything of it ends with this process in any case.

    The nodes see this machine's file system, but have a ``/dev/shm`` and ``scratch`` of their own where they are isolated.
    Partition ``gpu`` is the default; a job in ``urgent`` preempts what runs there. Node numbers count from 1; 0 is the login
    node. Methods raise Failed or TimeoutError with Slurm's message.
    """

    def __init__(self, shape: ClusterSpec | None = None) -> None:
        self.spec = shape or ClusterSpec()
        self.prefix = spec.choose(self.spec)
        self.isolated = self.prefix is not None
        where = tempfile.gettempdir()
        self.root = Path(tempfile.mkdtemp(prefix="ct-", dir=where if len(where) <= _LONGEST_ROOT - 12 else "/tmp"))  # noqa: S108
        self.layout = ClusterFolder(self.root, self.spec, self.isolated)
        self.names = self.layout.names
        self._login: LoginProcess | None = None
        self._inits: dict[int, int] = {}

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self, timeout: float = 60) -> TemporaryCluster:
        """Start it and wait until all nodes are idle. Raises Failed with the end of the logs."""
        end = time.monotonic() + timeout
        try:
            self.layout.write()
            self._login = LoginProcess(self.root, self.prefix or ())
            self._login.started(timeout)
            for index in range(1, len(self.names) + 1):
                self.start_node(index, wait=False)
            for index in range(1, len(self.names) + 1):
                self.wait_node(index, timeout=max(1.0, end - time.monotonic()))
        except (ClusterFailed, TimeoutError) as error:
            log_lines = self.logs()
            self.stop()
            raise ClusterFailed(f"the temporary Slurm did not start: {error}\n{log_lines}") from None
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End it and leave nothing. May be called twice."""
        login, self._login = self._login, None
        if login is not None:
            login.end()
        self._inits.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> TemporaryCluster:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def login_pid(self) -> int:
        """The first process, as this one sees it; nsenter(1) takes it."""
        return self._started().pid

    def _started(self) -> LoginProcess:
        if self._login is None:
            raise ClusterFailed("the cluster is not running")
        return self._login

    def logs(self, lines: int = 8) -> str:
        """The last errors of each log, and where there is none its end."""
        texts = []
        for path in sorted((self.root / "log").glob("*")):
            with contextlib.suppress(OSError):
                text = [line for line in path.read_text(errors="replace").splitlines() if "pmix" not in line]
                shown = [line for line in text if re.search("error|fatal|fail", line, re.IGNORECASE)] or text
                if shown and not path.name.endswith(("-slurmd.out", "-slurmctld.out")):  # the same stands in their .log
                    texts.append("\n  ".join([f"{path.name}:", *shown[-lines:]]))
        return "\n".join(texts)

    # --- commands ----------------------------------------------------------------------------------------------------

    def run(
        self,
        command: Sequence[str | Path],
        node: int = 0,
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, or on node ``node``, and capture its output. Raises Failed where it fails."""
        where = (cwd or Path.cwd()).resolve()
        pid = self._inits[node] if node else self.login_pid
        done = subprocess.run(
            [*enter(pid, self.prefix, where), *map(str, command)],
            cwd=where,
            env=commands_environment(self.root / "slurm.conf", env),
            text=True,
            errors="replace",
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise ClusterFailed(f"{' '.join(map(str, command))} -> {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
        return done

    def submit(
        self,
        script: Path | str,
        *arguments: str | Path,
        options: Sequence[str] = (),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """``sbatch OPTIONS SCRIPT ARGUMENTS``. Returns the job's id."""
        done = self.run(["sbatch", "--parsable", *options, script, *arguments], cwd=cwd, env=env)
        return int(done.stdout.strip().splitlines()[-1].split(";")[0])

    def jobs(self, job: int | str) -> list[dict[str, str]]:
        """What ``scontrol show job`` says, a record for each task of an array."""
        return parse_jobs(self.run(["scontrol", "show", "job", str(job)]).stdout)

    def job(self, job: int | str) -> dict[str, str]:
        """The record of a job (of an array the first task's)."""
        return self.jobs(job)[0]

    def wait(self, job: int | str, states: str | Iterable[str] = DONE, timeout: float = 120) -> dict[str, str]:
        """Wait until a job is in one of ``states``. Raises TimeoutError, at once where it has ended in another.

        ``sbatch --wait`` looks only after 2, 10, 42 s.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        end = time.monotonic() + timeout
        while True:
            record = self.job(job)
            state = record["JobState"]
            if state in wanted:
                return record
            if time.monotonic() > end or state in DONE:
                raise TimeoutError(f"job {job} is {state} ({record.get('Reason')}), not {' or '.join(sorted(wanted))}")
            time.sleep(0.1)

    # --- nodes -------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> set[int]:
        """Numbers of the nodes that are switched on."""
        return set(self._inits)

    def start_node(self, index: int, *, wait: bool = True) -> None:
        """Switch a node on."""
        inner = int(self._started().order(node=index))
        self._inits[index] = self._outer(inner) if self.isolated else inner
        if wait:
            self.wait_node(index)

    def _outer(self, inner: int) -> int:
        """The process here that the login node calls ``inner``."""
        depth = len(inner_ids(self.login_pid))
        for pid in inside.descendants(self.login_pid):
            if inner_ids(pid)[depth - 1 :] == [inner, 1]:
                return pid
        raise ClusterFailed("a node's first process is gone")

    def node_state(self, index: int) -> str:
        """As sinfo says it: ``idle``, ``mixed``, ``down*``, ..."""
        partition = self.spec.given.partition if self.spec.given else "gpu"
        command = ["sinfo", "--noheader", f"--partition={partition}", f"--nodes={self.names[index - 1]}", "--format=%T"]
        return self.run(command).stdout.strip()

    def wait_node(self, index: int, states: Iterable[str] = _READY, timeout: float = 120) -> str:
        """Wait until a node is in one of ``states``. Raises TimeoutError."""
        wanted, seen = set(states), ""

        def there() -> bool:
            nonlocal seen
            with contextlib.suppress(ClusterFailed):  # the controller may just be starting
                seen = self.node_state(index)
            return seen in wanted

        self._until(there, timeout, f"{self.names[index - 1]} is not {' or '.join(sorted(wanted))}")
        return seen

    @staticmethod
    def _until(test: Callable[[], object], timeout: float, what: str) -> None:
        if not inside.until(test, timeout):
            raise TimeoutError(f"{what} after {timeout:.0f} s")


__all__ = ["DONE", "LOGIN", "ClusterFailed", "ClusterSpec", "TemporaryCluster"]


# --- login ----------------------------------------------------------------------------------------------------------------

# The owner's end of a cluster's first process: start it, give it orders, end it by letting go.


class ClusterFailed(RuntimeError):
    """Something of the temporary cluster did not do what it must."""


class LoginProcess:
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
                raise ClusterFailed("the cluster's first process is gone") from None
            answer = self._read(timeout)
        if answer["code"]:
            raise ClusterFailed(f"{order}: {answer['err'].strip() or answer['code']}")
        return str(answer["out"])

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        end = time.monotonic() + timeout
        while b"\n" not in self._rest:
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ClusterFailed(f"no answer from the cluster's first process in {timeout:.0f} s")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise ClusterFailed("the cluster's first process ended")
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
