"""Rules of what was measured: against what the links should carry, and of nodes and pairs against each other.

Bandwidths are bus bandwidths in GB/s of 10^9 bytes. Against the hardware an all-gather counts, which the planner takes too: the
median of its largest sizes. What to expect comes with the document (``clustertune.nccl_check.check.expected``).
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from clustertune.check.links import COLLECTIVES, ENOUGH, LinkContext, number
from clustertune.check.rule import FAIL, LINKS, PASS, UNKNOWN, WARN, Seen, rule

LARGEST = 3
"""The median of so many largest sizes, as the planner's."""
LEAST_S = 1e-3
"""A shorter collective tells the latency, not the bandwidth."""
HALF = 0.5
"""The same, below which a rule fails: a fall-back to another way costs half and more."""
UNEVEN = 0.8
"""Share of the typical node, or of the other direction, below which a node or direction is slow."""
JITTER = 0.5
"""(95th - 5th percentile) / median of a large collective above which its time is not steady."""
CPU_SHARE = 0.5
"""gloo copies through the CPU: between nodes it is no faster than inside one, and is held to half of that."""
GLOO_SHARE = 0.65
"""Of what the line should carry: gloo has one connection for each pair of ranks, in which what one rank is ready to take waits
behind what it sends; its all-gather of two nodes reached 0.63 to 0.66 of lines that were shaped to known rates."""
CPU_GB_S = 0.25
"""What gloo is held to at most where that was not measured: one core copies and sums more."""


def speed(items: Iterable[Mapping[str, Any]], collective: str = "all_gather") -> tuple[float, float, float]:
    """Bandwidth of the largest sizes of one collective, the time of one of them and its spread; zeros where there is none."""
    sizes: dict[float, Mapping[str, Any]] = {}
    for item in items:
        if item.get("collective") == collective and number(item.get("bytes")) > 0:
            sizes[number(item.get("bytes"))] = item
    largest = [sizes[size] for size in sorted(sizes)[-LARGEST:]]
    if not largest:
        return 0.0, 0.0, 0.0
    # A budget may end in the middle of the sizes: small ones must not drag the median down.
    top = number(largest[-1].get("bytes"))
    largest = [item for item in largest if number(item.get("bytes")) * 16 >= top]
    gb_s = statistics.median(number(item.get("busbw_gb_s")) for item in largest)
    last = largest[-1]
    seconds = number(last.get("median_s")) or (top / gb_s / 1e9 if gb_s else 0.0)
    return gb_s, seconds, number(last.get("spread"))


def _scope(context: LinkContext, name: str) -> list[dict[str, Any]]:
    return [item for item in context.entries("results") if item.get("scope") == name]


def _expected(context: LinkContext, name: str) -> tuple[float, float, str]:
    """What a link should carry, its nominal speed, and a hint."""
    section = context.section("expected", name)
    hint = section.get("hint")
    return number(section.get("expected_gb_s")), number(section.get("nominal_gb_s")), hint if isinstance(hint, str) else ""


def _judged(where: str, gb_s: float, seconds: float, expected: float, nominal: float, hint: str) -> Iterator[Seen]:
    """What a figure means against what is expected."""
    if expected <= 0:
        yield Seen(UNKNOWN, f"{gb_s:.3g} GB/s {where}; what the link should carry is not known (no cluster file)")
        return
    share = gb_s / expected
    text = f"{gb_s:.3g} GB/s {where}"
    if nominal > 0:
        text += f", {100 * gb_s / nominal:.2g} % of nominal ({nominal:.3g} GB/s)"
    text += f", {100 * share:.0f} % of what is expected"
    if share < ENOUGH and seconds < LEAST_S:
        yield Seen(UNKNOWN, f"{text}; sizes were too small to judge")
    elif share < ENOUGH:
        yield Seen(FAIL if share < HALF else WARN, text, hint)
    else:
        yield Seen(PASS, text)


@rule("intra-speed", LINKS, rank=9)
def intra_speed(context: LinkContext) -> Iterator[Seen]:
    """Bandwidth inside a node.

    Why: FSDP gathers every layer over it, twice in each step.
    Fix: look at the other findings first (P2P, NVLink, PCIe, ACS); then at `nvidia-smi topo -m` and NUMA binding, and try
      NCCL_MIN_NCHANNELS=8
    See: https://github.com/NVIDIA/nccl-tests/issues/270
    """
    if context.backend != "nccl":
        return
    gb_s, seconds, _ = speed(_scope(context, "intra"))
    if not gb_s and context.nodes == 1:
        gb_s, seconds, _ = speed(_scope(context, "world"))
    if gb_s:
        expected, nominal, hint = _expected(context, "intra")
        fix = f"look at the other findings first (P2P, PCIe, ACS); then: {hint}" if hint else ""
        yield from _judged("inside a node", gb_s, seconds, expected, nominal, fix)


