"""Variables that may make it faster, each tried against the same measurement without it, in turns and in bounded time.

A difference counts only where the two sets of repeats do not overlap: links that others use vary by more than most variables
change. Sources: the NCCL user guide, environment variables
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), ``ProcessGroupGloo.cpp`` of torch 2.13.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustertune.cluster.schema import Cluster
from clustertune.nccl_check import result as gather
from clustertune.nccl_check.check import CheckTarget, make_setup, round_folder, run_round
from clustertune.nccl_check.setup import MARGIN_SECONDS, CheckOptions

SOCKETS = ((2, 4), (4, 4), (4, 8), (8, 4), (8, 8), (1, 1))
"""NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD: NCCL allows 16 threads, and 64 as their product."""
CHANNELS = (8, 16, 32)
"""NCCL_MIN_NCHANNELS; NCCL's most is 64 (32 before 2.19)."""
REPEATS = 3
FINALISTS = 3
"""Candidates that are repeated: the best of the first turn."""
LEAST_GAIN = 1.03
"""A smaller gain is not noticeable in a training."""
LONGEST_S = 0.5
"""Most that one iteration may take: the size is chosen by it."""
COLLECTIVE = "all_gather"
"""What sharded data parallelism waits for most, and what a plan takes."""


@dataclass
class TuneCandidate:
    """Some variables, and what was reached with them."""

    environment: dict[str, str]
    busbw_gb_s: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.busbw_gb_s) if self.busbw_gb_s else 0.0


def candidates(found: Mapping[str, Any], interface: str | None) -> list[dict[str, str]]:
    """What is worth trying after a check: nothing that is so already, or would not change how these bytes go."""
    now = found.get("environment", {})
    return [values for values in _worth(found, interface) if any(now.get(name) != value for name, value in values.items())]


