"""Two models on the same documents: difference, interval, verdict; on data whose difference is known."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.errors import UserError
from clustertune.evaluate.scores import BETTER, SAME, WORSE, compare, interval


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


def test_a_model_beside_itself() -> None:
    row = interval(*[column([i % 3 == 0 for i in range(100)])] * 2)
    assert (row["difference"], row["ci95"], row["verdict"]) == (0.0, [0.0, 0.0], SAME)


def samples(values: list[Any], metric: str = "acc", task: str = "t", prompt: str = "p") -> list[dict[str, Any]]:
    alike = {"task": task, "filter": "none", "arguments": [["Question", {}]], "metrics": [metric]}
    return [
        {**alike, "doc_id": i, "prompt_hash": f"{prompt}{i}", "resps": [[f"answer {value}"]], metric: value}
        for i, value in enumerate(values)
    ]


def beside(base: list[Any], tuned: list[Any], score: float, metric: str = "acc", **more: Any) -> dict[str, Any]:
    own = {"tasks": {"t": {"n": len(tuned), f"{metric},none": score, f"{metric}_stderr,none": 0.1}}, **more}
    return compare({"samples": samples(base, metric)}, {**own, "samples": samples(tuned, metric)}, {})


def test_what_changed_is_shown() -> None:
    found = beside([0] * 5 + [1] * 6, [1] * 5 + [0] * 4 + [1] * 2, 7 / 11)
    assert found["paired"]["t"]["acc,none"]["difference"] == pytest.approx(1 / 11)
    changed = found["changed"]["t"]
    assert [row["doc"] for row in changed[BETTER]] == [0, 1, 2] and [row["doc"] for row in changed[WORSE]] == [5, 6, 7]
    assert (changed[BETTER][0]["base"], changed[BETTER][0]["tuned"]) == ("answer 0", "answer 1")


def test_where_less_is_better() -> None:
    found = beside([0.5, 0.9], [0.1, 0.2], 0.15, "loss", higher_is_better={"t": {"loss": False}})
    assert found["paired"]["t"]["loss,none"]["verdict"] == BETTER and len(found["changed"]["t"][BETTER]) == 2


def test_lists_of_judgements() -> None:
    """Documents with several judgements count by them."""
    row = beside([[True], [False, False, False]], [[True], [True, True, True]], 1.0)["paired"]["t"]["acc,none"]
    assert (row["base"], row["tuned"]) == (0.25, 1.0)


@pytest.mark.parametrize("values", [["a", "b"], [[-1.0, 3], [-2.0, 4]], [0.2, 0.6]])
def test_what_is_no_mean_over_documents_is_left_out(values: list[Any]) -> None:
    """Perplexity and the like: lm-eval's value is another than the documents' mean."""
    assert beside(values, values, 12.5)["paired"] == {}


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
