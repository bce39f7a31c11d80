"""How calls on several machines, started by hand or by ssh in any order, become one attempt: files in the run folder.

Node 0's call opens a rendezvous: ``torchrun/call.json`` with an id of its own, and a heartbeat that shows it lives.
Every other call answers that id with a file which only one process can create, and then waits for what node 0 tells: the
attempt to take part in, or that there is nothing to do. What an earlier round of calls left behind has another id: two rounds
never mix, no matter which process was killed, and when. No clock is compared between machines.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, UserError
from clustertune.events import read_text
from clustertune.launch.agent import LINGER_SECONDS, ask_anew, read_anew, record_file
from clustertune.launch.plan import OUTCOME, AttemptPlan, Node, newest_attempt
from clustertune.manifest import write_durably

FOLDER = "torchrun"
CALL = "call.json"
ANSWER = "told.json"
HEARTBEAT = "beat"
BEAT_SECONDS = 5.0
DEAD_SECONDS = 120.0
"""Without a heartbeat for so long, node 0's call counts as dead: 24 of them, twice the 60 s that an NFS client may cache
a file's attributes (acregmax, acdirmax of nfs(5))."""
POLL_SECONDS = 0.3
AGAIN = "start the same calls again"


def interface_to(address: str) -> tuple[str, str | None]:
    """This machine's address on the way to ``address``, and the interface that has it (None where it cannot be determined).

    gloo and NCCL otherwise take what the host name resolves to, which on Debian is 127.0.1.1.
    """
    import psutil

    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(sockaddr)  # sends nothing: it only asks the routing table
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{address}: {error.strerror or error}", file="command line", key="--master", fix="give node 0's address"
        ) from None
    if _is_loopback(own) and not (address == "localhost" or _is_loopback(address)):
        raise UserError(
            f"{address} means this machine's loopback here", file="command line", key="--master", fix="give its address"
        )
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in entries):
            return own, name
    return own, None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def network_environment(interface: str | None) -> dict[str, str]:
    """gloo's and NCCL's choice of interface, where the caller's environment does not make it."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if interface and name not in os.environ}


@dataclass
class RendezvousServer:
    """Node 0's side. Use it as a context manager: the heartbeat stops at its end, and who waits receives the exit code."""

    run_path: Path
    nodes: int
    ranks_per_node: int
    local: Node
    call_id: str = field(default_factory=lambda: secrets.token_hex(8))
    _stop: threading.Event = field(default_factory=threading.Event)
    _code: ExitCode = ExitCode.AGAIN

    @property
    def folder(self) -> Path:
        return self.run_path / FOLDER / self.call_id

    def __enter__(self) -> RendezvousServer:
        above = self.folder.parent
        before = [path for path in above.iterdir() if path.is_dir()] if above.is_dir() else []
        self.folder.mkdir(parents=True)
        self._beat(0)
        call = {"id": self.call_id, "nodes": self.nodes, "ranks_per_node": self.ranks_per_node, "host": self.local.name}
        write_durably(above / CALL, json.dumps(call) + "\n")
        for path in before:
            shutil.rmtree(path, ignore_errors=True)
        threading.Thread(target=self._keep_beating, name="torchrun-beat", daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._code = error.code if isinstance(error, UserError) else ExitCode.AGAIN
        self._stop.set()
        with contextlib.suppress(OSError):
            write_durably(self.folder / ANSWER, json.dumps({"code": int(self._code)}) + "\n")

    def done(self) -> None:
        """Training is finished: nobody needs to wait any longer."""
        self._code = ExitCode.OK

    def gather(self, seconds: float) -> tuple[Node, ...]:
        """All nodes in rank order, as soon as every one has answered. Raises UserError (exit 75) naming those that have not."""
        found: dict[int, Node] = {0: self.local}
        deadline = time.monotonic() + seconds
        while len(found) < self.nodes:
            for node in set(range(1, self.nodes)) - set(found):
                if body := read_anew(self.folder / f"node-{node}.json"):
                    found[node] = Node(str(body["name"]), str(body["address"]))
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.nodes)) - set(found))
                names = ", ".join(f"node {node}" for node in missing)
                fix = f"start launch/torchrun.sh with --node-rank {missing[0]} there; all nodes must see this folder"
                raise UserError(
                    f"no call of {names} within {seconds:.0f} s", file=str(self.run_path), fix=fix, code=ExitCode.AGAIN
                )
            time.sleep(POLL_SECONDS)
        return tuple(found[node] for node in range(self.nodes))

    def tell(self, attempt: int) -> None:
        """Have every node that has answered begin an attempt; its plan is written before."""
        write_durably(self.folder / ANSWER, json.dumps({"attempt": attempt}) + "\n")

    def _keep_beating(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_SECONDS):
            count += 1
            with contextlib.suppress(OSError):
                self._beat(count)

    def _beat(self, count: int) -> None:
        (self.folder / HEARTBEAT).write_text(f"{count}\n")


