"""What a sweep varies: how arguments are cut, what a grid is made of, what is refused."""

from __future__ import annotations

import pytest

from clustertune.errors import UserError
from clustertune.sweep import combinations, parse_axes


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,5e-5", ("1e-05", "5e-05")), ("1e-5, 5e-5", ("1e-05", "5e-05")), ("x", ("x",)), ("", ("null",)),
        ("[q_proj,k_proj],all-linear", ('["q_proj", "k_proj"]', "all-linear")), ("['a]',b],c", ('["a]", "b"]', "c")),
        ("[a, [b,c]],{d: 1, e: 2}", ('["a", ["b", "c"]]', '{"d": 1, "e": 2}')), ("it's,that's", ("it's", "that's")),
        ("'a,b',\"7\",true", ("a,b", '"7"', "true")),
    ],
)  # fmt: skip
def test_commas_inside_of_a_value_do_not_split(text: str, values: tuple[str, ...]) -> None:
    """A list of target modules is one value of LoRA's; each is written so that it reads back as it was."""
    assert parse_axes([f"lora.target_modules={text}"])[0].values == values


def test_the_grid_is_every_combination_once_in_order() -> None:
    """The number of a point is its place in this order, in the job array too."""
    axes = parse_axes(["train.learning_rate=1e-5,5e-5", "train.max_steps=8", "lora.r=16,32"])
    grid = [("1e-05", "8", "16"), ("1e-05", "8", "32"), ("5e-05", "8", "16"), ("5e-05", "8", "32")]
    assert combinations(axes) == grid


def refused(words: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        combinations(parse_axes(words))
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.learning_rate"], "'train.learning_rate' is not a setting"),
        (["9a=1,2"], "'9a' is not a setting"),
        (["--x=1,2"], "is not a setting"),
        (["a.b=1,,2"], "not valid YAML"),
        (["a.b=1,[2"], "not valid YAML"),
        (["a.b=1,1.0,1"], "1 appears twice"),
        (["a.b=1e-5,0.00001"], "1e-05 appears twice"),
        (["a.b=1,2", "a.b=3"], "a.b: appears twice"),
        (["a.b=1"], "nothing is varied"),
        ([], "nothing is varied"),
        (["slurm.nodes=1,2"], "slurm.nodes: cannot be varied"),
        ([f"a.b={','.join(map(str, range(40)))}", f"a.c={','.join(map(str, range(40)))}"], "a grid of 1,600 points"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    """In words, before anything is made."""
    assert message in refused(words)
