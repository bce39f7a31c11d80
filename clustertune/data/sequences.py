"""The rows that training reads, out of the memory-mapped tokens: nothing is tokenised, packed or copied here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clustertune.data import rollout_rows, tokens
from clustertune.data.tokens import LABEL
from clustertune.errors import Problem, UserError
from clustertune.manifest import MANIFEST, find_problems, read_manifest


class Sequences:
    """The rows of one split by number: ``input_ids``, ``labels`` (-100 where masked), and ``seq_lengths`` of packed ones.

    Of preferences ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, lists, as ``DPOTrainer`` makes them.
    """

    def __init__(self, folder: Path, split: str) -> None:
        meta = read_manifest(folder, tokens.KIND).meta
        rows, parts = meta["made_from"]["rows"], meta["splits"][split]["parts"]
        pieces, begins = tokens.row_files(split, rows)
        self._pieces, self._begins = (np.load(folder / name, mmap_mode="r") for name in (pieces, begins))
        self._parts = [str(folder / f"{split}-{number:05}.u32") for number in range(len(parts))]
        self._starts = np.concatenate(([0], np.cumsum(parts)))
        self._maps: dict[int, Any] = {}
        self._separated, self._pairs = rows["packing"][split] in tokens.SEPARATED, bool(rows.get("pairs"))

    def __getstate__(self) -> dict[str, Any]:  # a DataLoader's worker maps the files itself
        return self.__dict__ | {"_maps": {}}

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Arrays of int64, and a list of lengths."""
        parts = self.parts(number)
        if self._pairs:
            begin = int((parts[0] & LABEL).argmax())
            chosen, rejected = ((part & ~LABEL).tolist() for part in parts)
            return {"prompt_ids": chosen[:begin], "chosen_ids": chosen[begin:], "rejected_ids": rejected[begin:]}
        raw = np.concatenate(parts)
        ids = (raw & ~LABEL).astype(np.int64)
        row: dict[str, Any] = {"input_ids": ids, "labels": np.where(raw & LABEL, ids, -100)}
        if self._separated:
            row["seq_lengths"] = [len(part) for part in parts]
        return row

    def parts(self, number: int) -> list[Any]:
        """The pieces of a row, uint32, with the bits of their labels."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        pieces = self._pieces[self._begins[number] : self._begins[number + 1]]
        return [self._read(int(piece["offset"]), int(piece["length"])) for piece in pieces]

    def _read(self, offset: int, length: int) -> Any:
        part = int(np.searchsorted(self._starts, offset, side="right")) - 1
        if part not in self._maps:
            self._maps[part] = np.memmap(self._parts[part], dtype="<u4", mode="r")
        begin = offset - int(self._starts[part])
        return self._maps[part][begin : begin + length]

    @property
    def lengths(self) -> Any:
        """Tokens of each row, int64."""
        ends = np.concatenate(([0], np.cumsum(self._pieces["length"], dtype=np.int64)))
        return np.diff(ends[self._begins])

    def as_dataset(self) -> Any:
        """A ``datasets.Dataset`` of row numbers that reads a row when it is asked for.

        Its column ``length`` is what ``train_sampling_strategy: group_by_length`` and ``batch_rebalance`` look for
        (transformers 5.23, trainer.py:1090); without it they read every row before the first step.

        TRL 1.16 takes no other class (sft_trainer.py:674), and a transform only with ``skip_prepare_dataset``.
        ``remove_unused_columns`` must be off: the Trainer would drop the column of numbers.
        """
        import datasets

        class Rows(datasets.Dataset):  # type: ignore[misc]
            def __getitem__(self, key: Any) -> Any:
                if key == "length" and self._indices is None:  # datasets would read each row for its length alone
                    return self._data.column("length").to_pylist()
                return super().__getitem__(key)

        def read(batch: Mapping[str, list[int]]) -> dict[str, list[Any]]:
            rows = [self[number] for number in batch["row"]]
            return {name: [row[name] for row in rows] for name in rows[0]}

        return Rows.from_dict({"row": np.arange(len(self)), "length": self.lengths}).with_transform(read)


PAIRS = {"remove_unused_columns": False}
"""What ``DPOConfig`` must say for rows that are made."""
TRAINER = {"dataset_kwargs": {"skip_prepare_dataset": True}, "assistant_only_loss": False, **PAIRS}
"""The same of ``SFTConfig``: with ``assistant_only_loss`` TRL asks for conversations."""


def load(folder: Path, dataset: Path, tokenizer: Any, train_args: Mapping[str, Any]) -> tuple[Any, Any | None]:
    """The train and eval rows of a run as ``datasets.Dataset``; eval is None where it is empty. Prompts come
    from ``dataset`` itself: TRL renders them, and rewards read their other columns.

    ``folder``: the tokens, or a node's copy of them; ``dataset``: the run's conversations, of whose manifest alone is read.
    Raises UserError where the tokens are missing, or were made of anything else than the recipe says now.
    """
    again = f"remove {dataset / tokens.FOLDER}, then the same command with --from prepare"
    if problems := find_problems(folder, tokens.KIND, hashes=False, allow_extra=True):
        raise UserError([*problems, Problem("contains no tokens to train on", file=str(folder), fix=again)])
    found, wanted = read_manifest(folder, tokens.KIND).meta["made_from"], tokens.made_from(dataset, tokenizer, train_args)
    if found != wanted:
        differ = [key for part in wanted for key in wanted[part] if found.get(part, {}).get(key) != wanted[part][key]]
        text = f"the tokens were made with another {', '.join(differ) or 'form'} than the recipe and this machine have"
        raise UserError(text, file=str(folder / MANIFEST), key="made_from", fix=again)
    if found["rows"].get("prompts"):
        return rollout_rows.as_dataset(dataset, "train"), rollout_rows.as_dataset(dataset, "eval")
    train, held_out = (Sequences(folder, split) for split in ("train", "eval"))
    if not len(train):
        text = "no row to train on: no conversation keeps a label within train.max_length"
        raise UserError(text, file=str(folder), key="train.max_length", fix="a longer train.max_length")
    return train.as_dataset(), held_out.as_dataset() if len(held_out) else None


def shown(folder: Path, tokenizer: Any, count: int, marks: tuple[str, str]) -> list[str]:
    """The text of the first ``count`` conversations of the training rows as they are cut, with labelled tokens in ``marks``."""
    rows, found = Sequences(folder, "train"), list[str]()
    for part in (part for number in range(len(rows)) for part in rows.parts(number)):
        if len(found) == count:
            break
        ids, learnt = part & ~LABEL, part & LABEL != 0
        turns, text = np.flatnonzero(np.diff(learnt)) + 1, ""
        for run, marked in zip(np.split(ids, turns), np.split(learnt, turns), strict=True):
            decoded = tokenizer.decode(run, skip_special_tokens=False)
            text += f"{marks[0]}{decoded}{marks[1]}" if marked[0] else decoded
        found.append(text)
    return found
