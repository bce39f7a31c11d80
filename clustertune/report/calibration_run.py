"""A finished run as what ``plan --calibrate`` fits its factors to."""

from __future__ import annotations

from pathlib import Path

from clustertune.errors import UserError
from clustertune.plan.calibration import CalibratedCluster, Observation
from clustertune.plan.constants import Constants
from clustertune.plan.predict import make_plan
from clustertune.plan.schedule import Lengths
from clustertune.plan.strategy import strategy
from clustertune.report import metrics
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import RunDir


def observe(calibrated: CalibratedCluster, folder: Path, lengths: Lengths | None) -> Observation:
    """A run folder as an observation: the median step behind the first ones, and the peak of memory."""

    run = RunDir(folder)
    resolved = run.resolved()
    steps = metrics.read_metrics(run.metrics).steps
    seconds = steps.step_seconds()
    if seconds is None or len(steps.steady()) < 3:
        text = f"has {len(list(steps.timed()))} timed steps; 5 are needed, 20 suffice"
        raise UserError(text, file=str(run.metrics), key="step", fix="let the run continue, or give another")
    peaks = [s.memory_bytes for s in steps if s.memory_bytes]
    where = calibrated.machine(resolved.recipe.slurm.nodes)
    lengths = lengths or _lengths_seen(resolved, steps)

    def predict(constants: Constants) -> tuple[float, float]:
        made = make_plan(resolved, where, constants, lengths=lengths, sure=False)
        return made.step.seconds, made.peak.bytes

    return Observation(folder.name, seconds, max(peaks) if peaks else None, predict)


def _lengths_seen(resolved: Resolved, steps: list[metrics.StepRecord]) -> Lengths | None:
    """The mean length of a padded run's conversations, from the tokens that it counted: else its factor of computing would hold
    the padding that a plan assumes where nothing is known."""
    counted = [s for s in steps if s.tokens and s.step]
    if strategy(resolved).packing or not counted:
        return None
    last = max(counted, key=lambda s: s.step)
    rows = last.step * resolved.global_batch_size
    return Lengths((max(1, round((last.tokens or 0) / rows)),), "tokens of metrics.jsonl")
