"""What a check measures and in which order, a node's part in it, and the document that comes of it.

``python -m clustertune.nccl_check.link_measure --folder DIR [--node N]`` is the program of a node, which srun starts on every
one: it collects the node's facts, tries pairs of GPUs, starts the ranks and ends what is left of them when their time is over.

The document is one JSON file for the planner, the report and the judge.

Every key but ``schema`` may be absent; the
schema that a saved file must have is :class:`clustertune.plan.machine.CheckFile`. Of two nodes with two ranks each::

    {
      "schema": "clustertune.nccl-check/1", "cluster": "my-cluster", "date": "2026-11-02",
      "nodes": 2, "gpus_per_node": 2,           // ranks per node where the backend is gloo
      "backend": "nccl",                        // "gloo": sockets between CPUs
      "backend_why": "2 GPUs on each node",     // why this backend: also "one GPU has no peer: gloo, 2 CPU ranks"
      "transport": "NET/IB",                    // between nodes (inside one where there is one): "gloo TCP on eth0"
      "interface": "bond0",                     // that ranks of several nodes were to use; absent: none was given
      "hosts": ["n1", "n2"],                    // in the order of ranks: rank r runs on hosts[r // gpus_per_node]
      "seconds": 118.2,                         // the whole check
      "not_judged": "no GPU here: ...",         // why a verdict without a fault is unknown and not pass
      "results": [{"scope": "world", "collective": "all_gather", "bytes": 1073741824, "algbw_gb_s": 10.2, "busbw_gb_s": 7.6,
                   "ranks": 4, "iterations": 20, "median_s": 0.1053, "spread": 0.03, "correct": true}],
      "per_node": [{"node": "n1", ...the same without scope}],
      "per_pair": [{"nodes": ["n1", "n2"], "collective": "p2p", "bytes": 268435456, ...the same}],
      "p2p_probe": [{"node": "n1", "gpus": [0, 1], "status": "ok", "seconds": 4.1, "message": ""}],
      "hung": [{"scope": "world", "collective": "all_reduce", "bytes": 1024, "seconds": 60.0, "ranks": [0, 1, 2],
                "hosts": ["n1"], "message": ""}],
      "left_out": [{"scope": "world", "collective": "broadcast", "bytes": 1073741824, "reason": "would take 80 s, 12 s left"}],
      "problems": [{"node": "n2", "message": "no facts within 20 s"}],
      "facts": [{"hostname": "n1", ...}],       // clustertune.host.facts.HostFacts of each node, in the order of hosts
      "environment": {"NCCL_SOCKET_IFNAME": "=bond0", "NCCL_DEBUG": "WARN"},   // NCCL_*, GLOO_*, TORCH_NCCL_* of training
      "expected": {"intra": {...}, "inter": {...}},      // clustertune.nccl_check.link_check.expected
      "verdict": {"status": "warn", "headline": "...", "findings": [clustertune.check.rule.as_json]}
    }

``scope``: ``intra`` is a collective of the ranks of each node, all nodes at once, and the figure is that of the slowest node
(``per_node`` has each); ``inter`` is one of the first ranks of all nodes; ``world`` is one of all ranks. ``collective``:
``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, and ``p2p``: every rank sends to the next one and gets from
the one before. In ``per_pair`` it goes one way, from every rank of the first node to its counterpart on the second: the
bandwidth is that of all of them together; the other way has an entry with the nodes in turn. Pairs that share no node are
measured side by side.

``bytes``: the whole buffer for all_gather and reduce_scatter, what each rank holds for the others, all that one node sends for
``p2p`` of a pair. ``algbw_gb_s`` is bytes by time, ``busbw_gb_s`` is that times the factor of nccl-tests' doc/PERFORMANCE.md.
``median_s`` is the slowest rank's median over the iterations, ``spread`` its (95th - 5th percentile) / median. ``correct``:
whether every element of every rank had the value that it must have.

``p2p_probe`` ``status``: ``ok``, ``hung`` (killed at its time limit), ``failed`` (``message`` says how), ``skipped``.
``hung``: what did not end; ``ranks`` are those that did not end it, ``hosts`` those of a rank that fell silent in it or failed
by itself: one that only waits for another says so. ``collective`` ``init`` with ``bytes`` 0: the ranks did not find each other.
What was measured before is kept.

NCCL's log was captured with ``NCCL_DEBUG=INFO``: that variable in a log is the check's own, the one in ``environment`` is not.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clustertune import bounded, process
from clustertune.errors import Problem, UserError
from clustertune.host.collect import collect
from clustertune.launch.agent import await_object
from clustertune.manifest import read_events, read_object, write_durably
from clustertune.nccl_check.link_rules import COLLECTIVES
from clustertune.process import kill_group
from clustertune.text import listed

SCHEMA = "clustertune.nccl-check/1"
"""The name and version of the document."""
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
MARGIN_SECONDS = 60.0
"""How much later than the time that was asked for a check may be over: its ranks start before it, what hangs is ended after."""
ENDING_SECONDS = 15.0
"""Of the time for everything, what is kept for ending processes that do not answer: SIGTERM, and SIGKILL after it."""


@dataclass(frozen=True)
class CollectiveCase:
    """One measurement: a collective of one size over the groups of a scope."""

    scope: str
    """One of :data:`SCOPES`."""
    collective: str
    bytes: int
    """As the document counts them, before they are rounded to whole elements of all ranks."""
    iterations: int = 1
    warmup: int = 1
    turn: int = 0
    """Of pairs: which turn of the tournament."""
    back: bool = False
    """Of ``p2p`` of a pair: from the second node to the first."""

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
    """Hard deadline for the whole check, its start included; None: ``MARGIN_SECONDS`` after ``seconds``."""

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
        """Durable, so that other nodes see it complete. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / SETUP, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Setup:
        """Raises UserError where there is none, or it is another program's."""
        path = folder / SETUP
        try:
            data = json.loads(path.read_bytes())
            values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
            return cls(**values)
        except (OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
            fix = "is the folder on storage that all nodes see?"
            raise UserError(Problem(f"contains no setup of a check: {error}", file=str(path), fix=fix)) from None


# --- the order of measurements ----------------------------------------------------------------------------------------

# Pure; rank 0 asks it after every measurement. Sizes grow: from the time of one follows what the next would take at most, and a
# link that is broken costs milliseconds instead of the whole time. What is slow is not taken for hung: all of a case is planned
# to take less than the time after which one iteration counts as hung.

SIZES = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
"""Below the largest. The first is over in half a second even on 1 Mbit/s; the planner takes the largest three."""
ITERATIONS, WARMUP = 20, 5
"""As nccl-tests (``-n``, ``-w``)."""
LEAST_ITERATIONS = 3
"""Fewer have no spread; so many of a size whose time cannot be known yet."""
PAIR_SHARE = 0.35
"""Of the time, what is kept for the pairs of nodes: they find the slow node or way."""
FEW = 4
"""How many equal shares of the time that is left one measurement may take."""
MOST_OF_LIMIT = 0.5
"""Of the time after which an iteration counts as hung, what a whole case is planned to take at most."""

Cases = Generator[CollectiveCase, float, None]
"""What is measured next; it is sent the median of the slowest rank, seconds, 0 where nothing was measured."""


def schedule(setup: Setup, clock: Callable[[], float], deadline: float, most_bytes: int, report: Callable[..., None]) -> Cases:
    """The cases of a check, one after the other: collectives of all sizes, then each pair of nodes; the smallest size first.

    ``deadline``: when measuring ends, by ``clock``. ``most_bytes``: what the ranks' memory holds. ``report`` is called with
    scope, collective, bytes and reason of what is left out.
    """
    per_byte: dict[tuple[str, str, int, bool], float] = {}  # of a track: seconds for a byte, of its largest size
    scopes = shapes(setup)
    sizes = [*(size for size in SIZES if size < setup.largest), setup.largest]
    tracks = [CollectiveCase(scope, name, 0) for scope in scopes if scope != "pair" for name in setup.collectives]
    turns = range(len(tournament(len(setup.hosts)))) if "pair" in scopes and "p2p" in setup.collectives else ()
    ways = [[CollectiveCase("pair", "p2p", 0, turn=turn, back=back) for back in (False, True)] for turn in turns]
    together = [replace(track, bytes=size) for size in sizes for track in tracks]
    # All of a turn at once: its groups are made once, under a name that torch takes from their ranks.
    apart = [replace(way, bytes=size) for both in ways for size in sizes for way in both]
    reserve = (deadline - clock()) * PAIR_SHARE if apart else 0.0
    for cases, until in ((together, deadline - reserve), (apart, deadline)):
        for number, case in enumerate(cases):
            # Time grows no faster than the size; the least measurement has its warm-up and its check.
            each = per_byte.get(case.track, 0.0) * case.bytes
            least, left = (LEAST_ITERATIONS + 2) * each, max(0.0, until - clock())
            # Those that follow are as large or larger, but few of them need all of an equal share.
            share = min(left, FEW * left / (len(cases) - number), MOST_OF_LIMIT * setup.case_seconds)
            why = f"would take {least:.3g} s, {share:.3g} s are left for it" if left <= 0 or least > share else ""
            why = "does not fit into memory" if case.bytes > most_bytes else why
            if why:
                report(scope=case.scope, collective=case.collective, bytes=case.bytes, reason=why)
                continue
            fitting = int(share / each) - 2 if each else LEAST_ITERATIONS
            iterations = max(LEAST_ITERATIONS, min(ITERATIONS, fitting))
            median_s = yield replace(case, iterations=iterations, warmup=max(1, min(WARMUP, fitting - iterations + 1)))
            if median_s > 0:
                per_byte[case.track] = median_s / case.bytes


def shapes(setup: Setup) -> list[str]:
    """The scopes that mean something here, of those asked for: of one node there is no network, of one rank no link inside."""
    nodes, each = len(setup.hosts), setup.ranks_per_node
    possible = {"world": nodes > 1, "intra": each > 1, "inter": nodes > 1 and each > 1, "pair": nodes > 1}
    return [scope for scope in setup.scopes if possible[scope]]


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


# --- one node ---------------------------------------------------------------------------------------------------------

FACTS_SECONDS = 20.0
LAST_WORDS_SECONDS = 5.0
"""How long the others of a node may continue after one of its ranks has failed: they find out by themselves, and say so."""
PATIENCE_SECONDS = 60.0
"""How long a node looks for the setup: an NFS client may answer from its cache of absent names for so long (acdirmax)."""
STEERING = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "OMPI_MCA_")
"""Beginnings of the variables that steer the libraries, and hold no secrets."""
DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING,P2P,SHM"}
"""What makes NCCL say how it goes. Without COLL, which is a line for each call and rank."""


