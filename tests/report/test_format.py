"""Numbers as a person reads them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.report import content as words


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (words.number, 1.1390, "1.1390"),
        (words.number, 404_619_264, "404,619,264"),
        (words.number, 5e-5, "5e-05"),
        (words.number, 8.0, "8"),
        (words.number, -0.5, "-0.5000"),
        (words.number, math.nan, "nan"),
        (words.number, True, "-"),
        (words.number, 10**400, "-"),
        (words.duration, 10**400, "-"),
        (words.percent, 0.7098, "70.98 %"),
        (words.percent, None, "-"),
        (words.size, 1023, "1023 B"),
        (words.size, 1024, "1.00 KiB"),
        (words.size, 4.86e9, "4.53 GiB"),
        (words.size, 1e18, "909494.70 TiB"),
        (words.duration, 0.417, "0.42 s"),
        (words.duration, 59.94, "59.9 s"),
        (words.duration, 725, "12 min 05 s"),
        (words.duration, 3599.6, "1 h 00 min"),
        (words.duration, 30240, "8 h 24 min"),
        (words.duration, math.inf, "-"),
        (words.moment, 1795248992.7, "2026-11-21 08:16:32 UTC"),
        (words.moment, -1, "-"),
        (words.plain, ["q_proj", "v_proj"], "q_proj, v_proj"),
        (words.plain, {"b": 1, "a": None}, '{"a": null, "b": 1}'),
        (words.plain, True, "true"),
    ],
)
def test_words(call: Any, value: Any, text: str) -> None:
    assert call(value) == text


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.none())))
def test_any_value_has_words(value: Any) -> None:
    for call in (words.number, words.percent, words.size, words.duration, words.moment, words.plain):
        assert isinstance(call(value), str)
