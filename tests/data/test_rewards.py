"""Rewards by rows: what each of ours gives, what ``prepare`` refuses, and what a reward of one's own may not do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.data import prepare as conversations
from clustertune.data import rewards as rewards_module
from clustertune.data.rewards import Rewards, lacking
from clustertune.data.sequences import find_blind, read_prompts
from clustertune.manifest import read_manifest
from clustertune.recipe.sections import Data, Reward
from tests.command import REPO, run
from tests.refusal import problems

NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
TWO = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": '[{}, {"relation": "at least", "num_words": 3}]',
}
BETWEEN = {"function": "length", "min": 2, "max": 4}
OBJECT = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
ENDLESS = {"function": "regex", "pattern": r"(a|a)*$"}


@pytest.fixture(scope="module")
def ours() -> Iterator[Rewards]:
    with Rewards([Reward(function="ifeval")], {}) as found:
        yield found


def judged(reward: Any, answer: str, row: dict[str, Any]) -> float | None:
    with Rewards([Reward.model_validate(reward)], {}) as found:
        return found.judge([[{"role": "user", "content": "q"}]], [answer], [row])[0][0]


@pytest.mark.parametrize(
    ("row", "answer", "worth"),
    [(NO_COMMA, "one two", 1.0), (NO_COMMA, "one, two", 0.0), (NO_COMMA, " ", 0.0), (TWO, "one two three", 1.0),
     (TWO, "one two", 0.5), (TWO, "one, two", 0.0)],
)  # fmt: skip
def test_ifeval_is_the_share_of_instructions_followed(ours: Rewards, row: dict[str, Any], answer: str, worth: float) -> None:
    assert ours.judge([[{"role": "user", "content": "q"}]], [answer], [row]) == [[worth]]


@pytest.mark.parametrize(
    ("reward", "row", "answer", "worth"),
    [
        ("exact_match", {"answer": "42"}, " 42\n", 1.0),
        ("exact_match", {"answer": 42}, "it is 42", 0.0),
        ({"function": "exact_match", "extract": r"#### (\d+)"}, {"answer": "7"}, "#### 5, no: #### 7", 1.0),
        ({"function": "exact_match", "extract": r"\d+"}, {"answer": "7"}, "none", 0.0),
        ({"function": "exact_match", "column": "solution"}, {"solution": "x"}, "x", 1.0),
        ({"function": "regex", "pattern": "^Dear "}, {}, "Dear reader", 1.0),
        ("regex", {"pattern": r"\bcat\b"}, "category", 0.0),
        ("json_schema", {"schema": OBJECT}, '{"a": 1}', 1.0),
        ("json_schema", {"schema": json.dumps(OBJECT)}, '```json\n{"a": 1}\n```', 1.0),
        ({"function": "json_schema", "schema": OBJECT}, {}, '{"a": "1"}', 0.0),
        ("json_schema", {"schema": OBJECT}, "{", 0.0),
        (BETWEEN, {}, "one", 0.5),
        (BETWEEN, {}, "one two three", 1.0),
        (BETWEEN, {}, "one two three four five six seven eight", 0.5),
        ({"function": "length", "max": 4, "unit": "characters"}, {}, "one two three"[:8], 0.5),
    ],
)  # fmt: skip
def test_what_an_answer_is_worth(reward: Any, row: dict[str, Any], answer: str, worth: float) -> None:
    assert judged(reward, answer, row) == worth


def test_a_pattern_without_an_end_costs_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards_module, "SECONDS", 0.2)
    with Rewards([Reward.model_validate(ENDLESS)], {}) as found:
        prompt = [[{"role": "user", "content": "q"}]] * 2
        assert found.judge(prompt, ["a" * 60 + "b", "aaa"], [{}, {}]) == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("reward", "row", "column"),
    [
        ("ifeval", {}, "instruction_id_list"),
        ("ifeval", {"instruction_id_list": ["punctuation:no_comma"]}, "kwargs"),
        ("ifeval", {"instruction_id_list": ["punctuation:no_commas"], "kwargs": [{}]}, "instruction_id_list"),
        ("ifeval", {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]}, "kwargs"),
        ("ifeval", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": 3}]}, "kwargs"),
        ("ifeval", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "kwargs"),
        ("exact_match", {"solution": "x"}, "answer"),
        ("regex", {"pattern": "("}, "pattern"),
        ("json_schema", {"schema": {"type": "number of things"}}, "schema"),
        ("mine:own", {"completions": 1}, "completions"),
    ],
)
def test_a_row_that_could_not_be_judged_is_named_with_its_column(reward: str, row: dict[str, Any], column: str) -> None:
    assert [name for name, _, _ in lacking(Reward(function=reward), row)] == [column]


def test_rows_that_can_be_judged_lack_nothing() -> None:
    for row in map(json.loads, (REPO / "recipes/tiny-grpo/prompts.jsonl").read_text().splitlines()):
        assert list(lacking(Reward(function="ifeval"), row)) == []
    assert list(lacking(Reward(function="ifeval"), TWO)) == []


OWN = """
def fair(completions, level, scale=1, **_):
    return [scale * len(text[-1]["content"]) if want else None for text, want in zip(completions, level)]