def run_node(folder: Path, setup: Setup, node: int) -> int:
    """The node's part of a check. Returns 0 where all ranks ended by themselves, else 1. Raises OSError for a full disk."""
    began, environ, problems = time.monotonic(), {**os.environ, **setup.environment}, list[str]()
    record: dict[str, Any] = {"codes": [], "probe": [], "problems": problems, "environment": steering(environ)}
    record["python"] = ".".join(map(str, sys.version_info[:3]))
    look = lambda: collect(place=setup.place, seconds=FACTS_SECONDS / 2).as_dict()  # noqa: E731
    with bounded.Pending(look, FACTS_SECONDS) as facts:  # a file system or a driver may not answer
        try:
            interfaces = sorted(name for _, name in socket.if_nameindex())
            if setup.interface in (None, *interfaces):
                record["probe"] = _probe_pairs(setup, node, environ, problems)
                record["codes"] = _run_ranks(folder, setup, node, environ, began)
            else:  # gloo and NCCL report it with messages of their own, a minute later
                existing = ", ".join(interfaces)
                problems.append(f"there is no interface {setup.interface} (it has {existing}): nothing was measured")
            if collected := facts.answer().found:
                record["facts"] = {**collected, "hostname": setup.hosts[node]}
            else:
                problems.append(f"its facts took longer than {FACTS_SECONDS:.0f} s, or could not be collected")
        finally:
            write_durably(folder / NODE.format(node=node), json.dumps(record) + "\n")
    return int(not record["codes"] or any(code != 0 for code in record["codes"]))


