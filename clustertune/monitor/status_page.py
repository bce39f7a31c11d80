"""A run's status as a page, and the same for a terminal.

``live.html`` is the page of a run that trains: one file without scripts, which a browser reads again every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertune.console import duration
from clustertune.monitor.status import NodeStatus, RunStatus
from clustertune.report.content import UNKNOWN, moment, number, percent, size
from clustertune.report.cost import WARN_SHARE
from clustertune.report.page import render, time_axis, tone_of, training_plots

_TEMPLATE = Path(__file__).with_name("live.html.jinja")
FILE = "live.html"
RELOAD_SECONDS = 5
UNDER_WAY = ("waiting", "training", "evaluating")
HOTTEST_C = 90.0
"""Where the scale of temperatures ends: data-centre GPUs slow themselves down at about that (nvidia-smi -q -d TEMPERATURE)."""


def draw(status: RunStatus, now: float | None = None) -> str:
    """The page. Plots are those of the report; what nothing was measured of is left out."""
    moment_ = time.time() if now is None else now
    alerts, evaluated = len(status.alerts), status.evaluation
    running = status.state == "training"
    restarts = [a.start_step for a in status.metrics.attempts[1:] if a.start_step is not None]
    values = {
        "reload": RELOAD_SECONDS if status.state in UNDER_WAY else None,
        "title": f"{f'({alerts}!) ' if alerts else ''}{status.recipe or status.title}",
        "heading": status.recipe or status.title,
        "status": status,
        "tone": tone_of(status.state),
        "share": min(1.0, evaluated.done / max(1, evaluated.total))
        if evaluated
        else None
        if not status.step or not status.steps
        else min(1.0, status.step / status.steps),
        "tiles": [{"name": name, "value": value, "note": note} for name, value, note in tiles(status)],
        "plots": [plot for plot in training_plots(status.metrics, restarts, _band(status)) if plot],
        "heat": list(_heat(status.nodes)),
        "axis": time_axis(status.metrics, status.cost.attempts, moment_ if running else None),
        "parts_of_step": list(_parts(status)),
        "written": moment(moment_),
    }
    return render(_TEMPLATE, values) + "\n"


def tiles(status: RunStatus) -> Iterator[tuple[str, str, str]]:
    """The figures that come first: name, value, and what it is held against."""
    cost, rates, budget = status.cost.training, status.cost.rates, status.budget
    planned = status.planned_hours
    if (evaluation := status.evaluation) is not None:
        left = "" if evaluation.eta_s is None else f"about {duration(evaluation.eta_s)} left"
        yield (
            "Evaluation",
            f"{number(evaluation.done)} of {number(evaluation.total)}",
            f"{evaluation.model} model{', ' if left else ''}{left}",
        )
    pace = f"{duration(status.step_s)} a step" if status.step_s else ""
    yield "Step", f"{number(status.step)} of {number(status.steps)}", pace
    if status.planned_step_s and status.step_s:
        pace = f"{duration(status.planned_step_s)} a step planned"
        yield "Against the plan", f"{status.step_s / status.planned_step_s:.2f} x", pace
    rate = f"{number(round(status.planned_tokens_per_s))} planned" if status.planned_tokens_per_s else ""
    yield "Tokens/s", number(round(status.tokens_per_s) if status.tokens_per_s is not None else None), rate
    if status.mfu is not None:
        yield "MFU", percent(status.mfu), f"HFU {percent(status.latest.get('hfu'))}"
    yield "To the last step", duration(status.eta_s), f"{duration(planned * 3600)} planned in all" if planned else ""
    yield f"{'Process' if status.cost.on_cpu else 'GPU'}-hours", number(cost.gpu_hours, 2), "of all ranks, lost work too"
    if cost.usd is not None:
        at_end = f"{status.usd_at_end:,.2f} at the end" if status.usd_at_end else ""
        if planned and rates.usd and status.cost.attempts:
            at_end += f"; {planned * status.cost.attempts[-1].ranks * rates.usd:,.2f} planned"
        yield "US dollars", f"{cost.usd:,.2f}", at_end
    if cost.kwh is not None:
        co2 = f", {cost.co2_kg:.2f} kg CO2" if cost.co2_kg is not None else ""
        yield "kWh", f"{cost.kwh:.3f}", f"by {status.cost.energy_from}{co2}"
    if budget and status.budget_used is not None:
        limits = ", ".join(f"{value:g} {key.replace('_', ' ')}" for key, value in budget.model_dump().items() if value)
        yield "Budget used", f"{status.budget_used:.0%}", f"of {limits}; warns at {WARN_SHARE:.0%}"


def _band(status: RunStatus) -> tuple[float, float] | None:
    """Tokens/s between which the plan expects four of five runs."""
    rate, step_s = status.planned_tokens_per_s, status.planned_step_s
    if not status.planned_range or not rate or not step_s:
        return None
    fast, slow = status.planned_range
    return rate * step_s / slow, rate * step_s / fast


def _heat(nodes: tuple[NodeStatus, ...]) -> Iterator[dict[str, Any]]:
    """A line of each node: its name, what its processors do, and a cell of each GPU, with a strength from 0 to 100 a map."""
    largest = max((gpu.get("memory_gib") or 0.0 for node in nodes if node.row for gpu in node.row.gpus), default=0.0)
    for node in nodes:
        if node.row is None:
            yield {"name": node.name, "slow": node.stragglers, "cells": [], "node": "not measured"}
            continue
        values = node.row.node
        facts = [f"{number((values.get('cpu') or 0) * 100, 0)} % of the CPUs", f"load {number(values.get('load'), 1)}"]
        facts += [
            f"{number(values.get('memory_gib'), 1)} GiB RAM",
            f"{number(values.get('disk_free_gib'), 0)} GiB of disk free",
        ]
        cells = []
        for index, gpu in enumerate(node.row.gpus):
            used, memory, heat = (gpu.get(name) for name in ("utilisation", "memory_gib", "temperature_c"))
            text = f"GPU {index}: {number(used, 0)} %, {number(memory, 1)} GiB, {number(gpu.get('power_w'), 0)} W"
            cells.append({
                "text": f"{text}, {number(heat, 0)} C, {number(gpu.get('sm_mhz'), 0)} MHz",
                "lost": used is None and memory is None, "used": round(used or 0.0), "memory": number(memory, 1),
                "full": round(100 * (memory or 0.0) / largest) if largest else 0,
                "hot": round(100 * min(1.0, (heat or 0.0) / HOTTEST_C)), "heat": number(heat, 0),
            })  # fmt: skip
        yield {"name": node.name, "slow": node.stragglers, "cells": cells, "node": ", ".join(facts)}


def _parts(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Where the last logged step went, and how full the ranks were."""
    names = {"data": "waiting for data", "forward_backward": "forward and backward", "optimizer": "optimizer"}
    for key, name in names.items():
        if (seconds := status.latest.get(f"{key}_seconds")) is not None:
            yield name, duration(seconds)
    if "padding" in status.latest:
        yield "padding", percent(status.latest["padding"])
        yield "tokens of the fullest rank over the mean", number(status.latest.get("imbalance"))
    if (peak := status.latest.get("memory_bytes")) is not None:
        yield "peak memory, largest of all ranks", size(peak)


def text(status: RunStatus) -> str:
    """The status for a terminal."""
    lines = [f"{status.recipe or status.title}: {status.state}"]
    lines += [f"  {name:<18} {value}{f'  ({note})' if note else ''}" for name, value, note in tiles(status) if value != UNKNOWN]
    lines += [f"  {name:<18} {value}" for name, value in _parts(status)]
    for line in _heat(status.nodes):
        lines.append(f"  {line['name']}: {line['node']}")
        lines += [f"    {cell['text']}{'  NOT READABLE' if cell['lost'] else ''}" for cell in line["cells"]]
    lines += [f"  ! {alert.kind}: {alert.text}" for alert in status.alerts]
    return "\n".join(lines)
