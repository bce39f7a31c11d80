"""One status of a run, from its files alone: what the live page, ``watch``, ``runs``, the metrics file and the report show.

``live.html`` is the page of a run that trains: one file without scripts, which a browser reads again every few seconds. The
figures are there in OpenMetrics' text format, too, for node_exporter's textfile collector, which reads the ``*.prom`` of a
folder: https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clustertune.console import duration
from clustertune.evaluate import scores
from clustertune.launch.attempt import AttemptPlan, read_attempts
from clustertune.manifest import require_replaceable, write_durably
from clustertune.monitor.sampler import COLUMNS, GPU_COLUMNS, SLOWED
from clustertune.report import cost
from clustertune.report.content import UNKNOWN, get, moment, number, percent, recipe_of, size
from clustertune.report.cost import WARN_SHARE
from clustertune.report.metrics import TELEMETRY, Metrics, MetricsReader, NodeTelemetry, TelemetryReader, TelemetryRow
from clustertune.report.page import render, time_axis, tone_of, training_plots
from clustertune.report.state import evaluation_of, read_stages, state_of
from clustertune.rundir import RunDir

RECENT = 20
"""Steps whose median is the present step time."""
LEAST_FREE_GIB = 5.0
SAVES_AHEAD = 2
"""Of the largest checkpoint so far: room for fewer is an alert."""

_OF_GPUS = {"sm_mhz": ("clock", "MHz", 0.05), "temperature_c": ("temperature", "C", 0.15), "power_w": ("power", "W", 0.15)}
"""What a slow rank is compared by: word, unit, and the share by which a value must differ from the median of all."""


@dataclass(frozen=True)
class Alert:
    """Something that a person should know now."""

    kind: str
    """``not_finite``, ``no_gradient``, ``reward``, ``stalled``, ``straggler``, ``disk``, ``budget`` or ``gpu``."""
    text: str


@dataclass(frozen=True)
class NodeStatus:
    """One machine of the newest attempt."""

    name: str
    row: TelemetryRow | None
    """Its newest sample; None: nothing was measured."""
    stragglers: tuple[int, ...]
    """Ranks on it that the others wait for."""

    def as_dict(self) -> dict[str, Any]:
        names = ("utilisation", "memory_gib", "power_w", "temperature_c")
        gpus = [{name: gpu.get(name) for name in names} for gpu in (self.row.gpus if self.row else ())]
        return {"name": self.name, "gpus": gpus, "stragglers": list(self.stragglers)}


class RunStatus:
    """A run at one moment, from what one look has found. None: this machine, or this moment, cannot say."""

    def __init__(
        self, run: RunDir, document: Mapping[str, Any], metrics: Metrics, latest: Mapping[str, Any],
        measured: Mapping[str, NodeTelemetry], now: float,
    ) -> None:  # fmt: skip
        """``latest``: the last step's event; ``now``: Unix seconds."""
        self.run, self.document, self.metrics, self.latest = run, document, metrics, latest
        self.resolved = recipe_of(document)
        self._measured, self._now = measured, now
        attempts, forecast = read_attempts(run.path), document.get("forecast")
        self.newest = attempts[-1] if attempts else None
        self.plan = self.newest.plan if self.newest else None
        self.cost = cost.of_run(run.path, document, metrics, measured, now)
        self.title, self.recipe = run.path.resolve().name, self.resolved and self.resolved.name
        seen = max((node.last.time for node in measured.values() if node.last), default=0.0)
        self.evaluation = evaluation_of(run, now)
        """How far the evaluation under way has come; None: there is none."""
        self.state = state_of(run, read_stages(run, metrics), metrics, self.cost.attempts, now, seen).word
        self.step: int | None = metrics.steps[-1].step if metrics.steps else None
        self.steps = self._steps()
        recent = [record.seconds for record in metrics.steps[-RECENT:] if record.seconds]
        self.step_s = statistics.median(recent) if recent else None
        """Median of the recent steps."""
        self.tokens_per_s, self.mfu = latest.get("tokens_per_second"), latest.get("mfu")
        reach = get(forecast, "step_s_range")
        self.planned_range: tuple[float, float] | None = tuple(reach) if reach else None
        """Seconds between which the plan expects four of five runs."""
        keys = ("step_s", "tokens_per_s", "hours")
        self.planned_step_s, self.planned_tokens_per_s, self.planned_hours = (get(forecast, key) for key in keys)
        self.eta_s = self._eta(self.step, self.steps) if self.state == "training" else None
        """Seconds to the last step, at the pace of the recent ones with all that came between them."""
        rate, usd, ranks = self.cost.rates.usd, self.cost.training.usd, self.plan.world_size if self.plan else None
        more = self.eta_s / 3600 * ranks * rate if self.eta_s and ranks and rate else None
        self.usd_at_end = usd + more if usd is not None and more is not None else None
        self.budget = self.resolved.recipe.budget if self.resolved is not None else None
        self.budget_used = cost.used(self.budget, self.cost) if self.budget else None
        self.score_name, self.score = self._score()
        self.nodes = tuple(self._nodes())
        self.alerts = tuple(self._alerts())

    def as_dict(self) -> dict[str, Any]:
        """The document of ``watch --once --json``."""
        return {
            "state": self.state, "step": self.step, "steps": self.steps, "tokens_per_s": self.tokens_per_s, "mfu": self.mfu,
            "planned_step_s": self.planned_step_s, "step_s": self.step_s, "eta_s": self.eta_s,
            "evaluation": self.evaluation and vars(self.evaluation),
            "usd": self.cost.training.usd, "kwh": self.cost.training.kwh,
            "nodes": [node.as_dict() for node in self.nodes],
            "alerts": [vars(alert) for alert in self.alerts],
        }  # fmt: skip

    def summary(self, path: Path) -> dict[str, Any]:
        """One run of ``runs --json``."""
        head = {"run": str(path), "recipe": self.recipe, "state": self.state, "step": self.step, "steps": self.steps}
        spent = self.cost.training
        hours = None if self.cost.on_cpu else spent.gpu_hours
        begun = None
        with contextlib.suppress(OSError):
            seconds = min(file.stat().st_mtime for file in (path / "run.json", *path.glob("attempts/*")))
            begun = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
        head |= {"begun": begun, "score_name": self.score_name}
        return {**head, "score": self.score, "gpu_hours": hours, "usd": spent.usd, "kwh": spent.kwh}

    def _steps(self) -> int | None:
        """Steps of the whole training, as the first rank counted them, or as the recipe says."""
        max_steps = self.resolved.train_args["max_steps"] if self.resolved is not None else 0
        return get(self.document, "distributed", "steps") or (max_steps if max_steps > 0 else None)

    @property
    def _silence(self) -> float:
        """Seconds since any rank of the newest attempt wrote a heartbeat."""
        return self._now - max((attempt.seen for attempt in self.cost.attempts[-1:]), default=0.0)

    def _eta(self, step: int | None, steps: int | None) -> float | None:
        part = self.metrics.steps[-3 * RECENT :]
        if not part or step is None or steps is None:
            return None
        times = [(record.step, record.time) for record in part if record.time and record.attempt == part[-1].attempt]
        if len(times) < 2:
            return None
        (first, began), (last, ended) = times[0], times[-1]
        return (steps - step) * (ended - began) / (last - first) if last > first else None

    def _score(self) -> tuple[str | None, float | None]:
        """The evaluation's first task, and its headline."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            for name, row in (get(scores.read_result(self.run.eval), "tasks") or {}).items():
                return (None, None) if (value := scores.headline(name, row)[1]) is None else (name, float(value))
        return None, None

    # -- nodes and who is slow -----------------------------------------------------------------------------------------

    @property
    def _slow(self) -> dict[int, float]:
        """By rank of the newest attempt: there may have been more of them before, and on other machines."""
        newest = self.plan is not None and self.latest.get("attempt") == self.plan.attempt
        stragglers = self.latest.get("stragglers") if newest else None
        return {int(rank): float(times) for rank, times in stragglers.items()} if isinstance(stragglers, dict) else {}

    def _nodes(self) -> Iterator[NodeStatus]:
        if self.plan is None:
            return
        # A node that was replaced has its file still, with the same index.
        measured = [node for node in self._measured.values() if node.last and node.last.attempt == self.plan.attempt]
        by_index = {node.about.get("node"): node for node in measured}
        for index, planned in enumerate(self.plan.nodes):
            telemetry = by_index.get(index)
            name = str(telemetry.about.get("host", planned.name)) if telemetry and planned.name == "here" else planned.name
            mine = tuple(rank for rank in self._slow if rank in self.plan.ranks_of(index))
            yield NodeStatus(name, telemetry.last if telemetry else None, mine)

    def _differs(self, plan: AttemptPlan, nodes: Sequence[NodeStatus], rank: int) -> str:
        """What is different where a slow rank runs; empty where nothing is."""
        node = nodes[rank // plan.ranks_per_node]
        local_rank, rows = rank % plan.ranks_per_node, [node.row for node in nodes if node.row]
        differences = []
        if node.row and local_rank < len(node.row.gpus):
            mine, all_gpus = node.row.gpus[local_rank], [gpu for row in rows for gpu in row.gpus]
            for name, (word, unit, much) in _OF_GPUS.items():
                differences += _apart(word, mine.get(name), [gpu.get(name) for gpu in all_gpus], unit, much)
            differences += [word for bit, word in SLOWED.items() if int(mine.get("throttle") or 0) & bit]
        load = [row.node.get("load") for row in rows]
        differences += _apart("load", node.row.node.get("load") if node.row else None, load, "", 0.5)
        return ", ".join(differences)

    # -- alerts --------------------------------------------------------------------------------------------------------

    def _alerts(self) -> Iterator[Alert]:
        reason = self.metrics.attempts[-1].reason if self.metrics.attempts else None
        message = "; ".join(self.newest.messages) if self.newest else ""
        if self.state == "stopped" and "not finite" in f"{reason} {message}":
            yield Alert("not_finite", message or str(reason))
        if self.state == "stopped" and "taught nothing" in f"{reason} {message}":
            yield Alert("no_gradient", message or str(reason))
        if self.state == "lost":
            yield Alert("stalled", f"no rank has written anything for {self._silence:.0f} s, and no outcome was left")
        if "hangs" in message:
            yield Alert("stalled", message)
        if self.state == "training":
            yield from self._of_now()
        share = self.budget_used
        if share is not None and share >= cost.WARN_SHARE:
            yield Alert("budget", f"{share:.0%} of the budget is used; the run saves and ends at 100 %")

    def _of_now(self) -> Iterator[Alert]:
        """What is only true while it trains."""
        quiet, nodes = self._silence, self.nodes
        if self.step_s and quiet > max(60.0, 10 * self.step_s):
            yield Alert("stalled", f"no rank has written anything for {quiet:.0f} s")
        kind, idle = self.metrics.alarm_kind, self.latest.get("grad_norm") == 0 or self.latest.get("same_reward") == 1
        if self.metrics.alarm and (kind == "reward" or idle):
            yield Alert(str(kind), self.metrics.alarm)
        assert self.plan is not None
        for rank, times in self._slow.items():
            differs = self._differs(self.plan, nodes, rank)
            where = f"rank {rank} on {nodes[rank // self.plan.ranks_per_node].name}"
            yield Alert(
                "straggler", f"{where} takes {times:g} times as long as the median rank{': ' if differs else ''}{differs}"
            )
        for node in nodes:
            for key, text in node.row.problems.items() if node.row else ():
                yield Alert("gpu", f"{node.name}: {'GPU ' if key.isdigit() else ''}{key}: {text}")
            for index, gpu in enumerate(node.row.gpus if node.row else ()):
                if gpu.get("xid"):
                    yield Alert("gpu", f"{node.name}: GPU {index}: Xid {gpu['xid']:.0f}")
        yield from self._disk(nodes)

    def _disk(self, nodes: Sequence[NodeStatus]) -> Iterator[Alert]:
        sizes = [record.bytes for record in self.metrics.checkpoints if record.bytes]
        needed = max(LEAST_FREE_GIB, SAVES_AHEAD * max(sizes, default=0.0) / 2**30)
        free = [value for node in nodes if node.row and (value := node.row.node.get("disk_free_gib")) is not None]
        if free and min(free) < needed:
            yield Alert("disk", f"{min(free):.1f} GiB are free where the run lies, {needed:.1f} GiB are needed")


class Watcher:
    """Looks at one run again and again; each look reads only what was written since the one before."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self._metrics, self._telemetry = MetricsReader(), TelemetryReader(path / TELEMETRY)

    def look(self, now: float | None = None) -> RunStatus:
        """The status now. Raises UserError where the folder is not a run."""
        moment = time.time() if now is None else now
        document = self.run.read()
        with contextlib.suppress(OSError):
            self._metrics.follow(self.run.metrics)
        nodes, metrics = self._telemetry.read(), self._metrics.result()
        return RunStatus(self.run, document, metrics, self._metrics.latest, nodes, moment)


