"""How long a rank computes, by hand: FLOPs of dense models, LoRA, recomputation and mixtures; bytes of everything else."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.plan.step import flops, micro_batch
from clustertune.plan.strategy import ModelShape
from tests.plan.world import (
    ADAPTERS,
    HBM,
    HIDDEN,
    INNER,
    LAYERS,
    LORA,
    MATMUL,
    PEAK,
    RANK,
    VOCABULARY,
    constants,
    counted,
    machine,
    mixture,
    shape,
)

TOKENS = 2 * 512
HEAD = VOCABULARY * HIDDEN
SCORES = 2 * 4 * (16 + 16) * 512 / 2
"""Forward FLOPs of attention of one token in one layer: 4 heads of 16 and 16, half of 512 tokens seen."""
SPEED = 0.5 * PEAK


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
AGAIN = 2 * LAYERS * MATMUL + LAYERS * SCORES
ACTIVE = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + HIDDEN * 8 + 2 * 3 * HIDDEN * INNER
"""Of a mixture: attention, the router, and two of eight experts."""


@pytest.mark.parametrize(
    ("of", "hardware", "expected"),
    [
        (shape(), False, DENSE),
        (shape(checkpointed=1.0), True, DENSE + AGAIN),
        (shape(checkpointed=0.5), True, DENSE + AGAIN / 2),
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


def test_packed_attention_counts_what_is_computed() -> None:
    """The causal half of each conversation; under a mask the square of the micro batch, of which MFU counts the same half."""
    apart = {"packing": True, "isolated": True, "conversation": 128.0}
    plain = seconds(shape(attention="flash"), "attention")["attention, forward"]
    assert seconds(shape(**apart, attention="flash"), "attention")["attention, forward"] == pytest.approx(plain * 128 / 512)
    for dense in ("sdpa", "eager"):
        found = seconds(shape(**apart, attention=dense), "attention")["attention, forward"]
        assert found == pytest.approx(plain * TOKENS / (512 / 2))
    rest = flops(shape(), hardware=False) - LAYERS * 3.5 * SCORES * TOKENS * 16
    for kind, hardware, seen in (("flash", True, 64), ("sdpa", False, 64), ("sdpa", True, TOKENS)):
        total = flops(shape(**apart, attention=kind), hardware=hardware)
        assert total == pytest.approx(rest + LAYERS * 3.5 * SCORES * seen / 256 * TOKENS * 16)
    narrow = counted(window=32)
    assert seconds(shape(narrow, **apart, attention="flash"), "attention")["attention, forward"] < plain * 32 / 256
    assert seconds(shape(narrow, **apart), "attention")["attention, forward"] == pytest.approx(plain * TOKENS / 256), (
        "no kernel"
    )


def test_a_rank_multiplies_its_tokens() -> None:
    """Forward 2, backward 4 FLOPs per weight and token, at the share of the peak that products reach."""
    found = seconds(shape(), "matrix")
    assert found["matrix products, forward"] == pytest.approx(2 * LAYERS * MATMUL * TOKENS / SPEED)
    assert found["matrix products, backward"] == pytest.approx(4 * LAYERS * MATMUL * TOKENS / SPEED)
    head = seconds(shape(), "output head")
    assert sum(head.values()) == pytest.approx(6 * HEAD * TOKENS / SPEED)
    attention = seconds(shape(), "attention")
    assert sum(attention.values()) == pytest.approx(3.5 * LAYERS * SCORES * TOKENS / (0.5 * SPEED))


def test_lora_multiplies_backward_as_often_as_forward() -> None:
    """The gradient of the input alone; the thin products are bound by what they read and write."""
    found = seconds(shape(**LORA))
    assert found["matrix products, backward"] == pytest.approx(found["matrix products, forward"])
    elements = 3.0 * ADAPTERS / RANK  # lora_passes x (inputs + outputs of all adapted modules)
    assert found["LoRA"] == pytest.approx(elements * 2 * TOKENS / HBM)
    assert "LoRA" not in seconds(shape())


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_recomputation_repeats_layers_and_not_the_head(share: float) -> None:
    """A recomputed layer runs forward again: products, attention, element-wise kernels; the loss is not in a layer."""
    without, with_it = seconds(shape()), seconds(shape(checkpointed=share))
    more = sum(with_it.values()) - sum(without.values())
    layer = sum(value for name, value in without.items() if name.endswith(", forward") and not name.startswith("output head"))
    assert more == pytest.approx(share * layer)


@pytest.mark.parametrize(
    ("sizes", "products", "norms"),
    [
        ({"tp": 4}, 4, 1), ({"pp": 2}, 2, 2), ({"cp": 2}, 2, 2), ({"tp": 2, "sequence_parallel": True}, 2, 2),
        ({"tp": 2, "pp": 2, "sequence_parallel": True}, 4, 4),
    ],
)  # fmt: skip
def test_model_parallel_ranks_share_the_products(sizes: dict[str, Any], products: int, norms: int) -> None:
    """Each computes its part of the layers, of a layer, or of the sequence; without sequence parallelism every tensor-parallel
    rank norms all tokens (https://arxiv.org/abs/2205.05198, 4.2)."""
    for prefix, part in (("matrix", products), ("element", norms)):
        one, some = seconds(shape(), prefix), seconds(shape(**sizes), prefix)
        assert sum(some.values()) == pytest.approx(sum(one.values()) / part)


def test_element_wise_kernels_by_hand() -> None:
    """A forward pass is a third of the constant: elements of the hidden size per token and layer, 2 bytes each."""
    for compiled, elements in ((True, 250.0), (False, 560.0)):
        given = constants(compiled_hidden=250.0, eager_hidden=560.0)
        work = micro_batch(shape(compiled=compiled), machine(), given)
        found = sum(t.value for t in [*work.forward, *work.backward] if t.name.startswith("element"))
        assert found == pytest.approx(LAYERS * elements * HIDDEN * 2 * TOKENS / HBM)


def test_the_loss_in_tiles_moves_a_third() -> None:
    """Whole logits are read and written by each operation on them."""
    for fused, size in ((False, 30.0), (True, 10.0)):
        found = seconds(shape(fused_loss=fused), "cross")
        assert found["cross-entropy"] == pytest.approx(size * VOCABULARY * TOKENS / HBM)


def test_a_quantised_base_is_written_out_at_each_use() -> None:
    """Forward, backward and where a layer is recomputed; the rest of the model is not quantised."""
    nf4 = {**LORA, "weight_bytes": 0.5}
    body = LAYERS * (MATMUL + 2 * HIDDEN)
    for share in (0.0, 1.0):
        found = seconds(shape(**nf4, checkpointed=share), "dequant")
        assert found["dequantising"] == pytest.approx((2 + share) * body * 2.5 / HBM)
    assert not seconds(shape(**LORA), "dequant")
    assert not seconds(shape(**nf4, compute="fp8"), "dequant"), "products in float8 read float8"


@pytest.mark.parametrize(("compute", "factor"), [("fp8", 0.5), ("fp32", 2.0), ("bf16", 1.0), ("fp16", 1.0)])
def test_the_type_that_computes(compute: str, factor: float) -> None:
    """Float8 has its own peak, TF32 half of bfloat16's; without a float8 unit the request changes nothing."""
    one, other = seconds(shape(), "matrix"), seconds(shape(compute=compute), "matrix")
    assert sum(other.values()) == pytest.approx(factor * sum(one.values()))
    if compute == "fp8":
        work = micro_batch(shape(compute="fp8"), machine(peak_flops_fp8=None), constants())
        assert sum(t.value for t in [*work.forward, *work.backward] if "matrix" in t.name) == pytest.approx(sum(one.values()))


def test_float32_shards_are_cast_before_they_travel() -> None:
    """Once forward, and backward once more where weights are gathered again; not what one rank holds whole."""
    each = 7 * shape().parameters / 16 / HBM
    assert seconds(shape(), "casts")["casts of the shards"] == pytest.approx(3 * each)
    assert seconds(shape(reshard=False), "casts")["casts of the shards"] == pytest.approx(2 * each)
    assert not seconds(shape(**LORA), "casts")
    assert not seconds(shape(weight_shards=1), "casts")
