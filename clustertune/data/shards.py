"""One shard: a part of a file of conversations as tokens with their labels, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustertune.config.native import train_fields
from clustertune.data import packing
from clustertune.data.tokenizer import training_template

BATCH = 256
"""Conversations per call of the tokenizer: 20 % faster than one by one."""
LABEL = np.uint32(1 << 31)
"""The bit of a token that carries a label. Vocabularies stay far below."""
_HEAD = 40
"""Bytes before a shard's records: their number (int64), and the SHA-256 of all that follows."""
RECORD = np.dtype([(name, packing.INDEX[name]) for name in packing.INDEX.names or () if name != "offset"])

Job = tuple[Path, int, int, Path]
"""A file, the first byte and the one behind the last of a shard's part of it, and the shard."""


class Refused(Exception):
    """A conversation that cannot be trained on: the byte that its line begins with, and why."""


@dataclass
class Encoder:
    """What a process tokenises with."""

    tokenizer: Any
    template: str
    answers: bool
    """Only the assistant's words carry labels."""

    @classmethod
    def of(cls, tokenizer: Any, train_args: Mapping[str, Any]) -> Encoder:
        """As a recipe's ``train`` section asks. Raises UserError where the template marks no answers."""
        asked = train_args.get("assistant_only_loss", train_fields()["assistant_only_loss"].default)
        return cls(tokenizer, training_template(tokenizer, marked=bool(asked)), bool(asked))

    def encode(self, conversations: list[list[dict[str, str]]]) -> Iterator[tuple[npt.NDArray[Any], tuple[int, ...]]]:
        """Tokens with their label bits, and length, first and last label and count of labels, of each conversation."""
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": self.answers}
        made = self.tokenizer.apply_chat_template(conversations, chat_template=self.template, **asked)
        for number, found in enumerate(made["input_ids"]):
            ids = np.asarray(found, np.uint32)
            if not self.answers:
                yield ids | LABEL, (len(ids), 0, len(ids) - 1, len(ids))
                continue
            mask = np.asarray(made["assistant_masks"][number], bool)
            places = np.flatnonzero(mask)
            first, last = (int(places[0]), int(places[-1])) if len(places) else (np.iinfo(np.int32).max, -1)
            yield np.where(mask, ids | LABEL, ids), (len(ids), first, last, len(places))

    def encode_lines(self, lines: list[tuple[int, bytes]]) -> Iterator[tuple[npt.NDArray[Any], tuple[int, ...]]]:
        """The same of lines, each with the place of its first byte. Raises Refused."""
        from jinja2 import TemplateError

        conversations = [json.loads(line)["messages"] for _, line in lines]
        try:
            found = list(self.encode(conversations))
        except TemplateError as error:
            for (place, _), conversation in zip(lines, conversations, strict=True):
                try:
                    list(self.encode([conversation]))
                except TemplateError as own:
                    raise Refused(place, f"the chat template refuses it: {own}") from None
            raise Refused(lines[0][0], f"the chat template refuses it: {error}") from None
        for (place, _), (ids, heads) in zip(lines, found, strict=True):
            if heads[3] == 0:
                raise Refused(place, "no token carries a label: the chat template marks no assistant's words in it")
            yield ids, heads


def look(conversation: list[dict[str, str]], tokenizer: Any, train_args: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of one conversation, and how many of them carry a label. Raises UserError."""
    ((_, (count, _, _, labelled)),) = Encoder.of(tokenizer, train_args).encode([conversation])
    return count, labelled


def make_shard(job: Job, encoder: Encoder) -> float:
    """Write one shard, whole or not at all. Returns the CPU seconds that it took. Raises Refused, OSError."""
    began = time.process_time()
    path, start, end, out = job
    heads: list[tuple[int, ...]] = []
    parts: list[npt.NDArray[Any]] = []
    lines = _lines(path, start, end)
    while batch := list(islice(lines, BATCH)):
        for ids, head in encoder.encode_lines(batch):
            parts.append(ids)
            heads.append(head)
    records = np.array(heads, RECORD)
    content = hashlib.sha256(records.tobytes())
    for part in parts:
        content.update(part.data)
    aside = out.with_suffix(f".{os.getpid()}.tmp")
    with aside.open("wb") as file:
        file.write(np.int64(len(records)).tobytes() + content.digest())
        for array in (records, *parts):
            array.tofile(file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(out)
    return time.process_time() - began


def _lines(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines whose first byte is in [start, end), each with its place."""
    with path.open("rb") as file:
        file.seek(max(start - 1, 0))
        if start:
            file.readline()  # the rest of a line that belongs to the chunk before
        while (place := file.tell()) < end and (line := file.readline()):
            yield place, line


def read_shard(path: Path) -> tuple[npt.NDArray[Any], memoryview] | None:
    """Records and tokens (bytes) of a shard; None where it is not there, cut off or damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _HEAD or hashlib.sha256(memoryview(data)[_HEAD:]).digest() != data[8:_HEAD]:
        return None
    count = int(np.frombuffer(data, "<i8", 1)[0])
    records = np.frombuffer(data, RECORD, count, _HEAD)
    return records, memoryview(data)[_HEAD + records.nbytes :]
