"""What must hold of every plan, whatever the model, the machine and the strategy: searched with hypothesis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clustertune.plan import memory
from clustertune.plan.constants import Constants
from clustertune.plan.machine import PlanMachine
from clustertune.plan.predict import real_length
from clustertune.plan.schedule import Lengths
from clustertune.plan.step import Step, flops, step
from clustertune.plan.strategy import ModelShape
from tests.plan.world import LORA, WHOLE, machine, mixture, shape

KINDS = st.sampled_from(["FSDP2", "HSDP", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "TP", "Megatron", "experts"])
SIZES = st.fixed_dictionaries({
    "micro_batch": st.integers(1, 16), "accumulation": st.integers(1, 8), "sequence": st.sampled_from([128, 512, 4096]),
    "checkpointed": st.sampled_from([0.0, 0.25, 0.5, 1.0]), "compiled": st.booleans(), "fused_loss": st.booleans(),
    "attention": st.sampled_from(["sdpa", "flash", "eager"]), "packing": st.booleans(),
})  # fmt: skip
MACHINES = st.builds(
    lambda peak, hbm, intra, inter, latency: machine(
        peak_flops=peak, hbm_bytes_per_s=hbm, intra=replace(machine().intra, bytes_per_s=intra, latency_s=latency),
        inter=replace(machine().inter, bytes_per_s=inter, latency_s=5 * latency),
    ),
    st.floats(1e12, 3e15), st.floats(1e11, 8e12), st.floats(1e9, 9e11), st.floats(1e8, 4e11), st.floats(0, 1e-5),
)  # fmt: skip


def distributed(kind: str, world: int = 16) -> dict[str, Any]:
    """A strategy of a kind over 16 or more GPUs."""
    shards = {"weight_shards": world, "gradient_shards": world, "state_shards": world}
    base: dict[str, Any] = {"world_size": world, "data_parallel_size": world}
    if kind == "FSDP2":
        return base | shards
    if kind == "HSDP":
        return base | {"replicas": world // 8, "weight_shards": 8, "gradient_shards": 8, "state_shards": 8}
    if kind == "TP":
        part = dict.fromkeys(shards, world // 4)
        return base | part | {"tp": 4, "data_parallel_size": world // 4}
    if kind == "Megatron":
        rest = {"tp": 2, "pp": 4, "data_parallel_size": world // 8, "state_shards": world // 8, "sequence_parallel": True}
        return base | WHOLE | {"kind": "Megatron", "weight_bytes": 2.0, "state_bytes": 12.0} | rest
    if kind == "experts":
        return base | WHOLE | {"kind": "Megatron", "ep": 8, "weight_bytes": 2.0, "state_shards": world}
    whole = base | WHOLE | {"kind": kind}
    return whole | {
        "DDP": {}, "ZeRO-1": {"state_shards": world}, "ZeRO-2": {"state_shards": world, "gradient_shards": world},
        "ZeRO-3": shards,
    }[kind]  # fmt: skip


def made(kind: str, lora: bool, sizes: dict[str, Any], world: int = 16, **changes: Any) -> ModelShape:
    values = distributed(kind, world) | sizes | (LORA if lora else {}) | changes
    return shape(mixture() if kind == "experts" else None, **values)


def timed(of: ModelShape, at: PlanMachine, constants: Constants | None = None) -> Step:
    return step(of, at, constants or Constants())


def peak(of: ModelShape) -> float:
    return max(moment.bytes for moment in memory.moments(of, Constants()))


LEVELS = ("intra", "inter", "latency", "hbm_bytes_per_s", "peak_flops", "compute_scale", "intra_scale", "inter_scale")


@given(KINDS, st.booleans(), SIZES, MACHINES, st.sampled_from(LEVELS), st.floats(1.0, 10.0))
def test_a_better_machine_is_never_slower(
    kind: str, lora: bool, sizes: dict[str, Any], at: PlanMachine, what: str, factor: float
) -> None:  # fmt: skip
    """More bandwidth, inside or between nodes, of the memory, or more FLOP/s; and calibration can tell up from down."""
    of, constants, better = made(kind, lora, sizes), Constants(), at
    if what in ("intra", "inter"):
        link = getattr(at, what)
        better = replace(at, **{what: replace(link, bytes_per_s=link.bytes_per_s * factor)})
    elif what == "latency":
        better = replace(at, inter=replace(at.inter, latency_s=at.inter.latency_s / factor))
    elif what.endswith("scale"):
        constants = replace(constants, **{what: 1 / factor if what == "compute_scale" else factor})
    else:
        better = replace(at, **{what: getattr(at, what) * factor})
    assert timed(of, better, constants).seconds <= timed(of, at).seconds * (1 + 1e-9)


@given(KINDS, st.booleans(), SIZES, MACHINES)
def test_a_step_is_at_least_its_floors(kind: str, lora: bool, sizes: dict[str, Any], at: PlanMachine) -> None:
    """What the GPUs compute at their peak, and what each network carries; all parts are positive and sum up."""
    of = made(kind, lora, sizes)
    found = timed(of, at)
    assert found.seconds >= sum(term.value for term in found.compute)
    assert found.seconds >= flops(of, hardware=True) / (16 * at.peak_flops) * (1 - 1e-9)
    assert found.seconds >= found.communication * (1 - 1e-9)
    assert min(found.exposed.value, found.bubble.value, found.optimizer.value) >= 0
    moments = memory.moments(of, Constants())
    assert all(term.value > 0 for moment in moments for term in moment.parts)
    named = [one.name for one in moments[-3:]]
    assert ["loss" in named[0], "backward" in named[1], "optimizer" in named[2]] == [True] * 3


SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
"""Of layers: a part of one layer is never recomputed, but its mask would be counted."""
ROUNDING = 1 + 1e-9


@given(KINDS, st.booleans(), SIZES, MACHINES, SHARES, SHARES, st.integers(2, 4))
def test_what_saves_memory_costs_time(
    kind: str, lora: bool, sizes: dict[str, Any], at: PlanMachine, one: float, other: float, factor: int
) -> None:  # fmt: skip
    """A larger share of recomputed layers never needs more at the loss and is never faster. Without resharding the backward
    pass gathers nothing, and all weights stay. A larger micro batch needs more, and never takes longer per token: what is
    gathered serves more of them. At the same micro batch more GPUs make shards smaller, and nothing else."""

    def at_loss(of: ModelShape) -> float:
        return memory.moments(of, Constants())[-3].bytes

    of = made(kind, lora, sizes)
    less, more = (made(kind, lora, {**sizes, "checkpointed": share}) for share in sorted((one, other)))
    # A layer that is recomputed holds the mask: of a long row it is more than a tiny layer keeps.
    masked = sizes["attention"] == "eager" or (sizes["attention"] == "sdpa" and not sizes["packing"])
    assert (masked and sizes["sequence"] > 512) or at_loss(more) <= at_loss(less) * ROUNDING
    assert timed(more, at).seconds * ROUNDING >= timed(less, at).seconds
    kept = replace(of, strategy=replace(of.strategy, reshard=False))
    assert timed(kept, at).seconds <= timed(of, at).seconds * ROUNDING
    assert of.strategy.weight_shards == 1 or at_loss(kept) * ROUNDING >= at_loss(of)
    large = made(kind, lora, {**sizes, "micro_batch": sizes["micro_batch"] * factor})
    assert peak(large) >= peak(of)
    rate, larger = (each.step_tokens / timed(each, machine()).seconds for each in (of, large))
    assert larger * ROUNDING >= rate
    few, many = (made("FSDP2", lora, sizes, world=16 * count) for count in (1, factor))
    assert peak(many) <= peak(few) * ROUNDING


@given(st.sampled_from(["FSDP2", "HSDP", "DDP"]), SIZES, st.floats(0.5, 1.9))
def test_a_quantised_base_never_takes_more(kind: str, sizes: dict[str, Any], stored: float) -> None:
    """Weights at rest and on the wire are at most those in bfloat16; an own scale costs no more than it saves."""
    plain, small = made(kind, True, sizes), made(kind, True, sizes, weight_bytes=stored, gather_bytes=min(stored, 1.0))
    rest = [next(t.value for t in memory.moments(of, Constants())[-1].parts if t.name == "weights") for of in (plain, small)]
    assert rest[1] <= rest[0]
    assert small.gathered <= plain.gathered


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=20), st.integers(1, 16))
def test_padding_never_makes_a_row_longer_than_the_recipe_allows(tokens: list[int], batch: int) -> None:
    """A padded strategy is at most as long, a packed one untouched."""
    lengths = Lengths(tuple(sorted(tokens)), "test")
    padded = made("FSDP2", False, {"micro_batch": batch, "packing": False}).strategy
    found, notes = real_length(padded, lengths)
    assert 1 <= found.sequence <= padded.sequence and notes
    packed = replace(padded, packing=True)
    assert real_length(packed, lengths) == (packed, [])