@rule("inter-speed", LINKS, rank=9)
def inter_speed(context: LinkContext) -> Iterator[Seen]:
    """Bandwidth between nodes.

    Why: It bounds how fast any job on several nodes can be.
    Fix: look at the other findings first (transport, interface, adapters, GPUDirect, one slow node); then measure the line
      alone (`ib_write_bw`, `iperf3 -P 8`), and try `clustertune nccl-check --tune`
    See: https://github.com/NVIDIA/nccl-tests/issues/182
    """
    compute, network = context.section("expected", "compute"), context.section("expected", "network")
    if context.nodes < 2 or context.nodes * context.ranks <= number(compute.get("nvlink_domain")):
        return
    gb_s, seconds, _ = speed(_scope(context, "world"))
    if not gb_s and number(network.get("ports")) <= 1:
        # One rank of each node drives one adapter: that says nothing of several.
        gb_s, seconds, _ = speed(_scope(context, "inter"))
    if not gb_s:
        return
    expected, nominal, hint = _expected(context, "inter")
    if context.backend == "gloo" and expected:
        local = max((number(item.get("busbw_gb_s")) for item in _scope(context, "intra")), default=0.0)
        most = CPU_SHARE * local if local else CPU_GB_S
        line, carries = _slowest_way(context), min(expected, most)
        expected = min(GLOO_SHARE * expected, most)
        if line / carries > gb_s / expected:  # the lines are good: what is slow is gloo, or the CPUs
            yield from _judged("one way between the slowest pair of nodes", line, LEAST_S, carries, nominal, hint)
            return
    yield from _judged("between nodes", gb_s, seconds, expected, nominal, hint)


class Pair(NamedTuple):
    """What one node sends to another."""

    gb_s: float
    at_best: float
    """The same of its quickest repetitions: a machine that is busy is not taken for a slow cable."""


def _pairs(context: LinkContext, collectives: Container[str] = COLLECTIVES) -> dict[tuple[str, str], Pair]:
    """Bandwidth from one node to another; a collective of both counts for both directions."""
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for item in context.entries("per_pair"):
        nodes, collective = item.get("nodes"), item.get("collective")
        if isinstance(nodes, list) and len(nodes) == 2 and isinstance(collective, str) and collective in collectives:
            grouped.setdefault((str(nodes[0]), str(nodes[1]), collective), []).append(item)
    found: dict[tuple[str, str], Pair] = {}
    for (first, second, collective), items in grouped.items():
        gb_s, seconds, spread = speed(items, collective)
        if not gb_s or seconds < LEAST_S:
            continue
        pair = Pair(gb_s, gb_s * (1 + max(0.0, spread)))
        if collective == "p2p":
            found[first, second] = pair
        else:
            found.setdefault((first, second), pair)
            found.setdefault((second, first), pair)
    return found


def _slowest_way(context: LinkContext) -> float:
    """What every pair of nodes carries at least, one way at a time, GB/s; 0 where not every way was measured."""
    ways = _pairs(context, ("p2p",)).values()
    return min(pair.at_best for pair in ways) if len(ways) == context.nodes * (context.nodes - 1) else 0.0


class SlowNode(NamedTuple):
    """A node that is slow with every other one."""

    gb_s: float
    typical: float
    does: str
    """``sends`` or ``receives``."""


def _slow_nodes(pairs: Mapping[tuple[str, str], Pair]) -> dict[str, SlowNode]:
    """Nodes that are slow with every other one, by name.

    A node's best pair is that with the fastest other node, so that one slow node does not make the others look slow.
    """
    slow: dict[str, SlowNode] = {}
    nodes = sorted({node for pair in pairs for node in pair})
    if len(nodes) < 3:
        return slow
    for side, verb in ((0, "sends"), (1, "receives")):
        best = {node: max((p for pair, p in pairs.items() if pair[side] == node), default=None) for node in nodes}
        typical = statistics.median(pair.gb_s for pair in best.values() if pair) if any(best.values()) else 0.0
        for node, pair in best.items():
            if pair and pair.at_best < UNEVEN * typical and (node not in slow or pair.gb_s < slow[node].gb_s):
                slow[node] = SlowNode(pair.gb_s, typical, verb)
    return slow


@rule("slow-node", LINKS, rank=8)
def slow_node(context: LinkContext) -> Iterator[Seen]:
    """All nodes are alike.

    Why: A collective runs at the speed of the slowest node: one bad cable slows the whole job.
    Fix: leave the node out (--exclude) and look at its port's speed and errors (`ethtool`, `ibstat`, `perfquery`), its cable,
      its PCIe width, and whether another job uses it
    See: https://github.com/NVIDIA/nccl-tests/issues/106
    """
    pairs = _pairs(context)
    slow = _slow_nodes(pairs)
    for node, (gb_s, typical, verb) in sorted(slow.items()):
        ordered = sorted(pairs.items(), key=lambda item: item[1])
        worst = ", ".join(f"{a} to {b} {pair.gb_s:.3g}" for (a, b), pair in ordered if node in (a, b))
        status = FAIL if gb_s < HALF * typical else WARN
        found = f"{node} {verb} {gb_s:.3g} GB/s at best, the others {typical:.3g} ({worst[:160]})"
        yield Seen(status, found, where=node)
    inside = _per_node(context)
    for node, (gb_s, typical) in sorted(inside.items()):
        if gb_s < UNEVEN * typical:
            status = FAIL if gb_s < HALF * typical else WARN
            yield Seen(status, f"{gb_s:.3g} GB/s inside {node}, {typical:.3g} inside the others", where=node)
            slow[node] = SlowNode(gb_s, typical, "")
    if not slow and (len({node for pair in pairs for node in pair}) > 2 or len(inside) > 1):
        yield Seen(PASS, "no node is slower than the others")


