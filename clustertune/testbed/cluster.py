"""A real Slurm on one machine, thrown away after use: nodes that lose power, links that are cut or slow, preemption.

:func:`rehearse` takes a job from submission to its end on one, and :func:`try_out` the files of a cluster, in one call.
"""

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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from clustertune.cluster import schema as cluster_schema
from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.slurm import ENDED as DONE
from clustertune.launch.slurm import parse_jobs
from clustertune.setup.slurm_files import GRES_CONF, HOSTS, SLURM_CONF, SLURMDBD_CONF
from clustertune.testbed import inside, spec
from clustertune.testbed.spec import LOGIN, ClusterFolder, ClusterSpec, GivenFiles

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
        accepted = {states} if isinstance(states, str) else set(states)
        end = time.monotonic() + timeout
        while True:
            record = self.job(job)
            state = record["JobState"]
            if state in accepted:
                return record
            if time.monotonic() > end or state in DONE:
                raise TimeoutError(f"job {job} is {state} ({record.get('Reason')}), not {' or '.join(sorted(accepted))}")
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
        accepted, seen = set(states), ""

        def is_ready() -> bool:
            nonlocal seen
            with contextlib.suppress(ClusterFailed):  # the controller may just be starting
                seen = self.node_state(index)
            return seen in accepted

        self._until(is_ready, timeout, f"{self.names[index - 1]} is not {' or '.join(sorted(accepted))}")
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


# --- rehearsal --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RehearsalResult:
    """What became of a rehearsal."""

    job: int
    state: str
    """Slurm's word, such as COMPLETED."""
    code: int
    """The job's exit code; 1 where it ended by a signal."""
    log: Path
    """What the job wrote."""


def rehearse(shape: ClusterSpec, script: Path, arguments: Sequence[str], run_dir: Path) -> RehearsalResult:
    """Submit ``script ARGUMENTS`` on a cluster of this shape, which is the job's size too, and follow it to its end.

    The job's log is ``RUN_DIR.log``. The cluster is ended in any case. Raises UserError where there can be none, or where
    Slurm refuses the job.
    """
    log = run_dir.with_name(f"{run_dir.name}.log").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    before = log.stat().st_size if log.exists() else 0  # of an earlier rehearsal with the same run folder
    try:
        began = time.monotonic()
        with TemporaryCluster(shape) as cluster:
            kind = "each in namespaces of its own" if cluster.isolated else "not isolated: no namespaces on this machine"
            say(f"a Slurm of {', '.join(cluster.names)} ({kind}) is up after {time.monotonic() - began:.1f} s")
            options = ["--export=NIL", f"--nodes={len(cluster.names)}", f"--output={str(log).replace('%', '%%')}"]
            options += [f"--gpus-per-node={shape.gpus}"] if shape.gpus else []
            job = cluster.submit(script, *arguments, options=options)
            say(f"job {job}: sbatch {' '.join([*options, str(script), *arguments])}")
            record = follow(cluster, job, AddedLines(log, before))
    except ClusterFailed as error:
        raise UserError(Problem(str(error)), ExitCode.FAILED) from None
    state = record["JobState"]
    number = int(record.get("ExitCode", "0:0").partition(":")[0])
    code = 0 if state == "COMPLETED" else number or int(ExitCode.FAILED)
    say(f"the temporary Slurm is stopped; the job ended as {state}: {run_dir}, its log {log}")
    return RehearsalResult(job, state, code, log)


# --- follow ---------------------------------------------------------------------------------------------------------------

# Follow a job to its end: what state it is in and why, and what it writes.

_LOOK = 0.5
"""Seconds between two looks."""


class AddedLines:
    """The lines that are added to a file, which need not be there yet."""

    def __init__(self, path: Path, at: int = 0) -> None:
        self.path, self._at = path, at

    def lines(self, *, rest: bool = False) -> list[str]:
        """The whole lines since the last call; with ``rest`` an unfinished one too."""
        added = self.path.read_bytes()[self._at :] if self.path.exists() else b""
        complete = added if rest else added[: added.rfind(b"\n") + 1]
        self._at += len(complete)
        return complete.decode(errors="replace").splitlines()


