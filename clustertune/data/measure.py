"""Data that no recipe describes yet: in which format they are, how many conversations they hold, and about how many tokens."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from clustertune.data import prepare
from clustertune.data.chats import PARTS, read, recognise
from clustertune.data.rows import BadRow
from clustertune.data.sources import find_sources
from clustertune.errors import UserError
from clustertune.recipe.findings import read_model
from clustertune.recipe.layers import RECIPES
from clustertune.recipe.sections import NAME, Data
from clustertune.recipe.yamlfile import Document, parse_value, read_yaml
from clustertune.tree import how_to_install

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


@dataclass(frozen=True)
class MeasuredData:
    """Data as a recipe's section ``data`` names them, and what was found in them."""

    section: Mapping[str, Any]
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Training conversations by their estimated number of tokens; empty: they were not counted."""
    notes: tuple[str, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = ()
    """The first of the training conversations, as ``prepare`` makes them."""

    @property
    def source(self) -> str:
        """Where the numbers of tokens are from."""
        return f"{BYTES_PER_TOKEN:g} bytes a token assumed"


def measure(given: str, stated: Mapping[str, Any] | None = None) -> MeasuredData:
    """A file, a folder or a Hub id: its format is recognised, its conversations are counted as ``prepare`` makes them.

    ``stated``: what is known of the recipe's section ``data``, as ``columns``. Data of the Hub that a recipe trains on are
    taken as that recipe describes them. Raises UserError.
    """
    stated = dict(stated or {})
    path = Path(given).expanduser()
    if path.exists():
        return _count({"name": _plain(path.name.split(".")[0]), "input": str(path.resolve()), **stated})
    known = {str(section["name"]): section for section in _of_recipes()}
    if given in known:
        return MeasuredData({key: value for key, value in known[given].items() if key not in ("bad_rows", "limit")} | stated)
    if not re.fullmatch(f"{NAME}/{NAME}", given):
        fix = f"give a file, a folder, or one of the Hub: {', '.join(sorted(known))}"
        raise UserError(f"there is no file {given!r}", file="command line", key="--data", fix=fix)
    return _count({"name": given, "revision": _revision(given), **stated})


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
            found = prepare.prepare(data, recipe_folder=Path(), seed=SEED, out=Path(folder, "data"))
        with Path(folder, "data", "train.jsonl").open(encoding="utf-8") as lines:
            tokens.update(_tokens(json.loads(line)) for line in lines)
            lines.seek(0)
            examples = tuple(map(json.loads, islice(lines, EXAMPLES)))
    counts = {name: found[name]["conversations"] for name in prepare.SPLITS}
    mean = sum(length * count for length, count in tokens.items()) / max(1, counts["train"])
    notes = [
        f"{counts['train']:,} training conversations and {counts['eval']:,} for evaluation were counted ({section['format']})",
        f"{mean:,.0f} tokens a conversation are estimated ({BYTES_PER_TOKEN:g} bytes a token): clustertune prepare counts them",
    ]
    if rejected := sum(found["rejected"].values()):
        notes.append(f"{rejected:,} rows are left out: clustertune prepare names each")
    section |= {"expect": {**counts, "mean_tokens": round(mean)}}
    return MeasuredData(section, dict(tokens), tuple(notes), examples)


def _tokens(example: Mapping[str, Any]) -> int:
    """Of the sequence that an example becomes; of a preference, which becomes two, their mean."""
    if "text" in example:
        return max(1, round(len(str(example["text"]).encode()) / BYTES_PER_TOKEN))
    found = 0.0
    for part in PARTS:
        texts = [str(message.get("content") or "") for message in example.get(part, ())]
        tokens = sum(len(text.encode()) for text in texts) / BYTES_PER_TOKEN + TURN_TOKENS * len(texts)
        found += tokens / 2 if part in ("chosen", "rejected") else tokens
    return max(1, round(found))


_OWN_COLUMN = {"messages": "messages", "conversations": "sharegpt", "completion": "prompt-completion", "instruction": "alpaca"}
"""Columns that only one format has."""


def _recognised(data: Data) -> dict[str, Any]:
    """``format``, and ``columns`` where they are named otherwise, of the first row that has any. Raises UserError."""
    ((_, source),) = find_sources(data, Path(), None)
    columns: list[str] = []
    bad, told = "", dict[str, str]()
    for _, row in islice(source.records(), LOOKED_AT):
        if not isinstance(row, dict):
            bad = bad or f": {row.detail}"
            continue
        given = {name: row[other] for name, other in (data.columns or {}).items() if other in row}
        if (found := recognise({**row, **given})) is not None:
            keys = dict(part.removeprefix("data.").split(": ", 1) for part in found.split(" and "))
            known = {key: parse_value(value) for key, value in keys.items()}
            return known | {"columns": {**known.get("columns", {}), **data.columns}} if data.columns else known
        columns = columns or sorted(map(str, row))
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
    if not columns:
        raise UserError(f"no row can be read{bad}", file=source.shown, key="--data", fix="docs/data.md has the formats")
    raise UserError(named, file=source.shown, key="--data", fix=fix)
