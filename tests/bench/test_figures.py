"""From the lines of metrics.jsonl to the figures beside the plan: arithmetic that can be done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune import bench
from clustertune.cluster.load import load_cluster

GIB = 2**30


def step(time: float, tokens: int, **more: Any) -> dict[str, Any]:
    return {"event": "step", "time": time, "tokens": tokens, "memory_bytes": 2 * GIB, "padding": 0.2, **more}


EVENTS = [
    {"event": "startup", "part": "total", "seconds": 9.0},
    step(50.0, 100), step(52.0, 300, mfu=0.1, hfu=0.2), {"event": "stage", "time": 1.0}, step(56.0, 500, mfu=0.3, hfu=0.4),
]  # fmt: skip


def made(*overrides: str, ranks: int = 2) -> bench.Bench:
    return bench.make("tiny-oasst2", overrides, Path("runs/bench/x"), 1, 2, ranks=ranks)


def test_what_is_behind_the_warm_up_counts() -> None:
    """The first steps hold compilation and connections; a step lasts from the line before to its own."""
    found = bench.figures(EVENTS, made(), on_gpu=True)
    assert found["steps_s"] == [2.0, 4.0] and found["step_s"]["median"] == 3.0 and found["step_s"]["n"] == 2
    assert found["tokens"] == 400 and found["tokens_per_s_per_gpu"] == pytest.approx(400 / 6 / 2)
    assert found["padding_share"] == pytest.approx(0.2) and found["start_s"] == 9.0
    assert found["utilisation"] == {"mfu": pytest.approx(0.2), "hfu": pytest.approx(0.3)}
    assert found["peak"] == {"allocated_gib": 2.0, "rss_gib": None}


def test_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured over planned: above 1 the step takes longer than was said."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = bench.make("llama405b-oasst2", (), Path("runs/bench/x"), 1, 2, ranks=16)
    plan, why = bench.predict(asked, load_cluster("rno-rtxpro6000"))
    assert plan is not None and why is None
    measured = bench.figures(EVENTS, made(), on_gpu=True)
    row = bench.beside_plan(plan, None, measured)["rows"]["step_s"]
    assert row["ratio"] == pytest.approx(3.0 / plan.step.seconds) and row["plan"] == plan.step.seconds
    assert bench.beside_plan(None, "no GPU", {}) == {"unknown": "no GPU"}
