"""The first and the last loss, and behind which steps they were taken: in the words of the console and of the card."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from clustertune.cli import stages as summary
from clustertune.rundir import RunDir


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (
            [("eval", 2, "eval_loss"), ("eval", 36, "eval_loss"), ("step", 36, "loss")],
            "eval loss, after steps 2 and 36: 2.0, 36.0",
        ),
        ([("eval", 0, "eval_loss"), ("eval", 8, "eval_loss")], "eval loss, before training and after step 8: 0.0, 8.0"),
        ([("step", 1, "loss"), ("step", 36, "loss")], "training loss, after steps 1 and 36: 1.0, 36.0"),
        ([("eval", 2, "eval_loss")], "eval loss, after step 2: 2.0"),
        ([("eval", 0, "eval_loss")], "eval loss, before training: 0.0"),
        ([("eval", 2, "seconds"), ("step", 1, "loss"), ("step", 2, "seconds")], "training loss, after step 1: 1.0"),
        ([], "run      "),
    ],
)
def test_the_end_of_a_run_says_which_loss_it_is(events: list[tuple[str, int, str]], says: str, tmp_path: Path) -> None:
    """Without evaluations it is the training's, and was called eval loss."""
    lines = [{"event": kind, "attempt": 1, "step": step, name: float(step)} for kind, step, name in events]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = StringIO()
    summary.show_summary(RunDir(tmp_path), {}, None, Console(file=shown, width=200))
    text = shown.getvalue().replace("0000", "0")
    assert says in text and text.count("loss,") == bool(events)
