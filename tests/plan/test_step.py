"""The seconds of a step by hand: what a rank computes, what travels and how long, what overlaps; parts sum up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clustertune.cluster.load import known_clusters, load_cluster
from clustertune.errors import UserError
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.machine import Link, PlanMachine
from clustertune.plan.predict import make_plan
from clustertune.plan.step import (
    ADAM_BYTES,
    HOST_ADAM_BYTES_PER_S,
    LOOP_ADAM_BYTES,
    Collective,
    RankGroup,
    Step,
    flops,
    micro_batch,
    offload,
    step,
    traffic,
)
from clustertune.plan.strategy import ModelShape
from clustertune.resolve.resolve import resolve
from tests.plan.world import (
    ADAPTERS,
    HBM,
    HIDDEN,
    INNER,
    INTER,
    INTRA,
    LAYERS,
    LORA,
    MATMUL,
    NF4,
    PEAK,
    RANK,
    TOTAL,
    VOCABULARY,
    constants,
    counted,
    machine,
    mixture,
    shape,
)
from tests.tree import REPO

TOKENS = 2 * 512
HEAD = VOCABULARY * HIDDEN
SCORES = 2 * 4 * (16 + 16) * 512 / 2
"""Forward FLOPs of attention of one token in one layer: 4 heads of 16 and 16, half of 512 tokens seen."""


def seconds(of: ModelShape, prefix: str = "") -> dict[str, float]:
    """Seconds of the parts whose name begins so; forward and backward of one name together."""
    found: dict[str, float] = {}
    work = micro_batch(of, machine(), constants())
    for term in [*work.forward, *work.backward]:
        if term.name.startswith(prefix):
            found[term.name] = found.get(term.name, 0.0) + term.value
    return found


DENSE = 6 * (LAYERS * MATMUL + HEAD) + LAYERS * 3.5 * SCORES
"""6 for each weight that is multiplied (the embedding row is not), and 3.5 times attention's forward pass."""
DOWN = INNER * HIDDEN
AGAIN = 2 * LAYERS * (MATMUL - DOWN) + LAYERS * SCORES
"""Recomputation ends before a layer's last product, which backward needs no result of."""
ACTIVE = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + HIDDEN * 8 + 2 * 3 * HIDDEN * INNER
"""Of a mixture: attention, the router, and two of eight experts."""


@pytest.mark.parametrize(
    ("of", "hardware", "expected"),
    [
        (shape(), False, DENSE),
        (shape(checkpointed=1.0), True, DENSE + AGAIN),
        (shape(checkpointed=0.5), True, DENSE + AGAIN / 2),
        (
            shape(checkpointed=1.0, kind="Megatron"),
            True,
            DENSE + AGAIN + 2 * LAYERS * DOWN,
        ),  # its own function: the whole layer
        (shape(checkpointed=1.0), False, DENSE),  # MFU does not count what is done again
        (shape(**LORA), False, 4 * (LAYERS * MATMUL + HEAD) + 6 * ADAPTERS + LAYERS * 3.5 * SCORES),
        (shape(mixture()), False, 6 * (LAYERS * ACTIVE + HEAD) + LAYERS * 3.5 * SCORES),
        # Of 512 tokens with a window of 128: 128 x (1 - 128 / 1024); a window beyond the sequence changes nothing.
        (shape(counted(window=128)), False, DENSE - LAYERS * 3.5 * SCORES * (1 - 128 * (1 - 1 / 8) / 256)),
        (shape(counted(window=512)), False, DENSE),
    ],
)
def test_flops_of_a_token(of: ModelShape, hardware: bool, expected: float) -> None:
    assert flops(of, hardware=hardware) == pytest.approx(expected * TOKENS * 16)


