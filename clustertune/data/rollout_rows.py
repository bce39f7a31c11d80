"""Prompts that a model answers itself: what ``prepare`` asks of them, and the rows that ``GRPOTrainer`` draws."""

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
from clustertune.errors import Problem, UserError
from clustertune.recipe.native_rules import MAX_PROMPT
from clustertune.recipe.sections import Reward
from clustertune.resolve.resolved import Resolved

SHOWN = 20
"""Problems that one message lists."""
TRIED = 64
"""Rows with a good answer by which a reward is tried."""
REFERENCE = "reference"
"""The column with a good answer; ``exact_match`` has its own."""


def read(dataset: Path, split: str) -> list[dict[str, Any]]:
    """The rows of a split in the order of the file: ``prompt``, ``columns``, ``source``."""
    with (dataset / f"{split}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check(dataset: Path, resolved: Resolved) -> None:
    """Refuse rows that a reward could not judge, prompts that are too long or too few, and rewards that cannot tell a good
    answer from a bad one.

    Of a data set whose tokens are made. Raises UserError.
    """
    args, steps = resolved.train_args, resolved.train_args["steps_per_generation"]
    micro = int(args["per_device_train_batch_size"]) * resolved.data_parallel_size
    generated = resolved.global_batch_size if steps is None else micro * int(steps)
    with Rewards(resolved.recipe.reward or (), resolved.reward_code) as rewards:
        _check(dataset, rewards, args, generated)


def _check(dataset: Path, rewards: Rewards, train_args: Mapping[str, Any], generated: int) -> None:
    """``generated``: completions that are generated at a time, over all ranks."""
    problems: list[Problem] = []
    rows = {split: read(dataset, split) for split in SPLITS}
    for split in SPLITS:
        lengths = np.load(dataset / tokens.FOLDER / f"{split}.index.npy", mmap_mode="r")["length"]
        for row, length in zip(rows[split], lengths, strict=True):
            problems += _problems(row, int(length), rewards.rewards, train_args)
    if len(problems) > SHOWN:
        more = f"{len(problems) - SHOWN:,} more problems of this kind"
        problems = [*problems[:SHOWN], Problem(more, file=str(dataset))]
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


def _problems(
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
    found = rewards.judge([row["prompt"] for row in rows], answers, [row["columns"] for row in rows])[at]
    return sum(value or 0.0 for value in found) / len(found)


def as_dataset(dataset: Path, split: str) -> Any | None:
    """The rows of a split as a ``datasets.Dataset`` for ``GRPOTrainer``; None where there is none.

    ``prompt``, and for the rewards ``columns``, ``row`` (its number) and ``kind``. Rows stay JSON until they are drawn: an
    Arrow struct would fill keys that other rows have with null.
    """
    import datasets

    lines = [json.dumps(row) for row in read(dataset, split)]
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
