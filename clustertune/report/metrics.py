"""Reading ``metrics.jsonl``: one event a line, from several attempts at one run, perhaps cut off anywhere.

And ``telemetry/`` of a run folder, which :mod:`clustertune.monitor.sampler` writes and describes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from clustertune.manifest import open_to_read
from clustertune.report.steps import FIGURES, LARGEST, StepRecord, Steps


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation on the eval split; step 0 is before training."""

    step: int
    attempt: int
    eval_loss: float | None = None
    eval_token_accuracy: float | None = None
    seconds: float | None = None
    eval_reward_accuracy: float | None = None
    eval_reward_margin: float | None = None
    eval_reward: float | None = None
    """Of the held-out prompts."""
    eval_reward_difference: float | None = None
    """To the first evaluation, prompt by prompt."""
    eval_reward_difference_error: float | None = None
    """Its standard error."""
    eval_completion_length: float | None = None


@dataclass(frozen=True)
class ScoresRecord:
    """Scores of a checkpoint, taken while the training was under way, beside the base's."""

    step: int
    attempt: int
    time: float | None
    """Unix seconds."""
    tasks: dict[str, float | None]
    """The headline of each task."""
    differences: dict[str, float | None]
    """To the base on the same documents; positive is better."""
    difference: float | None
    """Their mean."""
    seconds: float | None
    """That they took."""
    beside: bool
    """The training went on meanwhile."""

    def base(self, task: str) -> float | None:
        """The base's score on the same documents."""
        value, difference = self.tasks.get(task), self.differences.get(task)
        return None if value is None or difference is None else value - difference


@dataclass(frozen=True)
class AnswerRecord:
    """An answer to a held-out prompt."""

    step: int
    prompt: str
    answer: str
    rewards: dict[str, float | None]


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint that was saved, on shared storage (``saved``) or on the nodes' own disks (``local``), or ``removed``."""

    step: int
    attempt: int
    status: str
    path: str | None = None
    bytes: float | None = None
    seconds: float | None = None
    time: float | None = None
    """Unix seconds."""
    stall: float | None = None
    """Seconds that training stood still."""
    write: float | None = None
    every: float | None = None
    """Seconds from here to the next save, where saves come by time."""


@dataclass(frozen=True)
class StageRecord:
    """The newest state of a stage: ``started``, ``done``, ``failed`` or ``reused``."""

    stage: str
    status: str
    seconds: float | None = None
    """Of all its tries that ended, failed ones included."""
    tries: int = 1
    spans: tuple[tuple[float, float | None], ...] = ()
    """When each try began and ended, Unix seconds; None: it was killed, or still runs."""


