"""Plots as inline SVG whose colours are CSS variables of the page, so that one drawing serves light and dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

INK, FAINT, FIRST, SECOND, WARN, STRONG = "#010203", "#010204", "#010205", "#010206", "#010207", "#010208"
"""Stand-ins that matplotlib writes and :func:`_to_svg` turns into variables."""
_VARIABLES = {INK: "--muted", FAINT: "--line", FIRST: "--first", SECOND: "--second", WARN: "--warn", STRONG: "--ink"}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # real text: small, searchable, in the page's own font
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "ytick.major.size": 0,
    "axes.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
}


@dataclass(frozen=True)
class Line:
    """One series over steps; values that are None or not finite are gaps."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    colour: str = FIRST
    marked: bool = False
    """Draw a dot at each value: few values, or a series that is measured now and then."""


def draw_lines(
    name: str, lines: Sequence[Line], *, unit: str = "", zero: bool = False, restarts: Sequence[int] = (), wide: bool = False,
    band: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """A plot over optimizer steps, or an empty string where no series has a finite value.

    ``zero`` starts the scale at 0; ``restarts`` are steps at which an attempt took over, drawn as dotted verticals.
    ``wide`` is for a plot that has the page's whole width; ``band``: what was planned, drawn behind the lines.
    """
    if not any(_finite(value) for line in lines for value in line.values):
        return ""
    with _figure((11.4, 3.0) if wide else (5.6, 2.5)) as (figure, axes):
        if band is not None:
            axes.axhspan(*band, color=SECOND, alpha=0.15, linewidth=0, label="planned")
        for line in lines:
            steps, values = _thinned(line)
            dots = line.marked or sum(map(math.isfinite, values)) <= 12
            axes.plot(steps, values, color=line.colour, label=line.label, marker="o" if dots else None, markersize=3.5)
        for step in restarts:
            axes.axvline(step, color=WARN, linestyle=(0, (1, 3)), linewidth=1.2)
        axes.set_xlabel("step", loc="right", labelpad=1)
        axes.set_title(unit, loc="left", fontsize=9, pad=7)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.02, y=0.12)
        if zero:
            axes.set_ylim(bottom=0)
        if len(lines) > 1 or band is not None:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(lines) + 1, borderaxespad=0, handlelength=1.2)
        return _to_svg(figure, name)


def _thinned(line: Line) -> tuple[list[int], list[float]]:
    """Steps and values for matplotlib, gaps as NaN; of more than :data:`_POINTS` the least and the greatest of each stretch."""
    width = -(-2 * len(line.values) // _POINTS) if len(line.values) > _POINTS else 1
    steps: list[int] = []
    found: list[float] = []
    for start in range(0, len(line.values), width):
        part_of = line.values[start : start + width]
        values = [value if value is not None and math.isfinite(value) else math.nan for value in part_of]
        part = [at for at in range(len(values)) if not math.isnan(values[at])]
        for at in sorted({min(part, key=values.__getitem__), max(part, key=values.__getitem__)}) if part else [0]:
            steps.append(line.steps[start + at])
            found.append(values[at])
    return steps, found


_POINTS = 4_000
"""Of a line: more than the pixels of any screen that shows it."""


def draw_bars(
    name: str,
    labels: Sequence[str],
    values: Sequence[float],
    notes: Sequence[str],
    *,
    errors: Sequence[float | None] | None = None,
    marks: Sequence[float | None] | None = None,
    limit: float | None = None,
) -> str:
    """Horizontal bars, first on top, with a note behind each; whiskers of one standard error; a tick at each mark."""
    if not values:
        return ""
    with _figure((7.4, 0.42 + 0.3 * len(values))) as (figure, axes):
        places = list(range(len(values)))
        axes.barh(places, values, height=0.58, color=FIRST, alpha=0.75)
        for place, error in enumerate(errors or ()):
            if error is not None and _finite(error):
                axes.errorbar(values[place], place, xerr=error, color=STRONG, capsize=3, linewidth=1.4)
        for place, mark in enumerate(marks or ()):
            if mark is not None and _finite(mark):
                axes.plot([mark, mark], [place - 0.4, place + 0.4], color=SECOND, linewidth=2.2)
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.spines[["bottom"]].set_visible(False)
        axes.set_xticks([])
        width = limit or max([*values, 1e-9])
        axes.set_xlim(0, width * 1.22)
        for place, note in enumerate(notes):
            error = errors[place] if errors else None
            ends = [values[place] + (error or 0.0), (marks[place] or 0.0) if marks else 0.0]
            axes.text(max(ends) + width * 0.015, place, note, va="center", fontsize=9)
        return _to_svg(figure, name)


def draw_dots(name: str, labels: Sequence[str], values: Sequence[float], notes: Sequence[str]) -> str:
    """A dot a line, first on top, with a note behind each: for values that differ by less than they are."""
    if not values:
        return ""
    with _figure((7.4, 0.42 + 0.26 * len(values))) as (figure, axes):
        places = list(range(len(values)))
        low, high = min(values), max(values)
        width = (high - low) or abs(high) or 1.0
        axes.hlines(places, low - width * 0.06, values, color=FAINT, linewidth=1.2)
        axes.plot(values, places, linestyle="none", marker="o", markersize=5, color=FIRST)
        axes.set_yticks(places, labels)
        axes.set_ylim(len(values) - 0.4, -0.6)
        axes.grid(visible=False)
        axes.spines[["bottom"]].set_visible(False)
        axes.set_xticks([])
        axes.set_xlim(low - width * 0.06, high + width * 0.22)
        for place, note in enumerate(notes):
            axes.text(values[place] + width * 0.025, place, note, va="center", fontsize=9)
        return _to_svg(figure, name)


def draw_sizes(
    name: str,
    series: Sequence[tuple[str, Sequence[tuple[int, float]]]],
    *,
    unit: str,
    nominal: float | None,
    show: Callable[[int], str],
) -> str:
    """Values over sizes in bytes, both scales logarithmic, a line for each of up to five series; the nominal value across.

    ``show`` words a size. Values of 0 are gaps: a logarithmic scale has no place for them.
    """
    styles = ((FIRST, "-"), (SECOND, "-"), (STRONG, "-"), (WARN, "--"), (INK, ":"))
    with _figure((11.4, 3.4)) as (figure, axes):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for (label, points), (colour, line) in zip(series, styles, strict=False):
            values = [value if value > 0 else math.nan for _, value in points]
            axes.plot([size for size, _ in points], values, line, color=colour, label=label, marker="o", markersize=3.5)
        if nominal is not None and nominal > 0:
            axes.axhline(nominal, color=INK, linewidth=1.1, linestyle=(0, (6, 3)), label=f"nominal {nominal:.4g}")
        sizes = sorted({size for _, points in series for size, _ in points})
        shown = sizes[:: max(1, len(sizes) // 8)]
        axes.set_xticks(shown, [show(size) for size in shown])
        axes.minorticks_off()
        axes.set_title(unit, loc="left", fontsize=9, pad=7)
        axes.legend(loc="lower right", ncols=3, handlelength=2.2)
        return _to_svg(figure, name)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


@contextmanager
def _figure(inches: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure of its own, outside pyplot: no global state, no display."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        yield figure, figure.add_subplot()


def _to_svg(figure: Any, name: str) -> str:
    """The ``<svg>`` element alone, the same bytes for the same data, its ids unique in the page."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
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
