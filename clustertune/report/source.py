"""``metrics.json`` of a finished run: the fields of the published FSDP validation, and the rate that it lacks.

The source (a 7B model on one node and on two) prints one JSON object per job. Its rate is the mean over all steps, the first
ones with their compilation and first connections among them: of its 4.7 s some 3.4 s are such. The steady rate beside it is
that of the median step behind the first :data:`clustertune.report.steps.WARM_UP`.

:func:`observe` gives a finished run as what ``plan --calibrate`` fits its factors to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertune.errors import UserError
from clustertune.launch.attempt import read_attempts
from clustertune.manifest import write_durably
from clustertune.plan.calibration import CalibratedCluster, Observation
from clustertune.plan.constants import Constants
from clustertune.plan.predict import make_plan
from clustertune.plan.schedule import Lengths
from clustertune.plan.strategy import strategy
from clustertune.recipe.native_rules import row_tokens
from clustertune.report.content import dataset_of, get, model_of, recipe_of
from clustertune.report.metrics import Metrics, read_metrics
from clustertune.report.steps import Steps
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir

FILE = "metrics.json"
FIELDS = (
    "wall_time_s", "approx_tokens_per_rank", "approx_tokens_per_s_per_rank", "world_size", "gpu0", "torch", "model", "dataset",
    "fsdp", "bf16",
)  # fmt: skip
"""The source's, in its order."""
STEADY = "steady_tokens_per_s_per_rank"


def counted_share(data_parallel_size: int | None, world_size: int | None) -> float:
    """What of the ranks' tokens counts: ranks of one tensor, context or pipeline parallel group work on the same sequences.

    1 where a document does not say how many ranks read different ones.
    """
    return data_parallel_size / world_size if data_parallel_size and world_size else 1.0


def tokens_per_step(resolved: Resolved) -> float:
    """A rank's part of the tokens of one step, as the source counts them: every sequence is as long as it may be.

    The world size times it is what all ranks get through; a group that shares its sequences shares their tokens.
    """
    args = resolved.train_args
    rows = int(args["per_device_train_batch_size"]) * int(args["gradient_accumulation_steps"])
    share = counted_share(resolved.data_parallel_size, resolved.world_size)
    return share * rows * int((row_tokens(args) if resolved.is_grpo else args["max_length"]) or 0)


def nodes_of(folder: Path, run: Mapping[str, Any]) -> int | None:
    """Nodes that the newest attempt at training had; None where nothing says.

    ``allocation`` in run.json is that of the last job of all, which for a submitted chain is the report's, of one node.
    """
    for attempt in reversed(read_attempts(folder)):
        return len(attempt.plan.nodes)
    return len(get(run, "allocation", "nodes") or ()) or None


def describe(run: Mapping[str, Any], metrics: Metrics) -> dict[str, Any] | None:
    """The object; None for a run without a timed step."""
    wall = math.fsum(n * seconds for _, n, seconds in metrics.steps.timed())
    count = sum(n for _, n, _ in metrics.steps.timed())
    if not count:
        return None
    resolved = recipe_of(run)
    per_step = tokens_per_step(resolved) if resolved is not None else 0.0
    steady = metrics.steps.step_seconds()
    distributed = run.get("distributed")
    worlds = [a.world_size for a in metrics.attempts if a.world_size]
    tokens = per_step * count
    return {
        "wall_time_s": wall,
        "approx_tokens_per_rank": round(tokens),
        "approx_tokens_per_s_per_rank": round(tokens / wall, 2),
        "world_size": worlds[-1] if worlds else resolved and resolved.world_size,
        "gpu0": get(distributed, "gpu0"),
        "torch": get(distributed, "torch") or get(run, "versions", "torch"),
        "model": model_of(resolved),
        "dataset": dataset_of(resolved),
        "fsdp": get(distributed, "type") == "FSDP",
        "bf16": resolved is not None and resolved.distribution.mixed_precision == "bf16",
        STEADY: round(per_step / steady, 2) if steady else None,
    }


def write(run: Mapping[str, Any], folder: Path) -> Path | None:
    """Write ``metrics.json`` into a run folder; nothing for a run without a timed step. Raises OSError."""
    body = describe(run, read_metrics(folder / "metrics.jsonl"))
    if body is None:
        return None
    write_durably(folder / FILE, json.dumps(body, indent=1) + "\n")
    return folder / FILE


# --- for plan --calibrate ---------------------------------------------------------------------------------------------


def observe(calibrated: CalibratedCluster, folder: Path, lengths: Lengths | None) -> Observation:
    """A run folder as an observation: the median step behind the first ones, and the peak of memory."""
    run = RunDir(folder)
    resolved = run.resolved()
    steps = read_metrics(run.metrics).steps
    seconds = steps.step_seconds()
    if seconds is None or len(list(steps.steady())) < 3:
        text = f"has {len(list(steps.timed()))} timed steps; 5 are needed, 20 suffice"
        raise UserError(text, file=str(run.metrics), key="step", fix="let the run continue, or give another")
    peaks = [peak for peak in steps.known("memory_bytes") if peak]
    where = calibrated.machine(resolved.recipe.slurm.nodes)
    lengths = lengths or _lengths_seen(resolved, steps)

    def predict(constants: Constants) -> tuple[float, float]:
        made = make_plan(resolved, where, constants, lengths=lengths, sure=False)
        return made.step.seconds, made.peak.bytes

    return Observation(folder.name, seconds, max(peaks) if peaks else None, predict)


def _lengths_seen(resolved: Resolved, steps: Steps) -> Lengths | None:
    """The mean length of a padded run's conversations, from the tokens that it counted: else its factor of computing would hold
    the padding that a plan assumes where nothing is known."""
    last = next((s for s in reversed(steps) if s.tokens and s.step), None)
    if strategy(resolved).packing or last is None:
        return None
    rows = last.step * resolved.global_batch_size
    return Lengths((max(1, round((last.tokens or 0) / rows)),), "tokens of metrics.jsonl")
