"""The rows that ranks map are TRL's own: every row, every collated batch, every loss; and what a recipe's template teaches."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from clustertune.data import sequences, tokens
from clustertune.data.local_model import CHAT_TEMPLATE, train_tokenizer
from clustertune.data.prepare import prepare
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.sections import Data
from clustertune.resolve.resolve import resolve
from tests.command import REPO
from tests.training.benches import tiny_trainer

WORDS = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("r", "s", "t", "")]
COUNT, HELD = 1150, 60
"""More than one group of packing."""


def conversation(draw: random.Random) -> dict[str, Any]:
    def text() -> str:
        return " ".join(draw.choices(WORDS, k=max(1, min(90, int(draw.lognormvariate(2.2, 1.0))))))

    turns = [("user", "assistant")[number % 2] for number in range(2 * draw.choice([1, 1, 2]))]
    return {"messages": [{"role": role, "content": text()} for role in turns]}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations prepared by the project, 1150 and 60."""
    folder, draw = tmp_path_factory.mktemp("rows"), random.Random(3)
    for name, count in (("train", COUNT), ("eval", HELD)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(conversation(draw)) + "\n" for _ in range(count)))
    out = folder / "data"
    data = Data(name="made", format="messages", input=str(folder))
    prepare(data, recipe_folder=folder, seed=1, out=out)
    return out


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(WORDS * 3, 700, 4096)


