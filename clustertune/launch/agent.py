"""The process of one node: starts its ranks, asks them to save on a signal, and ends them when they hang or are superseded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from clustertune import secrets
from clustertune.errors import ExitCode, Problem
from clustertune.launch.attempt import AttemptPlan, newest_attempt
from clustertune.manifest import read_object, read_text, read_whole, write_durably
from clustertune.process import handled, start, stop_signals
from clustertune.rundir import RunDir

POLL_SECONDS = 0.25
PEER_SECONDS = 10.0
"""How long a node's ranks may outlive those of a node that failed: they may wait half an hour for a peer that never joins."""
MONITOR_SECONDS = 5.0
"""How long the sampler and the live page may take to write what they have, once the ranks have ended."""
LINGER_SECONDS = 20.0
"""How long a node whose ranks failed waits for the messages of the other nodes: the scheduler kills them when it ends."""


def launcher_pid_file(folder: Path, node: int) -> Path:
    """Holds the parent that a node's ranks must have. A rank that finds another one is an orphan, and ends."""
    return folder / f"node-{node}.pid"


def log_file(folder: Path, node: int) -> Path:
    """What the launcher of a node printed: mostly tracebacks of its own when a rank fails."""
    return folder / f"node-{node}.log"


def stop_request_file(folder: Path) -> Path:
    """Where it is there, the ranks are to save and stop: a warning that is not sent as a signal to every process of a step.

    A container has processes that must outlive it: squashfuse, by which a rootless Apptainer mounts the image, ends with
    SIGUSR1, and the ranks could not read a file of it any more while they save.
    """
    return folder / "asked"


def record_file(folder: Path, node: int) -> Path:
    """How a node's part of the attempt ended."""
    return folder / f"node-{node}.json"


def leave_record(
    folder: Path,
    node: int,
    code: ExitCode,
    problems: Sequence[Problem],
    *,
    launcher: int | None = None,
    signals: Sequence[str] = (),
) -> None:
    """Write ``node-N.json``. ``launcher``: its exit code, None where it was never started; ``signals``: their names."""
    record = {
        "node": node,
        "host": os.uname().nodename,
        "code": int(code),
        "launcher": launcher,
        "asked": list(signals),
        "time": time.time(),
        "problems": [asdict(problem) for problem in problems],
    }
    with contextlib.suppress(OSError):  # a full disk, or a folder that cannot be seen, is judged by who started the attempt
        write_durably(record_file(folder, node), json.dumps(record) + "\n")


