"""One collective of one size, timed as nccl-tests does it and checked element by element: what every rank runs.

Sizes follow nccl-tests (``doc/PERFORMANCE.md`` and ``*.cu`` there): of an all-gather and a reduce-scatter the size is that of
the whole buffer, of which each rank holds one part.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from clustertune.nccl_check.schedule import CHECKED, LEAST_ITERATIONS
from clustertune.nccl_check.setup import CollectiveCase

PERIOD = 251
"""The data repeats after so many elements: a prime, so that no block of a size in use is mistaken for another."""
CHUNK = PERIOD << 14
"""Elements that are made or compared at a time, 16 MiB: the check needs little memory beside the buffers."""
WIDTH = 4
"""Bytes of an element: float32, in which sums of small whole numbers are exact below 2**24."""


@dataclass(frozen=True)
class Timing:
    """What one rank saw."""

    median_s: float
    spread: float
    """(95th - 5th percentile) / median over the iterations."""
    correct: bool
    iterations: int


@dataclass
class Buffers:
    """Memory for the largest size, made once: a rank that has none for it must not find that out among the others."""

    first: torch.Tensor
    second: torch.Tensor
    pattern: torch.Tensor

    @classmethod
    def make(cls, most_bytes: int, device: torch.device) -> Buffers:
        """Two buffers of as much of ``most_bytes`` as there is room for: half of it, a quarter, ...

        Raises MemoryError where not even 1 KiB is to be had.
        """
        elements = max(1, most_bytes // WIDTH)
        while elements >= 256 or elements == max(1, most_bytes // WIDTH):
            try:
                two = [torch.empty(elements, dtype=torch.float32, device=device) for _ in range(2)]  # zeros touch it
                pattern = (torch.arange(CHUNK + PERIOD, device=device) % PERIOD).to(torch.float32)
                return cls(two[0], two[1], pattern)
            except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is the first
                elements //= 2
        raise MemoryError(f"no room for buffers on {device}")

    @property
    def bytes(self) -> int:
        return int(self.first.numel()) * WIDTH

    def fill(self, part: torch.Tensor, add: float, clear: int = 0) -> None:
        """``part[i] = i % PERIOD + add``; of the second buffer, which gets the result, ``clear`` elements become 0."""
        self.second[:clear].zero_()
        for start in range(0, part.numel(), CHUNK):
            piece = part[start : start + CHUNK]
            at = start % PERIOD
            torch.add(self.pattern[at : at + piece.numel()], add, out=piece)

    def holds(self, part: torch.Tensor, add: float, scale: float = 1.0, offset: int = 0) -> bool:
        """Whether ``part[i] == scale * ((i + offset) % PERIOD) + add`` everywhere."""
        for start in range(0, part.numel(), CHUNK):
            piece = part[start : start + CHUNK]
            at = (start + offset) % PERIOD
            if not torch.equal(piece, self.pattern[at : at + piece.numel()] * scale + add):
                return False
        return True


@dataclass
class Operation:
    """A collective that is ready to run."""

    run: Callable[[], Any]
    fill: Callable[[], None]
    check: Callable[[], bool]


def bytes_of(case: CollectiveCase, ranks: int, each: int) -> int:
    """What really moves: whole elements for every rank. ``each``: ranks per node, of which all send in ``p2p`` of a pair."""
    parts = each if _one_way(case) else ranks if case.collective in ("all_gather", "reduce_scatter") else 1
    return max(1, case.bytes // WIDTH // parts) * parts * WIDTH


def make_operation(case: CollectiveCase, buffers: Buffers, group: Any, ranks: Sequence[int], rank: int, each: int) -> Operation:
    """The operation of this rank in its group. ``ranks`` are the group's, in order."""
    n, me = len(ranks), list(ranks).index(rank)
    count = bytes_of(case, n, each) // WIDTH
    a, b = buffers.first, buffers.second
    if _one_way(case):
        return _one_way_operation(case, buffers, group, ranks, me, each)
    if case.collective == "all_reduce":
        total = float(n * (n + 1) // 2)
        return Operation(
            lambda: dist.all_reduce(a[:count], group=group),
            lambda: buffers.fill(a[:count], me + 1),
            lambda: buffers.holds(a[:count], total, n),
        )
    if case.collective == "broadcast":
        return Operation(
            lambda: dist.broadcast(a[:count], src=ranks[0], group=group),
            lambda: buffers.fill(a[:count], 1 if me == 0 else 7),
            lambda: buffers.holds(a[:count], 1),
        )
    if case.collective == "p2p":
        to, by = ranks[(me + 1) % n], ranks[(me - 1) % n]
        return Operation(
            lambda: _exchange([(dist.isend, a[:count], to), (dist.irecv, b[:count], by)], group),
            lambda: buffers.fill(a[:count], me + 1, clear=count),
            lambda: buffers.holds(b[:count], (me - 1) % n + 1),
        )
    part = count // n
    if case.collective == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return Operation(
            lambda: gather(b[:count], a[:part], group=group),
            lambda: buffers.fill(a[:part], me + 1, clear=count),
            lambda: all(buffers.holds(b[i * part : (i + 1) * part], i + 1) for i in range(n)),
        )
    assert case.collective == "reduce_scatter"
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Operation(
        lambda: scatter(b[:part], a[:count], group=group),
        lambda: buffers.fill(a[:count], me + 1, clear=part),
        lambda: buffers.holds(b[:part], float(n * (n + 1) // 2), n, offset=me * part),
    )


def _one_way(case: CollectiveCase) -> bool:
    return case.scope == "pair" and case.collective == "p2p"


def _one_way_operation(
    case: CollectiveCase, buffers: Buffers, group: Any, ranks: Sequence[int], me: int, each: int
) -> Operation:
    count = bytes_of(case, len(ranks), each) // WIDTH // each
    sends = (me < each) != case.back
    peer = ranks[me + each if me < each else me - each]
    part = (buffers.first if sends else buffers.second)[:count]
    what = dist.isend if sends else dist.irecv
    return Operation(
        lambda: _exchange([(what, part, peer)], group),
        lambda: buffers.fill(part, ranks[me] + 1 if sends else 0),
        lambda: sends or buffers.holds(part, peer + 1),
    )


def _exchange(moves: Sequence[tuple[Any, torch.Tensor, int]], group: Any) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group=group) for op, tensor, peer in moves]):
        work.wait()


