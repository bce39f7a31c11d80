"""One recipe on several clusters: where it fits, how long it takes there, and what the whole run costs."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clustertune.cluster.load import known_clusters, load_cluster, of_gpus
from clustertune.cluster.schema import Cluster
from clustertune.errors import UserError
from clustertune.host.system import GIB, ask
from clustertune.launch import serving, shape
from clustertune.launch.bill import Bill, bill
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.explanation import bottleneck
from clustertune.plan.predict import Plan, make_plan
from clustertune.plan.schedule import Lengths
from clustertune.resolve.resolve import asked_size, resolve

ALL = "all"
STARTS = re.compile(r"to start at (\S+)")
"""In what ``sbatch --test-only`` prints (slurm 22.05 to 25.05, src/sbatch/sbatch.c)."""
SBATCH_SECONDS = 20.0


@dataclass(frozen=True)
class Choice:
    """The recipe on one cluster."""

    cluster: Cluster
    nodes: int
    gpus_per_node: int
    plan: Plan | None = None
    whole: Bill | None = None
    evaluation: serving.Evaluation | None = None
    why_not: str = ""
    """What keeps it from running there; empty: nothing."""
    start: str | None = None
    """When Slurm would start the training; None: not asked, or it did not say."""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: no hours of what does not fit."""
        plan, whole = (self.plan, self.whole) if self.fits else (None, None)
        return {
            "cluster": self.cluster.name,
            "gpu": self.cluster.compute.gpu,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "fits": self.fits,
            "why_not": self.why_not,
            "needed_gib_per_gpu": self.plan.needed / GIB if self.plan else None,
            "step_s": plan.step.seconds if plan else None,
            "hours": plan.hours if plan else None,
            "total": whole.as_json() if whole else None,
            "bottleneck": bottleneck(plan) if plan else None,
            "evaluation": self.evaluation.as_json() if self.evaluation and plan else None,
            "expected_start": self.start,
        }


COLUMNS = (
    "cluster",
    "GPUs",
    "fits",
    "h training",
    "h in all",
    "GPU-hours",
    "on demand",
    "spot",
    "evaluation",
    "start or limit",
)


def page_columns() -> list[str]:
    """The columns of a page, where ``#`` marks numbers."""
    return [f"#{name}" if 3 <= number <= 7 else name for number, name in enumerate(COLUMNS)]


def cells(found: Iterable[Choice]) -> list[list[str]]:
    """The rows of a table with :data:`COLUMNS`."""
    rows = []
    for one in found:
        size = f"{one.nodes} x {one.gpus_per_node} {one.cluster.compute.gpu or ''}".strip() if one.nodes else "-"
        if not (one.plan and one.whole and one.fits):
            rows.append([one.cluster.name, size, "no", *[""] * 6, one.why_not])
            continue
        cost, wall = one.whole.cost or {}, one.whole.wall
        money = [
            f"{cost[kind]:,.2f} {cost['currency']}" if cost.get(kind) is not None else "" for kind in ("on_demand", "spot")
        ]
        hours = [None if one.plan.hours is None else one.plan.hours, wall and wall / 3600, one.whole.gpu_hours]
        shown = ["unknown" if value is None else f"{value:,.2f}" for value in hours]
        backend = one.evaluation.backend if one.evaluation else ""
        limit = bottleneck(one.plan).partition(":")[0] + (f"; starts {one.start}" if one.start else "")
        rows.append([one.cluster.name, size, "yes", *shown, *money, backend, limit])
    return rows


def clusters(words: str, gpus: str | None) -> list[Cluster]:
    """The clusters of a list with commas, or of ``all``: those of ops/clusters; and that of ``--gpus``. Raises UserError."""
    names = list(known_clusters()) if words == ALL else [word.strip() for word in words.split(",") if word.strip()]
    found = [load_cluster(name) for name in dict.fromkeys(names)]
    return [*found, of_gpus(gpus)] if gpus else found


def choices(recipe: str, overrides: Sequence[str], where: Iterable[Cluster], *, lengths: Lengths | None = None) -> list[Choice]:
    """The recipe on each cluster with as many GPUs as it asks for, over as many nodes as they are there; the cheapest first.

    A cluster that does not fit, or on which the recipe cannot be planned, comes last with the reason.
    """
    found = [_choice(recipe, overrides, cluster, lengths) for cluster in where]
    return sorted(found, key=lambda one: (not one.fits, _price(one), one.plan.hours or 0.0 if one.plan else 0.0))


def _price(one: Choice) -> float:
    known = one.whole.money(one.whole.training) if one.whole else None
    return math.inf if known is None else known


def _choice(recipe: str, overrides: Sequence[str], cluster: Cluster, lengths: Lengths | None) -> Choice:
    asked = asked_size(recipe, overrides)
    world, there = asked["slurm.nodes"] * asked["slurm.gpus_per_node"], cluster.compute.gpus
    if not there:
        return Choice(cluster, 0, 0, why_not="it has no GPUs")
    each = min(there, world)
    nodes = math.ceil(world / each)
    if nodes > len(cluster.compute_nodes):
        why = f"{world} GPUs are {nodes} of its nodes, it has {len(cluster.compute_nodes)}"
        return Choice(cluster, nodes, each, why_not=why)
    try:
        resolved = resolve(recipe, [*overrides, f"slurm.nodes={nodes}", f"slurm.gpus_per_node={each}"])
        calibrated = find_calibrated(cluster)
        plan = make_plan(resolved, calibrated.machine(nodes), calibrated.constants, lengths=lengths)
    except UserError as error:
        return Choice(cluster, nodes, each, why_not=error.problems[0].message)
    scored = serving.evaluation(resolved, cluster)
    if not plan.fits:
        why = f"needs {plan.needed / GIB:.1f} of {plan.machine.usable_bytes / GIB:.1f} GiB a GPU"
        if plan.needed <= plan.machine.usable_bytes:
            why = f"needs {plan.host_bytes / GIB:,.0f} of {plan.machine.host_bytes / GIB:,.0f} GiB of a node's RAM"
        return Choice(cluster, nodes, each, plan, None, scored, why)
    start = _start(shape.train_shape(resolved, cluster), cluster)
    return Choice(cluster, nodes, each, plan, bill(plan, cluster), scored, start=start)


def _start(job: shape.JobShape, cluster: Cluster) -> str | None:
    """When Slurm would start such a job, where this machine's Slurm is the cluster's."""
    if cluster.slurm is None or shutil.which("sbatch") is None or not _is_here(cluster):
        return None
    # It answers on stderr, also where all is well.
    command = ["sh", "-c", 'exec "$@" 2>&1', "sh", "sbatch", "--test-only", *job.options(), "--wrap=true"]
    found = STARTS.search(ask(command, SBATCH_SECONDS).text)
    return found[1] if found else None


def _is_here(cluster: Cluster) -> bool:
    try:
        return load_cluster(None).name == cluster.name
    except UserError:
        return False
