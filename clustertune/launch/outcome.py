"""How an attempt ended, judged from what each rank and each node left behind: one code, one reason, the first to fail."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, is_full
from clustertune.launch.agent import ask_anew, log_file, node_record, rank_record
from clustertune.launch.attempt import OUTCOME, AttemptPlan
from clustertune.manifest import read_text, write_durably

MISSING_RECORD = "ended without a record: killed (out of memory, kill -9, or a node fault)"
AGAIN = "the same command resumes from the newest whole checkpoint"
_RANK_KILLED = re.compile(r"exitcode\s*: -\d+\b")
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+) .*?exitcode\s*: (-?\d+)", re.DOTALL)
"""How torch's launcher reports the rank that failed first on its node."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    code: ExitCode
    problems: list[Problem] = field(default_factory=list)
    nodes_gone: tuple[str, ...] = ()
    """Nodes that left no record: lost, cut off, or ended from outside."""
    stop_requested: bool = False
    """It ended because it was asked to: ahead of a limit, for a preemption, or by a person."""
    port_taken: bool = False
    """The rendezvous port was taken between its choice and its use."""

    def write(self, folder: Path, **more: Any) -> None:
        """Leave ``outcome.json`` in the attempt's folder."""
        body = {**asdict(self), "code": int(self.code), "time": round(time.time(), 3), **more}
        # "asked": the key that every version reads.
        write_durably(folder / OUTCOME, json.dumps({"asked": body.pop("stop_requested"), **body}, indent=1) + "\n")


def judge(folder: Path, plan: AttemptPlan, *, requested: bool = False) -> Outcome:
    """The code and reason of an attempt.

    Decisions that all ranks took together come first; then being asked to stop; then a rank that was killed or hung; then
    the earliest failure. ``requested``: a stop was requested, which explains ranks that say nothing.
    """
    traces = _Traces.read(folder, plan)
    requested = requested or any(body and body.get("asked") for body in traces.nodes.values())
    killed = any(body is not None and body["launcher"] == -signal.SIGKILL for body in traces.nodes.values())
    return (
        traces.decision()
        or (traces.stopped() if requested else None)
        or traces.given_up()
        or traces.killed_first()
        or traces.nodes_lost()
        or traces.silence(killed=killed)
        or traces.first_failure()
        or Outcome(ExitCode.AGAIN if ExitCode.AGAIN in traces.codes else ExitCode.OK)
    )


def conclude(folder: Path, plan: AttemptPlan, *, requested: bool = False) -> Outcome:
    """:func:`judge`, and ``outcome.json`` beside the plan: what the starter of an attempt does at its end."""
    outcome = judge(folder, plan, requested=requested)
    with contextlib.suppress(OSError):  # a full disk is what it may have to tell
        outcome.write(folder)
    return outcome


def any_node_failed(folder: Path, plan: AttemptPlan) -> bool:
    """Whether a node has left a record that says so: its attempt is over, whatever the others do."""
    ask_anew(folder)
    return any(node_record(folder, node).get("code") for node in range(len(plan.nodes)))


