"""Training started by calls of ``launch/torchrun.sh``, one on each machine, by hand or by ssh in any order.

The calls become one attempt by files in the run folder. Node 0's call opens a rendezvous: ``torchrun/call.json`` with an id of
its own, and a heartbeat that shows it lives. Every other call answers that id with a file which only one process can create,
and then waits for what node 0 tells: the attempt to take part in, or that there is nothing to do. What an earlier round of
calls left behind has another id: two rounds never mix, no matter which process was killed, and when. No clock is compared
between machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clustertune.chain import Chain
from clustertune.console import say
from clustertune.errors import ExitCode, UserError
from clustertune.events import read_text
from clustertune.launch import node
from clustertune.launch.agent import await_object, await_records, read_anew
from clustertune.launch.plan import OUTCOME, AttemptPlan, Node
from clustertune.launch.rendezvous import interface_to, network_environment
from clustertune.manifest import write_durably
from clustertune.rundir import RunDir

FOLDER = "torchrun"
CALL = "call.json"
ANSWER = "answer.json"
HEARTBEAT = "heartbeat"
HEARTBEAT_SECONDS = 5.0
DEAD_SECONDS = 120.0
"""Without a heartbeat for so long, node 0's call counts as dead: 24 of them, twice the 60 s that an NFS client may cache
a file's attributes (acregmax, acdirmax of nfs(5))."""
POLL_SECONDS = 0.3
AGAIN = "start the same calls again"
OUTCOME_SECONDS = 60.0
"""How long a node whose ranks have ended waits for node 0's judgement, which itself waits up to 20 s for all records."""


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
    port: int | None = None
    wait: float = 1800.0
    """Seconds to wait for the calls on the other nodes."""
    job: str | None = None
    """The id of the job that makes these calls again and again: where it makes no progress, it is stopped (exit 93)."""

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
            port=self.server.call.port,
        )

    def start(self, plan: AttemptPlan) -> bool:
        """This node's ranks beside those of the other calls."""
        self.server.announce(plan.attempt)
        self.server.call.take_part(plan.attempt, quiet=self.quiet)
        await_records(self.run.path, plan, range(len(plan.nodes)))
        return False


def join(call: TorchrunCall, *, quiet: bool) -> ExitCode:
    """Another node's call: wait for node 0's, run this node's ranks of its attempt, and end with the attempt's own code.

    Raises UserError where node 0 does not call, or its call does not fit this one.
    """
    say(f"node {call.node} waits for node 0 in {call.run_path}")
    attempt = RendezvousClient(call).join()
    if isinstance(attempt, ExitCode):
        return attempt
    ended = call.take_part(attempt, quiet=quiet)
    judged = await_object(RunDir(call.run_path).attempt(attempt) / OUTCOME, OUTCOME_SECONDS).get("code")
    if isinstance(judged, int) and judged in set(ExitCode):
        return ExitCode(judged)
    return ExitCode.OK if ended == 0 else ExitCode.AGAIN


