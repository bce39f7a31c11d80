"""Signs of life of a node's ranks: which are stopped, which say nothing any more, and since when."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clustertune.errors import Problem
from clustertune.events import read_text
from clustertune.launch.plan import AttemptPlan

STOPPED_SECONDS = 30.0
"""A rank that the kernel holds stopped (SIGSTOP, a debugger) for so long is ended: all others wait for it in a collective."""
STARTUP_SECONDS = 3600.0
"""Without a sign of life before the first step, and while saving: loading 812 GB (Llama 3.1 405B) from NFS at 0.3 GB/s takes
45 minutes, writing the 432 GB of a 72B model with AdamW's moments 24."""
LEAST_SECONDS = 300.0
GAPS = 5.0
"""Under way a rank may be silent for 5 times its longest silence so far, and 300 s at least (NVRx waits 300 s for its
heartbeat): an evaluation may be slower than any step."""
AGAIN_FIX = "the next attempt resumes from the newest whole checkpoint"


@dataclass
class _RankState:
    """What was last heard of one rank, by this machine's clock."""

    text: str = ""
    since: float = 0.0
    longest: float = 0.0
    """The longest silence between two signs while training, seconds."""
    trained: bool = False
    """The sign before the last one was of training too, so that the next silence is a step's."""
    stopped_since: float | None = None


@dataclass
class HeartbeatMonitor:
    """The ranks of one node. :meth:`look` is called again and again."""

    folder: Path
    plan: AttemptPlan
    node: int
    clock: Callable[[], float] = time.monotonic
    _states: dict[int, _RankState] = field(default_factory=dict)

    def look(self) -> list[Problem]:
        """The ranks that have to be given up now; none while all live."""
        now = self.clock()
        found = []
        for rank in self.plan.ranks_of(self.node):
            rank_state = self._states.setdefault(rank, _RankState(since=now))
            heartbeat = read_text(self.folder / f"rank-{rank}.heartbeat")
            if heartbeat != rank_state.text:
                training = _phase(rank_state.text) == _phase(heartbeat) == "train"
                # The first silence ends where the first step begins: a second, where a step of 405B takes seven minutes.
                if training and rank_state.trained:
                    rank_state.longest = max(rank_state.longest, now - rank_state.since)
                rank_state.trained = training
                rank_state.text, rank_state.since = heartbeat, now
            if (text := self._stopped(rank, rank_state, now) or self._silent(rank_state, now)) is not None:
                found.append(
                    Problem(f"{self.plan.where(rank)} {text}", file=str(self.folder / f"rank-{rank}.log"), fix=AGAIN_FIX)
                )
        return found

    def _stopped(self, rank: int, rank_state: _RankState, now: float) -> str | None:
        """Held by the kernel: certain, whatever its heartbeats say."""
        pid = read_text(self.folder / f"rank-{rank}.pid").strip()
        if not pid.isdigit() or process_state(int(pid)) not in ("T", "t"):
            rank_state.stopped_since = None
            return None
        if rank_state.stopped_since is None:
            rank_state.stopped_since = now
        held = now - rank_state.stopped_since
        return f"hangs: its process is stopped (state T) for {held:.0f} s" if held >= STOPPED_SECONDS else None

    def _silent(self, rank_state: _RankState, now: float) -> str | None:
        if _phase(rank_state.text) == "end":
            return None
        quiet = now - rank_state.since
        if quiet < self.limit(rank_state):
            return None
        last = " ".join(rank_state.text.split()[1:]) or "nothing at all"
        return f"hangs: no sign of life for {quiet:.0f} s (last: {last})"

    def limit(self, rank_state: _RankState) -> float:
        """Seconds of silence that are allowed now."""
        if self.plan.stall_seconds is not None:
            return self.plan.stall_seconds
        paced = max(LEAST_SECONDS, GAPS * rank_state.longest)
        return paced if rank_state.longest and _phase(rank_state.text) != "save" else max(paced, STARTUP_SECONDS)

    def dump_stacks(self) -> None:
        """Ask every rank of the node for the stacks of its threads, in its own log (faulthandler on SIGUSR2)."""
        for rank in self.plan.ranks_of(self.node):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / f"rank-{rank}.pid").read_text()), signal.SIGUSR2)
        time.sleep(0.5)


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does (proc(5)): R, S, D, T, Z; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _phase(heartbeat: str) -> str:
    fields = heartbeat.split()
    return fields[1] if len(fields) > 1 else ""
