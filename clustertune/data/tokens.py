"""``prepare``'s second half: conversations to tokens with their labels, once, on all cores, and the rows that ranks map.

``DATASET/tokens/`` holds, under a manifest of kind ``tokens``, for each split

``train-00000.u32``, ...     one little-endian uint32 per token, conversations in the order of ``train.jsonl``; the top bit says
                             that the token carries a label. At most :data:`PART_BYTES` and one shard each, so that readers can
                             share out the digests; no conversation is cut by the end of a file
``train.index.npy``          one record per conversation (:data:`INDEX`)
``train-KEY.pieces.npy``, ``train-KEY.begins.npy``   the rows (:func:`make_rows`)

Two keys say what they were made from. The tokens': data, tokenizer, template, labels, versions. The rows': that and
``max_length``, packing, seed; other rows are another index, and nothing is tokenised for them. Number of processes, paths,
batch and world size are in no key: the bytes are the same.

A shard is what one process makes of 8 MiB of a file, written aside and renamed. Shards lie in a hidden folder named by the key
until all are there: a killed ``prepare`` continues behind them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import signal
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from clustertune import bounded, secrets
from clustertune.console import byte_progress, say
from clustertune.data import rendering, seen, system_messages
from clustertune.data.chats import OF_ROLE, UNEQUAL, messages_of, open_thought
from clustertune.data.prepare import KIND as DATASET
from clustertune.data.prepare import SPLITS, locked
from clustertune.data.rendering import NO_THOUGHT, REASONING, Thought, control_pattern, find_thought
from clustertune.data.tokenizer import (
    MARKS_OR_ALL,
    MEMORY,
    NotPrefixPreserving,
    Span,
    answer_spans,
    has_generation_markers,
    identity,
    tokens_within,
    training_template,
    within_limits,
)
from clustertune.errors import ExitCode, UserError, storage_error
from clustertune.manifest import (
    MANIFEST,
    FileRecord,
    find_problems,
    new_hasher,
    open_to_read,
    plain_path,
    read_manifest,
    read_whole,
    record_files,
    seal,
    write_durably,
)
from clustertune.recipe.native_rules import TEMPLATE_ARGUMENTS, template_arguments

KIND = "tokens"
FOLDER = "tokens"
"""Below the folder of the conversations."""
FORMAT = 4
"""Version of what this code makes out of the same input. Raise it with any change of a rule: older tokens are recreated."""
CHUNK = 8 << 20
"""Bytes of a JSON Lines file for one shard: cut by the file alone, never by the number of processes."""
PART_BYTES = 256 << 20
SUMMARY = ("tokens", "sequences", "labelled_share", "tokens_per_s")
"""What ``prepare --json`` and the record of the stage say about them."""
# --- keys --------------------------------------------------------------------------------------------------------------


def made_from(dataset: Path, tokenizer: Any, train_args: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides tokens, labels and rows. Raises UserError where there is no dataset."""
    manifest = read_manifest(dataset, DATASET)
    digests = manifest.files
    encoder = Encoder.of(tokenizer, train_args)
    tokens = {
        "format": FORMAT,
        "data": {split: digests[f"{split}.jsonl"].sha256 for split in SPLITS},
        "tokenizer": identity(tokenizer),
        "template": hashlib.sha256(encoder.template.encode()).hexdigest(),
        "assistant_only_loss": encoder.answers,
        "versions": versions(),
        "completion_only_loss": encoder.completions,
        "template_arguments": encoder.arguments,
    }
    meta = manifest.meta
    return {
        "tokens": tokens,
        "rows": row_settings(train_args, pairs=bool(meta.get("pairs")), prompts=bool(meta.get("prompts"))),
    }


def day_of(dataset: Path) -> str:
    """The day that the chat template printed when the tokens of a dataset were made; today where there are none."""
    out = dataset / FOLDER
    day = None if find_problems(out, KIND, hashes=False, allow_extra=True) else read_manifest(out, KIND).meta.get("day")
    return day or rendering.today()


def versions() -> dict[str, str]:
    """Those of the packages that tokenise."""
    return {name: version(name) for name in ("tokenizers", "transformers")}


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# --- all of them -------------------------------------------------------------------------------------------------------


def make(
    dataset: Path, tokenizer: Any, train_args: Mapping[str, Any], *, shared: Path | None = None, chunk: int = CHUNK
) -> dict[str, Any]:
    """Tokens and rows of a dataset in ``dataset/tokens``, made or reused.

    ``shared``: a folder where the tokens of several data sets lie by their key; what is there is linked, and what is not is
    made there first. Rows are always the dataset's own.

    Returns ``{"tokens", "sequences", "labelled_share", "tokens_per_s", "tokens_per_cpu_s", "processes", "reused",
    "splits": {split: {"conversations", "tokens", "labelled", "sequences", "cut", "cut_tokens", "dropped", "equal",
    "max_length_for_half", "max_length_for_all"}}}``: ``tokens`` as the chat template gives them, before ``max_length``;
    ``sequences`` the rows; ``labelled_share`` of the tokens; rates of what was tokenised when they were made (None: all shards
    were there). Of each split, ``cut`` counts the conversations that lose what is beyond ``max_length``, ``cut_tokens`` the
    tokens that they lose, and ``dropped`` those left out because they have no label within it. A preference is one
    conversation and two sequences. ``equal`` counts the pairs that are left out because both sequences are the same within
    ``max_length``. The last two are the lengths with which half and all of what is left out would stay; None: nothing is left
    out, or no length helps.
    Raises UserError, also where nothing is left to train on (exit code 1).
    """
    what = made_from(dataset, tokenizer, train_args)
    out = dataset / FOLDER
    try:
        out.mkdir(exist_ok=True)
        with locked(out):
            made = _make(dataset, out, tokenizer, what, chunk, shared)
            counts = {split: part["seen"] for split, part in read_manifest(out, KIND).meta["splits"].items()}
            arguments, warnings = seen.look(dataset, counts, tokenizer, what["tokens"]["template_arguments"])
    except OSError as error:
        raise storage_error(error, "writing the tokens", error.filename or out) from error
    _tell_left_out(dataset, made["splits"], what["rows"]["max_length"])
    for text in warnings:
        say(f"warning: {text}")
    return {**made, "row_arguments": arguments, "warnings": warnings}


