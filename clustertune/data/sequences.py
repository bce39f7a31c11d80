"""The rows that training reads, out of the memory-mapped tokens: nothing is tokenised, packed or copied here.

Of prompts that a model answers itself: what ``prepare`` asks of them, and the rows that ``GRPOTrainer`` draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clustertune.data import tokens
from clustertune.data.chats import kind_of_prompt
from clustertune.data.prepare import SPLITS
from clustertune.data.rewards import Rewards, lacking
from clustertune.data.tokenizer import ENDLESS_FIX, check_labels
from clustertune.data.tokens import LABEL
from clustertune.errors import Problem, UserError
from clustertune.manifest import MANIFEST, find_problems, open_text, plain_path, read_manifest
from clustertune.recipe.native_rules import MAX_PROMPT
from clustertune.recipe.sections import Data, Reward
from clustertune.resolve.resolved import Resolved

PAIRS = {"remove_unused_columns": False}
"""What ``DPOConfig`` must say for rows that are made."""
TRAINER = {"dataset_kwargs": {"skip_prepare_dataset": True}, "assistant_only_loss": False, **PAIRS}
"""The same of ``SFTConfig``: with ``assistant_only_loss`` TRL asks for conversations."""
NO_ROOM = "take the tokenizer files of the model's makers, or make room in the model: resize_token_embeddings, save_pretrained"
"""What to do where a tokenizer has tokens that its model has not."""
LISTED = 20
"""Problems that one message lists."""
TRIED = 64
"""Rows with a good answer by which a reward is tried."""
LABEL_SAMPLE = 64
"""Training rows in which the end of an answer is looked for."""
REFERENCE = "reference"
"""The column with a good answer; ``exact_match`` has its own."""


class Sequences:
    """The rows of one split by number: ``input_ids``, ``labels`` (-100 where masked), and ``seq_lengths`` of packed ones.

    Of preferences ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, lists, as ``DPOTrainer`` makes them.
    """

    def __init__(self, folder: Path, split: str) -> None:
        meta = read_manifest(folder, tokens.KIND).meta
        rows, parts = meta["made_from"]["rows"], meta["splits"][split]["parts"]
        pieces, begins = tokens.row_files(split, rows)
        self._pieces, self._begins = (np.load(plain_path(folder / name), mmap_mode="r") for name in (pieces, begins))
        self._parts = [folder / f"{split}-{number:05}.u32" for number in range(len(parts))]
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
            self._maps[part] = np.memmap(plain_path(self._parts[part]), dtype="<u4", mode="r")
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


def load(folder: Path, dataset: Path, tokenizer: Any, train_args: Mapping[str, Any]) -> tuple[Any, Any | None]:
    """The train and eval rows of a run as ``datasets.Dataset``; eval is None where it is empty. Prompts come
    from ``dataset`` itself: TRL renders them, and rewards read their other columns.

    ``folder``: the tokens, or a node's copy of them; ``dataset``: the run's conversations, of whose manifest alone is read.
    Raises UserError where the tokens are missing, or were made of anything else than the recipe says now.
    """
    again = f"remove {dataset / tokens.FOLDER}, then the same command with --from prepare"
    if problems := find_problems(folder, tokens.KIND, hashes=False, allow_extra=True):
        raise UserError([*problems, Problem("contains no tokens to train on", file=str(folder), fix=again)])
    made_from, expected = read_manifest(folder, tokens.KIND).meta["made_from"], tokens.made_from(dataset, tokenizer, train_args)
    if made_from != expected:
        differ = [key for part in expected for key in expected[part] if made_from.get(part, {}).get(key) != expected[part][key]]
        text = f"the tokens were made with another {', '.join(differ) or 'form'} than the recipe and this machine have"
        raise UserError(text, file=str(folder / MANIFEST), key="made_from", fix=again)
    if made_from["rows"].get("prompts"):
        return prompts_as_dataset(dataset, "train"), prompts_as_dataset(dataset, "eval")
    train, held_out = (Sequences(folder, split) for split in ("train", "eval"))
    if not len(train):
        text = "no row to train on: no conversation keeps a label within train.max_length"
        raise UserError(text, file=str(folder), key="train.max_length", fix="a longer train.max_length")
    return train.as_dataset(), held_out.as_dataset() if len(held_out) else None


def shown(folder: Path, tokenizer: Any, count: int, marks: tuple[str, str]) -> list[str]:
    """The text of the first ``count`` conversations of the training rows as they are cut, with labelled tokens in ``marks``."""
    rows, texts = Sequences(folder, "train"), list[str]()
    for part in (part for number in range(len(rows)) for part in rows.parts(number)):
        if len(texts) == count:
            break
        ids, learnt = part & ~LABEL, part & LABEL != 0
        turns, text = np.flatnonzero(np.diff(learnt)) + 1, ""
        for run, marked in zip(np.split(ids, turns), np.split(learnt, turns), strict=True):
            decoded = tokenizer.decode(run, skip_special_tokens=False)
            text += f"{marks[0]}{decoded}{marks[1]}" if marked[0] else decoded
        texts.append(text)
    return texts


def check_ends(dataset: Path, tokenizer: Any, data: Data) -> None:
    """Raise UserError where no trained token of a data set's first rows is the tokenizer's EOS.

    Prompts have none that is trained; a text may be longer than all of these rows, and nobody waits for its end.
    """
    if not data.has_chats or data.has_prompts:
        return
    folder = dataset / tokens.FOLDER
    rows, size = Sequences(folder, "train"), read_manifest(folder, tokens.KIND).meta["made_from"]["rows"]["max_length"]
    last = int(np.load(folder / "train.index.npy", mmap_mode="r")["last_label"].max(initial=-1)) + 1
    fix = f"train.max_length={last} keeps the end of every answer" if size and last > size else ENDLESS_FIX
    check_labels(map(learnt, map(rows.__getitem__, range(min(LABEL_SAMPLE, len(rows))))), {tokenizer.eos_token_id}, fix)


def learnt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row as ``check_labels`` takes it: of a preference the chosen answer."""
    return {"input_ids": row["chosen_ids"]} if "chosen_ids" in row else row