def _per_node(context: LinkContext) -> dict[str, tuple[float, float]]:
    """Bandwidth inside each node and that of a typical one; empty for one node, and for gloo, which measures the CPU's load."""
    if context.backend != "nccl":
        return {}
    nodes = {str(item["node"]) for item in context.entries("per_node") if item.get("node")}
    found = {}
    for node in nodes:
        gb_s, seconds, _ = speed(item for item in context.entries("per_node") if item.get("node") == node)
        if gb_s and seconds >= LEAST_S:
            found[node] = gb_s
    if len(found) < 2:
        return {}
    typical = max(found.values()) if len(found) == 2 else statistics.median(found.values())
    return {node: (gb_s, typical) for node, gb_s in found.items()}


@rule("asymmetric", LINKS, rank=8)
def asymmetric(context: LinkContext) -> Iterator[Seen]:
    """Both directions of a pair are alike.

    Why: A cable or port that is bad in one direction passes every test of the other.
    Fix: look at the sending side's port and cable, and at traffic shaping there (`tc qdisc show`)
    See: https://github.com/NVIDIA/nccl-tests/issues/106
    """
    pairs = _pairs(context)
    slow = _slow_nodes(pairs)
    looked = False
    for (first, second), pair in sorted(pairs.items()):
        back = pairs.get((second, first))
        if not back or first in slow or second in slow:
            continue
        looked = True
        if pair.at_best < UNEVEN * back.gb_s:
            status = FAIL if pair.gb_s < HALF * back.gb_s else WARN
            found = f"{first} sends {pair.gb_s:.3g} GB/s to {second}, and receives {back.gb_s:.3g}"
            yield Seen(status, found, where=first)
            return
    if looked:
        yield Seen(PASS, "pairs are as fast in both directions")


@rule("slow-pair", LINKS, rank=8)
def slow_pair(context: LinkContext) -> Iterator[Seen]:
    """No pair of good nodes is slow.

    Why: Two nodes that are fast with others and slow with each other share a bad link between switches.
    Fix: look at the switches between them (links between leaf and spine, adaptive routing), and keep jobs on one side until
      then
    See: https://github.com/NVIDIA/nccl-tests/issues/106
    """
    pairs = _pairs(context)
    nodes = {node for pair in pairs for node in pair}
    slow = _slow_nodes(pairs)
    if len(nodes) < 4:
        return
    typical = statistics.median(pair.gb_s for pair in pairs.values())
    bad = []
    for names, pair in pairs.items():
        back = pairs.get(names[::-1], pair)
        if max(pair.at_best, back.at_best) < UNEVEN * typical and not slow.keys() & set(names):
            bad.append((pair.gb_s, names))
    for gb_s, (first, second) in sorted(bad)[:1]:
        count = len({frozenset(pair) for _, pair in bad})
        more = f" (and {count - 1} pairs more)" if count > 1 else ""
        found = f"{first} and {second} reach {gb_s:.3g} GB/s, pairs typically {typical:.3g}{more}"
        yield Seen(WARN, found, where=f"{first}, {second}")
    if not bad:
        yield Seen(PASS, "no pair is slower than the others")


@rule("jitter", LINKS, rank=9)
def jitter(context: LinkContext) -> Iterator[Seen]:
    """Steady times.

    Why: A collective that takes twice as long now and then holds up all ranks each time.
    Fix: look for other jobs on the nodes or the network, for clocks that are throttled, and for retransmissions (`nstat`, port
      counters)
    See: https://github.com/NVIDIA/nccl-tests/issues/106
    """
    if context.backend != "nccl":
        return
    found = False
    for scope in ("world", "intra"):
        gb_s, seconds, spread = speed(_scope(context, scope))
        if not gb_s or seconds < LEAST_S:
            continue
        found = True
        if spread > JITTER:
            yield Seen(WARN, f"the time of the largest all_gather ({scope}) spreads by {100 * spread:.0f} % of its median")
            return
    if found:
        yield Seen(PASS, "times are steady")


@rule("not-measured", LINKS, rank=9)
def not_measured(context: LinkContext) -> Iterator[Seen]:
    """What the check had no time for.

    Why: A result that is not there cannot be judged.
    Fix: give the check more time
    See: https://github.com/NVIDIA/nccl-tests
    """
    left = context.entries("left_out")
    if left:
        reason = str(left[0].get("reason", ""))[:120]
        yield Seen(UNKNOWN, f"{len(left)} measurements were left out: {reason}")
    for item in context.entries("problems"):
        yield Seen(UNKNOWN, str(item.get("message", ""))[:200], where=str(item.get("node", "")))
