"""The document of a check for people: the largest sizes of each collective, the slow ones of the pairs, the verdict."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from clustertune import console
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding, describe
from clustertune.console import escape, make_table, say
from clustertune.nccl_check.link_rules import COLLECTIVES

COLUMNS = ["scope", "collective", "size", "algbw", "busbw", "of nominal", "median", "spread", "result"]
PAIR_COLUMNS = ["from", "to", "size", "GB/s", "of the median pair", "spread"]
SHOWN_SIZES = 3
SHOWN_PAIRS = 5
"""Of the slowest pairs; ``--json`` and result.json have all."""


def show(result: Mapping[str, Any]) -> None:
    """Print what was measured, on what, how fast, and the verdict."""
    for line in head(result):
        say(line)
    for title, columns, rows in (
        (None, COLUMNS, [*result_rows(result)]),
        ("slowest pairs of nodes, one way", PAIR_COLUMNS, [*pair_rows(result)]),
    ):
        table = make_table(*columns, title=title, text_columns=2)
        for row in rows:
            table.add_row(*map(escape, row))
        if rows:
            console.stderr.print(table)
    for line in (*notes(result), *verdict(result.get("verdict") or {})):
        say(line)


def head(result: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, on what."""
    each, nodes = result["gpus_per_node"], result["nodes"]
    unit = "GPUs" if result["backend"] == "nccl" else "CPU ranks"
    on = f"{nodes} nodes with {each} {unit} each" if nodes > 1 else f"{each} {unit} of one node"
    yield f"{result['backend']} over {result['transport']}: {on}, {result['seconds']:g} s ({result.get('backend_why', '')})"
    yield "busbw as nccl-tests defines it, GB/s of 10^9 bytes; the slowest rank's median"


def nominal_of(result: Mapping[str, Any], scope: str) -> float | None:
    """What the links of a scope carry nominally, GB/s; None where it is unknown."""
    level = (result.get("expected") or {}).get("intra" if scope == "intra" else "inter") or {}
    value = level.get("nominal_gb_s")
    return float(value) if isinstance(value, int | float) and value > 0 else None


def result_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """The largest sizes of every collective, worded."""
    kinds = dict.fromkeys((entry["scope"], entry["collective"]) for entry in result["results"])
    for scope, name in sorted(kinds, key=lambda kind: ("world intra inter".find(kind[0]), COLLECTIVES.index(kind[1]))):
        same = [entry for entry in result["results"] if (entry["scope"], entry["collective"]) == (scope, name)]
        nominal = nominal_of(result, scope)
        for entry in sorted(same, key=lambda entry: -int(entry["bytes"]))[:SHOWN_SIZES]:
            share = f"{entry['busbw_gb_s'] / nominal:.0%}" if nominal else ""
            speed = [f"{entry['algbw_gb_s']:.4g}", f"{entry['busbw_gb_s']:.4g}", share]
            took = [f"{entry['median_s'] * 1e3:.4g} ms", f"{entry['spread']:.0%}", "ok" if entry["correct"] else "WRONG"]
            yield [scope, name, show_size(entry["bytes"]), *speed, *took]


def pair_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """The slowest pairs one way, each beside the median of all pairs."""
    sized = sorted(result.get("per_pair", []), key=lambda entry: int(entry["bytes"]))
    ways = {tuple(entry["nodes"]): entry for entry in sized if entry["collective"] == "p2p"}.values()  # the largest of each
    middle = statistics.median([entry["busbw_gb_s"] for entry in ways] or [0.0])
    for entry in sorted(ways, key=lambda entry: float(entry["busbw_gb_s"]))[:SHOWN_PAIRS]:
        share = f"{entry['busbw_gb_s'] / middle:.0%}" if middle else ""
        yield [*entry["nodes"], show_size(entry["bytes"]), f"{entry['busbw_gb_s']:.4g}", share, f"{entry['spread']:.0%}"]


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What did not end, what was left out, what else went wrong."""
    for entry in result.get("hung", []):
        where = f" on {', '.join(entry['hosts'])}" if entry["hosts"] else ""
        size = f" of {show_size(entry['bytes'])}" if entry["bytes"] else ""
        text = f": {entry['message']}" if entry["message"] else ""
        yield f"did not end: {entry['collective']} ({entry['scope']}){size}{where}{text}"
    for entry in result.get("problems", []):
        yield f"{entry['node']}: {entry['message']}"
    for entry in result.get("left_out", []):
        yield f"left out: {entry['collective']} ({entry['scope']}) of {show_size(entry['bytes'])}: {entry['reason']}"


def verdict(document: Mapping[str, Any]) -> Iterator[str]:
    """The findings, worst first; those that passed are counted."""
    findings = [Finding(**item) for item in document.get("findings", [])]
    for item in findings:
        if item.status in (FAIL, WARN):
            yield from describe(item, [item.where] if item.where else [])
    statuses = [item.status for item in findings]
    yield str(document.get("headline", ""))
    yield f"{statuses.count(PASS)} rules passed, {statuses.count(UNKNOWN)} could not be seen here"


# --- sizes ----------------------------------------------------------------------------------------------------------------

# Sizes as people write them: ``1K``, ``64M``, ``1GiB``; a K is 1024, as in nccl-tests.

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15})([kmgt]?)(i?b)?", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"{text[:40]!r} is not a size")
    return int(match[1]) << (10 * _UNITS[match[2]])


def show_size(size: int) -> str:
    """The shortest form, with one decimal where it is not a whole number of a unit."""
    value, unit = float(size), 0
    while value >= 1024 and unit < 3:
        value, unit = value / 1024, unit + 1
    names = ("B", "KiB", "MiB", "GiB")
    return f"{value:.0f} {names[unit]}" if value == int(value) or value >= 100 else f"{value:.1f} {names[unit]}"
