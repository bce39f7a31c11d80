"""The files of the tree, as the policy tests read them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent

DATA = {".json", ".jsonl", ".txt", ".parquet", ".svg", ".png", ".html"}
"""Endings of files that hold recorded or generated data, which nobody words."""


@cache
def files() -> tuple[str, ...]:
    """What git tracks, and what it does not track yet and does not ignore: a rule holds before the commit."""
    listed = subprocess.run(
        ["git", "-C", str(REPO), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    return tuple(sorted(name for name in listed.stdout.decode().split("\0") if name and (REPO / name).is_file()))


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
