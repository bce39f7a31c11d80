"""A sweep as a table for people, and as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clustertune.errors import storage_error
from clustertune.manifest import write_durably
from clustertune.report import page, plots
from clustertune.report.format import UNKNOWN, duration, moment, number
from clustertune.report.metrics import read_metrics
from clustertune.rundir import RunDir
from clustertune.sweep.points import Sweep
from clustertune.sweep.results import DONE, FAILED, LOWER, OPEN, WAITING, Result

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_MAX_SHOWN = 60
"""Dots and curves on the page; the table has all points."""


def columns(metric: str, results: Sequence[Result]) -> list[str]:
    """The metrics to show: the one that sorts, then those that any point has."""
    there = dict.fromkeys(name for result in results for name in result.metrics)
    order = [*(name for name in LOWER if name in there), *(name for name in there if name not in LOWER)]
    return [metric, *(name for name in order if name not in (metric, f"ifeval.{metric}"))]


def rows(sweep: Sweep, names: Sequence[str], results: Sequence[Result]) -> list[list[str]]:
    """One row a point: rank, number, settings, metrics, step, time, state."""
    found, rank = [], 0
    for result in results:
        ranked = result.status == DONE and result.value(names[0]) is not None
        rank += ranked
        state = " ".join(f"{result.status}: {result.reason}".split()) if result.reason else result.status
        settings = [result.values.get(key, UNKNOWN) for key in sweep.keys]
        metrics = [number(result.value(name)) for name in names]
        step = UNKNOWN if result.step is None else str(result.step)
        place = str(rank) if ranked else ""
        found.append([place, str(result.index), *settings, *metrics, step, duration(result.seconds), state])
    return found


def heads(sweep: Sweep, names: Sequence[str]) -> list[str]:
    """The columns' names; ``#`` in front of those with numbers, as the page's tables take them."""
    return ["", "#point", *(f"#{key}" for key in sweep.keys), *(f"#{name}" for name in names), "#step", "#time", "state"]


def lines(sweep: Sweep, metric: str, results: Sequence[Result]) -> list[str]:
    """The table for a terminal: one line a point, never broken, the metric that sorts alone of all."""
    table = [heads(sweep, [metric]), *rows(sweep, [metric], results)]
    right = [head.startswith("#") for head in table[0]]
    table[0] = [head.lstrip("#").rpartition(".")[2] for head in table[0]]
    widths = [max(len(row[at]) for row in table) for at in range(len(right))]
    cells = ([c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)] for row in table)
    return ["  ".join(row).rstrip() for row in cells]


def build(sweep: Sweep, metric: str, results: Sequence[Result], out: Path | None = None) -> Path:
    """Write the page to ``out`` (the sweep's ``report.html`` by default) and return the path; the same results, the same bytes.

    Raises UserError (exit 73) where it cannot be written.
    """
    from jinja2 import Environment, StrictUndefined

    target = out or sweep.path / "report.html"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    try:
        text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(_values(sweep, metric, results))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_durably(target, text + "\n")
    except OSError as error:
        raise storage_error(error, "writing the report", target) from error
    return target


def _values(sweep: Sweep, metric: str, results: Sequence[Result]) -> dict[str, Any]:
    names = columns(metric, results)
    ranked = [result for result in results if result.status == DONE and result.value(metric) is not None]
    counts = {status: sum(r.status == status for r in results) for status in (DONE, OPEN, WAITING, FAILED)}
    by_index = {point.index: point for point in sweep.points}
    shown = ranked[:_MAX_SHOWN]
    values = [result.value(metric) or 0.0 for result in shown]
    drawn = "random draws, seed " + str(sweep.seed) if sweep.draws is not None else "grid"
    return {
        "title": f"{sweep.name}: sweep over {', '.join(key.rpartition('.')[2] for key in sweep.keys)}",
        "style": page.style(),
        "subtitle": f"{len(results)} points ({drawn}), made {moment(sweep.created)}",
        "tiles": [{"name": name, "value": str(count)} for name, count in counts.items() if count or name == DONE],
        "metric": metric,
        "better": "less is better" if LOWER[metric] else "more is better",
        "best": by_index[ranked[0].index].words if ranked else "",
        "best_value": number(ranked[0].value(metric)) if ranked else UNKNOWN,
        "dots": plots.draw_dots(
            f"{metric} of each point", [by_index[r.index].words for r in shown], values, [number(value) for value in values]
        ),
        "left_out": len(ranked) - len(shown),
        "curves": _curves(sweep, ranked),
        "means": _means(sweep, metric, ranked),
        "columns": heads(sweep, names),
        "rows": rows(sweep, names, results),
        "fixed": [word for word in sweep.points[0].overrides if word.partition("=")[0] not in sweep.keys],
    }


def _means(sweep: Sweep, metric: str, ranked: Sequence[Result]) -> list[list[str]]:
    """For each value of each setting the mean of the metric over the finished points that have it, where several share it."""
    found = []
    for key in sweep.keys:
        groups: dict[str, list[float]] = {}
        for result in ranked:
            groups.setdefault(result.values[key], []).append(result.value(metric) or 0.0)
        if 1 < len(groups) < len(ranked):
            for value, numbers in groups.items():
                mean, low, high = sum(numbers) / len(numbers), min(numbers), max(numbers)
                found.append([key, value, number(mean), number(low), number(high), str(len(numbers))])
    return found


def _curves(sweep: Sweep, ranked: Sequence[Result]) -> str:
    """The eval loss over steps: the best point in colour, the others behind it."""
    lines: list[plots.Line] = []
    for place, result in enumerate(ranked[:_MAX_SHOWN]):
        evals = read_metrics(RunDir(sweep.points[result.index].run_dir).metrics).evals
        steps, losses = [record.step for record in evals], [record.eval_loss for record in evals]
        if len(steps) > 1 and any(loss is not None for loss in losses):
            colour = plots.FIRST if place == 0 else plots.INK
            name = "best" if place == 0 else "the others" if len(lines) == 1 else f"_{place}"  # matplotlib hides names with _
            lines.append(plots.Line(name, steps, losses, colour))
    return plots.draw_lines("eval loss", lines[::-1], unit="nats per token", wide=True) if lines else ""
