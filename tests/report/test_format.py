"""Numbers as a person reads them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clustertune.console import duration
from clustertune.report import content as words


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.none())))
def test_any_value_has_words(value: Any) -> None:
    for call in (words.number, words.percent, words.size, duration, words.moment, words.plain):
        assert isinstance(call(value), str)