@dataclass(frozen=True)
class StartupRecord:
    """Where one attempt's time went until its first step was done."""

    attempt: int
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part, in the order in which they were recorded."""
    seconds: float | None = None
    """Of all parts; None where the line of the sum is missing."""
    read_bytes: float | None = None
    """Of the weights, by all ranks."""
    host_bytes: float | None = None
    """Peak resident memory, the largest of all ranks."""


@dataclass(frozen=True)
class AttemptMetrics:
    """One start of the training."""

    attempt: int
    start_step: int | None = None
    """The step it resumed from; 0 from the base model."""
    last_step: int | None = None
    """The last step it logged."""
    world_size: int | None = None
    reason: str | None = None
    exit_code: int | None = None
    """None: it was killed, or still runs."""
    repeated: int = 0
    """Steps of earlier attempts that it had to do again."""
    lost_seconds: float = 0.0
    """Of its own training, spent on steps that a later attempt had to do again."""
    begun: float | None = None
    """When its training began, Unix seconds."""
    ended: float | None = None


@dataclass(frozen=True)
class Metrics:
    """The course of a run as it counts: for each step the record of the last attempt that took it."""

    steps: Steps = field(default_factory=Steps)
    """By step."""
    evals: list[EvalRecord] = field(default_factory=list)
    """By step."""
    scores: list[ScoresRecord] = field(default_factory=list)
    """By step."""
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    """In file order, removals included."""
    stages: list[StageRecord] = field(default_factory=list)
    """By first appearance."""
    attempts: list[AttemptMetrics] = field(default_factory=list)
    """By number."""
    startups: list[StartupRecord] = field(default_factory=list)
    """By number of the attempt."""
    answers: list[AnswerRecord] = field(default_factory=list)
    """Of the newest evaluation on held-out prompts."""
    alarm: str | None = None
    """The newest one."""
    alarm_kind: str | None = None
    """``reward``: the reward of training rose, that of the held-out prompts did not; ``no_gradient``: steps taught nothing."""
    unreadable_lines: int = 0
    """Lines that are not events: torn by a crash, or not JSON."""


def read_metrics(path: Path) -> Metrics:
    """Read a metrics file; a missing one is an empty run. Unknown events and keys are skipped.

    Where an attempt resumes from step S, what earlier attempts logged after S has been thrown away and is left out here,
    whether or not the new attempt has come as far again, and wherever in the file it stands: the last lines of an attempt
    on a node that was cut off may come after the first ones of the next. Raises OSError where the file cannot be read.
    """
    reader = MetricsReader()
    if path.exists():
        reader.take(reader.follow(path))
    return reader.result()


class MetricsReader:
    """Collects events in file order. :meth:`follow` may be called again while the file grows."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.evals: dict[int, EvalRecord] = {}
        self.scores: dict[int, ScoresRecord] = {}
        self.checkpoints: list[CheckpointRecord] = []
        self.stages: dict[str, StageRecord] = {}
        self.attempts: dict[int, dict[str, Any]] = {}
        self.startups: dict[int, StartupRecord] = {}
        self.unreadable = 0
        self.latest: dict[str, Any] = {}
        """The last step's event, with all that it holds."""
        self._place = 0
        self.answers: list[AnswerRecord] = []
        self.alarm: str | None = None
        self.alarm_kind: str | None = None

    def follow(self, path: Path) -> bytes:
        """Take the whole lines that came since the call before; returns what follows them. Raises OSError."""
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "is not a plain file", str(path))
        with open_to_read(path) as lines:
            lines.seek(self._place)
            for line in lines:
                if not line.endswith(b"\n"):
                    return line
                self.take(line)
                self._place += len(line)
        return b""

    def take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            event = json.loads(line.decode())  # of bytes, json would look for the encoding first
            name = event["event"]
            handle = self._HANDLERS.get(name) if isinstance(name, str) else None
            if handle is not None:
                handle(self, event)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self.unreadable += 1

    def result(self) -> Metrics:
        return Metrics(
            steps=self.steps,
            evals=[self.evals[step] for step in sorted(self.evals)],
            scores=[self.scores[step] for step in sorted(self.scores)],
            checkpoints=self.checkpoints,
            stages=list(self.stages.values()),
            attempts=[AttemptMetrics(number, **self.attempts[number]) for number in sorted(self.attempts)],
            startups=[self.startups[number] for number in sorted(self.startups)],
            answers=self.answers,
            alarm=self.alarm,
            alarm_kind=self.alarm_kind,
            unreadable_lines=self.unreadable,
        )

    def _attempt(self, event: dict[str, Any]) -> dict[str, Any]:
        return self.attempts.setdefault(_whole(event.get("attempt", 1)), {})

    def _on_start(self, event: dict[str, Any]) -> None:
        start, number = _whole(event["step"]), _whole(event.get("attempt", 1))
        attempt = self._attempt(event)
        world, begun = _maybe_whole(event.get("world_size")), _number(event.get("time"))
        before, behind = self.steps.ends(start)
        repeated = self.steps.drop(start, number) - start
        attempt.update(start_step=start, world_size=world, repeated=repeated, begun=begun)
        for one, ended in behind.items():
            if one > number:
                continue
            of_one = self.attempts.setdefault(one, {})
            since = of_one.get("begun") if before.get(one) is None else before[one]
            if ended is not None and since is not None:
                of_one["lost_seconds"] = of_one.get("lost_seconds", 0.0) + max(0.0, ended - since)
        for records in (self.evals, self.scores):
            for step in [step for step, record in records.items() if step > start and record.attempt <= number]:
                del records[step]

    def _counts(self, step: int, number: int, before: int | None) -> bool:
        """No later attempt has this step, or resumes from before it. ``before``: the attempt whose record there is."""
        if before is not None and before > number:
            return False
        starts = (a.get("start_step") for later, a in self.attempts.items() if later > number)
        return not any(s is not None and s < step for s in starts)

    def _on_step(self, event: dict[str, Any]) -> None:
        step, number = _whole(event["step"]), _whole(event.get("attempt", 1))
        self.attempts.setdefault(number, {})["last_step"], self.latest = step, event
        if len(self.attempts) == 1 or self._counts(step, number, self.steps.attempt_of(step)):
            values = (value if type(value) is float else _number(value) for value in map(event.get, FIGURES))
            self.steps.put(StepRecord(step, number, *values))

    def _on_eval(self, event: dict[str, Any]) -> None:
        step = _whole(event["step"])
        names, number = [item.name for item in fields(EvalRecord)][2:], _whole(event.get("attempt", 1))
        if self._counts(step, number, self.evals[step].attempt if step in self.evals else None):
            self.evals[step] = EvalRecord(step, number, **{n: _number(event.get(n)) for n in names})

    def _on_scores(self, event: dict[str, Any]) -> None:
        step, number = _whole(event["step"]), _whole(event.get("attempt", 1))
        difference, seconds = (_number(event.get(name)) for name in ("difference", "seconds"))
        tasks, differences = (_named(event.get(name)) for name in ("tasks", "differences"))
        if self._counts(step, number, self.scores[step].attempt if step in self.scores else None):
            time = _number(event.get("time"))
            self.scores[step] = ScoresRecord(
                step, number, time, tasks, differences, difference, seconds, event.get("beside") is True
            )

    def _on_answer(self, event: dict[str, Any]) -> None:
        step, named = _whole(event["step"]), _named(event.get("rewards"))
        before = [record for record in self.answers if record.step == step]
        self.answers = [*before, AnswerRecord(step, str(event["prompt"]), str(event["answer"]), named)]

    def _on_alarm(self, event: dict[str, Any]) -> None:
        self.alarm = f"step {_whole(event['step'])}: {event['message']}"
        self.alarm_kind = str(event.get("kind") or "reward")

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        path = event.get("path")
        self.checkpoints.append(
            CheckpointRecord(
                _whole(event["step"]),
                _whole(event.get("attempt", 1)),
                str(event.get("status", "saved")),
                path if isinstance(path, str) else None,
                _number(event.get("bytes")),
                _number(event.get("seconds")),
                _number(event.get("time")),
                *(_number(event.get(f"save_{name}_s")) for name in ("stall", "write", "every")),
            )
        )

    def _on_startup(self, event: dict[str, Any]) -> None:
        number, part, seconds = _whole(event.get("attempt", 1)), str(event["part"]), _number(event["seconds"])
        before = self.startups.get(number, StartupRecord(number))
        if part != "total":
            self.startups[number] = replace(before, parts={**before.parts, part: seconds or 0.0})
            return
        read, held = (_numbers(event.get(name)) for name in ("read_bytes", "host_bytes"))
        self.startups[number] = replace(
            before, seconds=seconds, read_bytes=sum(read) if read else None, host_bytes=max(held, default=None)
        )

    def _on_stage(self, event: dict[str, Any]) -> None:
        name, status = str(event["stage"]), str(event.get("status", "started"))
        before = self.stages.get(name, StageRecord(name, status, tries=0))
        seconds = _number(event.get("seconds"))
        total = before.seconds if seconds is None else (before.seconds or 0.0) + seconds
        spans, time = before.spans, _number(event.get("time"))
        if time is not None and status == "started":
            spans += ((time, None),)
        elif time is not None and spans:
            spans = (*spans[:-1], (spans[-1][0], time))
        self.stages[name] = StageRecord(name, status, total, max(before.tries + (status == "started"), 1), spans)

    def _on_stop(self, event: dict[str, Any]) -> None:
        reason = event.get("reason")
        self._attempt(event).update(
            reason=reason if isinstance(reason, str) else None,
            exit_code=_maybe_whole(event.get("exit_code")),
            ended=_number(event.get("time")),
        )

    # Functions, not methods of self: a reader that refers to itself, and a million steps, would stay until a collection.
    _HANDLERS: ClassVar[Mapping[str, Callable[[MetricsReader, dict[str, Any]], None]]] = {
        "start": _on_start, "step": _on_step, "eval": _on_eval, "scores": _on_scores, "answer": _on_answer, "alarm": _on_alarm,
        "checkpoint": _on_checkpoint, "startup": _on_startup, "stage": _on_stage, "stop": _on_stop,
    }  # fmt: skip


