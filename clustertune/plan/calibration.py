"""A cluster's own runs correct the planner: only the constants that they identify, in proportion to what they say about them.

Each constant is a factor with a prior around 1 (its usual error, :data:`PRIOR`). The factors that make the predictions of all
runs most likely are found together (maximum a posteriori, Gauss-Newton on logarithms). A factor whose standard deviation the
runs do not at least halve is not identified and stays 1: a run that waits for the network says nothing of the GPU's speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError, storage_error
from clustertune.host.system import GIB
from clustertune.manifest import read_whole, write_durably
from clustertune.plan.constants import Constants
from clustertune.plan.explanation import as_json
from clustertune.plan.machine import MeasuredLinks, PlanMachine, beside, find_measured, machine, read_measured
from clustertune.plan.predict import make_plan
from clustertune.recipe.sections import Number, Section
from clustertune.resolve.resolved import Resolved

SCHEMA: Literal["clustertune.calibration/1"] = "clustertune.calibration/1"
PRIOR = {"compute_scale": 0.12, "intra_scale": 0.20, "inter_scale": 0.50, "memory_scale": 0.10}
"""Standard deviation of each factor's logarithm before any run was seen."""
NOISE = 0.05
"""Standard deviation of the logarithm of a run's step time around the model with the cluster's true factors: 1 to 2 % are
from job to job, the rest is what the model leaves out. One run moves a factor by 85 % of what it says, several runs by
more."""
FAR = 3 * NOISE
"""Error after the fit beyond which a run is not explained by the factors."""
LEAST, MOST = 0.05, 20.0
"""Factors beyond these are a mistake: another cluster's run, or a wrong cluster file."""
IDENTIFIED = 0.5
"""A factor is identified where the runs leave less than this share of the prior's standard deviation."""


@dataclass(frozen=True)
class Observation:
    """One run: what was measured, and the model's answer for given constants."""

    name: str
    step_s: float
    """Measured seconds of an optimizer step: the median."""
    peak_bytes: float | None
    """Measured peak of allocated memory, the largest of all ranks."""
    predict: Callable[[Constants], tuple[float, float]]
    """Step seconds and peak bytes."""


class CalibratedRun(Section):
    """One run of a calibration: measured seconds of a step, and those that were predicted before and after it."""

    name: str
    measured_s: Number
    before_s: Number
    after_s: Number


@dataclass(frozen=True)
class Fit:
    """The constants that a set of runs gave."""

    values: dict[str, float]
    deviation: dict[str, float]
    """Standard deviation of each identified factor, as a share."""
    left: dict[str, float]
    """Factors that the runs do not identify, with the share of the prior that is left."""
    runs: tuple[CalibratedRun, ...]


def fit(runs: Sequence[Observation], start: Constants | None = None) -> Fit:
    """Fit the factors. Raises UserError where no cluster can have had them."""
    assert runs, "the command refuses a calibration without runs"
    base = start or Constants()
    names = [name for name in PRIOR if name != "memory_scale" or any(run.peak_bytes for run in runs)]
    _, deviation = solve(runs, base, names, PRIOR)
    known = [name for name in names if deviation[name] < IDENTIFIED * PRIOR[name]]
    values, sure = solve(runs, base, known, PRIOR)
    if wild := [name for name, value in values.items() if not _possible(value)]:
        text = f"would take a {wild[0]} of {values[wild[0]]:.3g}: they cannot have run as this cluster file says"
        fix = "give runs of this cluster, or fix its file"
        raise UserError(Problem(text, file=", ".join(run.name for run in runs), key="--calibrate", fix=fix))
    fitted = base.with_values(values)
    left = {name: deviation[name] / PRIOR[name] for name in names if name not in known}
    steps = [{"before_s": run.predict(base)[0], "after_s": run.predict(fitted)[0]} for run in runs]
    calibrated = (CalibratedRun(name=run.name, measured_s=run.step_s, **terms) for run, terms in zip(runs, steps, strict=True))
    return Fit(values, sure, left, tuple(calibrated))


def unexplained(fitted: Fit) -> dict[str, float]:
    """Runs that the factors leave far from what was measured, with the error: they contradict each other, or the model."""
    errors = {run.name: run.after_s / run.measured_s - 1 for run in fitted.runs}
    return {name: error for name, error in errors.items() if abs(error) > FAR}


def _possible(value: float) -> bool:
    return LEAST <= value <= MOST


def _residuals(runs: Sequence[Observation], constants: Constants) -> list[float]:
    """Logarithms of measured over predicted, in units of the noise."""
    residuals = []
    for run in runs:
        seconds, peak = run.predict(constants)
        residuals.append(math.log(run.step_s / seconds) / NOISE)
        if run.peak_bytes:
            residuals.append(math.log(run.peak_bytes / peak) / NOISE)
    return residuals


