"""What a run took: hours of its GPUs, money, energy and CO2, by stage and attempt; the budget that it has; and how it saves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from clustertune.cluster.hardware import Price, price, recognise
from clustertune.console import duration
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.attempt import AttemptPlan, read_attempts
from clustertune.recipe.sections import Budget
from clustertune.report.content import get, number, on_cpu, percent, size
from clustertune.report.metrics import Metrics, NodeTelemetry
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir

WARN_SHARE = 0.8
"""Of the budget."""


@dataclass(frozen=True)
class Expense:
    """What something took. None: not known."""

    seconds: float | None = None
    """From its begin to its end, of all its tries."""
    gpu_hours: float | None = None
    """Of all ranks: each has a GPU, or is a process where there is none."""
    usd: float | None = None
    """At the on-demand price."""
    kwh: float | None = None
    """Of the GPUs."""
    co2_kg: float | None = None

    def __add__(self, other: Expense) -> Expense:
        """The sum of what is known."""
        pairs = {key: [v for v in (value, getattr(other, key)) if v is not None] for key, value in vars(self).items()}
        return Expense(**{key: sum(known) if known else None for key, known in pairs.items()})


@dataclass(frozen=True)
class Rates:
    """What hours and energy are multiplied by."""

    price: Price | None = None
    co2: float | None = None
    """kg per kWh, as the site says; None or 0: unknown."""

    @property
    def usd(self) -> float | None:
        """US dollars of a GPU-hour, on demand; None without such a price."""
        return self.price.on_demand if self.price is not None and self.price.currency == "USD" else None

    def spent(self, seconds: float, gpus: int | None, kwh: float | None = None) -> Expense:
        """Of some seconds on so many GPUs. Without a GPU there is no price."""
        hours = None if gpus is None else seconds / 3600 * gpus
        usd = hours * self.usd if hours is not None and gpus and self.usd is not None else None
        return Expense(seconds, hours, usd, kwh, kwh * self.co2 if kwh is not None and self.co2 else None)


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
    nodes: int = 1
    failed: bool = False
    """It ended, or was last seen, without an announcement: no outcome, a fault of a rank, a node or the storage."""
    kwh: float | None = None
    """None: no GPU reported energy or power."""
    lost_seconds: float = 0.0
    """Spent on steps that a later attempt had to do again."""
    limit_minutes: float | None = None
    """Of its job; None: no limit, or not recorded."""

    def seconds(self, now: float) -> float:
        """Until it ended, was seen last, or now."""
        return max(0.0, (self.ended or min(now, self.seen)) - self.begun)


@dataclass(frozen=True)
class Cost:
    """A run so far."""

    attempts: tuple[AttemptCost, ...]
    by_attempt: tuple[Expense, ...]
    training: Expense
    """The sum of the attempts: what a budget counts."""
    lost: Expense
    """Of the training, on steps that were done again. Its energy is the attempts' by the share of their time."""
    stages: Mapping[str, Expense]
    """By stage, in the order in which they began; ``train`` is the training. What has no end yet is left out."""
    energy_from: str | None
    """``counter`` or ``power samples``."""
    rates: Rates
    on_cpu: bool = False
    """Trained on processors: hours are those of processes, and there is no price."""

    @property
    def hours_of(self) -> str:
        """What the hours count: ``GPU`` or ``process``."""
        return "process" if self.on_cpu else "GPU"

    @property
    def total(self) -> Expense:
        """Of all stages."""
        return sum(self.stages.values(), Expense())

    @property
    def all_energy(self) -> bool:
        """Whether every attempt and the evaluation were measured; else the sum is the least that it was."""
        measured = [*self.by_attempt, *(spent for name, spent in self.stages.items() if name == "eval")]
        return bool(measured) and all(spent.kwh is not None for spent in measured)

    def as_dict(self) -> dict[str, Any]:
        """The costs in ``report.json``."""
        parts = zip(self.attempts, self.by_attempt, strict=True)
        return {
            "total": vars(self.total),
            "stages": {name: vars(spent) for name, spent in self.stages.items()},
            "attempts": [
                {"attempt": one.attempt, "ranks": one.ranks, "exit_code": one.code, **vars(spent)} for one, spent in parts
            ],
            "lost": vars(self.lost),
            "energy_from": self.energy_from,
            "hours_of": self.hours_of,
            "energy_is_whole": self.all_energy,
            "usd_per_gpu_hour": self.rates.usd,
            "co2_kg_per_kwh": self.rates.co2,
        }


