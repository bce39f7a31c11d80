"""One attempt at training: who takes part, and the files by which its processes speak to each other.

``attempts/0001/`` of a run holds ``plan.json`` (written before any process starts), ``rendezvous.json`` (by the first node's
agent), for each node ``node-0.pid``, ``node-0.log`` and ``node-0.json``, for each rank ``rank-0.pid``, ``rank-0.log``,
``rank-0.heartbeat`` and ``rank-0.json``, and ``outcome.json`` (written last, by who started the attempt).
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.manifest import read_object, read_whole, write_durably

PLAN = "plan.json"
RENDEZVOUS = "rendezvous.json"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Node:
    """One machine of an attempt."""

    name: str
    """As the scheduler calls it; for messages."""
    address: str
    """A name or address that the other nodes reach it by."""


@dataclass(frozen=True)
class AttemptPlan:
    """What every process of an attempt must know, the same for all."""

    attempt: int
    nodes: tuple[Node, ...]
    """In rank order: node R holds the ranks from ``R * ranks_per_node`` on."""
    ranks_per_node: int
    launcher: str = "local"
    """Its name, for people: what ranks and agents must know of it, the fields below say."""
    sigterm_asks: bool = True
    """SIGTERM asks for a stop. False: the scheduler also sends it to what is left of a step of which a node failed."""
    node_per_rank: bool = False
    """:attr:`nodes` has an entry for each rank, several of which may be the same machine."""
    limit_minutes: float | None = None
    """The time limit of the job; None: none, or not known."""
    job: str | None = None
    """The scheduler's id of the job."""
    restart: int = 0
    """How often the scheduler has restarted that job."""
    from_step: int = 0
    """Step of the newest whole checkpoint when the attempt began; 0 where there was none."""
    interface: str | None = None
    """Network interface between the nodes; None: the one that the route to the first node takes."""
    environment: dict[str, str] = field(default_factory=dict)
    """NCCL's, gloo's and torch's variables for every rank."""
    stall_seconds: float | None = None
    """Seconds without a sign of life from a rank after which the attempt is ended; None: derived from what was measured."""
    begun: float = field(default_factory=time.time, compare=False)
    """Unix seconds: from here on the attempt costs."""
    port: int | None = None
    """Where the search for a rendezvous port begins; None: any free one (one node only)."""

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def where(self, rank: int) -> str:
        """``rank 11 on node2``; without the node where there is only one."""
        if len(self.nodes) == 1:
            return f"rank {rank}"
        return f"rank {rank} on {self.nodes[rank // self.ranks_per_node].name}"

    def write(self, folder: Path) -> None:
        """Write ``plan.json`` into an attempt's folder, durably."""
        write_durably(folder / PLAN, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> AttemptPlan:
        """The plan of an attempt's folder. Raises UserError where there is none."""
        try:
            body: dict[str, Any] = json.loads(read_whole(folder / PLAN))
            body["nodes"] = tuple(Node(**node) for node in body["nodes"])
            return cls(**body)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"no plan of an attempt: {error}", file=str(folder / PLAN)) from None


@dataclass(frozen=True)
class PastAttempt:
    """One attempt that had a plan, as its folder tells."""

    folder: Path
    plan: AttemptPlan
    outcome: dict[str, Any]
    """How it ended, as the one who started it judged; empty where that was not written: it runs, or its starter was killed."""

    @property
    def code(self) -> int | None:
        """Its exit code; None without an outcome."""
        code = self.outcome.get("code")
        return code if isinstance(code, int) else None

    @property
    def messages(self) -> tuple[str, ...]:
        """What went wrong, the most important first."""
        problems = self.outcome.get("problems")
        texts = (one.get("message") for one in (problems if isinstance(problems, list) else ()) if isinstance(one, dict))
        return tuple(str(message) for message in texts if message)

    @property
    def ended_outside(self) -> bool:
        """By what is not in the job: no outcome was written, a node was gone, a port was taken, or it was asked to stop."""
        reasons = ("asked", "nodes_gone", "port_taken")
        return not self.outcome or any(self.outcome.get(reason) for reason in reasons)

    @property
    def seconds(self) -> float:
        """How long it lived, by the times of its files: the ranks write heartbeats and logs until they end."""
        try:
            newest = max(entry.stat().st_mtime for entry in self.folder.iterdir())
            return max(0.0, newest - (self.folder / PLAN).stat().st_mtime)
        except (OSError, ValueError):
            return 0.0


def read_attempts(run_path: Path) -> list[PastAttempt]:
    """The attempts of a run that had a plan, oldest first."""
    folder, attempts = run_path / "attempts", []
    for path in folder.iterdir() if folder.is_dir() else []:
        if path.name.isdigit():
            with contextlib.suppress(UserError):
                attempts.append(PastAttempt(path, AttemptPlan.read(path), read_object(path / OUTCOME)))
    return sorted(attempts, key=lambda attempt: int(attempt.folder.name))


def newest_attempt(run_path: Path) -> int:
    """The highest attempt number of a run; 0 where there is none."""
    try:
        return max((int(p.name) for p in (run_path / "attempts").iterdir() if p.name.isdigit()), default=0)
    except OSError:
        return 0


def check_fence(run_path: Path, attempt: int) -> None:
    """Refuse to act for an attempt that another one has followed: the scheduler gave its work to other processes.

    A node that was cut off continues computing; whatever it would write from then on would mix with the new attempt's.
    Raises UserError (exit 75).
    """
    newest = newest_attempt(run_path)
    if newest > attempt:
        problem = Problem(f"attempt {newest} has taken over from attempt {attempt}; stopping this one", file=str(run_path))
        raise UserError(problem, ExitCode.AGAIN)
