"""What one round of a check measures, on which hosts: the file that every node and every rank reads first.

Standard library only. A round is one start of all ranks: where a collective hangs, the next round begins without it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError
from clustertune.manifest import write_durably
from clustertune.nccl_check.result import COLLECTIVES, SCOPES

SETUP = "setup.json"
RENDEZVOUS = "rendezvous.json"
END = "end.json"
LOGS = "nccl-rank-{rank}.log"
"""NCCL's own log of a rank."""
RECORDS = "rank-{rank}.jsonl"
OUTPUT = "rank-{rank}.out"
"""What a rank wrote on stdout and stderr."""
LAUNCHED = "launch.out"
"""What srun wrote, or the first node."""
NODE = "node-{node}.json"
FACTS = "facts-{node}.json"
POLL_SECONDS = 0.2
MARGIN_SECONDS = 60.0
"""How much later than the time that was asked for a check may be over: its ranks start before it, what hangs is ended after."""
ENDING_SECONDS = 15.0
"""Of the time for everything, what is kept for ending processes that do not answer: SIGTERM, and SIGKILL after it."""


@dataclass(frozen=True)
class CollectiveCase:
    """One measurement: a collective of one size over the groups of a scope."""

    scope: str
    """``world``, ``intra``, ``inter`` or ``pair``."""
    collective: str
    bytes: int
    """As :mod:`clustertune.nccl_check.result` counts them, before they are rounded to whole elements of all ranks."""
    iterations: int = 1
    warmup: int = 1
    turn: int = 0
    """Of pairs: which turn of the tournament."""
    back: bool = False
    """Of ``p2p`` of a pair: from the second node to the first."""
    seconds: float = 0.0
    """What it may take: where each iteration takes longer than was thought its ranks make fewer. 0: all of them are made."""

    @property
    def key(self) -> tuple[str, str, int, int, bool]:
        """What it measures, however often."""
        return (self.scope, self.collective, self.bytes, self.turn, self.back)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What a check measures."""

    backend: str
    """``nccl`` or ``gloo``."""
    backend_why: str
    ranks_per_node: int
    cpus_per_node: int
    """CPUs that the ranks of a node share."""
    seconds: float
    """Time for the measuring, from when the ranks have found each other."""
    smallest: int = 1 << 10
    largest: int = 1 << 30
    factor: int = 4
    iterations: int = 20
    """As nccl-tests (``-n``)."""
    warmup: int = 5
    """As nccl-tests (``-w``)."""
    collectives: tuple[str, ...] = COLLECTIVES
    scopes: tuple[str, ...] = SCOPES
    place: str = "here"
    """Of the nodes' facts."""
    most_seconds: float | None = None
    """After which all has been ended whatever it does, its start included; None: ``MARGIN_SECONDS`` after ``seconds``."""

    @property
    def whole_seconds(self) -> float:
        """Time for everything but the ending of what does not answer."""
        most = self.seconds + MARGIN_SECONDS if self.most_seconds is None else self.most_seconds
        return most - min(ENDING_SECONDS, most / 5)


@dataclass(frozen=True, kw_only=True)
class Setup(CheckOptions):
    """One round."""

    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    """Of each host, as the others reach it."""
    start_seconds: float
    """How long the ranks may take to find each other."""
    case_seconds: float
    """After how long without an iteration that ended a measurement counts as hung."""
    most_seconds: float = field()
    """Time for the whole round, from its start on the first node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What every rank gets beside what is there: the environment that training has."""
    interface: str | None = None
    """That must be there on every node; None: no word of it."""
    done: tuple[tuple[str, str, int, int, bool], ...] = ()
    """Keys of cases that an earlier round has measured."""
    skip: tuple[tuple[str, str, int], ...] = ()
    """Scope, collective and turn of what hung or failed in an earlier round."""
    known: tuple[tuple[str, str, int, bool, int, float], ...] = ()
    """Of the cases that earlier rounds measured: scope, collective, turn, way back, bytes and seconds."""
    facts: bool = True
    """Whether the nodes' facts are to be collected."""
    probe: bool = True
    """Whether pairs of GPUs are tried before all of them."""
    pairwise: bool = False
    """Whether every pair of a node's GPUs is tried (PCIe), not the first one only."""
    numa_gpus: tuple[tuple[int, ...], ...] = ()
    numa_cpus: tuple[str, ...] = ()
    """As in the cluster file: ranks are bound as those of a training are."""

    @property
    def world_size(self) -> int:
        return len(self.hosts) * self.ranks_per_node

    @property
    def limit(self) -> float:
        """Seconds after which a node ends what is left of the round: a little later than the ranks themselves would."""
        return min(self.start_seconds + self.seconds + 2 * self.case_seconds + 5, self.most_seconds)

    def host_of(self, rank: int) -> str:
        return self.hosts[rank // self.ranks_per_node]

    def write(self, folder: Path) -> None:
        """Durable, so that other nodes see it whole. Raises OSError."""
        write_whole(folder / SETUP, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Setup:
        """Raises UserError where there is none, or it is another program's."""
        path = folder / SETUP
        try:
            data = json.loads(path.read_bytes())
            known = {name: data[name] for name in cls.__dataclass_fields__}
            for name in ("hosts", "addresses", "collectives", "scopes", "numa_cpus"):
                known[name] = tuple(known[name])
            for name in ("done", "skip", "known", "numa_gpus"):
                known[name] = tuple(tuple(entry) for entry in known[name])
            return cls(**known)
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            fix = "is the folder on storage that all nodes see?"
            raise UserError(Problem(f"contains no setup of a check: {error}", file=str(path), fix=fix)) from None


def write_whole(path: Path, document: Any) -> None:
    """A JSON file that readers find whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(document) + "\n")


def await_file(path: Path, seconds: float) -> Any:
    """The document of a file that another node writes; None where it does not come in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            # A listing makes an NFS client ask the server; a look-up by name may be answered from its cache of absences.
            if path.name in os.listdir(path.parent):  # noqa: PTH208
                return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            pass
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_SECONDS)