def _apart(word: str, mine: float | None, values: list[float | None], unit: str, much: float) -> list[str]:
    """A value and the median of all, where they differ by more than a share."""
    known = [value for value in values if value is not None]
    usual = statistics.median(known) if known else 0.0
    if mine is None or len(known) < 2 or abs(mine - usual) <= much * abs(usual):
        return []
    return [f"{word} {mine:g} {unit}".rstrip() + f" (median {usual:g})"]


# --- the page, and the same for a terminal ----------------------------------------------------------------------------

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


# --- OpenMetrics -----------------------------------------------------------------------------------------------------


PREFIX = "clustertune"
_RUN = {
    "step": "Optimizer steps taken.", "steps": "Optimizer steps of the whole training.",
    "step_seconds": "Median seconds of the recent steps.", "planned_step_seconds": "Seconds of a step that the plan predicts.",
    "tokens_per_second": "Tokens per second over all ranks.", "mfu": "Model FLOPs utilisation, 0 to 1.",
    "loss": "Training loss, nats per token.", "grad_norm": "Gradient norm before clipping.",
    "eta_seconds": "Seconds to the last step.",
    "gpu_seconds": "GPU-seconds of all attempts.", "cost_usd": "US dollars of all attempts.",
    "energy_kwh": "kWh of all attempts.",
    "budget_used": "Share of the budget, 0 to 1.", "alerts": "Alerts that hold now.", "training": "1 while ranks train.",
}  # fmt: skip


