"""A base model's folder: what its small files say. Weights are never read, only their names and sizes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from clustertune.tensorfile import read_header

MOST_BYTES = 64 << 20
"""Above this size a JSON file is not read: Llama 3's tokenizer.json is 9 MB, Gemma's 33 MB."""
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "sentencepiece.bpe.model",
    "spiece.model", "vocab.txt",
)  # fmt: skip
"""One of these holds the vocabulary."""


def snapshot(hub: Path, kind: str, name: str, revision: str | None) -> Path | None:
    """Where the Hub's cache has one commit of ``models`` or ``datasets``; the folder need not be there. None: no commit."""
    if revision is None:
        return None
    return hub / f"{kind}--{name.replace('/', '--')}" / "snapshots" / revision


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none that can be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        body = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def token(value: object) -> str | None:
    """A special token, which files give as text or as an object with ``content``."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) and found else None


@dataclass(frozen=True)
class ModelFolder:
    """A folder in the Hugging Face layout."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """``config.json``; of a model with pictures its text part."""
        found = read_json(self.path / "config.json")
        inner = found.get("text_config") if found else None
        return {**found, **inner} if found and isinstance(inner, dict) else found

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return read_json(self.path / "tokenizer_config.json") or {}

    @cached_property
    def _special(self) -> dict[str, Any]:
        return read_json(self.path / "special_tokens_map.json") or {}

    @cached_property
    def generation(self) -> dict[str, Any]:
        """``generation_config.json``."""
        return read_json(self.path / "generation_config.json") or {}

    @cached_property
    def vocabulary(self) -> dict[str, int] | None:
        """Token -> id by ``tokenizer.json`` and the added tokens; None where only another format is there."""
        body = read_json(self.path / "tokenizer.json")
        model = body.get("model") if body else None
        listed = model.get("vocab") if isinstance(model, dict) else None
        if not body or not isinstance(listed, dict | list):
            return None
        if isinstance(listed, dict):
            found = {key: value for key, value in listed.items() if isinstance(value, int)}
        else:  # Unigram: [[token, score], ...]
            found = {str(item[0]): at for at, item in enumerate(listed) if isinstance(item, list) and item}
        added = body.get("added_tokens")
        for item in added if isinstance(added, list) else ():
            if isinstance(item, dict) and isinstance(item.get("id"), int):
                found[str(item.get("content"))] = item["id"]
        decoder = self.tokenizer_config.get("added_tokens_decoder")
        for number, item in decoder.items() if isinstance(decoder, dict) else ():
            if str(number).isdigit() and (name := token(item)):
                found[name] = int(number)
        return found

    def special(self, name: str) -> str | None:
        """``eos_token``, ``pad_token`` and the like."""
        return token(self.tokenizer_config.get(name)) or token(self._special.get(name))

    @cached_property
    def template(self) -> str | None:
        """The chat template: a file of its own, or a key of the tokenizer's configuration; of several the default one."""
        try:
            return (self.path / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            pass
        given = self.tokenizer_config.get("chat_template")
        if isinstance(given, list):
            named = {str(item.get("name")): item.get("template") for item in given if isinstance(item, dict)}
            given = named.get("default") or next(iter(named.values()), None)
        return given if isinstance(given, str) and given else None

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).exists() for name in TOKENIZER_FILES)

    @cached_property
    def weights(self) -> tuple[int, list[str], int | None]:
        """Bytes of the weight files that are there, names of those that are missing or empty, bytes that there should be."""
        index = read_json(self.path / INDEX)
        if index is None:
            sizes = [_size(path) for path in sorted(self.path.glob("*.safetensors"))]
            return sum(sizes), [] if any(sizes) else ["model.safetensors"], None
        listed = index.get("weight_map")
        names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
        names = [name for name in names if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)]
        found = {name: _size(self.path / name) for name in names}
        meta = index.get("metadata")
        total = meta.get("total_size") if isinstance(meta, dict) else None
        wanted = int(total) if isinstance(total, int | float) and math.isfinite(total) else None
        return sum(found.values()), [name for name in names if not found[name]], wanted

    @cached_property
    def damaged(self) -> dict[str, str]:
        """Weight files that are not whole, with what is wrong: by their headers, which say how long each file is."""
        found = {}
        for path in sorted(self.path.glob("*.safetensors")):
            if not _size(path) or not path.is_file():
                continue
            try:
                read_header(path)
            except (OSError, ValueError) as error:
                found[path.name] = str(error)
        return found


def _size(path: Path) -> int:
    """Bytes of a file; 0 where it is not there (the cache's links may point to nothing)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def has_generation_marks(template: str) -> bool:
    """Whether a chat template marks the assistant's turns (trl/chat_template_utils.py, has_generation_markers)."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
