"""``prepare``: the conversations of a recipe as a dataset on disk, made once and reused while its inputs stay the same.

:func:`measure` looks at data that no recipe describes yet: in which format they are, how many conversations they hold, and
about how many tokens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import IO, Any

from clustertune.console import say
from clustertune.data.chats import PARTS, SPECIAL, Conversation, Trees, conversations, has_thought, messages_of, read, recognise
from clustertune.data.rows import BadRow, Reject, Rejects, count_words
from clustertune.data.sources import RecordSource, find_sources
from clustertune.data.system_messages import BEFORE_USER, LEAVE_OUT
from clustertune.errors import Problem, UserError, storage_error
from clustertune.manifest import MANIFEST, find_problems, fsync_path, list_files, open_text, read_manifest, record_files, seal
from clustertune.recipe.findings import read_model
from clustertune.recipe.layers import RECIPES, Document, parse_value, read_yaml
from clustertune.recipe.sections import COLUMNS, NAME, Data, DataSource
from clustertune.tree import how_to_install

FORMAT = 8
"""Version of what this code makes out of the same input. Raise it with any change of a rule: older datasets are recreated."""
SPLITS = ("train", "eval")
FILES = ("train.jsonl", "eval.jsonl", "rejected.jsonl")
KIND = "dataset"
_SPOOL = "spool.jsonl"
_SYSTEM = "system"
"""What conversations with a system message are counted as where they are left out by rule."""
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_SHOWN = 5
"""Rows that are named on stderr where bad rows are skipped."""
_MARK = ".replacing.tmp"
BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes of a token; assumed, a little below what English has with vocabularies of 100,000 tokens and more."""
TURN_TOKENS = 5
"""Tokens that a chat template puts around a message: Llama 3 five, Qwen's ChatML five."""
LOOKED_AT = 200
"""Rows of which the format is recognised, at most."""
EXAMPLES = 64
"""Training conversations with which a model's tokenizer and chat template are tried."""
SEED = 42
"""SFTConfig's, with which a recipe's eval split is chosen."""
_VALUES, _MORE = 20, '"another"'
"""Values of an argument of the chat template that are counted apart, and what the others are counted as."""
_OWN_COLUMN = {"messages": "messages", "conversations": "sharegpt", "completion": "prompt-completion", "instruction": "alpaca"}
"""Columns that only one format has."""
_ANSWERS = {*_OWN_COLUMN, "chosen", "rejected", "answer", "answers", "response", "output", "reply", "target", "text"}
"""Columns beside a prompt that may hold what is to be learnt: such rows are not taken for prompts alone."""


def prepare(data: Data, *, recipe_folder: Path, seed: int, out: Path, input_path: Path | None = None) -> dict[str, Any]:
    """Make ``out/train.jsonl``, ``eval.jsonl``, ``rejected.jsonl`` and the manifest, or reuse them.

    A line of the first two is an example in one of TRL's forms (:mod:`clustertune.data.chats`) and ``"source": {"tree": ...}``.
    Reused when the folder is whole and the input's bytes, the data settings that matter, the seed and :data:`FORMAT` are those
    it was made with.

    Returns ``{"dir", "train": {"conversations", "messages"}, "eval": {...}, "rejected": {reason: rows}, "unused", "reused",
    "warnings"}``; ``unused``: columns of the input, and fields of its messages, that no example holds; of a mixture also
    ``sources``: name, conversations, rows and rejected rows of each. Raises UserError: no such input, bad rows under
    ``bad_rows: stop`` or more than ``max_rejected``, no conversation, storage (exit 73).
    """
    sources = find_sources(data, recipe_folder, input_path)
    for _, source in sources:
        if source.root is not None and source.root.resolve() == out.resolve():
            raise UserError("is the folder of the input too", file=str(out), fix="choose another --out")
    identities = [source.identity() for _, source in sources]
    inputs = None if None in identities else identities if data.sources else identities[0]
    key = None if inputs is None else hashlib.sha256(json.dumps([FORMAT, _settings(data), seed, inputs]).encode()).hexdigest()
    if out.exists() and not out.is_dir():
        raise UserError("is not a folder", file=str(out), fix="choose another --out")
    try:
        with opened(out):
            meta = _whole(out, key)
            reused = meta is not None
            if meta is None:
                check_folder(out)
                clean(out)
                try:
                    meta = _make(data, sources, seed, out) | {"key": key, "seed": seed, "inputs": inputs}
                    publish(out, meta)
                finally:
                    clean(out)
    except OSError as error:
        raise storage_error(error, "writing the dataset", out) from error
    rejected, rows = sum(meta["rejected"].values()), meta["rows"]
    if meta["share"] > data.max_rejected:  # made under another limit
        text = f"{rejected:,} of {rows:,} rows were rejected, more than data.max_rejected={data.max_rejected:g}"
        raise UserError(text, file=str(out / "rejected.jsonl"), key="data.max_rejected")
    warnings = [*(text for _, source in sources for text in source.warnings), *meta["warnings"], *_differences(data, meta)]
    for warning in warnings:
        say(f"warning: {warning}")
    if reused:
        _report(Counter(meta["rejected"]), [], out)
    if meta["unused"]:
        say(f"ignored columns: {', '.join(meta['unused'])}")
    summary = {name: meta[name] for name in (*SPLITS, "rejected", "unused")}
    if data.sources:
        summary["sources"] = meta["sources"]
    return {"dir": str(out), **summary, "reused": reused, "warnings": warnings}


