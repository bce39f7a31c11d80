"""alpaca, messages and lima: what a row becomes, and what is refused."""

from __future__ import annotations

import pytest

from clustertune.data.chats import read
from clustertune.data.rows import BadRow


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "", "output": "x"}, "empty-text"),
        ({"instruction": "x", "output": "\n"}, "empty-text"),
        ({"instruction": "x"}, "wrong-column"),
        ({"instruction": "x", "input": ["y"], "output": "z"}, "wrong-column"),
        ({"instruction": "x", "output": "y" * 10_000_000}, "message-too-long"),
        ({"instruction": "x", "output": "\udcff"}, "not-utf8"),
    ],
)
def test_alpaca_refuses(row, reason):
    with pytest.raises(BadRow) as caught:
        read("alpaca", row)
    assert caught.value.reason == reason


@pytest.mark.parametrize("head", [[], [SYSTEM]])
def test_messages_pass_through_and_lose_other_fields(head):
    turns = [*head, user("a") | {"name": "n"}, assistant("b"), user("c"), assistant("d")]
    assert read("messages", {"messages": turns})["messages"] == [*head, user("a"), assistant("b"), user("c"), assistant("d")]


@pytest.mark.parametrize(
    ("turns", "reason", "words"),
    [
        ([], "empty-text", "messages is empty"),
        ([SYSTEM], "unanswered", "ends with a system"),
        ([user("a")], "unanswered", "ends with a user"),
        ([assistant("a")], "wrong-turn", r"messages\[0\] is a assistant"),
        ([user("a"), user("b")], "wrong-turn", r"messages\[1\]"),
        ([user("a"), assistant("b"), assistant("c")], "wrong-turn", r"messages\[2\]"),
        ([user("a"), SYSTEM, assistant("b")], "wrong-turn", r"messages\[1\] is a system"),
        ([SYSTEM, SYSTEM, user("a"), assistant("b")], "wrong-turn", r"messages\[1\]"),
        ([user("a"), {"role": "tool", "content": "b"}], "wrong-turn", "tool"),
        ([user("a"), {"role": "narrator", "content": "b"}], "unknown-role", "narrator"),
        ([user("a"), {"role": "assistant"}], "wrong-column", r"messages\[1\].content is missing"),
        ([user("a"), assistant(None)], "wrong-column", r"messages\[1\].content is null"),
        ([user([{"type": "text"}]), assistant("b")], "wrong-column", r"messages\[0\].content\[0\].text is missing"),
        ([user([{"type": "image_url"}]), assistant("b")], "not-text", "image_url"),
        ([user("a"), assistant(" ")], "empty-text", r"messages\[1\].content"),
        (["hello"], "wrong-column", r"messages\[0\]"),
        (None, "wrong-column", "messages is null"),
    ],
)
def test_messages_refuses(turns, reason, words):
    with pytest.raises(BadRow, match=words) as caught:
        read("messages", {"messages": turns})
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (["a"], "unanswered"),
        (["a", "b", "c"], "unanswered"),
        ([], "empty-text"),
        (["a", ""], "empty-text"),
        (["a", None], "wrong-column"),
        ([{"from": "human", "value": "a"}], "wrong-column"),
        ("ab", "invalid-json"),
    ],
)
def test_lima_refuses(turns, reason):
    with pytest.raises(BadRow) as caught:
        read("lima", {"conversations": turns})
    assert caught.value.reason == reason


def test_the_source_names_file_and_row(run, lines):
    content = b"\n" + lines([{"instruction": "x"}]) + lines([{"instruction": "x", "output": "y"}])
    got = run(content, format="alpaca", language=None)
    assert got.conversations[0]["source"] == {"tree": "rows.jsonl:2", "file": "rows.jsonl", "row": 2}
    assert got.lines("rejected") == [{"file": "rows.jsonl", "line": 2, "reason": "wrong-column", "detail": "output is missing"}]


def test_copies_of_a_conversation_never_stand_in_both_splits(run):
    content = [{"conversations": [f"question {i % 10}", "answer"]} for i in range(40)]
    got = run(content, format="lima", language=None, eval_fraction=0.3)
    train, held_out = ({line["messages"][0]["content"] for line in got.lines(name)} for name in ("train", "eval"))
    assert (len(train), len(held_out), train & held_out) == (7, 3, set())


def test_a_language_for_another_format_is_said_to_do_nothing(run):
    got = run([{"conversations": ["a", "b"]}], format="lima")
    assert any("data.language" in warning for warning in got.result["warnings"])


def test_a_limit_takes_the_first_conversations(run, lines):
    """The source's 2,048 samples: what stands behind them is not taken, and another limit is another dataset."""
    rows = [{"instruction": f"ask {n}", "output": f"answer {n}"} for n in range(20)]
    found = run(lines(rows), format="alpaca", limit=8)
    assert sorted(c["source"]["row"] for c in found.conversations) == list(range(1, 9))
    assert len(run(lines(rows), format="alpaca").conversations) == 20