def check_ids(dataset: Path, tokenizer: Any, rows: int) -> None:
    """Raise UserError where tokens of a data set, or padding, have ids beyond the model's ``vocab_size``, such as those that
    were added to its tokenizer: a rank would end at its first step, on a GPU without a word on which token it was.

    ``rows``: those of the model's embedding.
    """
    if max(tokenizer.get_vocab().values(), default=0) < rows:
        return
    problems, folder = list[Problem](), dataset / tokens.FOLDER
    manifest = read_manifest(folder, tokens.KIND)
    each = 2 if manifest.meta["made_from"]["rows"].get("pairs") else 1
    for split in SPLITS:
        start, offsets = 0, np.load(plain_path(folder / f"{split}.index.npy"), mmap_mode="r")["offset"]
        for number, size in enumerate(manifest.meta["splits"][split]["parts"]):
            ids = np.fromfile(plain_path(folder / f"{split}-{number:05}.u32"), "<u4", size) & ~LABEL
            beyond = np.flatnonzero(ids >= rows)
            if len(beyond):
                line = (int(np.searchsorted(offsets, start + beyond[0], side="right")) - 1) // each + 1
                found = int(ids[beyond[0]])
                text = f"{tokenizer.convert_ids_to_tokens(found)!r} is token {found}, and the model has {rows} (vocab_size)"
                problems.append(Problem(text, file=str(dataset / f"{split}.jsonl:{line}"), key="model.path", fix=NO_ROOM))
                break
            start += size
    if not problems and tokenizer.pad_token_id >= rows:
        text = f"{tokenizer.pad_token!r} is token {tokenizer.pad_token_id}, and the model has {rows} (vocab_size)"
        usable = tokenizer.eos_token if (tokenizer.eos_token_id or 0) < rows else "TOKEN"
        problems.append(
            Problem(text, file=str(dataset), key="train.pad_token", fix=f"train.pad_token={usable!r}, or {NO_ROOM}")
        )
    if problems:
        raise UserError(problems)


# -- prompts that a model answers itself -----------------------------------------------------------------------------------


def read_prompts(dataset: Path, split: str) -> list[dict[str, Any]]:
    """The rows of a split in the order of the file: ``prompt``, ``columns``, ``source``."""
    with open_text(dataset / f"{split}.jsonl") as file:
        return [json.loads(line) for line in file]


def check_prompts(dataset: Path, resolved: Resolved) -> None:
    """Refuse rows that a reward could not judge, prompts that are too long or too few, and rewards that cannot tell a good
    answer from a bad one.

    Of a data set whose tokens are made. Raises UserError.
    """
    args, steps = resolved.train_args, resolved.train_args["steps_per_generation"]
    micro = int(args["per_device_train_batch_size"]) * resolved.data_parallel_size
    generated = resolved.global_batch_size if steps is None else micro * int(steps)
    with Rewards(resolved.recipe.reward or (), resolved.reward_code) as rewards:
        _check_rows(dataset, rewards, args, generated)