def _settings(data: Data) -> dict[str, Any]:
    """The settings that change the result: not where the input lies, and not what is expected of it."""
    of_a_part = {"format", "columns", "language", "limit", "split", "config", "weight"}
    settings = data.model_dump(include={*of_a_part, "eval_fraction", "bad_rows"})
    settings["without_system"] = data.system_messages == LEAVE_OUT
    return settings | {"sources": [part.model_dump(include=of_a_part) for part in data.sources or ()]}


def _whole(out: Path, key: str | None) -> dict[str, Any] | None:
    """The meta data of a dataset that can be reused."""
    if key is None or find_problems(out, KIND, allow_extra=True):
        return None
    meta = read_manifest(out, KIND).meta
    return meta if meta.get("key") == key else None


@dataclass
class _Read:
    """What the examples of the spool are, one behind the other: all that is held of them in memory."""

    keys: list[tuple[str, str | None]] = field(default_factory=list)
    """The example's key, and the split that the input says."""
    prompts: list[str] = field(default_factory=list)
    """What the split goes by."""
    told: list[str] = field(default_factory=list)
    """The same with the system messages and what users say later: what the split goes by where these alone differ."""
    beginnings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By prompt, of those with several turns, the beginnings that end before an answer."""
    kinds: dict[str, str] = field(default_factory=dict)
    """By prompt, where it has one: the kind of its first instruction."""
    parts: array[int] = field(default_factory=lambda: array("I"))
    """Number of the source."""
    lengths: array[int] = field(default_factory=lambda: array("I"))
    """Messages."""
    fields: Counter[str] = field(default_factory=Counter)
    """Examples by what a chat template must know beside role and content: tools, their calls, reasoning, own arguments."""
    without_thought: int = 0
    """Conversations of which no answer holds a thought."""
    arguments: dict[str, Counter[str]] = field(default_factory=dict)
    """Of each of the rows' own arguments of the template, its values as JSON."""
    rendered: int = 0
    """Examples that a chat template renders: all but texts."""
    columns: set[str] = field(default_factory=set)
    """Of prompts, those that the rewards read."""


