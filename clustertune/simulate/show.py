"""What a person reads of ``plan --simulate``: tables, and the memory of the step as a picture.

The picture has the course of the step, and each moment's parts with the plan's terms below them.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from clustertune.console import make_table
from clustertune.host.system import GIB
from clustertune.plan.constants import quantity
from clustertune.plan.predict import Plan
from clustertune.simulate import compare
from clustertune.simulate.compare import phases
from clustertune.simulate.simulator import Simulation

BAR = 30
"""Characters of the largest moment."""
LARGEST = 6


def render(plan: Plan, simulation: Simulation, console: Console) -> None:
    """Print the timeline, the collectives, the waits, and each term of the plan beside what was counted."""
    one = simulation.first
    rank = next(iter(simulation.ranks))
    layers, whole = simulation.resolved.architecture["num_hidden_layers"], plan.strategy.world_size
    console.print(
        _timeline(plan, one, f"simulated: rank {rank} of {whole}, {layers} layers, on fake tensors of {one['device']}")
    )
    console.print(_parts(one))
    console.print(_terms(plan, simulation))
    console.print(_traffic(one))
    console.print(_waits(one))
    for line in lines(plan, simulation):
        console.print(Text(f"- {line}"), soft_wrap=True)


def _timeline(plan: Plan, one: dict[str, Any], title: str) -> Any:
    found = make_table("moment", "", "GiB", "largest there", title=title, text_columns=2)
    most = max(peak["bytes"] for peak in one["moments"].values())
    for name, peak in one["moments"].items():
        bar = "#" * round(BAR * peak["bytes"] / most) if most else ""
        largest = ", ".join(f"{part} {size / GIB:.2f}" for part, size in _by_size(peak["parts"])[:2])
        found.add_row(Text(name), Text(bar), f"{peak['bytes'] / GIB:.2f}", Text(largest))
    del plan
    return found


def _by_size(parts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(parts.items(), key=lambda item: -item[1])


def _parts(one: dict[str, Any]) -> Any:
    name, peak = max(one["moments"].items(), key=lambda item: item[1]["bytes"])
    found = make_table("storages", "count", "GiB", title=f"the largest at the peak: {name}")
    for what, count, size in peak["largest"][:LARGEST]:
        found.add_row(Text(what), f"{count:,}", f"{size / GIB:.2f}")
    return found


def _terms(plan: Plan, simulation: Simulation) -> Any:
    found = make_table("term", "plan, GiB", "simulated, GiB", "plan against it", title="the plan beside it")
    for one in compare.terms(plan, simulation):
        planned = "-" if one.planned is None else f"{one.planned / GIB:,.2f}"
        difference = "" if one.difference is None else f"{round(one.difference, 3) + 0.0:+.1%}"
        found.add_row(Text(one.term), planned, f"{one.counted / GIB:,.2f}", difference)
    return found


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
    found = make_table("collective", "ranks", "apart", "calls", "GiB", title="collectives of a step")
    for row in one["traffic"].get(compare.LAST_STEP, []):
        cells = (f"{row['ranks']:,}", f"{row['stride']:,}", f"{row['calls']:,}", f"{row['bytes'] / GIB:,.3f}")
        found.add_row(Text(row["kind"]), *cells)
    return found


def _waits(one: dict[str, Any]) -> Any:
    found = make_table("line", "waits a step", title="where the host waits for the device")
    sums: Counter[str] = Counter()
    for wait in one["waits"]:
        sums[wait["where"]] += wait["count"]
    for where, count in sorted(sums.items(), key=lambda item: (-item[1], item[0])):
        found.add_row(Text(where), f"{count:,}")
    return found


def lines(plan: Plan, simulation: Simulation) -> list[str]:
    """What stands below the tables, a sentence each."""
    one = simulation.first
    least = compare.least_time(plan, simulation)
    seconds = plan.step.seconds
    against = "which is more" if seconds >= least.seconds else "which is LESS: the plan is too fast"
    found = [
        f"{one['operators']:,} operators a step, of which a GPU launches about {one['launches']:,}; "
        f"{one['launches'] / max(1, one['micro_batches']):,.0f} a micro batch",
        f"a step takes at the very least {quantity(least.seconds, 's')} (computing {quantity(least.device, 's')}, links "
        f"{quantity(least.link, 's')}, both at their nominal best); the plan says {quantity(seconds, 's')}, {against}",
        f"this rank reads {one['read_bytes'] / 1e9:,.2f} GB of weights; layers recomputed: {one['recomputed']}",
        f"simulated in {one['seconds']:,.0f} s with {one['host_bytes'] / GIB:.1f} GiB of this machine's memory",
        "not in it: NCCL's buffers, workspaces of cuBLAS, fragmentation, and time (docs/simulate.md)",
    ]
    found += _phases(one)
    if len(simulation.ranks) > 1:
        ranks = ", ".join(map(str, simulation.ranks))
        differ = compare.mismatches(simulation)
        found.append(f"ranks {ranks}: {'their collectives DIFFER' if differ else 'the same collectives in the same order'}")
        found += map(str, differ)
    found += map(str, compare.faults(simulation))
    found += one["notes"]
    return [*found, simulation.note] if simulation.note else found


# --- the picture -------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, CURVE, ROW, HEIGHT = 1040, 250, 120, 220, 46, 15
COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
    "#e45756",
    "#72b7b2",
    "#9d755d",
    "#eeca3b",
    "#bab0ac",
    "#ff9da6",
    "#2d6a6a",
    "#7a5195",
    "#c0a060",
    "#708090",
    "#a05050",
    "#5f9e6e",
)
MARK = 'data-made-by="clustertune plan --simulate"'
"""What this command wrote before, it may write over."""
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.faint{fill:#888}.curve{fill:#9ecae9;stroke:#4c78a8}"
    ".limit{stroke:#e45756;stroke-dasharray:5 4}.plan{stroke:#54a24b;stroke-dasharray:5 4}.mark{stroke:#ccc}"
    "rect.ground{fill:#fff}"
)


def svg(plan: Plan, simulation: Simulation) -> str:
    """One picture, without scripts and fonts from elsewhere. Each part names itself and its size where the pointer rests."""
    one = simulation.first
    limit = plan.machine.usable_bytes
    planned = {moment.name: {term.name: 0.0 for term in moment.parts} for moment in plan.moments}
    for moment in plan.moments:
        for term in moment.parts:
            planned[moment.name][term.name] += term.value
    most = 1.05 * max(plan.peak.bytes, *(peak["bytes"] for peak in one["moments"].values()))
    most = max(most, 1.02 * limit) if limit < 2 * most else most  # few layers would be a line at the bottom
    names = dict.fromkeys(
        part for rows in (*(peak["parts"] for peak in one["moments"].values()), *planned.values()) for part in rows
    )
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    layers = simulation.resolved.architecture["num_hidden_layers"]
    rank = next(iter(simulation.ranks))
    title = f"{simulation.resolved.name}: memory of rank {rank} in a step, {layers} layers, simulated"
    rows = phases(one)
    height = 50 + CURVE + 60 + ROW * len(rows) + 20
    body = [
        f'<text x="14" y="24" style="font-weight:600">{html.escape(title)}</text>',
        *_course(one, most, limit, plan.peak.bytes),
        *(line for at, name in enumerate(rows) for line in _moment(
            name, one["moments"][name]["parts"], planned.get(name), 50 + CURVE + 60 + ROW * at, most, colours)),
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {MARK} viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{html.escape(title)}</title>"
        f'<style>{_STYLE}</style><rect class="ground" width="{WIDTH}" height="{height}"/>{"".join(body)}</svg>\n'
    )


def _course(one: Mapping[str, Any], most: float, limit: float, planned: float) -> Iterator[str]:
    """Bytes over the step, allocation by allocation; where its moments begin; the plan's peak and the GPU's memory."""
    top, bottom, right = 50, 50 + CURVE, WIDTH - RIGHT
    values = one["curve"]["bytes"]
    across = (right - LEFT) / max(1, len(values))

    def level(size: float) -> float:
        return bottom - CURVE * size / most

    points = [f"{LEFT + at * across:.1f},{level(size):.1f}" for at, size in enumerate(values)]
    yield f'<polygon class="curve" points="{LEFT},{bottom} {" ".join(points)} {right:.1f},{bottom}"/>'
    for at, name in _first_of_each(one["curve"]["marks"][1:]):
        x = LEFT + at * across / one["curve"]["every"]
        yield f'<line class="mark" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>'
        turned = f'transform="rotate(12 {x + 3:.1f} {bottom + 14})"'
        yield f'<text class="faint" x="{x + 3:.1f}" y="{bottom + 14}" {turned}>{html.escape(name)}</text>'
    for size, kind, text in ((limit, "limit", "GPU"), (planned, "plan", "plan's peak")):
        y = level(size)
        if y < top - 10:
            continue
        yield f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text x="{right + 4}" y="{y + 4:.1f}">{text} {size / GIB:.1f}</text>'
    yield f'<text class="faint" x="14" y="{top + 12}">GiB over a step</text>'


def _first_of_each(marks: Iterable[list[Any]]) -> list[tuple[int, str]]:
    found: dict[str, int] = {}
    for at, name in marks:
        found.setdefault(name, at)
    return [(at, name) for name, at in found.items()]


def _moment(
    name: str,
    parts: Mapping[str, float],
    planned: Mapping[str, float] | None,
    y: float,
    most: float,
    colours: Mapping[str, str],
) -> Iterator[str]:
    """Two bars: what was counted, and the plan's terms."""
    yield f'<text x="14" y="{y + 14}">{html.escape(name)}</text>'
    for at, (what, bar) in enumerate((("simulated", parts), ("plan", planned))):
        top = y + at * (HEIGHT + 2)
        if bar is None:
            continue
        x = float(LEFT)
        for part, size in sorted(bar.items(), key=lambda item: -item[1]):
            width = (WIDTH - RIGHT - LEFT) * size / most
            label = html.escape(f"{what}: {part} {size / GIB:.2f} GiB")
            place = f'x="{x:.1f}" y="{top}" width="{width:.2f}" height="{HEIGHT}"'
            yield f'<rect {place} fill="{colours[part]}"><title>{label}</title></rect>'
            if width > 7 * len(part):
                yield f'<text x="{x + 3:.1f}" y="{top + 12}" style="fill:#fff;font-size:11px">{html.escape(part)}</text>'
            x += width
        yield f'<text x="{x + 4:.1f}" y="{top + 12}" class="faint">{what} {sum(bar.values()) / GIB:.2f}</text>'