def late(completions, **_):
    raise KeyError("nothing here")
def short(completions, **_):
    return [1.0]
def words(completions, **_):
    return ["much"] * len(completions)
def endless(completions, **_):
    return [float("inf")] * len(completions)
"""


def test_a_reward_of_ones_own_is_called_as_trl_calls_it() -> None:
    reward = Reward.model_validate({"function": "mine:fair", "scale": 2})
    with Rewards([reward], {"mine": OWN}) as found:
        assert found.judge([[], []], ["four", "x"], [{"level": 1}, {"other": 0}]) == [[8.0, None]]
        assert [judge.__name__ for judge in found.judges] == ["fair"]


@pytest.mark.parametrize("name", ["late", "short", "words", "endless"])
def test_a_reward_that_gives_no_numbers_is_named(name: str) -> None:
    with Rewards([Reward(function=f"mine:{name}")], {"mine": OWN}) as found:
        (problem,) = problems(found.judge, [[], []], ["a", "b"], [{}, {}])
    assert name in problem.message and problem.file == "mine.py"


def test_code_that_does_not_run_is_named_with_its_line() -> None:
    (problem,) = problems(Rewards, [Reward(function="mine:f")], {"mine": "x = 1\ny = 1 / 0\n"})
    assert "line 2" in problem.message


# --- prepare --------------------------------------------------------------------------------------------------------------


def made(tmp_path: Path, rows: list[dict[str, Any]], **more: Any) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(name="d", input="rows.jsonl", format="prompt", **more)
    conversations.prepare(data, recipe_folder=tmp_path, seed=1, out=tmp_path / "data")
    return tmp_path / "data"


def test_columns_of_rewards_are_kept_as_they_are(tmp_path: Path) -> None:
    """Arrow would give each mapping the keys of all others, and lists one type."""
    rows = [{"prompt": "a", "kwargs": [{"x": 1}, {"y": "z"}], "source": "mine", "text": [1, "b"]}, {"prompt": "b", "level": 2}]
    out = made(tmp_path, rows, eval_fraction=0.5)
    found = {row["prompt"][-1]["content"]: row["columns"] for split in ("train", "eval") for row in read_prompts(out, split)}
    assert found == {row["prompt"]: {key: row[key] for key in row if key != "prompt"} for row in rows}
    assert read_manifest(out).meta["unused"] == []


def test_every_kind_of_instruction_is_held_out_alike(tmp_path: Path) -> None:
    rows = [{"prompt": f"{kind} {n}", "instruction_id_list": [kind], "kwargs": [{}]} for kind in "abcd" for n in range(10)]
    held = [row["columns"]["instruction_id_list"][0] for row in read_prompts(made(tmp_path, rows, eval_fraction=0.2), "eval")]
    assert sorted(held) == ["a", "a", "b", "b", "c", "c", "d", "d"]


def test_a_reward_that_tells_nothing_apart_is_refused(tmp_path: Path) -> None:
    """The good answers of these rows are no better by it than nothing at all."""
    rows = [{"prompt": f"q{n}", "columns": {"reference": f"good answer {n}", "answer": "yes"}} for n in range(6)]
    for reward, blind in [
        ({"function": "regex", "pattern": ".*"}, True),
        ({"function": "regex", "pattern": "good"}, False),
        ("exact_match", False),
        ({"function": "length", "min": 3}, False),
        ({"function": "length", "max": 3}, True),
    ]:
        with Rewards([Reward.model_validate(reward)], {}) as found:
            assert bool(list(find_blind(rows, found))) == blind, reward


def test_all_of_it_is_refused_at_once_with_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}. " + "word " * (400 if n == 2 else 1)} | (NO_COMMA if n else {})) + "\n"
                for n in range(6))
    )  # fmt: skip
    done = run(
        "prepare", "recipes/tiny-grpo", f"data.input={tmp_path / 'prompts.jsonl'}", "--out", tmp_path / "out",
        "reward=[ifeval]", "data.limit=null", "train.max_prompt_length=64", "train.global_batch_size=32", stack=True,
    )  # fmt: skip
    assert done.code != 0
    rows = ("prompts.jsonl:1", "instruction_id_list", "prompts.jsonl:3")
    for text in (*rows, "train.max_prompt_length=", "train.num_generations"):
        assert text in done.err, done.err


def test_the_schema_takes_names_and_sections() -> None:
    with pytest.raises(ValueError, match="takes"):
        Reward.model_validate({"function": "regex", "max": 3})
    with pytest.raises(ValueError, match="module:function"):
        Reward.model_validate("ifevals")
    assert Reward.model_validate("ifeval").weight == 1.0
