"""Plots as inline SVG whose colours are CSS variables of the page, so that one drawing serves light and dark."""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from clustertune.console import escape
from clustertune.report.content import is_number, number

INK, FAINT, FIRST, SECOND = "#010203", "#010204", "#010205", "#010206"
WARN, STRONG, GOOD = "#010207", "#010208", "#010209"
"""Stand-ins that matplotlib writes and :func:`_to_svg` turns into variables."""
_VARIABLES = {
    INK: "--muted", FAINT: "--line", FIRST: "--first", SECOND: "--second", WARN: "--warn", STRONG: "--ink", GOOD: "--good",
}  # fmt: skip

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # real text: small, searchable, in the page's own font
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.formatter.useoffset": False,
    "grid.color": FAINT, "grid.linewidth": 0.7, "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "xtick.labelsize": 9, "ytick.labelsize": 9, "ytick.major.size": 0, "axes.labelsize": 9,
    "legend.fontsize": 9, "legend.frameon": False, "legend.labelcolor": INK, "text.color": INK, "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round", "path.simplify": True,
}  # fmt: skip


WIDTH = 4.8
"""Inches of every plot: its text is readable on a telephone, where the page is about 340 pixels wide."""
_POINTS = 4_000
"""Of a line: more than the pixels of any screen that shows it."""
ROWS = 24
"""Of the table of a line: those between are in metrics.jsonl."""


@dataclass(frozen=True)
class Plot:
    """A drawing and its numbers, which the page shows as a table below it."""

    title: str
    svg: str
    columns: list[str]
    """Heads of the table; one that begins with ``#`` is of numbers."""
    rows: list[list[str]]


@dataclass(frozen=True)
class Line:
    """One series over steps; values that are None or not finite are gaps."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]
    colour: str = FIRST
    marked: bool = False
    """Draw a dot at each value: few values, or a series that is measured now and then."""


def lines(
    title: str, series: Sequence[Line], *, unit: str = "", over: str = "step", zero: bool = False,
    restarts: Sequence[float] = (), band: tuple[float, float] | None = None,
) -> Plot | None:  # fmt: skip
    """A plot over optimizer steps or another scale (``over``); None where no series has a finite value.

    ``zero`` starts the scale at 0; ``restarts`` are places at which an attempt took over, drawn as dotted verticals;
    ``band``: what was planned, drawn behind the lines.
    """
    import numpy as np

    series = [line for line in series if len(line.values) and not np.isnan(_array(line.values)).all()]
    if not series:
        return None
    with _figure(2.5) as (figure, axes):
        if band is not None:
            axes.axhspan(*band, color=SECOND, alpha=0.15, linewidth=0, label="planned")
        for line in series:
            steps, values = _thinned(line)
            dots = line.marked or np.isfinite(values).sum() <= 12
            axes.plot(steps, values, color=line.colour, label=line.label, marker="o" if dots else None, markersize=3.5)
        for step in restarts:
            axes.axvline(step, color=WARN, linestyle=(0, (1, 3)), linewidth=1.2)
        axes.set_xlabel(over, loc="right", labelpad=1)
        axes.set_title(unit, loc="left", fontsize=9, pad=7)
        axes.xaxis.get_major_locator().set_params(integer=over == "step", min_n_ticks=1)
        axes.margins(x=0.02, y=0.12)
        if zero:
            axes.set_ylim(bottom=0)
        if len(series) > 1 or band is not None:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(series) + 1, borderaxespad=0, handlelength=1.2)
        svg = _to_svg(figure, title)
    heads = [f"#{line.label}{f', {unit}' if unit and unit not in line.label else ''}" for line in series]
    return Plot(title, svg, [f"#{over}", *heads], _numbers(series))


def _numbers(series: Sequence[Line]) -> list[list[str]]:
    """At most :data:`ROWS` places of each line, from its first to its last, and the value of each line there."""
    places: set[float] = set()
    for line in series:
        last = len(line.steps) - 1
        places |= {line.steps[round(last * at / (ROWS - 1))] for at in range(ROWS)} if last >= ROWS else set(line.steps)
    rows = []
    for x_value in sorted(places):
        values = []
        for line in series:
            at = bisect_left(line.steps, x_value)
            values.append(line.values[at] if at < len(line.steps) and line.steps[at] == x_value else None)
        rows.append([number(x_value, 2), *map(number, values)])
    return rows


def _array(values: Sequence[float | None]) -> Any:
    """Values as numpy's float64, shape (len,); NaN for what is None or not finite."""
    import numpy as np

    array = np.asarray(values, dtype=float)
    return np.where(np.isfinite(array), array, np.nan)