@dataclass
class Agent:
    """The ranks of one node of an attempt, from their start to their end."""

    run_path: Path
    plan: AttemptPlan
    node: int
    patient: bool = False
    """A signal that comes twice does not end the ranks at once: schedulers send SIGTERM to every process, again and again."""
    received: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return RunDir(self.run_path).attempt(self.plan.attempt)

    def run(self, command: Sequence[str], *, quiet: bool, environment: Mapping[str, str] | None = None) -> ExitCode:
        """Run the launcher's command to its end and leave ``node-N.json``.

        Returns OK where the ranks ended by themselves, AGAIN where this agent ended them (hung, superseded, asked before
        there was anything to save), FAILED otherwise. What it means for the attempt is judged from all records together.
        The launcher's own output goes to ``node-N.log``: what it prints when a rank fails is a traceback of its own code.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with log_file(self.folder, self.node).open("ab") as log:
            out, variables = log if quiet else sys.stderr.fileno(), of_ranks(environment or {})
            # A session of its own keeps a terminal's Ctrl-C from reaching a launcher, which would kill the ranks after 30 s: it
            # is passed on by _forward, and the ranks save before they end. No thread is running here yet.
            child = start(command, signal.SIGKILL, stdout=out, stderr=log, env=variables)
        try:
            with handled(self._forward(child)):
                launcher_pid_file(self.folder, self.node).write_text(f"{child.pid}\n")
                with monitored(self.run_path, self.plan, self.node, of_run=self.node == 0):
                    ended = self._watch(child)
        except OSError:
            child.kill()
            raise
        return self._leave_record(ended)

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the launcher; end it where its ranks are superseded or show no life."""
        monitor, forward = HeartbeatMonitor(self.folder, self.plan, self.node), self._forward(child)
        alone_since: float | None = None
        while True:
            try:
                return child.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            if (newest := newest_attempt(self.run_path)) > self.plan.attempt:
                text = f"attempt {newest} has taken over from attempt {self.plan.attempt}; stopping this one"
                self.problems.append(Problem(text, file=str(self.run_path)))
            elif hung := monitor.look():
                self.problems += hung
                monitor.dump_stacks()
            if signal.SIGUSR1 not in self.received and self._stop_request().exists():
                forward(signal.SIGUSR1, None)
            if alone_since is None and self._peer_failed():
                alone_since = time.monotonic()
            if self.problems or (alone_since is not None and time.monotonic() - alone_since > PEER_SECONDS):
                child.kill()  # the ranks die with it, stopped ones too
                return child.wait()

    def _stop_request(self) -> Path:
        """The file that asks the ranks to save and stop once it is there."""
        return stop_request_file(self.folder)

    def _peer_failed(self) -> bool:
        """Whether another node has left a record that says so."""
        others = [node for node in range(len(self.plan.nodes)) if node != self.node]
        if others:
            ask_anew(self.folder)
        return any(node_record(self.folder, node).get("code") for node in others)

    def _forward(self, child: subprocess.Popen[bytes]) -> Any:
        """A handler that asks every rank to save and stop; an impatient Ctrl-C or ``kill``, given twice, ends them at once."""

        def handle(number: int, _frame: FrameType | None) -> None:
            # Slurm warns with SIGUSR1 and ends with SIGTERM: another signal is no reason to break off the save of the first.
            impatient = not self.patient and number in self.received and number != signal.SIGUSR1
            self.received.append(number)
            # No rank has anything to save before all are up.
            if impatient or len(rank_pids(self.folder, self.plan, self.node)) < self.plan.ranks_per_node:
                child.kill()  # the ranks die with it
            else:
                signal_ranks(self.folder, self.plan, self.node, signal.SIGUSR1)

        return handle

    def _leave_record(self, ended: int) -> ExitCode:
        if self.problems:
            code = ExitCode.AGAIN
        elif ended == 0 or self._orderly():
            code = ExitCode.OK
        else:
            code = ExitCode.AGAIN if self.received else ExitCode.FAILED
        leave_record(self.folder, self.node, code, self.problems, launcher=ended, signals=self._stop_signals())
        return code

    def _stop_signals(self) -> list[str]:
        """Which signals asked for a stop. Slurm sends SIGTERM also to what is left of a step of which a node failed."""
        names = [signal.Signals(number).name for number in self.received]
        return names if self.plan.sigterm_asks else [name for name in names if name != "SIGTERM"]

    def _orderly(self) -> bool:
        """Whether every rank of the node ended by itself, finished or stopped as asked; launchers know 0 and failure only."""
        codes = [rank_record(self.folder, rank).get("code") for rank in self.plan.ranks_of(self.node)]
        return all(code in (int(ExitCode.OK), int(ExitCode.AGAIN)) for code in codes)

    def linger(self) -> None:
        """Wait until every node has left its record: a scheduler ends the others as soon as this one ends with a failure."""
        for number in stop_signals():  # the records of the ranks say what they were asked
            signal.signal(number, signal.SIG_IGN)
        await_records(self.run_path, self.plan, {*range(len(self.plan.nodes))} - {self.node})


def of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of ranks: this process's with ``environment``, and stacks of a crash in native code."""
    return {**os.environ, **environment, "PYTHONFAULTHANDLER": "1"}


def await_records(run_path: Path, plan: AttemptPlan, nodes: Iterable[int]) -> None:
    """Wait until these nodes have left their records, as long as no attempt has followed and :data:`LINGER_SECONDS` at most."""
    folder, missing = RunDir(run_path).attempt(plan.attempt), set(nodes)
    deadline = time.monotonic() + LINGER_SECONDS
    while missing and time.monotonic() < deadline and newest_attempt(run_path) <= plan.attempt:
        ask_anew(folder)
        if missing := {node for node in missing if not record_file(folder, node).exists()}:
            time.sleep(POLL_SECONDS)