def _make(data: Data, sources: list[tuple[DataSource, RecordSource]], seed: int, out: Path) -> dict[str, Any]:
    """Read everything, stage the files, return the counts. Raises UserError where the input gives no dataset."""
    read, by_part, faults = _Read(), list[dict[str, Any]](), list[Reject]()
    rejected, dropped, unused = Counter[str](), Counter[str](), set[str]()
    own_splits = [source.has_splits() for _, source in sources]
    with ExitStack() as files:
        spool = files.enter_context(staged(out, _SPOOL).open("w+", encoding="utf-8"))
        sink = files.enter_context(staged(out, "rejected.jsonl").open("w", encoding="utf-8"))
        for number, (part, source) in enumerate(sources):
            rejects, before = Rejects(sink), len(read.keys)
            dropped += _read_part(data, part, source, rejects, number, read, spool)
            faults += rejects.faults
            rejected += rejects.counts
            unused |= rejects.unused | source.unused
            counts = {"conversations": len(read.keys) - before, "rows": rejects.rows, "share": round(rejects.share, 6)}
            by_part.append({"name": part.name, **counts, "rejected": dict(sorted(rejects.counts.items()))})
        _report(rejected, faults, out)
        splits, warnings = _assign(read, seed, data.eval_fraction, own_splits)
        copies = _copies(data, read, splits, seed)
        written = _write_splits(spool, splits, read.lengths, copies, out)
    staged(out, _SPOOL).unlink()
    if count := dropped[_SYSTEM]:
        warnings.append(f"{count:,} conversations with a system message are left out (data.system_messages={LEAVE_OUT})")
    for key, part in data.keyed_parts():
        if part.language and part.format != "oasst-tree":
            warnings.append(f"{key}.language is for oasst-tree and changes nothing for {part.format}")
    return {
        **written,
        "rejected": dict(sorted(rejected.items())),
        "dropped": dict(sorted((+dropped).items())),
        "unused": sorted(unused),
        "rows": sum(part["rows"] for part in by_part),
        "share": max(part["share"] for part in by_part),
        "sources": by_part,
        "fields": dict(sorted(read.fields.items())),
        "without_thought": read.without_thought,
        "row_arguments": {name: dict(counts) for name, counts in sorted(read.arguments.items())},
        "rendered": read.rendered,
        "columns": sorted(read.columns),
        **({"pairs": True} if data.has_preferences else {}),
        **({"prompts": True} if data.has_prompts else {}),
        "warnings": warnings,
    }


def _read_part(
    data: Data, part: DataSource, source: RecordSource, rejects: Rejects, number: int, read: _Read, spool: IO[str]
) -> Counter[str]:
    """Write the examples of one source to the spool. Returns what was left out by rule. Raises UserError."""
    assert part.format is not None
    known = None if part.format == "prompt" else COLUMNS[part.format]
    rows = rejects.good(source.records(), known, part.columns or {})
    trees = Trees(rejects, part.language)
    before = len(read.keys)
    parsed = trees.conversations(rows) if part.format == "oasst-tree" else conversations(part.format, rows, rejects)
    if data.system_messages == LEAVE_OUT:
        parsed = _without_system(parsed, trees.dropped)
    for conversation in islice(parsed, part.limit):
        source_words = {**({"data": part.name} if data.sources else {}), **conversation.source}
        spool.write(_ENCODE({**conversation.example, "source": source_words}) + "\n")
        *beginnings, prompt = conversation.prompts
        read.keys.append((conversation.key, conversation.split))
        read.prompts.append(prompt)
        if beginnings:
            read.beginnings[prompt] = tuple(beginnings)
        if conversation.kind:
            read.kinds[prompt] = conversation.kind
        read.parts.append(number)
        messages = messages_of(conversation.example)
        read.told.append(conversation.told)
        read.lengths.append(len(messages) or 1)
        read.fields.update({key for part in (conversation.example, *messages) for key in SPECIAL if key in part})
        own = conversation.example.get("chat_template_kwargs", {})
        read.fields.update(list(own))
        for name, value in own.items():
            counts = read.arguments.setdefault(name, Counter())
            counts[written if (written := _ENCODE(value)) in counts or len(counts) < _VALUES else _MORE] += 1
        read.rendered += bool(messages)
        read.columns |= conversation.example.get("columns", {}).keys() & {"chat_template_kwargs"}
        read.fields.update({f"{message['role']} messages" for message in messages})
        read.without_thought += bool(messages) and not has_thought(conversation.example)
    total = rejects.total_faults
    if total and (data.bad_rows == "stop" or (rejects.share > data.max_rejected and len(read.keys) > before)):
        what = f"{total:,} bad row{'s' if total > 1 else ''} of {rejects.rows:,} ({count_words(rejects.counts)})"
        fix = "fix them, or leave them out with data.bad_rows=skip"
        if data.bad_rows == "skip":
            what += f", {rejects.share:.0%}: more than data.max_rejected={data.max_rejected:g}"
            fix = f"{rejects.hint(part.format)}; a larger data.max_rejected takes the rest"
        what += f", the first {len(rejects.faults)} follow" if total > len(rejects.faults) else ""
        raise rejects.refuse(what, fix, source.root, source.shown)
    if len(read.keys) == before:
        raise _nothing(part, source, rejects, trees)
    return trees.dropped


