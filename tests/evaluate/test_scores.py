"""Standard errors, the verdict, the table."""

from __future__ import annotations

import io
import math
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from clustertune.errors import ExitCode, UserError
from clustertune.evaluate.scores import clustered_stderr, judge, render, require_pass
from clustertune.recipe.schema import Eval
from clustertune.recipe.tasks import first_task

ROW = {"n": 30} | {f"{name},none": score for name, score in zip(first_task().metrics, (0.5, 0.6, 0.55, 0.7), strict=True)}


def make_result(marks: dict[str, float], **changes: Any) -> dict[str, Any]:
    errors = {f"{name}_stderr,none": None if name == "inst_level_loose_acc" else 0.01 for name in first_task().metrics}
    tasks = {"tasks": {"ifeval": {**ROW, **errors}}, "details": {"ifeval": {"data": ["mine"]}}}
    result = {"model": "runs/a/merged", **tasks, "notes": [], **changes}
    return {**result, "pass": judge(result, Eval(pass_mark={"ifeval": marks}))}


def show(result: dict[str, Any]) -> str:
    out = io.StringIO()
    render(result, Console(file=out, width=120))
    return out.getvalue()


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_with_one_instruction_a_prompt_it_is_that_of_the_mean(followed: list[bool]) -> None:
    expected = statistics.stdev(map(float, followed)) / math.sqrt(len(followed))
    assert clustered_stderr([[item] for item in followed]) == pytest.approx(expected)


def test_by_hand() -> None:
    # 3 of 4 followed; residuals 1 - 0.75 and 2 - 3*0.75; n = 2.
    assert clustered_stderr([[True], [True, True, False]]) == pytest.approx(math.sqrt(2 * (0.25**2 + 0.25**2)) / 4)


@pytest.mark.parametrize(("mark", "passed"), [(0.4999, True), (0.5, True), (0.5001, False)])
def test_at_the_mark(mark: float, passed: bool) -> None:
    verdict = make_result({"prompt_level_strict_acc": mark})["pass"]
    assert verdict["passed"] is passed
    assert verdict["missed"] == ([] if passed else ["ifeval prompt_level_strict_acc"])


def test_not_a_number_does_not_pass() -> None:
    row = {**ROW, "inst_level_loose_acc,none": math.nan}
    assert not make_result({"inst_level_loose_acc": 0.1}, tasks={"ifeval": row})["pass"]["passed"]


@pytest.mark.parametrize(("mark", "passed"), [(-0.1, True), (-0.05, True), (0.0, False)])
def test_a_mark_may_be_on_the_difference_to_the_base(mark: float, passed: bool) -> None:
    row = {"base": 0.55, "tuned": 0.5, "difference": -0.05, "ci95": [-0.2, 0.1], "verdict": "no difference"}
    result = make_result({}, paired={"ifeval": {"prompt_level_strict_acc,none": row}}, base={"model": "base"})
    settings = Eval(base=True, pass_difference={"ifeval": {"prompt_level_strict_acc": mark}})
    result["pass"] = judge(result, settings)
    assert result["pass"]["passed"] is passed
    if not passed:
        with pytest.raises(UserError, match=r"difference of ifeval prompt_level_strict_acc to the base is -0\.0500"):
            require_pass(result)
    assert "-0.2000 to +0.1000" in show(result) and "no difference" in show(result)


def test_every_miss_is_named() -> None:
    marks = {"prompt_level_strict_acc": 0.9, "inst_level_strict_acc": 0.1, "inst_level_loose_acc": 0.8}
    with pytest.raises(UserError) as caught:
        require_pass(make_result(marks))
    assert caught.value.code == ExitCode.FAILED
    missed = ["prompt_level_strict_acc", "inst_level_loose_acc"]
    assert [problem.key for problem in caught.value.problems] == [f"eval.pass_mark.ifeval.{name}" for name in missed]
    assert "is 0.5000, the pass mark is 0.9000 (30 documents)" in str(caught.value)


def test_scores_errors_and_marks() -> None:
    text = show(make_result({"prompt_level_strict_acc": 0.9, "inst_level_strict_acc": 0.1}))
    rows = {line.split()[3]: line for line in text.splitlines() if "_acc" in line}
    assert list(rows) == list(first_task().metrics)
    first, second = rows["prompt_level_strict_acc"], rows["inst_level_strict_acc"]
    assert "0.5000" in first and "below" in first and "passed" in second and "0.0100" in second
