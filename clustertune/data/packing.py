"""Which tokens make which row: truncated, shuffled and packed as TRL 1.16 does it, as an index that copies no token."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clustertune.config.native_rules import train_fields

GROUP = 1000
"""Conversations that are packed together: the batch of ``datasets.map``, in which TRL's ``pack_dataset`` packs."""
SEPARATED = ("bfd", "bfd_split")
"""Strategies whose rows say how long each part is; ``wrapped`` joins conversations without a boundary."""

INDEX = np.dtype([("offset", "<i8"), ("length", "<i4"), ("first_label", "<i4"), ("last_label", "<i4"), ("labelled", "<i4")])
"""A conversation: its first token's place, its tokens, places of the first and the last labelled one, how many are labelled.
Without a label: ``first_label`` beyond every length and ``last_label`` -1."""
PIECE = np.dtype([("offset", "<i8"), ("length", "<i4")])
"""A stretch of tokens in a row."""

Pieces = npt.NDArray[Any]


def settings(train_args: Mapping[str, Any], *, pairs: bool = False) -> dict[str, Any]:
    """What decides the rows beside the tokens, of a recipe's ``train`` section; a key that is not given has TRL's default.

    ``pairs``: two conversations, a prompt with its chosen and with its rejected answer, are a row.
    """

    def value(key: str) -> Any:
        return train_args.get(key, train_fields()[key].default)

    strategy = value("packing_strategy")
    eval_packing = value("packing") if value("eval_packing") is None else value("eval_packing")
    return {
        "max_length": value("max_length"),
        "truncation_mode": value("truncation_mode"),
        "packing": {"train": strategy if value("packing") else None, "eval": strategy if eval_packing else None},
        "shuffle_dataset": bool(value("shuffle_dataset")),
        "seed": int(value("seed")),
        "group": GROUP,
        **({"pairs": True} if pairs else {}),
    }


def make_rows(index: npt.NDArray[Any], split: str, settings: Mapping[str, Any]) -> tuple[Pieces, npt.NDArray[np.int64]]:
    """The pieces of all rows in their order, and the number of the piece that each row begins with (one more at the end).

    ``index``: conversations of dtype :data:`INDEX`; ``settings``: of :func:`settings`.
    """
    strategy, size, rng = settings["packing"][split], settings["max_length"], np.random.default_rng
    if strategy is None:
        each = 2 if settings.get("pairs") else 1
        pieces = _truncate(index, size, settings["truncation_mode"], each)
        counts = np.full(len(pieces) // each, each, np.int64)
    else:
        if settings["shuffle_dataset"]:
            index = index[rng(settings["seed"]).permutation(len(index))]
        groups = [index[start : start + GROUP] for start in range(0, len(index), GROUP)]
        made = [(_wrap if strategy == "wrapped" else _best_fit)(group, size, strategy) for group in groups]
        pieces = np.concatenate([part for part, _ in made]) if made else np.empty(0, PIECE)
        counts = np.array([count for _, rows in made for count in rows], np.int64)
    begins = np.concatenate(([0], np.cumsum(counts)))
    if not settings["shuffle_dataset"]:
        return pieces, begins
    order = rng(settings["seed"]).permutation(len(counts))
    shuffled = np.concatenate(([0], np.cumsum(counts[order])))
    # The pieces of the rows in their new order: the first of each row, and from there as many as it has.
    chosen = np.repeat(begins[:-1][order] - shuffled[:-1], counts[order]) + np.arange(len(pieces))
    return pieces[chosen], shuffled


def _pieces(offsets: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Pieces:
    made = np.empty(len(offsets), PIECE)
    made["offset"], made["length"] = offsets, lengths
    return made


def _truncate(index: npt.NDArray[Any], size: int | None, mode: str, each: int) -> Pieces:
    """Each conversation by itself, at most ``size`` tokens of it; those that keep no label are left out (sft_trainer.py), with
    the others of a row of ``each`` (dpo_trainer.py: a prompt that fills ``size``)."""
    if size is None:
        return _pieces(index["offset"], index["length"])
    lengths = np.minimum(index["length"], size)
    begin = index["length"] - lengths if mode == "keep_end" else np.zeros_like(lengths)
    labelled = index["last_label"] >= begin if mode == "keep_end" else index["first_label"] < size
    made: Pieces = _pieces(index["offset"] + begin, lengths)[np.repeat(labelled.reshape(-1, each).all(axis=1), each)]
    return made


def _best_fit(index: npt.NDArray[Any], size: int, strategy: str) -> tuple[Pieces, list[int]]:
    """Best fit decreasing in TRL 1.16's order (data_utils._pack_bfd). ``bfd`` cuts at ``size``, ``bfd_split`` continues."""
    index = index[index["length"] > 0]
    if strategy == "bfd":
        pieces = _pieces(index["offset"], np.minimum(index["length"], size))
    else:
        parts = -(-index["length"] // size)
        number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        rest = np.repeat(index["length"], parts) - number * size
        pieces = _pieces(np.repeat(index["offset"], parts) + number * size, np.minimum(rest, size))
    rows: list[list[int]] = []
    by_space: dict[int, deque[list[int]]] = defaultdict(deque)
    spaces = 1 << size
    """Bit n: an open row has room for n tokens. The highest one is a new row."""
    for position in np.argsort(-pieces["length"].astype(np.int64), kind="stable").tolist():
        length = int(pieces["length"][position])
        above = spaces >> length
        space = length + (above & -above).bit_length() - 1
        if space < size:
            row = by_space[space].popleft()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            rows.append(row := [])
        row.append(position)
        if (left := space - length) > 0:
            by_space[left].append(row)
            spaces |= 1 << left
    return pieces[[position for row in rows for position in row]], [len(row) for row in rows]


def _wrap(index: npt.NDArray[Any], size: int, _strategy: str) -> tuple[Pieces, list[int]]:
    """All tokens of a group one behind the other, cut every ``size``: rows, and conversations, begin and end anywhere."""
    ends = np.cumsum(index["length"], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends[index["length"] > 0], np.append(np.arange(size, total, size), total) if total else [])
    begins = np.concatenate(([0], cuts[:-1])).astype(np.int64)[: len(cuts)]
    owner = np.searchsorted(ends, begins, side="right")
    offsets = index["offset"][owner] + begins - (ends - index["length"])[owner]
    counts = np.bincount(begins // size).tolist() if total else []
    return _pieces(offsets, (cuts - begins).astype(np.int64)), counts
