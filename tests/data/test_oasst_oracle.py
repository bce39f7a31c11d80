"""The walk against a second implementation, which enumerates every path by recursion, on random forests with random faults."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustertune.data import chats as oasst
from clustertune.data.rows import Rejects, RowLocation

Row = dict[str, Any]
DATA = Path(__file__).parents[3] / "shared" / "data"
OASST = DATA / "oasst2_en_100_trees.rows.jsonl"
ALPACA = DATA / "alpaca_format_gsm8k_2048.json"


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


@settings(max_examples=60, deadline=None)
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


@pytest.mark.real_input
@pytest.mark.skipif(not ALPACA.exists(), reason="the real records are not on this machine")
def test_real_alpaca_records_all_become_conversations(run):
    records = json.loads(ALPACA.read_bytes())
    got = run(path=ALPACA, format="alpaca", language=None, bad_rows="stop")
    assert (got.result["train"]["conversations"], got.result["eval"]["conversations"]) == (1946, 102)
    by_row = {line["source"]["row"]: line["messages"] for line in got.conversations}
    for number, record in enumerate(records, 1):
        assert by_row[number][1]["content"] == record["output"]
        assert by_row[number][0]["content"].startswith(record["instruction"])
