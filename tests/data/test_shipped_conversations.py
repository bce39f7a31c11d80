"""The conversations that the project ships: the columns of oasst2, every feature that the walk has rules for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "recipes" / "tiny-oasst2" / "conversations.jsonl"


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def test_it_holds_what_the_rules_are_about(rows):
    roots = [row for row in rows if row["parent_id"] is None]
    replies = Counter(row["parent_id"] for row in rows)
    assert 300 <= len(rows) <= 450
    assert 80 <= len(roots) <= 110
    assert {row["lang"] for row in rows} == {"en", "de", "fr", "es", "tr"}
    assert 0.08 < sum(row["lang"] != "en" for row in roots) / len(roots) < 0.16
    assert sum(row["deleted"] for row in rows) >= 3
    assert sum(row["review_result"] is False for row in rows) >= 3
    assert {row["rank"] for row in rows} == {None, 0, 1, 2}
    assert sum(count > 1 for count in replies.values()) >= 20


def test_it_gives_enough_conversations_and_no_bad_row(run, rows):
    got = run(path=FILE, bad_rows="stop")
    assert 80 <= len(got.conversations) <= 95
    assert set(got.rejected) <= {"no-assistant-reply"}
    assert {len(line["messages"]) for line in got.conversations} == {2, 4, 6}
    assert len({row["text"] for row in rows}) > 0.98 * len(rows)