def _whole(value: Any) -> int:
    """A step or attempt number. Raises ValueError for anything else: the line is then unreadable."""
    if type(value) is int and 0 <= value <= LARGEST:  # nearly all: a million lines hold two each
        return value
    is_integer = isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # inf and nan are not
    if isinstance(value, bool) or not is_integer or not 0 <= value <= LARGEST:
        raise ValueError(f"{value!r} is not a step")
    return int(value)


def _maybe_whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _numbers(value: Any) -> list[float]:
    """The numbers of a list; none where it is not a list."""
    return [number for each in value if (number := _number(each)) is not None] if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _named(value: Any) -> dict[str, float | None]:
    """Numbers by name; none where it is not a mapping."""
    return {str(name): _number(number) for name, number in value.items()} if isinstance(value, dict) else {}


# --- telemetry --------------------------------------------------------------------------------------------------------

TELEMETRY = "telemetry"
Values = Mapping[str, float | None]


@dataclass(frozen=True)
class TelemetryRow:
    """What one node measured at one time."""

    time: float
    """Unix seconds of its end."""
    attempt: int
    """Negative: no attempt at training but the evaluation that began at that Unix second."""
    node: Values
    gpus: tuple[Values, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    """By GPU, or by what could not be read."""


@dataclass
class NodeTelemetry:
    """What a reader keeps of one node."""

    about: dict[str, Any] = field(default_factory=dict)
    last: TelemetryRow | None = None
    """Of a training."""
    joules: dict[int, float] = field(default_factory=dict)
    """By attempt, of all GPUs together."""


class History:
    """The course of all nodes together, minute by minute."""

    COLUMNS = ("utilisation", "memory_gib", "power_w", "cpu")
    """Of GPUs, and of nodes the last."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, tuple[float, int, float]]] = {}

    def add(self, row: TelemetryRow) -> None:
        """Take a row of any node, in any order."""
        if row.attempt < 0:
            return
        values = [(name, gpu.get(name)) for gpu in row.gpus for name in self.COLUMNS[:3]] + [("cpu", row.node.get("cpu"))]
        part = self._found.setdefault(int(row.time // 60), {})
        for name, value in values:
            if value is not None:
                total, count, most = part.get(name, (0.0, 0, value))
                part[name] = (total + value, count + 1, max(most, value))

    def column(self, name: str, *, most: bool = False) -> list[tuple[float, float]]:
        """Unix seconds of each minute's middle, and the mean of all GPUs (or nodes) in it, or the largest value."""
        return [
            (60 * (at + 0.5), part[name][2] if most else part[name][0] / part[name][1])
            for at, part in sorted(self._found.items())
            if name in part
        ]


class TelemetryReader:
    """Follows ``telemetry/``: each :meth:`read` takes what was appended since the one before, and keeps little of it."""

    def __init__(self, folder: Path, history: History | None = None) -> None:
        self.folder, self.history = folder, history
        self.nodes: dict[str, NodeTelemetry] = {}
        self._places: dict[Path, int] = {}
        """By file the byte that is read next."""

    def read(self) -> dict[str, NodeTelemetry]:
        """The nodes by the name of their files."""
        for path in sorted(self.folder.glob("*.jsonl")) if self.folder.is_dir() else ():
            with contextlib.suppress(OSError):
                self._follow(path)
        return self.nodes

    def _follow(self, path: Path) -> None:
        with open_to_read(path) as lines:
            lines.seek(self._places.get(path, 0))
            node = self.nodes.setdefault(path.stem, NodeTelemetry())
            for row in parse(lines, node.about):
                self._take(node, row)
            self._places[path] = lines.tell()

    def _take(self, node: NodeTelemetry, row: TelemetryRow) -> None:
        if self.history is not None:
            self.history.add(row)
        if row.attempt >= 0 and (node.last is None or row.time >= node.last.time):
            node.last = row
        known = [joules for gpu in row.gpus if (joules := gpu.get("energy_j")) is not None]
        if known:
            node.joules[row.attempt] = max(node.joules.get(row.attempt, 0.0), sum(known))


def parse(lines: Any, about: dict[str, Any]) -> Iterator[TelemetryRow]:
    """The rows of lines, each by the columns of the head before it; ``about`` takes the newest head."""
    for line in iter(lines.readline, b""):
        if not line.endswith(b"\n"):  # it is being written, or its writer was killed
            lines.seek(-len(line), os.SEEK_CUR)
            return
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            body = json.loads(line)
            if isinstance(body, dict):
                about.update(body)
            elif len(body) >= 4:
                columns = about["gpu_columns"]
                gpus = tuple(dict(zip(columns, gpu, strict=False)) for gpu in body[3])
                node = dict(zip(about["node_columns"], body[2], strict=False))
                yield TelemetryRow(float(body[0]), int(body[1]), node, gpus, body[4] if len(body) > 4 else {})
