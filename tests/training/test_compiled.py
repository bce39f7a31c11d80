"""Recomputation by operations and compilation per layer, on two real ranks: the numbers stay what they are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.benches import STRATEGIES, Bench, curve, distributed, make_bench
from tests.training.forked import Forge

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]

SAME = [
    "train.max_steps=4", "train.save_steps=4", "train.eval_steps=4", "train.max_length=64", "train.packing=false",
    "train.eval_on_start=false", "train.report_to=none", "lora.lora_dropout=0",
]  # fmt: skip
"""Padded to the longest of each batch: lengths differ from step to step."""
OFF = ["activation_checkpointing.ratio=0"]
SOME = ["activation_checkpointing.ratio=0.5", "activation_checkpointing.save=[attention,every_second_matmul]"]
REGIONAL = {"dynamo_backend": "AOT_EAGER", "dynamo_use_regional_compilation": True}
"""All of the compiler but for the code that it writes at the end, which takes minutes and changes no number that is asked
for here; INDUCTOR is the backend of a training."""


@pytest.fixture(scope="module")
def bench(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = make_bench(forge, tmp_path_factory.mktemp("compiled"), SAME)
    made.seconds = 900  # the compiler takes its time
    return made


def compiled(name: str, **more: str) -> tuple[int, dict[str, Any]]:
    """A strategy whose layers are compiled."""
    ranks, accelerate = STRATEGIES[name]
    return ranks, {**accelerate, "dynamo_config": REGIONAL | more}


def test_the_numbers_stay_what_they_are(bench: Bench) -> None:
    """Sharded or not, compiled or not, with some results kept: the same training."""
    plain = bench.train("fsdp2", *OFF)
    assert distributed(plain)["recomputed_layers"] == "0 of 4"
    for strategy, words in (("fsdp2", SOME), (compiled("fsdp2"), OFF), (compiled("fsdp2"), SOME), (compiled("ddp"), SOME)):
        path = bench.train(strategy, *words)
        assert curve(path) == pytest.approx(curve(plain), rel=2e-5, abs=2e-5), strategy
        assert distributed(path)["recomputed_layers"] == ("2 of 4" if words is SOME else "0 of 4")
        if strategy == "fsdp2":
            continue
        assert any("dynamo_use_dynamic is left to torch" in note for note in distributed(path)["notes"])


RECOMPUTED = {
    "none": OFF,
    "model": ["activation_checkpointing.ratio=1"],
    "some": SOME,
}


@pytest.mark.parametrize("name", ["fsdp2", "ddp"])
def test_compiled_dropout_is_the_same_when_it_is_computed_again(bench: Bench, name: str) -> None:
    """Recomputation on and off are no further apart with dropout than without; by Inductor the draws may be others."""
    curves = {}
    for dropout in ("0", "0.3"):
        for how, words in RECOMPUTED.items():
            path = bench.train(compiled(name), *words, f"lora.lora_dropout={dropout}")
            curves[dropout, how] = curve(path)
            assert distributed(path)["recomputed_layers"] == LAYERS.get(how, "4 of 4")
    for how in list(RECOMPUTED)[1:]:
        for dropout in ("0", "0.3"):
            assert curves[dropout, how] == pytest.approx(curves[dropout, "none"], rel=2e-5, abs=2e-5), (how, dropout)
    assert curves["0", "none"] != pytest.approx(curves["0.3", "none"], rel=1e-3), "nothing was dropped"


LAYERS = {"none": "0 of 4", "some": "2 of 4"}
