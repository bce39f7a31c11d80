"""Memory of a GPU and of a node by hand: what rests, what is gathered, what is kept for backward, what is offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.plan import memory
from clustertune.plan.memory import host_parts, save_copy
from clustertune.plan.predict import make_shape
from clustertune.plan.strategy import ModelShape, strategy
from clustertune.resolve.resolve import resolve
from tests.plan.world import (
    ADAPTERS,
    ENDS,
    HIDDEN,
    INNER,
    LAYER,
    LAYERS,
    LORA,
    LORA_SECTION,
    MATMUL,
    NF4,
    TOTAL,
    VOCABULARY,
    ZERO3,
    constants,
    shape,
    write_recipe,
)

TOKENS = 2 * 512
BODY, ROOT = LAYERS * LAYER, 2 * ENDS + HIDDEN
MATRICES = LAYERS * MATMUL
QUANTISED = {**LORA, "weight_bytes": 0.5, "gather_bytes": 0.5, "base": NF4}
FORWARD, LOSS, BACKWARD, UPDATE = -4, -3, -2, -1


def parts(of: ModelShape, moment: int, **changes: Any) -> dict[str, float]:
    """Bytes by part; parts of one name together."""
    found: dict[str, float] = {}
    for term in memory.moments(of, constants(**changes))[moment].parts:
        found[term.name] = found.get(term.name, 0.0) + term.value
    return found


def near(values: dict[str, float]) -> Any:
    return pytest.approx(values)


def test_full_fine_tuning_with_fsdp2() -> None:
    """12 B a parameter rest (weights and two moments), gradients and the root of a moment join them at the update."""
    resting = {"weights": TOTAL * 4 / 16, "optimizer": TOTAL * 8 / 16}
    assert parts(shape(), UPDATE) == near(resting | {"gradients": TOTAL * 4 / 16, "buffers": TOTAL * 4 / 16})
    for moment in (LOSS, BACKWARD):
        found = parts(shape(), moment)
        assert {name: found[name] for name in resting} == near(resting)


def test_lora_holds_states_of_adapters_alone() -> None:
    """The base rests in bfloat16, the adapters in their own type; without an optimizer state no root is taken of it.

    LoRA's A has 8 rows for 16 ranks: the first eight hold one each, and an all-gather carries 16."""
    found = parts(shape(**LORA), UPDATE)
    split = ADAPTERS + LAYERS * 2 * 8 * HIDDEN
    assert found == near({
        "weights": TOTAL * 2 / 16, "adapters": split * 4 / 16, "optimizer": split * 8 / 16,
        "gradients": split * 4 / 16, "buffers": split * 4 / 16,
    })  # fmt: skip
    plain = parts(shape(**LORA, trained_bytes=2.0, state_bytes=0.0), UPDATE)
    assert plain["adapters"] == split * 2 / 16 and not {"optimizer", "buffers"} & set(plain)


def test_the_last_norm_is_gone_when_layers_go_back() -> None:
    """Its rows are there at the loss: in float32, normalised, and as the head's input."""
    last = TOKENS * HIDDEN * (4 + 2 + 2)
    found = {name: parts(shape(checkpointed=1.0), moment) for name, moment in (("loss", LOSS), ("back", BACKWARD))}
    assert found["loss"]["activations"] == near(last)
    assert "activations" not in found["back"]


def test_an_evaluation_has_its_own_batch() -> None:
    """Its layer at work takes rows of its own number; without an evaluation there is no such moment."""
    sizes = [
        sum(parts(shape(checkpointed=1.0, eval_batch=batch, tiled_loss=False, fused_loss=True), -1).values())
        for batch in (64, 128)
    ]
    row = 2 * HIDDEN  # bytes of the residual sum: of the embedding, of the layer's input, behind attention, normalised
    assert sizes[1] - sizes[0] == pytest.approx(64 * 512 * (3 * 2 * INNER + 4 * row))
    assert memory.moments(shape(), constants())[-1].name == memory.UPDATE


def test_a_quantised_base_leaves_embedding_and_head() -> None:
    """Only the layers' matrices are quantised, no norm; bitsandbytes' scales stay whole on every rank."""
    found = parts(shape(**QUANTISED), UPDATE)
    assert found["weights"] == pytest.approx((MATRICES * 0.5 + (TOTAL - MATRICES) * 2) / 16)
    scaled = parts(shape(**{**QUANTISED, "weight_bytes": 0.6}, whole_bytes=0.1), UPDATE)
    assert scaled["weights"] == pytest.approx((MATRICES * 0.5 + (TOTAL - MATRICES) * 2) / 16 + MATRICES * 0.1)
    assert found["weights"] < parts(shape(**LORA), UPDATE)["weights"]