def of_run(
    run: Path, document: Mapping[str, Any], metrics: Metrics, telemetry: Mapping[str, NodeTelemetry], now: float
) -> Cost:
    """Add up what a run took. ``now``: Unix seconds."""
    heads, joules = [node.about for node in telemetry.values()], dict[int, float]()
    for node in telemetry.values():
        for attempt, value in node.joules.items():
            joules[attempt] = joules.get(attempt, 0.0) + value
    try:
        gpu_price = price_of(document, [str(name) for head in heads for name in head.get("gpus", [])[:1]])
    except UserError:  # a price file with faults is for the commands that ask for prices
        gpu_price = None
    co2 = get(document, "cluster", "monitor", "co2_kg_per_kwh")
    rates = Rates(gpu_price, co2 if isinstance(co2, int | float) else None)
    lost_seconds = {attempt.attempt: attempt.lost_seconds for attempt in metrics.attempts}
    attempts = of_attempts(run, joules, lost_seconds)
    by_attempt = tuple(rates.spent(one.seconds(now), one.ranks, one.kwh) for one in attempts)
    lost = [
        rates.spent(one.lost_seconds, one.ranks, one.kwh and one.kwh * min(1.0, one.lost_seconds / (one.seconds(now) or 1)))
        for one in attempts
        if one.lost_seconds
    ]
    training = sum(by_attempt, Expense(0.0, 0.0))
    evaluated = [value / 3.6e6 for attempt, value in joules.items() if attempt < 0]
    listed = any(record.stage == "train" for record in metrics.stages)
    stages: dict[str, Expense] = {"train": training} if attempts and not listed else {}
    for record in metrics.stages:
        alone = get(document, "jobs", "eval", "nodes") in (None, 1)  # of several nodes only the first is measured
        kwh = sum(evaluated) if record.stage == "eval" and evaluated and alone else None
        if record.stage == "train" and attempts:
            stages["train"] = training
        elif record.seconds is not None and record.stage != "report":  # it is not over while its page is written
            stages[record.stage] = rates.spent(record.seconds, _gpus_of(document, record.stage), kwh)
    energy = next((str(head["energy"]) for head in heads if head.get("energy")), None) if joules else None
    return Cost(tuple(attempts), by_attempt, training, sum(lost, Expense()), stages, energy, rates, on_cpu(document))


def _gpus_of(document: Mapping[str, Any], stage: str) -> int | None:
    """GPUs that a stage beside the training holds: its job's, or all of the machine that runs the chain; None: unknown.

    A machine without a GPU counts as one, as its processes do.
    """
    if document.get("jobs"):
        nodes, each = (get(document, "jobs", stage, key) for key in ("nodes", "gpus_per_node"))
        return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None
    gpus = get(document, "host", "gpus")
    return (gpus or 1) if isinstance(gpus, int) else None


def of_attempts(
    run: Path, joules: Mapping[int, float] | None = None, lost_seconds: Mapping[int, float] | None = None
) -> list[AttemptCost]:
    """Every attempt that had a plan; ``joules`` by attempt, as the samplers measured."""
    costs = []
    for one in read_attempts(run):
        plan, number = one.plan, one.plan.attempt
        kwh = joules[number] / 3.6e6 if joules and number in joules else None
        lost = lost_seconds.get(number, 0.0) if lost_seconds else 0.0
        seen, ended, code = _last_sign(one.folder, plan), one.outcome.get("time"), one.code
        failed = code in (None, ExitCode.FAILED, ExitCode.STORAGE) or (code == ExitCode.AGAIN and bool(one.messages))
        failed = failed and not one.outcome.get("port_taken")
        sizes = plan.world_size, code, len(plan.nodes)
        costs.append(AttemptCost(number, plan.begun, ended, seen, *sizes, failed, kwh, lost, plan.limit_minutes))
    return costs


def _last_sign(folder: Path, plan: AttemptPlan) -> float:
    """When a rank of an attempt last wrote something, Unix seconds."""
    newest = plan.begun
    for path in folder.glob("rank-*"):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return newest


def price_of(document: Mapping[str, Any], names: Sequence[str] = ()) -> Price | None:
    """The price of a run's GPU: as its first rank, a sampler (``names``) or its cluster file calls it. Raises UserError.

    None for a run whose ranks trained on processors, on a cluster with GPUs too.
    """
    if get(document, "distributed", "device") == "cpu":
        return None
    gpu_names = [get(document, "distributed", "gpu0"), *names, get(document, "cluster", "compute", "gpu")]
    gpu = next((recognised for name in gpu_names if name and (recognised := recognise(str(name)))), None)
    return price(gpu) if gpu else None


# --- the budget --------------------------------------------------------------------------------------------------------


def limit_hours(budget: Budget, rates: Rates) -> float:
    """GPU-hours that a budget allows. Raises UserError (exit 2) for dollars where there is no price in dollars."""
    hours = [] if budget.gpu_hours is None else [budget.gpu_hours]
    if budget.usd is not None:
        if not rates.usd:
            fix = "add it with its on_demand price in USD, or give budget.gpu_hours"
            text = "the GPU of this run has no price in US dollars"
            raise UserError(Problem(text, file="ops/prices.yaml", key="budget.usd", fix=fix))
        hours.append(budget.usd / rates.usd)
    return min(hours)


def used(budget: Budget, cost: Cost) -> float | None:
    """The share of its budget that a run has used; None where it is unknown."""
    try:
        return (cost.training.gpu_hours or 0.0) / limit_hours(budget, cost.rates)
    except UserError:
        return None


