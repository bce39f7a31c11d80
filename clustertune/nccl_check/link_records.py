"""The document of an ``nccl-check``: one JSON file for the planner, the report and the judge.

Every key but ``schema`` may be absent; the
schema that a saved file must have is :class:`clustertune.plan.measured.CheckFile`. Of two nodes with two ranks each::

    {
      "schema": "clustertune.nccl-check/1", "cluster": "my-cluster", "date": "2026-11-02",
      "nodes": 2, "gpus_per_node": 2,           // ranks per node where the backend is gloo
      "backend": "nccl",                        // "gloo": sockets between CPUs
      "backend_why": "2 GPUs on each node",     // why this backend: also "one GPU has no peer: gloo, 2 CPU ranks"
      "transport": "NET/IB",                    // between nodes (inside one where there is one): "gloo TCP on eth0"
      "interface": "bond0",                     // that ranks of several nodes were to use; absent: none was given
      "hosts": ["n1", "n2"],                    // in the order of ranks: rank r runs on hosts[r // gpus_per_node]
      "seconds": 118.2,                         // the whole check
      "connect_s": {"world": 2.1, "intra": 0.4},    // making the communicators before anything is measured; the slowest rank
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
      "software": [{"node": "n1", "torch": "2.13.0", "nccl": "2.28.9", "cuda": "13.0", "python": "3.12.3", "ranks": [0, 1]}],
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
Results that were there before are kept.

NCCL's log was captured with ``NCCL_DEBUG=INFO``: that variable in a log is the check's own, the one in ``environment`` is not.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.events import read_events, read_object
from clustertune.nccl_check.link_rules import COLLECTIVES
from clustertune.nccl_check.link_schedule import FACTS, LAUNCHED, LOGS, NODE, OUTPUT, RECORDS, Setup

SCHEMA = "clustertune.nccl-check/1"
"""The name and version of the document."""


def bus_factor(collective: str, ranks: int) -> float:
    """What makes ``busbw`` of ``algbw``: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

    It is what each rank's link carries in one direction, by the size that nccl-tests prints.
    """
    assert collective in COLLECTIVES
    assert ranks >= 1
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter"):
        return (ranks - 1) / ranks
    return 1.0


# From the files of a check to its document: what every rank wrote, put together. Reads only; nothing raises for a file that is
# torn, missing or half written, because that is how a check looks after a fault.


LEAST_START_SECONDS = 10.0
"""Ranks that waited for less long may not have begun at the same time: Python comes from network storage."""
LARGEST_LOG = 4 << 20
"""Bytes of one rank's log that are judged: half where NCCL says how it goes, half at the end, where it says why it failed."""
_ERROR = re.compile(r"error|exception|fatal|abort|cannot|failed", re.IGNORECASE)
_WARNING = re.compile(r"\[[WI]\d|\s|frame #|Exception raised from|.*Warning")
"""Of torch's C++ part, and of Python's warnings, whose second line is indented."""
_OTHERS = (
    "connection closed by peer",
    "connection reset by peer",
    "socket timeout",
    "timed out waiting",
    "broken pipe",
    "failed to recv",
)
"""What a rank says whose peer has gone: it is not the one at fault."""


@dataclass
class CaseTimes:
    """One case, as one group of ranks saw it."""

    case: Mapping[str, Any]
    ranks: list[int]
    moved: int
    done: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    hung: dict[int, float] = field(default_factory=dict)
    """Seconds after which a rank gave up."""
    failed: dict[int, str] = field(default_factory=dict)
    """What a rank reported."""

    @property
    def whole(self) -> bool:
        return len(self.done) == len(self.ranks)

    @property
    def about(self) -> dict[str, Any]:
        """What was measured, as the document names it."""
        return {"scope": self.case["scope"], "collective": self.case["collective"], "bytes": self.moved}