def test_lora_multiplies_backward_as_often_as_forward() -> None:
    """The gradient of the input alone; thin products are bound by what they read and write, those of a large rank by FLOPs."""
    found = seconds(shape(**LORA))
    assert found["matrix products, backward"] == pytest.approx(found["matrix products, forward"])
    elements = constants().lora_passes * ADAPTERS / RANK  # of inputs and outputs of all adapted modules
    assert found["LoRA"] == pytest.approx(elements * 2 * TOKENS / HBM)
    assert "LoRA" not in seconds(shape())
    wide = replace(shape(**LORA), adapters=100 * ADAPTERS, rank=100 * RANK)
    assert seconds(wide)["LoRA"] == pytest.approx(6 * 100 * ADAPTERS * TOKENS / (PEAK / 2)), "2 forward and 4 backward"
    again = seconds(replace(wide, strategy=shape(**LORA, checkpointed=1.0).strategy))
    assert again["LoRA"] == pytest.approx(8 / 6 * seconds(wide)["LoRA"]), "and once more where the layer is recomputed"


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_recomputation_repeats_layers_and_not_the_head(share: float) -> None:
    """A recomputed layer runs forward again: all products but one, attention, element-wise kernels; the loss is in no layer."""
    without, with_it = seconds(shape()), seconds(shape(checkpointed=share))
    more = sum(with_it.values()) - sum(without.values())
    layer = sum(value for name, value in without.items() if name.endswith(", forward") and not name.startswith("output head"))
    layer -= without["matrix products, forward"] * DOWN / MATMUL
    assert more == pytest.approx(share * layer)


def test_a_quantised_base_is_written_out_at_each_use() -> None:
    """Forward, backward and where a layer is recomputed; the rest of the model is not quantised, nor are norms."""
    nf4 = {**LORA, "weight_bytes": 0.5, "base": NF4}
    body = LAYERS * MATMUL
    for share in (0.0, 1.0):
        found = seconds(shape(**nf4, checkpointed=share), "dequant")
        assert found["dequantising"] == pytest.approx((2 + share * (1 - DOWN / MATMUL)) * body * 2.5 / HBM)
    assert not seconds(shape(**LORA), "dequant")
    assert not seconds(shape(**nf4, compute="fp8"), "dequant"), "products in float8 read float8"


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


GATHER, SCATTER = "all-gather of the weights", "reduce-scatter of the gradients"


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


def test_weights_on_the_host_come_over_the_host_link() -> None:
    """The rank's shard as it is stored, forward and backward; the gradient goes back; an own optimizer on the CPU."""
    away = {"offload_params": "cpu", "offload_optimizer": "cpu", "fused_optimizer": True}
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
    loop, deep = (offload(shape(**{**away, "fused_optimizer": False, "kind": kind}), machine()) for kind in ("FSDP2", "ZeRO-3"))
    assert loop.optimizer is not None and deep.optimizer is not None and deep.optimizer.value == pytest.approx(expected)
    more = TOTAL / 16 * (LOOP_ADAM_BYTES - ADAM_BYTES) / (HOST_ADAM_BYTES_PER_S / 8)
    assert loop.optimizer.value == pytest.approx(expected + more), "torch's own loop on CPUs is eight passes"
    nothing = offload(shape(), machine())
    assert (nothing.forward_s, nothing.backward_s, nothing.optimizer, nothing.note) == (0, 0, None, None)


def test_no_plan_is_faster_than_the_roofline() -> None:
    """Every recipe on every cluster that has room: the model's FLOPs at the GPU's nominal peak, and each collective at the
    nominal speed of its link. That simulated operators are as many FLOPs: tests/simulate."""
    recipes = [resolve(folder.parent) for folder in sorted((REPO / "recipes").glob("*/recipe.yaml"))]
    seen = 0
    for name in known_clusters():
        cluster = find_calibrated(load_cluster(name), None)
        for resolved in recipes:
            try:
                plan = make_plan(resolved, cluster.machine(resolved.recipe.slurm.nodes), sure=False)
            except UserError:
                continue  # more ranks than GPUs
            one, used, peak = plan.machine, plan.strategy, plan.machine.peak_flops
            if used.compute == "fp8":
                peak = one.peak_flops_fp8 or peak
            sent = traffic(plan.shape)
            each = [(c, used.accumulation) for c in (*sent.forward, *sent.backward, *sent.exposed)]
            wire = 0.0
            for collective, times in [*each, *((c, 1) for c in (*sent.last, *sent.after))]:
                if collective.group.size > 1 and collective.kind in ("gather", "reduce"):
                    share = 1 - 1 / collective.group.size
                    wire += times * collective.size * share / collective.group.nominal(one)
            least = max(flops(plan.shape, hardware=False) / used.world_size / peak, wire)
            assert 0 < least < plan.step.seconds, (name, resolved.name)
            seen += 1
    assert seen > 50
