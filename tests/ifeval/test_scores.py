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

from clustertune.config.schema import IFEVAL_SCORES
from clustertune.errors import ExitCode, UserError
from clustertune.ifeval.scores import clustered_stderr, judge, render, require_pass

SCORES = dict(zip(IFEVAL_SCORES, (0.5, 0.6, 0.55, 0.7), strict=True))


def make_result(marks: dict[str, float], **dataset: Any) -> dict[str, Any]:
    return {
        "model": "runs/a/merged",
        "dataset": {"name": "mine", "prompts": 30, "rows": 30, "is_benchmark": False, "limited": False, **dataset},
        "scores": SCORES,
        "stderr": {**dict.fromkeys(IFEVAL_SCORES, 0.01), "inst_level_loose_acc": None},
        "pass": judge(SCORES, marks),
        "punkt": {"source": "NLTK_DATA"},
        "truncated_prompts": 0,
    }


def show(result: dict[str, Any]) -> str:
    out = io.StringIO()
    render(result, Console(file=out, width=120))
    return out.getvalue()


class TestStandardError:
    @settings(deadline=None)
    @given(st.lists(st.booleans(), min_size=2, max_size=40))
    def test_with_one_instruction_a_prompt_it_is_that_of_the_mean(self, followed: list[bool]) -> None:
        expected = statistics.stdev(map(float, followed)) / math.sqrt(len(followed))
        assert clustered_stderr([[item] for item in followed]) == pytest.approx(expected)

    @settings(deadline=None)
    @given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(2, 4))
    def test_repeating_each_judgement_adds_no_knowledge(self, followed: list[bool], times: int) -> None:
        """The binomial formula would shrink by sqrt(times)."""
        once = clustered_stderr([[item] for item in followed])
        assert clustered_stderr([[item] * times for item in followed]) == pytest.approx(once)

    def test_by_hand(self) -> None:
        # 3 of 4 followed; residuals 1 - 0.75 and 2 - 3*0.75; n = 2.
        assert clustered_stderr([[True], [True, True, False]]) == pytest.approx(math.sqrt(2 * (0.25**2 + 0.25**2)) / 4)

    def test_one_prompt_has_none(self) -> None:
        assert clustered_stderr([[True, False]]) is None


class TestVerdict:
    @pytest.mark.parametrize(("mark", "passed"), [(0.4999, True), (0.5, True), (0.5001, False)])
    def test_at_the_mark(self, mark: float, passed: bool) -> None:
        verdict = judge(SCORES, {"prompt_level_strict_acc": mark})
        assert verdict["passed"] is passed
        assert verdict["missed"] == ([] if passed else ["prompt_level_strict_acc"])

    def test_without_marks_it_passes(self) -> None:
        assert judge(SCORES, {}) == {"marks": {}, "missed": [], "passed": True}
        require_pass(make_result({}))

    def test_not_a_number_does_not_pass(self) -> None:
        assert not judge({**SCORES, "inst_level_loose_acc": math.nan}, {"inst_level_loose_acc": 0.1})["passed"]

    def test_every_miss_is_named(self) -> None:
        marks = {"prompt_level_strict_acc": 0.9, "inst_level_strict_acc": 0.1, "inst_level_loose_acc": 0.8}
        with pytest.raises(UserError) as caught:
            require_pass(make_result(marks))
        assert caught.value.code == ExitCode.FAILED
        assert [problem.key for problem in caught.value.problems] == [
            "eval.ifeval.pass_mark.prompt_level_strict_acc",
            "eval.ifeval.pass_mark.inst_level_loose_acc",
        ]
        assert "is 0.5000, the pass mark is 0.9000 (mine, 30 prompts)" in str(caught.value)


class TestTable:
    def test_scores_errors_and_marks(self) -> None:
        text = show(make_result({"prompt_level_strict_acc": 0.9, "inst_level_strict_acc": 0.1}))
        rows = {line.split()[1]: line for line in text.splitlines() if "_acc" in line}
        assert list(rows) == list(IFEVAL_SCORES)
        assert "0.5000" in rows["prompt_level_strict_acc"]
        assert "below" in rows["prompt_level_strict_acc"]
        assert "passed" in rows["inst_level_strict_acc"]
        assert "0.0100" in rows["inst_level_strict_acc"]

    def test_other_prompts_are_not_taken_for_the_benchmark(self) -> None:
        assert "Not the IFEval benchmark (other prompts)" in show(make_result({}))
        assert "Not the IFEval" not in show(make_result({}, is_benchmark=True))
        assert "(the first 30 of its 541 prompts)" in show(make_result({}, rows=541, limited=True))

    def test_what_bends_the_numbers_is_said(self) -> None:
        result = {**make_result({}), "punkt": {"source": "trained locally"}, "truncated_prompts": 2}
        assert "trained locally" in show(result)
        assert "2 prompts lost their beginning" in show(result)

    def test_brackets_in_a_name_are_kept(self) -> None:
        assert "a[red]b.jsonl" in show(make_result({}, name="a[red]b.jsonl"))