def solve(
    runs: Sequence[Observation], base: Constants, names: Sequence[str], prior: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """The most likely values of the named constants, and the standard deviations of their logarithms."""
    import numpy as np

    logs = np.zeros(len(names))
    if not names:
        return {}, {}
    weight = np.diag([1 / prior[name] ** 2 for name in names])

    def at(values: Any) -> Constants:
        return base.with_values({n: base.value(n) * math.exp(v) for n, v in zip(names, values, strict=True)})

    for _ in range(12):
        residuals = np.array(_residuals(runs, at(logs)))
        slope = np.zeros((len(residuals), len(names)))
        for index in range(len(names)):
            moved = logs.copy()
            moved[index] += 1e-3
            slope[:, index] = (residuals - np.array(_residuals(runs, at(moved)))) / 1e-3
        curvature = slope.T @ slope + weight
        change = np.linalg.solve(curvature, slope.T @ residuals - weight @ logs)
        logs = logs + np.clip(change, -0.5, 0.5)
        if float(np.abs(change).max()) < 1e-5:
            break
    deviation = np.sqrt(np.diag(np.linalg.inv(curvature)))
    values = {n: base.value(n) * math.exp(v) for n, v in zip(names, logs, strict=True)}
    return values, {n: float(d) for n, d in zip(names, deviation, strict=True)}


class CalibrationFile(Section):
    """What is stored beside the cluster file."""

    format: Literal["clustertune.calibration/1"]
    cluster: str
    date: str
    constants: dict[str, Number]
    deviation: dict[str, Number]
    runs: tuple[CalibratedRun, ...]


def store(path: Path, cluster: str, date: str, fitted: Fit) -> None:
    """Write the calibration; the whole file or nothing. Raises UserError (exit 73)."""
    factors = {"constants": fitted.values, "deviation": fitted.deviation}
    body = CalibrationFile(format=SCHEMA, cluster=cluster, date=date, **factors, runs=fitted.runs)
    try:
        write_durably(path, body.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise storage_error(error, "writing the calibration", path) from error


def read(path: Path, *, cluster: str | None = None) -> Constants:
    """The constants with a stored calibration laid over them. Raises UserError where the file is none, or not ``cluster``'s."""
    try:
        body = CalibrationFile.model_validate_json(read_whole(path))
    except OSError as error:
        raise storage_error(error, "cannot be read", path) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or None
        fix = "make it again: clustertune plan --calibrate RUN"
        raise UserError(Problem(f"is not a calibration: {first['msg']}", file=str(path), key=key, fix=fix)) from None
    if cluster is not None and body.cluster != cluster:
        text = f"{body.cluster}, while the plan is for {cluster}"
        raise UserError(Problem(text, file=str(path), key="cluster", fix="remove the file, or calibrate this cluster"))
    wrong = [name for name, value in body.constants.items() if name not in PRIOR or not _possible(value)]
    if wrong:
        fix = "make it again: clustertune plan --calibrate RUN"
        text = f"is not a factor of the planner, or out of {LEAST:g} to {MOST:g}"
        raise UserError([Problem(text, file=str(path), key=f"constants.{name}", fix=fix) for name in wrong])
    return replace(Constants().with_values(body.constants), calibrated=tuple(body.constants), deviation=body.deviation)


@dataclass(frozen=True)
class CalibratedCluster:
    """Where a plan is made for."""

    cluster: Cluster
    measured: MeasuredLinks | None
    calibration: Path | None
    """Where its calibration is or would be kept; None for a cluster that was found by looking."""
    constants: Constants

    def machine(self, nodes: int) -> PlanMachine:
        """The machine that a job of so many nodes gets."""
        return machine(self.cluster, measured=self.measured, nodes=nodes)


def find_calibrated(cluster: Cluster, nccl_check: Path | None = None) -> CalibratedCluster:
    """The cluster with the files beside its own. Raises UserError where one of them is wrong."""
    measured = read_measured(nccl_check) if nccl_check else find_measured(cluster)
    path = beside(cluster, ".calibration.json")
    constants = read(path, cluster=cluster.name) if path is not None and path.is_file() else Constants()
    return CalibratedCluster(cluster, measured, path, constants)


def forecast(resolved: Resolved, cluster: Cluster) -> dict[str, Any]:
    """What ``run.json`` keeps of the plan, so that the report can put it beside what happened.

    ``{"step_s", "step_s_range", "tokens_per_s", "peak_gib_per_gpu", "hours", "bandwidth_source", "calibrated"}``, or
    ``{"unknown": why}``: a run never fails for its forecast.
    """
    try:
        where = find_calibrated(cluster)
        plan = make_plan(resolved, where.machine(resolved.recipe.slurm.nodes), where.constants)
    except UserError as error:
        return {"unknown": str(error.problems[0])}
    planned = as_json(plan)
    keys = ("step_s", "step_s_range", "tokens_per_s", "peak_gib_per_gpu", "hours", "bandwidth_source", "calibrated")
    # What a GPU reports is the most it held, in training or evaluation.
    return {key: planned[key] for key in keys} | {"peak_gib_per_gpu": plan.peak.bytes / GIB}
