"""Every kind of bad row: left out and counted once, named with file and line, refused where the recipe says stop."""

from __future__ import annotations

import functools
import json

import pytest

from clustertune.errors import ExitCode, UserError

GOOD = 2


@functools.cache
def ten_megabytes():
    row = {"message_id": "a2", "parent_id": "p1", "message_tree_id": "t", "role": "assistant", "text": "x" * 10_000_000}
    return json.dumps(row).encode()


def bad_rows(row):
    """(name, reason, rows that are added to a good tree of two rows, how many are rejected)."""
    other = {"message_tree_id": "u"}
    without = {key: value for key, value in row("a2", "p1").items() if key != "text"}
    return [
        ("empty", "empty-text", [row("a2", "p1", "")]),
        ("zero width", "empty-text", [row("a2", "p1", "\u200b\ufeff \u2060")]),
        ("role", "unknown-role", [row("a2", "p1", role="user")]),
        ("second root", "two-roots", [row("p2", None)]),
        ("no parent", "missing-parent", [row("a2", "nobody")]),
        ("own parent", "cycle", [row("a2", "a2")]),
        ("circle", "cycle", [row("a2", "p2"), row("p2", "a2"), row("p3", "a2")], 2),
        ("bytes", "not-utf8", [b'{"message_id": "a2", "text": "caf\xe9"}']),
        ("surrogate", "not-utf8", [row("a2", "p1", "\\ud800")]),
        ("cut", "invalid-json", [json.dumps(row("a2", "p1")).encode()[:-30]]),
        ("comma", "invalid-json", [b'{"message_id": "a2",, "text": "x"}']),
        ("digits", "invalid-json", [b'{"rank": ' + b"9" * 5000 + b"}"]),
        ("missing column", "wrong-column", [without]),
        ("type of text", "wrong-column", [row("a2", "p1") | {"text": 7}]),
        ("type of rank", "wrong-column", [row("a2", "p1", rank="first")]),
        ("rank not finite", "wrong-column", [row("a2", "p1", rank=float("nan"))]),
        ("type of review", "wrong-column", [row("a2", "p1", review_result=0)]),
        ("root without language", "wrong-column", [row("p2", None, lang=None, **other)]),
        ("type of replies", "wrong-column", [row("a2", "p1", replies="none")]),
        ("a list", "wrong-column", [["a2"]]),
        ("a prompt that is none", "wrong-column", [{"message_tree_id": "u", "prompt": None}]),
        ("10 MB", "message-too-long", [ten_megabytes()]),
        ("same id", "duplicate-id", [row("a1", "p1", "again")]),
        ("same role below", "wrong-parent-role", [row("a2", "a1")]),
        ("root is an answer", "wrong-parent-role", [row("a2", None, **other)]),
        ("nobody answered", "no-assistant-reply", [row("p2", None, **other)]),
    ]


NAMES = [entry[0] for entry in bad_rows(lambda identity, *_, **changes: {"message_id": identity} | changes)]


@pytest.fixture(params=NAMES)
def bad(request, row, lines):
    _, reason, rows_, *count = next(entry for entry in bad_rows(row) if entry[0] == request.param)
    good = [row("p1", None), row("a1", "p1")]
    content = lines(good) + lines(rows_).replace(b"\\\\ud", b"\\ud")
    return content, reason, (count or [1])[0]


def test_skip_leaves_the_row_out_counts_it_and_says_where(run, bad, capsys):
    content, reason, count = bad
    got = run(content, bad_rows="skip")
    assert got.texts == {"t": ["text of p1", "text of a1"]}
    assert got.rejected == {reason: count}
    listed = got.lines("rejected")
    assert [(entry["file"], entry["line"], entry["reason"]) for entry in listed[:1]] == [("rows.jsonl", GOOD + 1, reason)]
    assert len(listed) == count
    assert all(0 < len(entry["detail"]) < 300 for entry in listed)
    assert f"{reason} {count}" in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["circle", "cut", "10 MB", "nobody answered"], indirect=True)
def test_stop_refuses_with_file_and_line(run, bad):
    content, reason, count = bad
    if reason == "no-assistant-reply":
        assert run(content, bad_rows="stop").rejected == {reason: 1}
        return
    with pytest.raises(UserError) as caught:
        run(content, bad_rows="stop")
    first, *named = caught.value.problems
    assert caught.value.code == ExitCode.CONFIG
    assert f"{count} bad row" in first.message
    assert named[0].file.endswith(f"rows.jsonl:{GOOD + 1}")
    assert named[0].message.startswith(reason)


def test_the_limit_is_in_bytes_and_the_message_below_it_is_kept(run, row):
    below, above = "é" * 4_999_999, "é" * 5_000_000
    got = run([row("p1", None), row("a1", "p1", above, rank=0), row("a2", "p1", below, rank=1)])
    assert got.texts["t"][1] == below
    assert got.rejected == {"message-too-long": 1}


TWICE = [
    b'{"prompt": "a", "prompt": "b", "completion": "c"}',
    b'{"prompt": [{"role": "user", "content": "a", "content": "b"}], "completion": "c"}',
    b'{"prompt": "a", "completion": "c", "tools": "[{\\"name\\": 1, \\"name\\": 2}]"}',
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("twice", TWICE)
def test_a_key_that_stands_twice_makes_a_row_a_bad_one(run, twice, suffix):
    """Parsers keep the last one: which of the two was meant, no reader knows."""
    good = b'{"prompt": "a", "completion": "c"}'
    content = b"[" + good + b", " + twice + b", " + good + b"]" if suffix == ".json" else b"\n".join([good, twice, good])
    got = run(content, suffix, format="prompt-completion")
    assert got.rejected == {"repeated-key": 1} and len(got.conversations) == 2
    assert [entry["line"] for entry in got.lines("rejected")] == [2]
