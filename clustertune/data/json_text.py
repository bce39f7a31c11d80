"""Parsing of JSON values that may be nested deeper than the interpreter recurses, with an exact word for a cut-off one.

The standard parser recurses (about 1,000 levels; fixed in C from Python 3.12 on), orjson and pydantic's jiter stop at 1,024 and
200, and a conversation tree of 5,000 messages is 10,000 levels: only such a text takes the loop of our own.
"""

from __future__ import annotations

import json
import re
from typing import Any

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_FRAGMENT = re.compile(r"[ \t\r\n]*[-+.\w]*\Z")
"""What may be left of a number or a literal that was cut."""


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
    except RecursionError:
        return parse_deep(text, at)
    except json.JSONDecodeError as error:
        # A \\uXXXX escape that ends with the text is reported as invalid, but was cut like any other open string.
        cut = error.msg.startswith("Unterminated") or ("uXXXX" in error.msg and '"' not in text[error.pos :])
        raise _wrong(text, error.pos, error.msg, cut=cut) from None
    except ValueError as error:  # an integer of more digits than int() takes (4,300)
        raise JsonError(str(error), at, truncated=False) from None


def parse_deep(text: str, at: int = 0) -> tuple[Any, int]:
    """As :func:`parse`, without recursion and about 20 times slower."""
    stack: list[Any] = []  # the open containers, and the keys under which values of the objects among them will stand
    keys: list[str] = []
    at = skip_space(text, at)
    while True:
        opening = text[at : at + 1]
        if opening in ("{", "["):
            value: Any = {} if opening == "{" else []
            at = skip_space(text, at + 1)
            if text[at : at + 1] != ("}" if opening == "{" else "]"):
                stack.append(value)
                at = _key(text, at, keys) if opening == "{" else at
                continue
            at += 1
        else:
            value, at = parse(text, at)
        while stack:
            at = skip_space(text, at)
            if isinstance(stack[-1], dict):
                stack[-1][keys.pop()], closing = value, "}"
            else:
                stack[-1].append(value)
                closing = "]"
            if text[at : at + 1] == ",":
                at = skip_space(text, at + 1)
                at = _key(text, at, keys) if closing == "}" else at
                break
            if text[at : at + 1] != closing:
                raise _wrong(text, at, f"expected ',' or '{closing}'")
            value, at = stack.pop(), at + 1
        else:
            return value, at


def _key(text: str, at: int, keys: list[str]) -> int:
    if text[at : at + 1] != '"':
        raise _wrong(text, at, "expected a key in double quotes")
    key, at = parse(text, at)
    keys.append(key)
    at = skip_space(text, at)
    if text[at : at + 1] != ":":
        raise _wrong(text, at, "expected ':'")
    return skip_space(text, at + 1)


def _wrong(text: str, at: int, message: str, *, cut: bool = False) -> JsonError:
    return JsonError(message, at, truncated=cut or _FRAGMENT.match(text, at) is not None)
