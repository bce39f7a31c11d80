"""Reads JSON files of processes that may be killed while they write: one object a line, or one a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file, for ``object_pairs_hook``. Raises ValueError where a key appears twice: readers differ in
    which one counts."""
    body = dict[str, Any]()
    for key, value in pairs:
        if key in body:
            raise ValueError(f"{key!r} appears twice")
        body[key] = value
    return body


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file in its order. Other lines (a killed writer's last) and missing files are skipped."""
    if not path.is_file():  # who opens a pipe waits without end
        return
    try:
        lines = path.open("rb")
    except OSError:
        return
    with lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty where there is no such file, or something else in it."""
    try:
        body = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def read_text(path: Path) -> str:
    """What a file holds, bytes that are not UTF-8 replaced; empty where it cannot be read (yet)."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
