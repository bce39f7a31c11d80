"""What a run took: hours of its GPUs, money, energy and CO2, of each attempt; and the budget that a recipe sets it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.config.hardware import Price, price, recognise
from clustertune.config.schema import Budget
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.events import read_object
from clustertune.launch.plan import OUTCOME, Plan, read_attempts
from clustertune.report.content import get
from clustertune.rundir import RunDir

WARN_SHARE = 0.8
"""Of the budget."""


@dataclass(frozen=True)
class AttemptCost:
    """One attempt at training."""

    attempt: int
    begun: float
    """Unix seconds."""
    ended: float | None
    """None: it runs, as far as its files tell."""
    seen: float
    """The last sign of it, Unix seconds."""
    ranks: int
    code: int | None = None
    """Exit code of its outcome."""
    kwh: float | None = None
    """None: no GPU told of energy or power."""

    def hours(self, now: float) -> float:
        """Rank-hours until it ended, was seen last, or now."""
        return max(0.0, (self.ended or min(now, self.seen)) - self.begun) / 3600 * self.ranks


@dataclass(frozen=True)
class Cost:
    """A run's training so far."""

    attempts: tuple[AttemptCost, ...]
    gpu_hours: float
    """Of all ranks: each has a GPU, or is a process where there is none."""
    usd: float | None
    """At the on-demand price; None without a price in US dollars."""
    kwh: float | None
    energy_from: str | None
    """``counter`` or ``power samples``."""
    co2_kg: float | None
    """None without energy or without the site's factor."""
    price: Price | None = None


def of_attempts(run: Path, joules: Mapping[int, float]) -> list[AttemptCost]:
    """Every attempt that had a plan; ``joules`` by attempt, as the samplers measured."""
    found = []
    for folder, plan in read_attempts(run):
        outcome = read_object(folder / OUTCOME)
        ended = outcome.get("time")
        energy = joules[plan.attempt] / 3.6e6 if plan.attempt in joules else None
        code, seen = outcome.get("code"), _last_sign(folder, plan)
        found.append(AttemptCost(plan.attempt, plan.begun, ended, seen, plan.world_size, code, energy))
    return found


def _last_sign(folder: Path, plan: Plan) -> float:
    """When a rank of an attempt last wrote something, Unix seconds."""
    newest = plan.begun
    for path in folder.glob("rank-*"):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return newest


def price_of(document: Mapping[str, Any], names: Sequence[str] = ()) -> Price | None:
    """The price of a run's GPU: as its first rank, a sampler (``names``) or its cluster file calls it. Raises UserError."""
    told = [get(document, "distributed", "gpu0"), *names, get(document, "cluster", "compute", "gpu")]
    gpu = next((found for name in told if name and (found := recognise(str(name)))), None)
    return price(gpu) if gpu else None


def add_up(
    attempts: Sequence[AttemptCost], found: Price | None, *, energy_from: str | None, co2: float | None, now: float
) -> Cost:
    """The sums. ``co2``: kg per kWh."""
    hours = sum(attempt.hours(now) for attempt in attempts)
    known = [attempt.kwh for attempt in attempts if attempt.kwh is not None]
    kwh = sum(known) if known else None
    in_usd = found is not None and found.currency == "USD" and found.on_demand is not None
    usd = hours * found.on_demand if found is not None and found.on_demand is not None and in_usd else None
    return Cost(tuple(attempts), hours, usd, kwh, energy_from if known else None, kwh * co2 if kwh and co2 else None, found)


# --- the budget --------------------------------------------------------------------------------------------------------


def limit_hours(budget: Budget, found: Price | None) -> float:
    """GPU-hours that a budget allows. Raises UserError (exit 2) for dollars where there is no price in dollars."""
    hours = [] if budget.gpu_hours is None else [budget.gpu_hours]
    if budget.usd is not None:
        if found is None or found.currency != "USD" or not found.on_demand:
            fix = "add it with its on_demand price in USD, or give budget.gpu_hours"
            text = "the GPU of this run has no price in US dollars"
            raise UserError(Problem(text, file="ops/prices.yaml", key="budget.usd", fix=fix))
        hours.append(budget.usd / found.on_demand)
    return min(hours)


def used(budget: Budget, cost: Cost) -> float | None:
    """The share of its budget that a run has used; None where it cannot be said."""
    try:
        return cost.gpu_hours / limit_hours(budget, cost.price)
    except UserError:
        return None


def deadline(run: RunDir, budget: Budget, number: int, gpus: Sequence[str] = ()) -> float:
    """Unix time at which attempt ``number``, which has begun, will have used up what is left. Raises UserError (exit 2)."""
    attempts = {attempt.attempt: attempt for attempt in of_attempts(run.path, {})}
    this = attempts.pop(number)
    spent = sum(attempt.hours(time.time()) for attempt in attempts.values())
    return this.begun + (limit_hours(budget, price_of(run.read(), gpus)) - spent) * 3600 / this.ranks


def over(budget: Budget) -> UserError:
    """What ends a run that has used up its budget (exit 93)."""
    told = ", ".join(f"{key}: {value:g}" for key, value in budget.model_dump().items() if value is not None)
    fix = "raise budget in the recipe, or on the command line: the same run goes on from its newest checkpoint"
    return UserError(Problem(f"the budget of this run is used up ({told})", key="budget", fix=fix), ExitCode.STOP)


def check(run: RunDir, budget: Budget | None) -> None:
    """Refuse another attempt of a run that has used up its budget (exit 93)."""
    attempts = of_attempts(run.path, {}) if budget is not None else []
    if budget is None or not attempts:
        return
    if sum(attempt.hours(time.time()) for attempt in attempts) >= limit_hours(budget, price_of(run.read())):
        raise over(budget)
