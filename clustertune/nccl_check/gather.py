"""From the files of a check's rounds to its document: what every rank wrote, put together. Reads only; nothing raises for a
file that is torn, missing or half written, because that is how a check looks after a fault."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.events import read_events
from clustertune.nccl_check.result import bus_factor
from clustertune.nccl_check.setup import FACTS, LAUNCHED, LOGS, NODE, OUTPUT, RECORDS, Setup

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
    begun: set[int] = field(default_factory=set)
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
class Round:
    """What is in the folder of one round."""

    folder: Path
    setup: Setup
    steps: list[CaseTimes] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    """Ranks whose program ran."""
    up: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Ranks that found the others."""
    met: set[int] = field(default_factory=set)
    """Ranks that reached the first one."""
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
    def spent(self) -> float:
        """Seconds of measuring, by rank 0."""
        events = list(read_events(self.folder / RECORDS.format(rank=0)))
        begun = next((event["at"] for event in events if event.get("event") == "up"), None)
        return max(0.0, float(events[-1]["at"]) - float(begun)) if begun is not None else 0.0

    @property
    def connected(self) -> dict[str, float]:
        """Seconds that making the communicators of a scope took, of the slowest rank; pairs are made turn by turn."""
        found: dict[str, float] = {}
        for rank in range(self.setup.world_size):
            for event in read_events(self.folder / RECORDS.format(rank=rank)):
                if event.get("event") == "connected" and event["scope"] != "pair":
                    found[event["scope"]] = max(found.get(event["scope"], 0.0), float(event["seconds"]))
        return found

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
            hosts = list(dict.fromkeys(setup.host_of(rank) for rank in absent))
            return f"no rank began on {', '.join(hosts[:3])}" + (f" and {len(hosts) - 3} nodes more" if len(hosts) > 3 else "")
        if not self.early:
            return f"{setup.most_seconds:.0f} s were over before the ranks had found each other"
        if setup.start_seconds < LEAST_START_SECONDS:
            return f"{setup.start_seconds:.0f} s are too short for the ranks to find each other"
        return ""


def read_round(folder: Path, setup: Setup) -> Round:
    """A round's files."""
    found = Round(folder, setup)
    steps: dict[tuple[int, tuple[int, ...]], CaseTimes] = {}
    for rank in range(setup.world_size):
        mine: dict[int, CaseTimes] = {}
        for event in read_events(folder / RECORDS.format(rank=rank)):
            kind, number = event.get("event"), event.get("step")
            if kind == "start":
                found.started.add(rank)
            elif kind == "up":
                found.up[rank] = event
            elif kind == "met":
                found.met.add(rank)
            elif kind == "left_out":
                found.left_out.append({key: event.get(key) for key in ("scope", "collective", "bytes", "reason")})
            elif kind == "begin" and isinstance(number, int):
                ranks = [int(other) for other in event["ranks"]]
                step = steps.setdefault((number, tuple(ranks)), CaseTimes(event["case"], ranks, int(event["moved"])))
                step.begun.add(rank)
                mine[number] = step
            elif kind == "done" and number in mine:
                mine[number].done[rank] = event
            elif kind == "hung" and number in mine and rank not in mine[number].done:
                mine[number].hung[rank] = float(event["seconds"])
            elif kind == "failed" and number in mine and rank not in mine[number].done:
                mine[number].failed[rank] = str(event["message"])
            elif kind in ("hung", "failed") and rank not in found.up:
                found.early[rank] = str(event.get("message", ""))
    found.steps = [steps[key] for key in sorted(steps)]
    for node in range(len(setup.hosts)):
        found.nodes.append(_json(folder / NODE.format(node=node)) or {})
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


# --- measurements ------------------------------------------------------------------------------------------------------


