"""The files of the tree, as the policy tests read them."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

from pathspec import GitIgnoreSpec

REPO = Path(__file__).resolve().parent.parent

DATA = {".json", ".jsonl", ".txt", ".parquet", ".svg", ".png", ".html"}
"""Endings of files that hold recorded or generated data, which nobody words."""


@cache
def files() -> tuple[str, ...]:
    """All but what .gitignore names: a rule holds before the commit, and on a machine without git."""
    ignored = GitIgnoreSpec.from_lines([".git", *(REPO / ".gitignore").read_text().splitlines()])
    found = []
    for folder, below, names in os.walk(REPO):
        prefix = "" if (at := Path(folder).relative_to(REPO).as_posix()) == "." else f"{at}/"
        below[:] = [name for name in below if not ignored.match_file(f"{prefix}{name}/")]
        found += [path for name in names if not ignored.match_file(path := f"{prefix}{name}")]
    return tuple(sorted(found))


@cache
def texts() -> dict[str, str]:
    """The UTF-8 text of every file that is text, by its name relative to the root."""
    found = {}
    for name in files():
        if (REPO / name).is_symlink():
            continue  # its text is its target's
        data = (REPO / name).read_bytes()
        if b"\0" not in data:
            found[name] = data.decode("utf-8")
    return found


def sources(folder: str = "") -> dict[str, str]:
    """The Python files below a folder."""
    return {name: text for name, text in texts().items() if name.endswith(".py") and name.startswith(folder)}


def code() -> dict[str, str]:
    """Everything that a person words or a machine runs: all text but data."""
    return {name: text for name, text in texts().items() if Path(name).suffix not in DATA}


parsed = cache(ast.parse)
"""The module of a source text, which nobody changes: several rules walk over each."""
