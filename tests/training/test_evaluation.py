"""The loss of an evaluation is the mean over its labelled tokens; and logits are never whole, as the plan counts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from trl import SFTTrainer
from trl.kernels import chunked_logprob
from trl.trainer import utils

from clustertune.training.figures import IGNORED_LABEL, PairMeans, TokenMeans, filled
from clustertune.training.trainer import Trainer
from tests.plan.tracked import make_rows, make_tokenizer
from tests.training.benches import Operations, tiny_trainer

LENGTHS = (3, 17, 5, 9, 12)
"""Tokens of each row; the first two of each carry no label, and none of the third does."""


def labelled_rows() -> Any:
    tokens = [[(7 * row + 3 * index) % 50 for index in range(length)] for row, length in enumerate(LENGTHS)]
    labels = [[-100, -100, *row[2:]] for row in tokens]
    labels[2] = [-100] * LENGTHS[2]
    return datasets.Dataset.from_dict({"input_ids": tokens, "labels": labels, "seq_lengths": [[n] for n in LENGTHS]})


def evaluating(folder: Path, **values: Any) -> Any:
    """The trainer on a model of one layer, in evaluation."""
    kind, rows = type("Trainer", (TokenMeans, SFTTrainer), {}), labelled_rows()
    sizes = {"vocab_size": 50, "max_position_embeddings": 64, "initializer_range": 1.0}
    return tiny_trainer(kind, folder, rows, rows, make_tokenizer(), sizes, **values)


def expected(model: Any) -> tuple[float, float]:
    """Loss and entropy over all labelled tokens, row by row."""
    cost = entropy = count = 0.0
    model.eval()
    for row in labelled_rows():
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        labels = torch.tensor(row["labels"][1:])
        logits, labels = logits[labels != IGNORED_LABEL], labels[labels != IGNORED_LABEL]
        cost += float(F.cross_entropy(logits, labels, reduction="sum"))
        entropy += float(torch.distributions.Categorical(logits=logits).entropy().sum())
        count += len(labels)
    return cost / count, entropy / count


@pytest.mark.parametrize("values", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "flat"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_each_token_counts_once_and_the_same(tmp_path: Path, batch: int, values: dict[str, Any]) -> None:
    """The mean of the batches' means, which the Trainer takes, is another number for each size of the batch."""
    trainer = evaluating(tmp_path, per_device_eval_batch_size=batch, **values)
    loss, entropy = expected(trainer.model)
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(loss, rel=1e-6)
    logged = trainer.state.log_history[-1]
    assert logged["eval_entropy"] == pytest.approx(entropy, rel=1e-5) and "eval_mean_token_accuracy" in logged


def test_a_row_without_labels_costs_nothing(tmp_path: Path) -> None:
    """Label smoothing divides by the labels of the batch: 0 / 0, in a batch of that row alone."""
    found = evaluating(tmp_path, per_device_eval_batch_size=1, label_smoothing_factor=0.1).evaluate()
    whole = evaluating(tmp_path, per_device_eval_batch_size=5, label_smoothing_factor=0.1).evaluate()
    assert found["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(("multiple", "more"), [(1, 0), (2, 1), (4, 3), (5, 0), (8, 3)])
def test_rows_are_filled_until_they_divide_without_a_label(multiple: int, more: int) -> None:
    """accelerate repeats rows with their labels: what it repeats would count twice."""
    rows = labelled_rows()
    found = filled(rows, multiple)
    assert len(found) == len(rows) + more
    read = [found[number] for number in range(len(found))]
    assert read[: len(rows)] == list(rows)
    for row in read[len(rows) :]:
        assert set(row["labels"]) == {IGNORED_LABEL} and len(row["labels"]) == len(row["input_ids"]) == sum(row["seq_lengths"])


@pytest.mark.parametrize(
    ("ranks", "sizes", "rows"), [(1, None, 5), (2, None, 8), (4, (1, 1), 8), (4, (2, 1), 8), (4, (2, 2), 6), (8, (1, 4), 8)]
)
def test_the_split_is_filled_for_the_ranks_that_share_it_out(
    monkeypatch: pytest.MonkeyPatch, ranks: int, sizes: tuple[int, int] | None, rows: int
) -> None:
    """Those of one tp or cp group have the same rows: five, two at a time, and nothing is added for one process."""
    monkeypatch.setattr(SFTTrainer, "get_eval_dataloader", lambda _, found: found)
    trainer: Any = object.__new__(Trainer)
    mesh = SimpleNamespace(tp_size=sizes[0], cp_size=sizes[1]) if sizes else None
    trainer.accelerator = SimpleNamespace(num_processes=ranks, parallelism_config=mesh)
    trainer.args, trainer.eval_dataset = SimpleNamespace(eval_batch_size=2), labelled_rows()
    assert len(trainer.get_eval_dataloader()) == len(trainer.get_eval_dataloader(labelled_rows())) == rows


@pytest.mark.parametrize(
    ("real", "kept"), [([True, False], [0, 2]), ([False, False], [0, 1, 2, 3]), ([True, True], [0, 1, 2, 3])]
)
def test_pairs_that_only_fill_a_batch_cost_nothing(real: list[bool], kept: list[int]) -> None:
    """Chosen answers are the first half of a batch, rejected ones the second. A batch of nothing else counts 0."""
    mask = torch.tensor([[0, 0, answer] for answer in (real + real)])
    found, count = PairMeans().weighed({"input_ids": torch.arange(4)[:, None].expand(4, 3), "completion_mask": mask})
    assert found["input_ids"][:, 0].tolist() == kept and len(found["completion_mask"]) == len(kept)
    assert int(count) == sum(real)


TOKENS, VOCABULARY = 64, 1000
TILE = (16, 100)
"""Tokens and vocabulary entries of a tile, for this test."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", TILE[0])
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", TILE[1])


def make_trainer(folder: Path, **values: Any) -> Any:
    """TRL's trainer on a model so narrow that no weight is as large as a tile; its rows are token ids."""
    rows = make_rows({"lengths": [TOKENS // 2]}, VOCABULARY).select(range(2))
    sizes = {"intermediate_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    return tiny_trainer(SFTTrainer, folder, rows, rows, make_tokenizer(), sizes, per_device_eval_batch_size=2, **values)


def watched(trainer: Any, act: Callable[[], Any]) -> tuple[int, int]:
    """The most elements of a tensor along the vocabulary that an operation made, and the forward passes taken."""
    passes: list[int] = []
    hook = trainer.model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    with Operations(lambda tensor: tensor.ndim > 0 and tensor.shape[-1] in (VOCABULARY, TILE[1])) as seen:
        act()
    hook.remove()
    return seen.largest, len(passes)


def take_step(trainer: Any) -> tuple[int, int]:
    """Of loss and gradients of one batch."""
    tokens = torch.arange(TOKENS).reshape(2, TOKENS // 2)
    inputs = {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}
    trainer.model.train()
    return watched(trainer, lambda: trainer.compute_loss(trainer.model, inputs).backward())


@pytest.mark.usefixtures("small_tiles")
def test_logits_are_tiles_in_training_and_in_evaluation(tmp_path: Path) -> None:
    """Whole, they would set the peak of a model with a large vocabulary."""
    trainer = make_trainer(tmp_path)
    assert take_step(trainer) == watched(trainer, trainer.evaluate) == (TILE[0] * TILE[1], 1)
