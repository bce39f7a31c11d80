"""``prepare``'s second half: conversations to tokens with their labels, once, on all cores, and the rows that ranks map.

``DATASET/tokens/`` holds, under a manifest of kind ``tokens``, for each split

``train-00000.u32``, ...     one little-endian uint32 per token, conversations in the order of ``train.jsonl``; the top bit says
                             that the token carries a label. At most :data:`PART_BYTES` and one shard each, so that readers can
                             share out the digests; no conversation is cut by the end of a file
``train.index.npy``          one record per conversation (:data:`clustertune.data.packing.INDEX`)
``train-KEY.pieces.npy``, ``train-KEY.begins.npy``   the rows (:func:`clustertune.data.packing.make_rows`)

Two keys say what they were made from. The tokens': data, tokenizer, template, labels, versions. The rows': that and
``max_length``, packing, seed; other rows are another index, and nothing is tokenised for them. Number of processes, paths,
batch and world size are in no key: the bytes are the same.

A shard is what one process makes of 8 MiB of a file, written aside and renamed. Shards lie in a hidden folder named by the key
until all are there: a killed ``prepare`` continues behind them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from clustertune import secrets
from clustertune.console import byte_progress, say
from clustertune.data import packing
from clustertune.data.prepare import SPLITS
from clustertune.data.publish import KIND as DATASET
from clustertune.data.publish import locked
from clustertune.data.shards import RECORD, Encoder, Job, RefusedConversation, make_shard, read_shard
from clustertune.data.tokenizer import identity
from clustertune.errors import ExitCode, UserError, storage_error
from clustertune.manifest import MANIFEST, FileRecord, find_problems, new_hasher, read_manifest, record_files, seal

KIND = "tokens"
FOLDER = "tokens"
"""Below the folder of the conversations."""
FORMAT = 1
"""Version of what this code makes out of the same input. Raise it with any change of a rule: older tokens are recreated."""
CHUNK = 8 << 20
"""Bytes of a JSON Lines file for one shard: cut by the file alone, never by the number of processes."""
PART_BYTES = 256 << 20
SUMMARY = ("tokens", "sequences", "labelled_share", "tokens_per_s")
"""What ``prepare --json`` and the record of the stage say about them."""
# --- keys --------------------------------------------------------------------------------------------------------------


def made_from(dataset: Path, tokenizer: Any, train_args: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides tokens, labels and rows. Raises UserError: no dataset, or a template that marks no answer."""
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
        **({} if encoder.completions else {"completion_only_loss": False}),
    }
    return {"tokens": tokens, "rows": packing.settings(train_args, pairs=bool(manifest.meta.get("pairs")))}


def versions() -> dict[str, str]:
    """Those of the packages that tokenise."""
    return {name: version(name) for name in ("tokenizers", "transformers")}


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


_ENCODER: Encoder | None = None


def _begin(encoder: Encoder) -> None:
    global _ENCODER  # noqa: PLW0603 - a process of the pool serves one tokenizer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core: threads inside would only queue
    _ENCODER = encoder