def _without_system(parsed: Iterable[Conversation], dropped: Counter[str]) -> Iterator[Conversation]:
    """The conversations without a system message; the others are counted as dropped."""
    for conversation in parsed:
        if any(message["role"] == "system" for message in messages_of(conversation.example)):
            dropped[_SYSTEM] += 1
        else:
            yield conversation


def _report(counts: Counter[str], faults: list[Reject], out: Path) -> None:
    """Name what is left out: the first rows here, all of them in the file."""
    if counts:
        say(f"rejected rows: {count_words(counts)}; see {out / 'rejected.jsonl'}")
    for reject in faults[:_SHOWN]:
        say(f"  {reject.file}:{reject.line}: {reject.reason}: {reject.detail}")


def _assign(read: _Read, seed: int, fraction: float, own_splits: list[bool]) -> tuple[list[str], list[str]]:
    """The split of each conversation, and the notes on it."""
    warnings, own = [], list(own_splits)
    for number, has_own in enumerate(own_splits):
        present = {split for (_, split), part in zip(read.keys, read.parts, strict=True) if part == number}
        if has_own and (missing := [name for name in SPLITS if name not in present]):
            own[number] = False
            text = f"the input's own {missing[0]} split gives no conversation: the other one is split by data.eval_fraction"
            warnings.append(text)
    groups = _groups(read)
    if len(set(groups)) == 1 and not any(own) and len(set(read.told)) > 1:
        groups = read.told  # documents to answer on in system messages, say, or chats that begin with one greeting
        text = f"all {len(groups):,} conversations begin with one prompt: the split goes by system messages and later turns too"
        warnings.append(text)
    kinds = {group: kind for group, prompt in zip(groups, read.prompts, strict=True) if (kind := read.kinds.get(prompt))}
    stated = {name: set[str]() for name in SPLITS}
    for group, (_, split), part in zip(groups, read.keys, read.parts, strict=True):
        if own[part]:
            stated[str(split)].add(group)
    free = [group for group, part in zip(groups, read.parts, strict=True) if not own[part]]
    open_ = [group for group in free if group not in stated["train"] | stated["eval"]]
    chosen = choose_eval(open_, seed, fraction, kinds)
    held = chosen | (stated["eval"] - stated["train"])
    splits = [
        str(split) if own[part] else "eval" if group in held else "train"
        for group, (_, split), part in zip(groups, read.keys, read.parts, strict=True)
    ]
    if free and not chosen and not any(own):
        what = "a single conversation" if len(free) == 1 else f"all {len(free):,} conversations have one prompt"
        fix = "rows with other prompts, or a file of such beside it (train.jsonl, dev.jsonl), give one"
        warnings.append(f"{what}: the eval split is empty, and no loss on held-out rows is measured; {fix}")
    elif (count := sum(group in chosen for group in open_)) > max(1, round(len(open_) * fraction)):
        text = (
            f"the eval split holds {count:,} of {len(open_):,} conversations: none of its prompts has fewer, and all answers "
        )
        warnings.append(f"{text}of a prompt are in one split")
    if both := stated["train"] & stated["eval"]:
        text = f"prompts in the train and in the eval split of the input: {len(both):,}"
        warnings.append(f"{text}: its evaluation is of prompts that are trained")
    return splits, warnings


def _groups(read: _Read) -> list[str]:
    """What must lie in one split, of each conversation: those with the same prompt, and those that continue one of them.

    Named by the smallest key of its conversations: where all prompts differ, by the conversation's own.
    """
    known = set(read.prompts)
    roots = [next((one for one in read.beginnings.get(prompt, ()) if one in known), prompt) for prompt in read.prompts]
    names: dict[str, str] = {}
    for root, (key, _) in zip(roots, read.keys, strict=True):
        names[root] = min(key, names.get(root, key))
    return [names[root] for root in roots]


