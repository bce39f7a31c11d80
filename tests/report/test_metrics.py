"""Reading metrics of runs that were interrupted, and of files that were cut off."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.report import content, plots
from clustertune.report.content import duration
from clustertune.report.metrics import Metrics, StepRecord, Steps, read_metrics

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


def test_without_a_start_event_the_later_attempt_wins(tmp_path: Path) -> None:
    metrics = write(tmp_path / "m", step(1, loss=1.0), step(2, loss=2.0), step(1, 2, loss=10.0), step(1, 1, loss=1.0))
    assert [record.loss for record in metrics.steps] == [10.0, 2.0]
    assert read_metrics(tmp_path / "absent") == Metrics()


NO_EVENTS: list[str | bytes] = [
    '{"event":"step","step":2,"loss":1.', "[]", "7", "null", "{}", '{"event": 3}', '{"event": "step"}', '{"event": "stage"}',
    *(f'{{"event": "step", "step": {value}}}' for value in ('"two"', -1, 1.5, "NaN", "true")), "\x00\x00\x00", "[" * 100_000,
    b'\xff\xfe{"event"',
]  # fmt: skip


@pytest.mark.parametrize("line", NO_EVENTS)
def test_lines_that_are_no_events_are_counted_and_passed_over(line: str | bytes, tmp_path: Path) -> None:
    path, (first, third) = tmp_path / "m", (json.dumps(step(n, loss=float(n))).encode() for n in (1, 3))
    path.write_bytes(first + b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n\n" + third)
    metrics = read_metrics(path)
    assert [record.loss for record in metrics.steps] == [1.0, 3.0]
    assert metrics.unreadable_lines == (line != '{"event": 3}')


def test_unknown_events_and_wrong_types_do_no_harm(tmp_path: Path) -> None:
    metrics = write(
        tmp_path / "m",
        {"event": "gpu", "watts": 700},
        {"event": "take", "step": 1},
        step(1, loss="high", grad_norm=None, tokens=True, memory_bytes=5),
        {"event": "eval", "step": 1, "attempt": 1, "eval_loss": [1]},
        {"event": "checkpoint", "step": 1, "attempt": 1, "path": 3},
        {"event": "stop", "step": 1, "attempt": 1, "exit_code": "0", "reason": 4},
    )
    record = metrics.steps[0]
    assert (record.loss, record.grad_norm, record.tokens, record.memory_bytes) == (None, None, None, 5.0)
    assert metrics.evals[0].eval_loss is None and metrics.checkpoints[0].path is None
    assert metrics.attempts[0].exit_code is None and metrics.unreadable_lines == 0


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


def test_the_start_up_of_each_attempt(tmp_path: Path) -> None:
    """Parts as they come, the sum with what was read and held; an attempt that ended before has its parts only."""

    def part(name: str, seconds: float, attempt: int = 1, **more: Any) -> dict[str, Any]:
        return {"event": "startup", "attempt": attempt, "part": name, "seconds": seconds, **more}

    total = part("total", 9.5, read_bytes=[3, 4], host_bytes=[10, 20], loading="slices")
    metrics = write(tmp_path / "m", part("imports", 6.5), part("reading", 3.0), total, part("imports", 1.0, 2))
    first, second = metrics.startups
    assert (first.parts, first.seconds, first.read_bytes, first.host_bytes) == ({"imports": 6.5, "reading": 3.0}, 9.5, 7, 20)
    assert (second.attempt, second.parts, second.seconds) == (2, {"imports": 1.0}, None)
    rows = content.startup_rows(metrics)
    assert rows[0][:2] == ["1", duration(9.5)] and rows[0][-1] == f"imports {duration(6.5)}, reading {duration(3.0)}"
    assert metrics.unreadable_lines == 0


def test_a_long_line_is_drawn_with_its_greatest_and_least_values() -> None:
    """Of 30,000 steps no screen shows each."""
    steps = Steps([StepRecord(n, 1, loss=9.5 if n == 17_777 else 2.0) for n in range(1, 30_001)])
    at, values = plots._thinned(plots.Line("loss", steps.numbers, steps.column("loss")))
    assert len(at) <= 4_002 and max(values) == 9.5 and at[values.argmax()] == 17_777


def test_steps_behind_the_warm_up_are_steady() -> None:
    """A line of ten steps holds those of the warm-up; after a gap without a time a line counts from the line before it."""
    steps = Steps([StepRecord(n, 1, seconds=s) for n, s in ((1, 9.0), (2, 5.0), (3, 2.0), (4, math.nan), (5, None), (6, 3.0))])
    assert steps.steady() == [2.0, 3.0] and [count for _, count, _ in steps.timed()] == [1, 1, 1, 1]
    assert Steps([StepRecord(10, 1, seconds=4.0), StepRecord(20, 1, seconds=1.0)]).steady() == [1.0]