def gathered(of: ModelShape, moment: int = LOSS) -> float:
    return sum(value for name, value in parts(of, moment).items() if name.startswith("gathered"))


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, TOTAL * 2.0),  # FSDP under no_sync: whole, in the type that is reduced
        ({"reduce_each": True}, 0.0),
        ({"kind": "ZeRO-3"}, 0.0),
        (LORA, ADAPTERS * 2.0),
    ],
)
def test_gradients_between_micro_batches(changes: dict[str, Any], more: float) -> None:
    """transformers' Trainer reduces after the last micro batch only: until then FSDP holds gradients whole."""
    one, two = (parts(shape(**changes, accumulation=count), LOSS).get("gradients", 0.0) for count in (1, 2))
    assert two - one == pytest.approx(more)


def activations(of: ModelShape) -> float:
    """Bytes at the loss of what layers keep for backward, whole or recomputed."""
    return sum(value for name, value in parts(of, LOSS).items() if name in ("activations", "saved layer inputs"))


@pytest.mark.parametrize("compiled", [True, False])
def test_recomputed_layers_keep_their_input(compiled: bool) -> None:
    """A row of the hidden size for each layer; half of the layers keep half of both; offloaded it is on the host."""
    none, half, every = (activations(shape(compiled=compiled, checkpointed=share)) for share in (0.0, 0.5, 1.0))
    row = LAYERS * HIDDEN * 2 * TOKENS
    inputs = parts(shape(compiled=compiled, checkpointed=1.0), LOSS)["saved layer inputs"]
    assert inputs == pytest.approx(row)
    assert half == pytest.approx((none + every) / 2)
    assert every < none / 3
    away = shape(compiled=compiled, checkpointed=1.0, checkpoint_offload=True)
    assert activations(away) == pytest.approx(every - row)
    assert parts(shape(compiled=compiled, checkpointed=1.0), BACKWARD)["one recomputed layer"] > 0, (
        "one layer is computed again"
    )


def test_logits_are_whole_only_where_no_loss_in_tiles_is_used() -> None:
    """Tokens x vocabulary, divided by tensor parallelism: logits, log-softmax and a gradient of each, more where float32 copies
    are made; a program that holds its logits has them in the backward pass and at the update too."""
    entries = TOKENS * VOCABULARY
    whole = parts(shape(fused_loss=False), LOSS)["logits"]
    assert whole == pytest.approx(entries * 8)
    assert parts(shape(fused_loss=False, tp=2), LOSS)["logits"] == pytest.approx(entries * 8 / 2)
    assert parts(shape(fused_loss=False, compiled=False, half_loss=True), LOSS)["logits"] == pytest.approx(whole)
    assert parts(shape(fused_loss=False, compiled=False), LOSS)["logits"] == pytest.approx(entries * 12)
    for moment in (BACKWARD, UPDATE):
        held = parts(shape(fused_loss=False, holds_logits=True), moment)
        assert held["logits"] == pytest.approx(entries * 2)
        assert "logits" not in parts(shape(fused_loss=False), moment)
    many = {"micro_batch": 64, "sequence": 4096}
    tiled, plain = (parts(shape(**many, fused_loss=fused), LOSS).get("logits", 0.0) for fused in (True, False))
    assert tiled < plain / 10


def host(folder: Path, **recipe: Any) -> dict[str, float]:
    """A node's RAM by part for a recipe of Llama-3-8B."""
    resolved = resolve(write_recipe(folder, **recipe))
    return {term.name: term.value for term in host_parts(resolved, make_shape(resolved, strategy(resolved)))}


@pytest.mark.parametrize(("lora", "count", "each"), [(None, 8_030_261_248, 4 + 8), (LORA_SECTION, None, 4 + 8)])
def test_ram_of_the_copy_that_a_save_makes(tmp_path: Path, lora: Any, count: int | None, each: int) -> None:
    """What is trained and AdamW's moments, once in each node; none where training waits for its saves."""
    resolved = resolve(write_recipe(tmp_path / "r", lora=lora))
    made = make_shape(resolved, strategy(resolved))
    copy = save_copy(made)
    assert copy is not None and copy.value == pytest.approx((count or made.adapters) * each)
    zero = resolve(write_recipe(tmp_path / "z", accelerate=ZERO3))
    assert save_copy(make_shape(zero, strategy(zero))) is None
