"""What stands in a file of Slurm's form that others wrote: settings and records, and what of it a new one lacks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clustertune.host.credentials import mask_settings

RECORDS = ("nodename", "partitionname", "downnodes", "nodeset", "frontendname", "name")
"""Keys that stand several times, each with a name (``Name`` in gres.conf)."""
_PAIR = re.compile(r'(?<!\S)[\w.]+ ?[-*+/]?= ?(?:"[^"]*"|\S+)(?= |$)')
"""One of several settings that stand in one line, as Slurm's own parser takes them."""


@dataclass(frozen=True)
class ConfEntry:
    """One setting, or one record."""

    line: int
    """From 1."""
    key: str
    """Lower case; of a record with its name: ``partitionname=debug``."""
    text: str
    """The line without comment, with single blanks; secrets are hidden."""


def entries(text: str) -> list[ConfEntry]:
    """The settings of ``slurm.conf``, ``gres.conf``, ``cgroup.conf`` or ``slurmdbd.conf``; lines ended by ``\\`` continue."""
    found = []
    pending, start = list[str](), 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = re.sub(r"(?<!\\)#.*", "", raw.rstrip("\r"))
        start = start or number
        pending.append(line.removesuffix("\\"))
        if line.endswith("\\"):
            continue
        joined = " ".join(" ".join(pending).split())
        found += [ConfEntry(start, _key(shown), shown) for shown in map(mask_settings, _parts(joined))]
        pending, start = [], 0
    return found


def _parts(text: str) -> list[str]:
    """The settings of one line; a record is one, and so is what is none."""
    pairs = _PAIR.findall(text)
    if _key(text).partition("=")[0] in RECORDS or " ".join(pairs) != text:
        return [text] if text else []
    return pairs


def _key(text: str) -> str:
    if text.lower().startswith("include "):
        return text.lower()
    key, _, value = text.partition("=")
    key = key.strip().lower()
    return f"{key}={(value.split() or [''])[0]}" if key in RECORDS else key


def losses(before: str, after: str) -> list[str]:
    """What of ``before`` is not in ``after``, and what has another value there; a sentence each, with the line."""
    ours = {entry.key: entry for entry in entries(after)}
    lines = []
    for entry in entries(before):
        new = ours.get(entry.key)
        if new is None:
            lines.append(f"line {entry.line} is lost: {entry.text}")
        elif _same(new.text) != _same(entry.text):
            lines.append(f"line {entry.line} changes: {entry.text} becomes {new.text}")
    return lines


def repeated(outside: Sequence[tuple[int, str]], block: Sequence[str]) -> list[tuple[int, str]]:
    """Lines of an operator that set again what our block sets: Slurm takes the last one. Records of other names are no such."""
    ours = {entry.key for entry in entries("\n".join(block))}
    lines = []
    for number, text in outside:
        lines += [(number, entry.text) for entry in entries(text) if entry.key in ours]
    return lines


def settings(text: str) -> dict[str, str]:
    """Key to its line, of the settings and records."""
    return {entry.key: entry.text for entry in entries(text)}


def _same(text: str) -> str:
    return re.sub(r"\s*=\s*", "=", text).lower()
