"""The document of an ``nccl-check``: one JSON file for the planner, the report and the judge.

Standard library only, Python 3.8 or later: the judge reads it on bare login nodes. Every key but ``schema`` may be absent; the
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
      "tune": {...},                            // clustertune.nccl_check.tune, where it was asked for
      "expected": {"intra": {...}, "inter": {...}},      // clustertune.nccl_check.check.expected
      "verdict": {"status": "warn", "headline": "...", "findings": [clustertune.check.rule.as_json]}
    }

``scope``: ``intra`` is a collective of the ranks of each node, all nodes at once, and the figure is that of the slowest node
(``per_node`` has each); ``inter`` is one of the first ranks of all nodes; ``world`` is one of all ranks. ``collective``:
``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, and ``p2p``: every rank sends to the next one and gets from
the one before. In ``per_pair`` ``p2p`` goes one way, from every rank of the first node to its counterpart on the second: the
bandwidth is that of all of them together; the other way has an entry with the nodes in turn. Other collectives of a pair are of
all ranks of both nodes. Pairs that share no node are measured side by side.

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

import re

from clustertune.check import links

SCHEMA = "clustertune.nccl-check/1"
"""The name and version of the document."""
COLLECTIVES = links.COLLECTIVES
"""What is measured."""
SCOPES = ("world", "intra", "inter", "pair")
"""``pair`` has its own list in the document, ``per_pair``."""


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