def _check_rows(dataset: Path, rewards: Rewards, train_args: Mapping[str, Any], generated: int) -> None:
    """``generated``: completions that are generated at a time, over all ranks."""
    problems: list[Problem] = []
    rows = {split: read_prompts(dataset, split) for split in SPLITS}
    for split in SPLITS:
        lengths = np.load(plain_path(dataset / tokens.FOLDER / f"{split}.index.npy"), mmap_mode="r")["length"]
        for row, length in zip(rows[split], lengths, strict=True):
            problems += _row_problems(row, int(length), rewards.rewards, train_args)
    if len(problems) > LISTED:
        more = f"{len(problems) - LISTED:,} more problems of this kind"
        problems = [*problems[:LISTED], Problem(more, file=str(dataset))]
    prompts = generated // int(train_args["num_generations"])
    if len(rows["train"]) < prompts:
        text = f"{len(rows['train'])} prompts to train on, and {prompts} are answered at a time"
        fix = "a smaller train.global_batch_size or steps_per_generation, a larger train.num_generations, or more prompts"
        problems.append(Problem(text, file=str(dataset), key="train.num_generations", fix=fix))
    if problems:
        raise UserError(problems)
    for reward, text in find_blind(rows["train"] + rows["eval"], rewards):
        fix = "look at the reward and at the rows' references: training would follow noise"
        problems.append(Problem(text, file=str(dataset), key=f"reward.{reward.name}", fix=fix))
    if problems:
        raise UserError(problems)


def _row_problems(
    row: Mapping[str, Any], length: int, rewards: Sequence[Reward], train_args: Mapping[str, Any]
) -> Iterator[Problem]:
    where = f"{row['source']['file']}:{row['source']['row']}"
    if length > train_args[MAX_PROMPT]:
        fix = f"shorten it, leave it out, or train.{MAX_PROMPT}={length}"
        yield Problem(f"{length} tokens, and {MAX_PROMPT} is {train_args[MAX_PROMPT]}", file=where, key="prompt", fix=fix)
    for reward in rewards:
        yield from (Problem(text, file=where, key=key, fix=what) for key, text, what in lacking(reward, row["columns"]))


def find_blind(rows: Sequence[Mapping[str, Any]], rewards: Rewards) -> Iterator[tuple[Reward, str]]:
    """Rewards that give the rows' own good answers no more, on average, than an empty one, and no more than another row's."""
    for at, reward in enumerate(rewards.rewards):
        exact = reward.function == "exact_match" and "extract" not in reward.options
        column = str(reward.options.get("column", "answer")) if exact else REFERENCE
        some = [row for row in rows if isinstance(row["columns"].get(column), str)][:TRIED]
        if len(some) < 2:
            continue
        good = [row["columns"][column] for row in some]
        answers = {"good": good, "others'": [*good[1:], good[0]], "empty": [""] * len(some)}
        scores = {name: _mean(rewards, at, some, texts) for name, texts in answers.items()}
        if scores["good"] <= min(scores["others'"], scores["empty"]):
            told = ", ".join(f"{value:.3f} for {name} answers" for name, value in scores.items())
            yield reward, f"{reward.name} cannot tell good answers from bad ones: {told}, on average over {len(some)} rows"


def _mean(rewards: Rewards, at: int, rows: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> float:
    scores = rewards.judge([row["prompt"] for row in rows], answers, [row["columns"] for row in rows])[at]
    return sum(value or 0.0 for value in scores) / len(scores)


def prompts_as_dataset(dataset: Path, split: str) -> Any | None:
    """The rows of a split as a ``datasets.Dataset`` for ``GRPOTrainer``; None where there is none.

    ``prompt``, and for the rewards ``columns``, ``row`` (its number) and ``kind``. Rows stay JSON until they are drawn: an
    Arrow struct would fill keys that other rows have with null.
    """
    import datasets

    lines = [json.dumps(row) for row in read_prompts(dataset, split)]
    if not lines:
        return None

    def decode(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        rows = [json.loads(line) for line in batch["line"]]
        return {
            "prompt": [row["prompt"] for row in rows],
            "columns": [row["columns"] for row in rows],
            "row": list(batch["row"]),
            "kind": [kind_of_prompt(row) for row in rows],
        }

    return datasets.Dataset.from_dict({"line": lines, "row": list(range(len(lines)))}).with_transform(decode)