@dataclass
class CheckRecords:
    """What is in the folder of a check."""

    folder: Path
    setup: Setup
    steps: list[CaseTimes] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    """Ranks whose program ran."""
    up: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Ranks that found the others, with their software."""
    met: set[int] = field(default_factory=set)
    """Ranks that reached the first one."""
    connected: dict[str, float] = field(default_factory=dict)
    """Seconds that making the communicators of a scope took, of the slowest rank; pairs are made turn by turn."""
    early: dict[int, str] = field(default_factory=dict)
    """Ranks that failed or waited in vain before that, with their messages."""
    left_out: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def broken(self) -> list[CaseTimes]:
        """What was begun and not ended by all."""
        return [step for step in self.steps if not step.whole]

    def cut_off(self, step: CaseTimes) -> bool:
        """Whether a step was ended from outside for want of time: no rank gave it up, and none died by itself."""
        each = self.setup.ranks_per_node
        codes = [self.nodes[rank // each].get("codes") or [] for rank in step.ranks]
        died = any(len(known) > rank % each and known[rank % each] for rank, known in zip(step.ranks, codes, strict=True))
        return not (step.hung or step.failed or died)

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
            hosts = setup.hosts_of(absent)
            return f"no rank began on {', '.join(hosts[:3])}" + (f" and {len(hosts) - 3} nodes more" if len(hosts) > 3 else "")
        if not self.early:
            return f"{setup.most_seconds:.0f} s were over before the ranks had found each other"
        if setup.start_seconds < LEAST_START_SECONDS:
            return f"{setup.start_seconds:.0f} s are too short for the ranks to find each other"
        return ""


def read_records(folder: Path, setup: Setup) -> CheckRecords:
    """The files of a check."""
    found = CheckRecords(folder, setup)
    steps: dict[tuple[int, tuple[int, ...]], CaseTimes] = {}
    for rank in range(setup.world_size):
        mine: dict[int, CaseTimes] = {}
        for event in read_events(folder / RECORDS.format(rank=rank)):
            kind, number = event.get("event"), event.get("step")
            step = mine.get(number) if isinstance(number, int) else None
            if kind == "start":
                found.started.add(rank)
            elif kind == "up":
                found.up[rank] = event
            elif kind == "met":
                found.met.add(rank)
            elif kind == "connected" and event["scope"] != "pair":
                found.connected[event["scope"]] = max(found.connected.get(event["scope"], 0.0), float(event["seconds"]))
            elif kind == "left_out":
                found.left_out.append({key: event.get(key) for key in ("scope", "collective", "bytes", "reason")})
            elif kind == "begin" and isinstance(number, int):
                ranks = [int(other) for other in event["ranks"]]
                key = (number, tuple(ranks))
                mine[number] = steps.setdefault(key, CaseTimes(event["case"], ranks, int(event["moved"])))
            elif kind == "done" and step:
                step.done[rank] = event
            elif kind == "hung" and step and rank not in step.done:
                step.hung[rank] = float(event["seconds"])
            elif kind == "failed" and step and rank not in step.done:
                step.failed[rank] = str(event["message"])
            elif kind in ("hung", "failed") and rank not in found.up:
                found.early[rank] = str(event.get("message", ""))
    found.steps = [steps[key] for key in sorted(steps)]
    found.nodes = [read_object(folder / NODE.format(node=node)) for node in range(len(setup.hosts))]
    return found


def _figures(step: CaseTimes) -> dict[str, Any]:
    """Of the slowest rank: the others wait for it, or have only handed over what they send."""
    case = step.case
    slowest = max(step.done.values(), key=lambda event: event["median_s"])
    seconds = float(slowest["median_s"])
    algbw = step.moved / seconds / 1e9 if seconds > 0 else 0.0
    factor = bus_factor(case["collective"], len(step.ranks))  # 1 of p2p, one way or in a ring
    return {
        "collective": case["collective"],
        "bytes": step.moved,
        "algbw_gb_s": _rounded(algbw),
        "busbw_gb_s": _rounded(algbw * factor),
        "ranks": len(step.ranks),
        "iterations": min(int(event.get("iterations", case["iterations"])) for event in step.done.values()),
        "median_s": _rounded(seconds),
        "spread": _rounded(float(slowest["spread"])),
        "correct": all(bool(event["correct"]) for event in step.done.values()),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def measurements(part: CheckRecords) -> dict[str, list[dict[str, Any]]]:
    """``results``, ``per_node`` and ``per_pair``. What was measured twice counts with the most iterations."""
    per_node: dict[Any, dict[str, Any]] = {}
    per_pair: dict[Any, dict[str, Any]] = {}
    results: dict[Any, dict[str, Any]] = {}

    def keep(table: dict[Any, dict[str, Any]], key: Any, entry: dict[str, Any]) -> None:
        if key not in table or entry["iterations"] >= table[key]["iterations"]:
            table[key] = entry

    for step in part.steps:
        if not step.whole:
            continue
        found, scope = _figures(step), step.case["scope"]
        kind = (found["collective"], found["bytes"])
        nodes = part.setup.hosts_of(step.ranks)
        if scope == "pair":
            nodes = nodes[::-1] if step.case.get("back") else nodes
            keep(per_pair, (*nodes, *kind), {"nodes": nodes, **found})
        elif scope == "intra":
            keep(per_node, (nodes[0], *kind), {"node": nodes[0], **found})
        else:
            keep(results, (scope, *kind), {"scope": scope, **found})
    same: dict[Any, list[dict[str, Any]]] = {}
    for (_, *kind), entry in per_node.items():
        same.setdefault(("intra", *kind), []).append(entry)
    for key, entries in same.items():
        slowest = min(entries, key=lambda entry: float(entry["busbw_gb_s"]))
        figures = {name: value for name, value in slowest.items() if name != "node"}
        results[key] = {"scope": "intra", **figures, "correct": all(entry["correct"] for entry in entries)}
    tables = {"results": results, "per_node": per_node, "per_pair": per_pair}
    return {name: [table[key] for key in sorted(table)] for name, table in tables.items()}


# --- faults ------------------------------------------------------------------------------------------------------------


def faults(part: CheckRecords) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``hung`` and ``problems``."""
    hung = [_hung(part, step) for step in part.broken if not part.cut_off(step)]
    problems = []
    if absent := [rank for rank in range(part.setup.world_size) if rank not in part.up]:
        guilty = [r for r in absent if r not in part.early] or [r for r in absent if r not in part.met] or absent
        own = (text for text in part.early.values() if text and not _of_others(text))
        message = next(own, "") or _as_text(part, guilty)
        lacking = [part.setup.hosts[node] for node, seen in enumerate(part.nodes) if seen.get("problems")]
        waited = part.setup.start_seconds
        text = f"the ranks did not find each other within {waited:.0f} s" + (f": {message}" if message else "")
        entry = {"scope": "world", "collective": "init", "bytes": 0, "seconds": waited, "ranks": absent}
        hung.append({**entry, "hosts": lacking or part.setup.hosts_of(guilty), "message": text})
    for node, seen in enumerate(part.nodes):
        name = part.setup.hosts[node]
        if not seen:
            problems.append({"node": name, "message": "left no record: it was lost, or does not see the folder"})
        problems += [{"node": name, "message": str(text)} for text in seen.get("problems", [])]
    return hung, list({tuple(entry.values()): entry for entry in problems}.values())


