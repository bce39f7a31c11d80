"""Numbers as a person reads them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.report import content as words

CASES: dict[Any, list[tuple[Any, str]]] = {
    words.number: [
        (1.1390, "1.1390"), (404_619_264, "404,619,264"), (5e-5, "5e-05"), (8.0, "8"), (-0.5, "-0.5000"), (math.nan, "nan"),
        (True, "-"), (10**400, "-"),
    ],
    words.duration: [
        (10**400, "-"), (0.417, "0.42 s"), (59.94, "59.9 s"), (725, "12 min 05 s"), (3599.6, "1 h 00 min"),
        (30240, "8 h 24 min"), (math.inf, "-"),
    ],
    words.percent: [(0.7098, "70.98 %"), (None, "-")],
    words.size: [(1023, "1023 B"), (1024, "1.00 KiB"), (4.86e9, "4.53 GiB"), (1e18, "909494.70 TiB")],
    words.moment: [(1795248992.7, "2026-11-21 08:16:32 UTC"), (-1, "-")],
    words.plain: [(["q_proj", "v_proj"], "q_proj, v_proj"), ({"b": 1, "a": None}, '{"a": null, "b": 1}'), (True, "true")],
}  # fmt: skip


@pytest.mark.parametrize(("call", "value", "text"), [(call, *case) for call, cases in CASES.items() for case in cases])
def test_words(call: Any, value: Any, text: str) -> None:
    assert call(value) == text


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.none())))
def test_any_value_has_words(value: Any) -> None:
    for call in (words.number, words.percent, words.size, words.duration, words.moment, words.plain):
        assert isinstance(call(value), str)
