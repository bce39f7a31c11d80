"""Where a result lies and what it is called: two recipes never have one name, and what is published is not written over."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from clustertune.manifest import write_durably

LONGEST = 40
"""Characters of a file's name that tell overrides; the digest behind them tells all."""


def changes(overrides: Iterable[str]) -> list[str]:
    """What of the overrides makes another recipe of it, by key, the last of each.

    Those of ``slurm`` are left out: the name has the ranks, and a job has them where the same recipe by hand has none.
    """
    last = {text.partition("=")[0].strip(): text for text in overrides}
    return [last[key] for key in sorted(last) if key.partition(".")[0] != "slurm"]


def name_of(body: Mapping[str, Any]) -> str:
    """File name of a result without suffix."""
    kind = body["utilisation"].get("gpu") or ("gpu" if body["hardware"]["gpu"] else "cpu")
    ranks, changed = body["hardware"]["ranks"], body.get("overrides") or ()
    return file_name(body["recipe"], tiny=body["tiny"], synthetic=body["synthetic"], kind=kind, ranks=ranks, changed=changed)


def file_name(recipe: str, *, tiny: bool, synthetic: bool, kind: str, ranks: int, changed: Sequence[str]) -> str:
    """Recipe, what it ran on, how many ranks, and what the recipe was changed by: words, and a digest of them all."""
    parts = [recipe, "tiny" if tiny else "", "synthetic" if synthetic else "", kind, f"x{ranks}"]
    if changed:
        pairs = [_pair(text) for text in changed]
        words = "-".join(_words(key, value) for key, value in pairs)[:LONGEST].strip("-._")
        parts += [words, hashlib.sha256(json.dumps(pairs, default=str).encode()).hexdigest()[:6]]
    return "-".join(part for part in parts if part)


def _pair(text: str) -> tuple[str, Any]:
    """Key and value as YAML has it, so that ``False`` and ``false`` are one."""
    key, _, value = text.partition("=")
    try:
        return key.strip(), yaml.safe_load(value)
    except (ValueError, yaml.YAMLError):
        return key.strip(), value


def _words(key: str, value: Any) -> str:
    """The last part of the key with its value; of a path only its last part, which is no place of a machine."""
    told = value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else json.dumps(value, default=str)
    return re.sub(r"[^A-Za-z0-9._]+", "-", f"{key.rpartition('.')[2]}-{told}").strip("-")


def others(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Those of the files to be written that are there and hold something else. Raises OSError."""
    places = {folder / name: text for name, text in texts.items()}
    return [path for path, text in places.items() if path.exists() and path.read_bytes() != text.encode()]


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """All files of a result. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_durably(folder / name, text)
