"""From what ranks measured to the figures beside the plan: arithmetic that can be done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.bench import preparation, result
from clustertune.cluster.load import load_cluster
from clustertune.plan.predict import Work
from clustertune.training.bench_schedule import BenchSchedule


def rank(seconds: list[float], tokens: int = 100, computed: int = 125, **more: Any) -> dict[str, Any]:
    steps = [{"step": n, "seconds": s, "tokens": tokens, "computed": computed, "labelled": 50} for n, s in enumerate(seconds)]
    return {"steps": steps, "peak": {"rss": 2**30}, "to_first_step_s": 9.0, **more}


def test_the_slowest_rank_is_the_step_and_all_ranks_tokens_count() -> None:
    """A step ends when its last rank has ended: a mean over ranks would flatter it."""
    found = result.figures([rank([1.0, 2.0]), rank([3.0, 1.0])], share=1.0)
    assert found["step_s"]["min"] == 2.0 and found["step_s"]["max"] == 3.0 and found["step_s"]["n"] == 2
    assert found["tokens_per_s_per_gpu"] == pytest.approx(400 / 5.0 / 2)
    assert found["computed_tokens_per_s_per_gpu"] == pytest.approx(500 / 5.0 / 2)
    assert found["labelled_tokens_per_s_per_gpu"] == pytest.approx(200 / 5.0 / 2)
    assert found["padding_share"] == pytest.approx(0.2) and found["tokens_per_step"] == 200
    assert found["start_s"] == 9.0


def test_tensor_parallel_ranks_read_the_same_tokens() -> None:
    """Two ranks of one group must not count a sequence twice."""
    alone = result.figures([rank([1.0]), rank([1.0])], share=1.0)
    paired = result.figures([rank([1.0]), rank([1.0])], share=0.5)
    assert paired["tokens_per_step"] * 2 == alone["tokens_per_step"]


MEASURED: dict[str, Any] = {
    "step_s": {"median": 10.0, "n": 4},
    "tokens_per_s_per_gpu": 1000.0,
    "computed_tokens_per_s_per_gpu": 1250.0,
    "peak": {"allocated_gib": 40.0},
}


def test_utilisation_by_hand() -> None:
    """1,000 tokens/s at 100 GFLOP each are 100 TFLOP/s: 10.1 % of an H100; padding and recomputation count in HFU alone."""
    found = result.utilisation(Work(1e11, 1.2e11), MEASURED, "NVIDIA H100 80GB HBM3")
    assert found["mfu"] == pytest.approx(100 / 989.4) and found["hfu"] == pytest.approx(1.2 * 125 / 989.4)
    assert found["gpu"] == "h100-sxm"


def test_beside_the_plan() -> None:
    """Measured over planned: above 1 the step takes longer than was said."""
    asked = preparation.BenchRequest("llama405b-oasst2", Path("runs/bench/x"), BenchSchedule(1, 2), ranks=16)
    made = preparation.make(asked)
    plan, why = result.predict(made.whole, load_cluster("rno-rtxpro6000"), made.lengths)
    assert plan is not None and why is None
    row = result.beside_plan(plan, None, MEASURED, {"mfu": 0.1, "hfu": 0.2})["rows"]["step_s"]
    assert row["ratio"] == pytest.approx(10.0 / plan.step.seconds) and row["plan"] == plan.step.seconds
    assert result.beside_plan(None, "no GPU", MEASURED, {}) == {"unknown": "no GPU"}
