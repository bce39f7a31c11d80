"""Context parallelism's arithmetic without ranks: who has which piece, what is cut, and an attention that is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

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


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_attend_as_the_whole_does(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Grouped-query attention over gathered keys is causal attention, to float32's last digits, forward and backward."""
    torch.manual_seed(0)
    length = 8 * size
    query, key, value = (torch.randn(2, heads, length, 16, requires_grad=True) for heads in (4, 2, 2))

    def mine(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        pieces = tensor.chunk(2 * size, dim=2)
        return torch.cat([pieces[piece] for piece in context.pieces_of(rank, size)], dim=2)

    whole = {id_: torch.cat([mine(t, rank) for rank in range(size)], dim=2) for id_, t in (("k", key), ("v", value))}
    answers = iter([whole["k"], whole["v"]] * size)
    monkeypatch.setattr(context, "all_gather_tensor_autograd", lambda *args: next(answers))
    module: Any = torch.nn.Module()
    module.train()
    outputs = [
        context.attend(module, mine(query, r), mine(key, r), mine(value, r), None, group=None, rank=r, size=size)[0]
        for r in range(size)
    ]
    expected = F.scaled_dot_product_attention(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), is_causal=True)
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output.transpose(1, 2), mine(expected, rank), rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(sum(o.square().sum() for o in outputs), (query, key, value), retain_graph=True)
    wanted = torch.autograd.grad(expected.square().sum(), (query, key, value))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
