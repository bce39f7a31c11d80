"""A run folder as 64 GPUs would leave it: the project's own writers, with figures that were made up."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.monitor import sampler
from clustertune.monitor.sampler import TelemetryWriter
from clustertune.report.metrics import TELEMETRY, TelemetryRow
from clustertune.resolve.resolve import resolve
from clustertune.rundir import RunDir

GPU = "NVIDIA H100 80GB HBM3"


def make(
    path: Path, now: float, *, nodes: int = 2, gpus: int = 8, steps: int = 200, slow: int | None = None,
    lost: int | None = None, restart: bool = True, overrides: tuple[str, ...] = (), recipe: str = "llama8b-lima",
) -> RunDir:  # fmt: skip
    """A run that has taken ``steps`` steps of 1,000, one a second. ``slow``: a rank; ``lost``: a GPU of node 0."""
    run, world = RunDir(path), nodes * gpus
    path.mkdir(parents=True)
    resolved = resolve(recipe, list(overrides), ranks=world)
    document = {
        "description": 1,
        "recipe": resolved.as_dict(),
        "fingerprint": resolved.fingerprint(),
        "created": now - steps - 100,
        "distributed": {"gpu0": GPU, "steps": 1000, "world_size": world},
        "forecast": {"step_s": 0.95, "step_s_range": [0.85, 1.08], "tokens_per_s": 52000.0, "hours": 0.31},
    }
    run.run_json.write_text(json.dumps(document))
    begun, half = now - steps - 30, steps // 2
    attempts = [(1, begun, 0, half + 5), (2, now - half - 10, half, steps)] if restart else [(1, begun, 0, steps)]
    events: list[dict[str, Any]] = []
    for number, start, first, last in attempts:
        folder = run.attempt(number)
        folder.mkdir(parents=True)
        names = tuple(Node(f"node{index}", f"node{index}") for index in range(nodes))
        AttemptPlan(number, names, gpus, launcher="slurm", begun=start).write(folder)
        at = now - steps + first
        events.append({"event": "start", "time": at, "attempt": number, "step": first, "world_size": world})
        events += _steps(number, range(first + 1, last + 1), now - steps, slow)
        if number == 1 and restart:
            body = {"code": 75, "problems": [{"message": "rank 3 on node0 was killed"}], "time": now - half - 20}
            (folder / "outcome.json").write_text(json.dumps(body))
        else:
            sign = folder / "rank-0.heartbeat"
            sign.write_text("9 train 9")
            os.utime(sign, (now, now))
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / TELEMETRY).mkdir()
    for index in range(nodes):
        _sample(path / TELEMETRY, index, attempts[-1][0], now, gpus, slow, lost if index == 0 else None)
    return run


def _steps(attempt: int, numbers: range, zero: float, slow: int | None) -> Iterator[dict[str, Any]]:
    draw = random.Random(attempt)
    for step in numbers:
        common = {"time": zero + step, "attempt": attempt, "step": step}
        seconds = 0.98 + 0.1 * draw.random()
        found = {**common, "event": "step", "loss": 1.1 + math.exp(-step / 60) + 0.05 * draw.random(), "tokens": step * 49000}
        found |= {"learning_rate": 2e-5 * (1 - step / 1000), "grad_norm": 0.6 + 0.2 * draw.random(), "memory_bytes": 61 << 30}
        found |= {"seconds": seconds, "tokens_per_second": 49000 / seconds, "mfu": 0.4 + 0.02 * draw.random(), "hfu": 0.5}
        found |= {"data_seconds": 0.004, "forward_backward_seconds": 0.91, "optimizer_seconds": 0.05}
        found |= {"padding": 0.021, "imbalance": 1.04}
        yield found | ({"stragglers": {str(slow): 1.31}} if slow is not None else {})
        if step % 50 == 0:
            yield {**common, "event": "checkpoint", "bytes": 1 << 30, "status": "saved"}


def _sample(folder: Path, index: int, attempt: int, now: float, gpus: int, slow: int | None, lost: int | None) -> None:
    """Five minutes of one node: 700 W of each GPU by its counter."""
    head = {"host": f"node{index}", "node": index, "gpus": [GPU] * gpus, "energy": "counter"}
    writer = TelemetryWriter(folder, f"node{index}", head)
    for ago in range(300, -1, -10):
        values = []
        for gpu in range(gpus):
            cold = index * gpus + gpu == slow
            figures = [88 + gpu, 61.4, 690 - 4 * gpu, 61 + gpu, 1410 if cold else 1980, 32 if cold else 4, 0]
            figures += [None, 700.0 * (300 - ago)]
            row = dict(zip(sampler.GPU_COLUMNS, figures, strict=True))
            values.append(dict.fromkeys(row) if gpu == lost else row)
        node = dict(zip(sampler.COLUMNS, [0.21, 9.3, 310.5, 91234.5, 0.4], strict=True))
        problems = {str(lost): "GPU is lost"} if lost is not None else {}
        writer.add(TelemetryRow(now - ago, attempt, node, tuple(values), problems))
