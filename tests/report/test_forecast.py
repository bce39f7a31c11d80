"""What a plan said before the first step beside what happened."""

from __future__ import annotations

from clustertune.report import content
from clustertune.report.metrics import Metrics
from clustertune.report.steps import StepRecord, Steps

TOLD: dict[str, object] = {"step_s": 2.0, "tokens_per_s": 500.0, "peak_gib_per_gpu": 1.5, "hours": None}
TOLD |= {"bandwidth_source": "nominal", "calibrated": []}


def steps(*seconds: float) -> Metrics:
    """A course of steps of some seconds each, a GiB of memory."""
    records = [
        StepRecord(n, 1, seconds=value, tokens_per_second=1000 / value, memory_bytes=2.0**30)
        for n, value in enumerate(seconds, 1)
    ]
    return Metrics(steps=Steps(records))


def test_the_first_two_steps_do_not_count() -> None:
    """Compilation and first connections would make any plan look far too fast; before the first step the plan stands alone."""
    rows = {row[0]: row[1:] for row in content.forecast_rows(TOLD, steps(60.0, 30.0, 2.5, 2.5, 2.4), {})}
    assert rows["seconds of a step"] == ["2", "2.5000", "-20%"] and rows["GiB per GPU, peak"] == ["1.5000", "1", "+50%"]
    assert rows["tokens per second"][2] == "+25%" and "hours of training" not in rows  # the plan did not know
    alone = content.forecast_rows(TOLD, Metrics(), {})
    assert [row[0] for row in alone] == list(rows) and {row[3] for row in alone} == {content.UNKNOWN}
