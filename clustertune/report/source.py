"""``metrics.json`` of a finished run: the fields of the published FSDP validation, and the rate that it lacks.

The source (a 7B model on one node and on two) prints one JSON object per job. Its rate is the mean over all steps, the first
ones with their compilation and first connections among them: of its 4.7 s some 3.4 s are such. The steady rate beside it is
that of the median step behind the first :data:`clustertune.report.content.WARM_UP`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.manifest import write_durably
from clustertune.report.content import WARM_UP, get
from clustertune.report.metrics import Metrics, StepRecord, read_metrics

FILE = "metrics.json"
FIELDS = (
    "wall_time_s",
    "approx_tokens_per_rank",
    "approx_tokens_per_s_per_rank",
    "world_size",
    "gpu0",
    "torch",
    "model",
    "dataset",
    "fsdp",
    "bf16",
)
"""The source's, in its order."""
STEADY = "steady_tokens_per_s_per_rank"


def seconds_of(steps: list[StepRecord]) -> list[tuple[int, float]]:
    """For each logged stretch how many steps it is and seconds of one of them; what has no time is left out."""
    found, before = [], 0
    for record in steps:
        taken, before = record.step - before, record.step
        if record.seconds is not None and math.isfinite(record.seconds) and record.seconds > 0 and taken > 0:
            found.append((taken, record.seconds))
    return found


def steady_step(steps: list[StepRecord]) -> float | None:
    """Seconds of the median step behind the warm-up; None where there is no such step."""
    times = [s.seconds for s in steps if s.step > WARM_UP and s.seconds and math.isfinite(s.seconds) and s.seconds > 0]
    return statistics.median(times) if times else None


def tokens_per_step(resolved: Mapping[str, Any]) -> float:
    """Tokens of one step on one rank as the source counts them: every sequence is as long as it may be."""
    args = get(resolved, "train_args") or {}
    rows = int(args.get("per_device_train_batch_size") or 8) * int(args.get("gradient_accumulation_steps") or 1)
    return float(rows * int(args.get("max_length") or 1024))


def describe(run: Mapping[str, Any], metrics: Metrics) -> dict[str, Any] | None:
    """The object; None for a run without a timed step."""
    timed = seconds_of(metrics.steps)
    if not timed:
        return None
    resolved = run.get("recipe") or {}
    per_step = tokens_per_step(resolved)
    wall, count = math.fsum(n * s for n, s in timed), sum(n for n, _ in timed)
    steady = steady_step(metrics.steps)
    told = run.get("distributed") or {}
    worlds = [a.world_size for a in metrics.attempts if a.world_size]
    tokens = per_step * count
    return {
        "wall_time_s": wall,
        "approx_tokens_per_rank": round(tokens),
        "approx_tokens_per_s_per_rank": round(tokens / wall, 2),
        "world_size": worlds[-1] if worlds else get(resolved, "world_size"),
        "gpu0": told.get("gpu0"),
        "torch": told.get("torch") or get(run, "versions", "torch"),
        "model": get(resolved, "recipe", "model", "name"),
        "dataset": get(resolved, "recipe", "data", "name"),
        "fsdp": told.get("type") == "FSDP",
        "bf16": bool(get(resolved, "train_args", "bf16")),
        STEADY: round(per_step / steady, 2) if steady else None,
    }


def write(run: Mapping[str, Any], folder: Path) -> Path | None:
    """Write ``metrics.json`` into a run folder; nothing for a run without a timed step. Raises OSError."""
    body = describe(run, read_metrics(folder / "metrics.jsonl"))
    if body is None:
        return None
    write_durably(folder / FILE, json.dumps(body, indent=1) + "\n")
    return folder / FILE
