"""The memory of a simulated step as a picture: its course, and each moment's parts with the plan's terms below them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clustertune.host.system import GIB
from clustertune.plan.predict import Plan
from clustertune.simulate.compare import phases
from clustertune.simulate.simulator import Simulation

WIDTH, LEFT, RIGHT, CURVE, ROW, BAR = 1040, 250, 120, 220, 46, 15
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
        top = y + at * (BAR + 2)
        if bar is None:
            continue
        x = float(LEFT)
        for part, size in sorted(bar.items(), key=lambda item: -item[1]):
            width = (WIDTH - RIGHT - LEFT) * size / most
            label = html.escape(f"{what}: {part} {size / GIB:.2f} GiB")
            place = f'x="{x:.1f}" y="{top}" width="{width:.2f}" height="{BAR}"'
            yield f'<rect {place} fill="{colours[part]}"><title>{label}</title></rect>'
            if width > 7 * len(part):
                yield f'<text x="{x + 3:.1f}" y="{top + 12}" style="fill:#fff;font-size:11px">{html.escape(part)}</text>'
            x += width
        yield f'<text x="{x + 4:.1f}" y="{top + 12}" class="faint">{what} {sum(bar.values()) / GIB:.2f}</text>'