def _end_with_parent() -> None:
    """A killed ``prepare`` leaves no process: the kernel's own signal would come from the fork server, which lives for us."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(job: Job) -> float:
    assert _ENCODER is not None
    return make_shard(job, _ENCODER)


# --- all of them -------------------------------------------------------------------------------------------------------


def make(
    dataset: Path, tokenizer: Any, train_args: Mapping[str, Any], *, shared: Path | None = None, chunk: int = CHUNK
) -> dict[str, Any]:
    """Tokens and rows of a dataset in ``dataset/tokens``, made or reused.

    ``shared``: a folder where the tokens of several data sets lie by their key; what is there is linked, and what is not is
    made there first. Rows are always the dataset's own.

    Returns ``{"tokens", "sequences", "labelled_share", "tokens_per_s", "tokens_per_cpu_s", "processes", "reused",
    "splits": {split: {"conversations", "tokens", "labelled", "sequences", "cut", "dropped"}}}``: ``tokens`` as the chat
    template gives them, before ``max_length``; ``sequences`` the rows; ``labelled_share`` of the tokens; rates of what was
    tokenised when they were made (None: all shards were there). ``cut``: conversations longer than ``max_length``;
    ``dropped``: those left out, for no label of theirs is within it. A preference is one conversation and two sequences.
    Raises UserError.
    """
    what = made_from(dataset, tokenizer, train_args)
    out = dataset / FOLDER
    try:
        out.mkdir(exist_ok=True)
        with locked(out):
            return _make(dataset, out, tokenizer, what, chunk, shared)
    except OSError as error:
        raise storage_error(error, "writing the tokens", error.filename or out) from error


def _make(dataset: Path, out: Path, tokenizer: Any, what: dict[str, Any], chunk: int, shared: Path | None) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    records: dict[str, FileRecord] = {}
    if not find_problems(out, KIND, allow_extra=True):
        found = read_manifest(out, KIND)
        if found.meta["made_from"]["tokens"] == what["tokens"]:
            meta, records = found.meta, found.files
    if meta and meta["made_from"] == what:
        return {**meta["summary"], "reused": True}
    if not meta:
        if shared is None:
            meta, records = _tokenise(dataset, out, tokenizer, what["tokens"], chunk)
        else:
            meta, records = _share(dataset, shared / _key(what["tokens"]), out, tokenizer, what["tokens"], chunk)
    records = {name: record for name, record in records.items() if ".pieces." not in name and ".begins." not in name}
    summary = _write_rows(out, meta, what["rows"], records)
    seal(out, KIND, {**meta, "made_from": what, "summary": summary}, records)
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
        found = read_manifest(home, KIND)
    (out / MANIFEST).unlink(missing_ok=True)
    for name in found.files:
        (out / name).unlink(missing_ok=True)
        try:
            (out / name).hardlink_to(home / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(home / name, out / name)
    return dict(found.meta), dict(found.files)


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
        say(f"tokens: {len(everything) - len(missing)} of {len(everything)} shards were there")
    encoder = Encoder.of(tokenizer, {key: what.get(key) for key in ("assistant_only_loss", "completion_only_loss")})
    _check_fields(read_manifest(dataset, DATASET).meta.get("fields", {}), encoder.template, dataset)
    processes = max(1, min(len(os.sched_getaffinity(0)), len(missing)))
    began, longest = time.perf_counter(), tokenizer.model_max_length
    tokenizer.model_max_length = int(1e30)  # no warning for each long conversation
    try:
        with secrets.withheld():  # the tokenizer is loaded: no process of the pool asks the Hub
            cpu = _run(missing, encoder, processes)
    except RefusedConversation as refused:
        number, text = refused.args
        raise _refusal(missing, number, text) from None
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


def _check_fields(fields: Mapping[str, int], template: str, dataset: Path) -> None:
    """Raise UserError where the chat template knows no tools and the data have some; reasoning may be left out on purpose."""
    for name, count in fields.items():
        if name in template:
            continue
        text = f"{count:,} examples hold {name}, which the chat template does not name: it would leave them out"
        if name in ("tools", "tool_calls"):
            fix = "name a template that renders them, or leave these examples out of the input"
            raise UserError(text, file=str(dataset), key="model.chat_template", fix=fix)
        say(f"warning: {text}")


def _refusal(jobs: list[Job], index: int, text: str) -> UserError:
    """With the line's number, counted only now."""
    path = next((path for path, start, end, _ in jobs if start <= index < end), jobs[0][0])
    with path.open("rb") as file:
        number = 1 + sum(file.read(min(1 << 20, index - at)).count(b"\n") for at in range(0, index, 1 << 20))
    fix = "leave this conversation out of the input, or give a template that takes it: model.chat_template"
    return UserError(text, file=f"{path}:{number}", fix=fix)


