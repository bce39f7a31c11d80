"""One shard: a part of a file of conversations as tokens with their labels, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustertune.config.native_rules import train_fields
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


class RefusedConversation(Exception):
    """A conversation that cannot be trained on: the byte that its line begins with, and why."""


@dataclass
class Encoder:
    """What a process tokenises with."""

    tokenizer: Any
    template: str
    answers: bool
    """Only the assistant's turns carry labels."""
    completions: bool = True
    """Of prompt and completion, only the completion carries labels."""

    @classmethod
    def of(cls, tokenizer: Any, train_args: Mapping[str, Any]) -> Encoder:
        """As a recipe's ``train`` section asks. Raises UserError where the template marks no answers."""
        assistant_only = bool(train_args.get("assistant_only_loss", train_fields()["assistant_only_loss"].default))
        template = training_template(tokenizer, marked=assistant_only) if tokenizer.chat_template else ""
        return cls(tokenizer, template, assistant_only, train_args.get("completion_only_loss") is not False)

    def encode(self, examples: list[Mapping[str, Any]]) -> Iterator[tuple[npt.NDArray[Any], tuple[int, ...]]]:
        """Tokens with their label bits, and length, first and last label and count of labels, of each conversation.

        An example gives one; a preference gives two, prompt with chosen and prompt with rejected. As TRL 1.16 does it
        (``tokenize_fn`` of sft_trainer.py and of dpo_trainer.py).
        """
        prompts = iter(self._render([(row["prompt"], row.get("tools")) for row in examples if "prompt" in row], whole=False))
        whole = iter(self._render([(turns, row.get("tools")) for row in examples for turns in _whole(row)], whole=True))
        for row in examples:
            if "text" in row:
                end = self.tokenizer.eos_token or ""
                text = row["text"] if row["text"].endswith(end) else row["text"] + end
                ids = np.asarray(self.tokenizer(text)["input_ids"], np.uint32)
                yield _head(ids, np.ones(len(ids), bool))
                continue
            found = [next(whole) for _ in _whole(row)]
            if "prompt" in row:
                prompt, _ = next(prompts)
                begin = min(_common(prompt, ids) for ids, _ in found)
                if "rejected" in row or self.completions:
                    found = [(ids, mask & (np.arange(len(ids)) >= begin)) for ids, mask in found]
            yield from (_head(ids, mask) for ids, mask in found)

    def _render(self, chats: list[tuple[Any, Any]], *, whole: bool) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Tokens of chats with their tools, and which of them may carry a label. Not ``whole``: up to the answer."""
        marked = self.answers and whole
        arguments = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": marked}
        for tools, group in groupby(chats, key=lambda chat: chat[1]):  # one call takes chats of the same tools
            made = self.tokenizer.apply_chat_template(
                [turns for turns, _ in group],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=not whole,
                **arguments,
            )
            for number, found in enumerate(made["input_ids"]):
                ids = np.asarray(found, np.uint32)
                yield ids, np.asarray(made["assistant_masks"][number], bool) if marked else np.ones(len(ids), bool)

    def encode_lines(self, lines: list[tuple[int, bytes]]) -> Iterator[tuple[npt.NDArray[Any], tuple[int, ...]]]:
        """The same of lines, each with the place of its first byte. Raises Refused."""
        from jinja2 import TemplateError

        examples = [json.loads(line) for _, line in lines]
        try:
            found = list(self.encode(examples))
        except (TemplateError, TypeError, KeyError, ValueError) as error:  # a template's filter meets what it does not take
            for (location, _), example in zip(lines, examples, strict=True):
                try:
                    list(self.encode([example]))
                except (TemplateError, TypeError, KeyError, ValueError) as own:
                    raise RefusedConversation(location, f"the chat template refuses it: {own}") from None
            raise RefusedConversation(lines[0][0], f"the chat template refuses it: {error}") from None
        made = iter(found)
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


def _head(ids: npt.NDArray[Any], mask: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    places = np.flatnonzero(mask)
    first, last = (int(places[0]), int(places[-1])) if len(places) else (np.iinfo(np.int32).max, -1)
    return np.where(mask, ids | LABEL, ids), (len(ids), first, last, len(places))


def look(example: Mapping[str, Any], tokenizer: Any, train_args: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of one example, and how many of them carry a label. Raises UserError."""
    found = [head for _, head in Encoder.of(tokenizer, train_args).encode([example])]
    return sum(head[0] for head in found), sum(head[3] for head in found)


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
        while (offset := file.tell()) < end and (line := file.readline()):
            yield offset, line


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
