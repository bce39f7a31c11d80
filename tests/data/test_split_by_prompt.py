"""No prompt that is held out is trained: in every form, over sources, and for the turns of one conversation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clustertune.data.prepare import measure, prepare
from clustertune.recipe.sections import Data

PROMPTS, ANSWERS = 30, 5


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def ask(prompt: int, answer: int) -> str:
    """The same question, written a little differently for each answer."""
    return [f"What is {prompt}?", f"what is {prompt}? ", f" What is\n{prompt}?", f"WHAT IS {prompt}?", f"What  is {prompt}?"][
        answer
    ]


SYSTEM = {"role": "system", "content": "Answer in one word."}
FORMS: dict[str, Any] = {
    "messages": lambda p, a: {"messages": said(ask(p, a), f"answer {a}", "why?", f"because {a}")},
    "messages with one system message": lambda p, a: {"messages": [SYSTEM, *said(ask(p, a), f"answer {a}")]},
    "messages with several system messages": lambda p, a: {
        "messages": [{**SYSTEM, "content": f"You are {a}."}, *said(ask(p, a), f"answer {a}")]
    },
    "sharegpt": lambda p, a: {
        "conversations": [{"from": "human", "value": ask(p, a)}, {"from": "gpt", "value": f"answer {a}"}],
    },
    "alpaca": lambda p, a: {"instruction": "Say what it is.", "input": ask(p, a), "output": f"answer {a}"},
    "lima": lambda p, a: {"conversations": [ask(p, a), f"answer {a}"]},
    "prompt-completion": lambda p, a: {"prompt": ask(p, a), "completion": f"answer {a}"},
    "prompt-completion of several turns": lambda p, a: {
        "prompt": said("What is 0?", "zero", ask(p, a)),
        "completion": [{"role": "assistant", "content": f"answer {a}"}],
    },
    "preference": lambda p, a: {"prompt": ask(p, a), "chosen": f"answer {a}", "rejected": f"no {a}"},
    "preference that holds its prompt": lambda p, a: {
        "chosen": said(ask(p, 0), f"answer {a}"), "rejected": said(ask(p, 0), f"no {a}"),
    },
    "prompt": lambda p, a: {"prompt": ask(p, a), "answer": str(a)},
    "prompt with kinds": lambda p, a: {"prompt": ask(p, a), "answer": str(a), "instruction_id_list": [f"kind:{p % 3}"]},
    "oasst-tree": lambda p, a: {
        "message_tree_id": f"{p}-{a}",
        "prompt": {
            "message_id": f"{p}-{a}", "text": ask(p, a), "role": "prompter", "lang": "en",
            "replies": [{"message_id": f"{p}-{a}-r", "text": f"answer {a}", "role": "assistant", "lang": "en"}],
        },
    },
}  # fmt: skip


def prompt(line: dict[str, Any]) -> str:
    turns = line.get("prompt") or line["messages"]
    texts = [turn["content"] for turn in turns if turn["role"] == "user"]
    return " ".join((texts[-1] if "prompt" in line else texts[0]).casefold().split())


@pytest.mark.parametrize("form", FORMS)
def test_all_answers_of_a_prompt_are_in_one_split(form: str, run: Any) -> None:
    rows = [FORMS[form](number, answer) for answer in range(ANSWERS) for number in range(PROMPTS)]
    got = run(rows, format=form.split(maxsplit=1)[0], eval_fraction=0.2)
    held, trained = ({prompt(line) for line in got.lines(name)} for name in ("eval", "train"))
    assert not held & trained and len(held) == PROMPTS * 0.2 and len(held | trained) == PROMPTS
    assert Counter(map(prompt, got.conversations)) == dict.fromkeys(held | trained, ANSWERS)


def test_turns_of_one_conversation_as_rows_of_their_own_are_in_one_split(run: Any) -> None:
    """What is held out would stand in the context of a row that is trained."""
    turns = [[f"q{number}.{at // 2}" if at % 2 == 0 else f"a{number}.{at // 2}" for at in range(8)] for number in range(40)]
    rows = [
        {"prompt": said(*turn[:end]), "completion": said(*turn[: end + 1])[-1:]}
        for turn in turns
        for end in (1, 3, 5, 7)[turn[0] == "q7.0" :]
    ]
    got = run(rows, format="prompt-completion", eval_fraction=0.25)
    held, trained = ({line["prompt"][0]["content"] for line in got.lines(name)} for name in ("eval", "train"))
    assert not held & trained and len(held) == 10


def test_of_a_prompt_with_more_answers_than_the_share_all_are_trained(run: Any) -> None:
    """A large group would be the whole evaluation; where there are only such, the smallest is, and a warning says how large."""
    many = [{"prompt": "Tell a joke.", "completion": f"joke {number}"} for number in range(60)]
    got = run([*many, *({"prompt": f"q {number}", "completion": "a"} for number in range(40))], format="prompt-completion")
    assert got.result["eval"]["conversations"] == 5
    got = run(
        [*many, *({"prompt": "Tell a story.", "completion": f"s {number}"} for number in range(40))], format="prompt-completion"
    )
    assert got.result["eval"]["conversations"] == 40 and "40 of 100" in " ".join(got.result["warnings"])


def test_one_prompt_alone_leaves_nothing_to_hold_out(run: Any) -> None:
    got = run([{"prompt": "Tell a joke.", "completion": f"joke {number}"} for number in range(60)], format="prompt-completion")
    assert got.result["eval"]["conversations"] == 0 and "one prompt" in " ".join(got.result["warnings"])


def test_documents_in_system_messages_are_split_by_both(run: Any) -> None:
    """One question on many documents: those that are held out are in no row that is trained."""
    rows = [
        {"messages": [{"role": "system", "content": f"Document {number // 2}"}, *said("Summarise it.", f"About {number}.")]}
        for number in range(80)
    ]
    got = run(rows, format="messages")
    assert got.result["eval"]["conversations"] in (4, 5) and "system messages" in " ".join(got.result["warnings"])


@pytest.mark.parametrize("form", ["messages", "prompt-completion", "preference"])
def test_chats_that_begin_with_one_greeting_are_split_by_what_follows(form: str, run: Any) -> None:
    """Also as rows for each of their turns: what is held out of a chat is in no row that is trained."""
    chats = [said("Hello!", "Hi, what is it?", f"Order {number // 2} is late.", f"sorry {number}") for number in range(80)]
    rows = [{"messages": chat} for chat in chats]
    if form == "prompt-completion":
        rows = [{"prompt": chat[:end], "completion": chat[end : end + 1]} for chat in chats for end in (1, 3)]
    if form == "preference":
        rows = [{"prompt": chat[:3], "chosen": chat[3:], "rejected": said("", "no")[1:]} for chat in chats]
    got = run(rows, format=form)

    def orders(name: str) -> set[str]:
        lines = (line.get("prompt") or line["messages"] for line in got.lines(name))
        return {turns[2]["content"] for turns in lines if len(turns) > 1}

    assert orders("eval") and not orders("eval") & orders("train") and len(orders("eval") | orders("train")) == 40
    assert form == "preference" or "begin with one prompt" in " ".join(got.result["warnings"])


def test_data_of_one_prompt_are_said_to_leave_no_evaluation(tmp_path: Path) -> None:
    """By new and plan, too: what prepare warns of stands among the notes on data that no recipe describes."""
    rows = [json.dumps({"prompt": "Tell a joke.", "completion": f"joke {number}"}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    found = measure(str(tmp_path / "rows.jsonl"))
    assert found.section["expect"]["eval"] == 0 and any("eval split is empty" in note for note in found.notes)


def test_the_sources_of_a_mixture_share_no_prompt_over_the_splits(tmp_path: Path) -> None:
    """Also where one of them has splits of its own: what it evaluates with is trained from no other source."""
    own = tmp_path / "own"
    own.mkdir()
    for split, numbers in (("train", range(20)), ("test", range(20, 40))):
        (own / f"{split}.jsonl").write_text(
            "".join(json.dumps({"messages": said(f"q {number}", "a")}) + "\n" for number in numbers)
        )
    for name in ("one", "two"):
        lines = [json.dumps({"prompt": f"q {number}", "completion": name}) for number in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sources = [
        {"name": "own", "input": "own", "format": "messages"},
        *({"name": name, "input": f"{name}.jsonl", "format": "prompt-completion", "weight": 2} for name in ("one", "two")),
    ]
    data = Data.model_validate({"name": "mix", "sources": sources, "eval_fraction": 0.2})
    made = prepare(data, recipe_folder=tmp_path, seed=1, out=tmp_path / "out")
    lines = {name: list(map(json.loads, (tmp_path / "out" / f"{name}.jsonl").open())) for name in ("train", "eval")}
    held, trained = ({prompt(line) for line in lines[name]} for name in ("eval", "train"))
    assert not held & trained and held >= {f"q {number}" for number in range(20, 40)} and not made["warnings"]
    assert len(held) == 24, "a fifth of the 20 prompts that no source has a split for"


def test_a_prompt_in_both_of_the_inputs_own_splits_is_named(tmp_path: Path, run: Any) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for split, numbers in (("train", range(9)), ("dev", range(8, 12))):
        lines = [json.dumps({"prompt": f"q {number}", "completion": split}) for number in numbers]
        (own / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    got = run(path=own, format="prompt-completion")
    assert got.result["eval"]["conversations"] == 4
    assert any("train and in the eval split" in text and "1" in text for text in got.result["warnings"])
