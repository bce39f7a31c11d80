"""A cluster as the planner meets it: its file, what was measured on it, and what its runs taught."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.config.cluster_schema import Cluster
from clustertune.config.resolved import Resolved
from clustertune.errors import UserError
from clustertune.plan import calibration
from clustertune.plan.constants import Constants
from clustertune.plan.document import as_json
from clustertune.plan.machine import PlanMachine, machine
from clustertune.plan.measured import MeasuredLinks, beside, find_measured, read_measured
from clustertune.plan.predict import make_plan

CALIBRATION = ".calibration.json"


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
    kept = beside(cluster, CALIBRATION)
    constants = calibration.read(kept, cluster=cluster.name) if kept is not None and kept.is_file() else Constants()
    return CalibratedCluster(cluster, measured, kept, constants)


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
    planned = as_json(plan, None)
    keys = ("step_s", "step_s_range", "tokens_per_s", "peak_gib_per_gpu", "hours", "bandwidth_source", "calibrated")
    return {key: planned[key] for key in keys}
