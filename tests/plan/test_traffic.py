"""What travels in a step and how long it takes, by hand: each collective's bytes, the ring's time, shared ports."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.plan.machine import Link, PlanMachine
from clustertune.plan.step import Collective, RankGroup, traffic
from tests.plan.world import (
    ADAPTERS,
    ENDS,
    HIDDEN,
    INTER,
    INTRA,
    LAYER,
    LAYERS,
    LORA,
    MATMUL,
    NARROW,
    NORMS,
    TOTAL,
    WHOLE,
    machine,
    mixture,
    shape,
)

TOKENS = 2 * 512
ACTIVATION = TOKENS * HIDDEN * 2
"""Bytes of one layer's output."""


def gather(size: int, stride: int = 1, nbytes: float = 1e9, kind: str = "gather") -> Collective:
    return Collective("c", kind, RankGroup(size, stride), nbytes, 0)


SLOW = machine(intra=Link(5e9, 5e9, "nominal", "", 0.0))
FAST = machine(inter=Link(8e12, 8e12, "nominal", "", 0.0))
RACK = machine(gpus_per_node=4, domain=16, nodes=8)


@pytest.mark.parametrize(
    ("at", "size", "stride", "bandwidth"),
    [
        (machine(), 8, 1, INTRA),  # one node
        (machine(), 4, 2, INTRA),
        (machine(), 16, 1, INTER),  # both nodes: the ring crosses the border of a node once
        (machine(), 2, 8, INTER / 8),  # eight pairs, one of each GPU of a node, share its ports: TP 8 x FSDP 2
        (machine(), 4, 4, INTER / 4),
        (machine(), 8, 2, INTER / 2),  # TP 2 x FSDP 8
        (SLOW, 16, 1, 5e9),  # bound by the links inside a node where these are the slower ones (PCIe and InfiniBand)
        (FAST, 2, 8, 1e12),  # one GPU of a node: no ring inside
        (RACK, 16, 1, INTRA),  # NVL72: 18 nodes of 4 on one switch
        (RACK, 8, 2, INTRA),
        (RACK, 32, 1, 4 * INTER),  # what leaves it has the ports of all its nodes
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_border(at: PlanMachine, size: int, stride: int, bandwidth: float) -> None:
    """Groups that have members in one node share its ports: 8 parallel rings get an eighth each. NeMo's A100 rows showed it."""
    assert RankGroup(size, stride).bandwidth(at) == pytest.approx(bandwidth)
    assert gather(size, stride).seconds(at) == pytest.approx(1e9 * (size - 1) / size / bandwidth)


def test_kinds_of_collectives() -> None:
    """nccl-tests' definition of the bus bandwidth: an all-reduce moves everything twice, a send once, one rank nothing."""
    assert gather(8, kind="reduce").seconds(machine()) == pytest.approx(2 * 7 / 8 * 1e9 / INTRA)
    assert gather(8, kind="send").seconds(machine()) == pytest.approx(1e9 / INTRA)
    assert gather(1).seconds(machine()) == 0 and gather(8, nbytes=0).seconds(machine()) == 0
    assert [gather(8, kind=kind).factor for kind in ("gather", "reduce", "send")] == ["1 x 7/8", "2 x 7/8", "1"]


def test_latency_counts_per_call_and_step_of_the_ring() -> None:
    """Small tensors wait for the number of hops, not for the bandwidth."""
    slow = machine(
        intra=Link(INTRA, INTRA, "nominal", "", 2e-6), inter=Link(INTER, INTER, "nominal", "", 10e-6)
    )  # fmt: skip
    for size, hop in ((8, 2e-6), (16, 10e-6)):
        found = Collective("c", "gather", RankGroup(size), 16.0, 5)
        assert found.seconds(slow) == pytest.approx(5 * (size - 1) * hop, rel=1e-3)
    sent = Collective("c", "send", RankGroup(2, 8), 16.0, 5)
    assert sent.seconds(slow) == pytest.approx(5 * 10e-6, rel=1e-3)


def test_all_to_all_sends_to_each_member_its_part() -> None:
    """Inside a node 7 of 8 parts over the links; over two nodes half of it over one GPU's share of the ports."""
    assert gather(8, kind="exchange").seconds(machine()) == pytest.approx(1e9 * 7 / 8 / INTRA)
    assert gather(16, kind="exchange").seconds(machine()) == pytest.approx(1e9 * 8 / 16 / (INTER / 8))
    fast = machine(inter=Link(1e15, 1e15, "nominal", "", 0.0))
    assert gather(16, kind="exchange").seconds(fast) == pytest.approx(1e9 * 7 / 16 / INTRA), "the slower of the two"


def sent(**changes: Any) -> dict[str, tuple[str, int, int, float]]:
    """Each collective's place, group size, stride and bytes."""
    found = traffic(shape(**changes))
    return {
        f"{phase}: {c.name}": (c.kind, c.group.size, c.group.stride, pytest.approx(c.size))  # type: ignore[misc]
        for phase in ("forward", "backward", "last", "exposed", "after")
        for c in getattr(found, phase)
    }


GATHER, SCATTER = "all-gather of the weights", "reduce-scatter of the gradients"
UPDATED = "all-gather of the updated weights"
WHOLE_MODEL = TOTAL * 2
Sent = dict[str, tuple[str, int, int, float]]
FORWARD: Sent = {f"forward: {GATHER}": ("gather", 16, 1, WHOLE_MODEL)}
BOTH: Sent = FORWARD | {f"backward: {GATHER}": ("gather", 16, 1, WHOLE_MODEL)}
LAST: Sent = {f"last: {SCATTER}": ("gather", 16, 1, WHOLE_MODEL)}
AFTER: Sent = {f"after: {UPDATED}": ("gather", 16, 1, WHOLE_MODEL)}
EACH: Sent = {f"backward: {SCATTER}": ("gather", 16, 1, WHOLE_MODEL)}
ADAPTED: Sent = {f"last: {SCATTER}": ("gather", 16, 1, ADAPTERS * 2)}
CASES: dict[str, tuple[dict[str, Any], Sent]] = {
    "FSDP2 gathers twice and scatters once": ({}, BOTH | LAST),
    "not resharded: gathered once": ({"reshard": False}, FORWARD | LAST),
    "LoRA: the base is gathered, only adapters are scattered": (LORA, BOTH | ADAPTED),
    "a quantised base travels quantised, embedding and head do not": (
        {**LORA, "weight_bytes": 0.5, "gather_bytes": 0.5, "reshard": False},
        {f"forward: {GATHER}": ("gather", 16, 1, LAYERS * LAYER * 0.5 + (2 * ENDS + HIDDEN) * 2)} | ADAPTED,
    ),
    "HSDP: weights stay in the node, the shards' gradients cross": (
        {"replicas": 2, "weight_shards": 8, "gradient_shards": 8, "state_shards": 8, "reshard": False},
        {
            f"forward: {GATHER}": ("gather", 8, 1, WHOLE_MODEL),
            f"last: {SCATTER}": ("gather", 8, 1, WHOLE_MODEL),
            "last: all-reduce of the gradients between replicas": ("reduce", 2, 8, WHOLE_MODEL / 8),
        },
    ),
    "DDP reduces all gradients": (
        {**WHOLE, "kind": "DDP", "reduce_bytes": 4.0},
        {"last: all-reduce of the gradients": ("reduce", 16, 1, TOTAL * 4)},
    ),
    "ZeRO-1 sums its share of the gradients and gathers the updated weights": (
        {**WHOLE, "kind": "ZeRO-1", "state_shards": 16}, LAST | AFTER,
    ),
    "ZeRO-2 scatters after each micro batch": (
        {**WHOLE, "kind": "ZeRO-2", "state_shards": 16, "gradient_shards": 16}, EACH | AFTER,
    ),
    "ZeRO-3 too": ({"kind": "ZeRO-3"}, BOTH | EACH),
    "one GPU sends nothing": ({**WHOLE, "world_size": 1, "data_parallel_size": 1, "ranks_per_node": 1, "kind": "NO"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_collectives_of_data_parallel_strategies(name: str) -> None:
    """Bytes follow from the tensors; which rank pairs they cross from the mesh."""
    changes, expected = CASES[name]
    assert sent(**changes) == expected


def test_tensor_parallelism_reduces_four_times_a_layer() -> None:
    """Two all-reduces forward, two backward; recomputation repeats the forward ones; FSDP runs across with stride tp."""
    size = {"tp": 4, "data_parallel_size": 4, "weight_shards": 4, "gradient_shards": 4, "state_shards": 4}
    for share, rounds in ((0.0, 4), (1.0, 6)):
        found = sent(**size, checkpointed=share)
        assert found["exposed: tensor-parallel all-reduce"] == ("reduce", 4, 1, rounds * LAYERS * ACTIVATION)
    # Each rank gathers its quarter of the matrices; norms are not divided.
    part = LAYERS * (MATMUL / 4 + NORMS) + (2 * ENDS + HIDDEN) / 4
    assert found[f"forward: {GATHER}"] == ("gather", 4, 4, part * 2)
    hidden = sent(**size, overlap_tp=True, checkpointed=1.0)
    assert hidden["forward: tensor-parallel all-reduce"] == ("reduce", 4, 1, 2 * LAYERS * ACTIVATION)
    assert hidden["backward: tensor-parallel all-reduce"] == ("reduce", 4, 1, 4 * LAYERS * ACTIVATION)


@pytest.mark.parametrize(("virtual", "sequence_parallel", "rounds"), [(1, False, 2), (2, False, 4), (2, True, 2)])
def test_a_pipeline_sends_activations_and_gradients(virtual: int, sequence_parallel: bool, rounds: int) -> None:
    """Of each micro batch, once per virtual stage and direction; under sequence parallelism each rank sends its part."""
    held = {**WHOLE, "kind": "Megatron", "data_parallel_size": 4, "tp": 2, "pp": 2}
    found = sent(**held, virtual=virtual, sequence_parallel=sequence_parallel)
    assert found["exposed: pipeline send"] == ("send", 2, 8, rounds * ACTIVATION)


def test_ring_attention_passes_keys_and_values() -> None:
    """All other ranks' keys and values come by; backward their gradients too."""
    found = sent(cp=2, data_parallel_size=8)
    whole = LAYERS * 2 * NARROW * 2 * 512 * 2
    assert found["forward: keys and values around the ring"] == ("gather", 2, 1, whole)
    assert found["backward: keys, values and their gradients around the ring"] == ("gather", 2, 1, 2 * whole)
    assert found[f"forward: {GATHER}"] == ("gather", 16, 1, TOTAL * 2), "FSDP shards over dp and cp together"


def test_experts_exchange_each_tokens_copies() -> None:
    """To two experts and back, forward and backward; 6 times where layers are recomputed."""
    held = {**WHOLE, "kind": "Megatron", "ep": 8}
    for share, rounds in ((0.0, 4), (1.0, 6)):
        found = traffic(shape(mixture(active=2), **held, checkpointed=share)).exposed[0]
        assert (found.kind, found.group) == ("exchange", RankGroup(8))
        assert found.size == pytest.approx(rounds * LAYERS * 2 * ACTIVATION)
    assert not traffic(shape(mixture(), **WHOLE, kind="Megatron")).exposed