def follow(cluster: TemporaryCluster, job: int, log: AddedLines) -> dict[str, str]:
    """Say what changes until the job has ended. Returns its last record, with its state under ``JobState``."""
    began, shown = time.monotonic(), ""
    while True:
        record = cluster.job(job)
        ended = record["JobState"] in DONE
        for line in log.lines(rest=ended):
            say(f"  | {line}")
        if (now := describe(record)) != shown or ended:
            shown = now
            say(f"[{time.monotonic() - began:.0f} s] job {job}: {now}")
        if ended:
            return record
        time.sleep(_LOOK)


def describe(record: dict[str, str]) -> str:
    """A job's state in Slurm's words, with why it waits, where it runs or how it ended."""
    state, restarts = record["JobState"], record.get("Restarts", "0")
    code = record.get("ExitCode", "0:0")
    more = {"PENDING": record.get("Reason", ""), "RUNNING": f"on {record.get('NodeList', '?')}"}.get(state, "")
    more = f"exit code {code}" if state in DONE and code != "0:0" else "" if more == "None" else more
    return ", ".join(filter(None, [state, more, f"restarted {restarts} x" if restarts != "0" else ""]))


# --- tryout ---------------------------------------------------------------------------------------------------------------

# Start the files that were made for a cluster as a temporary Slurm here, before a machine of that cluster gets them.

NODES = 4
"""Of a cluster with more only so many are started; the others stand in the files, and are down."""


def given(cluster: cluster_schema.Cluster, texts: Mapping[str, str]) -> GivenFiles:
    """The generated files (path to text) in the form that a temporary cluster takes."""
    assert cluster.slurm
    return GivenFiles(
        slurm_conf=texts[SLURM_CONF],
        gres_conf=texts[GRES_CONF] if cluster.compute.gpus else "",
        hosts=texts[HOSTS],
        dbd_conf=texts.get(SLURMDBD_CONF),
        partition=cluster.slurm.partition,
    )


def shape(cluster: cluster_schema.Cluster, texts: Mapping[str, str], nodes: int = NODES) -> ClusterSpec:
    """A temporary cluster of the first ``nodes`` compute nodes, under their own names."""
    names = tuple(host.name for host in cluster.compute_nodes[:nodes])
    return ClusterSpec(nodes=names, gpus=cluster.compute.gpus, isolation="netns", given=given(cluster, texts))


def try_out(cluster: cluster_schema.Cluster, texts: Mapping[str, str]) -> dict[str, Any]:
    """Start Slurm with the files, run a job on all started nodes that takes all of their GPUs, and end it again.

    Returns the names of the nodes, and the seconds until all were idle. Raises UserError where it cannot be started here, or
    does not work, with Slurm's own message.
    """
    began = time.monotonic()
    try:
        with TemporaryCluster(shape(cluster, texts)) as slurm:
            seconds = time.monotonic() - began
            gpus = [f"--gpus-per-node={cluster.compute.gpus}"] if cluster.compute.gpus else []
            command = ["srun", f"--nodes={len(slurm.names)}", "--ntasks-per-node=1", "--exclusive", *gpus, "hostname"]
            seen = slurm.run(command, timeout=120).stdout.split()
    except ClusterFailed as error:
        raise UserError(Problem(str(error), fix="the lines above are Slurm's own"), ExitCode.FAILED) from None
    if sorted(seen) != sorted(slurm.names):
        text = f"a job on {', '.join(slurm.names)} ran on {', '.join(seen) or 'none'}"
        raise UserError(Problem(text, fix="compare the names with what hostname prints there"), ExitCode.FAILED)
    return {"nodes": slurm.names, "seconds": round(seconds, 2)}
