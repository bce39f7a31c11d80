"""One status of a run, from its files alone: what the live page, ``watch``, ``runs``, the metrics file and the report show."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clustertune.evaluate import scores
from clustertune.launch.attempt import AttemptPlan, read_attempts
from clustertune.monitor.sampler import SLOWED
from clustertune.report import cost
from clustertune.report.content import get, recipe_of
from clustertune.report.metrics import TELEMETRY, Metrics, MetricsReader, NodeTelemetry, TelemetryReader, TelemetryRow
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