def _thinned(line: Line) -> tuple[Any, Any]:
    """Steps and values for matplotlib, gaps as NaN; of more than :data:`_POINTS` the least and the greatest of each stretch."""
    import numpy as np

    steps, values = np.asarray(line.steps), _array(line.values)
    if len(values) <= _POINTS:
        return steps, values
    width = -(-2 * len(values) // _POINTS)
    parts = np.pad(values, (0, -len(values) % width), constant_values=np.nan).reshape(-1, width)
    ends = [np.argmin(np.nan_to_num(parts, nan=np.inf), axis=1), np.argmax(np.nan_to_num(parts, nan=-np.inf), axis=1)]
    places = np.unique(np.concatenate([np.arange(len(parts)) * width + end for end in ends]))
    return steps[places], values[places]


def bars(
    title: str,
    labels: Sequence[str],
    groups: Mapping[str, Sequence[float | None]],
    *,
    form: Callable[[float | None], str] = number,
    errors: Mapping[str, Sequence[float | None]] | None = None,
    marks: Sequence[float | None] = (),
    limit: float | None = None,
    head: str = "",
) -> Plot | None:
    """Horizontal bars below their labels, first on top, those of a label's groups side by side, each with its value.

    ``form`` formats a value, of the scale too; ``errors`` are whiskers of one standard
    error, by group; ``marks`` ticks across a label's bars; ``limit``: where the scale ends. None where no value is finite.
    """
    from matplotlib.ticker import MaxNLocator

    known = [value for values in groups.values() for value in values if value is not None and is_number(value)]
    if not known:
        return None
    styles, each = (FIRST, SECOND, GOOD, WARN, INK), 0.16
    longest = limit or max([*known, *(mark for mark in marks if mark is not None), 1e-9])
    drawn = [[row for row, values in enumerate(groups.values()) if is_number(values[at])] for at in range(len(labels))]
    height = each * sum(len(rows) + 1.6 for rows in drawn)
    with _figure(height + (0.57 if len(groups) > 1 else 0.32)) as (figure, axes):
        top = 0.0
        for position, label in enumerate(labels):
            axes.text(0, top + each * 0.55, label, va="center", fontsize=9)
            top += each * 1.6
            for row in drawn[position]:
                name, values = list(groups.items())[row]
                end = float(values[position] or 0.0)
                axes.barh(top, end, height=each * 0.86, color=styles[row % len(styles)], alpha=0.75, label=name)
                of_group = (errors or {}).get(name) or ()
                if of_group and (error := of_group[position]) is not None and is_number(error):
                    axes.errorbar(end, top, xerr=error, color=STRONG, capsize=2.5, linewidth=1.2)
                    end += error
                mark = marks[position] if marks else None
                if mark is not None and is_number(mark):
                    axes.plot([mark, mark], [top - each * 0.5, top + each * 0.5], color=STRONG, linewidth=1.6)
                    end = mark if end < mark < end + longest * 0.15 else end
                axes.text(end + longest * 0.015, top, form(values[position]), va="center", fontsize=8.5)
                top += each
        axes.set_ylim(height, -each * 0.2)
        axes.set_xlim(0, longest * 1.18)
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(lambda value, _: form(value) if value <= longest * 1.0001 else "")
        axes.tick_params(axis="x", labelsize=8, length=0)
        axes.set_yticks([])
        if len(groups) > 1:
            handles, names = axes.get_legend_handles_labels()
            shown = dict(zip(names, handles, strict=True))
            columns = 3 if max(map(len, shown)) < 12 else 1
            place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0, "handlelength": 1.2}
            axes.legend(shown.values(), shown, ncols=columns, **place)
        svg = _to_svg(figure, title)
    rows = [[label, *(form(values[at]) for values in groups.values())] for at, label in enumerate(labels)]
    heads = [head, *(f"#{name}" for name in groups)]
    if marks:
        rows, heads = [[*row, form(mark)] for row, mark in zip(rows, marks, strict=True)], [*heads, "#mark"]
    return Plot(title, svg, heads, rows)


@contextmanager
def _figure(height: float) -> Iterator[tuple[Any, Any]]:
    """A figure of its own, so many inches high, outside pyplot: no global state, no display."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.add_subplot()


def _to_svg(figure: Any, name: str) -> str:
    """The ``<svg>`` element alone, the same bytes for the same data, its ids unique in the page."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = escape(buffer.getvalue())
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # matplotlib's rule for all elements would reach every element of the page.
    text = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>\s*", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font-family: [^;\"]*;", "", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', "", text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
