"""Parsing of JSON values that may be nested deeper than the interpreter recurses, with an exact word for a cut-off one.

The standard parser recurses (about 1,000 levels; fixed in C from Python 3.12 on), and a conversation tree of 5,000 messages
is 10,000 levels. It also does not tell a value that ends too early from one that is wrong in the middle.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERAL = re.compile(r"true|false|null|NaN|-?Infinity")
_VALUES = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_FRAGMENT = re.compile(r"[-+.\w]*\Z")
"""What may be left of a number or a literal that was cut."""
_OPEN = object()
"""Stands for "a container was opened, it has no value yet"."""


class JsonError(Exception):
    """Not JSON. ``truncated``: the text ends before the value does."""

    def __init__(self, message: str, position: int, *, truncated: bool) -> None:
        super().__init__(message)
        self.message = message
        self.position = position
        """Index into the text, from 0."""
        self.truncated = truncated


def skip_space(text: str, at: int) -> int:
    """Index of the first character at or after ``at`` that is not JSON white space."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def parse(text: str, at: int = 0) -> tuple[Any, int]:
    """The value that starts at ``at`` (after white space) and the index after it. Raises JsonError."""
    at = skip_space(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except (RecursionError, json.JSONDecodeError):
        return parse_deep(text, at)
    except ValueError as error:  # an integer of more digits than int() takes (4,300)
        raise JsonError(str(error), at, truncated=False) from None


def parse_deep(text: str, at: int = 0) -> tuple[Any, int]:
    """As :func:`parse`, without recursion and about 20 times slower."""
    stack: list[tuple[Any, str | None]] = []
    key: str | None = None
    at = skip_space(text, at)
    while True:
        opening = text[at : at + 1]
        value: Any = _OPEN
        if opening in ("{", "["):
            value, at = ({} if opening == "{" else []), skip_space(text, at + 1)
            if text[at : at + 1] == ("}" if opening == "{" else "]"):
                at += 1
            else:
                stack.append((value, key))
                key = None
                if opening == "{":
                    key, at = _key(text, at)
                continue
        else:
            value, at = _scalar(text, at)
        while stack:
            container, outer_key = stack[-1]
            at = skip_space(text, at)
            _attach(container, key, value)
            closing = "}" if isinstance(container, dict) else "]"
            mark = text[at : at + 1]
            if mark == ",":
                at = skip_space(text, at + 1)
                if closing == "}":
                    key, at = _key(text, at)
                break
            if mark != closing:
                raise _unexpected(text, at, f"expected ',' or '{closing}'")
            at += 1
            stack.pop()
            value, key = container, outer_key
        else:
            return value, at


def _attach(container: Any, key: str | None, value: Any) -> None:
    if isinstance(container, dict):
        container[key] = value
    else:
        container.append(value)


def _key(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] != '"':
        raise _unexpected(text, at, "expected a key in double quotes")
    key, at = _string(text, at)
    at = skip_space(text, at)
    if text[at : at + 1] != ":":
        raise _unexpected(text, at, "expected ':'")
    return key, skip_space(text, at + 1)


def _scalar(text: str, at: int) -> tuple[Any, int]:
    if text[at : at + 1] == '"':
        return _string(text, at)
    if match := _LITERAL.match(text, at):
        return _VALUES[match.group()], match.end()
    if match := _NUMBER.match(text, at):
        fraction, exponent = match.groups()
        try:
            return (float if fraction or exponent else int)(match.group()), match.end()
        except ValueError as error:
            raise JsonError(str(error), at, truncated=False) from None
    raise _unexpected(text, at, "expected a value")


def _string(text: str, at: int) -> tuple[str, int]:
    try:
        value, end = scanstring(text, at + 1, True)
    except json.JSONDecodeError as error:
        # A \\uXXXX escape that ends with the text is reported as invalid, but was cut like any other open string.
        cut = error.msg.startswith("Unterminated") or ("uXXXX" in error.msg and '"' not in text[error.pos :])
        raise JsonError(error.msg, error.pos, truncated=cut) from None
    return str(value), int(end)


def _unexpected(text: str, at: int, message: str) -> JsonError:
    return JsonError(message, at, truncated=_FRAGMENT.match(text, at) is not None)
