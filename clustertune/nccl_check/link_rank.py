"""The program of one rank: ``python -m clustertune.nccl_check.link_rank --folder DIR --node N --local L``.

Rank 0 says what is measured next, through the store; each rank writes what it sees into a file of its own, line by line: it is
there whatever happens next. A measurement that does not end is noticed by every rank that waits in it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from clustertune.errors import UserError
from clustertune.host.system import MIB, Probe, memory
from clustertune.nccl_check.link_measure import RECORDS, Cases, CollectiveCase, Setup, members, schedule, shapes

# --- one collective --------------------------------------------------------------------------------------------------

# One collective of one size, timed as nccl-tests does it and checked element by element: what every rank runs.
#
# Sizes follow nccl-tests (``doc/PERFORMANCE.md`` and ``*.cu`` there): of an all-gather and a reduce-scatter the size is that of
# the whole buffer, of which each rank holds one part.


PERIOD = 251
"""The data repeats after so many elements: a prime, so that no block of a size in use is mistaken for another."""
WIDTH = 4
"""Bytes of an element: float32, in which sums of small whole numbers are exact below 2**24."""


@dataclass
class Buffers:
    """Memory for the largest size, made once: a rank that has none for it must not find that out among the others."""

    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def make(cls, most_bytes: int, device: torch.device) -> Buffers:
        """Two buffers of as much of ``most_bytes`` as there is room for beside the check: half of it, a quarter, ...

        Raises MemoryError where not even 1 KiB is available.
        """
        elements = max(1, most_bytes // WIDTH)
        while elements >= 256 or elements == max(1, most_bytes // WIDTH):
            try:
                made = cls(*(torch.empty(elements, dtype=torch.float32, device=device) for _ in range(2)))
                made.fill(made.first, 0.0)
                made.holds(made.first, 0.0)
                return made
            except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is the first
                elements //= 2
        raise MemoryError(f"no room for buffers on {device}")

    @property
    def bytes(self) -> int:
        return int(self.first.numel()) * WIDTH

    def fill(self, part: torch.Tensor, add: float, clear: int = 0) -> None:
        """``part[i] = i % PERIOD + add``; of the second buffer, which gets the result, ``clear`` elements become 0."""
        self.second[:clear].zero_()
        part.copy_(_pattern(part)).add_(add)

    def holds(self, part: torch.Tensor, add: float, scale: float = 1.0, offset: int = 0) -> bool:
        """Whether ``part[i] == scale * ((i + offset) % PERIOD) + add`` everywhere."""
        return bool(torch.equal(part, _pattern(part, offset).to(torch.float32).mul_(scale).add_(add)))


def _pattern(part: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """``(i + offset) % PERIOD`` for each element i of ``part``, int32: as large as ``part``."""
    start = offset % PERIOD
    return torch.arange(start, start + part.numel(), dtype=torch.int32, device=part.device).remainder_(PERIOD)


class Operation(NamedTuple):
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
    a, b, part, total = buffers.first[:count], buffers.second[:count], count // n, float(n * (n + 1) // 2)
    if _one_way(case):
        part = count // each
        sends = (me < each) != case.back
        peer = ranks[me + each if me < each else me - each]
        what, moved = (dist.isend, a[:part]) if sends else (dist.irecv, b[:part])
        return Operation(
            lambda: _exchange([(what, moved, peer)], group),
            lambda: buffers.fill(moved, ranks[me] + 1 if sends else 0),
            lambda: sends or buffers.holds(moved, peer + 1),
        )
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    to, by = ranks[(me + 1) % n], ranks[(me - 1) % n]
    # What runs; what is filled, what is added to its pattern, and how much of the second buffer is cleared; what must be there.
    ways: dict[str, tuple[Callable[[], Any], tuple[torch.Tensor, float, int], Callable[[], bool]]] = {
        "all_reduce": (lambda: dist.all_reduce(a, group=group), (a, me + 1, 0), lambda: buffers.holds(a, total, n)),
        "broadcast": (
            lambda: dist.broadcast(a, src=ranks[0], group=group),
            (a, 1 if me == 0 else 7, 0),
            lambda: buffers.holds(a, 1),
        ),
        "p2p": (
            lambda: _exchange([(dist.isend, a, to), (dist.irecv, b, by)], group),
            (a, me + 1, count),
            lambda: buffers.holds(b, (me - 1) % n + 1),
        ),
        "all_gather": (
            lambda: gather(b, a[:part], group=group),
            (a[:part], me + 1, count),
            lambda: all(buffers.holds(b[i * part : (i + 1) * part], i + 1) for i in range(n)),
        ),
        "reduce_scatter": (
            lambda: scatter(b[:part], a, group=group),
            (a, me + 1, part),
            lambda: buffers.holds(b[:part], total, n, offset=me * part),
        ),
    }
    run, (filled, add, clear), check = ways[case.collective]
    return Operation(run, lambda: buffers.fill(filled, add, clear), check)


def _one_way(case: CollectiveCase) -> bool:
    return case.scope == "pair" and case.collective == "p2p"


def _exchange(moves: Sequence[tuple[Any, torch.Tensor, int]], group: Any) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group=group) for op, tensor, peer in moves]):
        work.wait()


def measure(
    case: CollectiveCase, operation: Operation, device: torch.device, meet: Callable[[], None], alive: Callable[[], None]
) -> dict[str, Any]:
    """Run it: once with known data, whose result is checked, then the warm-up, then each iteration timed.

    ``meet`` returns when every rank of the group has called it. ``alive`` is called whenever something has ended.
    Returns ``median_s`` and ``spread`` over the iterations, and ``correct``.
    """
    operation.fill()
    alive()
    operation.run()
    _wait(device)
    correct = operation.check()
    alive()
    for _ in range(case.warmup):
        operation.run()
        _wait(device)
        alive()
    meet()  # all begin together
    alive()
    median_s, spread = summary((_timed_on_gpu if device.type == "cuda" else _timed)(operation, case.iterations, alive))
    return {"median_s": median_s, "spread": spread, "correct": correct}


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


# --- one rank ---------------------------------------------------------------------------------------------------------

HUNG, FAILED = 3, 4
"""Exit codes: something did not end; something failed."""
END = "end"


class Records:
    """The file of a rank: one event a line, written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def write(self, event: str, **values: Any) -> None:
        """Raises OSError where the folder is full or gone."""
        line = {"event": event, "at": round(time.monotonic() - self._began, 4), **values}
        with self._lock:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