@dataclass(frozen=True)
class _Traces:
    """What an attempt left behind. Each method is one way to end, or None where it was not that one."""

    folder: Path
    plan: AttemptPlan
    records: dict[int, dict[str, Any]]
    """By rank, of those that left one."""
    nodes: dict[int, dict[str, Any] | None]

    @classmethod
    def read(cls, folder: Path, plan: AttemptPlan) -> _Traces:
        ask_anew(folder)
        nodes = {node: node_record(folder, node) or None for node in range(len(plan.nodes))}
        records = ((rank, rank_record(folder, rank)) for rank in range(plan.world_size))
        return cls(folder, plan, {rank: record for rank, record in records if record}, nodes)

    @property
    def codes(self) -> set[ExitCode]:
        return {ExitCode(record["code"]) for record in self.records.values()}

    @property
    def silent(self) -> list[int]:
        return sorted(set(range(self.plan.world_size)) - set(self.records))

    @property
    def gone(self) -> tuple[str, ...]:
        if len(self.plan.nodes) == 1:
            return ()
        return tuple(self.plan.nodes[node].name for node, body in self.nodes.items() if body is None)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Earliest first."""
        failures = (record for record in self.records.values() if record["code"] not in (0, ExitCode.AGAIN))
        return sorted(failures, key=lambda record: float(record["time"]))

    def decision(self) -> Outcome | None:
        """What all ranks, or a node, decided outranks the noise of ranks that then lost their peers."""
        for code in (ExitCode.STOP, ExitCode.CONFIG, ExitCode.STORAGE):
            if code in self.codes:
                return Outcome(code, _problems(r for r in self.records.values() if r["code"] == code))
        for body in self.nodes.values():
            if body and body["code"] in (ExitCode.CONFIG, ExitCode.STORAGE):
                return Outcome(ExitCode(body["code"]), [Problem(**p) for p in body["problems"]])
        return None

    def stopped(self) -> Outcome | None:
        """As asked, where no rank failed for another reason."""
        if self.silent or self.codes <= {ExitCode.OK, ExitCode.AGAIN}:
            return Outcome(ExitCode.AGAIN, stop_requested=True)
        return None

    def given_up(self) -> Outcome | None:
        """No rank began for want of a port, or an agent ended its own: hung, or superseded by a newer attempt."""
        if not self.records and _PORT_TAKEN.search(text := read_text(log_file(self.folder, 0))):
            problem = Problem(
                f"the rendezvous port was taken: {_last_line(text)}", file=str(log_file(self.folder, 0)), fix=AGAIN
            )
            return Outcome(ExitCode.AGAIN, [problem], port_taken=True)
        ended = _problems(body for body in self.nodes.values() if body)
        return Outcome(ExitCode.AGAIN, ended, self.gone) if ended else None

    def killed_first(self) -> Outcome | None:
        """A rank without a record that its node's launcher saw die first by a signal."""
        for node in range(len(self.plan.nodes)):
            match = _ROOT_CAUSE.search(read_text(log_file(self.folder, node)))
            # SIGTERM is how launchers and schedulers end ranks whose peers have failed: never the cause.
            if match and int(match[1]) in self.silent and int(match[2]) < 0 and int(match[2]) != -signal.SIGTERM:
                text = f"{self.plan.where(int(match[1]))} failed first: {how_ended(-int(match[2]))}"
                return Outcome(ExitCode.AGAIN, [Problem(text, file=str(self.folder), fix=AGAIN)], self.gone)
        return None

    def nodes_lost(self) -> Outcome | None:
        if not self.gone or self.failed:
            return None
        text = f"{', '.join(self.gone)} ended without a record: lost, cut off, or ended from outside"
        return Outcome(ExitCode.AGAIN, [Problem(text, file=str(self.folder), fix=AGAIN)], self.gone)

    def silence(self, *, killed: bool) -> Outcome | None:
        """Ranks that left no record; with several nodes the scheduler ends those of the others when one fails."""
        if not self.silent or (self.failed and len(self.plan.nodes) > 1):
            return None
        if not self.folder.is_dir():
            text = "the run folder was deleted or moved, or its storage was unmounted, while the ranks worked in it"
            fix = "bring it back, then the same command again; without it the run starts from its first step"
            return Outcome(ExitCode.STORAGE, [Problem(text, file=str(self.folder.parent.parent), fix=fix)], self.gone)
        if is_full(self.folder):
            problem = Problem("no space left for what the ranks write", file=str(self.folder), fix=f"free space, then {AGAIN}")
            return Outcome(ExitCode.STORAGE, [problem])
        log = log_file(self.folder, 0)
        text = read_text(log)
        if not (self.folder / "rank-0.log").exists() and not killed and not _RANK_KILLED.search(text):
            problem = Problem(f"the launcher started no rank: {_last_line(text)}", file=str(log))
            return Outcome(ExitCode.FAILED, [problem], self.gone)
        names = ", ".join(self.plan.where(rank) for rank in self.silent)
        return Outcome(ExitCode.AGAIN, [Problem(f"{names} {MISSING_RECORD}", file=str(self.folder), fix=AGAIN)], self.gone)

    def first_failure(self) -> Outcome | None:
        if not self.failed:
            return None
        first = self.failed[0]
        text = f"{self.plan.where(int(first['rank']))} failed first: "
        if self.gone:  # it lost its peers there: what it says about its connection is not the cause
            lost = Problem(f"{', '.join(self.gone)} ended without a record", file=str(self.folder), fix=AGAIN)
            return Outcome(ExitCode.AGAIN, [lost, *_problems([first], prefix=text)], self.gone)
        return Outcome(ExitCode(first["code"]), _problems([first], prefix=text))


def how_ended(number: int) -> str:
    """How a rank ended that a signal of this number killed, in words for a person."""
    name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
    return "killed (SIGKILL: out of memory, kill -9, or a node fault)" if number == signal.SIGKILL else f"ended by {name}"


def _problems(records: Iterable[dict[str, Any]], prefix: str = "") -> list[Problem]:
    problems = (Problem(**{**p, "message": prefix + p["message"]}) for record in records for p in record["problems"])
    return list(dict.fromkeys(problems))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