def _values(status: RunStatus) -> Mapping[str, float | None]:
    cost, latest = status.cost.training, status.latest
    return {
        "step": status.step, "steps": status.steps, "step_seconds": status.step_s,
        "planned_step_seconds": status.planned_step_s, "tokens_per_second": status.tokens_per_s, "mfu": status.mfu,
        "loss": latest.get("loss"), "grad_norm": latest.get("grad_norm"),
        "eta_seconds": status.eta_s, "gpu_seconds": 3600 * (cost.gpu_hours or 0.0), "cost_usd": cost.usd,
        "energy_kwh": cost.kwh,
        "budget_used": status.budget_used, "alerts": len(status.alerts), "training": float(status.state == "training"),
    }  # fmt: skip


def _samples(status: RunStatus) -> Iterator[tuple[str, str, dict[str, str], float]]:
    """Name, help, labels and value; those of one name stand together."""
    run = {"recipe": status.recipe or "", "run": status.title}
    values = _values(status)
    for name, help_text in _RUN.items():
        if (value := values[name]) is not None:
            yield name, help_text, run, float(value)
    measured = [(node.name, node.row) for node in status.nodes if node.row]
    for column in COLUMNS:
        for host, row in measured:
            if (value := row.node.get(column)) is not None:
                yield f"node_{column}", f"Telemetry of a node: {column}.", {**run, "node": host}, float(value)
    for column in GPU_COLUMNS:
        for host, row in measured:
            for index, gpu in enumerate(row.gpus):
                if (value := gpu.get(column)) is not None:
                    labels = {**run, "node": host, "gpu": str(index)}
                    yield f"gpu_{column}", f"Telemetry of a GPU: {column}.", labels, float(value)


def openmetrics(status: RunStatus) -> str:
    """The whole file: gauges only, as each shows the present."""
    lines, before = [], ""
    for name, help_text, labels, value in _samples(status):
        full = f"{PREFIX}_{name}"
        if full != before:
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} gauge"]
            before = full
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{full}{{{shown}}} {value:.10g}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_openmetrics(path: Path, status: RunStatus) -> None:
    """Write all of the file, readable for the collector's user. Raises OSError, and UserError where another file is there."""
    require_replaceable(path, f"# HELP {PREFIX}_", "--openmetrics")
    write_durably(path, openmetrics(status), mode=0o644)
