"""The reference run, Llama-3.1-405B LoRA on 2 x 8 RTX PRO 6000 over 100 GbE: its floors, and what other strategies would
give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from clustertune.plan import memory
from clustertune.plan.constants import Constants, total
from clustertune.plan.step import flops, step
from tools.planner_grade.case import Case, case
from tools.planner_grade.data import DTYPE_BYTES, published_runs

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
    whole = one.shape.counted.total * DTYPE_BYTES["bf16"] * float(run.gathers or 0)
    ring = whole * (run.world - 1) / run.world
    work = flops(one.shape, hardware=True) * float(run.steps or 0)
    peak = one.machine.peak_flops * run.world
    return Floors(
        ring, ring / LINE_BYTES_PER_S / 3600, whole / 2 / LINE_BYTES_PER_S / 3600, work / peak / 3600, float(run.hours or 0)
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
    peak = max(moment.bytes for moment in memory.moments(shape, constants))
    seconds = {}
    for bandwidth in bandwidths:
        link = replace(start.machine.inter, bytes_per_s=bandwidth * 1e9)
        seconds[bandwidth] = step(shape, replace(start.machine, inter=link), constants).seconds
    needed = peak + total(memory.reserved(peak, constants))
    return Alternative(name, seconds, needed, start.machine.usable_bytes)
