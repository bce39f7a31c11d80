"""The rules of a message tree, one small tree for each."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

OTHER = {"message_tree_id": "u"}


def test_a_conversation_has_chat_roles_and_names_its_tree(run, row):
    got = run([row("p1", None, "Hi"), row("a1", "p1", " Hello\n")])
    assert got.conversations == [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello\n"}], "source": {"tree": "t"}}
    ]
    assert got.result["train"] == {"conversations": 1, "messages": 2}
    assert got.result["eval"] == {"conversations": 0, "messages": 0}
    assert got.rejected == {}


def replies(row, *ranks):
    return [row("p1", None), *(row(f"a{i}", "p1", rank=rank) for i, rank in enumerate(ranks))]


@pytest.mark.parametrize(
    ("ranks", "taken"),
    [
        ((1, 0, 2), "a1"),
        ((3, 2), "a1"),
        ((None, None), "a0"),
        ((None, 4), "a1"),
        ((None, 5, 0), "a2"),
        ((1, 1), "a0"),
        ((2.0, 1.0), "a1"),
        ((-1, 0), "a1"),
    ],
)
def test_the_reply_is_chosen_by_rank_then_by_file_order(run, row, ranks, taken):
    assert run(replies(row, *ranks)).texts == {"t": ["text of p1", f"text of {taken}"]}


def test_deleted_and_badly_reviewed_rows_go_with_their_subtrees(run, row):
    rows = replies(row, 0, 1, 2)
    rows[1]["deleted"] = True
    rows[2]["review_result"] = False
    rows += [row("p2", "a0"), row("a8", "p2"), row("p3", "a1"), row("a9", "p3")]
    got = run(rows)
    assert got.texts["t"] == ["text of p1", "text of a2"]
    assert got.rejected == {}


def test_the_language_is_that_of_the_root(run, row):
    rows = [row("p1", None, lang="de"), row("a1", "p1"), row("p2", None, **OTHER), row("a2", "p2", lang="de", **OTHER)]
    assert list(run(rows).texts) == ["u"]
    assert sorted(run(rows, language=None).texts) == ["t", "u"]


def test_the_nested_export_gives_the_same(run, row, nest):
    rows = [row("p1", None), row("a1", "p1", rank=1), row("a2", "p1", rank=0), row("p2", "a2"), row("p3", "a2")]
    rows += [row("a3", "p3"), row("a4", "p2", deleted=True), row("p4", "a4"), row("x", "a2", role="ghost")]
    flat, nested = run(rows), run(nest(rows))
    assert flat.texts == nested.texts == {"t": ["text of p1", "text of a2", "text of p3", "text of a3"]}
    assert flat.rejected == nested.rejected == {"unknown-role": 1}


def deep(row, depth):
    ids = [f"{'ap'[i % 2]}{i}" for i in range(1, depth + 1)]
    return [row(identity, parent) for identity, parent in zip(ids, [None, *ids], strict=False)]


def test_a_tree_of_5000_levels_flat_in_any_order_and_nested(run, row):
    rows = deep(row, 5000)
    start, wanted = time.process_time(), [r["text"] for r in rows]
    for order in (rows, random.Random(1).sample(rows, len(rows))):
        assert run(order).texts == {"t": wanted}
    assert time.process_time() - start < 10
    kept = ({key: r[key] for key in ("message_id", "role", "text", "lang")} for r in rows)
    text = "".join(json.dumps(one)[:-1] + ', "replies": [' for one in kept)
    nested = f'{{"message_tree_id": "t", "prompt": {text}{"]}" * len(rows)}}}\n'.encode()
    with pytest.raises(RecursionError):
        json.loads(nested)
    assert run(nested).texts == {"t": wanted}


def test_a_chain_of_5000_in_a_cycle_is_found_in_time(run, row):
    rows = deep(row, 5000)
    rows[0]["parent_id"] = rows[-1]["message_id"]
    good = [row("p_", None, **OTHER), row("a_", "p_", **OTHER)]
    assert run(rows + good).rejected == {"cycle": 5000}


def test_the_conversations_that_the_project_ships(run):
    """Every feature that the walk has rules for, enough conversations, and no bad row."""
    file = Path(__file__).parents[2] / "recipes" / "tiny-oasst2" / "conversations.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert {r["lang"] for r in rows} == {"en", "de", "fr", "es", "tr"} and {r["rank"] for r in rows} == {None, 0, 1, 2}
    assert sum(r["deleted"] for r in rows) >= 3 and sum(r["review_result"] is False for r in rows) >= 3
    assert len({r["text"] for r in rows}) > 0.98 * len(rows)
    got = run(path=file, bad_rows="stop")
    assert 80 <= len(got.conversations) <= 95
    assert set(got.rejected) <= {"no-assistant-reply"}
    assert {len(line["messages"]) for line in got.conversations} == {2, 4, 6}
