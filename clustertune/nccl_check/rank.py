"""The program of one rank: ``python -m clustertune.nccl_check.rank --folder DIR --node N --local L``.

Rank 0 says what is measured next, through the store; each rank writes what it sees into a file of its own, line by line: it is
there whatever happens next. A measurement that does not end is noticed by every rank that waits in it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from clustertune.errors import UserError
from clustertune.host.probe import Probe
from clustertune.host.system import memory
from clustertune.launch import binding, rendezvous
from clustertune.nccl_check import measure, schedule
from clustertune.nccl_check.setup import RECORDS, RENDEZVOUS, CollectiveCase, Setup, await_file, write_whole

HUNG, FAILED = 3, 4
"""Exit codes: something did not end; something failed."""
END = "end"
MIB = 1 << 20


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
        self.groups: dict[tuple[str, int], tuple[Any, list[int]]] = {}

    def main(self) -> int:
        """Exit code."""
        step = 0
        try:
            setup = self.setup
            bound = binding.bind(self.rank, self.local, setup.ranks_per_node, setup.numa_gpus, setup.numa_cpus)
            self.records.write("start", rank=self.rank, pid=os.getpid(), bound=bound)
            self.watchdog.arm(self.setup.start_seconds, 0)
            self._meet()
            self.buffers = measure.Buffers.make(min(self.setup.largest, self._room()), self.device)
            self._connect()
            self.store.set(f"room/{self.rank}", str(self.buffers.bytes))
            self.records.write("up", **self._software(), room=self.buffers.bytes)
            plan = self._lead() if self.rank == 0 else None
            for step in range(1, 100_000):
                case = self._next(plan, step)
                if case is None:
                    break
                self._measure(case, step, plan)
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
        """Find the others: rank 0 opens a store and tells its port through the folder."""
        setup, limit = self.setup, datetime.timedelta(seconds=self.setup.start_seconds)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        address = setup.addresses[0]
        if self.rank == 0:
            # From the ports that training takes: a firewall that lets one through lets the other.
            port = rendezvous.free_port(rendezvous.first_port(os.getpid(), 1))
            self.store = dist.TCPStore(address, port, None, True, limit, wait_for_workers=False)
            write_whole(self.folder / RENDEZVOUS, {"address": address, "port": self.store.port})
        else:
            found = await_file(self.folder / RENDEZVOUS, setup.start_seconds)
            if found is None:
                raise RuntimeError(f"{setup.hosts[0]} did not say where to meet within {setup.start_seconds:.0f} s")
            self.store = dist.TCPStore(found["address"], int(found["port"]), None, False, limit)
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
        for scope in schedule.shapes(self.setup):
            ranks = schedule.members(self.setup, scope, 0, self.rank) if scope != "pair" else []
            if len(ranks) > 1:
                self.watchdog.arm(self.setup.start_seconds, 0)
                self._group(scope, 0, ranks)

    def _room(self) -> int:
        """Bytes for one of the two buffers. A GPU's allocator says what there is; Linux promises memory that it has not, and
        kills a process later: half of what is free stays free."""
        if self.device.type == "cuda":
            return self.setup.largest
        found = memory(Probe())
        free = [found[key] for key in ("memory_available_bytes", "memory_limit_bytes") if found[key] is not None]
        return max(MIB, min(free, default=1 << 30) // 4 // self.setup.ranks_per_node)

    def _software(self) -> dict[str, Any]:
        nccl = None
        if self.device.type == "cuda":
            nccl = ".".join(map(str, cast("tuple[int, ...]", torch.cuda.nccl.version())))
        return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}

    # --- what comes next ----------------------------------------------------------------------------------------------

    def _lead(self) -> RoundPlan:
        rooms = [f"room/{rank}" for rank in range(self.setup.world_size)]
        self.store.wait(rooms, datetime.timedelta(seconds=self.setup.start_seconds))
        return RoundPlan(self.setup, self._deadline(), min(int(self.store.get(key)) for key in rooms))

    def _deadline(self) -> float:
        """When nothing more is begun: with time left for one measurement that hangs, and for the last messages."""
        setup = self.setup
        return min(time.monotonic() + setup.seconds, self.began + setup.most_seconds - setup.case_seconds - 3)

    def _next(self, plan: RoundPlan | None, step: int) -> CollectiveCase | None:
        if plan is not None:
            case = plan.next()
            for entry in plan.news():
                self.records.write("left_out", **entry)
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

    def _measure(self, case: CollectiveCase, step: int, plan: RoundPlan | None) -> None:
        limit = self.setup.case_seconds
        self.watchdog.arm(limit, step)
        ranks = schedule.members(self.setup, case.scope, case.turn, self.rank)
        each, median = self.setup.ranks_per_node, 0.0
        if len(ranks) > 1:
            group, moved = self._group(case.scope, case.turn, ranks), measure.bytes_of(case, len(ranks), each)
            self.records.write("begin", step=step, case=vars(case), ranks=ranks, moved=moved)
            operation = measure.make_operation(case, self.buffers, group, ranks, self.rank, each)
            alive = functools.partial(self.watchdog.arm, limit, step)
            timing = measure.measure(case, operation, self.device, functools.partial(self._agree, group), alive)
            self.records.write("done", step=step, **vars(timing))
            median = timing.median_s
        self.store.set(f"done/{step}/{self.rank}", repr(median))
        if plan is not None:
            keys = [f"done/{step}/{rank}" for rank in range(self.setup.world_size)]
            # A hang is the watchdog's to tell; the store waits a little longer.
            self.watchdog.arm(self._others, step)
            self.store.wait(keys, datetime.timedelta(seconds=self._others + 5))
            plan.median_s = max(float(self.store.get(key)) for key in keys)
            for key in keys:
                self.store.delete_key(key)
        self.watchdog.disarm()

    def _group(self, scope: str, turn: int, ranks: list[int]) -> Any:
        """The connected process group of a scope, made by its members alone; None: all. Only one turn's pairs are kept."""
        key = (scope, turn)
        if key not in self.groups:
            for old in [old for old in self.groups if old[0] == scope]:
                dist.destroy_process_group(self.groups.pop(old)[0])
            began = time.monotonic()
            group = None if scope == "world" else dist.new_group(ranks, use_local_synchronization=True)
            self._agree(group, 0.0)  # NCCL makes a communicator at its first use
            self.groups[key] = (group, ranks)
            self.records.write("connected", scope=scope, turn=turn, seconds=round(time.monotonic() - began, 4))
        return self.groups[key][0]

    @property
    def _others(self) -> float:
        """Seconds that other ranks may be at a measurement in which this one has no part any more."""
        return 2 * self.setup.case_seconds

    def _agree(self, group: Any, value: float) -> float:
        """The largest value of a group's ranks."""
        largest = torch.tensor([value], dtype=torch.float32, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return float(largest)


class RoundPlan:
    """Rank 0's view of what comes next."""

    def __init__(self, setup: Setup, deadline: float, most_bytes: int) -> None:
        self._schedule = schedule.CaseSchedule(setup, time.monotonic, deadline, most_bytes)
        self._cases = self._schedule.run()
        self._reported = 0
        self.median_s: Any = None
        """What the last case took; None before the first one, which is what a generator takes to begin."""

    def next(self) -> CollectiveCase | None:
        """The next case; None at the end."""
        try:
            return self._cases.send(self.median_s)
        except StopIteration:
            return None

    def news(self) -> list[dict[str, Any]]:
        """What was left out since the last call."""
        new = self._schedule.left_out[self._reported :]
        self._reported += len(new)
        return [dict(zip(("scope", "collective", "bytes", "reason"), entry, strict=True)) for entry in new]


def _message(error: Exception) -> str:
    """The first lines of a library's message: those of torch hold C++ frames from the second on."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:600]


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="clustertune.nccl_check.rank")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--local", type=int, required=True)
    parser.add_argument("--began", type=float, help="when the node began, by the kernel's monotonic clock")
    given = parser.parse_args(argv)
    try:
        setup = Setup.read(given.folder)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    began = time.monotonic() if given.began is None else given.began
    return Rank(given.folder, setup, given.node, given.local, began).main()


if __name__ == "__main__":
    code = main()
    # Communicators of ranks that are gone make the ordinary end wait; there is nothing left to save.
    os._exit(code)