class Watchdog:
    """Ends the process where a measurement does not end: nothing else can tell a slow link from a dead one."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._until: float | None = None
        self._since, self._step = 0.0, 0
        threading.Thread(target=self._watch, daemon=True).start()

    def arm(self, seconds: float, step: int) -> None:
        """From now on ``disarm`` must come within ``seconds``."""
        self._since, self._step, self._until = time.monotonic(), step, time.monotonic() + seconds

    def disarm(self) -> None:
        self._until = None

    def _watch(self) -> None:
        while True:
            time.sleep(0.1)
            until = self._until
            if until is not None and time.monotonic() > until:
                with contextlib.suppress(OSError):
                    self._records.write("hung", step=self._step, seconds=round(time.monotonic() - self._since, 2))
                os._exit(HUNG)


class Rank:
    """One rank, from its start to its end."""

    def __init__(self, folder: Path, setup: Setup, node: int, local: int, began: float) -> None:
        self.folder, self.setup, self.node, self.local = folder, setup, node, local
        self.rank = node * setup.ranks_per_node + local
        self.records = Records(folder / RECORDS.format(rank=self.rank))
        self.watchdog = Watchdog(self.records)
        self.device = torch.device("cuda", local) if setup.backend == "nccl" else torch.device("cpu")
        self.began = began
        self.groups: dict[tuple[str, int], Any] = {}
        self.cases: Cases | None = None
        """Of rank 0: what comes next."""
        self.median_s: Any = None
        """What the last case took; None before the first one, which is what a generator takes to begin."""

    def main(self) -> int:
        """Exit code."""
        step = 0
        try:
            self.records.write("start", rank=self.rank, pid=os.getpid())
            self.watchdog.arm(self.setup.start_seconds, 0)
            self._meet()
            self.buffers = Buffers.make(min(self.setup.largest, self._room()), self.device)
            self._connect()
            self.store.set(f"room/{self.rank}", str(self.buffers.bytes))
            self.records.write("up", room=self.buffers.bytes)
            if self.rank == 0:
                self.cases = self._schedule()
            for step in itertools.count(1):
                case = self._next(step)
                if case is None:
                    break
                self._measure(case, step)
            self.records.write("end")
            self.watchdog.arm(10.0, step)  # NCCL may wait for a peer that is gone
            self.store.set(f"end/{self.rank}", "")
            if self.rank == 0:  # the store ends with this process
                self.store.wait([f"end/{rank}" for rank in range(self.setup.world_size)], datetime.timedelta(seconds=9))
        except Exception as error:
            with contextlib.suppress(OSError):
                self.records.write("failed", step=step, message=_message(error))
            return FAILED
        return 0

    def _meet(self) -> None:
        """Find the others: rank 0 opens a store, all others connect to it over TCP."""
        setup, limit = self.setup, datetime.timedelta(seconds=self.setup.start_seconds)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.store = dist.TCPStore(setup.address, setup.port, None, self.rank == 0, limit, wait_for_workers=False)
        self.records.write("met")
        dist.init_process_group(
            setup.backend,
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=setup.world_size,
            # Longer than the watchdog, which says more than torch's own does.
            timeout=datetime.timedelta(seconds=max(setup.start_seconds, 2 * setup.case_seconds) + 30),
        )  # without device_id: torch would make groups by ncclCommSplit, in which all ranks must take part
        keys = [f"here/{rank}" for rank in range(setup.world_size)]
        self.store.set(keys[self.rank], "")
        self.store.wait(keys, limit)

    def _connect(self) -> None:
        """Make the communicators of all scopes but the pairs', which follow turn by turn.

        NCCL takes 15 s and more for 512 ranks, which is neither a measurement's time nor a hang.
        """
        for scope in shapes(self.setup):
            ranks = members(self.setup, scope, 0, self.rank) if scope != "pair" else []
            if len(ranks) > 1:
                self.watchdog.arm(self.setup.start_seconds, 0)
                self._group(scope, 0, ranks)

    def _room(self) -> int:
        """Bytes for one of the two buffers. A GPU's allocator says what there is; Linux promises memory that it has not, and
        kills a process later: half of what is free stays free."""
        if self.device.type == "cuda":
            return self.setup.largest
        figures = memory(Probe())
        free = [figures[key] for key in ("memory_available_bytes", "memory_limit_bytes") if figures[key] is not None]
        return max(MIB, min(free, default=1 << 30) // 4 // self.setup.ranks_per_node)

    # --- what comes next ----------------------------------------------------------------------------------------------

    def _schedule(self) -> Cases:
        setup, rooms = self.setup, [f"room/{rank}" for rank in range(self.setup.world_size)]
        self.store.wait(rooms, datetime.timedelta(seconds=setup.start_seconds))
        room = min(int(self.store.get(key)) for key in rooms)
        # When nothing more is begun: with time left for one measurement that hangs, and for the last messages.
        end = min(time.monotonic() + setup.seconds, self.began + setup.most_seconds - setup.case_seconds - 3)
        return schedule(setup, time.monotonic, end, room, functools.partial(self.records.write, "left_out"))

    def _next(self, step: int) -> CollectiveCase | None:
        if self.cases is not None:
            try:
                case = self.cases.send(self.median_s)
            except StopIteration:
                case = None
            self.store.set(f"step/{step}", json.dumps(vars(case)) if case else END)
            if step > 2:
                self.store.delete_key(f"step/{step - 2}")
            return case
        self.watchdog.arm(self._others + 5, step)
        key = f"step/{step}"
        self.store.wait([key], datetime.timedelta(seconds=self._others + 10))
        text = self.store.get(key).decode()
        self.watchdog.disarm()
        return None if text == END else CollectiveCase(**json.loads(text))

    def _measure(self, case: CollectiveCase, step: int) -> None:
        limit = self.setup.case_seconds
        self.watchdog.arm(limit, step)
        ranks = members(self.setup, case.scope, case.turn, self.rank)
        each, median = self.setup.ranks_per_node, 0.0
        if len(ranks) > 1:
            group, moved = self._group(case.scope, case.turn, ranks), bytes_of(case, len(ranks), each)
            self.records.write("begin", step=step, case=vars(case), ranks=ranks, moved=moved)
            operation = make_operation(case, self.buffers, group, ranks, self.rank, each)
            alive = functools.partial(self.watchdog.arm, limit, step)
            timing = measure(case, operation, self.device, functools.partial(self._meet_group, group), alive)
            self.records.write("done", step=step, **timing)
            median = timing["median_s"]
        self.store.set(f"done/{step}/{self.rank}", repr(median))
        if self.cases is not None:
            keys = [f"done/{step}/{rank}" for rank in range(self.setup.world_size)]
            # A hang is the watchdog's to tell; the store waits a little longer.
            self.watchdog.arm(self._others, step)
            self.store.wait(keys, datetime.timedelta(seconds=self._others + 5))
            self.median_s = max(float(self.store.get(key)) for key in keys)
            for key in keys:
                self.store.delete_key(key)
        self.watchdog.disarm()

    def _group(self, scope: str, turn: int, ranks: list[int]) -> Any:
        """The connected process group of a scope, made by its members alone; None: all. Only one turn's pairs are kept."""
        key = (scope, turn)
        if key not in self.groups:
            for old in [old for old in self.groups if old[0] == scope]:
                dist.destroy_process_group(self.groups.pop(old))
            group = None if scope == "world" else dist.new_group(ranks, use_local_synchronization=True)
            self._meet_group(group)  # NCCL makes a communicator at its first use
            self.groups[key] = group
        return self.groups[key]

    @property
    def _others(self) -> float:
        """Seconds that other ranks may be at a measurement in which this one has no part any more."""
        return 2 * self.setup.case_seconds

    def _meet_group(self, group: Any) -> None:
        """Return when all ranks of a group are here."""
        one = torch.ones(1, device=self.device)
        dist.all_reduce(one, group=group)
        one.item()


def _message(error: Exception) -> str:
    """The first lines of a library's message: those of torch hold C++ frames from the second on."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:600]


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="clustertune.nccl_check.link_rank")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--local", type=int, required=True)
    parser.add_argument("--began", type=float, required=True, help="when the node began, by the kernel's monotonic clock")
    parsed = parser.parse_args(argv)
    try:
        setup = Setup.read(parsed.folder)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    return Rank(parsed.folder, setup, parsed.node, parsed.local, parsed.began).main()


if __name__ == "__main__":
    code = main()
    # Communicators of ranks that are gone make the ordinary end wait; there is nothing left to save.
    os._exit(code)
