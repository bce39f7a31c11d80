"""Context parallelism's arithmetic without ranks: who has which piece, and what is cut; whole runs prove its attention."""

from __future__ import annotations

import pytest
import torch

from clustertune.training import context


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_piece_lies_on_one_rank_and_the_work_is_the_same_on_all(size: int) -> None:
    """With pieces one after another the last rank would have almost twice the mean of the query-key pairs."""
    held = [context.pieces_of(rank, size) for rank in range(size)]
    assert sorted(piece for pair in held for piece in pair) == list(range(2 * size))
    assert len({sum(piece + 1 for piece in pair) for pair in held}) == 1
    gathered = [piece for pair in held for piece in pair]
    assert [gathered[at] for at in context.in_order(size)] == list(range(2 * size))


def test_a_batch_is_cut_with_labels_already_moved() -> None:
    """The label of a piece's last token is the first token of another rank's piece; padding gets none."""
    ids = torch.arange(1, 11).reshape(1, 10)
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    parts = [context.share_of(batch, rank, 2, pad_token=0) for rank in range(2)]
    assert [part["input_ids"].tolist() for part in parts] == [[[1, 2, 3, 10, 0, 0]], [[4, 5, 6, 7, 8, 9]]]
    assert [part["shift_labels"].tolist() for part in parts] == [[[2, 3, 4, -100, -100, -100]], [[5, 6, 7, 8, 9, 10]]]
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 2, 9, 10, 11]], [[3, 4, 5, 6, 7, 8]]]
    assert sum(int(part["attention_mask"].sum()) for part in parts) == 10
    counted = sum(int((part["shift_labels"] != -100).sum()) for part in parts)
    assert counted == int((batch["labels"][:, 1:] != -100).sum()) == 9