def _hung(part: CheckRecords, step: CaseTimes) -> dict[str, Any]:
    """Who is to blame: a rank that went silent, or one that failed by itself; the others waited for it."""
    silent = [r for r in step.ranks if r not in step.done and r not in step.hung and r not in step.failed]
    broke = [rank for rank, text in step.failed.items() if not _of_others(text)]
    text = next((step.failed[rank] for rank in broke), next(iter(step.failed.values()), ""))
    return {
        **step.about,
        "seconds": max(step.hung.values(), default=0.0),
        "ranks": [rank for rank in step.ranks if rank not in step.done],
        "hosts": part.setup.hosts_of(broke or silent),
        "message": text or _as_text(part, silent),
    }


def _of_others(text: str) -> bool:
    return any(phrase in text.lower() for phrase in _OTHERS)


def _as_text(part: CheckRecords, ranks: Sequence[int]) -> str:
    """The last line of what a rank wrote, or how it was ended."""
    for rank in ranks:
        node, local = divmod(rank, part.setup.ranks_per_node)
        codes = part.nodes[node].get("codes", [])
        code = codes[local] if local < len(codes) else None
        lines = _text(part.folder / OUTPUT.format(rank=rank), 1 << 16).splitlines()
        if errors := [line.strip() for line in lines if _ERROR.search(line) and not _WARNING.match(line)]:
            return f"rank {rank}: {errors[-1][:300]}"
        if isinstance(code, int) and code < 0:
            return f"rank {rank} was ended by signal {-code}"
    if not part.started:  # what should have started the ranks may say why it did not
        lines = [line.strip() for line in _text(part.folder / LAUNCHED, 1 << 16).splitlines()]
        if errors := [line for line in lines if _ERROR.search(line)] or [line for line in lines if line]:
            return errors[0][:300]
    return ""