def _probe_pairs(setup: Setup, node: int, environ: dict[str, str], problems: list[str]) -> list[dict[str, Any]]:
    """What pairs of this node's GPUs did. Where one hung, the ranks go without P2P: they would hang too, and tell nothing."""
    if setup.backend != "nccl" or setup.ranks_per_node < 2:
        return []
    limit = max(10.0, setup.seconds / 3)
    pairs = probe_pairs(setup.ranks_per_node, setup.backend, environ, limit, pairwise=setup.pairwise)
    if any(entry["status"] == "hung" for entry in pairs):
        environ["NCCL_P2P_DISABLE"] = "1"
        problems.append("two GPUs hung: measured on with NCCL_P2P_DISABLE=1")
    return [{"node": setup.hosts[node], **entry} for entry in pairs]


def _run_ranks(folder: Path, setup: Setup, node: int, environ: Mapping[str, str], began: float) -> list[int | None]:
    """Start all ranks of this node; their exit codes, negative for a signal, None where one was ended here."""
    children: list[subprocess.Popen[bytes]] = []
    deadline = began + setup.limit
    try:
        for local in range(setup.ranks_per_node):
            rank = node * setup.ranks_per_node + local
            where = ["--folder", str(folder), "--node", str(node), "--local", str(local), "--began", repr(began)]
            log = {**DEBUG, "NCCL_DEBUG_FILE": str(folder / LOGS.format(rank=rank))} if setup.backend == "nccl" else {}
            command = [sys.executable, "-m", "clustertune.nccl_check.link_rank", *where]
            children.append(start(command, folder / OUTPUT.format(rank=rank), signal.SIGKILL, env={**environ, **log}))
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            if any(child.returncode for child in children):
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
            time.sleep(0.1)
        return [child.poll() for child in children]
    finally:
        for child in children:
            kill_group(child)