def _hours(attempts: Iterable[AttemptCost]) -> float:
    now = time.time()
    return sum(attempt.seconds(now) / 3600 * attempt.ranks for attempt in attempts)


def deadline(run: RunDir, budget: Budget, number: int, gpus: Sequence[str] = ()) -> float:
    """Unix time at which attempt ``number``, which has begun, will have used up what is left. Raises UserError (exit 2)."""
    attempts = {attempt.attempt: attempt for attempt in of_attempts(run.path)}
    this = attempts.pop(number)
    left = limit_hours(budget, Rates(price_of(run.read(), gpus))) - _hours(attempts.values())
    return this.begun + left * 3600 / this.ranks


def over(budget: Budget) -> UserError:
    """What ends a run that has used up its budget (exit 93)."""
    limits = ", ".join(f"{key}: {value:g}" for key, value in budget.model_dump().items() if value is not None)
    fix = "raise budget in the recipe, or on the command line: the same run resumes from its newest checkpoint"
    return UserError(Problem(f"the budget of this run is used up ({limits})", key="budget", fix=fix), ExitCode.STOP)


def check(run: RunDir, budget: Budget | None) -> None:
    """Refuse another attempt of a run that has used up its budget (exit 93)."""
    attempts = of_attempts(run.path) if budget is not None else []
    if budget is None or not attempts:
        return
    if _hours(attempts) >= limit_hours(budget, Rates(price_of(run.read()))):
        raise over(budget)


# --- saves: how often, what they take, and whether the failures that were met ask for another cadence ----------------


LEAST = 2
"""Failures from which on a run's own rate is believed: one alone says little about the next."""
BEFORE_HOURS = 24.0
"""Node-hours up to one more failure, as if seen before the run: two failures in the first minutes do not make a rate."""


@dataclass(frozen=True)
class Failures:
    """Ends of a run's attempts that no warning announced."""

    count: int
    node_hours: float
    """That all attempts ran, times their nodes."""

    @property
    def mtbf_hours(self) -> float | None:
        """Of one node; None below :data:`LEAST` failures."""
        return (self.node_hours + BEFORE_HOURS) / (self.count + 1) if self.count >= LEAST else None


def failures(attempts: Sequence[AttemptCost]) -> Failures:
    """What the attempts of a run met. The newest is not counted while it has no end."""
    now, newest = time.time(), max((one.attempt for one in attempts), default=0)
    hours = sum(one.seconds(now) / 3600 * one.nodes for one in attempts)
    return Failures(sum(one.failed and (one.code is not None or one.attempt != newest) for one in attempts), hours)


def saves_as_dict(resolved: Resolved | None, metrics: Metrics, attempts: Sequence[AttemptCost]) -> dict[str, Any] | None:
    """The part ``saves`` of ``report.json``; None for a run that saved nothing. Seconds and bytes: medians; null: unknown."""
    saves = [record for record in metrics.checkpoints if record.status == "saved"]
    if not saves:
        return None

    def middle(name: str) -> float | None:
        known = [value for record in saves if (value := getattr(record, name)) is not None]
        return median(known) if known else None

    stalls = [record.stall for record in saves if record.stall is not None]
    trained, met = sum(one.seconds(time.time()) for one in attempts), failures(attempts)
    save = resolved.recipe.save if resolved is not None else None
    return {
        "every": save.every if save is not None else str(resolved.train_args["save_steps"]) if resolved is not None else None,
        "every_seconds": next((record.every for record in reversed(saves) if record.every is not None), None),
        "milestones": list(save.milestones) if save is not None else [],
        "count": len(saves),
        "bytes": middle("bytes"),
        "stall_seconds": middle("stall"),
        "write_seconds": middle("write"),
        "stall_share": sum(stalls) / trained if stalls and trained else None,
        "failures": met.count,
        "node_hours": met.node_hours,
        "mtbf_hours": met.mtbf_hours,
    }


def saves_rows(saves: Mapping[str, Any] | None) -> list[list[str]]:
    """The same for the page: what, and its value."""
    if saves is None:
        return []
    every, seconds = saves["every"], saves["every_seconds"]
    cadence = "unknown" if every is None else f"{every} steps" if str(every).isdigit() else str(every)
    if seconds is not None:
        cadence += f": {duration(seconds)} in the end"
    if saves["milestones"]:
        cadence += f"; and at {', '.join(map(number, saves['milestones']))}"
    stall = f"{duration(saves['stall_seconds'])} a save"
    if saves["stall_share"] is not None:
        stall += f"; {percent(saves['stall_share'])} of the training"
    return [
        ["saved every", cadence],
        ["saves", f"{number(saves['count'])}, {size(saves['bytes'])} each"],
        ["training stood still", stall],
        ["written in", duration(saves["write_seconds"])],
        ["ends without a warning", f"{saves['failures']} in {saves['node_hours']:,.2f} node-hours"],
    ]
