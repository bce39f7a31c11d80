"""What one round of a check measures, on which hosts and in which order: the file that every node and every rank reads first.

Standard library only. A round is one start of all ranks; it ends with the first collective that hangs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune.check.links import COLLECTIVES
from clustertune.errors import Problem, UserError
from clustertune.manifest import write_durably

SCOPES = ("world", "intra", "inter", "pair")
"""``pair`` has its own list in the document, ``per_pair``."""
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
# The largest sizes come first, because bandwidth is what a plan takes and what a fault shows in. Before them every collective
# is tried once with small sizes: from their time follows what a larger one would take at most, and a link that is broken costs
# milliseconds instead of the whole time. What is slow is not taken for hung: all of a case is planned to take less than the
# time after which one iteration counts as hung.

FIRST_BYTES = (64 << 10, 1 << 20)
"""The sizes that are tried first: the small one is over in half a second even on 1 Mbit/s; a guess from the other one is not
all latency, on 1 Gbit/s it is there for 8 ms."""
FIRST_ITERATIONS = 3
LEAST_ITERATIONS = 3
"""Fewer have no spread."""
TOP_SIZES = 3
"""So many sizes of every collective come before the pairs; a plan takes the median of three."""
PAIR_SHARE, ONE_PAIR_SHARE = 0.35, 0.2
"""Of the time, what the pairs of more than two nodes may take, and the only pair of two: they find the slow node or way."""
FIRST_SHARE = 0.25
"""What the first tries may take."""
SMALL_SHARE = 0.15
"""What is left for the many small sizes."""
CHECKED = 1
"""Iterations that a measurement makes besides: the one whose result is compared with what it must be."""
MOST_OF_LIMIT = 0.5
"""Of the time after which an iteration counts as hung, what a whole case is planned to take at most."""

Cases = Generator[CollectiveCase, float, None]
"""What is measured next; it is sent the median of the slowest rank, seconds, 0 where nothing was measured."""


class CaseSchedule:
    """The cases of a round, one after the other: ``run`` is a generator that takes what each case took."""

    def __init__(
        self, setup: Setup, clock: Callable[[], float], deadline: float, most_bytes: int, report: Callable[..., None]
    ) -> None:
        """``deadline``: when measuring ends, by ``clock``. ``most_bytes``: what the ranks' memory holds. ``report`` is called
        with scope, collective, bytes and reason of what is left out."""
        self.setup, self.clock, self.deadline, self.most_bytes, self.report = setup, clock, deadline, most_bytes, report
        self._left_out: set[tuple[str, str, int]] = set()
        self._measured: dict[tuple[str, str, int, bool], dict[int, float]] = {}
        """Of a track: seconds by bytes."""

    def run(self) -> Cases:
        setup = self.setup
        seconds = self._left()
        tracks = [(scope, name) for scope in shapes(setup) if scope != "pair" for name in self._collectives(scope)]
        sizes = self._sizes(tracks)
        for scope, name in tracks if sizes else []:
            yield from self._first(CollectiveCase(scope, name, 0, FIRST_ITERATIONS), sizes, seconds * FIRST_SHARE / len(tracks))
        pairs = "pair" in shapes(setup) and bool(self._collectives("pair")) and bool(sizes)
        reserve = seconds * (PAIR_SHARE if self._several else ONE_PAIR_SHARE) if pairs else 0.0
        yield from self._levels(tracks, sizes[:TOP_SIZES], reserve + seconds * SMALL_SHARE)
        if pairs:
            yield from self._pairs(sizes, reserve)
        yield from self._levels(tracks, sizes[TOP_SIZES:], 0.0)

    def _collectives(self, scope: str) -> list[str]:
        # Of two nodes the only pair is the world; one way at a time is still news.
        return [n for n in self.setup.collectives if scope != "pair" or n == "p2p" or (n == "all_gather" and self._several)]

    @property
    def _several(self) -> bool:
        return len(self.setup.hosts) > 2

    def _sizes(self, tracks: list[tuple[str, str]]) -> list[int]:
        """From the largest down; what does not fit into memory is left out."""
        found, size = [], self.setup.largest
        while size >= self.setup.smallest:
            found.append(size)
            size //= self.setup.factor
        for scope, name in tracks:
            for size in found:
                if size > self.most_bytes:
                    self._leave_out(CollectiveCase(scope, name, size), "does not fit into memory")
        return [size for size in found if size <= self.most_bytes]

    def _left(self) -> float:
        return self.deadline - self.clock()

    def _levels(self, tracks: list[tuple[str, str]], sizes: list[int], reserve: float) -> Cases:
        cases = [(scope, name, size) for size in sizes for scope, name in tracks]
        for number, (scope, name, size) in enumerate(cases):
            left = max(0.0, self._left() - reserve)
            # Sizes fall by a factor: a large one may take several equal shares, and those behind it need less.
            share = min(left, 4 * left / (len(cases) - number), MOST_OF_LIMIT * self.setup.case_seconds)
            yield from self._fitted(CollectiveCase(scope, name, size, self.setup.iterations, self.setup.warmup), share)

    def _pairs(self, sizes: list[int], seconds: float) -> Cases:
        rounds = tournament(len(self.setup.hosts))
        end = min(self.deadline, self.clock() + seconds)
        for turn in range(len(rounds)):
            share = max(0.0, end - self.clock()) / (len(rounds) - turn)
            ways = [(n, back) for n in self._collectives("pair") for back in ((False, True) if n == "p2p" else (False,))]
            until = self.clock() + share
            for number, (name, back) in enumerate(ways):
                first = CollectiveCase("pair", name, 0, FIRST_ITERATIONS, 1, turn, back)
                part = max(0.0, until - self.clock()) / (len(ways) - number)
                yield from self._first(first, sizes, part)
                part = max(0.0, until - self.clock()) / (len(ways) - number)
                part = min(part, MOST_OF_LIMIT * self.setup.case_seconds)
                tried = max(self._measured.get(first.track, ()), default=0)
                larger = [replace(first, bytes=size, iterations=self.setup.iterations) for size in sizes if size > tried]
                fitting = [case for case in larger if self._least(case) <= part]
                if fitting:
                    yield from self._fitted(fitting[0], part)

    def _first(self, case: CollectiveCase, sizes: list[int], share: float) -> Cases:
        """A case with small sizes, each only where the one before says that it fits into a share of the time."""
        wanted = [min(max(size, self.setup.smallest), sizes[0]) for size in FIRST_BYTES]
        for size in dict.fromkeys(wanted):
            fitting = replace(case, bytes=size)
            if self._least(fitting) <= min(share, MOST_OF_LIMIT * self.setup.case_seconds):
                yield from self._try(fitting)

    def _least(self, case: CollectiveCase) -> float:
        """What the least measurement of a case takes, at most."""
        return (LEAST_ITERATIONS + CHECKED + 1) * self._each(case)

    def _each(self, case: CollectiveCase) -> float:
        """Seconds of one iteration, at most: a larger size takes no more than in proportion, a smaller one no longer; 0 where
        nothing is known: at the first try of a track, or after one that was given up."""
        known = self._measured.get(case.track, {})
        return min((seconds * max(1.0, case.bytes / size) for size, seconds in known.items()), default=0.0)

    def _fitted(self, case: CollectiveCase, share: float) -> Cases:
        """The case with as many iterations as the share of the time allows, or a word that it was left out."""
        each = self._each(case)
        allowed = min(share, self._left())
        if (least := self._least(case)) > allowed:
            self._leave_out(case, f"would take {least:.3g} s, {max(0.0, allowed):.3g} s are left for it")
            return
        fitting = int(allowed / each) - CHECKED - 1 if each else case.iterations
        iterations = max(LEAST_ITERATIONS, min(case.iterations, fitting))
        warmup = max(1, min(case.warmup, fitting - iterations + 1))
        yield from self._try(replace(case, iterations=iterations, warmup=warmup, seconds=round(allowed, 3)))

    def _try(self, case: CollectiveCase) -> Cases:
        if self._left() <= 0:
            self._leave_out(case, "no time was left")
            return
        median_s = yield case
        if median_s > 0:
            self._measured.setdefault(case.track, {})[case.bytes] = median_s

    def _leave_out(self, case: CollectiveCase, why: str) -> None:
        entry = (case.scope, case.collective, case.bytes)
        if entry not in self._left_out:
            self._left_out.add(entry)
            self.report(scope=entry[0], collective=entry[1], bytes=entry[2], reason=why)


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
