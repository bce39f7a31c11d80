"""The planner against published runs: predicted beside published, held out in four ways."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clustertune.plan import memory
from clustertune.plan.calibration import Observation, fit, solve
from clustertune.plan.constants import Constants, total
from clustertune.plan.predict import step_range
from clustertune.plan.step import flops, step
from tools.planner_grade.data import DTYPE_BYTES, Case, PublishedRun, case, published_runs

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

    @property
    def notes(self) -> list[str]:
        """What a reader of the row should know."""
        parts = [self.note, f"not counted: {self.run.excluded}" if self.run.excluded else ""]
        return [text for text in (*parts, "" if self.run.verified else "not read at its source") if text]


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
        return statistics.fmean(map(abs, self.memory_errors)) if self.memory_errors else None

    @property
    def memory_errors(self) -> list[float]:
        return [error for row in self.counted if (error := row.memory_error) is not None]

    @property
    def aim(self) -> str:
        """The goal, and whether it was missed."""
        return "" if self.goal is None else f"{self.goal:.0%}{'' if self.mean <= self.goal else ' MISSED'}"


def cases(sets: Iterable[str]) -> list[Case]:
    """The published runs of some sets that have a step time."""
    chosen = set(sets)
    return [case(run) for run in published_runs().values() if run.set in chosen and run.seconds is not None]


def row(one: Case, constants: Constants, note: str = "") -> GradeRow:
    """Predict one run."""
    published = one.run.seconds
    assert published is not None
    peak = one.peak(constants) / 2**30 if one.run.peak_gib is not None else None
    predicted = one.step(constants)
    if one.run.kind == "Megatron" and not one.fits(constants):
        note = "; ".join([*([note] if note else []), "planned as too large for its GPUs"])
    low, high = (predicted.seconds * share for share in step_range(one.shape, one.machine, constants, predicted))
    return GradeRow(one.run, predicted.seconds, published, peak, one.run.peak_gib, (low, high), note)


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
        Flow("float8 and Megatron-Core", "as shipped; Megatron-Core from `megatron:` recipes", _as_shipped("table-fp8"), None),
        Flow("Megatron-Core, more tables", "as shipped, from `megatron:` recipes", _as_shipped("megatron"), None),
        Flow("mixtures of experts", "as shipped; never fitted", _as_shipped("table-moe"), None),
        Flow(
            "mixtures under Megatron-Core",
            "as shipped, from `megatron:` recipes; never fitted",
            _as_shipped("megatron-moe"),
            None,
        ),
        Flow("FSDP1 on A100", "as shipped; never fitted", _as_shipped("fms"), None),
        Flow("NeMo's HFAutoModel", "as shipped", _as_shipped("idris-nemo"), None),
        Flow("Ethernet", own, _as_shipped("nebius"), None),
    ]


def _as_shipped(name: str) -> list[GradeRow]:
    """The runs of a set, without calibration."""
    return [row(c, Constants()) for c in cases([name])]


def _one_run(csv: Sequence[Case]) -> list[GradeRow]:
    """Every run but its cluster's cheapest one (the fewest GPUs), which calibrates."""
    rows = []
    for cluster in sorted({c.run.cluster for c in csv}):
        measured = sorted((c for c in csv if c.run.cluster == cluster), key=lambda c: c.run.world)
        constants = Constants().with_values(fit([observation(measured[0])]).values)
        rows += [row(one, constants, f"calibrated with {measured[0].run.id}") for one in measured[1:]]
    return rows


def _model_out(csv: Sequence[Case]) -> list[GradeRow]:
    """For each model: refit the constants on the others, calibrate each cluster with one run of another model, predict."""
    rows = []
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
            rows.append(row(one, constants, f"calibrated with {near[0].run.id}"))
    return rows


# --- the reference run: Llama-3.1-405B LoRA on 2 x 8 RTX PRO 6000 over 100 GbE -----------------------------------------

RUN = "nutanix-405b"
LINE_BYTES_PER_S = 100e9 / 8
"""100 Gbit/s, one direction."""