def trainer(train: Any, held: Any, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    class Watched(SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            found = super().compute_loss(model, inputs, *args, **more)
            loss = float((found[0] if isinstance(found, tuple) else found).detach())
            self.__dict__.setdefault("seen", []).append((dict(inputs), loss))
            return found

    plain = {
        "save_strategy": "no",
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "seed": 7,
    }
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    return tiny_trainer(Watched, folder, train, held, tokenizer, sizes, **{**plain, **settings})


@pytest.fixture(scope="module", params=[True, False], ids=["answers", "all"])
def whole(request: pytest.FixtureRequest, dataset: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's own trainer on the conversations, none of them cut: its rows have all tokens and labels."""
    datasets.disable_progress_bars()
    chats = [
        datasets.Dataset.from_list([{"messages": json.loads(line)["messages"]} for line in (dataset / f"{split}.jsonl").open()])
        for split in ("train", "eval")
    ]
    settings = {"assistant_only_loss": request.param, "max_length": None}
    return trainer(*chats, tokenizer, tmp_path_factory.mktemp("whole"), **settings)


def made(dataset: Path, tokenizer: Any, **settings: Any) -> tuple[Any, Any]:
    """What a rank maps for these settings."""
    section = train_defaults() | {"seed": 7, **settings}
    tokens.make(dataset, tokenizer, section)
    train, held = sequences.load(dataset / tokens.FOLDER, dataset, tokenizer, section)
    assert held is not None
    return train, held


def is_learnt(row: dict[str, Any], longest: int | None = None) -> bool:
    return any(label != -100 for label in row["labels"][:longest])


def trls(whole: Any, split: str, tokenizer: Any, args: SFTConfig, packing: bool) -> Any:
    """TRL's rows, less those that have no label: where it packs, it leaves none out."""
    rows = getattr(whole, f"{split}_dataset")
    if packing and args.packing_strategy == "bfd":
        rows = rows.filter(partial(is_learnt, longest=args.max_length))
    made = whole._prepare_dataset(rows, tokenizer, args, packing, None, split)
    return made.filter(is_learnt)


def equal_rows(theirs: Any, ours: Any) -> None:
    assert len(theirs) == len(ours)
    for expected, found in zip(theirs, ours, strict=True):
        assert set(found) == {"input_ids", "labels", "seq_lengths"} & set(expected)
        assert all(list(expected[key]) == list(found[key]) for key in found)


CASES = {
    "packed": {"packing": True, "max_length": 128},
    "packed and shuffled": {"packing": True, "max_length": 200, "shuffle_dataset": True},
    "packed short": {"packing": True, "max_length": 24},
    "packed and split": {"packing": True, "packing_strategy": "bfd_split", "max_length": 40, "shuffle_dataset": True},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 64},
    "padded": {"max_length": 48},
    "padded and shuffled": {"max_length": 64, "shuffle_dataset": True},
    "padded, the end kept": {"max_length": 32, "truncation_mode": "keep_end"},
    "whole": {"max_length": None},
    "eval not packed": {"packing": True, "max_length": 96, "eval_packing": False},
    "eval alone packed": {"max_length": 96, "eval_packing": True},
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_trls(name: str, whole: Any, dataset: Path, tokenizer: Any, tmp_path: Path) -> None:
    settings, answers = CASES[name], whole.args.assistant_only_loss
    train, held = made(dataset, tokenizer, assistant_only_loss=answers, **settings)
    assert all(is_learnt(row) for rows in (train, held) for row in rows)
    if answers and name == "packed and split":  # TRL packs the pieces without a label as well
        theirs, ours = (sorted(label for row in rows for label in row["labels"]) for rows in (whole.train_dataset, train))
        assert theirs[theirs.count(-100) :] == ours[ours.count(-100) :]
        return
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, seed=7, **settings)
    packing = bool(args.packing)
    equal_rows(trls(whole, "train", tokenizer, args, packing), train)
    equal_rows(trls(whole, "eval", tokenizer, args, packing if args.eval_packing is None else args.eval_packing), held)
    if answers and name == "padded":
        assert len(train) < COUNT, "those without a label within max_length are left out"


@pytest.mark.parametrize("whole", [True], indirect=True, ids=["answers"])
@pytest.mark.parametrize(("name", "workers"), [("packed and shuffled", 2), ("padded", 0)])
def test_every_batch_and_loss_is_trls(
    name: str, workers: int, whole: Any, dataset: Path, tokenizer: Any, tmp_path: Path
) -> None:
    rows = made(dataset, tokenizer, assistant_only_loss=True, **CASES[name])
    longest = partial(is_learnt, longest=CASES[name]["max_length"])
    theirs = trainer(
        whole.train_dataset.filter(longest), whole.eval_dataset.filter(longest), tokenizer, tmp_path, **CASES[name]
    )
    ours = trainer(*rows, tokenizer, tmp_path, **CASES[name], **sequences.TRAINER, dataloader_num_workers=workers)
    for one in (theirs, ours):
        one.train()
        one.evaluate()
    assert [loss for _, loss in theirs.seen] == [loss for _, loss in ours.seen], "equal to the last bit"
    for (expected, _), (found, _) in zip(theirs.seen, ours.seen, strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(value, found[key]) if torch.is_tensor(value) else value == found[key]


CHAT = [
    {"role": "user", "content": "What is a shard?"},
    {"role": "assistant", "content": "A part of a whole."},
    {"role": "user", "content": "And a rank?"},
    {"role": "assistant", "content": "One process of many."},
]
TEMPLATES = [CHAT_TEMPLATE, REPO / "recipes/_base/mistral.jinja"]


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    return train_tokenizer([message["content"] for message in CHAT] * 20, 400, 256)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_only_the_assistants_words_are_learnt(template: Path, chat_tokenizer: Any, tmp_path: Path) -> None:
    """A label is the token at its own place, and the labelled tokens are the answers with their end, no more and no less."""
    chat_tokenizer.chat_template = template.read_text()
    data, sizes = Dataset.from_list([{"messages": CHAT}]), {"vocab_size": len(chat_tokenizer)}
    settings = {"assistant_only_loss": True, "max_length": 256}
    found = tiny_trainer(SFTTrainer, tmp_path, data, None, chat_tokenizer, sizes, **settings).train_dataset[0]
    pairs = list(zip(found["input_ids"], found["labels"], strict=True))
    learnt = [token for token, label in pairs if label != -100]
    assert learnt == [label for _, label in pairs if label != -100] and len(learnt) < len(pairs) / 2 + 8
    text = chat_tokenizer.decode(learnt).replace(chat_tokenizer.eos_token, "|").replace("<|eot_id|>", "|")
    assert [part.strip() for part in text.strip("|").split("|")] == ["A part of a whole.", "One process of many."]
    assert pairs[-1][1] != -100, "the end of the last answer is learnt, or the model never stops"


def test_a_base_without_a_template_gets_the_recipes() -> None:
    """Both Mistral bases have none; the file in ``_base`` is found as one in the folder would be."""
    text = TEMPLATES[1].read_text()
    assert resolve("mistral7b-alpaca").chat_template == text == resolve("mixtral8x7b-tulu3").chat_template
    assert "generation" in text