def _figures(step: CaseTimes) -> dict[str, Any]:
    """Of the slowest rank: the others wait for it, or have only handed over what they send."""
    case = step.case
    slowest = max(step.done.values(), key=lambda event: event["median_s"])
    seconds = float(slowest["median_s"])
    algbw = step.moved / seconds / 1e9 if seconds > 0 else 0.0
    one_way = case["scope"] == "pair" and case["collective"] == "p2p"
    factor = 1.0 if one_way else bus_factor(case["collective"], len(step.ranks))
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


def measurements(rounds: Sequence[Round]) -> dict[str, list[dict[str, Any]]]:
    """``results``, ``per_node`` and ``per_pair``. What was measured twice counts with the most iterations."""
    per_node: dict[Any, dict[str, Any]] = {}
    per_pair: dict[Any, dict[str, Any]] = {}
    results: dict[Any, dict[str, Any]] = {}

    def keep(table: dict[Any, dict[str, Any]], key: Any, entry: dict[str, Any]) -> None:
        if key not in table or entry["iterations"] >= table[key]["iterations"]:
            table[key] = entry

    for part in rounds:
        host = part.setup.host_of
        for step in part.steps:
            if not step.whole:
                continue
            found, scope = _figures(step), step.case["scope"]
            kind = (found["collective"], found["bytes"])
            if scope == "pair":
                nodes = list(dict.fromkeys(host(rank) for rank in step.ranks))
                nodes = nodes[::-1] if step.case.get("back") else nodes
                keep(per_pair, (*nodes, *kind), {"nodes": nodes, **found})
            elif scope == "intra":
                keep(per_node, (host(step.ranks[0]), *kind), {"node": host(step.ranks[0]), **found})
            else:
                keep(results, (scope, *kind), {"scope": scope, **found})
    for kind in dict.fromkeys((entry["collective"], entry["bytes"]) for entry in per_node.values()):
        same = [entry for entry in per_node.values() if (entry["collective"], entry["bytes"]) == kind]
        slowest = min(same, key=lambda entry: float(entry["busbw_gb_s"]))
        figures = {key: value for key, value in slowest.items() if key != "node"}
        results[("intra", *kind)] = {"scope": "intra", **figures, "correct": all(entry["correct"] for entry in same)}
    return {
        "results": _sorted(results.values()),
        "per_node": _sorted(per_node.values()),
        "per_pair": _sorted(per_pair.values()),
    }


def _sorted(entries: Any) -> list[dict[str, Any]]:
    return sorted(
        entries, key=lambda e: (str(e.get("scope", "")), str(e.get("node", e.get("nodes", ""))), e["collective"], e["bytes"])
    )


# --- faults ------------------------------------------------------------------------------------------------------------