@dataclass
class RendezvousServer:
    """Node 0's side. Use it as a context manager: the heartbeat stops at its end, and who waits receives the exit code."""

    call: TorchrunCall
    call_id: str = field(default_factory=lambda: secrets.token_hex(8))
    _stop: threading.Event = field(default_factory=threading.Event)
    _code: ExitCode = ExitCode.AGAIN

    @property
    def folder(self) -> Path:
        return self.call.run_path / FOLDER / self.call_id

    def __enter__(self) -> RendezvousServer:
        above = self.folder.parent
        before = [path for path in above.iterdir() if path.is_dir()] if above.is_dir() else []
        self.folder.mkdir(parents=True)
        self._write_heartbeat(0)
        sizes = {"nodes": self.call.nodes, "ranks_per_node": self.call.ranks_per_node}
        write_durably(above / CALL, json.dumps({"id": self.call_id, **sizes, "host": self.call.local.name}) + "\n")
        for path in before:
            shutil.rmtree(path, ignore_errors=True)
        threading.Thread(target=self._keep_heartbeat, name="torchrun-heartbeat", daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._code = error.code if isinstance(error, UserError) else ExitCode.AGAIN
        self._stop.set()
        with contextlib.suppress(OSError):
            write_durably(self.folder / ANSWER, json.dumps({"code": int(self._code)}) + "\n")

    def done(self) -> None:
        """Training is finished: the other calls need not wait any longer."""
        self._code = ExitCode.OK

    def gather(self) -> tuple[Node, ...]:
        """All nodes in rank order, as soon as every one has answered. Raises UserError (exit 75) naming those that have not."""
        found: dict[int, Node] = {0: self.call.local}
        deadline = time.monotonic() + self.call.wait
        while missing := [number for number in range(self.call.nodes) if number not in found]:
            if time.monotonic() > deadline:
                names = ", ".join(f"node {number}" for number in missing)
                fix = f"start launch/torchrun.sh with --node-rank {missing[0]} there; all nodes must see this folder"
                text = f"no call of {names} within {self.call.wait:.0f} s"
                raise UserError(text, file=str(self.call.run_path), fix=fix, code=ExitCode.AGAIN)
            for number in missing:
                if body := read_anew(self.folder / f"node-{number}.json"):
                    found[number] = Node(str(body["name"]), str(body["address"]))
            time.sleep(POLL_SECONDS)
        return tuple(found[number] for number in sorted(found))

    def announce(self, attempt: int) -> None:
        """Have every node that has answered begin an attempt; its plan is written before."""
        write_durably(self.folder / ANSWER, json.dumps({"attempt": attempt}) + "\n")

    def _keep_heartbeat(self) -> None:
        count = 0
        while not self._stop.wait(HEARTBEAT_SECONDS):
            count += 1
            with contextlib.suppress(OSError):
                self._write_heartbeat(count)

    def _write_heartbeat(self, count: int) -> None:
        (self.folder / HEARTBEAT).write_text(f"{count}\n")


@dataclass
class RendezvousClient:
    """Another node's side."""

    call: TorchrunCall
    dead_seconds: float = DEAD_SECONDS

    def join(self) -> int | ExitCode:
        """The attempt to take part in; an ExitCode where node 0 ended without one (OK: nothing is left to train).

        Raises UserError: no call in time, or one that had answers from this node already (exit 75); one that does not fit
        this call (exit 2).
        """
        answered, refused, heartbeat, since = "", "", "", time.monotonic()
        while True:
            opened = read_anew(self.call.run_path / FOLDER / CALL)
            now, call_id = time.monotonic(), str(opened.get("id", ""))
            folder = self.call.run_path / FOLDER / call_id
            if call_id and call_id not in (answered, refused):
                # An end that was announced before this answer belongs to an earlier round, unless nothing is left to train.
                over = read_anew(folder / ANSWER)
                if over == {"code": 0}:
                    return ExitCode.OK
                if not over and self._answer(folder, opened):
                    answered = call_id
                else:
                    refused = call_id
                heartbeat, since = read_text(folder / HEARTBEAT), now
            elif call_id and (heard := read_text(folder / HEARTBEAT)) != heartbeat:
                if call_id == refused:  # it lives, and has another call for this node
                    text = f"another call is node {self.call.node} already"
                    raise UserError(text, file=str(self.call.run_path), key="--node-rank", fix="each node has its own number")
                heartbeat, since = heard, now
            if call_id == answered and (answer := read_anew(folder / ANSWER)):
                return int(answer["attempt"]) if "attempt" in answer else ExitCode(int(answer["code"]))
            if now - since > (self.dead_seconds if call_id and call_id == answered else self.call.wait):
                raise self._server_missing(answered == call_id != "", now - since)
            time.sleep(POLL_SECONDS)

    def _answer(self, folder: Path, opened: dict[str, Any]) -> bool:
        """Answer a call; False where it was answered before, or is gone."""
        for key, own in (("nodes", self.call.nodes), ("ranks_per_node", self.call.ranks_per_node)):
            if int(opened[key]) != own:
                option = f"--{key.replace('_', '-')}"
                text = f"node 0 was started with {option} {opened[key]}, this call with {own}"
                raise UserError(text, file="command line", key=option, fix="give the same to all")
        try:
            # "x": only one process can create it. Node 0 takes it for absent until it is written to its end.
            with (folder / f"node-{self.call.node}.json").open("x") as out:
                out.write(json.dumps(asdict(self.call.local)) + "\n")
        except OSError:
            return False
        return True

    def _server_missing(self, answered: bool, waited: float) -> UserError:
        text = f"node 0's call shows no life for {waited:.0f} s" if answered else f"no call of node 0 within {waited:.0f} s"
        fix = f"{AGAIN}; --run-dir must be a folder that all nodes see"
        return UserError(text, file=str(self.call.run_path), fix=fix, code=ExitCode.AGAIN)
