"""YAML as people write it, and as it arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.errors import UserError
from clustertune.recipe.layers import parse_value, parse_yaml
from tests.refusal import problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 5e-5), ("5.0e-5", 5e-5), ("-1", -1), ("0.03", 0.03), ("1e3", 1000.0), (".5", 0.5), ("007", 7),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("no", "no"), ("yes", "yes"),
        ("48:00:00", "48:00:00"), ("2026-01-01", "2026-01-01"), ("[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("{a: 1}", {"a": 1}), ("'5'", "5"), ("be673f32", "be673f32"), ("<|pad|>", "<|pad|>"), ("a=b", "a=b"),
    ],
)  # fmt: skip
def test_a_value_is_what_a_person_means(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


BOMB = "a: &a [x,x]\n" + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2\n", "appears twice, first in line 1"), ("a: {b: 1, b: 2}\n", "appears twice"), ("\ta: 1\n", "tabs"),
        ("a: [1, 2\n", "not valid YAML"), ("a: b: c\n", "not valid YAML"), ("- a\n- b\n", "a list"),
        ("just text\n", "a single value"), ("", "empty"), ("# only a comment\n", "empty"), (BOMB, "aliases"),
        ("a: !!python/object/apply:os.system [ls]\n", "tag"), ("a: !secret x\n", "tag"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"), ("a: " + "[" * 500, "nested"), ("? [a, b]\n: 1\n", "key must be plain text"),
        ("<<: {a: 1}\n", "key must be plain text"), ("a: \x00\n", "not valid YAML"), ("a: 'open\n", "not valid YAML"),
        ("%YAML 9.9\n---\na: 1\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_bad_yaml_is_refused_in_words(text: str, says: str) -> None:
    problem = problems(parse_yaml, text, "f.yaml")[0]
    assert problem.file.startswith("f.yaml") and says in str(problem)


@given(st.text(max_size=200))
def test_any_text_is_a_mapping_or_a_user_error(text: str) -> None:
    try:
        assert isinstance(parse_yaml(text, "f").data, dict)
    except UserError as error:
        assert error.problems
    try:
        parse_value(text)
    except ValueError as error:
        assert "\n" not in str(error)
