"""What a check measures, on which hosts and in which order: the file that every node and every rank reads first."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, UserError
from clustertune.manifest import write_durably
from clustertune.nccl_check.link_rules import COLLECTIVES

SCOPES = ("world", "intra", "inter", "pair")
"""``pair`` has its own list in the document, ``per_pair``."""
SETUP = "setup.json"
LOGS = "nccl-rank-{rank}.log"
"""NCCL's own log of a rank."""
RECORDS = "rank-{rank}.jsonl"
OUTPUT = "rank-{rank}.out"
"""What a rank wrote on stdout and stderr."""
LAUNCHED = "launch.out"
"""What srun wrote, or the first node."""
NODE = "node-{node}.json"
FACTS = "facts-{node}.json"
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
    """As :mod:`clustertune.nccl_check.link_records` counts them, before they are rounded to whole elements of all ranks."""
    iterations: int = 1
    warmup: int = 1
    turn: int = 0
    """Of pairs: which turn of the tournament."""
    back: bool = False
    """Of ``p2p`` of a pair: from the second node to the first."""
    seconds: float = 0.0
    """What it may take: where each iteration takes longer than was thought its ranks make fewer. 0: all of them are made."""

    @property
    def track(self) -> tuple[str, str, int, bool]:
        """What it measures, whatever the size."""
        return (self.scope, self.collective, self.turn, self.back)


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
    largest: int = 1 << 30
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
    """One check, as its nodes and ranks read it."""

    hosts: tuple[str, ...]
    address: str
    """Of the first host, as the others reach it."""
    port: int
    """Where its first rank opens the store in which all ranks meet."""
    start_seconds: float
    """How long the ranks may take to find each other."""
    case_seconds: float
    """After how long without an iteration that ended a measurement counts as hung."""
    most_seconds: float = field()
    """Time for everything, from the start on the first node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What every rank gets beside what is there: the environment that training has."""
    interface: str | None = None
    """That must be there on every node; None: no word of it."""
    facts: bool = True
    """Whether the nodes' facts are to be collected."""
    probe: bool = True
    """Whether pairs of GPUs are tried before all of them."""
    pairwise: bool = False
    """Whether every pair of a node's GPUs is tried (PCIe), not the first one only."""

    @property
    def world_size(self) -> int:
        return len(self.hosts) * self.ranks_per_node

    @property
    def limit(self) -> float:
        """Seconds after which a node ends what is left of its ranks: a little later than they themselves would."""
        return min(self.start_seconds + self.seconds + 2 * self.case_seconds + 5, self.most_seconds)

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        """Where ranks run, each host once."""
        return list(dict.fromkeys(self.hosts[rank // self.ranks_per_node] for rank in ranks))

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
            for name, value in known.items():
                if isinstance(value, list):  # JSON has no tuples
                    known[name] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value)
            return cls(**known)
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            fix = "is the folder on storage that all nodes see?"
            raise UserError(Problem(f"contains no setup of a check: {error}", file=str(path), fix=fix)) from None


def write_whole(path: Path, document: Any) -> None:
    """A JSON file that readers find whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(document) + "\n")


# --- schedule ---------------------------------------------------------------------------------------------------------

# In what order things are measured, and what has no time: pure, asked by rank 0 after every measurement.
#
# Sizes grow: from the time of one follows what the next would take at most, and a link that is broken costs milliseconds
# instead of the whole time. What is slow is not taken for hung: all of a case is planned to take less than the time after which
# one iteration counts as hung.

SIZES = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
"""Below the largest. The first is over in half a second even on 1 Mbit/s; the planner takes the largest three."""
ITERATIONS, WARMUP = 20, 5
"""As nccl-tests (``-n``, ``-w``)."""
LEAST_ITERATIONS = 3
"""Fewer have no spread; so many of a size whose time cannot be known yet."""
PAIR_SHARE = 0.35
"""Of the time, what the pairs of nodes may take: they find the slow node or way."""
CHECKED = 1
"""Iterations that a measurement makes besides: the one whose result is compared with what it must be."""
MOST_OF_LIMIT = 0.5
"""Of the time after which an iteration counts as hung, what a whole case is planned to take at most."""

Cases = Generator[CollectiveCase, float, None]
"""What is measured next; it is sent the median of the slowest rank, seconds, 0 where nothing was measured."""


class CaseSchedule:
    """The cases of a check, one after the other: ``run`` is a generator that takes what each case took."""

    def __init__(
        self, setup: Setup, clock: Callable[[], float], deadline: float, most_bytes: int, report: Callable[..., None]
    ) -> None:
        """``deadline``: when measuring ends, by ``clock``. ``most_bytes``: what the ranks' memory holds. ``report`` is called
        with scope, collective, bytes and reason of what is left out."""
        self.setup, self.clock, self.deadline, self.report = setup, clock, deadline, report
        sizes = [*(size for size in SIZES if size < setup.largest), setup.largest]
        self.sizes = [size for size in sizes if size <= most_bytes]
        self.too_large = [size for size in sizes if size > most_bytes]
        self._measured: dict[tuple[str, str, int, bool], float] = {}
        """Of a track: seconds for a byte, of its largest size."""

    def run(self) -> Cases:
        scopes = shapes(self.setup)
        tracks = [CollectiveCase(scope, name, 0) for scope in scopes if scope != "pair" for name in self.setup.collectives]
        turns = tournament(len(self.setup.hosts)) if "pair" in scopes and "p2p" in self.setup.collectives else []
        ways = [CollectiveCase("pair", "p2p", 0, turn=turn, back=back) for turn in range(len(turns)) for back in (False, True)]
        for track in tracks:
            for size in self.too_large:
                self._leave_out(replace(track, bytes=size), "does not fit into memory")
        reserve = (self.deadline - self.clock()) * PAIR_SHARE if ways else 0.0
        cases = [replace(track, bytes=size) for size in self.sizes for track in tracks]
        yield from self._all(cases, self.deadline - reserve)
        # Of a pair a small size to learn its speed, and the largest that its share of the time allows.
        for number, way in enumerate(ways):
            until = self.clock() + max(0.0, self.deadline - self.clock()) / (len(ways) - number)
            yield from self._all([replace(way, bytes=size) for size in self.sizes[:2]], until)
            most = min(until - self.clock(), MOST_OF_LIMIT * self.setup.case_seconds)
            larger = [size >> 2 * n for size in self.sizes[2:][-1:] for n in range(5) if size >> 2 * n > SIZES[1]]
            fitting = [size for size in larger if self._least(replace(way, bytes=size)) <= most]
            yield from self._all([replace(way, bytes=size) for size in fitting[:1]], until)

    def _all(self, cases: list[CollectiveCase], until: float) -> Cases:
        for number, case in enumerate(cases):
            left = max(0.0, until - self.clock())
            # Those that follow are as large or larger, but few of them need all of an equal share.
            share = min(left, 4 * left / (len(cases) - number), MOST_OF_LIMIT * self.setup.case_seconds)
            least, each = self._least(case), self._each(case)
            if least > share or left <= 0:
                self._leave_out(case, f"would take {least:.3g} s, {share:.3g} s are left for it")
                continue
            fitting = int(share / each) - CHECKED - 1 if each else LEAST_ITERATIONS
            iterations = max(LEAST_ITERATIONS, min(ITERATIONS, fitting))
            warmup = max(1, min(WARMUP, fitting - iterations + 1))
            median_s = yield replace(case, iterations=iterations, warmup=warmup, seconds=round(share, 3))
            if median_s > 0:
                self._measured[case.track] = median_s / case.bytes

    def _each(self, case: CollectiveCase) -> float:
        """Seconds of one iteration, at most: a larger size takes no more than in proportion; 0 where nothing is known."""
        return self._measured.get(case.track, 0.0) * case.bytes

    def _least(self, case: CollectiveCase) -> float:
        """What the least measurement of a case takes, at most."""
        return (LEAST_ITERATIONS + CHECKED + 1) * self._each(case)

    def _leave_out(self, case: CollectiveCase, why: str) -> None:
        self.report(scope=case.scope, collective=case.collective, bytes=case.bytes, reason=why)


def shapes(setup: Setup) -> list[str]:
    """The scopes that mean something here, of those asked for: of one node there is no network, of one rank no link inside."""
    nodes, each = len(setup.hosts), setup.ranks_per_node
    there = {"world": nodes > 1, "intra": each > 1, "inter": nodes > 1 and each > 1, "pair": nodes > 1}
    return [scope for scope in setup.scopes if there[scope]]


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in turns in which no one plays twice (the circle method): with an odd number one rests in each turn."""
    seats = list(range(players)) + ([-1] if players % 2 else [])
    turns = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        turns.append(sorted((min(a, b), max(a, b)) for a, b in pairs if a >= 0 and b >= 0))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return turns


def members(setup: Setup, scope: str, turn: int, rank: int) -> list[int]:
    """The ranks with which one measures; empty where it rests."""
    each, node = setup.ranks_per_node, rank // setup.ranks_per_node
    if scope == "world":
        return list(range(setup.world_size))
    if scope == "intra":
        return list(range(node * each, (node + 1) * each))
    if scope == "inter":
        return list(range(0, setup.world_size, each)) if rank % each == 0 else []
    pair = next((pair for pair in tournament(len(setup.hosts))[turn] if node in pair), ())
    return [other * each + local for other in pair for local in range(each)]
