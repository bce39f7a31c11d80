"""The rules of a message tree; and the walk against one that lists every path by recursion, on random forests with faults."""

from __future__ import annotations

import io
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.data import chats as oasst
from clustertune.data.rows import Rejects, RowLocation


def test_a_conversation_has_chat_roles_and_names_its_tree(run, row):
    got = run([row("p1", None, "Hi"), row("a1", "p1", " Hello\n")])
    assert got.conversations == [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello\n"}], "source": {"tree": "t"}}
    ]


def replies(row, *ranks):
    return [row("p1", None), *(row(f"a{i}", "p1", rank=rank) for i, rank in enumerate(ranks))]


@pytest.mark.parametrize(
    ("ranks", "taken"),
    [
        ((None, 5, 0), "a2"),
        ((2.0, 1.0), "a1"),
        ((-1, 0), "a1"),
    ],
)
def test_the_reply_is_chosen_by_rank_then_by_file_order(run, row, ranks, taken):
    assert run(replies(row, *ranks)).texts == {"t": ["text of p1", f"text of {taken}"]}


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


Row = dict[str, Any]
DATA = Path(__file__).parents[3] / "shared" / "data"
OASST = DATA / "oasst2_en_100_trees.rows.jsonl"


def oracle(rows: list[Row], language: str) -> dict[str, list[tuple[str, str]]]:
    """Conversations by tree: keep the good rows, list all paths from the root, take the longest."""
    seen: set[str] = set()
    forest: dict[str, list[Row]] = {}
    for row in rows:
        if row["message_id"] not in seen:
            seen.add(row["message_id"])
            forest.setdefault(row["message_tree_id"], []).append(row)
    result = {}
    for name, tree in forest.items():
        roots = [row for row in tree if row["parent_id"] is None]
        named = [row for row in roots if row["message_id"] == name]
        root = (named or [row for row in roots if alive(row)] or [None])[0]
        if root is None or not alive(root) or root["role"] != "prompter" or root["lang"] != language:
            continue
        ending = [path for path in paths(root, tree) if path[-1]["role"] == "assistant"]
        if ending:
            chosen = next(path for path in ending if len(path) == max(map(len, ending)))
            result[name] = [(row["role"], row["text"]) for row in chosen]
    return result


def alive(row: Row) -> bool:
    return (
        not row["deleted"]
        and row["review_result"] is not False
        and row["role"] in ("prompter", "assistant")
        and row["text"].strip() != ""
    )


def paths(row: Row, tree: list[Row]) -> list[list[Row]]:
    below = [r for r in tree if r["parent_id"] == row["message_id"] and alive(r) and r["role"] != row["role"]]
    if row["role"] == "prompter":
        ranked = [r["rank"] for r in below if r["rank"] is not None]
        if 0 in ranked:
            below = [r for r in below if r["rank"] == 0]
        elif ranked:
            below = [r for r in below if r["rank"] == min(ranked)]
        below = below[:1]
    return [[row]] + [[row, *path] for reply in below for path in paths(reply, tree)]


@st.composite
def forests(draw: st.DrawFn) -> list[Row]:
    rows: list[Row] = []
    rare = st.integers(0, 19)
    for tree in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 12))
        own: list[Row] = []
        for index in range(size):
            above = own[draw(st.integers(0, index - 1))] if index else None
            if above is not None and draw(rare) == 0:
                above = None  # a second root
            role = "prompter" if above is None or above["role"] == "assistant" else "assistant"
            if draw(rare) == 0:
                role = draw(st.sampled_from(["prompter", "assistant", "system"]))
            identity = f"{tree}-{index}" if draw(rare) else f"{tree}-0"  # now and then an id that is taken
            own.append(
                {
                    "message_id": identity,
                    "parent_id": (above["message_id"] if draw(rare) else "nowhere") if above else None,
                    "message_tree_id": f"{tree}-0",
                    "text": f"{tree}/{index}" if draw(rare) else " ",
                    "role": role,
                    "lang": "en" if draw(rare) > 2 else "de",
                    "rank": draw(st.sampled_from([None, None, 0, 1, 2])),
                    "deleted": draw(rare) == 0,
                    "review_result": draw(st.sampled_from([True, True, True, True, None, False])),
                }
            )
        rows += own
    return draw(st.permutations(rows)) if draw(st.booleans()) else rows


def walk(rows: list[Row]) -> dict[str, list[tuple[str, str]]]:
    trees = oasst.Trees(Rejects(io.StringIO()), "en")
    back = {chat: role for role, chat in oasst.ROLES.items()}
    found = list(trees.conversations((RowLocation("f", n), row) for n, row in enumerate(rows, 1)))
    result = {c.key: [(back[m["role"]], m["content"]) for m in c.example["messages"]] for c in found}
    assert len(result) == len(found)
    return result


@given(forests())
def test_the_walk_equals_the_enumeration_of_all_paths(rows):
    assert walk(rows) == oracle(rows, "en")


@pytest.mark.real_input
@pytest.mark.skipif(not OASST.exists(), reason="the real trees are not on this machine")
def test_real_trees_equal_the_second_implementation(run, nest):
    rows = [json.loads(line) for line in OASST.read_bytes().splitlines()]
    wanted = {tree: [text for _, text in path] for tree, path in oracle(rows, "en").items()}
    got = run(path=OASST, bad_rows="stop")
    assert got.texts == wanted
    assert (got.result["train"]["conversations"], got.result["eval"]["conversations"]) == (95, 5)
    assert run(nest(rows)).texts == wanted
    assert run(rows[::-1]).texts.keys() == wanted.keys()