def _tell_left_out(dataset: Path, splits: Mapping[str, Mapping[str, Any]], size: int | None) -> None:
    """Say what ``max_length`` leaves out, and which would keep it. Raises UserError where nothing is left to train on."""
    for split in SPLITS:
        one = splits[split]
        parts = [f"{one['dropped']:,} have no trained token within {size}"] if one["dropped"] else []
        within = f" within {size}" if size else ""
        parts += [f"{one['equal']:,} pairs have two answers of the same tokens{within}"] if one["equal"] else []
        half, every = one["max_length_for_half"], one["max_length_for_all"]
        fix = (
            f"train.max_length={every} keeps all of them{f', {half} half of them' if half != every else ''}" if every else None
        )
        text = f"{split}: {' and '.join(parts)}, of {one['conversations']:,} conversations"
        if split == "train" and one["conversations"] and not one["sequences"]:
            fix = fix or "no max_length changes that: give pairs of answers that differ"
            text = f"nothing is left to train on: {text}"
            raise UserError(text, ExitCode.FAILED, file=str(dataset), key="train.max_length", fix=fix)
        if parts:
            say(f"warning: {text}: they are left out{f'; {fix}' if fix else ''}")


def _make(dataset: Path, out: Path, tokenizer: Any, what: dict[str, Any], chunk: int, shared: Path | None) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    records: dict[str, FileRecord] = {}
    if not find_problems(out, KIND, allow_extra=True):
        manifest = read_manifest(out, KIND)
        if manifest.meta["made_from"]["tokens"] == what["tokens"]:
            meta, records = manifest.meta, manifest.files
    if meta and meta["made_from"] == what:
        return {**meta["summary"], "reused": True}
    if not meta:
        if shared is None:
            meta, records = _tokenise(dataset, out, tokenizer, what["tokens"], chunk)
        else:
            meta, records = _share(dataset, shared / _key(what["tokens"]), out, tokenizer, what["tokens"], chunk)
    records = {name: record for name, record in records.items() if ".pieces." not in name and ".begins." not in name}
    summary = _write_rows(out, meta, what["rows"], records)
    day = rendering.header(tokenizer.chat_template).date
    seal(out, KIND, {**meta, "made_from": what, "summary": summary, "day": day}, records)
    for path in out.iterdir():  # what the manifest before named, and the shards
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (*records, MANIFEST):
            path.unlink()
    return {**summary, "reused": False}