@dataclass
class RendezvousClient:
    """Another node's side."""

    run_path: Path
    node: int
    nodes: int
    ranks_per_node: int
    local: Node
    seconds: float
    """How long to wait for a call of node 0."""
    dead_seconds: float = DEAD_SECONDS

    def join(self) -> int | ExitCode:
        """The attempt to take part in; an ExitCode where node 0 ended without one (OK: nothing is left to train).

        Raises UserError: no call in time, or one that had answers from this node already (exit 75); one that does not fit
        this call (exit 2).
        """
        answered, refused, heartbeat, since = "", "", "", time.monotonic()
        while True:
            call = read_anew(self.run_path / FOLDER / CALL)
            now, call_id = time.monotonic(), str(call.get("id", ""))
            folder = self.run_path / FOLDER / call_id
            if call_id and call_id not in (answered, refused):
                # An end that was announced before this answer belongs to an earlier round, unless nothing is left to train.
                over = read_anew(folder / ANSWER)
                if over == {"code": 0}:
                    return ExitCode.OK
                if not over and self._answer(folder, call):
                    answered = call_id
                else:
                    refused = call_id
                heartbeat, since = read_text(folder / HEARTBEAT), now
            elif call_id and (heard := read_text(folder / HEARTBEAT)) != heartbeat:
                if call_id == refused:  # it lives, and has another call for this node
                    text = f"another call is node {self.node} already"
                    raise UserError(text, file=str(self.run_path), key="--node-rank", fix="each node has its own number")
                heartbeat, since = heard, now
            if call_id == answered and (answer := read_anew(folder / ANSWER)):
                return int(answer["attempt"]) if "attempt" in answer else ExitCode(int(answer["code"]))
            if now - since > (self.dead_seconds if call_id and call_id == answered else self.seconds):
                raise self._nobody(answered == call_id != "", now - since)
            time.sleep(POLL_SECONDS)

    def _answer(self, folder: Path, call: dict[str, Any]) -> bool:
        """Answer a call; False where it was answered before, or is gone."""
        for key, own in (("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)):
            if int(call[key]) != own:
                option = f"--{key.replace('_', '-')}"
                text = f"node 0 was started with {option} {call[key]}, this call with {own}"
                raise UserError(text, file="command line", key=option, fix="give the same to all")
        try:
            # "x": only one process can create it. Node 0 takes it for absent until it is written to its end.
            with (folder / f"node-{self.node}.json").open("x") as out:
                out.write(json.dumps(asdict(self.local)) + "\n")
        except OSError:
            return False
        return True

    def _nobody(self, answered: bool, waited: float) -> UserError:
        text = f"node 0's call shows no life for {waited:.0f} s" if answered else f"no call of node 0 within {waited:.0f} s"
        fix = f"{AGAIN}; --run-dir must be a folder that all nodes see"
        return UserError(text, file=str(self.run_path), fix=fix, code=ExitCode.AGAIN)


def await_nodes(run_path: Path, plan: AttemptPlan, seconds: float = LINGER_SECONDS) -> None:
    """Wait until every node of an attempt has left its record, so that all that is to be judged is there."""
    folder = run_path / "attempts" / f"{plan.attempt:04d}"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and newest_attempt(run_path) <= plan.attempt:
        ask_anew(folder)
        if all(record_file(folder, node).exists() for node in range(len(plan.nodes))):
            return
        time.sleep(POLL_SECONDS)


def await_outcome(attempt_folder: Path, seconds: float) -> ExitCode | None:
    """How node 0 judged an attempt; None where it does not say so in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return ExitCode(int(read_anew(attempt_folder / OUTCOME)["code"]))
        time.sleep(POLL_SECONDS)
    return None
