"""The table of a sweep: read from run folders alone, sorted, with the reason of what failed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.launch.attempt import AttemptPlan, Node
from clustertune.rundir import RunDir
from clustertune.sweep import Sweep, as_json, check_metric, collect, make_sweep


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Six points: done, done and better, failed in training, failed before it had a run folder, under way, untouched."""
    made = make_sweep(
        "tiny-oasst2", ["train.learning_rate=1e-3,2e-3,3e-3", "lora.r=8,16"], tiny=False, last="train", path=tmp_path / "s"
    )[0]
    made.write()
    schedule(made, 0, [2.0, 1.5], done=True)
    schedule(made, 1, [2.0, 1.25], done=True, scores={"prompt_level_strict_acc": 0.5})
    schedule(made, 2, [2.0, math.nan], stage="failed")
    outcome(made, 2, 1, 93, "the loss is not finite at step 2")
    (made.path / "logs").mkdir()
    (made.path / "logs" / "x-7_3.log").write_text("a\nerror: data.input: not JSON: <b>\nlast words\n")
    schedule(made, 4, [1.0])
    return made


def schedule(
    made: Sweep, index: int, losses: list[float], *, done: bool = False, stage: str = "started", scores: Any = None
) -> None:
    run = RunDir(made.points[index].run_dir)
    run.path.mkdir(parents=True)
    run.run_json.write_text("{}")
    events: list[dict[str, Any]] = [{"event": "stage", "stage": "train", "status": "started"}]
    for step, loss in enumerate(losses, 1):
        events.append({"event": "step", "step": step, "attempt": 1, "loss": loss + 1})
        events.append({"event": "eval", "step": step, "attempt": 1, "eval_loss": loss})
    if stage != "started" or done:
        events.append({"event": "stage", "stage": "train", "status": "done" if done else stage, "seconds": 7.5})
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    if done:
        run.finish_stage("train", 7.5)
    if scores:
        run.eval.mkdir()
        row = {f"{name},none": value for name, value in scores.items()}
        (run.eval / "results.json").write_text(json.dumps({"tasks": {"ifeval": row}}))


def outcome(made: Sweep, index: int, attempt: int, code: int, message: str) -> None:
    folder = RunDir(made.points[index].run_dir).attempt(attempt)
    folder.mkdir(parents=True)
    AttemptPlan(attempt, (Node("here", "127.0.0.1"),), 2).write(folder)
    (folder / "outcome.json").write_text(json.dumps({"code": code, "problems": [{"message": message}]}))


def test_best_first_and_failed_last_with_the_reason(sweep: Sweep) -> None:
    """A number of an unfinished or broken run is not a result, however low it is."""
    found = collect(sweep, "eval_loss")
    assert [(r.index, r.status) for r in found] == [
        (1, "done"), (0, "done"), (4, "unfinished"), (5, "waiting"), (2, "failed"), (3, "failed"),
    ]  # fmt: skip
    by_index = {r.index: r for r in found}
    assert by_index[1].metrics["eval_loss"] == 1.25 and by_index[1].metrics["loss"] == 2.25 and by_index[1].step == 2
    assert by_index[2].reason == "the loss is not finite at step 2" and by_index[2].value("eval_loss") is None
    assert by_index[3].reason == "data.input: not JSON: <b>"
    body = as_json(sweep, "eval_loss", found)
    assert body["best"] == 1 and body["counts"] == {"done": 2, "unfinished": 1, "waiting": 1, "failed": 2}


def test_scores_sort_the_other_way(sweep: Sweep) -> None:
    """More is better there; a finished point without the score comes behind those that have it."""
    assert [r.index for r in collect(sweep, "prompt_level_strict_acc")][:2] == [1, 0]
    schedule(sweep, 5, [3.0], done=True, scores={"prompt_level_strict_acc": 0.75})
    found = collect(sweep, "prompt_level_strict_acc")
    assert [r.index for r in found][:3] == [5, 1, 0]
    with pytest.raises(UserError, match="there is no metric 'best'"):
        check_metric("best")


def test_damaged_files_are_said_not_raised(sweep: Sweep) -> None:
    """One torn file must not hide the other points."""
    run = RunDir(sweep.points[1].run_dir)
    (run.eval / "results.json").write_text('{"tasks": [')
    run.metrics.write_bytes(run.metrics.read_bytes() + b'{"event": "eval", "st\xff')
    outcome(sweep, 2, 3, 1, "x")
    (RunDir(sweep.points[2].run_dir).attempt(3) / "outcome.json").write_text("[1]")
    found = {r.index: r for r in collect(sweep, "eval_loss")}
    assert found[1].metrics["eval_loss"] == 1.25 and found[2].status == "failed"
    # Preempted or stopped: the same command continues.
    outcome(sweep, 2, 4, 75, "stopped as asked")
    assert {r.index: r.status for r in collect(sweep, "eval_loss")}[2] == "unfinished"
