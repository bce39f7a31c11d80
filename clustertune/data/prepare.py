"""``prepare``: the conversations of a recipe as a dataset on disk, made once and reused while its inputs stay the same."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from clustertune.config.schema import Data
from clustertune.console import say
from clustertune.data import publish
from clustertune.data.chats import Conversation, conversations
from clustertune.data.oasst import Trees
from clustertune.data.rejects import Rejects, count_words
from clustertune.data.sources import Source, digest, find_source
from clustertune.data.splits import choose_eval
from clustertune.errors import Problem, UserError, storage_error
from clustertune.manifest import find_problems, read_manifest

FORMAT = 1
"""Version of what this code makes out of the same input. Raise it with any change of a rule: older datasets are made anew."""

SPLITS = ("train", "eval")
_SPOOL = "spool.jsonl"
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_SAID = 5
"""Rows that are named on stderr where bad rows are skipped."""


def prepare(data: Data, *, recipe_folder: Path, seed: int, out: Path, input_path: Path | None = None) -> dict[str, Any]:
    """Make ``out/train.jsonl``, ``eval.jsonl``, ``rejected.jsonl`` and the manifest, or reuse them.

    A line of the first two is ``{"messages": [{"role", "content"}, ...], "source": {"tree": ...}}``. Reused when the folder
    is whole and the input's bytes, the data settings that matter, the seed and :data:`FORMAT` are those it was made with.

    Returns ``{"dir", "train": {"conversations", "messages"}, "eval": {...}, "rejected": {reason: rows}, "reused",
    "warnings"}``. Raises UserError: no such input, bad rows under ``bad_rows: stop``, no conversation, storage (exit 73).
    """
    source = find_source(data, recipe_folder, input_path)
    if source.root is not None and _same(source.root, out):
        raise UserError(Problem("is the folder of the input too", file=str(out), fix="choose another --out"))
    inputs = source.identity()
    key = None if inputs is None else digest(json.dumps([FORMAT, _settings(data), seed, inputs]))
    if out.exists() and not out.is_dir():
        raise UserError(Problem("is no folder", file=str(out), fix="choose another --out"))
    try:
        with publish.opened(out):
            meta = _whole(out, key)
            reused = meta is not None
            if meta is None:
                publish.check_folder(out)
                publish.clean(out)
                try:
                    meta = _make(data, source, seed, out) | {"key": key, "seed": seed, "inputs": inputs}
                    publish.replace(out, meta)
                finally:
                    publish.clean(out)
    except OSError as error:
        raise storage_error(error, "writing the dataset", out) from error
    warnings = [*source.warnings, *meta["warnings"], *_differences(data, meta)]
    for warning in warnings:
        say(f"warning: {warning}")
    summary = {name: meta[name] for name in (*SPLITS, "rejected")}
    return {"dir": str(out), **summary, "reused": reused, "warnings": warnings}


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _settings(data: Data) -> dict[str, Any]:
    """The settings that change the result: not where the input lies, and not what is expected of it."""
    return data.model_dump(include={"format", "language", "eval_fraction", "limit", "bad_rows"})


def _whole(out: Path, key: str | None) -> dict[str, Any] | None:
    """The meta data of a dataset that can be reused."""
    if key is None or find_problems(out, publish.KIND, allow_extra=True):
        return None
    meta = read_manifest(out, publish.KIND).meta
    return meta if meta.get("key") == key else None


def _make(data: Data, source: Source, seed: int, out: Path) -> dict[str, Any]:
    """Read everything, stage the files, return the counts. Raises UserError where the input gives no dataset."""
    own_splits = source.has_splits()
    with ExitStack() as files:
        spool = files.enter_context(publish.staged(out, _SPOOL).open("w+", encoding="utf-8"))
        rejects = Rejects(files.enter_context(publish.staged(out, "rejected.jsonl").open("w", encoding="utf-8")))
        trees = Trees(rejects, data.language)
        records = source.records(rejects)
        found = trees.conversations(records) if data.format == "oasst-tree" else conversations(data.format, records, rejects)
        keys: list[tuple[str, str | None]] = []
        lengths = array("I")
        for conversation in islice(found, data.limit):
            spool.write(_line(conversation))
            keys.append((conversation.key, conversation.split))
            lengths.append(len(conversation.messages))
        if data.bad_rows == "stop" and rejects.total_faults:
            raise rejects.refuse(source.root, source.shown)
        if not keys:
            raise _nothing(data, source, rejects, trees)
        _report(rejects, out)
        splits, warnings = _assign(keys, seed, data.eval_fraction, own_splits=own_splits)
        spool.seek(0)
        counts = _write_splits(spool, splits, lengths, out)
    publish.staged(out, _SPOOL).unlink()
    if data.language and data.format != "oasst-tree":
        warnings.append(f"data.language is for oasst-tree and changes nothing for {data.format}")
    dropped = {reason: count for reason, count in sorted(trees.dropped.items()) if count}
    return {**counts, "rejected": dict(sorted(rejects.counts.items())), "dropped": dropped, "warnings": warnings}


def _report(rejects: Rejects, out: Path) -> None:
    """Name what is left out: the first rows here, all of them in the file."""
    if rejects.counts:
        say(f"left out: {count_words(rejects.counts)}; each with file and line in {out / 'rejected.jsonl'}")
    for reject in rejects.faults[:_SAID]:
        say(f"  {reject.file}:{reject.line}: {reject.reason}: {reject.detail}")


def _line(conversation: Conversation) -> str:
    return _ENCODE({"messages": conversation.messages, "source": conversation.source}) + "\n"


def _assign(keys: list[tuple[str, str | None]], seed: int, fraction: float, *, own_splits: bool) -> tuple[list[str], list[str]]:
    """The split of each conversation, and what is to be said about it."""
    by_split = {name: {key for key, split in keys if split == name} for name in SPLITS}
    if own_splits and all(by_split.values()):
        both = by_split["train"] & by_split["eval"]
        warnings = [f"conversations in the train and in the eval split of the input: {len(both)}"] if both else []
        return [str(split) for _, split in keys], warnings
    warnings = []
    if own_splits:
        empty = next(name for name, found in by_split.items() if not found)
        warnings.append(f"the input's own {empty} split gives no conversation: the other one is split by data.eval_fraction")
    chosen = choose_eval((key for key, _ in keys), seed, fraction)
    if not chosen:
        warnings.append("a single conversation: the eval split is empty")
    return ["eval" if key in chosen else "train" for key, _ in keys], warnings


def _write_splits(spool: Iterable[str], splits: list[str], lengths: Iterable[int], out: Path) -> dict[str, dict[str, int]]:
    counts = {name: {"conversations": 0, "messages": 0} for name in SPLITS}
    with ExitStack() as stack:
        files = {name: stack.enter_context(publish.staged(out, f"{name}.jsonl").open("w", encoding="utf-8")) for name in SPLITS}
        for line, split, length in zip(spool, splits, lengths, strict=True):
            files[split].write(line)
            counts[split]["conversations"] += 1
            counts[split]["messages"] += length
    return counts


def _nothing(data: Data, source: Source, rejects: Rejects, trees: Trees) -> UserError:
    """The input gives no conversation: say what was met instead."""
    problems = []
    if rejects.counts:
        first = rejects.faults[0] if rejects.faults else None
        example = f"; the first: {first.file}:{first.line}: {first.reason}: {first.detail}" if first else ""
        problems.append(
            Problem(
                f"no conversation: every row is out ({count_words(rejects.counts)}){example}",
                file=source.shown,
                fix=f"is data.format={data.format} right?",
            )
        )
    if trees.dropped["language"]:
        met = ", ".join(f"{name} {count}" for name, count in trees.languages.most_common(8))
        message = f"no tree has the language {data.language}; there are: {met}"
        problems.append(Problem(message, file=source.shown, key="data.language"))
    return UserError(problems or Problem("holds no usable conversation", file=source.shown))


def _differences(data: Data, meta: dict[str, Any]) -> list[str]:
    """What the recipe expects and was not found: it may be another revision of the dataset."""
    if data.expect is None:
        return []
    expected = {name: getattr(data.expect, name) for name in SPLITS}
    return [
        f"{name} split: {meta[name]['conversations']} conversations, the recipe expects {count}"
        for name, count in expected.items()
        if count is not None and count != meta[name]["conversations"]
    ]