def _worth(found: Mapping[str, Any], interface: str | None) -> list[dict[str, str]]:
    tried: list[dict[str, str]] = []
    several, transport = found["nodes"] > 1, str(found.get("transport", ""))
    if found["backend"] == "gloo":
        # gloo has one thread per connection and no other switch: what is left is where the bytes go.
        return [{"GLOO_SOCKET_IFNAME": name} for name in other_interfaces(found, interface)] if several else []
    if several and "Socket" in transport:
        tried += [{"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)} for threads, sockets in SOCKETS]
        tried += [{"NCCL_SOCKET_IFNAME": f"={name}"} for name in other_interfaces(found, interface)]
    if several and "IB" in transport:
        tried += [{"NCCL_IB_QPS_PER_CONNECTION": count, "NCCL_IB_SPLIT_DATA_ON_QPS": "0"} for count in ("2", "4")]
    tried += [{"NCCL_MIN_NCHANNELS": str(count)} for count in CHANNELS]
    tried.append({"NCCL_BUFFSIZE": str(8 << 20)})
    return tried


def other_interfaces(found: Mapping[str, Any], interface: str | None) -> list[str]:
    """Interfaces that are up with an address on every node, but for the one in use and those without a device behind them."""
    each: list[set[str]] = []
    for facts in found.get("facts", []):
        usable = {
            nic["name"]
            for nic in facts.get("nics") or []
            if nic.get("up") is not False and nic.get("addresses") and nic.get("kind") != "loopback"
        }
        each.append(usable)
    common = set.intersection(*each) if len(each) == found["nodes"] else set()
    used = found.get("environment", {}).get("GLOO_SOCKET_IFNAME") or interface
    # Without a word of one in use all may be tried; a bridge of containers reaches no other node.
    return sorted(name for name in common - {used} if not name.startswith(("docker", "virbr", "br-", "cni", "lo")))


def size_of(found: Mapping[str, Any], scope: str) -> int | None:
    """The largest size that was measured in a time that can be repeated; None where nothing was."""
    sizes = [
        entry["bytes"]
        for entry in found["results"]
        if (entry["scope"], entry["collective"]) == (scope, COLLECTIVE) and entry["median_s"] <= LONGEST_S
    ]
    return max(sizes, default=None)


def tune(
    target: CheckTarget,
    options: CheckOptions,
    found: Mapping[str, Any],
    folder: Path,
    first: int,
    seconds: float,
    report: Callable[[str], None],
    tick: Callable[[Path], None] = lambda _: None,
) -> dict[str, Any]:
    """Try the candidates within ``seconds``, in rounds numbered from ``first``: the part ``tune`` of a document.

    None begins later; what hangs is ended ``MARGIN_SECONDS`` after that. Raises OSError.
    """
    scope = "world" if found["nodes"] > 1 else "intra"
    size = size_of(found, scope)
    wanted = [TuneCandidate(values) for values in candidates(found, target.cluster.network.interface)]
    baseline = TuneCandidate({})
    if size is None or not wanted:
        why = "there is nothing to try" if size else f"no {COLLECTIVE} was measured that could be repeated"
        if found["backend"] == "gloo" and size:
            why = "gloo has no variable for speed but the interface, and there is no other one"
        return _document(scope, size, baseline, wanted, why)
    each = replace(
        options, scopes=(scope,), collectives=(COLLECTIVE,), smallest=size, largest=size, iterations=10, warmup=2, seconds=60.0
    )
    began, number, longest = time.monotonic(), first, 0.0
    for turn in range(REPEATS):
        chosen = [c for c in wanted if not c.failed]
        if turn:
            chosen = sorted(chosen, key=lambda c: -c.median)[:FINALISTS]
        for candidate in [baseline, *chosen]:
            left = seconds - (time.monotonic() - began)
            if left < max(longest * 1.2, 5.0):
                break
            started = time.monotonic()
            bounded = replace(each, seconds=min(left, each.seconds), most_seconds=left + MARGIN_SECONDS)
            _try(target, bounded, candidate, round_folder(folder, number), tick)
            number += 1
            longest = max(longest, time.monotonic() - started)
            report(f"{_as_text(candidate.environment) or 'as it is'}: {_shown(candidate)}")
    return _document(scope, size, baseline, wanted, "")


def _try(
    target: CheckTarget, options: CheckOptions, candidate: TuneCandidate, folder: Path, tick: Callable[[Path], None]
) -> None:
    setup = replace(make_setup(target, options, candidate.environment), facts=False, probe=False, interface=None)
    run_round(target, folder, setup, tick)
    part = gather.read_round(folder, setup)
    entries = [e for e in gather.measurements([part])["results"] if e["collective"] == COLLECTIVE and e["correct"]]
    if entries:
        candidate.busbw_gb_s.append(max(entries, key=lambda entry: int(entry["iterations"]))["busbw_gb_s"])
        return
    hung, problems = gather.faults([part])
    text = next((entry["message"] for entry in [*hung, *problems] if entry["message"]), "nothing was measured")
    candidate.failed = str(text)[:300]


def _document(
    scope: str, size: int | None, baseline: TuneCandidate, wanted: Sequence[TuneCandidate], note: str
) -> dict[str, Any]:
    rows = [{**_row(candidate, baseline), "environment": candidate.environment} for candidate in wanted]
    better = sorted((row for row in rows if row["better"]), key=lambda row: -float(row["ratio"]))
    lines = [f"{name}={value}" for name, value in better[0]["environment"].items()] if better else []
    if not note and not better:
        tried = sum(bool(candidate.busbw_gb_s) for candidate in wanted)
        note = f"none of {tried} that were tried is faster than the repeats differ"
    return {
        "scope": scope,
        "collective": COLLECTIVE,
        "bytes": size or 0,
        "baseline": {"busbw_gb_s": baseline.busbw_gb_s, "median_gb_s": baseline.median},
        "candidates": rows,
        "lines": lines,
        "note": note,
    }


def _row(candidate: TuneCandidate, baseline: TuneCandidate) -> dict[str, Any]:
    """A candidate beside the baseline. It is better where each of its repeats, two at least, beats all of the baseline's."""
    ratio = candidate.median / baseline.median if baseline.median and candidate.busbw_gb_s else None
    enough = min(len(candidate.busbw_gb_s), len(baseline.busbw_gb_s)) > 1
    apart = enough and min(candidate.busbw_gb_s) > max(baseline.busbw_gb_s)
    status = "failed" if candidate.failed else "measured" if candidate.busbw_gb_s else "left out"
    return {
        "busbw_gb_s": candidate.busbw_gb_s,
        "median_gb_s": candidate.median,
        "ratio": None if ratio is None else round(ratio, 3),
        "better": bool(apart and ratio is not None and ratio >= LEAST_GAIN),
        "status": status,
        "message": candidate.failed or ("no time was left" if status == "left out" else ""),
    }


def lines(document: Mapping[str, Any], cluster: Cluster, file: str | None) -> list[str]:
    """What a ``tune`` part says, for people. ``file``: that of the cluster; None: it has none to write anything into."""
    base = document["baseline"]
    shown = [f"tune: {document['collective']} ({document['scope']}) of {document['bytes']} bytes, as it is: {_numbers(base)}"]
    for row in sorted(document["candidates"], key=lambda row: -(row["ratio"] or 0)):
        ratio = f"{row['ratio']:.2f} times" if row["ratio"] else row["status"]
        shown.append(f"  {_as_text(row['environment'])}: {ratio} {_numbers(row) if row['ratio'] else row['message']}".rstrip())
    if document["lines"]:
        shown += ["set for every rank:", *(f"  {line}" for line in document["lines"])]
        if file:
            shown += [f"for training, in {file}:", *(f"  {line}" for line in to_paste(document["lines"], cluster))]
    if document["note"]:
        shown.append(document["note"])
    return shown


def to_paste(settings: Sequence[str], cluster: Cluster) -> list[str]:
    """What makes a cluster file carry settings, with those that it has: YAML, one line an item."""
    given = dict(line.split("=", 1) for line in settings)
    own = cluster.network.environment
    interface = given.get("GLOO_SOCKET_IFNAME") or given.get("NCCL_SOCKET_IFNAME", "").lstrip("=")
    if interface and not own.keys() & given.keys():  # both libraries, and what looks for it on each node, take it from one key
        return ["network:", f"  interface: {interface}  # addresses and subnet of nodes: those of this interface"]
    return ["network:", "  environment:", *(f'    {name}: "{value}"' for name, value in {**own, **given}.items())]


def _numbers(row: Mapping[str, Any]) -> str:
    values = row["busbw_gb_s"]
    if not values:
        return "not measured"
    spread = f", {min(values):.4g} to {max(values):.4g} in {len(values)} repeats" if len(values) > 1 else ", once"
    return f"{row['median_gb_s']:.4g} GB/s{spread}"


def _shown(candidate: TuneCandidate) -> str:
    return f"{candidate.busbw_gb_s[-1]:.4g} GB/s" if candidate.busbw_gb_s else candidate.failed or "nothing"


def _as_text(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())