def _run(jobs: list[Job], encoder: Encoder, processes: int) -> float:
    """Make shards, at most ``processes`` at a time. Returns the CPU seconds of all."""
    with byte_progress() as bar:
        task = bar.add_task("tokenising", total=sum(end - start for _, start, end, _ in jobs))
        if processes == 1:
            cpu = 0.0
            for job in jobs:
                cpu += make_shard(job, encoder)
                bar.advance(task, job[2] - job[1])
            return cpu
        # Not fork: the tokenizer's threads may hold a lock. The server imports transformers once, which takes 4 s.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "transformers.tokenization_utils_tokenizers"])
        pool = ProcessPoolExecutor(processes, context, _begin, (encoder,))
        try:
            pending = {pool.submit(_work, job): job for job in jobs}
            cpu = 0.0
            for done in as_completed(pending):
                cpu += done.result()
                bar.advance(task, pending[done][2] - pending[done][1])
            return cpu
        except BrokenProcessPool:
            fix = "a job with more memory, or fewer CPUs, then the same command again: finished shards are kept"
            text = f"a process that tokenises was ended from outside, of {processes}: out of memory, most likely"
            raise UserError(text, file=str(jobs[0][0]), fix=fix, code=ExitCode.AGAIN) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _join(shards: list[Path], out: Path, split: str) -> tuple[dict[str, Any], tuple[dict[str, FileRecord], dict[str, int]]]:
    """The shards one behind the other. Returns what the manifest says about the split; its files' records, tokens by shard."""
    parts: list[int] = []
    records: dict[str, FileRecord] = {}
    counts: dict[str, int] = {}
    index, at, waiting = [np.empty(0, packing.INDEX)], 0, list(shards)
    while waiting:
        name, hasher, size = f"{split}-{len(parts):05}.u32", new_hasher("sha256"), 0
        (out / name).unlink(missing_ok=True)  # the file of before may have a link elsewhere
        with (out / name).open("wb") as target:
            while waiting and size < PART_BYTES:
                path = waiting.pop(0)
                if (found := read_shard(path)) is None:
                    raise UserError("was damaged meanwhile", file=str(path), fix="run the same command again")
                heads, tokens = found
                record = np.empty(len(heads), packing.INDEX)
                for field in RECORD.names or ():
                    record[field] = heads[field]
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
    whole = np.concatenate(index)
    (out / f"{split}.index.npy").unlink(missing_ok=True)
    np.save(out / f"{split}.index.npy", whole)
    records |= record_files(out, [f"{split}.index.npy"])
    labelled = int(whole["labelled"].sum(dtype=np.int64))
    return {"conversations": len(whole), "tokens": at, "labelled": labelled, "parts": parts}, (records, counts)


def _write_rows(out: Path, meta: dict[str, Any], settings: dict[str, Any], records: dict[str, FileRecord]) -> dict[str, Any]:
    """The index of rows of both splits; adds its files to ``records``. Returns the summary."""
    splits: dict[str, Any] = {}
    names = []
    for split in SPLITS:
        index = np.load(out / f"{split}.index.npy", mmap_mode="r")
        pieces, begins = packing.make_rows(index, split, settings)
        for name, array in zip(row_files(split, settings), (pieces, begins), strict=True):
            np.save(out / name, array)
            names.append(name)
        size = settings["max_length"]
        lone, each = settings["packing"][split] is None, 2 if settings.get("pairs") else 1
        splits[split] = {
            "conversations": meta["splits"][split]["conversations"] // each,
            **{key: meta["splits"][split][key] for key in ("tokens", "labelled")},
            "sequences": (len(begins) - 1) * each,
            "cut": int((index["length"] > size).sum()) if size is not None else 0,
            "dropped": (len(index) - len(pieces)) // each if lone else 0,
        }
    records |= record_files(out, names)
    tokens, labelled, sequences = (sum(s[key] for s in splits.values()) for key in ("tokens", "labelled", "sequences"))
    share = round(labelled / tokens, 6) if tokens else None
    return {"tokens": tokens, "sequences": sequences, "labelled_share": share, **meta["rates"], "splits": splits}


def row_files(split: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The files with pieces and begins of a split's rows."""
    key = _key(settings)
    return f"{split}-{key}.pieces.npy", f"{split}-{key}.begins.npy"
