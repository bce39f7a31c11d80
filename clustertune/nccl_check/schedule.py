"""In what order things are measured, and what has no time: pure, asked by rank 0 after every measurement.

The largest sizes come first, because bandwidth is what a plan takes and what a fault shows in. Before them every collective is
tried once with small sizes: from their time follows what a larger one would take at most, and a link that is broken costs
milliseconds instead of the whole time. What is slow is not taken for hung: all of a case is planned to take less than the time
after which one iteration counts as hung.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

from clustertune.nccl_check.setup import CollectiveCase, Setup

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

Clock = Callable[[], float]
Cases = Generator[CollectiveCase, float, None]
"""What is measured next; it is sent the median of the slowest rank, seconds, 0 where nothing was measured."""


@dataclass
class CaseSchedule:
    """The cases of a round, one after the other: ``run`` is a generator that takes what each case took."""

    setup: Setup
    clock: Clock
    deadline: float
    """When measuring ends, by that clock."""
    most_bytes: int
    """What the ranks' memory holds."""
    left_out: list[tuple[str, str, int, str]] = field(default_factory=list)
    """Scope, collective, bytes and why."""
    _measured: dict[tuple[str, str, int, bool], dict[int, float]] = field(default_factory=dict)
    """Of a track: seconds by bytes."""

    def __post_init__(self) -> None:
        for scope, name, turn, back, size, seconds in sorted(self.setup.known):
            self._measured.setdefault((scope, name, turn, back), {})[size] = seconds

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
            if size // self.setup.factor == size:
                break
            size //= self.setup.factor
        for scope, name in tracks:
            for size in found:
                if size > self.most_bytes:
                    self.left_out.append((scope, name, size, "does not fit into memory"))
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
                tried = max(self._measured.get((first.scope, name, turn, back), ()), default=0)
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
        known = self._measured.get((case.scope, case.collective, case.turn, case.back), {})
        return min((seconds * max(1.0, case.bytes / size) for size, seconds in known.items()), default=0.0)

    def _fitted(self, case: CollectiveCase, share: float) -> Cases:
        """The case with as many iterations as the share of the time allows, or a word that it was left out."""
        each = self._each(case)
        allowed = min(share, self._left())
        least = (LEAST_ITERATIONS + CHECKED + 1) * each
        if least > allowed:
            text = f"would take {least:.3g} s, {max(0.0, allowed):.3g} s are left for it"
            self._leave_out(case, text)
            return
        fitting = int(allowed / each) - CHECKED - 1 if each else case.iterations
        iterations = max(LEAST_ITERATIONS, min(case.iterations, fitting))
        warmup = max(1, min(case.warmup, fitting - iterations + 1))
        yield from self._try(replace(case, iterations=iterations, warmup=warmup, seconds=round(allowed, 3)))

    def _try(self, case: CollectiveCase) -> Cases:
        if case.key in self.setup.done or (case.scope, case.collective, case.turn) in self.setup.skip:
            return
        if self._left() <= 0:
            self._leave_out(case, "no time was left")
            return
        median_s = yield case
        if median_s > 0:
            self._measured.setdefault((case.scope, case.collective, case.turn, case.back), {})[case.bytes] = median_s

    def _leave_out(self, case: CollectiveCase, why: str) -> None:
        entry = (case.scope, case.collective, case.bytes, why)
        if entry[:3] not in [other[:3] for other in self.left_out]:
            self.left_out.append(entry)


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