def _share(
    dataset: Path, home: Path, out: Path, tokenizer: Any, what: Mapping[str, Any], chunk: int
) -> tuple[dict[str, Any], dict[str, FileRecord]]:
    """Link the tokens in ``home`` into ``out``. The first holder of its lock makes them. Returns as :func:`_tokenise`."""
    home.mkdir(parents=True, exist_ok=True)
    with locked(home):
        if find_problems(home, KIND, allow_extra=True):
            meta, records = _tokenise(dataset, home, tokenizer, what, chunk)
            seal(home, KIND, meta, records)
            for work in home.glob(".shards-*"):
                shutil.rmtree(work)
        manifest = read_manifest(home, KIND)
    (out / MANIFEST).unlink(missing_ok=True)
    for name in manifest.files:
        (out / name).unlink(missing_ok=True)
        try:
            (out / name).hardlink_to(home / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(home / name, out / name)
    return dict(manifest.meta), dict(manifest.files)


def _tokenise(
    dataset: Path, out: Path, tokenizer: Any, what: Mapping[str, Any], chunk: int
) -> tuple[dict[str, Any], dict[str, FileRecord]]:
    """Make the shards that are not there, and join all. Returns the manifest's meta data and records so far."""
    work = out / f".shards-{_key([what, chunk])}"
    for old in out.glob(".shards-*"):
        if old != work:
            shutil.rmtree(old)
    (out / MANIFEST).unlink(missing_ok=True)
    work.mkdir(exist_ok=True)
    jobs: dict[str, list[Job]] = {}
    for split in SPLITS:
        path = dataset / f"{split}.jsonl"
        size = path.stat().st_size
        cuts = range(0, size, chunk)
        jobs[split] = [(path, at, min(at + chunk, size), work / f"{split}-{n:06}.bin") for n, at in enumerate(cuts)]
    everything = [job for split in SPLITS for job in jobs[split]]
    missing = [job for job in everything if read_shard(job[3]) is None]
    if len(missing) < len(everything):
        say(f"tokens: {len(everything) - len(missing)} of {len(everything)} shards existed already")
    encoder = Encoder.of(tokenizer, {**what, TEMPLATE_ARGUMENTS: what["template_arguments"]}).looked_at()
    meta = read_manifest(dataset, DATASET).meta
    _check_fields(meta.get("fields", {}), encoder, dataset)
    _check_weights(meta, encoder, dataset)
    if not meta.get("prompts"):
        of_rows, _ = rendering.agreed(meta.get("row_arguments", {}), meta.get("rendered", 0))
        asked = replace(encoder, arguments={**encoder.arguments, **of_rows})
        _tell_of_open_thoughts(int(meta.get("without_thought", 0)), asked)
    # A shard's worth of bytes for each process at least: to start them takes longer than little data.
    size = sum(end - start for _, start, end, _ in missing)
    processes = max(1, min(len(os.sched_getaffinity(0)), len(missing), -(-size // chunk)))
    began, longest = time.perf_counter(), tokenizer.model_max_length
    tokenizer.model_max_length = int(1e30)  # no warning for each long conversation
    try:
        with secrets.withheld():  # the tokenizer is loaded: no process of the pool asks the Hub
            cpu = _run(missing, encoder, processes)
    except RefusedConversation as refused:
        raise _refusal(missing, *refused.args) from None
    finally:
        tokenizer.model_max_length = longest
    seconds = time.perf_counter() - began
    made = {job[3].name for job in missing}
    fresh, splits, records = 0, dict[str, Any](), dict[str, FileRecord]()
    for split in SPLITS:
        splits[split], joined = _join([job[3] for job in jobs[split]], out, split)
        records |= joined[0]
        fresh += sum(count for name, count in joined[1].items() if name in made)
    rates = {
        "tokens_per_s": round(fresh / seconds) if fresh else None,
        "tokens_per_cpu_s": round(fresh / cpu) if fresh and cpu else None,
        "processes": processes,
    }
    return {"splits": splits, "rates": rates}, records


def _check_fields(fields: Mapping[str, int], encoder: Encoder, dataset: Path) -> None:
    """Raise UserError where the chat template leaves out tools or messages that the data have; reasoning and system messages
    may be left out on purpose: a warning."""
    if (count := fields.get("system messages")) and (why := encoder.refuses_system()) is not None:
        text = f"{count:,} examples hold system messages, which the chat template refuses: {why}"
        raise UserError(text, file=str(dataset), key="data.system_messages", fix=system_messages.FIX)
    for name, count in fields.items():
        if encoder.renders(OF_ROLE[name]) if name in OF_ROLE else name in encoder.template:
            continue
        does = "render as text" if name in OF_ROLE else "name"
        text = f"{count:,} examples hold {name}, which the chat template does not {does}: it would leave them out"
        if name in ("tools", "tool_calls", *OF_ROLE.keys() - {"system messages"}):
            fix = "name a template that renders them, or leave these examples out of the input"
            raise UserError(text, file=str(dataset), key="model.chat_template", fix=fix)
        say(f"warning: {text}{f'; {system_messages.FIX}' if name == 'system messages' else ''}")


def _tell_of_open_thoughts(count: int, encoder: Encoder) -> None:
    """Say that the model is asked with a thought begun, and that so many conversations hold none."""
    if count and (mark := encoder.opens_thought()):
        say(f"warning: {open_thoughts(count, mark)}")


def open_thoughts(count: int, mark: str) -> str:
    """A sentence on ``count`` conversations without a thought and a generation prompt that begins one with ``mark``."""
    text = f"{count:,} conversations hold no thought, and the chat template's generation prompt begins one ({mark}): the tuned "
    text += "model is asked in another form than it was trained in; give the answers thoughts (reasoning_content), or take a "
    return f"{text}template whose generation prompt begins none"


def _check_weights(meta: Mapping[str, Any], encoder: Encoder, dataset: Path) -> None:
    """Raise UserError where messages of all roles are learnt alike and some have a weight of their own."""
    columns = {name.removesuffix(UNEQUAL) for name in meta.get("unused", ()) if name.endswith(UNEQUAL)}
    if columns - ({"prompt"} if encoder.completions or meta.get("pairs") else set()) and not encoder.answers:
        text = "false: messages of all roles are learnt alike, and some user or system messages have a weight of their own"
        fix = "train.assistant_only_loss=true learns answers alone; or leave weight, train and the like out of these messages"
        raise UserError(text, file=str(dataset), key="train.assistant_only_loss", fix=fix)


def _refusal(jobs: list[Job], index: int, text: str, fix: str) -> UserError:
    """With the line's number, counted only now."""
    path = next((path for path, start, end, _ in jobs if start <= index < end), jobs[0][0])
    with open_to_read(path) as file:
        number = 1 + sum(file.read(min(1 << 20, index - at)).count(b"\n") for at in range(0, index, 1 << 20))
    return UserError(text, file=f"{path}:{number}", fix=fix)


def _run(jobs: list[Job], encoder: Encoder, processes: int) -> float:
    """Make shards, in so many processes at once. Returns the CPU seconds of all."""
    if not jobs:
        return 0.0
    with contextlib.ExitStack() as stack:
        # Forked by the main thread, with whose end they end, and before there is another one that may hold a lock.
        idle = SimpleQueue[BoundedShards]()
        for _ in range(processes):
            idle.put(stack.enter_context(contextlib.closing(BoundedShards(encoder, alone=processes == 1))))

        def make(job: Job) -> float:
            shards = idle.get()
            try:
                return shards.make(job)
            finally:
                idle.put(shards)

        bar = stack.enter_context(byte_progress())
        task, cpu = bar.add_task("tokenising", total=sum(end - start for _, start, end, _ in jobs)), 0.0
        pool = ThreadPoolExecutor(processes)
        stack.callback(pool.shutdown, cancel_futures=True)
        pending = {pool.submit(make, job): job for job in jobs}
        for done in as_completed(pending):
            cpu += done.result()
            bar.advance(task, pending[done][2] - pending[done][1])
        return cpu


def _join(shards: list[Path], out: Path, split: str) -> tuple[dict[str, Any], tuple[dict[str, FileRecord], dict[str, int]]]:
    """The shards one behind the other. Returns what the manifest says about the split; its files' records, tokens by shard."""
    parts: list[int] = []
    records: dict[str, FileRecord] = {}
    counts: dict[str, int] = {}
    index, at, waiting = [np.empty(0, INDEX)], 0, list(shards)
    all_heads = [np.empty(0, RECORD)]
    while waiting:
        name, hasher, size = f"{split}-{len(parts):05}.u32", new_hasher("sha256"), 0
        (out / name).unlink(missing_ok=True)  # the file of before may have a link elsewhere
        with (out / name).open("wb") as target:
            while waiting and size < PART_BYTES:
                path = waiting.pop(0)
                if (shard := read_shard(path)) is None:
                    raise UserError("was damaged meanwhile", file=str(path), fix="run the same command again")
                heads, tokens = shard
                record = np.empty(len(heads), INDEX)
                for name_ in INDEX.names or ():
                    if name_ != "offset":
                        record[name_] = heads[name_]
                all_heads.append(heads)
                ends = at + np.cumsum(heads["length"], dtype=np.int64)
                record["offset"] = ends - heads["length"]
                index.append(record)
                target.write(tokens)
                hasher.update(tokens)
                counts[path.name] = len(tokens) // 4
                size, at = size + len(tokens), at + len(tokens) // 4
            target.flush()
            os.fsync(target.fileno())
        parts.append(size // 4)
        records[name] = FileRecord(size, hasher.hexdigest())
    entries = np.concatenate(index)
    (out / f"{split}.index.npy").unlink(missing_ok=True)
    np.save(out / f"{split}.index.npy", entries)
    records |= record_files(out, [f"{split}.index.npy"])
    labelled = int(entries["labelled"].sum(dtype=np.int64))
    found = {name: seen.counted(np.concatenate([heads[name] for heads in all_heads])) for name in seen.COUNTED}
    return {"conversations": len(entries), "tokens": at, "labelled": labelled, "parts": parts, "seen": found}, (records, counts)


def _write_rows(out: Path, meta: dict[str, Any], settings: dict[str, Any], records: dict[str, FileRecord]) -> dict[str, Any]:
    """The index of rows of both splits; adds its files to ``records``. Returns the summary."""
    splits: dict[str, Any] = {}
    names = []
    for split in SPLITS:
        index = np.load(plain_path(out / f"{split}.index.npy"), mmap_mode="r")
        files = [out / f"{split}-{n:05}.u32" for n in range(len(meta["splits"][split]["parts"]))]
        count, each = partial(count_labels, files), 2 if settings.get("pairs") else 1
        differ = first_differences(files, index) if each == 2 else None
        alike = _alike(index, differ, settings["max_length"])
        pieces, begins = make_rows(index[~np.repeat(alike, each)], split, settings, count)
        for name, array in zip(row_files(split, settings), (pieces, begins), strict=True):
            (out / name).unlink(missing_ok=True)  # a pipe there has no reader
            np.save(out / name, array)
            names.append(name)
        size = None if settings["packing"][split] in SPLITTING else settings["max_length"]
        over = np.maximum(index["length"].astype(np.int64) - size, 0) if size is not None else np.zeros(0, int)
        left = ~_trained(index, pieces).reshape(-1, each).all(axis=1)
        helps = _lengths_that_help(index, differ, settings["truncation_mode"])[left]
        splits[split] = {
            "conversations": meta["splits"][split]["conversations"] // each,
            "tokens": meta["splits"][split]["tokens"],
            "labelled": int(count(pieces).sum()),
            "sequences": (len(begins) - 1) * each,
            "cut": int((over > 0).sum()),
            "cut_tokens": int(over.sum()),
            "dropped": int(left.sum() - alike.sum()),
            "equal": int(alike.sum()),
            **_quantiles(helps[helps > 0]),
        }
    records |= record_files(out, names)
    tokens, labelled, sequences = (sum(s[key] for s in splits.values()) for key in ("tokens", "labelled", "sequences"))
    share = round(labelled / tokens, 6) if tokens else None
    return {"tokens": tokens, "sequences": sequences, "labelled_share": share, **meta["rates"], "splits": splits}


def row_files(split: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The files with pieces and begins of a split's rows."""
    key = _key(settings)
    return f"{split}-{key}.pieces.npy", f"{split}-{key}.begins.npy"


# --- packing ---------------------------------------------------------------------------------------------------------------

# Which tokens make which row: truncated, shuffled and packed as TRL 1.16 does it, as an index that copies no token.


GROUP = 1000
"""Conversations that are packed together: the batch of ``datasets.map``, in which TRL's ``pack_dataset`` packs."""
SEPARATED = ("bfd", "bfd_split")
"""Strategies whose rows say how long each part is; ``wrapped`` joins conversations without a boundary."""
SPLITTING = ("bfd_split", "wrapped")
"""Strategies that keep what is beyond ``max_length``, in another row."""

INDEX = np.dtype([("offset", "<i8"), ("length", "<i4"), ("first_label", "<i4"), ("last_label", "<i4"), ("labelled", "<i4")])
"""A conversation: its first token's place, its tokens, places of the first and the last labelled one, how many are labelled.
Without a label: ``first_label`` beyond every length and ``last_label`` -1."""
PIECE = np.dtype([("offset", "<i8"), ("length", "<i4")])
"""A stretch of tokens in a row."""

Pieces = npt.NDArray[Any]


def row_settings(train_args: Mapping[str, Any], *, pairs: bool = False, prompts: bool = False) -> dict[str, Any]:
    """What decides the rows beside the tokens, of a complete section ``train``.

    ``pairs``: two conversations, a prompt with its chosen and with its rejected answer, are a row. ``prompts``: none is cut.
    """
    strategy = train_args["packing_strategy"]
    eval_packing = train_args["packing"] if train_args["eval_packing"] is None else train_args["eval_packing"]
    return {
        "max_length": None if prompts else train_args["max_length"],
        "truncation_mode": train_args["truncation_mode"],
        "packing": {"train": strategy if train_args["packing"] else None, "eval": strategy if eval_packing else None},
        "shuffle_dataset": bool(train_args["shuffle_dataset"]),
        "seed": int(train_args["seed"]),
        "group": GROUP,
        **({"pairs": True} if pairs else {}),
        **({"prompts": True} if prompts else {}),
    }


def count_labels(parts: Sequence[Path], pieces: Pieces) -> npt.NDArray[np.int64]:
    """How many tokens of each piece carry a label. ``parts``: the files of tokens, one behind the other."""
    counts, start = np.zeros(len(pieces), np.int64), 0
    for path in parts:
        labels = np.memmap(plain_path(path), "<u4", "r") >= LABEL if path.stat().st_size else np.empty(0, bool)
        mine = np.flatnonzero((pieces["offset"] >= start) & (pieces["offset"] < start + len(labels)) & (pieces["length"] > 0))
        begins = pieces["offset"][mine] - start
        ends = begins + pieces["length"][mine]
        # np.add.reduceat would convert every Boolean on the way: 1 us a token (numpy 2.4), 12 s for 12 million.
        counts[mine] = [np.count_nonzero(labels[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        start += len(labels)
    return counts


def _trained(index: npt.NDArray[Any], pieces: Pieces) -> npt.NDArray[np.bool_]:
    """Whether any token of a conversation is in a row."""
    owners = np.searchsorted(index["offset"], pieces["offset"], side="right") - 1
    return np.bincount(owners, minlength=len(index)) > 0


def first_differences(parts: Sequence[Path], index: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The place of the first token in which the two sequences of each pair differ, int64; -1 where they are equal.

    ``parts``: the files of tokens, one behind the other; no sequence is cut by the end of a file.
    """
    sizes = [path.stat().st_size // 4 for path in parts]
    # As arrays: each slice of a numpy.memmap is another object of that class, which takes 20 times longer.
    maps = [
        np.asarray(np.memmap(plain_path(path), "<u4", "r")) if size else np.empty(0, np.uint32)
        for path, size in zip(parts, sizes, strict=True)
    ]
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    owners = np.searchsorted(starts, index["offset"], side="right") - 1
    begins = (index["offset"] - starts[owners]).tolist()
    sequences = zip(owners.tolist(), begins, index["length"].tolist(), strict=True)
    places = np.full(len(index) // 2, -1, np.int64)
    for number, pair in enumerate(zip(sequences, sequences, strict=True)):
        one, other = (maps[part][begin : begin + length] & ~LABEL for part, begin, length in pair)
        shared = _common(one, other)
        places[number] = -1 if shared == len(one) == len(other) else shared
    return places


def _alike(index: npt.NDArray[Any], differ: npt.NDArray[np.int64] | None, size: int | None) -> npt.NDArray[np.bool_]:
    """The pairs of which both sequences are the same tokens within ``size``, although answers are in it: their loss is log 2
    and their gradient 0. None are where no pairs are (``differ`` is None)."""
    if differ is None:
        return np.zeros(len(index), bool)
    within = True if size is None else (index["first_label"].reshape(-1, 2) < size).all(axis=1)
    alike: npt.NDArray[np.bool_] = ((differ < 0) | (differ >= (np.inf if size is None else size))) & within
    return alike


def _lengths_that_help(index: npt.NDArray[Any], differ: npt.NDArray[np.int64] | None, mode: str) -> npt.NDArray[np.int64]:
    """The smallest ``max_length`` with which each conversation, or pair, stays; 0 where no length helps."""
    if differ is not None:
        return differ + 1
    first: npt.NDArray[np.int64] = index["first_label"].astype(np.int64) + 1
    return index["length"].astype(np.int64) - index["last_label"] if mode == "keep_end" else first


def _quantiles(lengths: npt.NDArray[np.int64]) -> dict[str, int | None]:
    """The lengths that help half and all."""
    half, every = (int(np.quantile(lengths, share, method="inverted_cdf")) if len(lengths) else None for share in (0.5, 1))
    return {"max_length_for_half": half, "max_length_for_all": every}


def make_rows(
    index: npt.NDArray[Any], split: str, settings: Mapping[str, Any], count: Callable[[Pieces], npt.NDArray[np.int64]]
) -> tuple[Pieces, npt.NDArray[np.int64]]:
    """The pieces of all rows in their order, and the number of the piece that each row begins with (one more at the end).

    No row is without a label: its loss would be no number, or a step of 0. TRL leaves such conversations out where it does not
    pack (sft_trainer.py:1456 of 1.16); here it is the same with each strategy, for what a row keeps of a conversation.

    ``index``: conversations of dtype :data:`INDEX`, in the order of their offsets; ``settings``: of :func:`row_settings`;
    ``count``: :func:`count_labels` of these tokens.
    """
    strategy, size, rng = settings["packing"][split], settings["max_length"], np.random.default_rng
    if strategy is None:
        each = 2 if settings.get("pairs") else 1
        pieces = _truncate(index, size, settings["truncation_mode"], each)
        counts = np.full(len(pieces) // each, each, np.int64)
    else:
        if strategy == "bfd":
            index = index[index["first_label"] < size]
        if settings["shuffle_dataset"]:
            index = index[rng(settings["seed"]).permutation(len(index))]
        groups = [index[start : start + GROUP] for start in range(0, len(index), GROUP)]
        if strategy == "wrapped":
            made = [_wrap(group, size) for group in groups]
        else:
            cut = [_cut(group, size, strategy) for group in groups]
            if strategy == "bfd_split" and cut:
                labelled, ends = count(np.concatenate(cut)) > 0, np.cumsum([len(part) for part in cut])
                cut = [part[kept] for part, kept in zip(cut, np.split(labelled, ends[:-1]), strict=True)]
            made = [_best_fit(part, size) for part in cut]
        pieces = np.concatenate([part for part, _ in made]) if made else np.empty(0, PIECE)
        counts = np.array([number for _, rows in made for number in rows], np.int64)
        if strategy == "wrapped" and len(counts):
            rows = np.add.reduceat(count(pieces), np.cumsum(counts) - counts) > 0
            pieces, counts = pieces[np.repeat(rows, counts)], counts[rows]
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


def _cut(index: npt.NDArray[Any], size: int, strategy: str) -> Pieces:
    """The pieces of conversations: ``bfd`` cuts each at ``size``, ``bfd_split`` continues in another piece."""
    index = index[index["length"] > 0]
    if strategy == "bfd":
        return _pieces(index["offset"], np.minimum(index["length"], size))
    parts = -(-index["length"] // size)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    rest = np.repeat(index["length"], parts) - number * size
    return _pieces(np.repeat(index["offset"], parts) + number * size, np.minimum(rest, size))


def _best_fit(pieces: Pieces, size: int) -> tuple[Pieces, list[int]]:
    """Best fit decreasing in TRL 1.16's order (data_utils._pack_bfd)."""
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


def _wrap(index: npt.NDArray[Any], size: int) -> tuple[Pieces, list[int]]:
    """All tokens of a group one behind the other, cut every ``size``: rows, and conversations, begin and end anywhere."""
    ends = np.cumsum(index["length"], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends[index["length"] > 0], np.append(np.arange(size, total, size), total) if total else [])
    begins = np.concatenate(([0], cuts[:-1])).astype(np.int64)[: len(cuts)]
    owner = np.searchsorted(ends, begins, side="right")
    offsets = index["offset"][owner] + begins - (ends - index["length"])[owner]
    counts = np.bincount(begins // size).tolist() if total else []
    return _pieces(offsets, (cuts - begins).astype(np.int64)), counts


# --- shards ----------------------------------------------------------------------------------------------------------------

# One shard: a part of a file of conversations as tokens with their labels, written whole or not at all.


BATCH = 256
"""Conversations per call of the tokenizer: 20 % faster than one by one."""
BATCH_SECONDS = 30.0
RENDERED_PER_S = 1e6
"""Bytes, once for each message of their conversation."""
LABEL = np.uint32(1 << 31)
"""The bit of a token that carries a label. Vocabularies stay far below."""
_HEAD = 40
"""Bytes before a shard's records: their number (int64), and the SHA-256 of all that follows."""
_OF_INDEX = [(name, INDEX[name]) for name in INDEX.names or () if name != "offset"]
RECORD = np.dtype([*_OF_INDEX, *((name, "<i4") for name in seen.COUNTED)])

Job = tuple[Path, int, int, Path]
"""A file, the first byte and the one behind the last of a shard's part of it, and the shard."""


class RefusedConversation(Exception):
    """A conversation that cannot be trained on: the byte that its line begins with, why, and what to do."""

    def __init__(self, location: int, why: str, fix: str | None = None) -> None:
        super().__init__(location, why, fix or OTHER_TEMPLATE)


OTHER_TEMPLATE = "leave this conversation out of the input, or name a template that takes it: model.chat_template"


FIELD, TEXT = "field", "text"
"""Where a thought stands: in a field of its message, or in its text."""


@dataclass(frozen=True)
class _Rendered:
    """A chat as tokens."""

    ids: npt.NDArray[Any]
    mask: npt.NDArray[Any]
    """Which may carry a label."""
    thoughts: int = 0
    """Answers with a thought."""
    left_out: int = 0
    """Thoughts that the template renders in no turn."""
    unlabelled: int = 0
    """Answers of earlier turns whose thought the template leaves out."""


@dataclass
class Encoder:
    """What a process tokenises with."""

    tokenizer: Any
    template: str
    answers: bool
    """Only the assistant's turns carry labels."""
    completions: bool = True
    """Of prompt and completion, only the completion carries labels."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Given to the template; those of a row go before them."""
    thought: Thought = NO_THOUGHT
    """How an answer marks what was thought before it."""
    keeps: Mapping[str, bool] = field(default_factory=dict)
    """Whether the template renders the thought of the last answer: one in a field of its own, and one in the text."""
    control: Mapping[str, re.Pattern[str] | None] = field(default_factory=dict)
    """By role, what in a text becomes a control token."""

    @classmethod
    def of(cls, tokenizer: Any, train_args: Mapping[str, Any]) -> Encoder:
        """As a complete section ``train`` asks."""
        assistant_only = bool(train_args["assistant_only_loss"])
        template = training_template(tokenizer, marked=assistant_only) if tokenizer.chat_template else ""
        completions = train_args["completion_only_loss"] is not False
        return cls(tokenizer, template, assistant_only, completions, template_arguments(train_args))

    def looked_at(self) -> Encoder:
        """The same, which knows how its template marks a thought and what becomes a control token. Raises UserError."""
        if not self.template:
            return self
        found = within_limits(partial(_behaviour, self.tokenizer, self.template, self.arguments))
        control = {role: control_pattern(words) for role, words in found["control"].items()}
        return replace(self, thought=Thought(*found["thought"]), keeps=found["keeps"], control=control)

    @property
    def _common(self) -> dict[str, Any]:
        """What all renderings of a conversation that no row stands behind are given."""
        return {**self.arguments, "chat_template": self.template}

    def renders(self, role: str) -> bool:
        """Whether the template renders the text of a role's message: one for pictures may take lists of parts alone, and leaves
        a text out. One that raises an error refuses the row by itself."""
        roles = {"system": ("system", "user"), "tool": ("user", "assistant", "tool", "assistant")}.get(
            role, ("user", "assistant")
        )
        turns = [{"role": one, "content": f"{one}-7f3a"} for one in roles]
        render = partial(self.tokenizer.apply_chat_template, turns, tokenize=False, **self._common)
        try:
            return f"{role}-7f3a" in str(within_limits(render))
        except ValueError:
            return True

    def refuses_system(self) -> str | None:
        """Why the template raises an error for a conversation that begins with a system message; None where it takes one, or
        takes no conversation at all."""
        turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]

        def refusal(chat: list[dict[str, str]]) -> str | None:
            render = partial(self.tokenizer.apply_chat_template, chat, tokenize=False, **self._common)
            try:
                within_limits(render)
            except ValueError as error:
                return str(error)
            return None

        return refusal(turns) if refusal(turns[1:]) is None else None

    def opens_thought(self) -> str:
        """The mark of the thought that the generation prompt begins and does not end; "" where it begins none."""
        turns = [{"role": "user", "content": "user"}]

        def render() -> str:
            show = partial(self.tokenizer.apply_chat_template, turns, tokenize=False, **self._common)
            return str(show(add_generation_prompt=True)).removeprefix(str(show(add_generation_prompt=False)))

        try:
            return open_thought(str(within_limits(render))) if self.template else ""
        except ValueError:
            return ""

    def encode(self, examples: list[Mapping[str, Any]]) -> Iterator[tuple[npt.NDArray[Any], tuple[int, ...]]]:
        """Tokens with their label bits, and length, first and last label and count of labels, of each conversation.

        An example gives one; a preference gives two, prompt with chosen and prompt with rejected; a prompt alone gives one of
        which each token counts as labelled. As TRL 1.16 does it (``tokenize_fn`` of sft_trainer.py and of dpo_trainer.py).
        """
        chats = [(row["prompt"], self._of_the_row(row), 0) for row in examples if "prompt" in row]
        prompts = iter(self._render(chats, whole=False))
        chats = [(turns, self._of_the_row(row), self._learnt_from(row)) for row in examples for turns in _whole(row)]
        sequences = iter(self._render(chats, whole=True))
        for row in examples:
            if "text" in row:
                end = self.tokenizer.eos_token or ""
                text = row["text"] if row["text"].endswith(end) else row["text"] + end
                yield _head(*self._one_bos(self.tokenizer(text)["input_ids"]))
                continue
            encoded, control = [next(sequences) for _ in _whole(row)], self.count_control(messages_of(row))
            if "prompt" in row:
                prompt = next(prompts).ids
                if not encoded:  # the model answers it itself
                    yield _head(prompt, np.ones(len(prompt), bool), control=control)
                    continue
                begin = min(_common(prompt, one.ids) for one in encoded)
                if "rejected" in row or self.completions:
                    encoded = [replace(one, mask=one.mask & (np.arange(len(one.ids)) >= begin)) for one in encoded]
            for number, one in enumerate(encoded):
                own = (one.thoughts, one.left_out, one.unlabelled)
                yield _head(one.ids, one.mask, *own, control=0 if number else control)

    def _of_the_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What a chat template is given for a row: the recipe's arguments and, before them, the row's own, as TRL has it."""
        return {"tools": row.get("tools"), **self.arguments, **row.get("chat_template_kwargs", {})}

    def _learnt_from(self, row: Mapping[str, Any]) -> int:
        """The first message of an example's chats that may carry labels."""
        return len(row["prompt"]) if "prompt" in row and ("rejected" in row or self.completions) else 0

    def count_control(self, messages: Iterable[Mapping[str, Any]]) -> int:
        """How often the texts of messages hold what the tokenizer takes for a control token: a turn, or the end of one."""
        count = 0
        for message in messages:
            if (pattern := self.control.get(str(message["role"]), self.control.get("user"))) is not None:
                texts = (message.get(name) for name in ("content", *REASONING))
                count += sum(len(pattern.findall(text)) for text in texts if isinstance(text, str))
        return count

    def _render(self, chats: list[tuple[Any, Any, int]], *, whole: bool) -> Iterator[_Rendered]:
        """Tokens of chats with what their rows give the template, and which of them may carry a label. Not ``whole``: up to the
        answer.

        A chat is its turns, the template's arguments, and the first message that may carry labels.
        """
        marked = self.answers and whole and has_generation_markers(self.template)
        arguments = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": marked}

        def alone(chat: tuple[Any, Any, int]) -> bool:
            """Whether it cannot be rendered with others: its answers are looked for in the text."""
            return whole and ((self.answers and not marked) or any(at < len(chat[0]) - 1 for at in self._thoughts(chat)))

        # One call takes chats with the same arguments.
        for (one_by_one, own), group in groupby(chats, key=lambda chat: (alone(chat), chat[1])):
            some, common = list(group), {**own, "chat_template": self.template}
            if one_by_one:
                yield from (self._alone(chat, common, marked=marked) for chat in some)
                continue
            turns = [chat[0] for chat in some]
            made = self.tokenizer.apply_chat_template(turns, add_generation_prompt=not whole, **common, **arguments)
            for number, ids in enumerate(made["input_ids"]):
                thoughts = self._thoughts(some[number]) if whole else {}
                left_out = sum(not self.keeps.get(kind, True) for kind, _ in thoughts.values())
                mask = made["assistant_masks"][number] if marked else None
                yield _Rendered(*self._one_bos(ids, mask), len(thoughts), left_out)

    def _thoughts(self, chat: tuple[Any, Any, int]) -> dict[int, tuple[str, str]]:
        """The thoughts of a chat's answers that may carry labels, by the message's number: where one stands, and its text."""
        turns, _, first = chat
        found = {}
        for at, message in enumerate(turns):
            if at < first or message["role"] != "assistant":
                continue
            text, kind = next((message[name] for name in REASONING if message.get(name)), None), FIELD
            if text is None and self.thought.end and self.thought.end in message["content"]:
                text, kind = message["content"].rpartition(self.thought.end)[0].strip().removeprefix(self.thought.start), TEXT
            if text is not None and text.strip():
                found[at] = (kind, text.strip())
        return found

    def _alone(self, chat: tuple[Any, Any, int], common: Mapping[str, Any], *, marked: bool) -> _Rendered:
        """One chat. The answer of an earlier turn that is rendered without its thought carries no label, where the template
        renders the thought of the last turn: the model would learn to answer without one."""
        turns, thoughts = chat[0], self._thoughts(chat)
        render = partial(self.tokenizer.apply_chat_template, tokenize=False, **common)
        numbers = [at for at, message in enumerate(turns) if message["role"] == "assistant"]
        spans = list[Span]()
        if self.answers:
            text, spans = self._marked(turns, common) if marked else answer_spans(turns, render)
        else:
            text = str(render(turns))
        parted = len(spans) == len(numbers)
        places = spans if parted else [(0, len(text))] * len(numbers)
        begins = [0, *(end for _, end in places[:-1])] if parted else [0] * len(numbers)
        lost = [
            place
            for place, (at, begin, (_, end)) in enumerate(zip(numbers, begins, places, strict=True))
            if at in thoughts and thoughts[at][1] not in text[begin:end]
        ]
        early = [
            place for place in lost if self.answers and thoughts[numbers[place]][1] in str(render(turns[: numbers[place] + 1]))
        ]
        if self.answers:
            kept = [span for place, span in enumerate(spans) if not parted or place not in early]
            ids, mask = self._one_bos(*tokens_within(self.tokenizer, text, kept))
        else:
            ids, mask = self._one_bos(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return _Rendered(ids, mask, len(thoughts), len(lost) - len(early), len(early))

    def _marked(self, turns: Any, common: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the characters between the template's marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {key: value for key, value in self.tokenizer.special_tokens_map.items() if key not in common}
        texts, spans = render_jinja_template(conversations=[turns], return_assistant_tokens_mask=True, **common, **special)
        return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]]

    def _one_bos(self, ids: Any, mask: Any = None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Token ids with one BOS at most at their begin, and the mask that belongs to them (None: all).

        A text that was rendered before begins with BOS, and the tokenizer, or the template around it, puts another before it:
        no prompt begins like this when the model is served (lm-eval's ``has_bos_prefix``, vLLM's chat with
        ``add_special_tokens`` false).
        """
        ids = np.asarray(ids, np.uint32)
        mask = np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool)
        bos, extra = self.tokenizer.bos_token_id, 0
        while bos is not None and extra + 1 < len(ids) and ids[extra] == ids[extra + 1] == bos:
            extra += 1
        return ids[extra:], mask[extra:]

    def encode_lines(self, lines: list[tuple[int, bytes]]) -> Iterator[tuple[npt.NDArray[Any], tuple[int, ...]]]:
        """The same of lines, each with the place of its first byte. Raises RefusedConversation."""
        from jinja2 import TemplateError

        faults = (TemplateError, TypeError, KeyError, ValueError, ArithmeticError, MemoryError, RecursionError)
        examples = [json.loads(line) for _, line in lines]
        try:
            encoded = list(self.encode(examples))
        except (NotPrefixPreserving, *faults) as error:  # a template's filter meets what it does not take
            for (location, _), example in zip(lines, examples, strict=True):
                try:
                    list(self.encode([example]))
                except NotPrefixPreserving as own:
                    raise RefusedConversation(location, str(own), MARKS_OR_ALL) from None
                except faults as own:
                    raise RefusedConversation(location, f"the chat template refuses it: {own}") from None
            raise RefusedConversation(lines[0][0], f"the chat template refuses it: {error}") from None
        made = iter(encoded)
        for (location, _), example in zip(lines, examples, strict=True):
            for ids, heads in islice(made, len(_whole(example)) or 1):
                if heads[3] == 0:
                    raise RefusedConversation(
                        location, "no token carries a label: the chat template marks no assistant's turns in it"
                    )
                yield ids, heads


def _whole(row: Mapping[str, Any]) -> list[Any]:
    """The chats that an example is made of; none of a text."""
    if "messages" in row:
        return [row["messages"]]
    return [row["prompt"] + row[key] for key in ("completion", "chosen", "rejected") if key in row]


def _common(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Length of the common beginning. It may be shorter than the prompt: tokens merge over its end, or the template goes on."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def _head(
    ids: npt.NDArray[Any], mask: npt.NDArray[Any], *own: int, control: int = 0
) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """``own``: thoughts, those left out and answers without a label."""
    places = np.flatnonzero(mask)
    first, last = (int(places[0]), int(places[-1])) if len(places) else (np.iinfo(np.int32).max, -1)
    return np.where(mask, ids | LABEL, ids), (len(ids), first, last, len(places), *(own or (0, 0, 0)), control)


def _behaviour(tokenizer: Any, template: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template makes of a thought, and which words it and the tokenizer take for control tokens."""
    tokenizer.chat_template = template  # in a child
    thought = find_thought(tokenizer)
    return {"thought": astuple(thought), **rendering.probe(tokenizer, thought, arguments)}


@dataclass
class Tried:
    """What came of examples with a tokenizer and its chat template."""

    refused: list[str] = field(default_factory=list)
    """Why the template takes an example not, one text each."""
    indistinct: str | None = None
    """Why the assistant's words cannot be told apart; all tokens were taken then."""
    stop: str | None = None
    """The special token that answers end with, where none of them holds EOS."""
    endless: bool = False
    """Whether answers were found, and none holds EOS or another special token."""
    helps: list[int] = field(default_factory=list)
    """The smallest ``max_length`` with which each example that was taken stays; 0 where no length helps."""
    ends: list[int] = field(default_factory=list)
    """The smallest ``max_length`` with which an end of each is learnt; 0 where there is none."""
    system: str | None = None
    """Why the template refuses system messages; None: it takes them, or leaves them out."""
    largest: int = 0
    """The largest token id."""
    opens_thought: str = ""
    """The mark of a thought that the generation prompt begins."""
    leaves_out_system: bool = False
    """Whether the template leaves their text out."""


def try_examples(tokenizer: Any, examples: Iterable[Mapping[str, Any]], train_args: Mapping[str, Any]) -> Tried:
    """Tokenise examples as :class:`Encoder` does for ``train_args``, a complete section ``train``.

    Raises UserError where they take longer than :data:`~clustertune.data.tokenizer.TEMPLATE_SECONDS`.
    """
    from jinja2 import TemplateError

    faults = (TemplateError, TypeError, KeyError, ValueError, ArithmeticError, MemoryError, RecursionError)
    special = {*tokenizer.all_special_ids, *(n for n, one in tokenizer.added_tokens_decoder.items() if one.special)}

    def work() -> Mapping[str, Any]:
        tried, ends, stops = Tried(), Counter[int](), False
        encoder = Encoder.of(tokenizer, train_args)
        if encoder.template:
            tried.system, tried.leaves_out_system = encoder.refuses_system(), not encoder.renders("system")
            tried.opens_thought = encoder.opens_thought()
        for example in examples:
            try:
                try:
                    made = list(encoder.encode([example]))
                except NotPrefixPreserving as error:
                    tried.indistinct = str(error)
                    encoder = Encoder.of(tokenizer, {**train_args, "assistant_only_loss": False})
                    made = list(encoder.encode([example]))
            except faults as error:
                tried.refused.append(str(error))
                continue
            tried.helps.append(_length_that_helps(made))
            stopping = np.isin(made[0][0], np.array(sorted(special), np.uint32) | LABEL)
            tried.ends.append(int(stopping.argmax()) + 1 if stopping.any() else 0)
            for ids, _ in made:
                tried.largest = max(tried.largest, int((ids & ~LABEL).max(initial=0)))
                learnt = (ids[ids >= LABEL] & ~LABEL).tolist()
                stops = stops or tokenizer.eos_token_id in learnt
                ends.update([one for one in learnt if one in special][-1:])
        tried.endless = bool(tried.helps) and not stops and not ends
        if not stops and ends:
            tried.stop = str(tokenizer.convert_ids_to_tokens(ends.most_common(1)[0][0]))
        return asdict(tried)

    return Tried(**within_limits(work))


def _length_that_helps(made: Sequence[tuple[npt.NDArray[Any], tuple[int, ...]]]) -> int:
    """The smallest ``max_length`` with which an example stays, of its sequence, or of the two of a pair; 0: no length helps."""
    if len(made) < 2:
        return made[0][1][1] + 1
    one, other = (ids & ~LABEL for ids, _ in made)
    shared = _common(one, other)
    return 0 if shared == len(one) == len(other) else shared + 1


class BoundedShards:
    """Makes shards in a child with limits of computing time and memory: template and tokenizer are foreign files."""

    def __init__(self, encoder: Encoder, *, alone: bool) -> None:
        """Fork the child. ``alone``: there is no other, and the tokenizer may use several threads."""
        self._encoder, self._alone = encoder, alone
        self._at = mmap.mmap(-1, 8)
        """The place of the first line that the child works at."""
        self._child = bounded.StandingChild(self._work, MEMORY)

    def make(self, job: Job) -> float:
        """One shard; the CPU seconds that it took. Raises RefusedConversation, OSError, UserError where it was ended from
        outside."""
        path, start, end, out = job
        answer = self._child.ask([str(path), start, end, str(out)])
        if answer.found is None:
            if answer.errno not in (None, errno.ECHILD):
                raise OSError(answer.errno, os.strerror(answer.errno), str(out))
            if answer.signal == signal.SIGKILL:
                fix = "a job with more memory, or fewer CPUs, then the same command again: finished shards are kept"
                text = "a process that tokenises was ended from outside: out of memory, most likely"
                raise UserError(text, file=str(path), fix=fix, code=ExitCode.AGAIN)
            place = int.from_bytes(self._at[:8], "little")
            text = f"this conversation, or one of the {BATCH - 1} behind it, takes too long to render and tokenise, or more "
            text += f"than {MEMORY >> 30} GiB of memory: the chat template or the tokenizer's normalisation does not end"
            raise RefusedConversation(place, text)
        if "failed" in answer.found:
            raise RuntimeError(answer.found["failed"])
        if "refused" in answer.found:
            raise RefusedConversation(*answer.found["refused"])
        return float(answer.found["cpu"])

    def _work(self, request: Sequence[Any]) -> Mapping[str, Any]:
        path, start, end, out = request
        if not self._alone:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core: threads inside would only queue
        try:
            return {"cpu": make_shard((Path(path), start, end, Path(out)), self._encoder, self._at)}
        except RefusedConversation as refused:
            return {"refused": refused.args}
        except OSError:
            raise
        except Exception:  # a fault of this program: its traceback is the parent's to show
            return {"failed": traceback.format_exc()}

    def close(self) -> None:
        """End the child."""
        self._child.close()


def _seconds(lines: list[tuple[int, bytes]]) -> float:
    """Computing time that rendering and tokenising some conversations may take, ten times what they need on a slow machine.

    Answers without marks are found by rendering a conversation up to each of them: its bytes count once for each message.
    """
    return BATCH_SECONDS + sum(len(line) * (1 + line.count(b'"role"')) for _, line in lines) / RENDERED_PER_S


def make_shard(job: Job, encoder: Encoder, at: mmap.mmap) -> float:
    """Write one shard, whole or not at all; ``at`` gets the place of the first line of each batch. Ends this process where a
    batch takes longer than it may. Returns the CPU seconds that it took. Raises RefusedConversation, OSError.
    """
    began = time.process_time()
    path, start, end, out = job
    heads: list[tuple[int, ...]] = []
    parts: list[npt.NDArray[Any]] = []
    lines = _lines(path, start, end)
    while batch := list(islice(lines, BATCH)):
        at[:8] = batch[0][0].to_bytes(8, "little")
        bounded.allow(_seconds(batch))
        for ids, head in encoder.encode_lines(batch):
            parts.append(ids)
            heads.append(head)
    bounded.allow(0)
    content = np.array(heads, RECORD).tobytes() + b"".join(part.tobytes() for part in parts)
    write_durably(out, np.int64(len(heads)).tobytes() + hashlib.sha256(content).digest() + content)
    return time.process_time() - began


def _lines(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines whose first byte is in [start, end), each with its place."""
    with open_to_read(path) as file:
        file.seek(max(start - 1, 0))
        if start:
            file.readline()  # the rest of a line that belongs to the chunk before
        while (offset := file.tell()) < end and (line := file.readline()):
            yield offset, line


def read_shard(path: Path) -> tuple[npt.NDArray[Any], memoryview] | None:
    """Records and tokens (bytes) of a shard; None where it is not there, cut off or damaged."""
    try:
        data = read_whole(path)
    except FileNotFoundError:
        return None
    if len(data) < _HEAD or hashlib.sha256(memoryview(data)[_HEAD:]).digest() != data[8:_HEAD]:
        return None
    count = int(np.frombuffer(data, "<i8", 1)[0])
    records = np.frombuffer(data, RECORD, count, _HEAD)
    return records, memoryview(data)[_HEAD + records.nbytes :]
