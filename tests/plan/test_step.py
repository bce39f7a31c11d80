"""The time of a step by hand: overlap, accumulation, the pipeline's bubble, the optimizer, offload; parts sum up."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.plan.constants import total
from clustertune.plan.step import ADAM_BYTES, HOST_ADAM_BYTES_PER_S, NVME_BYTES_PER_S, Step, micro_batch, offload, step
from clustertune.plan.strategy import ModelShape
from tests.plan.world import ADAPTERS, HBM, INTER, LORA, TOTAL, WHOLE, constants, machine, shape

RING = TOTAL * 2 * 15 / 16 / INTER
"""Seconds of a gather of all weights, or of a scatter of all gradients, over both nodes."""
QUICK = {"intra": machine().intra, "peak_flops": 1e30, "hbm_bytes_per_s": 1e30}
"""A machine that computes in no time: everything waits for the network."""


def timed(of: ModelShape, at: Any = None, **changes: Any) -> Step:
    return step(of, at or machine(), constants(**changes))


def test_a_network_bound_step_is_its_traffic() -> None:
    """Two gathers a micro batch; the scatter once, beside the last backward pass."""
    for accumulation in (1, 3):
        found = timed(shape(accumulation=accumulation), machine(**QUICK))
        assert found.seconds == pytest.approx((2 * accumulation + 1) * RING, rel=1e-6)
        assert found.communication == pytest.approx((2 * accumulation + 1) * RING)
    each = timed(shape(accumulation=3, reduce_each=True), machine(**QUICK))
    assert each.seconds == pytest.approx(9 * RING, rel=1e-6), "scattered after each micro batch"


def test_the_longer_of_two_counts_and_a_share_of_the_shorter() -> None:
    """Forward and backward passes each on their own: a short forward pass does not hide a long gather."""
    given = constants(overlap_loss=0.2)
    for at in (machine(), machine(peak_flops=1e10)):
        work = micro_batch(shape(), at, given)
        both = ((total(work.forward), RING), (total(work.backward), 2 * RING))
        expected = sum(max(pair) + 0.2 * min(pair) for pair in both)
        found = step(shape(), at, given)
        assert found.seconds - found.optimizer.value == pytest.approx(expected)
        assert found.communication == pytest.approx(3 * RING)
    assert timed(shape(), at).exposed.value == 0, "a slow GPU hides its traffic"


@pytest.mark.parametrize(("pp", "virtual", "accumulation"), [(4, 1, 8), (4, 2, 8), (2, 1, 1), (8, 4, 32)])
def test_the_bubble_of_a_pipeline(pp: int, virtual: int, accumulation: int) -> None:
    """(pp - 1) / virtual micro batches: of m micro batches the share (pp - 1) / (virtual m)
    (https://arxiv.org/abs/2104.04473, 2.2)."""
    held = {**WHOLE, "kind": "Megatron", "data_parallel_size": 16 // pp, "accumulation": accumulation}
    fast = machine(inter=machine().intra, **{"intra": machine().intra})
    found = step(shape(**held, pp=pp, virtual=virtual), fast, constants())
    sent = sum(wire.term.value for wire in found.wires if wire.collective.name == "pipeline send") / accumulation
    one = total(found.compute) / accumulation + sent
    assert found.bubble.value == pytest.approx((pp - 1) / virtual * one)
    assert timed(shape(**{**held, "data_parallel_size": 16})).bubble.value == 0


def test_what_the_next_product_waits_for_counts_whole() -> None:
    """Tensor parallelism without overlap is beside nothing."""
    split = {**WHOLE, "kind": "Megatron", "tp": 8, "data_parallel_size": 2, "gradient_bytes": 0.0, "reduce_bytes": 0.0}
    found = timed(shape(**split, accumulation=5))
    wire = next(w for w in found.wires if w.collective.name == "tensor-parallel all-reduce")
    assert found.exposed.value >= wire.term.value > 0
    beside = timed(shape(**split, accumulation=5, overlap_tp=True))
    assert beside.exposed.value < found.exposed.value


def test_the_optimizer_moves_bytes() -> None:
    """The rank's share of what is trained; less for smaller states, half without any, less as one kernel."""

    def seconds(**changes: Any) -> float:
        return timed(shape(**changes), optimizer_bytes=92.0, fused_optimizer_bytes=40.0).optimizer.value

    assert seconds() == pytest.approx(TOTAL / 16 * 92 / HBM)
    assert seconds(fused_optimizer=True) == pytest.approx(TOTAL / 16 * 40 / HBM)
    assert seconds(state_bytes=4.0) == pytest.approx(seconds() / 2)
    assert seconds(state_bytes=12.0) == pytest.approx(seconds()), "a master copy is no further moment"
    assert seconds(state_bytes=0.0) == pytest.approx(seconds() / 2)
    assert seconds(**LORA) == pytest.approx(ADAPTERS / 16 * 92 / HBM)
    assert seconds(**WHOLE) == pytest.approx(TOTAL * 92 / HBM)


def test_weights_on_the_host_come_over_the_host_link() -> None:
    """The rank's shard as it is stored, forward and backward; the gradient goes back; an own optimizer on the CPU."""
    away = {"offload_params": "cpu", "offload_optimizer": "cpu"}
    found = offload(shape(**away), machine())
    shard = TOTAL * 4 / 16 / 50e9
    assert found.forward_s == pytest.approx(shard)
    assert found.backward_s == pytest.approx(2 * shard)
    assert offload(shape(**away, reshard=False), machine()).backward_s == pytest.approx(shard), "not fetched again"
    assert found.optimizer is not None
    expected = TOTAL / 16 * (ADAM_BYTES / (HOST_ADAM_BYTES_PER_S / 8) + (4 + 2) / 50e9)
    assert found.optimizer.value == pytest.approx(expected)
    assert timed(shape(**away)).optimizer.value == pytest.approx(expected)
    assert found.note and "GB/s" in found.note
    nothing = offload(shape(), machine())
    assert (nothing.forward_s, nothing.backward_s, nothing.optimizer, nothing.note) == (0, 0, None, None)


def test_nvme_is_slower_than_ram() -> None:
    """One drive is shared by all GPUs of a node."""
    away = {"kind": "ZeRO-3", "offload_params": "nvme", "offload_optimizer": "nvme"}
    found = offload(shape(**away), machine())
    assert found.forward_s == pytest.approx(TOTAL * 4 / 16 / (NVME_BYTES_PER_S / 8))
    assert found.optimizer is not None
    assert found.optimizer.value > TOTAL / 16 * ADAM_BYTES / (NVME_BYTES_PER_S / 8)


def test_terms_of_one_name_are_one_and_multiply_with_micro_batches() -> None:
    """The cross-entropy of forward and backward is one line; its passes add up."""
    found = timed(shape(accumulation=3))
    names = [term.name for term in found.compute]
    assert len(names) == len(set(names))
    loss = next(term for term in found.compute if term.name == "cross-entropy")
    assert loss.values["passes"] == pytest.approx(1.0) and loss.values["n"] == 3
    work = micro_batch(shape(accumulation=3), machine(), constants())
    assert total(found.compute) == pytest.approx(3 * work.seconds)
