"""What the steps of a build fetch: all of it is held to a hash, or comes from the base's own archive.

A digest on ``From:`` says nothing of what ``%post`` downloads. The distribution's packages are exempt: their archive is
signed, and the bill of materials lists them. hadolint
(DL3013: versions in pip install) reads Dockerfiles only, and asks for versions and not for hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_SUM = r"\b(?:sha(?:256|384|512)|b2)sum\b"
_CHECKED = re.compile(rf"{_SUM}[^|;&]*\s(?:-c|--check)\b")
_COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
_START = r"""(?:^|[\s"'/(;&|])"""
_PIP = re.compile(rf"{_START}(?:pip[0-9.]*|uv\s+pip|python\S*\s+-m\s+pip)\b[^;&|]*\s(?:install|download|wheel)\s")
_HELD = re.compile(r"--require-hashes\b|--no-index\b")
_SHELL = r"(?:sudo\s+)?(?:ba|da|z)?sh\b"
_PIPED = re.compile(rf"\b(curl|wget)\b.*\|\s*{_SHELL}|{_SHELL}.*[$<]\(\s*(curl|wget)\b|<\(\s*(curl|wget)\b")
_NAMED = re.compile(r"\bapt(?:-get)?\b[^;&|]*\binstall\b[^;&|]*|\bcommand\s+-v\s+\S+")
"""Where a program is named and does not run."""
_LOADED = re.compile(rf"{_START}(curl|wget|aria2c)\s")
_CLONED = re.compile(rf"{_START}git\s+(?:-\S+\s+(?:\S+\s+)?)*(clone|fetch|pull|submodule)\b")
_OTHER = re.compile(
    rf"{_START}((?:conda|mamba|micromamba)\s+(?:install|create|update|env)|npm\s+(?:install|ci|i)|gem\s+install"
    r"|go\s+(?:install|get)|cargo\s+install|pipx\s+(?:install|run)|uvx|uv\s+(?:tool|sync|add)|npx)\s"
)
_ARCHIVE = re.compile(rf"{_START}(add-apt-repository|apt-key\s+(?:add|adv))\b")
_HASH_HINT = "lock it by its hash, and have make build-sif fetch it first"


def commands(lines: Sequence[str], first: int) -> Iterator[tuple[int, str]]:
    """Each command line with the number of its first line; a backslash joins lines, comments are left out."""
    text, start = "", first
    for number, line in enumerate(lines, first):
        if not text:
            start = number
            if line.lstrip().startswith("#"):
                continue
        text += line.rstrip()
        if text.endswith("\\"):
            text = text[:-1] + " "
            continue
        if text.strip():
            yield start, re.sub(r"\s#.*$", "", text.strip())
        text = ""
    if text.strip():
        yield start, text.strip()


def unheld(lines: Sequence[str], first: int) -> Iterator[tuple[int, str, str]]:
    """Line, what is fetched without being held to anything, and what to do instead. ``first``: the number of the first line."""
    found = list(commands(lines, first))
    whole = "\n".join(text for _, text in found)
    checked, commit = bool(_CHECKED.search(whole)), bool(_COMMIT.search(whole))
    for number, text in found:
        line = f" {_NAMED.sub('', text)} "
        if match := _PIPED.search(line):
            tool = next(group for group in match.groups() if group in ("curl", "wget"))
            yield number, f"what {tool} loads is run unseen", _HASH_HINT
        elif (match := _LOADED.search(line)) and not checked:
            yield number, f"what {match[1]} loads is held to no hash", f"sha256sum --check, or {_HASH_HINT}"
        if _PIP.search(line) and not _HELD.search(line):
            yield number, "pip takes what the index has today", "--require-hashes with a lock, and --no-index"
        if (match := _CLONED.search(line)) and not commit:
            yield number, f"git {match[1]} takes what the branch is today", "check out a commit by its 40 digits"
        if match := _OTHER.search(line):
            yield number, f"`{match[1].strip()}` takes what its index has today", _HASH_HINT
        if match := _ARCHIVE.search(line):
            yield number, f"{match[1].split()[0]} adds another archive", "take a base that has what is needed"
