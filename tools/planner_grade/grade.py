"""The planner against published runs: predicted beside published, held out in four ways."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clustertune.plan.calibration import Observation, fit, solve
from clustertune.plan.constants import Constants
from clustertune.plan.predict import step_range
from tools.planner_grade.case import Case, case
from tools.planner_grade.data import PublishedRun, published_runs

CSV = "idris-csv"
REFITTED = {
    "gemm_share.hopper": 0.3, "gemm_share.blackwell": 0.3, "gemm_share.ampere": 0.3, "attention_share": 0.3,
    "compiled_hidden": 0.6, "eager_hidden": 0.6, "overlap_loss": 0.6,
}  # fmt: skip
"""Constants that are fitted again where a model is left out, with the width of their prior around what the tables alone would
say."""
NEUTRAL = {
    "gemm_share.hopper": 0.60, "gemm_share.blackwell": 0.60, "gemm_share.ampere": 0.60, "attention_share": 0.60,
    "compiled_hidden": 200.0, "eager_hidden": 400.0, "overlap_loss": 0.10,
}  # fmt: skip
"""Where such a fit starts: round values that no run of the set gave."""


@dataclass(frozen=True)
class GradeRow:
    """One prediction beside what was published."""

    run: PublishedRun
    predicted_s: float
    published_s: float
    predicted_gib: float | None
    published_gib: float | None
    range_s: tuple[float, float]
    """What a plan prints: four of five runs should lie in it."""
    note: str = ""

    @property
    def error(self) -> float:
        """Of the step time, as a share; positive: predicted too slow."""
        return self.predicted_s / self.published_s - 1

    @property
    def in_range(self) -> bool:
        return self.range_s[0] <= self.published_s <= self.range_s[1]

    @property
    def memory_error(self) -> float | None:
        if self.predicted_gib is None or self.published_gib is None:
            return None
        return self.predicted_gib / self.published_gib - 1


@dataclass(frozen=True)
class Flow:
    """One way of holding out."""

    name: str
    what: str
    rows: list[GradeRow]
    goal: float | None
    """Mean absolute error that is aimed at."""

    @property
    def counted(self) -> list[GradeRow]:
        return [row for row in self.rows if row.run.excluded is None]

    @property
    def mean(self) -> float:
        """Mean absolute error of the step time."""
        return statistics.fmean(abs(row.error) for row in self.counted)

    @property
    def worst(self) -> float:
        return max(abs(row.error) for row in self.counted)

    @property
    def memory_mean(self) -> float | None:
        """The same of the memory; None where no peak was published."""
        found = [abs(error) for row in self.counted if (error := row.memory_error) is not None]
        return statistics.fmean(found) if found else None


def cases(sets: Iterable[str]) -> list[Case]:
    """The published runs of some sets that have a step time."""
    wanted = set(sets)
    return [case(run) for run in published_runs().values() if run.set in wanted and run.seconds is not None]


def row(one: Case, constants: Constants, note: str = "") -> GradeRow:
    """Predict one run."""
    published = one.run.seconds
    assert published is not None
    peak = one.peak(constants) / 2**30 if one.run.peak_gib is not None else None
    found = one.step(constants)
    low, high = (found.seconds * share for share in step_range(one.shape, one.machine, constants, found))
    return GradeRow(one.run, found.seconds, published, peak, one.run.peak_gib, (low, high), note)


def observation(one: Case, *, memory: bool = False) -> Observation:
    """A published run as something to calibrate with."""
    assert one.run.seconds is not None
    peak = one.run.peak_gib * 2**30 if memory and one.run.peak_gib is not None else None
    return Observation(one.run.id, one.run.seconds, peak, lambda constants: (one.step(constants).seconds, one.peak(constants)))


def flows() -> list[Flow]:
    """All ways, in the order in which they are shown."""
    csv = cases([CSV])
    fast = [c for c in csv if c.machine.inter.source != "measured" or c.shape.strategy.world_size <= c.machine.domain]
    fast = [c for c in fast if "a100" not in c.run.cluster]
    neutral = "no calibration, nominal bandwidth; the constants were fitted to these runs among others"
    cheapest = "calibrated with the cluster's cheapest run (the fewest GPUs), which does not count; measured bandwidth on A100"
    other = "constants fitted again without any run of the model, then one calibration run of another model per cluster"
    larger = "Qwen2.5-72B and larger batches on the same clusters, as shipped; never fitted"
    own = "nothing: the 8.0 GB/s of its link come from this very run"
    return [
        Flow("as shipped, NVLink and InfiniBand", neutral, [row(c, Constants()) for c in fast], 0.07),
        Flow("one run per cluster", cheapest, _one_run(csv), 0.04),
        Flow("one model left out", other, _model_out(csv), 0.04),
        Flow("larger model", larger, _as_shipped("idris-other"), 0.07),
        Flow("throughput tables", "as shipped", _as_shipped("table"), None),
        Flow("float8 and Megatron-Core", "as shipped", _as_shipped("table-fp8"), None),
        Flow("mixtures of experts", "as shipped", _as_shipped("table-moe"), None),
        Flow("NeMo's HFAutoModel", "as shipped", _as_shipped("idris-nemo"), None),
        Flow("Ethernet", own, _as_shipped("nebius"), None),
    ]


def _as_shipped(name: str) -> list[GradeRow]:
    """The runs of a set, without calibration."""
    return [row(c, Constants()) for c in cases([name])]


def _one_run(csv: Sequence[Case]) -> list[GradeRow]:
    """Every run but its cluster's cheapest one (the fewest GPUs), which calibrates."""
    found = []
    for cluster in sorted({c.run.cluster for c in csv}):
        measured = sorted((c for c in csv if c.run.cluster == cluster), key=lambda c: c.run.world)
        constants = Constants().with_values(fit([observation(measured[0])]).values)
        found += [row(one, constants, f"calibrated with {measured[0].run.id}") for one in measured[1:]]
    return found


def _model_out(csv: Sequence[Case]) -> list[GradeRow]:
    """For each model: refit the constants on the others, calibrate each cluster with one run of another model, predict."""
    found = []
    for model in sorted({c.run.model for c in csv}):
        known = [c for c in csv if c.run.model != model]
        base = Constants().with_values(NEUTRAL)
        values, _ = solve([observation(c) for c in known], base, list(REFITTED), REFITTED)
        fitted = base.with_values(values)
        for one in (c for c in csv if c.run.model == model):
            near = [c for c in known if c.run.cluster == one.run.cluster]
            # Where no other model ran on a cluster, its cheapest run calibrates, and does not count.
            near = near or sorted((c for c in csv if c.run.cluster == one.run.cluster), key=lambda c: c.run.world)[:1]
            if near[0] is one:
                continue
            constants = fitted.with_values(fit([observation(near[0])], fitted).values)
            found.append(row(one, constants, f"calibrated with {near[0].run.id}"))
    return found