@dataclass(frozen=True)
class Floors:
    """What the run could not have been faster than, hours."""

    gathered_bytes: float
    """Bytes that enter each node for the weights in the whole run."""
    ring_h: float
    """At line rate, as a ring over all 16 ranks moves them."""
    node_h: float
    """At line rate, where each node gets each byte that it lacks once."""
    compute_h: float
    """All matrix products and attention, recomputation included, at the dense peak."""
    hours: float
    """What it took."""


def floors() -> Floors:
    """From the run's 162 gathers of all weights (36 steps x 2 micro batches x 2, and 18 evaluations)."""
    one = case(published_runs()[RUN])
    run = one.run
    gathered = one.shape.counted.total * DTYPE_BYTES["bf16"] * float(run.gathers or 0)
    ring = gathered * (run.world - 1) / run.world
    work = flops(one.shape, hardware=True) * float(run.steps or 0)
    peak = one.machine.peak_flops * run.world
    return Floors(
        ring, ring / LINE_BYTES_PER_S / 3600, gathered / 2 / LINE_BYTES_PER_S / 3600, work / peak / 3600, float(run.hours or 0)
    )


@dataclass(frozen=True)
class Alternative:
    """One strategy on the same 16 GPUs at the same global batch of 32."""

    name: str
    step_s: dict[float, float]
    """Seconds of a step for each bus bandwidth between the nodes, GB/s."""
    needed: float
    """Bytes that a GPU must have free."""
    usable: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable


def alternatives(bandwidths: tuple[float, ...] = (4.7, 8.1)) -> list[Alternative]:
    """The run as it was, and the strategies that the sources name."""
    start = case(published_runs()[RUN])
    nf4, fp8 = DTYPE_BYTES["nf4"], DTYPE_BYTES["fp8"]
    shards = {"weight_shards": 8, "gradient_shards": 8, "state_shards": 8, "replicas": 2}
    two: dict[str, Any] = {"micro_batch": 2, "accumulation": 1}
    megatron: dict[str, Any] = {
        "kind": "Megatron", "weight_shards": 1, "gradient_shards": 1, "state_shards": 1, "replicas": 1,
        "gather_bytes": 2.0, "micro_batch": 1, "data_parallel_size": 1, "accumulation": 32,
    }  # fmt: skip
    named: list[tuple[str, dict[str, Any]]] = [
        ("as run: FSDP over 16, bf16, 1 x 2", {}),
        ("FSDP over 16, bf16, 2 x 1", two),
        ("FSDP over 16, FP8 base, 2 x 1", {"weight_bytes": fp8, "gather_bytes": fp8, **two}),
        ("FSDP over 16, NF4 base, 2 x 1", {"weight_bytes": nf4, "gather_bytes": nf4, **two}),
        ("HSDP 8 x 2, bf16", {**shards, **two}),
        ("HSDP 8 x 2, FP8 base", {"weight_bytes": fp8, "gather_bytes": fp8, **shards, **two}),
        ("HSDP 8 x 2, NF4 base", {"weight_bytes": nf4, "gather_bytes": nf4, **shards, **two}),
        (
            "TP 8 x PP 2, bf16",
            {**megatron, "tp": 8, "pp": 2, "sequence_parallel": True},
        ),
        ("PP 16, bf16, 1F1B", {**megatron, "pp": 16}),
        ("PP 16, bf16, interleaved 2", {**megatron, "pp": 16, "virtual": 2}),
        ("FSDP over 16, bf16, not resharded", {"reshard": False}),
    ]
    return [_alternative(start, name, changes, bandwidths) for name, changes in named]


def _alternative(start: Case, name: str, changes: dict[str, Any], bandwidths: tuple[float, ...]) -> Alternative:
    constants = Constants()
    shape = replace(start.shape, strategy=replace(start.shape.strategy, **changes))
    peak = memory.training_peak(memory.moments(shape, constants)).bytes
    seconds = {}
    for bandwidth in bandwidths:
        link = replace(start.machine.inter, bytes_per_s=bandwidth * 1e9)
        seconds[bandwidth] = step(shape, replace(start.machine, inter=link), constants).seconds
    needed = peak + total(memory.reserved(peak, constants))
    return Alternative(name, seconds, needed, start.machine.usable_bytes)
