"""Packed rows: none without a label, with every strategy; what is left out is counted; one BOS at the begin of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from clustertune.data import sequences, tokens
from clustertune.data.local_model import train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data

LONG, SHORT = 90, 4
STRATEGIES: list[dict[str, Any]] = [
    {"packing": False},
    {"packing": True},
    {"packing": True, "shuffle_dataset": True},
    {"packing": True, "packing_strategy": "bfd_split"},
    {"packing": True, "packing_strategy": "wrapped"},
    {"packing": False, "eval_packing": True},
    {"packing": True, "eval_packing": False},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["user assistant question answer word " * 9], 400, 4096)


def prepared(folder: Path, prompts: list[int], **data: Any) -> Path:
    """Conversations with prompts of so many words; the last tenth is for evaluation."""
    folder.mkdir(exist_ok=True)
    lines = [
        {"messages": [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": f"answer {n}"}]}
        for n, words in enumerate(prompts)
    ]
    for split, rows in (("train", lines[: -len(lines) // 4]), ("eval", lines[-len(lines) // 4 :])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = Data(name="made", format="messages", input=str(folder), **data)
    prepare(made, recipe_folder=folder, seed=1, out=folder / "data")
    return folder / "data"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: "-".join(f"{key}={value}" for key, value in one.items()))
def test_no_row_is_without_a_label(strategy: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    """Of conversations whose answer lies behind ``max_length`` all strategies leave out the same; what continues them in
    another row keeps the answer. The count of trained tokens is that of the rows."""
    dataset = prepared(tmp_path, [LONG, SHORT, LONG, LONG] * 12)
    settings = train_defaults() | {"assistant_only_loss": True, "max_length": 64, **strategy}
    made = tokens.make(dataset, tokenizer, settings)
    for split, one in made["splits"].items():
        rows = sequences.Sequences(dataset / tokens.FOLDER, split)
        learnt = [sum(label != -100 for label in row["labels"]) for row in rows]  # type: ignore[attr-defined]
        assert learnt and all(learnt)
        assert one["labelled"] == sum(learnt)
        packed = strategy["packing"] if split == "train" or "eval_packing" not in strategy else strategy["eval_packing"]
        continues = packed and strategy.get("packing_strategy") in ("bfd_split", "wrapped")
        assert one["dropped"] == (0 if continues else 3 * one["conversations"] // 4)
    whole = tokens.make(dataset, tokenizer, train_defaults() | {"assistant_only_loss": True, "max_length": 4096})
    assert made["splits"]["train"]["labelled"] <= whole["splits"]["train"]["labelled"]
    assert (made["labelled_share"] < whole["labelled_share"]) == (not strategy.get("packing_strategy"))


def test_an_eval_split_without_a_label_is_empty(tokenizer: Any, tmp_path: Path) -> None:
    """Its loss would be no number."""
    settings = train_defaults() | {"assistant_only_loss": True, "max_length": 64, "packing": True}
    dataset = prepared(tmp_path, [SHORT] * 12 + [LONG] * 4)
    made = tokens.make(dataset, tokenizer, settings)
    assert made["splits"]["eval"]["dropped"] == made["splits"]["eval"]["conversations"] == 4
    train, held = sequences.load(dataset / tokens.FOLDER, dataset, tokenizer, settings)
    assert len(train) and held is None


def with_bos(tokenizer: Any) -> Any:
    """As Llama's: the tokenizer puts BOS ahead of every text."""
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize("adds", [True, False], ids=["the tokenizer adds it", "it does not"])
def test_a_text_begins_with_one_bos(adds: bool, tokenizer: Any) -> None:
    made = train_tokenizer(["user assistant question answer word " * 9], 400, 4096)
    made = with_bos(made) if adds else made
    bos, eos = made.bos_token, made.eos_token
    encoder = tokens.Encoder.of(made, train_defaults())
    for text, expected in ((f"{bos}word{eos}", 1), (f"{bos}{bos}word", 1), ("word", int(adds)), (f"word{bos}word", 1 + adds)):
        [(ids, _)] = encoder.encode([{"text": text}])
        found = (ids & ~tokens.LABEL).tolist()
        assert found.count(made.bos_token_id) == expected and found[-1] == made.eos_token_id


@pytest.mark.parametrize("marked", [True, False])
def test_a_rendered_chat_begins_with_one_bos(marked: bool, tokenizer: Any) -> None:
    """A template that writes BOS ahead of a prompt that was rendered before; labels stay with their tokens."""
    made = with_bos(train_tokenizer(["user assistant question answer word " * 9], 400, 4096))
    answer = "{% generation %}{{ m.content + eos_token }}{% endgeneration %}" if marked else "{{ m.content + eos_token }}"
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        + answer
        + "{% endif %}{% endfor %}"
    )
    user = {"role": "user", "content": f"{made.bos_token}question "}
    chosen, rejected = ({"role": "assistant", "content": text} for text in ("answer", "word"))
    for example in (
        {"messages": [user, chosen]},
        {"prompt": [user], "completion": [chosen]},
        {"prompt": [user], "chosen": [chosen], "rejected": [rejected]},
    ):
        asked = train_defaults() | {"assistant_only_loss": "prompt" not in example}
        for ids, _ in tokens.Encoder.of(made, asked).encode([example]):
            plain = (ids & ~tokens.LABEL).tolist()
            assert plain.count(made.bos_token_id) == 1 and plain[0] == made.bos_token_id
            learnt = made.decode([int(one & ~tokens.LABEL) for one in ids if one & tokens.LABEL])
            assert learnt.strip() in (f"answer{made.eos_token}", f"word{made.eos_token}")
