"""The parser without recursion: the same values as the standard one, and an exact word for a cut text."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clustertune.data.rows import JsonError, parse, parse_deep

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=20, deadline=None)
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
@example([float("inf"), -float("inf")], None, True)
def test_equals_the_standard_parser(value, indent, ascii_only):
    text = " \n" + json.dumps(value, indent=indent, ensure_ascii=ascii_only) + " "
    assert parse_deep(text) == parse(text) == (value, len(text) - 1)


@settings(max_examples=15, deadline=None)
@given(st.lists(VALUES, min_size=1) | st.dictionaries(st.text(), VALUES, min_size=1), st.data())
def test_every_cut_of_a_record_is_called_truncated(value, data):
    text = json.dumps(value)
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    with pytest.raises(JsonError) as caught:
        parse(cut)
    assert caught.value.truncated


WRONG = [
    '{"a": 1,, "b": 2}',
    "{'a': 1}",
    '{"a" 1}',
    "[1 2]",
    '{"a": "x\ny"}',
    '["\\q____"]',
    "{1: 2}",
    "[}",
    "[01, 2]",
    '["\\u12"]',
]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_the_middle_is_not(text):
    with pytest.raises(JsonError) as caught:
        parse(text)
    assert not caught.value.truncated
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_100000_levels():
    value, end = parse("[" * 100_000 + "]" * 100_000)
    depth = 0
    while value:
        value, depth = value[0], depth + 1
    assert (depth, end) == (99_999, 200_000)