def monitored(run_path: Path, plan: AttemptPlan, node: int, *, of_run: bool) -> contextlib.AbstractContextManager[None]:
    """Have this node measured while the context lasts; with ``of_run`` the run's live page is kept here, too."""
    run = str(run_path.absolute())
    programs = [["sampler", run, str(plan.attempt), str(node)], *([["live", run]] if of_run else [])]
    return _beside(programs, log_file(RunDir(run_path).attempt(plan.attempt), node))


def measured(run_path: Path) -> contextlib.AbstractContextManager[None]:
    """Have this machine measured while it evaluates: as the attempt of the present time, negative, in Unix seconds; and the
    run's live page kept."""
    run = str(run_path.absolute())
    return _beside([["sampler", run, str(-int(time.time())), "0"], ["live", run]], Path(os.devnull))


@contextlib.contextmanager
def _beside(programs: Sequence[Sequence[str]], log_path: Path) -> Iterator[None]:
    """Programs of the monitor as processes of their own: where one cannot start or ends, the work continues."""
    children = []
    environment = {name: value for name, value in os.environ.items() if name not in secrets.SECRET}
    for name, *more in programs:
        command = [sys.executable, "-m", f"clustertune.monitor.{name}", str(os.getpid()), *more]
        with contextlib.suppress(OSError), log_path.open("ab") as log:
            children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment))
    try:
        yield
    finally:
        for child in children:
            child.terminate()  # they write their last figures
        deadline = time.monotonic() + MONITOR_SECONDS
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))
            child.kill()  # one that hangs in a driver is left to the kernel


def ask_anew(folder: Path) -> None:
    """Have an NFS client ask the server what a folder holds: else it may answer up to 60 s from its cache of absent names."""
    with contextlib.suppress(OSError):
        os.listdir(folder)  # noqa: PTH208 - the call itself is what counts


def read_anew(path: Path) -> dict[str, Any]:
    """A JSON object that another node writes; empty where there is none (yet), by the server's word, not a cache's."""
    ask_anew(path.parent)
    return read_object(path)


