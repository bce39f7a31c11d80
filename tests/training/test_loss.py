"""Logits are never whole: what TRL's loss has in memory at once, and what label smoothing costs, as the plan counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.plan import memory
from tests.plan.tracked import make_rows, make_tokenizer
from tests.training.benches import tiny_trainer

TOKENS, VOCABULARY = 64, 1000
TILE = (16, 100)
"""Tokens and vocabulary entries of a tile, for this test."""


def test_the_tile_is_the_one_that_the_plan_counts() -> None:
    """A release of TRL with another tile would make every plan of a large vocabulary wrong."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    assert chunked_logprob.TOKEN_CHUNK_SIZE == memory.TILE_TOKENS
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == memory.TILE_ENTRIES


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", TILE[0])
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", TILE[1])


def make_trainer(folder: Path, **values: Any) -> Any:
    """TRL's trainer on a model so narrow that no weight is as large as a tile; its rows are token ids."""
    from trl import SFTTrainer

    rows = make_rows({"lengths": [TOKENS // 2]}, VOCABULARY).select(range(2))
    sizes = {"intermediate_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    return tiny_trainer(SFTTrainer, folder, rows, rows, make_tokenizer(), sizes, per_device_eval_batch_size=2, **values)


class Largest:
    """The most elements of a tensor along the vocabulary that an operation made, and the forward passes taken."""

    def __init__(self, trainer: Any) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        found = self
        self.elements = self.passes = 0
        trainer.model.model.register_forward_pre_hook(lambda *_: setattr(found, "passes", found.passes + 1))

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                for leaf in tree_leaves(result):
                    if getattr(leaf, "shape", ()) and leaf.shape[-1] in (VOCABULARY, TILE[1]):
                        found.elements = max(found.elements, leaf.numel())
                return result

        self.mode = Mode()


def take_step(trainer: Any) -> Largest:
    """Loss and gradients of one batch."""
    import torch

    tokens = torch.arange(TOKENS).reshape(2, TOKENS // 2)
    inputs = {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}
    found = Largest(trainer)
    trainer.model.train()
    with found.mode:
        trainer.compute_loss(trainer.model, inputs).backward()
    return found


@pytest.mark.usefixtures("small_tiles")
def test_logits_are_tiles_in_training_and_in_evaluation(tmp_path: Path) -> None:
    """Whole, they would set the peak of a model with a large vocabulary."""
    trainer = make_trainer(tmp_path)
    found = take_step(trainer)
    assert (found.elements, found.passes) == (TILE[0] * TILE[1], 1)
    looked = Largest(trainer)
    with looked.mode:
        trainer.evaluate()
    assert (looked.elements, looked.passes) == (TILE[0] * TILE[1], 1)


@pytest.mark.usefixtures("small_tiles")
def test_label_smoothing_holds_them_whole_and_computes_twice(tmp_path: Path) -> None:
    """What the plan says about it, seen: all logits of the batch, and a second forward pass for the metrics."""
    found = take_step(make_trainer(tmp_path, label_smoothing_factor=0.1))
    assert (found.elements, found.passes) == (TOKENS * VOCABULARY, 2)