def choose_eval(keys: Iterable[str], seed: int, fraction: float, kinds: Mapping[str, str] | None = None) -> set[str]:
    """The keys that become the eval split, of the key of each conversation: ``round(n * fraction)`` of the conversations, at
    least 1 and at most n - 1. A key that several have, and for which there is no room, is passed over; where there is room for
    none, the one that the fewest have is taken.

    The order is that of SHA-256 over seed and key: it depends neither on the order in the file nor on a random generator,
    so the same data give the same split everywhere, and a conversation that is added moves few others. One key is all train.
    ``kinds``: of keys that have one. All kinds are then represented alike: keys are taken at even distances from the list of
    one kind behind the other.
    """
    sizes = Counter(keys)
    if len(sizes) < 2:
        return set()
    most = min(max(round(sizes.total() * fraction), 1), sizes.total() - 1)
    order = ranked(sizes, seed)
    order = [key for key in order if sizes[key] <= most] or [min(order, key=lambda key: sizes[key])]
    chosen, room = set(order[:1]), most - sizes[order[0]]
    for key in order[1:]:
        if sizes[key] <= room:
            chosen.add(key)
            room -= sizes[key]
    if not kinds:
        return chosen
    order.sort(key=lambda key: kinds.get(key, ""))
    return {order[int((at + 0.5) * len(order) / len(chosen))] for at in range(len(chosen))}


def ranked(keys: Iterable[str], seed: int) -> list[str]:
    """The keys in the order of SHA-256 over seed and key."""
    return sorted(keys, key=lambda key: hashlib.sha256(f"{seed}\0{key}".encode()).digest())


def _copies(data: Data, read: _Read, splits: list[str], seed: int) -> array[int]:
    """How often each example is written: of a source of weight 2.3 each twice, and three in ten once more.

    Which ones goes by :func:`ranked`, so that it depends on the seed alone. What is held out is written once, or, like what is
    trained, left out by a weight below 1.
    """
    copies = array("I", [1]) * len(read.keys)
    for number, source in enumerate(data.sources or ()):
        each, rest = divmod(source.weight, 1)
        for name in SPLITS:
            mine = [at for at, part in enumerate(read.parts) if part == number and splits[at] == name]
            order = ranked({read.keys[at][0] for at in mine}, seed)
            more = set(order[: round(len(order) * rest)])
            for at in mine:
                times = int(each) + (read.keys[at][0] in more)
                copies[at] = times if name == "train" else min(times, 1)
    return copies


def _write_splits(
    spool: IO[str], splits: list[str], lengths: Iterable[int], copies: array[int], out: Path
) -> dict[str, dict[str, int]]:
    """Copies stand behind all that is written once, so that packing puts no two of them into one row."""
    counts = {name: {"conversations": 0, "messages": 0} for name in SPLITS}
    with ExitStack() as stack:
        files = {name: stack.enter_context(staged(out, f"{name}.jsonl").open("w", encoding="utf-8")) for name in SPLITS}
        for turn in range(max(copies)):
            spool.seek(0)
            for line, split, length, times in zip(spool, splits, lengths, copies, strict=True):
                if turn < times:
                    files[split].write(line)
                    counts[split]["conversations"] += 1
                    counts[split]["messages"] += length
    return counts


def _nothing(part: DataSource, source: RecordSource, rejects: Rejects, trees: Trees) -> UserError:
    """The input gives no conversation: say what was met instead."""
    problems = []
    if rejects.counts:
        first = rejects.faults[0] if rejects.faults else None
        example = f"; the first: {first.file}:{first.line}: {first.reason}: {first.detail}" if first else ""
        text = f"no conversation: every row is rejected ({count_words(rejects.counts)}){example}"
        problems.append(Problem(text, file=source.shown, key="data.format", fix=rejects.hint(str(part.format))))
    if trees.dropped["language"]:
        met = ", ".join(f"{name} {count}" for name, count in trees.languages.most_common(8))
        message = f"no tree has the language {part.language}; there are: {met}"
        problems.append(Problem(message, file=source.shown, key="data.language"))
    if count := trees.dropped[_SYSTEM]:
        text = (
            f"no conversation is left: {count:,} have a system message, and data.system_messages={LEAVE_OUT} leaves these out"
        )
        problems.append(Problem(text, file=source.shown, key="data.system_messages", fix=f"data.system_messages={BEFORE_USER}"))
    return UserError(problems or Problem("contains no usable conversation", file=source.shown))


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


# --- publish ---------------------------------------------------------------------------------------------------------------

# Putting a finished dataset into its folder so that a crash leaves the old one, the new one or none, never a mix.
#
# New files are written in the folder under hidden names. Then the old manifest goes (now the folder contains no dataset),
# each file is renamed over its old one, and the new manifest is written last. A hidden mark says meanwhile that what
# stands there without a manifest is ours to replace.


