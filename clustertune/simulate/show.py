"""The tables of ``plan --simulate`` that a person reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from clustertune.console import make_table
from clustertune.host.system import GIB
from clustertune.plan.constants import quantity
from clustertune.plan.predict import Plan
from clustertune.simulate import simulator
from clustertune.simulate.simulator import Simulation

BAR = 30
"""Characters of the largest moment."""
LARGEST = 6


def render(plan: Plan, simulation: Simulation, console: Console) -> None:
    """Print the timeline, the collectives, the waits, and each term of the plan beside what was counted."""
    one = simulation.first
    rank = next(iter(simulation.ranks))
    layers, world = simulation.resolved.architecture["num_hidden_layers"], plan.strategy.world_size
    console.print(
        _timeline(plan, one, f"simulated: rank {rank} of {world}, {layers} layers, on fake tensors of {one['device']}")
    )
    console.print(_parts(one))
    console.print(_terms(plan, simulation))
    console.print(_traffic(one))
    console.print(_waits(one))
    for line in lines(plan, simulation):
        console.print(Text(f"- {line}"), soft_wrap=True)


def _timeline(plan: Plan, one: dict[str, Any], title: str) -> Any:
    table = make_table("moment", "", "GiB", "largest there", title=title, text_columns=2)
    most = max(peak["bytes"] for peak in one["moments"].values())
    for name, peak in one["moments"].items():
        bar = "#" * round(BAR * peak["bytes"] / most) if most else ""
        largest = ", ".join(f"{part} {size / GIB:.2f}" for part, size in _by_size(peak["parts"])[:2])
        table.add_row(Text(name), Text(bar), f"{peak['bytes'] / GIB:.2f}", Text(largest))
    del plan
    return table


def _by_size(parts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(parts.items(), key=lambda item: -item[1])


def _parts(one: dict[str, Any]) -> Any:
    name, peak = max(one["moments"].items(), key=lambda item: item[1]["bytes"])
    table = make_table("storages", "count", "GiB", title=f"the largest at the peak: {name}")
    for what, count, size in peak["largest"][:LARGEST]:
        table.add_row(Text(what), f"{count:,}", f"{size / GIB:.2f}")
    return table


def _terms(plan: Plan, simulation: Simulation) -> Any:
    table = make_table("term", "", "plan", "simulated", "plan against it", title="the plan beside it", text_columns=2)
    for one in simulator.terms(plan, simulation):
        unit, scale = ("GiB", GIB) if one.unit == "B" else ("TFLOP", 1e12)
        planned = "-" if one.planned is None else f"{one.planned / scale:,.2f}"
        difference = "" if one.difference is None else f"{round(one.difference, 3) + 0.0:+.1%}"
        table.add_row(Text(one.term), Text(unit), planned, f"{one.counted / scale:,.2f}", difference)
    return table


def _phases(one: dict[str, Any]) -> Iterator[str]:
    """What was seen of a save, an evaluation and a resume."""
    saved, resumed = one["save"], one.get("resume")
    kind = "pinned" if saved["pinned_bytes"] else "pageable"
    threads = "; ".join(
        f"{name} on {', '.join(f'cuda:{device}' for device in devices)}" for name, devices in saved["devices"].items()
    )
    waits = dict.fromkeys(f"{wait['stream']} of {wait['thread']} waits for {wait['for']}" for wait in saved["waits"])
    size = (saved["pinned_bytes"] + saved["pageable_bytes"]) / GIB
    yield "; ".join([f"a save copies {size:.2f} GiB to {kind} host memory, and writes {saved['bytes'] / 1e9:,.2f} GB", *waits])
    if threads:
        yield f"threads and their devices: {threads}"
    if resumed is not None:
        most = max(peak["bytes"] for peak in resumed["moments"].values())
        yield (
            f"resumed on nodes of {resumed['gpus_per_node']} GPUs: reads {resumed['checkpoint_bytes'] / 1e9:,.2f} GB of the "
            f"checkpoint and {resumed['read_bytes'] / 1e9:,.2f} GB of weights; {most / GIB:.2f} GiB at most, "
            f"{resumed['rest_bytes'] / GIB:.2f} before the next step"
        )


def _traffic(one: dict[str, Any]) -> Any:
    table = make_table("collective", "ranks", "apart", "calls", "GiB", title="collectives of a step")
    for row in one["traffic"].get(simulator.LAST_STEP, []):
        cells = (f"{row['ranks']:,}", f"{row['stride']:,}", f"{row['calls']:,}", f"{row['bytes'] / GIB:,.3f}")
        table.add_row(Text(row["kind"]), *cells)
    return table


def _waits(one: dict[str, Any]) -> Any:
    table = make_table("line", "waits a step", title="where the host waits for the device")
    sums: Counter[str] = Counter()
    for wait in one["waits"]:
        sums[wait["where"]] += wait["count"]
    for where, count in sorted(sums.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(Text(where), f"{count:,}")
    return table


def lines(plan: Plan, simulation: Simulation) -> list[str]:
    """What stands below the tables, a sentence each."""
    one = simulation.first
    least = simulator.least_time(plan, simulation)
    seconds = plan.step.seconds
    against = "which is more" if seconds >= least.seconds else "which is LESS: the plan is too fast"
    sentences = [
        f"{one['operators']:,} operators a step, of which a GPU launches about {one['launches']:,}; "
        f"{one['launches'] / max(1, one['micro_batches']):,.0f} a micro batch",
        f"a step takes at the very least {quantity(least.seconds, 's')} (computing {quantity(least.device, 's')}, links "
        f"{quantity(least.link, 's')}, both at their nominal best); the plan says {quantity(seconds, 's')}, {against}",
        f"this rank reads {one['read_bytes'] / 1e9:,.2f} GB of weights; layers recomputed: {one['recomputed']}",
        f"simulated in {one['seconds']:,.0f} s with {one['host_bytes'] / GIB:.1f} GiB of this machine's memory",
        "not in it: NCCL's buffers, workspaces of cuBLAS, fragmentation, and time (docs/simulate.md)",
    ]
    sentences += _phases(one)
    if len(simulation.ranks) > 1:
        ranks = ", ".join(map(str, simulation.ranks))
        differ = simulator.mismatches(simulation)
        sentences.append(f"ranks {ranks}: {'their collectives DIFFER' if differ else 'the same collectives in the same order'}")
        sentences += map(str, differ)
    sentences += map(str, simulator.faults(simulation))
    sentences += one["notes"]
    return [*sentences, simulation.note] if simulation.note else sentences