def start(command: Sequence[str], output: Path, last: signal.Signals, **options: Any) -> subprocess.Popen[bytes]:
    """Start a program that writes to the end of ``output`` and gets signal ``last`` when this process ends. Raises OSError."""
    with output.open("ab") as out:
        return process.start(command, last, stdout=out, stderr=out, **options)


def steering(values: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how bytes go. A value with a control character or a URL's credentials is left out."""
    return {
        name: value
        for name, value in sorted(values.items())
        if name.startswith(STEERING) and value.isprintable() and "@" not in value and len(value) <= 500
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The program of a node."""
    parser = argparse.ArgumentParser(prog="clustertune.nccl_check.link_measure")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", type=int, help="number of this host (default: SLURM_NODEID)")
    parsed = parser.parse_args(argv)
    number = os.environ.get("SLURM_NODEID", "") if parsed.node is None else str(parsed.node)
    if not number.isdigit():
        parser.exit(2, "error: SLURM_NODEID is not set: give --node, or start it with srun\n")
    try:
        await_object(parsed.folder / SETUP, PATIENCE_SECONDS)
        setup = Setup.read(parsed.folder)

        def stopped(number: int, _frame: object) -> None:
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, stopped)
        return run_node(parsed.folder, setup, int(number))
    except UserError as error:
        parser.exit(2, "".join(f"error: {problem}\n" for problem in error.problems))
    except OSError as error:
        parser.exit(73, f"error: {error.filename or parsed.folder}: {error.strerror or error}\n")


# --- the document -----------------------------------------------------------------------------------------------------

# From the files of a check to its document. Reads only; nothing raises for a file that is torn, missing or half written,
# because that is how a check looks after a fault.

LEAST_START_SECONDS = 10.0
"""Ranks that waited for less long may not have begun at the same time: Python comes from network storage."""
LARGEST_LOG = 4 << 20
"""Bytes of one rank's log that are judged: half where NCCL says how it goes, half at the end, where it says why it failed."""
_ERROR = re.compile(r"error|exception|fatal|abort|cannot|failed", re.IGNORECASE)
_WARNING = re.compile(r"\[[WI]\d|\s|frame #|Exception raised from|.*Warning")
"""Of torch's C++ part, and of Python's warnings, whose second line is indented."""
_OTHERS = re.compile(
    r"connection (closed|reset) by peer|socket timeout|timed out waiting|broken pipe|failed to recv", re.IGNORECASE
)
"""What a rank says whose peer has gone: it is not the one at fault."""


def bus_factor(collective: str, ranks: int) -> float:
    """What makes ``busbw`` of ``algbw``: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

    It is what each rank's link carries in one direction, by the size that nccl-tests prints.
    """
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in ("all_gather", "reduce_scatter") else 1.0


@dataclass
class CaseTimes:
    """One case, as one group of ranks saw it."""

    case: Mapping[str, Any]
    ranks: list[int]
    moved: int
    ended: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """How it ended for a rank: its event ``done``, ``hung`` or ``failed``; a rank that fell silent has none."""

    def by(self, kind: str) -> dict[int, Mapping[str, Any]]:
        """The ranks for which it ended so."""
        return {rank: event for rank, event in self.ended.items() if event["event"] == kind}

    @property
    def complete(self) -> bool:
        return len(self.by("done")) == len(self.ranks)

    @property
    def about(self) -> dict[str, Any]:
        """What was measured, as the document names it."""
        return {"scope": self.case["scope"], "collective": self.case["collective"], "bytes": self.moved}

    def figures(self) -> dict[str, Any]:
        """Of the slowest rank: the others wait for it, or have only handed over what they send."""
        slowest = max(self.ended.values(), key=lambda event: event["median_s"])
        algbw = self.moved / slowest["median_s"] / 1e9 if slowest["median_s"] > 0 else 0.0
        measured = {
            "algbw_gb_s": algbw,
            "busbw_gb_s": algbw * bus_factor(self.case["collective"], len(self.ranks)),
            "median_s": slowest["median_s"],
            "spread": slowest["spread"],
        }
        return {
            "collective": self.case["collective"],
            "bytes": self.moved,
            **{name: float(f"{value:.6g}") for name, value in measured.items()},
            "ranks": len(self.ranks),
            "iterations": self.case["iterations"],
            "correct": all(event["correct"] for event in self.ended.values()),
        }


class CheckRecords:
    """What is in the folder of a check."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.folder, self.setup = folder, setup
        self.events = [list(read_events(folder / RECORDS.format(rank=rank))) for rank in range(setup.world_size)]
        self.nodes = [read_object(folder / NODE.format(node=node)) for node in range(len(setup.hosts))]
        self.started, self.met, self.up = self._last("start"), self._last("met"), self._last("up")
        """Ranks whose program ran, that reached the first one, and that found all others."""
        gave_up = {**self._last("hung"), **self._last("failed")}
        self.early = {rank: str(event.get("message", "")) for rank, event in gave_up.items() if rank not in self.up}
        """Ranks that failed or waited in vain before that, with their messages."""
        steps: dict[tuple[int, tuple[int, ...]], CaseTimes] = {}
        for rank, events in enumerate(self.events):
            mine: dict[int, CaseTimes] = {}
            for event in events:
                if event.get("event") == "begin":
                    group = (event["step"], tuple(event["ranks"]))
                    mine[event["step"]] = steps.setdefault(group, CaseTimes(event["case"], event["ranks"], event["moved"]))
                elif event.get("event") in ("done", "hung", "failed") and (step := mine.get(event["step"])):
                    step.ended.setdefault(rank, event)
        self.steps = [steps[key] for key in sorted(steps)]

    def _last(self, kind: str) -> dict[int, Mapping[str, Any]]:
        """The last event of a kind of each rank that has one."""
        return {rank: event for rank, events in enumerate(self.events) for event in events if event.get("event") == kind}

    def _died(self, step: CaseTimes) -> bool:
        """Whether a rank of a step ended badly by itself: where none did, and none gave it up, its time was over."""
        return bool(step.by("hung") or step.by("failed") or any(self._code(rank) for rank in step.ranks))

    def _code(self, rank: int) -> int | None:
        """The exit code of a rank; None where it was ended, or its node left no record."""
        node, local = divmod(rank, self.setup.ranks_per_node)
        return dict(enumerate(self.nodes[node].get("codes") or [])).get(local)

    @property
    def inconclusive(self) -> str:
        """Why nothing follows from ranks that did not find each other; empty where all ran and waited, or a node says why not.

        A step that did not start, a program that could not be read in time, or a limit that was over while the ranks were
        still starting is a fault of the check, not of the links.
        """
        setup = self.setup
        if len(self.up) == setup.world_size or any(seen.get("problems") and seen.get("codes") == [] for seen in self.nodes):
            return ""
        absent = [rank for rank in range(setup.world_size) if rank not in self.started]
        if absent:
            return f"no rank began on {listed(setup.hosts_of(absent), 3)}"
        if not self.early:
            return f"{setup.most_seconds:.0f} s were over before the ranks had found each other"
        if setup.start_seconds < LEAST_START_SECONDS:
            return f"{setup.start_seconds:.0f} s are too short for the ranks to find each other"
        return ""

    def document(self) -> dict[str, Any]:
        """What was measured and what went wrong, in the words of the document."""
        hung, problems = self.faults()
        broken = [step for step in self.steps if not step.complete]
        cut = [{**step.about, "reason": "cut off in the middle"} for step in broken if not self._died(step)]
        keys = ("scope", "collective", "bytes", "reason")
        never = [{key: event[key] for key in keys} for event in self.events[0] if event.get("event") == "left_out"]
        unique = {(entry["scope"], entry["collective"], entry["bytes"]): entry for entry in [*never, *cut]}
        return {
            **self.measurements(),
            "p2p_probe": [entry for node in self.nodes for entry in node.get("probe", [])],
            "hung": hung,
            "left_out": list(unique.values()),
            "problems": problems,
            "facts": [node["facts"] for node in self.nodes if node.get("facts")],
            "environment": self.environment,
        }

    def measurements(self) -> dict[str, list[dict[str, Any]]]:
        """``results``, ``per_node`` and ``per_pair``."""
        results: dict[tuple[str, str, int], dict[str, Any]] = {}
        per_node, per_pair = [], []
        for step in self.steps:
            if not step.complete:
                continue
            figures, scope, nodes = step.figures(), step.case["scope"], self.setup.hosts_of(step.ranks)
            if scope == "pair":
                per_pair.append({"nodes": nodes[::-1] if step.case.get("back") else nodes, **figures})
                continue
            if scope == "intra":
                per_node.append({"node": nodes[0], **figures})
            key = (scope, figures["collective"], figures["bytes"])
            known = results.get(key, {})  # of another node: the slower one counts, and a wrong value on either
            slower = figures if not known or figures["busbw_gb_s"] < known["busbw_gb_s"] else known
            results[key] = {"scope": scope, **slower, "correct": known.get("correct", True) and figures["correct"]}
        return {"results": list(results.values()), "per_node": per_node, "per_pair": per_pair}

    def faults(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """``hung`` and ``problems``."""
        setup, problems = self.setup, []
        hung = [self._hung(step) for step in self.steps if not step.complete and self._died(step)]
        if absent := [rank for rank in range(setup.world_size) if rank not in self.up]:
            guilty = [r for r in absent if r not in self.early] or [r for r in absent if r not in self.met] or absent
            own = (text for text in self.early.values() if text and not _OTHERS.search(text))
            message = next(own, "") or self._last_words(guilty)
            lacking = [setup.hosts[node] for node, seen in enumerate(self.nodes) if seen.get("problems")]
            text = f"the ranks did not find each other within {setup.start_seconds:.0f} s" + (f": {message}" if message else "")
            entry = {"scope": "world", "collective": "init", "bytes": 0, "seconds": setup.start_seconds, "ranks": absent}
            hung.append({**entry, "hosts": lacking or setup.hosts_of(guilty), "message": text})
        for name, seen in zip(setup.hosts, self.nodes, strict=True):
            lost = [] if seen else ["left no record: it was lost, or does not see the folder"]
            problems += [{"node": name, "message": text} for text in lost or seen.get("problems", [])]
        return hung, problems

    def _hung(self, step: CaseTimes) -> dict[str, Any]:
        """Who is to blame: a rank that went silent, or one that failed by itself; the others waited for it."""
        silent = [rank for rank in step.ranks if rank not in step.ended]
        failed = {rank: event["message"] for rank, event in step.by("failed").items()}
        broke = [rank for rank, text in failed.items() if not _OTHERS.search(text)]
        return {
            **step.about,
            "seconds": max((event["seconds"] for event in step.by("hung").values()), default=0.0),
            "ranks": [rank for rank in step.ranks if rank not in step.by("done")],
            "hosts": self.setup.hosts_of(broke or silent),
            "message": next((failed[rank] for rank in [*broke, *failed]), "") or self._last_words(silent),
        }

    def _last_words(self, ranks: Sequence[int]) -> str:
        """The last error that a rank wrote, or how it was ended; of ranks that never ran what should have started them."""
        for rank in ranks:
            lines = _text(self.folder / OUTPUT.format(rank=rank), 1 << 16).splitlines()
            if errors := [line.strip() for line in lines if _ERROR.search(line) and not _WARNING.match(line)]:
                return f"rank {rank}: {errors[-1][:300]}"
            if (code := self._code(rank)) is not None and code < 0:
                return f"rank {rank} was ended by signal {-code}"
        lines = [] if self.started else _text(self.folder / LAUNCHED, 1 << 16).strip().splitlines()
        return next((line for line in lines if _ERROR.search(line)), next(iter(lines), "")).strip()[:300]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that training has, as the first node that tells had them."""
        return next((dict(seen["environment"]) for seen in self.nodes if seen.get("environment")), {})

    def logs(self) -> list[str]:
        """NCCL's log of each rank that has one."""
        texts = [_text(self.folder / LOGS.format(rank=rank), LARGEST_LOG) for rank in range(self.setup.world_size)]
        return [text for text in texts if text]


def _text(path: Path, most: int) -> str:
    """A file, of one that is longer its beginning and its end; empty where there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(most)
            if file.seek(0, 2) > most:
                file.seek(-(most // 2), 2)
                data = data[: most // 2].rpartition(b"\n")[0] + b"\n" + file.read(most // 2).partition(b"\n")[2]
            return data.decode(errors="replace")
    except OSError:
        return ""


# --- pairs of GPUs ----------------------------------------------------------------------------------------------------

# The first step between two GPUs: an all-reduce of each pair in processes of their own, with a time limit.
#
# On cards without NVLink a PCIe switch or an IOMMU that redirects peer-to-peer traffic lets the very first collective hang
# for ever (NVIDIA/nccl#1999 and many others): two processes find that out in seconds, where all ranks would wait for a
# watchdog.

PAIR_SECONDS = 60.0
"""What a pair may take, the start of Python included."""
ELEMENTS = 1 << 20


def probe_pairs(
    gpus: int, backend: str, environ: Mapping[str, str], limit: float, *, pairwise: bool, seconds: float = PAIR_SECONDS
) -> list[dict[str, Any]]:
    """``gpus``, ``status``, ``seconds`` and ``message`` of each pair of a node; none begins later than ``limit`` s from now.

    ``pairwise``: every pair; else the first one. ``seconds``: what one may take.
    """
    deadline, results, why = time.monotonic() + limit, [], ""
    for turn in tournament(gpus) if pairwise else [[(0, 1)]]:
        why = why or ("no time was left" if time.monotonic() >= deadline else "")
        if why:
            results += [{"gpus": list(pair), "status": "skipped", "seconds": 0.0, "message": why} for pair in turn]
            continue
        most = min(seconds, max(10.0, deadline - time.monotonic()))
        with tempfile.TemporaryDirectory(prefix="clustertune-probe-") as folder, contextlib.ExitStack() as children:
            began, running = time.monotonic(), []
            for pair in turn:
                store = Path(folder) / f"pair-{pair[0]}-{pair[1]}"
                works = [partial(try_pair, store, gpu, rank, backend, environ) for rank, gpu in enumerate(pair)]
                running.append((pair, [children.enter_context(bounded.Pending(work, most)) for work in works]))
            for pair, both in running:
                status, message = _outcome(both, most)
                taken = round(time.monotonic() - began, 2)
                results.append({"gpus": list(pair), "status": status, "seconds": taken, "message": message})
        if any(entry["status"] == "hung" for entry in results):
            why = "a pair hung before"
    return results


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


def _outcome(children: Sequence[bounded.Pending], limit: float) -> tuple[str, str]:
    """Status and message of a pair; where one of the two has failed, the other is not waited for."""
    while True:
        answers = [child.answer() for child in children if child.is_ready()]
        for answer in answers:
            fault = (answer.found or {}).get("fault", f"was ended by signal {answer.signal}")
            if fault and not answer.silent:
                return "failed", fault
        if len(answers) == len(children):
            hung = any(answer.silent for answer in answers)
            return ("hung", f"an all-reduce of two did not end within {limit:.0f} s") if hung else ("ok", "")
        time.sleep(0.05)


def try_pair(store: Path, gpu: int, rank: int, backend: str, environ: Mapping[str, str]) -> dict[str, str]:
    """One of the two processes: ``fault`` says what is wrong, nothing where the sum is right."""
    os.environ.update(environ)
    try:
        import torch  # not in the process that forks: a library whose threads are lost may hang, which is what is looked for
        import torch.distributed as dist

        device = torch.device("cuda", gpu) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        limit = datetime.timedelta(seconds=600)  # the parent's is shorter
        dist.init_process_group(backend, store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=limit)
        value = torch.full((ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(value)
        return {"fault": "" if bool((value == 3).all()) else "the sum is wrong"}
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}


if __name__ == "__main__":
    sys.exit(main())
