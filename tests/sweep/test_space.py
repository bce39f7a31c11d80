"""What a sweep varies: how arguments are cut, what a grid and draws are made of, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.errors import UserError
from clustertune.recipe.yamlfile import parse_value
from clustertune.sweep.points import MAX_POINTS, combinations, parse_axes, split_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,5e-5", ["1e-5", "5e-5"]), ("1e-5, 5e-5", ["1e-5", "5e-5"]), ("x", ["x"]), ("", [""]),
        ("[q_proj,k_proj],all-linear", ["[q_proj,k_proj]", "all-linear"]), ("['a]',b],c", ["['a]',b]", "c"]),
        ("[a, [b,c]],{d: 1, e: 2}", ["[a, [b,c]]", "{d: 1, e: 2}"]), ("it's,that's", ["it's", "that's"]),
        ("'a,b',\"c,d\",e", ["'a,b'", '"c,d"', "e"]),
    ],
)  # fmt: skip
def test_commas_inside_of_a_value_do_not_split(text: str, values: list[str]) -> None:
    """A list of target modules is one value of LoRA's."""
    assert split_values(text) == values


@given(st.text(alphabet="ab,[]{}()'\" ", max_size=30))
def test_any_text_is_cut_or_refused(text: str) -> None:
    """Nothing is lost on the way but blanks at the ends."""
    try:
        parts = split_values(text)
    except ValueError as error:
        assert "is not closed" in str(error)
    else:
        assert ",".join(parts).replace(" ", "") == text.replace(" ", "")


def test_the_grid_is_every_combination_once_in_order() -> None:
    """The number of a point is its place in this order, in the job array too. As many draws as points give each of them."""
    axes = parse_axes(["train.learning_rate=1e-5,5e-5", "train.max_steps=8", "lora.r=16,32"])
    grid = [("1e-5", "8", "16"), ("1e-5", "8", "32"), ("5e-5", "8", "16"), ("5e-5", "8", "32")]
    assert combinations(axes) == grid and sorted(combinations(axes, 4)) == grid


def test_draws_are_different_points_and_come_again() -> None:
    """The same seed gives the same points; more draws continue where fewer ended; another seed gives others."""
    axes = parse_axes(
        ["train.learning_rate=log:1e-6..1e-4", "lora.lora_dropout=uniform:0..0.1", "lora.r=int:4..9", "train.seed=1,2"]
    )
    drawn = combinations(axes, 40, seed=3)
    assert len(set(drawn)) == 40 and combinations(axes, 8, seed=3) == drawn[:8]
    assert combinations(axes, 8, seed=4) != drawn[:8]
    rates = [parse_value(point[0]) for point in drawn]
    assert all(isinstance(rate, float) and 1e-6 <= rate < 1e-4 for rate in rates)
    assert 8 <= sum(rate < 1e-5 for rate in rates) <= 32, "half of the draws lie in the lower decade"
    assert all(0 <= parse_value(point[1]) < 0.1 for point in drawn)
    assert {parse_value(point[2]) for point in drawn} == set(range(4, 10)), "both ends can be drawn"
    assert {point[3] for point in drawn} == {"1", "2"}


def refused(words: list[str], draws: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        combinations(parse_axes(words), draws)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "draws", "message"),
    [
        (["train.learning_rate"], None, "'train.learning_rate' is not a setting"),
        (["9a=1,2"], None, "'9a' is not a setting"),
        (["--x=1,2"], None, "is not a setting"),
        (["a.b=1,,2"], None, "an empty value between commas"),
        (["a.b=1,[2"], None, "a bracket is not closed"),
        (["a.b=1,1.0,1"], None, "1 appears twice"),
        (["a.b=1e-5,0.00001"], None, "0.00001 appears twice"),
        (["a.b=1,2", "a.b=3"], None, "a.b: appears twice"),
        (["a.b=1"], None, "nothing is varied"),
        ([], None, "nothing is varied"),
        (["slurm.nodes=1,2"], None, "slurm.nodes: cannot be varied"),
        (["a.b=log:1..2"], None, "a.b: a range has no grid -> --random N draws from it"),
        (["a.b=log:0..2"], 2, "both ends must be above 0"),
        (["a.b=uniform:3..2"], 2, "the low end must lie below the high one"),
        (["a.b=uniform:1..inf"], 2, "the low end must lie below"),
        (["a.b=int:1..2.5"], 2, "must be whole numbers"),
        (["a.b=int:x..3"], 2, "is not a range; write int:LOW..HIGH"),
        (["a.b=1,2"], 3, "3 draws from 2 different points"),
        (["a.b=int:1..2"], 3, "3 draws from 2 different points"),
        (["a.b=uniform:1..1.000001"], 900, "of 900 draws differ"),
        (["a.b=1,2"], 0, "0 draws: 1 to 1000 are possible"),
        (["a.b=1,2"], MAX_POINTS + 1, "1001 draws"),
        ([f"a.b={','.join(map(str, range(40)))}", f"a.c={','.join(map(str, range(40)))}"], None, "a grid of 1,600 points"),
    ],
)
def test_what_is_refused(words: list[str], draws: int | None, message: str) -> None:
    """In words, before anything is made."""
    assert message in refused(words, draws)


def test_every_wrong_argument_is_named_at_once() -> None:
    """Not the first alone."""
    text = refused(["a", "b.c=1,,2", "slurm.nodes=1,2"])
    assert all(word in text for word in ("'a' is not a setting", "b.c: an empty value", "slurm.nodes: cannot be varied"))


def test_an_axis_that_is_written_differently_is_one_value() -> None:
    """True and 1 are equal in Python and different settings."""
    assert parse_axes(["a.b=true,1,'1'"])[0].size == 3