def staged(folder: Path, name: str) -> Path:
    """The hidden path of a file that is being made (the ending that manifests ignore)."""
    return folder / f".{name}.new.tmp"


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[None]:
    """The folder, made where it is missing and :func:`locked`; one that was made and stays empty goes again."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it holds the dataset
                folder.rmdir()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time, where the file system can lock a directory (NFS cannot; the manifest's hashes then tell)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def check_folder(folder: Path) -> None:
    """Raise UserError where the folder holds something else than a dataset of ours, whole or half replaced."""
    foreign: list[str] = []
    if (folder / MANIFEST).exists():
        with contextlib.suppress(UserError):  # an unreadable manifest is a broken dataset
            kind = read_manifest(folder).kind
            foreign = [] if kind == KIND else [f"{MANIFEST} of kind {kind}"]
    elif not (folder / _MARK).exists():
        foreign = list_files(folder)
    if foreign:
        listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UserError(f"holds something else than a dataset: {listed}", file=str(folder), fix="choose another folder")


def clean(folder: Path) -> None:
    """Remove what an interrupted attempt staged."""
    for path in folder.glob(".*.new.tmp"):
        path.unlink()


def publish(folder: Path, meta: Mapping[str, Any]) -> None:
    """Publish the staged files. Raises OSError; the folder then has no manifest."""
    for name in FILES:
        fsync_path(staged(folder, name))
    (folder / _MARK).touch()
    fsync_path(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    fsync_path(folder)
    for name in FILES:
        staged(folder, name).replace(folder / name)
    seal(folder, KIND, meta, record_files(folder, FILES))
    (folder / _MARK).unlink()


# --- data that no recipe describes yet --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredData:
    """Data as a recipe's section ``data`` names them, and what was found in them."""

    section: Mapping[str, Any]
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Training conversations by their estimated number of tokens; empty: they were not counted."""
    notes: tuple[str, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = ()
    """The first of the training conversations, as ``prepare`` makes them."""
    fields: Mapping[str, int] = field(default_factory=dict)
    """Conversations by what a chat template must know in them (of the manifest of a data set)."""
    without_thought: int = 0
    """Conversations of which no answer holds a thought."""
    with_thought: int = 0
    """Those of which one does."""

    @property
    def source(self) -> str:
        """Where the numbers of tokens are from."""
        return f"{BYTES_PER_TOKEN:g} bytes a token assumed"


def measure(name: str, stated: Mapping[str, Any] | None = None) -> MeasuredData:
    """A file, a folder or a Hub id: its format is recognised, its conversations are counted as ``prepare`` makes them.

    ``stated``: what is known of the recipe's section ``data``, as ``columns``. Data of the Hub that a recipe trains on are
    taken as that recipe describes them. Raises UserError.
    """
    stated = dict(stated or {})
    path = Path(name).expanduser()
    if path.exists():
        return _count({"name": _plain(path.name.split(".")[0]), "input": str(path.absolute()), **stated})
    known = {str(section["name"]): section for section in _of_recipes()}
    if name in known:
        return MeasuredData({key: value for key, value in known[name].items() if key not in ("bad_rows", "limit")} | stated)
    if not re.fullmatch(f"{NAME}/{NAME}", name):
        fix = f"give a file, a folder, or one of the Hub: {', '.join(sorted(known))}"
        raise UserError(f"there is no file {name!r}", file="command line", key="--data", fix=fix)
    return _count({"name": name, "revision": _revision(name), **stated})


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")[:64] or "data"


def _of_recipes() -> Iterator[dict[str, Any]]:
    for file in sorted([*RECIPES.glob("_base/*.yaml"), *RECIPES.glob("*/recipe.yaml")]):
        section = read_yaml(file, str(file)).data.get("data")
        if isinstance(section, dict) and section.get("revision"):
            yield section


def _revision(name: str) -> str:
    fix = "download it elsewhere and give the file or folder"
    if find_spec("huggingface_hub") is None:
        text = f"asking the Hub for {name} needs huggingface_hub, which is not installed"
        raise UserError(text, file="command line", key="--data", fix=f"{fix}; or {how_to_install('train')}")
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(name).sha)
    except Exception as error:  # the exceptions of the Hub's clients have no common base
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{name} is not available from the Hub: {why}", file="command line", key="--data", fix=fix) from None


def _count(section: dict[str, Any]) -> MeasuredData:
    data = read_model(Data, Document("command line", section))
    if data.format is None:
        section |= _recognised(data)
        data = Data.model_validate(section)
    tokens: Counter[int] = Counter()
    with tempfile.TemporaryDirectory(prefix="clustertune-data-") as folder:
        with contextlib.redirect_stderr(io.StringIO()):  # it names a file of rejected rows that is gone in a moment
            prepared = prepare(data, recipe_folder=Path(), seed=SEED, out=Path(folder, "data"))
        with open_text(Path(folder, "data", "train.jsonl")) as lines:
            tokens.update(_tokens(json.loads(line)) for line in lines)
            lines.seek(0)
            examples = tuple(map(json.loads, islice(lines, EXAMPLES)))
        meta = read_manifest(Path(folder, "data")).meta
    counts = {name: prepared[name]["conversations"] for name in SPLITS}
    mean = sum(length * count for length, count in tokens.items()) / max(1, counts["train"])
    notes = [
        f"{counts['train']:,} training conversations and {counts['eval']:,} for evaluation were counted ({section['format']})",
        f"{mean:,.0f} tokens a conversation are estimated ({BYTES_PER_TOKEN:g} bytes a token): clustertune prepare counts them",
    ]
    notes += prepared["warnings"]
    if rejected := sum(prepared["rejected"].values()):
        notes.append(f"{rejected:,} rows are left out: clustertune prepare names each")
    section |= {"expect": {**counts, "mean_tokens": round(mean)}}
    without = meta["without_thought"]
    return MeasuredData(section, dict(tokens), tuple(notes), examples, meta["fields"], without, meta["rendered"] - without)


def _tokens(example: Mapping[str, Any]) -> int:
    """Of the sequence that an example becomes; of a preference, which becomes two, their mean."""
    if "text" in example:
        return max(1, round(len(str(example["text"]).encode()) / BYTES_PER_TOKEN))
    total = 0.0
    for part in PARTS:
        texts = [str(message.get("content") or "") for message in example.get(part, ())]
        tokens = sum(len(text.encode()) for text in texts) / BYTES_PER_TOKEN + TURN_TOKENS * len(texts)
        total += tokens / 2 if part in ("chosen", "rejected") else tokens
    return max(1, round(total))


def _is_prompt(row: Mapping[str, Any]) -> bool:
    """Whether a row is a prompt that can be answered and rewarded."""
    try:
        read("prompt", row)
    except BadRow:
        return False
    return True


def _recognised(data: Data) -> dict[str, Any]:
    """``format``, and ``columns`` where they are named otherwise, of the first row that has any. Raises UserError."""
    ((_, source),) = find_sources(data, Path(), None)
    columns: list[str] = []
    bad, told = "", dict[str, str]()
    for _, row in islice(source.records(), LOOKED_AT):
        if not isinstance(row, dict):
            bad = bad or f": {row.detail}"
            continue
        renamed = {name: row[other] for name, other in (data.columns or {}).items() if other in row}
        if (recognised := recognise({**row, **renamed})) is not None:
            keys = dict(part.removeprefix("data.").split(": ", 1) for part in recognised.split(" and "))
            known = {key: parse_value(value) for key, value in keys.items()}
            return known | {"columns": {**known.get("columns", {}), **data.columns}} if data.columns else known
        columns = columns or sorted(map(str, row))
        if not {**row, **renamed}.keys() & _ANSWERS and _is_prompt({**row, **renamed}):
            return {"format": "prompt"} | ({"columns": data.columns} if data.columns else {})
        for column, form in _OWN_COLUMN.items():
            if column in row and not told:
                try:
                    read(form, row)
                except BadRow as error:
                    told = {form: error.detail}
    if told:
        ((form, detail),) = told.items()
        text = f"rows look like data.format: {form}, and the first cannot be read: {detail}"
        raise UserError(text, file=source.shown, key="--data", fix="correct these rows, or remove them")
    named = f"rows with the columns {', '.join(columns)[:200]} are of no format that is trained on here"
    fix = "name them behind the options, as 'data.columns={prompt: QUESTION, completion: ANSWER}'; docs/data.md has the formats"
    if "prompt" in columns:
        fix += "; to learn by rewards: data.format=prompt (docs/grpo.md)"
    if not columns:
        raise UserError(f"no row can be read{bad}", file=source.shown, key="--data", fix="docs/data.md has the formats")
    raise UserError(named, file=source.shown, key="--data", fix=fix)
