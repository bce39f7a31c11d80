"""What somebody who pays asks first: what was trained, did it get better, and what did it take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clustertune.evaluate.scores import BETTER, SAME, WORSE, shown
from clustertune.report import content
from clustertune.report.content import UNKNOWN, duration, get, number
from clustertune.report.cost import Cost, Expense
from clustertune.report.metrics import Metrics

FINISHED = ("finished", "trained")
"""Words of :func:`clustertune.report.content.status_of` for a training that took its last step."""


def answer(
    run: Mapping[str, Any], metrics: Metrics, status: str, data: Mapping[str, Any], scored: Any, trained: Any, cost: Cost
) -> list[str]:
    """Two sentences. ``data``: the manifest's facts of the conversations; ``trained``: the number of trainable parameters."""
    return [
        _what(run, metrics, status, data, trained) + _better(metrics, scored),
        _took(run, cost, "It" if status in FINISHED else "So far it"),
    ]


def _what(run: Mapping[str, Any], metrics: Metrics, status: str, data: Mapping[str, Any], trained: Any) -> str:
    recipe = get(run, "recipe", "recipe")
    every = get(run, "distributed", "total_parameters")
    share = f" ({content.percent(trained / every)} of its parameters)" if trained and every and get(recipe, "lora") else ""
    how = f"with LoRA{share}" if get(recipe, "lora") else "in all its parameters"
    many = get(data, "train", "conversations")
    rows = f"{number(many)} conversations of " if many is not None else ""
    steps = metrics.steps[-1].step if metrics.steps else 0
    planned_steps = get(run, "distributed", "steps")
    whole = status in FINISHED or steps == planned_steps
    of_all = f" of {number(planned_steps)}" if planned_steps else ""
    took = f"{number(steps)} steps" if whole else f"{number(steps)}{of_all} steps so far ({status})"
    name, source = get(recipe, "model", "name") or "A model", get(recipe, "data", "name") or "its data"
    return f"{name} was fine-tuned {how} on {rows}{source} for {took}"


def _better(metrics: Metrics, scored: Any) -> str:
    rows = [(task, key, row) for task, found in (get(scored, "paired") or {}).items() for key, row in found.items()]
    if not rows:
        loss = content.eval_losses(metrics)
        if loss is None or len(loss[1]) < 2:
            return "; whether it got better was not measured."
        when, (before, after) = loss
        change = "fell" if after < before else "did not fall"
        text = f"; its loss on conversations held out {change} from {number(before, 3)} to {number(after, 3)} ({when})"
        return f"{text}, and without scores of the base there is no interval for that."
    task, key, row = rows[0]
    low, high = (f"{100 * edge:+.1f}" for edge in row["ci95"])
    change = f"{task} {shown(key)} went from {content.score(row['base'])} to {content.score(row['tuned'])}"
    change += f", a difference of {100 * row['difference']:+.1f} points with a 95 % interval from {low} to {high}"
    sentence = {BETTER: "; it got better than its base", WORSE: "; it got worse than its base"}
    text = sentence.get(row["verdict"], "; that it got better than its base is not shown")
    counts = [f"{sum(r['verdict'] == verdict for _, _, r in rows)} {verdict}" for verdict in (BETTER, WORSE, SAME)]
    others = f" (of {len(rows)} scores: {', '.join(counts)})" if len(rows) > 1 else ""
    return f"{text}: {change}{others}."


def _took(run: Mapping[str, Any], cost: Cost, it: str) -> str:
    total = cost.total
    if total.seconds is None:
        return "What it took is not known yet."
    ranks = cost.attempts[-1].ranks if cost.attempts else None
    gpu = get(run, "distributed", "gpu0")
    hours = total.gpu_hours
    if gpu is None and not get(run, "host", "gpus"):
        where = f" on {ranks} process{'es' if ranks != 1 else ''} without a GPU" if ranks else ""
        parts = [f"{_hours(hours)} process-hours"] if hours is not None else []
    else:
        where = f" on {ranks} GPU{'s' if ranks != 1 else ''}{f' ({gpu})' if gpu else ''}" if ranks else ""
        parts = [f"{_hours(hours)} GPU-hours"] if hours is not None else []
    least = "" if cost.all_energy else "at least "
    parts.append("no price is known" if total.usd is None else f"{total.usd:,.2f} US dollars")
    parts.append("its energy was not measured" if total.kwh is None else f"{least}{total.kwh:,.3g} kWh")
    parts += [f"{least}{total.co2_kg:,.3g} kg of CO2"] if total.co2_kg is not None else []
    attempts = len(cost.attempts)
    lost = f"; {attempts - 1} restart{'s' if attempts > 2 else ''}" if attempts > 1 else ""
    if cost.lost.gpu_hours and hours:
        lost += f" and {content.percent(cost.lost.gpu_hours / hours)} of the hours went to work that was lost"
    return f"{it} took {duration(total.seconds)}{where}: {', '.join(parts)}{lost}."


COLUMNS = ["", "#time", "#GPU-hours", "#US dollars", "#kWh", "#kg CO2"]


def cost_rows(cost: Cost) -> list[list[str]]:
    """Of each stage, each attempt at training, and of all; what was lost last."""

    def row(name: str, spent: Expense) -> list[str]:
        values = (_hours(spent.gpu_hours), _money(spent.usd), number(spent.kwh, 3), number(spent.co2_kg, 3))
        return [name, duration(spent.seconds), *values]

    rows = []
    for name, spent in cost.stages.items():
        rows.append(row(name, spent))
        if name == "train" and len(cost.attempts) > 1:
            parts = zip(cost.attempts, cost.by_attempt, strict=True)
            rows += [row(f"- attempt {one.attempt}, {one.ranks} ranks", part) for one, part in parts]
    rows.append(row("all stages", cost.total))
    return [*rows, row("of it lost: steps done again", cost.lost)] if cost.lost.seconds else rows


def cost_note(cost: Cost) -> str:
    """What the figures rest on."""
    price, co2 = cost.rates.price, cost.rates.co2
    found = "No price of this GPU stands in ops/prices.yaml"
    if cost.rates.usd is not None and price is not None:
        found = f"{cost.rates.usd:g} US dollars for a GPU-hour on demand (ops/prices.yaml, {price.date})"
    by = {"counter": "the GPUs' energy counters", "power samples": "samples of the GPUs' power"}.get(str(cost.energy_from))
    part = "" if cost.all_energy else "; some of it was not measured"
    energy = (
        f"energy by {by}, of training and evaluation, without CPUs, network and cooling{part}"
        if by
        else "no energy was measured"
    )
    factor = f"{co2:g} kg CO2 a kWh" if co2 else "no CO2 factor in the cluster file"
    return f"{found}; {energy}; {factor}. Without a GPU each process counts as one. {UNKNOWN}: not known."


def point_rows(points: list[dict[str, Any]]) -> list[list[str]]:
    """What a point of each score took; none where no score rose."""
    return [
        [
            p["task"],
            shown(p["score"]),
            f"{100 * p['difference']:+.2f}",
            _hours(p["gpu_hours_per_point"]),
            _money(p["usd_per_point"]),
            number(p["kwh_per_point"], 3),
        ]
        for p in points
        if p["gpu_hours_per_point"] is not None
    ]


POINT_COLUMNS = ["task", "score", "#points", "#GPU-hours a point", "#US dollars a point", "#kWh a point"]


def _hours(value: float | None) -> str:
    return UNKNOWN if value is None else "< 0.01" if 0 < value < 0.005 else f"{value:,.2f}"


def _money(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.2f}"
