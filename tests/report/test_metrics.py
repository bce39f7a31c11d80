"""Reading metrics of runs that were interrupted, and of files that were cut off."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.report import plots
from clustertune.report.metrics import Metrics, read_metrics
from clustertune.report.steps import StepRecord, Steps

RECORDED = Path(__file__).parent / "recorded" / "metrics.jsonl"


def write(path: Path, *events: dict[str, Any]) -> Metrics:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return read_metrics(path)


def step(number: int, attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "attempt": attempt, "time": 1.0, **values}


def test_a_recorded_run_with_a_kill_and_an_interruption() -> None:
    metrics = read_metrics(RECORDED)
    assert [record.step for record in metrics.steps] == list(range(1, 9))
    assert [record.attempt for record in metrics.steps] == [1, 1, 1, 1, 2, 2, 2, 3]
    assert [record.step for record in metrics.evals] == [0, 3, 6, 8]
    assert [(a.attempt, a.start_step, a.last_step, a.repeated, a.exit_code) for a in metrics.attempts] == [
        (1, 0, 5, 0, 1),
        (2, 4, 7, 1, 75),
        (3, 7, 8, 0, 0),
    ]
    assert [record.step for record in metrics.checkpoints] == [2, 4, 6, 7, 8]
    assert [(s.stage, s.status, s.tries) for s in metrics.stages] == [("prepare", "done", 1), ("train", "done", 3)]
    assert metrics.stages[1].seconds == pytest.approx(30.545 + 26.399 + 20.682)
    assert metrics.unreadable_lines == 0


def test_the_last_attempt_wins_and_what_it_threw_away_is_gone(tmp_path: Path) -> None:
    first = [step(n, 1, loss=float(n)) for n in range(1, 6)]
    second = [{"event": "start", "attempt": 2, "step": 2}, step(3, 2, loss=30.0)]
    metrics = write(tmp_path / "m", *first, {"event": "eval", "attempt": 1, "step": 4, "eval_loss": 1.0}, *second)
    assert [(record.step, record.attempt, record.loss) for record in metrics.steps] == [(1, 1, 1.0), (2, 1, 2.0), (3, 2, 30.0)]
    assert metrics.evals == []
    assert metrics.attempts[1].repeated == 3


def test_late_lines_of_an_attempt_that_was_followed_do_not_count(tmp_path: Path) -> None:
    """Its node was cut off: what it had logged comes out after the next attempt's first lines, in any order."""
    late = [step(n, 1, loss=float(n)) for n in (4, 5)]
    old_eval, new_eval = ({"event": "eval", "attempt": a, "step": 3, "eval_loss": float(a)} for a in (1, 2))
    start = {"event": "start", "attempt": 2, "step": 2}
    metrics = write(
        tmp_path / "m", step(1), step(2), start, step(3, 2, loss=30.0), new_eval, step(3, 1, loss=3.0), *late, old_eval
    )
    assert [(record.step, record.attempt) for record in metrics.steps] == [(1, 1), (2, 1), (3, 2)]
    assert [(record.attempt, record.eval_loss) for record in metrics.evals] == [(2, 2.0)]
    again = write(tmp_path / "m", start, step(3, 2), {"event": "start", "attempt": 1, "step": 0}, step(1), step(2), step(3))
    assert [(record.step, record.attempt) for record in again.steps] == [(1, 1), (2, 1), (3, 2)]


@given(cut=st.integers(0, RECORDED.stat().st_size))
def test_a_file_cut_anywhere_is_read_up_to_there(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = RECORDED.read_bytes()[:cut]
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_bytes(data)
    metrics = read_metrics(path)
    assert metrics.unreadable_lines <= 1
    whole = data[: data.rfind(b"\n") + 1]
    path.write_bytes(whole)
    assert len(read_metrics(path).steps) <= len(metrics.steps) <= len(read_metrics(path).steps) + 1


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)
KEYS = ["event", "step", "attempt", "loss", "stage", "status", "seconds", "exit_code", "path", "world_size"]
NAMES = st.sampled_from(["step", "eval", "stage", "start", "stop", "checkpoint", "other"])


@given(events=st.lists(st.tuples(NAMES, st.dictionaries(st.sampled_from(KEYS[1:]), VALUES)), max_size=8))
def test_no_event_whatever_it_holds_stops_the_reader(
    events: list[tuple[str, dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("".join(json.dumps({"event": name, **values}) + "\n" for name, values in events))
    metrics = read_metrics(path)
    assert [record.step for record in metrics.steps] == sorted({record.step for record in metrics.steps})


def test_a_long_line_is_drawn_with_its_greatest_and_least_values() -> None:
    """Of 30,000 steps no screen shows each."""
    steps = Steps([StepRecord(n, 1, loss=9.5 if n == 17_777 else 2.0) for n in range(1, 30_001)])
    at, values = plots._thinned(plots.Line("loss", steps.numbers, steps.column("loss")))
    assert len(at) <= 4_002 and max(values) == 9.5 and at[values.argmax()] == 17_777


def test_steps_behind_the_warm_up_are_steady() -> None:
    """A line of ten steps holds those of the warm-up; after a gap without a time a line counts from the line before it."""
    steps = Steps([StepRecord(n, 1, seconds=s) for n, s in ((1, 9.0), (2, 5.0), (3, 2.0), (4, math.nan), (5, None), (6, 3.0))])
    assert list(steps.steady()) == [2.0, 3.0] and [count for _, count, _ in steps.timed()] == [1, 1, 1, 1]
    assert list(Steps([StepRecord(10, 1, seconds=4.0), StepRecord(20, 1, seconds=1.0)]).steady()) == [1.0]