def left_out(part: CheckRecords, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What was not measured, for want of time or memory."""
    there = defaultdict(list)
    for entry in [*found["results"], *({"scope": "pair", **pair} for pair in found["per_pair"])]:
        there[(entry["scope"], entry["collective"])].append(entry["bytes"])
    unique: dict[Any, dict[str, Any]] = {}
    reason = {"reason": "cut off in the middle"}
    cut = [{**step.about, **reason} for step in part.broken if part.cut_off(step)]
    for entry in [*part.left_out, *cut]:
        near = any(0 <= entry["bytes"] - size < 4096 for size in there[(entry["scope"], entry["collective"])])
        if not near:  # whole elements of all ranks are a little less than what was asked for
            unique[(entry["scope"], entry["collective"], entry["bytes"])] = entry
    return list(unique.values())


# --- what else is there ------------------------------------------------------------------------------------------------


def facts(part: CheckRecords) -> list[dict[str, Any]]:
    """Those of each host, in the order of hosts; a host without any is left out."""
    found: list[dict[str, Any]] = []
    for node in range(len(part.setup.hosts)):
        document = read_object(part.folder / FACTS.format(node=node))
        if document and part.setup.facts:
            # A scheduler's name of a node may be another one than its own: it is the one that all else here has.
            found.append({**document, "hostname": part.setup.hosts[node]})
    return found


def software(part: CheckRecords) -> list[dict[str, Any]]:
    """Versions of each node, one entry for ranks that have the same."""
    found: dict[str, dict[str, Any]] = {}
    for rank, event in part.up.items():
        node = rank // part.setup.ranks_per_node
        versions = {key: event.get(key) for key in ("torch", "nccl", "cuda")}
        entry = {"node": part.setup.hosts[node], **versions, "python": part.nodes[node].get("python")}
        found.setdefault(json.dumps(entry), {**entry, "ranks": []})["ranks"].append(rank)
    return list(found.values())


def steering(part: CheckRecords) -> dict[str, str]:
    """The variables that training has, as the first node that tells had them."""
    return next((dict(seen["environment"]) for seen in part.nodes if seen.get("environment")), {})


def logs(part: CheckRecords) -> dict[str, str]:
    """NCCL's log of each rank, by file name; one that is not there is left out."""
    found = {}
    for rank in range(part.setup.world_size):
        path = part.folder / LOGS.format(rank=rank)
        if text := _text(path, LARGEST_LOG, ends=True):
            found[path.name] = text
    return found


def _text(path: Path, most: int, *, ends: bool = False) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(most)
            if ends and file.seek(0, 2) > most:
                file.seek(-(most // 2), 2)
                data = data[: most // 2].rpartition(b"\n")[0] + b"\n" + file.read(most // 2).partition(b"\n")[2]
            return data.decode(errors="replace")
    except OSError:
        return ""
