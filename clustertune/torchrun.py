"""Training started by calls of ``launch/torchrun.sh``, one on each machine, by hand or by ssh in any order.

The calls become one attempt through a torch TCPStore that node 0's call holds, and that ends with it: the others leave there
who they are, and read which attempt to take part in, or that there is nothing to do. What an earlier round of calls left
behind is gone with its store, whichever process was killed. Like every store of torch it has no password: whoever reaches the
port can end the round.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

from clustertune.chain import Chain
from clustertune.console import say
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch import node
from clustertune.launch.agent import await_object, await_records
from clustertune.launch.attempt import OUTCOME, AttemptPlan, Node
from clustertune.launch.node import interface_to, network_environment
from clustertune.rundir import RunDir

PORT = 29400
"""Of the store: torchrun's own default for its c10d rendezvous."""
POLL_SECONDS = 0.3
STORE_SECONDS = 60.0
"""How long one request to the store may take."""
PARTING_SECONDS = 5.0
"""How long node 0's call waits at its end until the others have read how it ended."""
OUTCOME_SECONDS = 60.0
"""How long a node whose ranks have ended waits for node 0's judgement, which itself waits up to 20 s for all records."""
SIZES, ANSWER, HEARD = "sizes", "answer", "heard"
"""Keys of the store. The answer is ``{"attempt": N}``, or ``{"code": N}`` where the round ends without one."""


@dataclass(frozen=True)
class TorchrunCall:
    """This call among the calls of a run."""

    run_path: Path
    node: int
    nodes: int
    ranks_per_node: int
    local: Node
    """This machine, as the plan names it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of this machine's ranks: interfaces may have other names elsewhere."""
    master: str = "127.0.0.1"
    """Node 0's address, as the others reach it."""
    port: int = PORT
    """Of the store, on node 0; the search for the ranks' own port begins behind it."""
    wait: float = 1800.0
    """Seconds to wait for the calls on the other nodes."""
    job: str | None = None
    """The id of the job that makes these calls again and again: where it makes no progress, it is stopped (exit 93)."""

    @property
    def sizes(self) -> dict[str, int]:
        """What all calls have to agree on, by the option's name."""
        return {"nodes": self.nodes, "ranks-per-node": self.ranks_per_node}

    def take_part(self, attempt: int, *, quiet: bool) -> int:
        """Run this node's ranks of an attempt; 0 where they ended by themselves."""
        os.environ.update(self.environment)
        return node.main(self.run_path, attempt, self.node, quiet=quiet)


def this_machine(number: int, nodes: int, master: str) -> tuple[Node, dict[str, str]]:
    """Node ``number`` as the plan names it, and the environment of its ranks. ``master``: an address of node 0 that all reach.

    Raises UserError where there is no way to the master.
    """
    address, interface = interface_to(master)
    environment = network_environment(interface) if nodes > 1 else {}
    # What torch's launcher sets where it starts several ranks: the sums do not depend on how many start on a node.
    environment.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    return Node(os.uname().nodename, master if number == 0 else address), environment


# --- node 0 ------------------------------------------------------------------------------------------------------------


@dataclass
class TorchrunChain(Chain):
    """Node 0's call: all stages, of which the training takes part on every node."""

    server: RendezvousServer = field(kw_only=True)
    nodes: tuple[Node, ...] = ()

    @property
    def job(self) -> str | None:
        return self.server.call.job or None

    def get_ready(self) -> None:
        """Wait for the calls of all nodes."""
        self.nodes = self.server.gather()

    def make_plan(self, attempt: int, from_step: int) -> AttemptPlan:
        """Who has called, in rank order."""
        return AttemptPlan(
            attempt=attempt,
            nodes=self.nodes,
            ranks_per_node=self.server.call.ranks_per_node,
            launcher="torchrun",
            job=self.job,
            from_step=from_step,
            port=self.server.call.port + 1,
        )

    def start(self, plan: AttemptPlan) -> bool:
        """This node's ranks beside those of the other calls."""
        self.server.answer({"attempt": plan.attempt})
        self.server.call.take_part(plan.attempt, quiet=self.quiet)
        await_records(self.run.path, plan, range(len(plan.nodes)))
        return False


