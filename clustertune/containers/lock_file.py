"""The lock files of ``containers/``: pip's requirements format with hashes, and a head with Python, platform and day."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from clustertune.containers.pins import FOLDER
from clustertune.errors import Problem, UserError

_HEAD = "# Made by `make lock` from containers/versions.env. Hashes are SHA-256 of the files that fit this Python and platform."
_FIELD = re.compile(r"^# (lock|python|platform|before|from source|on top of): (.+)$", re.MULTILINE)
_PACKAGE = re.compile(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def path_of(name: str) -> Path:
    """The file of a lock."""
    return FOLDER / f"{name}.lock"


def text_digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def platform_tags(platform: str) -> list[str]:
    """The wheels' platforms that run on a lock's, the newest first: glibc is upward compatible (PEP 600). None of ``any``."""
    arch, _, newest = platform.partition("-manylinux_2_")
    if not newest:
        return []
    old = (f"manylinux{name}_{arch}" for name in ("2014", "2010", "1"))
    return [*(f"manylinux_2_{minor}_{arch}" for minor in range(int(newest), 4, -1)), *old]


@dataclass(frozen=True)
class LockedPackage:
    """One package: its version, and the SHA-256 of each file that may be installed."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def text(self) -> str:
        """As the lock spells it."""
        return " \\\n    ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{value}" for value in self.hashes)]) + "\n"


@dataclass(frozen=True)
class PackageLock:
    """A whole lock."""

    name: str
    python: str
    """``3.12``"""
    platform: str
    """``x86_64-manylinux_2_28`` or ``any``"""
    before: str
    """The day (UTC, 00:00) before which every file was published."""
    entries: Mapping[str, LockedPackage]
    from_source: tuple[str, ...] = ()
    """Packages that have no wheel: their wheels are built from the hashed source archive."""
    on_top_of: str = ""
    """The lock whose packages it adds to."""

    def text(self) -> str:
        """The file's text."""
        head = {"lock": self.name, "python": self.python, "platform": self.platform, "before": self.before}
        if self.from_source:
            head["from source"] = " ".join(self.from_source)
        if self.on_top_of:
            head["on top of"] = self.on_top_of
        lines = [_HEAD, *(f"# {key}: {value}" for key, value in head.items())]
        return "\n".join(lines) + "\n\n" + "".join(self.entries[name].text() for name in sorted(self.entries))

    def with_layer(self, layer: PackageLock) -> PackageLock:
        """The same lock with the packages of a layer. Raises UserError where both have one, in different versions."""
        merged = dict(self.entries)
        for name, entry in layer.entries.items():
            if merged.setdefault(name, entry).version != entry.version:
                problem = f"{name} is {entry.version} here and {merged[name].version} in containers/{self.name}.lock"
                raise UserError(Problem(problem, f"containers/{layer.name}.lock", fix="run make lock"))
        sources = tuple(sorted({*self.from_source, *layer.from_source}))
        return PackageLock(self.name, self.python, self.platform, self.before, merged, sources, self.on_top_of)


def locked_packages() -> frozenset[str]:
    """The names of all packages that an image of this checkout can hold: those of every lock."""
    return frozenset(name for path in FOLDER.glob("*.lock") for name, _, _ in _PACKAGE.findall(path.read_text()))


def parse(text: str, file: str) -> PackageLock:
    """A lock's text. Raises UserError where it is not, line by line, as ``make lock`` writes it.

    One line without a hash would turn hash checking off for what it names.
    """
    head = dict(_FIELD.findall(text))
    entries = {
        name: LockedPackage(name, version, tuple(re.findall(r"sha256:(\w+)", hashes)))
        for name, version, hashes in _PACKAGE.findall(text)
    }
    name, python, platform, before = (head.get(key, "") for key in ("lock", "python", "platform", "before"))
    sources = tuple(head.get("from source", "").split())
    lock = PackageLock(name, python, platform, before, entries, sources, head.get("on top of", ""))
    for line, written in zip_longest(text.splitlines(), lock.text().splitlines(), fillvalue=""):
        if line != written:
            message = f"was edited by hand: it has {line[:80]!r} in the place of {written[:80]!r}"
            raise UserError(message, file=file, fix="run make lock")
    return lock


def read(path: Path) -> PackageLock:
    """A lock file. Raises UserError where it is missing or not a lock."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"cannot be read: {error}", str(path), fix="run make lock")) from error
    return parse(text, str(path))
