"""Tokens beyond the model's embedding are refused before ranks start, with the first row that holds one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.data import sequences, tokens
from clustertune.data.local_model import train_tokenizer
from clustertune.errors import UserError
from clustertune.recipe.native_rules import train_defaults

FORMS: dict[str, Any] = {
    "prompt-completion": lambda text: {"prompt": "question", "completion": text},
    "preference": lambda text: {"prompt": "question", "chosen": "answer", "rejected": text},
    "prompt": lambda text: {"prompt": text},
    "text": lambda text: {"text": text},
}


def added(*names: str) -> tuple[Any, int]:
    """A tokenizer with tokens that its model does not have, and how many the model has."""
    tokenizer = train_tokenizer(["question answer word " * 9], 400, 512)
    rows = len(tokenizer)
    tokenizer.add_tokens(list(names), special_tokens=True)
    return tokenizer, rows


@pytest.mark.parametrize("form", FORMS)
def test_a_token_beyond_the_models_is_named_with_its_row(form: str, run: Any) -> None:
    tokenizer, rows = added("<think>")
    texts = [f"word {number} {'<think>' if number == 5 else ''} end" for number in range(12)]
    for held in (False, True):
        got = run([FORMS[form](text) for text in texts], format=form, eval_fraction=0.5, seed=1 if held else 2)
        tokens.make(got.out, tokenizer, train_defaults() | {"packing": False, "max_length": None, "assistant_only_loss": False})
        with pytest.raises(UserError) as caught:
            sequences.check_ids(got.out, tokenizer, rows)
        (problem,) = caught.value.problems
        assert "<think>" in problem.message and str(rows) in problem.message
        file, _, line = str(problem.file).rpartition(":")
        assert "<think>" in Path(file).read_text().splitlines()[int(line) - 1]
        sequences.check_ids(got.out, tokenizer, len(tokenizer))


def test_padding_beyond_the_models_is_named_and_unused_tokens_are_not(run: Any) -> None:
    tokenizer, rows = added("<unused>", "[PAD]")
    got = run([FORMS["text"](f"word {number}") for number in range(6)], format="text")
    tokens.make(got.out, tokenizer, train_defaults() | {"packing": False, "max_length": None})
    sequences.check_ids(got.out, tokenizer, rows)
    tokenizer.pad_token = "[PAD]"  # noqa: S105 - padding
    with pytest.raises(UserError) as caught:
        sequences.check_ids(got.out, tokenizer, rows)
    assert caught.value.problems[0].key == "train.pad_token"