def measure(
    case: CollectiveCase,
    operation: Operation,
    device: torch.device,
    agree: Callable[[float], float],
    alive: Callable[[], None] = lambda: None,
) -> Timing:
    """Run it: once with known data, whose result is checked, then the warm-up, then each iteration timed.

    ``agree`` is called by every rank of the group at the same places: it returns the largest value of all. ``alive`` is called
    whenever something has ended.
    """
    operation.fill()
    alive()
    operation.run()
    _wait(device)
    correct = operation.check()
    alive()
    began = time.perf_counter()
    operation.run()
    _wait(device)
    warmup, iterations = fitted(case, agree(time.perf_counter() - began))
    for _ in range(warmup):
        alive()
        operation.run()
        _wait(device)
    agree(0.0)  # all begin together
    alive()
    times = (_timed_on_gpu if device.type == "cuda" else _timed)(operation, iterations, alive)
    return Timing(*summary(times), correct, iterations)


def fitted(case: CollectiveCase, each: float) -> tuple[int, int]:
    """Warm-up and iterations that are left to a case of which two were made, where one takes ``each`` seconds."""
    fitting = int(case.seconds / each) - CHECKED - 1 if case.seconds and each > 0 else case.iterations + case.warmup
    iterations = max(min(LEAST_ITERATIONS, case.iterations), min(case.iterations, fitting))
    return max(0, min(case.warmup - 1, fitting - iterations)), iterations


def _timed(operation: Operation, iterations: int, alive: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(iterations):
        began = time.perf_counter()
        operation.run()
        times.append(time.perf_counter() - began)
        alive()
    return times


def _timed_on_gpu(operation: Operation, iterations: int, alive: Callable[[], None]) -> list[float]:
    """By events on the stream: iterations follow each other without the host, as those of a training do."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    marks[0].record()
    for mark in marks[1:]:
        operation.run()
        mark.record()
    for mark in marks:
        mark.synchronize()
        alive()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(times: Sequence[float]) -> tuple[float, float]:
    """Median and spread, (95th - 5th percentile) / median, of times in seconds."""
    middle = statistics.median(times)
    ordered = sorted(times)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.05, 0.95))
    return middle, (high - low) / middle if middle else 0.0
