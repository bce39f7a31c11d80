"""Rows that hold one conversation each: ``alpaca``, ``messages``, ``lima``."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from clustertune.data.rejects import BadRow, Place, Rejects, excerpt

MAX_MESSAGE_BYTES = 10_000_000
"""UTF-8 bytes of a message from which on it is refused (10 MB): that is a file somebody pasted, not a turn to learn."""


@dataclass(frozen=True)
class Conversation:
    """One conversation for the model."""

    messages: list[dict[str, str]]
    """``role`` (system, user, assistant) and ``content``."""
    source: dict[str, Any]
    """Where it comes from; ``tree`` names it in every format."""
    key: str
    """What the split goes by: the tree's id, or the hash of the messages, so that a copy never lands in the other split."""
    split: str | None = None
    """The split that the input says, if it does."""


def require(row: dict[str, Any], key: str, kind: type, *, optional: bool = False, name: str | None = None) -> Any:
    """The value of a column. Raises BadRow where it is missing, of another type or (a str) not representable in UTF-8.

    ``optional``: missing and null are both None. ``name`` is what to call the column in the message.
    """
    name = name or key
    value = row.get(key)
    if value is None:
        if optional:
            return None
        raise BadRow("wrong-column", f"{name} is {'null' if key in row else 'missing'}")
    if not isinstance(value, kind):
        raise BadRow("wrong-column", f"{name} is {excerpt(value)}, not {_KINDS[kind]}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow("not-utf8", f"{name} holds a lone surrogate at character {error.start + 1}") from None
    return value


_KINDS: dict[type, str] = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


def check_text(row: dict[str, Any], key: str, name: str | None = None) -> str:
    """The text of a message. Raises BadRow where there is none, or too much."""
    text: str = require(row, key, str, name=name)
    if all(char.isspace() or unicodedata.category(char) == "Cf" for char in text):  # zero-width characters show nothing
        raise BadRow("empty-text", f"{name or key} is empty")
    # Only a text of a quarter of the limit can exceed it: a character has at most 4 bytes.
    if len(text) * 4 >= MAX_MESSAGE_BYTES and (size := len(text.encode())) >= MAX_MESSAGE_BYTES:
        raise BadRow("message-too-long", f"{name or key} has {size} bytes, the limit is {MAX_MESSAGE_BYTES}")
    return text


def read_alpaca(row: dict[str, Any]) -> list[dict[str, str]]:
    """``instruction``, optional ``input``, ``output``; the input follows the instruction after a blank line."""
    prompt = check_text(row, "instruction")
    extra: str | None = require(row, "input", str, optional=True)
    if extra and extra.strip():
        prompt = f"{prompt}\n\n{check_text(row, 'input')}"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": check_text(row, "output")}]


def read_messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """``messages``: an optional system message, then user and assistant in turn; the assistant has the last word."""
    found: list[dict[str, str]] = []
    for index, entry in enumerate(require(row, "messages", list)):
        name = f"messages[{index}]"
        if not isinstance(entry, dict):
            raise BadRow("wrong-column", f"{name} is {excerpt(entry)}, not an object")
        role = require(entry, "role", str, name=f"{name}.role")
        if role not in ("system", "user", "assistant"):
            raise BadRow("unknown-role", f"{name}.role {excerpt(role)}, known are system, user and assistant")
        expected = "assistant" if found and found[-1]["role"] == "user" else "user"
        if role != expected and not (role == "system" and not found):
            raise BadRow("wrong-turn", f"{name} is a {role} message where a {expected} message must stand")
        found.append({"role": role, "content": check_text(entry, "content", f"{name}.content")})
    return _ended(found, "messages")


def read_lima(row: dict[str, Any]) -> list[dict[str, str]]:
    """``conversations``: texts of user and assistant in turn."""
    found = []
    for index, text in enumerate(require(row, "conversations", list)):
        content = check_text({"turn": text}, "turn", f"conversations[{index}]")
        found.append({"role": "assistant" if index % 2 else "user", "content": content})
    return _ended(found, "conversations")


def _ended(found: list[dict[str, str]], column: str) -> list[dict[str, str]]:
    if not found:
        raise BadRow("empty-text", f"{column} is empty")
    if found[-1]["role"] != "assistant":
        raise BadRow("unanswered", f"{column} ends with a {found[-1]['role']} message")
    return found


READERS: dict[str, Callable[[dict[str, Any]], list[dict[str, str]]]] = {
    "alpaca": read_alpaca,
    "messages": read_messages,
    "lima": read_lima,
}


def conversations(
    format_name: str, records: Iterable[tuple[Place, dict[str, Any]]], rejects: Rejects
) -> Iterator[Conversation]:
    """One conversation per good row, in file order."""
    read = READERS[format_name]
    for place, row in records:
        try:
            messages = read(row)
        except BadRow as bad:
            rejects.add(place, bad.reason, bad.detail)
            continue
        source = {"tree": f"{place.file}:{place.row}", "file": place.file, "row": place.row}
        key = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
        yield Conversation(messages, source, key, place.split)