class RendezvousServer:
    """Node 0's side, as a context manager: at its end who still waits receives the exit code."""

    def __init__(self, call: TorchrunCall) -> None:
        self.call = call
        self._nodes = {0: call.local}
        self._code, self._answered = ExitCode.AGAIN, False

    def __enter__(self) -> RendezvousServer:
        """Raises UserError (exit 75) where the port is taken."""
        from torch.distributed import TCPStore

        if self.call.nodes == 1:
            return self
        try:
            self._store = TCPStore("127.0.0.1", self.call.port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            text, fix = f"port {self.call.port} cannot be bound here: {_first_line(error)}", "give all calls another --port"
            raise UserError(Problem(text, file="command line", key="--port", fix=fix), ExitCode.AGAIN) from None
        self._store.set(SIZES, json.dumps(self.call.sizes))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._code = error.code if isinstance(error, UserError) else ExitCode.AGAIN
        if self.call.nodes == 1:
            return
        if not self._answered:
            self.answer({"code": int(self._code)})
        deadline = time.monotonic() + PARTING_SECONDS
        while self._store.add(HEARD, 0) < len(self._nodes) - 1 and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)
        del self._store  # its port is free again

    def done(self) -> None:
        """Training is finished: the other calls need not wait any longer."""
        self._code = ExitCode.OK

    def gather(self) -> tuple[Node, ...]:
        """All nodes in rank order, as soon as every one has called. Raises UserError (exit 75) naming those that have not."""
        deadline = time.monotonic() + self.call.wait
        while missing := [number for number in range(self.call.nodes) if number not in self._nodes]:
            if time.monotonic() > deadline:
                names = ", ".join(f"node {number}" for number in missing)
                fix = f"start launch/torchrun.sh with --node-rank {missing[0]} there; all nodes must reach --master"
                text = f"no call of {names} within {self.call.wait:.0f} s"
                raise UserError(text, file=str(self.call.run_path), fix=fix, code=ExitCode.AGAIN)
            for number in missing:
                if self._store.check([f"node-{number}"]):
                    self._nodes[number] = Node(**json.loads(self._store.get(f"node-{number}")))
            time.sleep(POLL_SECONDS / 5)
        return tuple(self._nodes[number] for number in sorted(self._nodes))

    def answer(self, body: Mapping[str, int]) -> None:
        """Tell every node that has called the attempt to begin, whose plan is written before, or how the round ended."""
        if self.call.nodes > 1:
            self._store.set(ANSWER, json.dumps(body))
            self._answered = True


# --- the other nodes ---------------------------------------------------------------------------------------------------


def join(call: TorchrunCall, *, quiet: bool) -> ExitCode:
    """Another node's call: wait for node 0's, run this node's ranks of its attempt, and end with the attempt's own code.

    Raises UserError where node 0 does not call, or its call does not fit this one.
    """
    say(f"node {call.node} waits for node 0 at {call.master}:{call.port}")
    attempt = await_attempt(call)
    if isinstance(attempt, ExitCode):
        return attempt
    ended = call.take_part(attempt, quiet=quiet)
    judged = await_object(RunDir(call.run_path).attempt(attempt) / OUTCOME, OUTCOME_SECONDS).get("code")
    if isinstance(judged, int) and judged in set(ExitCode):
        return ExitCode(judged)
    return ExitCode.OK if ended == 0 else ExitCode.AGAIN


def await_attempt(call: TorchrunCall) -> int | ExitCode:
    """The attempt to take part in; an ExitCode where node 0 ended without one (OK: nothing is left to train).

    Raises UserError: no call of node 0 in time, or one that ended (exit 75); one that does not fit this call (exit 2).
    """
    if not _await_port(call):
        return ExitCode.OK
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "ERROR"  # read at import: else a lost store prints a stack trace of C++ too
    from torch.distributed import DistError, TCPStore

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    try:
        store = TCPStore(call.master, call.port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
        for name, size in json.loads(store.get(SIZES)).items():
            if size != call.sizes[name]:
                text = f"node 0 was started with --{name} {size}, this call with {call.sizes[name]}"
                raise UserError(text, file="command line", key=f"--{name}", fix="give the same to all")
        if store.add(f"calls of node {call.node}", 1) > 1:
            text = f"another call is node {call.node} already"
            raise UserError(text, file=str(call.run_path), key="--node-rank", fix="each node has its own number")
        store.set(f"node-{call.node}", json.dumps(asdict(call.local)))
        while not store.check([ANSWER]):
            time.sleep(POLL_SECONDS)
        answer = json.loads(store.get(ANSWER))
        store.add(HEARD, 1)
        return int(answer["attempt"]) if "attempt" in answer else ExitCode(int(answer["code"]))
    except DistError as error:
        text = f"node 0's call has ended, or its store at {call.master}:{call.port} is another program's: {_first_line(error)}"
        fix = "start the same calls again"
        raise UserError(text, file=str(call.run_path), fix=fix, code=ExitCode.AGAIN) from None


def _await_port(call: TorchrunCall) -> bool:
    """Wait for node 0's store; False where the run's training is finished and no call of node 0 is there."""
    deadline = time.monotonic() + call.wait
    while True:
        try:
            socket.create_connection((call.master, call.port), POLL_SECONDS * 10).close()
            return True
        except OSError:
            if RunDir(call.run_path).stage("train") is not None:
                return False
        if time.monotonic() >= deadline:
            text = f"no call of node 0 at {call.master}:{call.port} within {call.wait:.0f} s"
            fix = "start the same calls again, with one --master and --port"
            raise UserError(text, file=str(call.run_path), fix=fix, code=ExitCode.AGAIN)
        time.sleep(POLL_SECONDS)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