def faults(rounds: Sequence[Round]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``hung`` and ``problems``."""
    hung: list[dict[str, Any]] = []
    problems: list[dict[str, Any]] = []
    for part in rounds:
        host = part.setup.host_of
        hung += [_hung(part, step) for step in part.broken if not part.cut_off(step)]
        absent = [rank for rank in range(part.setup.world_size) if rank not in part.up]
        lacking = [host(node * part.setup.ranks_per_node) for node, seen in enumerate(part.nodes) if seen.get("problems")]
        if absent:
            guilty = [r for r in absent if r not in part.early] or [r for r in absent if r not in part.met] or absent
            message = next((text for text in part.early.values() if text and not _of_others(text)), "") or _as_text(
                part, guilty
            )
            hosts = list(dict.fromkeys(host(rank) for rank in guilty))
            waited = part.setup.start_seconds
            text = f"the ranks did not find each other within {waited:.0f} s" + (f": {message}" if message else "")
            entry = {"scope": "world", "collective": "init", "bytes": 0, "seconds": waited, "ranks": absent}
            hung.append({**entry, "hosts": lacking or hosts, "message": text})
        for node, seen in enumerate(part.nodes):
            name = part.setup.hosts[node]
            if not seen:
                problems.append({"node": name, "message": "left no record: it was lost, or does not see the folder"})
            problems += [{"node": name, "message": str(text)} for text in seen.get("problems", [])]
    unique = {json.dumps(entry, sort_keys=True): entry for entry in problems}
    return hung, list(unique.values())


def _hung(part: Round, step: CaseTimes) -> dict[str, Any]:
    """Who is to blame: a rank that went silent, or one that failed by itself; the others waited for it."""
    silent = [r for r in step.ranks if r not in step.done and r not in step.hung and r not in step.failed]
    broke = [rank for rank, text in step.failed.items() if not _of_others(text)]
    text = next((step.failed[rank] for rank in broke), next(iter(step.failed.values()), ""))
    if not text and silent:
        text = _as_text(part, silent)
    guilty = broke or silent
    return {
        **step.about,
        "seconds": max(step.hung.values(), default=0.0),
        "ranks": [rank for rank in step.ranks if rank not in step.done],
        "hosts": list(dict.fromkeys(part.setup.host_of(rank) for rank in guilty)),
        "message": text,
    }


def _of_others(text: str) -> bool:
    return any(phrase in text.lower() for phrase in _OTHERS)


def _as_text(part: Round, ranks: Sequence[int]) -> str:
    """The last line of what a rank wrote, or how it was ended."""
    for rank in ranks:
        node, local = divmod(rank, part.setup.ranks_per_node)
        codes = part.nodes[node].get("codes", []) if node < len(part.nodes) else []
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


def left_out(rounds: Sequence[Round], found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What no round measured, for want of time or memory."""
    there = defaultdict(list)
    for entry in [*found["results"], *({"scope": "pair", **pair} for pair in found["per_pair"])]:
        there[(entry["scope"], entry["collective"])].append(entry["bytes"])
    unique: dict[Any, dict[str, Any]] = {}
    reason = {"reason": "cut off in the middle"}
    cut = [{**step.about, **reason} for part in rounds for step in part.broken if part.cut_off(step)]
    for entry in [*(rounds[-1].left_out if rounds else []), *cut]:
        near = any(0 <= entry["bytes"] - size < 4096 for size in there[(entry["scope"], entry["collective"])])
        if not near:  # whole elements of all ranks are a little less than what was asked for
            unique[(entry["scope"], entry["collective"], entry["bytes"])] = entry
    return list(unique.values())


# --- what else is there ------------------------------------------------------------------------------------------------


def facts(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Those of each host, in the order of hosts; a host without any is left out."""
    found: list[dict[str, Any]] = []
    for part in rounds:
        for node in range(len(part.setup.hosts)):
            document = _json(part.folder / FACTS.format(node=node))
            if isinstance(document, dict) and part.setup.facts:
                # A scheduler's name of a node may be another one than its own: it is the one that all else here has.
                found.append({**document, "hostname": part.setup.hosts[node]})
    return found


def software(part: Round) -> list[dict[str, Any]]:
    """Versions of each node, one entry for ranks that have the same."""
    found: dict[str, dict[str, Any]] = {}
    for rank, event in part.up.items():
        node = rank // part.setup.ranks_per_node
        versions = {key: event.get(key) for key in ("torch", "nccl", "cuda")}
        entry = {"node": part.setup.hosts[node], **versions, "python": part.nodes[node].get("python")}
        found.setdefault(json.dumps(entry), {**entry, "ranks": []})["ranks"].append(rank)
    return list(found.values())


def steering(part: Round) -> dict[str, str]:
    """The variables that training has, as the first node that tells had them."""
    return next((dict(seen["environment"]) for seen in part.nodes if seen.get("environment")), {})


def logs(part: Round) -> dict[str, str]:
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


def progress(folder: Path) -> tuple[int, str]:
    """How many measurements a round has made, and what it measures now, by the file of rank 0."""
    done, now = 0, "the ranks find each other"
    for event in read_events(folder / RECORDS.format(rank=0)):
        if event.get("event") == "done":
            done += 1
        elif event.get("event") == "begin":
            case = event["case"]
            now = f"{case['collective']} ({case['scope']})"
    return done, now
