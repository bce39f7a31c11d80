"""Utilisation, hours and price from measured steps, checked against figures that were worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.bench import page, preparation, result
from clustertune.cluster.load import load_cluster
from clustertune.plan.predict import Work, work_of
from clustertune.resolve.resolve import resolve
from clustertune.training.bench_schedule import BenchSchedule

MEASURED: dict[str, Any] = {
    "ranks": 16,
    "step_s": {"median": 10.0, "n": 4},
    "tokens_per_s_per_gpu": {"mean": 1000.0},
    "computed_tokens_per_s_per_gpu": 1250.0,
    "peak": {"allocated_gib": 40.0},
    "communication": {"exposed_share": 0.5},
    "start_s": 100.0,
}
ENDS = {"evaluation_s": 60.0, "checkpoint_s": 30.0}


def test_utilisation_by_hand() -> None:
    """1,000 tokens/s at 100 GFLOP each are 100 TFLOP/s: 10.1 % of an H100; padding and recomputation count in HFU alone."""
    found = result.utilisation(Work(1e11, 1.2e11), MEASURED, "NVIDIA H100 80GB HBM3")
    assert found["mfu"] == pytest.approx(100 / 989.4) and found["hfu"] == pytest.approx(1.2 * 125 / 989.4)
    assert found["gpu"] == "h100-sxm"


@pytest.mark.parametrize(
    ("work", "device", "word"),
    [
        (Work(1.0, 1.0), None, "no GPU"),
        (Work(1.0, 1.0), "NVIDIA Toaster", "not in ops/hardware.yaml"),
        (None, "NVIDIA H100 80GB HBM3", "count"),
    ],
)
def test_no_peak_is_no_utilisation(work: Work | None, device: str | None, word: str) -> None:
    """A utilisation against a guessed peak would be a made-up figure."""
    found = result.utilisation(work, MEASURED, device)
    assert found["mfu"] is None and word in found["why"]


def test_the_work_of_a_token_is_the_planners() -> None:
    """LoRA on a frozen base: 4 FLOPs per weight and token, and more with recomputation."""
    work = work_of(resolve("llama405b-oasst2", []))
    assert work is not None and 1.6e12 < work.model < 1.75e12 and work.hardware > work.model * 1.3


def test_hours_are_steps_ends_and_start() -> None:
    """The reference: 36 steps, 18 evaluations and one at the start, 2 checkpoints."""
    whole = resolve("llama405b-oasst2", ["train.eval_on_start=true"])
    found = result.whole(whole, MEASURED, ENDS, None, None, "rtx-pro-6000-blackwell-server")
    assert (found["steps"], found["evaluations"], found["checkpoints"]) == (36, 19, 2)
    assert found["hours"] == pytest.approx((100 + 360 + 19 * 60 + 2 * 30) / 3600)
    assert found["gpu_hours"] == pytest.approx(16 * found["hours"])
    assert found["cost"] is None or found["cost"]["currency"]


@pytest.mark.parametrize(
    ("overrides", "rows", "steps"),
    [
        (["train.max_steps=7"], 1000, 7),
        (["train.num_train_epochs=2"], 65, 6),
        ([], 64, 2),
        (["expect.steps=null", "data.expect=null"], None, None),
    ],
)
def test_how_many_steps_there_are(overrides: list[str], rows: int | None, steps: int | None) -> None:
    """What was read counts more than what was expected, and what is not known is not made up."""
    found, why = result.whole_steps(resolve("llama405b-oasst2", overrides), rows, None)
    assert found == steps and why


def test_beside_the_plan() -> None:
    """Measured over planned: above 1 the step takes longer than was said."""
    asked = preparation.BenchRequest("llama405b-oasst2", Path("runs/bench/x"), BenchSchedule(1, 2, 1), elsewhere=True)
    made = preparation.make(asked)
    plan, why = result.predict(made.whole, load_cluster("rno-rtxpro6000"), made.lengths)
    assert plan is not None and why is None
    found = result.beside_plan(plan, None, MEASURED, {"mfu": 0.1, "hfu": 0.2}, 3.0)
    row = found["rows"]["step_s"]
    assert row["ratio"] == pytest.approx(10.0 / plan.step.seconds) and row["plan"] == plan.step.seconds
    assert found["rows"]["hours"]["measured"] == 3.0
    plan, why = result.predict(made.whole, load_cluster("local"), made.lengths)
    if plan is None:  # the planner's own words: a benchmark on CPUs is not held against a guess
        assert result.beside_plan(None, why, MEASURED, {}, None) == {"unknown": why} and why


def test_figures_in_words() -> None:
    """A table with 17 digits is not read."""
    assert [page.number(v) for v in (None, True, 0.12345, 12.345, 12345.6)] == ["-", "-", "0.123", "12.3", "12,346"]
    assert page.percent(None) == "-" and page.percent(0.1234) == "12.3 %" and page.gib(None) == "-"