def await_object(path: Path, seconds: float, give_up: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """:func:`read_anew` as soon as there is one; empty where there is none within ``seconds``, or ``give_up`` says so."""
    deadline, body = time.monotonic() + seconds, read_anew(path)
    while not body and time.monotonic() < deadline and not give_up():
        time.sleep(POLL_SECONDS)
        body = read_anew(path)
    return body


def rank_record(folder: Path, rank: int) -> dict[str, Any]:
    """How a rank says that it ended; empty where it has not (yet)."""
    return _record(folder / f"rank-{rank}.json", "rank")


def node_record(folder: Path, node: int) -> dict[str, Any]:
    """How a node's agent says that its part ended; empty where it has not (yet)."""
    return _record(record_file(folder, node), "node")


def _record(path: Path, key: str) -> dict[str, Any]:
    body = read_object(path)
    return body if key in body and "code" in body else {}


def rank_pids(folder: Path, plan: AttemptPlan, node: int) -> dict[int, int]:
    """The process id of each rank of a node that has begun: rank to id. Ids mean something on that node only."""
    pids = {}
    for rank in plan.ranks_of(node):
        with contextlib.suppress(OSError, ValueError):
            pids[rank] = int(read_whole(folder / f"rank-{rank}.pid").decode())
    return pids


def signal_ranks(folder: Path, plan: AttemptPlan, node: int, number: signal.Signals) -> None:
    """Send a signal to every rank of a node that has begun and still lives."""
    for pid in rank_pids(folder, plan, node).values():
        with contextlib.suppress(OSError):  # it has ended, or another user's process has its id by now
            os.kill(pid, number)


# --- heartbeats -----------------------------------------------------------------------------------------------------------

# Signs of life of a node's ranks: which are stopped, which say nothing any more, and since when.

STOPPED_SECONDS = 30.0
"""A rank that the kernel holds stopped (SIGSTOP, a debugger) for so long is ended: all others wait for it in a collective."""
STARTUP_SECONDS = 3600.0
"""Without a sign of life before the first step, and while saving: loading 812 GB (Llama 3.1 405B) from NFS at 0.3 GB/s takes
45 minutes, writing the 432 GB of a 72B model with AdamW's moments 24."""
LEAST_SECONDS = 300.0
GAPS = 5.0
"""Under way a rank may be silent for 5 times its longest silence so far, and 300 s at least (NVRx waits 300 s for its
heartbeat): an evaluation may be slower than any step."""
AGAIN_FIX = "the next attempt resumes from the newest whole checkpoint"


@dataclass
class _RankState:
    """What was last heard of one rank, by this machine's clock."""

    text: str = ""
    since: float = 0.0
    longest: float = 0.0
    """The longest silence between two signs while training, seconds."""
    trained: bool = False
    """The sign before the last one was of training too, so that the next silence is a step's."""
    stopped_since: float | None = None


@dataclass
class HeartbeatMonitor:
    """The ranks of one node. :meth:`look` is called again and again."""

    folder: Path
    plan: AttemptPlan
    node: int
    clock: Callable[[], float] = time.monotonic
    _states: dict[int, _RankState] = field(default_factory=dict)

    def look(self) -> list[Problem]:
        """The ranks that have to be given up now; none while all live."""
        now = self.clock()
        problems = []
        for rank in self.plan.ranks_of(self.node):
            rank_state = self._states.setdefault(rank, _RankState(since=now))
            heartbeat = read_text(self.folder / f"rank-{rank}.heartbeat")
            if heartbeat != rank_state.text:
                training = _phase(rank_state.text) == _phase(heartbeat) == "train"
                # The first silence ends where the first step begins: a second, where a step of 405B takes seven minutes.
                if training and rank_state.trained:
                    rank_state.longest = max(rank_state.longest, now - rank_state.since)
                rank_state.trained = training
                rank_state.text, rank_state.since = heartbeat, now
            if (text := self._stopped(rank, rank_state, now) or self._silent(rank_state, now)) is not None:
                problems.append(
                    Problem(f"{self.plan.where(rank)} {text}", file=str(self.folder / f"rank-{rank}.log"), fix=AGAIN_FIX)
                )
        return problems

    def _stopped(self, rank: int, rank_state: _RankState, now: float) -> str | None:
        """Held by the kernel: certain, whatever its heartbeats say."""
        pid = read_text(self.folder / f"rank-{rank}.pid").strip()
        if not pid.isdigit() or process_state(int(pid)) not in ("T", "t"):
            rank_state.stopped_since = None
            return None
        if rank_state.stopped_since is None:
            rank_state.stopped_since = now
        held = now - rank_state.stopped_since
        return f"hangs: its process is stopped (state T) for {held:.0f} s" if held >= STOPPED_SECONDS else None

    def _silent(self, rank_state: _RankState, now: float) -> str | None:
        if _phase(rank_state.text) == "end":
            return None
        quiet = now - rank_state.since
        if quiet < self.limit(rank_state):
            return None
        last = " ".join(rank_state.text.split()[1:]) or "nothing at all"
        return f"hangs: no sign of life for {quiet:.0f} s (last: {last})"

    def limit(self, rank_state: _RankState) -> float:
        """Seconds of silence that are allowed now."""
        if self.plan.stall_seconds is not None:
            return self.plan.stall_seconds
        paced = max(LEAST_SECONDS, GAPS * rank_state.longest)
        return paced if rank_state.longest and _phase(rank_state.text) != "save" else max(paced, STARTUP_SECONDS)

    def dump_stacks(self) -> None:
        """Ask every rank of the node for the stacks of its threads, in its own log (faulthandler on SIGUSR2)."""
        signal_ranks(self.folder, self.plan, self.node, signal.SIGUSR2)
        time.sleep(0.5)


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does (proc(5)): R, S, D, T, Z; empty where there is none."""
    try:
        return read_whole(Path(f"/proc/{pid}/stat")).decode().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _phase(heartbeat: str) -> str:
    fields = heartbeat.split()
    return fields[1] if len(fields) > 1 else ""
