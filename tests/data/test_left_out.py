"""What ``max_length`` leaves out: pairs that are equal within it, conversations without a trained token in it; which length
keeps them, and an end where nothing is left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from clustertune.data import sequences, tokens
from clustertune.data.local_model import train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["user assistant question answer word " * 9], 400, 4096)


def pair(number: int, shared: int, chosen: str = "yes", rejected: str = "no") -> dict[str, Any]:
    return {"prompt": f"question {number}", "chosen": "word " * shared + chosen, "rejected": "word " * shared + rejected}


def chat(number: int, words: int) -> dict[str, Any]:
    turns = (("user", f"{number} " + "word " * words), ("assistant", f"answer {number}"))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def prepared(folder: Path, rows: list[dict[str, Any]], form: str) -> Path:
    """The first three quarters are trained."""
    for split, part in (("train", rows[: -len(rows) // 4]), ("eval", rows[-len(rows) // 4 :])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    prepare(Data(name="made", format=form, input=str(folder)), recipe_folder=folder, seed=1, out=folder / "data")
    return folder / "data"


def settings(**own: Any) -> dict[str, Any]:
    return {**train_defaults(), "packing": False, "assistant_only_loss": True, "max_length": 48, **own}


def test_pairs_that_are_equal_within_max_length_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their loss is log 2 and their gradient 0. So are those that only the text tells apart, and not the tokens."""
    kinds = [pair(0, 2), pair(1, 90), pair(2, 2, "yes", "yes  "), pair(3, 90, "yes", "yes and more")]
    data = prepared(tmp_path, [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(12) for row in kinds], "preference")
    made = tokens.make(data, tokenizer, settings())["splits"]
    assert {split: (made[split]["equal"], made[split]["dropped"]) for split in made} == {"train": (27, 0), "eval": (9, 0)}
    for split, count in (("train", 9), ("eval", 3)):
        rows = sequences.Sequences(data / "tokens", split)
        assert len(rows) == count == made[split]["sequences"] / 2
        assert all(rows[n]["chosen_ids"] != rows[n]["rejected_ids"] for n in range(count))
    length = made["train"]["max_length_for_all"]
    assert length and str(length) in capsys.readouterr().err
    longer = tokens.make(data, tokenizer, settings(max_length=length))["splits"]["train"]
    assert longer["equal"] == 9, "those of the same tokens: no length helps"
    shorter = tokens.make(data, tokenizer, settings(max_length=length - 1))["splits"]["train"]
    assert shorter["equal"] > 9


def test_a_pair_whose_prompt_fills_max_length_is_counted_as_such(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{**pair(n, 1), "prompt": f"{n} " + "word " * (90 if n % 2 else 2)} for n in range(24)]
    made = tokens.make(prepared(tmp_path, rows, "preference"), tokenizer, settings())["splits"]["train"]
    assert (made["equal"], made["dropped"], made["sequences"]) == (0, 9, 18)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"packing": True},
        {"packing": True, "shuffle_dataset": True},
    ],
    ids=str,
)
def test_the_length_that_keeps_what_is_left_out_is_said(
    own: dict[str, Any], tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [chat(n, (90, 200, 3)[n % 3]) for n in range(30, 78)]
    data = prepared(tmp_path, rows, "messages")
    made = tokens.make(data, tokenizer, settings(**own))["splits"]["train"]
    assert made["dropped"] == 24 and made["max_length_for_half"] < made["max_length_for_all"]
    assert str(made["max_length_for_all"]) in capsys.readouterr().err
    for length, left in ((made["max_length_for_all"], 0), (made["max_length_for_half"], 12)):
        assert tokens.make(data, tokenizer, settings(**own, max_length=length))["splits"]["train"]["dropped"] == left


@pytest.mark.parametrize("own", [{}, {"packing": True}])
@pytest.mark.parametrize("form", ["messages", "preference", "equal"])
def test_nothing_left_to_train_on_ends_with_1_and_the_length_that_helps(
    own: dict[str, Any], form: str, tmp_path: Path, tokenizer: Any
) -> None:
    if own and form != "messages":
        return
    row = {"messages": chat, "preference": lambda n, words: {**pair(n, 1), "prompt": f"{n} " + "word " * words}, "equal": pair}
    data = prepared(tmp_path, [row[form](n, 90) for n in range(24)], form.replace("equal", "preference"))
    for _ in range(2):  # also where the tokens are kept
        with pytest.raises(UserError) as caught:
            tokens.make(data, tokenizer, settings(**own))
        assert caught.value.code == 1 and caught.value.problems[0].key == "train.max_length"
    length = next(int(word) for word in str(caught.value.problems[0].fix).replace("=", " ").split() if word.isdigit())
    assert tokens.make(data, tokenizer, settings(**own, max_length=length))["splits"]["train"]["sequences"]


FOOTER = (
    "{% for m in messages %}{{ m.role }} {% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endfor %}"
    + " end" * 20
)


def test_where_the_end_is_kept_the_length_that_is_named_reaches_back_to_the_last_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template writes much behind the answer: within the last tokens none is trained, until max_length reaches one."""
    own = train_tokenizer(["user assistant question answer word end " * 9], 400, 4096)
    own.chat_template = FOOTER
    data = prepared(tmp_path, [chat(number, 2) for number in range(24)], "messages")
    with pytest.raises(UserError) as caught:
        tokens.make(data, own, settings(max_length=4, truncation_mode="keep_end"))
    fix = caught.value.problems[0].fix or ""
    length = int(re.search(r"max_length=(\d+) keeps all", fix)[1])  # type: ignore[index]
    made = tokens.make(data, own, settings(max_length=length, truncation_mode="keep_end"))["splits"]["train"]
    assert (made["dropped"], made["sequences"]) == (0, 18)
    rows = sequences.Sequences(data / "tokens", "train")
    assert all(len(rows[number]["labels"]) == length and (rows[number]["labels"] != -100).any() for number in range(18))
    with pytest.raises(UserError):
        tokens.make(data, own, settings(max_length=length - 1, truncation_mode="keep_end"))
    capsys.readouterr()
