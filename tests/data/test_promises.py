"""What docs/data.md says of formats, files, mixtures and bad rows, as far as no test beside this one asks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from clustertune.data import tokens
from clustertune.data.chats import read
from clustertune.data.local_model import train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.data.rows import BadRow
from clustertune.data.sequences import Sequences
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data
from tests.command import run as command

SETTINGS = train_defaults() | {"packing": False, "max_length": None}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


PAIR = [said("user", "question"), said("assistant", "answer")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["question answer word " * 9], 400, 512)


@pytest.mark.parametrize("role", ["function", "ipython", "observation", "tool_response", "function_response", "tool"])
def test_what_other_frameworks_call_a_tool_is_one(role: str) -> None:
    turns = [*PAIR, said(role, "3"), PAIR[1]]
    assert read("messages", {"messages": turns})["messages"][2] == said("tool", "3")


def test_an_older_call_becomes_a_tool_call() -> None:
    call = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    turns = [PAIR[0], {"role": "assistant", "content": None, "function_call": call}, said("function", "warm"), PAIR[1]]
    (made,) = read("messages", {"messages": turns})["messages"][1]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": {"city": "Bonn"}}


def test_prompts_for_rewards_give_the_template_nothing_and_keep_every_column() -> None:
    row = {"prompt": "question", "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}, "anything": [1]}
    assert read("prompt", row) == {"prompt": PAIR[:1], "columns": {name: row[name] for name in row if name != "prompt"}}


@pytest.mark.parametrize("completion_only", [True, False])
def test_a_prompt_is_trained_only_where_the_recipe_asks_for_it(completion_only: bool, tokenizer: Any, run: Any) -> None:
    got = run([{"prompt": f"question {n}", "completion": "answer"} for n in range(4)], format="prompt-completion")
    own = {"completion_only_loss": completion_only, "assistant_only_loss": False}
    made = tokens.make(got.out, tokenizer, SETTINGS | own)
    assert (made["labelled_share"] == 1) is not completion_only and made["labelled_share"] > 0
    text = tokenizer.decode([one for one in Sequences(got.out / "tokens", "train")[0]["labels"] if one != -100])
    assert ("question" in text) is not completion_only and "answer" in text


def test_of_a_text_every_token_and_its_end_are_trained(tokenizer: Any, run: Any) -> None:
    got = run([{"text": f"word {n}"} for n in range(4)], format="text")
    bare = train_tokenizer(["question answer word " * 9], 400, 512)
    bare.chat_template = None
    tokens.make(got.out, bare, SETTINGS | {"assistant_only_loss": True})
    row = Sequences(got.out / "tokens", "train")[0]
    assert np.array_equal(row["labels"], row["input_ids"]) and row["labels"][-1] == bare.eos_token_id


def write(path: Path, count: int, word: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": f"{word} {n}", "completion": "answer"}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")


def test_config_is_a_folder_of_the_input_and_split_the_beginning_of_a_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / "set" / name / "train_sft-00000.jsonl", 6, f"{name} sft")
        write(tmp_path / "set" / name / "train_gen-00000.jsonl", 5, f"{name} gen")
        write(tmp_path / "set" / name / "test_sft.jsonl", 4, f"{name} test")
    base = {"name": "x", "input": "set", "format": "prompt-completion", "config": "two"}
    for split, counts in ((None, (11, 4)), ("train_gen", (4, 1)), ({"train": "train_sft", "eval": "test_sft"}, (6, 4))):
        made = prepare(Data(**base, split=split), recipe_folder=tmp_path, seed=1, out=tmp_path / f"out{counts[0]}")
        assert tuple(made[name]["conversations"] for name in ("train", "eval")) == counts
        assert all("two" in line for line in (tmp_path / f"out{counts[0]}" / "train.jsonl").open())
    with pytest.raises(UserError, match="no such folder"):
        prepare(Data(**{**base, "config": "three"}), recipe_folder=tmp_path, seed=1, out=tmp_path / "none")


def test_files_that_are_named_after_no_split_beside_others_are_named(tmp_path: Path, run: Any) -> None:
    write(tmp_path / "set" / "train.jsonl", 6, "one")
    write(tmp_path / "set" / "more.jsonl", 6, "two")
    got = run(path=tmp_path / "set", format="prompt-completion")
    assert len(got.conversations) == 6 and any("more.jsonl" in text for text in got.result["warnings"])


def test_a_part_of_a_split_of_the_hub_is_asked_for_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, **words: Any) -> Any:
        asked.append((name, words["split"], words["revision"]))
        return datasets.Dataset.from_list([{"prompt": f"question {n}", "completion": "answer"} for n in range(9)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = Data(name="org/set", revision="a" * 40, split="train[:10%]", format="prompt-completion")
    prepare(data, recipe_folder=tmp_path, seed=1, out=tmp_path / "out")
    assert asked == [("org/set", "train[:10%]", "a" * 40)]


def test_which_half_of_a_source_is_taken_depends_on_the_seed_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 40, "a")
    (tmp_path / "b.jsonl").write_text("".join(reversed((tmp_path / "a.jsonl").read_text().splitlines(keepends=True))))
    taken = []
    for number, (name, seed) in enumerate((("a", 1), ("b", 1), ("a", 2))):
        sources = [{"name": "part", "input": f"{name}.jsonl", "format": "prompt-completion", "weight": 0.5}]
        data = Data.model_validate({"name": "mix", "sources": sources})
        made = prepare(data, recipe_folder=tmp_path, seed=seed, out=tmp_path / f"out{number}")
        rows = [json.loads(line)["prompt"][0]["content"] for line in (tmp_path / f"out{number}" / "train.jsonl").open()]
        assert len(rows) == len(set(rows)) == 19 and made["sources"][0]["conversations"] == 40
        taken.append(set(rows))
    assert taken[0] == taken[1] != taken[2]


def test_input_takes_no_mixture(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 4, "a")
    data = Data.model_validate({"name": "mix", "sources": [{"name": "a", "input": "a.jsonl", "format": "prompt-completion"}]})
    with pytest.raises(UserError) as caught:
        prepare(data, recipe_folder=tmp_path, seed=1, out=tmp_path / "out", input_path=tmp_path / "a.jsonl")
    assert caught.value.problems[0].key == "--input"


RECIPE = ("tiny-oasst2", "data.language=null")


def test_a_mixture_of_pairs_and_others_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 4, "a")
    sources = [
        {"name": form, "input": str(tmp_path / "a.jsonl"), "format": form} for form in ("preference", "prompt-completion")
    ]
    done = command("show", *RECIPE, f"data={json.dumps({'name': 'mix', 'sources': sources})}")
    assert done.code == 2 and "preference" in done.err, done.out


def test_rows_of_another_format_are_recognised_as_the_page_shows_it(tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": f"q {n}"}, {"from": "gpt", "value": "a"}]} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("prepare", *RECIPE, "data.format=messages", "--input", tmp_path / "rows.jsonl", "--out", tmp_path / "out")
    done = command(*words)
    for part in ("data.format", "wrong-column 3", "rows.jsonl:1: wrong-column: messages is missing", "data.format: sharegpt"):
        assert done.code == 2 and part in done.err
    shown = command(*words[:2], *RECIPE[1:], "data.format=sharegpt", *words[4:], "--show", "2", stack=True)
    assert shown.code == 0 and shown.out.count("--- sample") == 2, shown.err


@pytest.mark.parametrize(
    ("name", "value"), [("a", {"type": "image_url", "image_url": "x"}), ("b", {"type": "text", "text": "q"})]
)
def test_a_message_of_parts_is_joined_or_bad(name: str, value: Any) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "q"}, value]}, PAIR[1]]
    if name == "b":
        assert read("messages", {"messages": turns})["messages"][0]["content"] == "qq"
        return
    with pytest.raises(BadRow, match="only text"):
        read("messages", {"messages": turns})
