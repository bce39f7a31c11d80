"""What recomputation, kernels and losses change in a plan: each key in the right direction, by the right amount."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clustertune.plan import memory
from clustertune.plan.constants import total
from clustertune.plan.step import micro_batch, traffic
from clustertune.plan.strategy import ModelShape
from tests.plan.world import (
    HIDDEN,
    INNER,
    LAYERS,
    MATMUL,
    NARROW,
    VOCABULARY,
    constants,
    machine,
    shape,
)  # fmt: skip

ALL = {"checkpointed": 1.0, "compiled": False, "isolated": False}
OUT = {"q": HIDDEN, "k": NARROW, "v": NARROW, "o": HIDDEN, "gate": INNER, "up": INNER, "down": HIDDEN}
"""Widths of the products' results in the order in which they run."""
ATTENTION = 2 * HIDDEN + 4 * 4
"""Bytes of a token's attention: 4 heads of 16 elements in 16 bits, and a float32 for each head."""


def measured(of: ModelShape) -> dict[str, float]:
    """Bytes of activations and logits at the loss, the peak, and seconds of a micro batch by kind of work."""
    found = memory.moments(of, constants())
    at_loss = {}
    for term in found[-3].parts:
        at_loss[term.name] = at_loss.get(term.name, 0.0) + term.value
    work = micro_batch(of, machine(), constants())
    times = {term.name: term.value for term in [*work.forward, *work.backward]}
    return {
        "activations": at_loss.get("activations", 0.0) + at_loss.get("saved layer inputs", 0.0),
        "logits": at_loss.get("logits", 0.0),
        "peak": max(moment.bytes for moment in found),
        "products again": times.get("matrix products, recomputation", 0.0),
        "attention again": times.get("attention, recomputation", 0.0),
        "elements": sum(value for name, value in times.items() if name.startswith("element-wise")),
        "seconds": total([*work.forward, *work.backward]),
        "gathers": float(len([c for c in traffic(of).forward if c.kind == "gather"])),
    }


TOKENS = 1024
Effects = dict[str, Callable[[float, float], bool]]


def kept(each: float) -> Callable[[float, float], bool]:
    """So many bytes a token and layer more."""
    return lambda before, after: after - before == LAYERS * TOKENS * each


def repeated(share: float) -> Callable[[float, float], bool]:
    return lambda before, after: before > 0 and after == pytest.approx(share * before)


NONE = {"checkpointed": 0.0}
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any], Effects]] = {
    "attention kept": (
        {}, {"save": ("attention",)},
        {"activations": kept(ATTENTION), "attention again": repeated(0), "products again": repeated(1)},
    ),
    "products kept": (
        {}, {"save": ("matmul",)},
        {"activations": kept(2 * sum(OUT.values())), "products again": repeated(0), "attention again": repeated(1),
         "seconds": lambda b, a: a < b},
    ),
    "attention and every second product kept": (
        {}, {"save": ("attention", "every_second_matmul")},
        {"activations": kept(ATTENTION + 2 * (OUT["q"] + OUT["v"] + OUT["gate"] + OUT["down"])), "attention again": repeated(0),
         "products again": repeated(HIDDEN * (NARROW + HIDDEN + INNER) / (MATMUL - INNER * HIDDEN))},  # k, o and up; never down
    ),
    # The search tries a ratio of 0 for every recipe, also for one that has a policy.
    "a policy without recomputation": (NONE, NONE | {"save": ("matmul", "attention")}, {"activations": kept(0)}),
    # Of each of two norms its input in 16 bits, not in 32, and no normalised row; of the gate one row less; the last norm.
    "Liger's kernels": (
        NONE, NONE | {"liger": True},
        {"activations": lambda b, a: b - a == TOKENS * (LAYERS * (2 * 4 * HIDDEN + 2 * INNER) + 4 * HIDDEN),
         "elements": lambda b, a: a / b == pytest.approx(constants().compiled_hidden / constants().eager_hidden)},
    ),
    # No mask of 2 x 512 numbers a token, and keys and values are not written out for each head.
    "flash attention, packed": (
        NONE | {"isolated": True}, NONE | {"isolated": True, "attention": "flash"},
        {"activations": kept(-2 * (1024 + 2 * (HIDDEN - NARROW)))},
    ),
    "whole logits": (
        {"tiled_loss": True}, {"fused_loss": False, "second_forward": "metrics"},
        {"logits": lambda b, a: b == TOKENS * 32768 * 2 and a == TOKENS * VOCABULARY * 12, "seconds": lambda b, a: a > b,
         "gathers": lambda b, a: a == 2 * b},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EFFECTS)
def test_each_key_has_its_effect(name: str) -> None:
    """A key that a plan does not see is a key that nobody can choose by it. By hand, from the widths of the seven products."""
    before, after, wanted = EFFECTS[name]
    old, new = measured(shape(**(ALL | before))), measured(shape(**(ALL | after)))
    for what, holds in wanted.items():
        assert holds(old[what], new[what]), f"{what}: {old[what]} -> {new[what]}"
