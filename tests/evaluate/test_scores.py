"""Standard errors, the verdict, the table; two models on the same documents."""

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
from clustertune.evaluate.scores import BETTER, FEW, WORSE, clustered_stderr, compare, interval, judge, render, require_pass
from clustertune.recipe.eval_tasks import first_task
from clustertune.recipe.sections import Eval

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


@pytest.mark.parametrize(("mark", "passed"), [(-0.1, True), (-0.05, True), (0.0, False)])
def test_a_mark_may_be_on_the_difference_to_the_base(mark: float, passed: bool) -> None:
    row = {"base": 0.55, "tuned": 0.5, "difference": -0.05, "ci95": [-0.2, 0.1], "verdict": "unclear"}
    result = make_result({}, paired={"ifeval": {"prompt_level_strict_acc,none": row}}, base={"model": "base"})
    settings = Eval(base=True, pass_difference={"ifeval": {"prompt_level_strict_acc": mark}})
    result["pass"] = judge(result, settings)
    assert result["pass"]["passed"] is passed
    if not passed:
        with pytest.raises(UserError, match=r"difference of ifeval prompt_level_strict_acc to the base is -0\.0500"):
            require_pass(result)
    assert "-0.2000 to +0.1000" in show(result) and "unclear" in show(result)


def test_every_miss_is_named() -> None:
    marks = {"prompt_level_strict_acc": 0.9, "inst_level_strict_acc": 0.1, "inst_level_loose_acc": 0.8}
    with pytest.raises(UserError) as caught:
        require_pass(make_result(marks))
    assert caught.value.code == ExitCode.FAILED
    missed = ["prompt_level_strict_acc", "inst_level_loose_acc"]
    assert [problem.key for problem in caught.value.problems] == [f"eval.pass_mark.ifeval.{name}" for name in missed]
    assert "is 0.5000, the pass mark is 0.9000 (30 documents)" in str(caught.value)


# --- two models on the same documents ----------------------------------------------------------------------------------


def column(values: list[Any]) -> list[tuple[float, float]]:
    return [(float(value), 1.0) for value in values]


def test_a_known_difference() -> None:
    """Of 400 documents the tuned model has 40 more: 10 points, the interval that of the paired difference's mean."""
    base = [i < 200 for i in range(400)]
    tuned = [i < 240 for i in range(400)]
    row = interval(column(base), column(tuned))
    assert (row["base"], row["tuned"], row["difference"]) == (0.5, 0.6, pytest.approx(0.1))
    low, high = row["ci95"]
    spread = 1.96 * (0.1 * 0.9 / 400) ** 0.5
    assert low == pytest.approx(0.1 - spread, abs=0.004) and high == pytest.approx(0.1 + spread, abs=0.004)
    assert row["verdict"] == BETTER
    assert interval(column(tuned), column(base))["verdict"] == WORSE
    assert interval(column(base), column(tuned), higher_is_better=False)["verdict"] == WORSE


def test_a_few_documents_tell_nothing() -> None:
    """Two answers that are both better: the bootstrap's interval has no width, and proves nothing."""
    row = interval(column([0, 0]), column([1, 1]))
    assert row["ci95"] == [1.0, 1.0] and row["verdict"] == FEW
    assert interval(column([0] * 20), column([1] * 20))["verdict"] == BETTER


def samples(values: list[Any], metric: str = "acc", task: str = "t", prompt: str = "p") -> list[dict[str, Any]]:
    alike = {"task": task, "filter": "none", "arguments": [["Question", {}]], "metrics": [metric]}
    return [
        {**alike, "doc_id": i, "prompt_hash": f"{prompt}{i}", "resps": [[f"answer {value}"]], metric: value}
        for i, value in enumerate(values)
    ]


def test_a_group_is_the_documents_of_its_tasks() -> None:
    base = samples([0, 0], task="a") + samples([1, 0], task="b")
    own = {"tasks": {"g": {"n": 4, "acc,none": 0.75}}, "samples": samples([1, 0], task="a") + samples([1, 1], task="b")}
    row = compare({"samples": base}, own, {"g": ["a", "b"]})["paired"]["g"]["acc,none"]
    assert (row["base"], row["tuned"]) == (0.25, 0.75)


@pytest.mark.parametrize("other", [{"prompt": "q"}, {"task": "u"}])
def test_other_prompts_are_refused(other: dict[str, Any]) -> None:
    own = {"tasks": {"t": {"acc,none": 1.0}}, "samples": samples([1, 1])}
    with pytest.raises(UserError, match="different prompts"):
        compare({"samples": samples([1, 1], **other)}, own, {})
    with pytest.raises(UserError, match="different prompts"):
        compare({"samples": samples([1])}, own, {})
