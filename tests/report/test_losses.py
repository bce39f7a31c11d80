"""The first and the last loss, and behind which steps they were taken: in the words of the console and of the card."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from clustertune import summary
from clustertune.report import content
from clustertune.report.metrics import EvalRecord, Metrics, StepRecord, Steps
from clustertune.rundir import RunDir


@pytest.mark.parametrize(
    ("steps", "when"),
    [
        ([0, 3, 8], "before training and after step 8"),
        ([2, 4, 36], "after steps 2 and 36"),
        ([0], "before training"),
        ([2], "after step 2"),
    ],
)
def test_before_is_said_of_step_0_only(steps: list[int], when: str) -> None:
    """Most recipes evaluate first after some steps: that loss is none before training."""
    metrics = Metrics(evals=[EvalRecord(step, 1, eval_loss=9.0 - step / 10) for step in steps])
    values = [9.0 - step / 10 for step in steps]
    assert content.eval_losses(metrics) == (when, [values[0], values[-1]][: len(steps)])


def test_what_was_not_taken_is_none() -> None:
    """An evaluation without a loss, no evaluation, no step."""
    assert content.eval_losses(Metrics(evals=[EvalRecord(2, 1)])) is None
    assert content.train_losses(Metrics()) is None
    assert content.train_losses(Metrics(steps=Steps([StepRecord(1, 1, loss=2.0), StepRecord(2, 1)]))) == ("after step 1", [2.0])


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (
            [("eval", 2, "eval_loss"), ("eval", 36, "eval_loss"), ("step", 36, "loss")],
            "eval loss, after steps 2 and 36: 2.0, 36.0",
        ),
        ([("eval", 0, "eval_loss"), ("eval", 8, "eval_loss")], "eval loss, before training and after step 8: 0.0, 8.0"),
        ([("step", 1, "loss"), ("step", 36, "loss")], "training loss, after steps 1 and 36: 1.0, 36.0"),
        ([], "run      "),
    ],
)
def test_the_end_of_a_run_says_which_loss_it_is(events: list[tuple[str, int, str]], says: str, tmp_path: Path) -> None:
    """Without evaluations it is the training's, and was called eval loss."""
    lines = [{"event": kind, "attempt": 1, "step": step, name: float(step)} for kind, step, name in events]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = StringIO()
    summary.render(RunDir(tmp_path), {}, None, Console(file=shown, width=200))
    text = shown.getvalue().replace("0000", "0")
    assert says in text and text.count("loss,") == bool(events)
