"""The lock files: pip's requirements format with hashes, and a head: for which Python and platform, of which day."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertune.containers.pins import normal
from clustertune.errors import Problem, UserError

_HEAD = "# Made by `make lock` from containers/versions.env. Hashes are SHA-256 of the files that fit this Python and platform."
_FIELDS = ("lock", "python", "platform", "before", "from source", "on top of")
_FIELD = re.compile(rf"# ({'|'.join(_FIELDS)}): (.+)")
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.+!-]*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def platform_tags(platform: str) -> list[str]:
    """The wheels' platforms that run on a lock's, the newest first: glibc is upward compatible (PEP 600). None of ``any``."""
    arch, _, newest = platform.partition("-manylinux_2_")
    if not newest:
        return []
    old = (f"manylinux{name}_{arch}" for name in ("2014", "2010", "1"))
    return [*(f"manylinux_2_{minor}_{arch}" for minor in range(int(newest), 4, -1)), *old]


@dataclass(frozen=True)
class Entry:
    """One package: its version, and the SHA-256 of each file that may be installed."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def text(self) -> str:
        """As the lock spells it."""
        return " \\\n    ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{value}" for value in self.hashes)]) + "\n"


@dataclass(frozen=True)
class Lock:
    """A whole lock."""

    name: str
    python: str
    """``3.12``"""
    platform: str
    """``x86_64-manylinux_2_28`` or ``any``"""
    before: str
    """The day (UTC, 00:00) before which every file was published."""
    entries: Mapping[str, Entry]
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

    def with_layer(self, layer: Lock) -> Lock:
        """The same lock with the packages of a layer. Raises UserError where both have one, in different versions."""
        merged = dict(self.entries)
        for name, entry in layer.entries.items():
            if merged.setdefault(name, entry).version != entry.version:
                problem = f"{name} is {entry.version} here and {merged[name].version} in containers/{self.name}.lock"
                raise UserError(Problem(problem, f"containers/{layer.name}.lock", fix="run make lock"))
        sources = tuple(sorted({*self.from_source, *layer.from_source}))
        return Lock(self.name, self.python, self.platform, self.before, merged, sources, self.on_top_of)


def parse(text: str, file: str) -> Lock:
    """A lock's text. Raises UserError with everything in it that pip would not hold to a hash."""
    fields: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    problems = []
    body = []
    for line in text.splitlines():
        match = _FIELD.fullmatch(line)
        if match:
            fields[match[1]] = match[2]
        elif not line.startswith("#"):
            body.append(line)
    for logical in filter(None, (part.strip() for part in "\n".join(body).replace("\\\n", " ").split("\n"))):
        spec, *options = logical.split()
        named = _NAME.fullmatch(spec)
        hashes = [_HASH.fullmatch(option) for option in options]
        if not named or not all(hashes):
            problems.append(Problem(f"no NAME==VERSION with --hash=sha256:HEX: {logical[:80]!r}", file, fix="run make lock"))
        elif not hashes:
            problems.append(Problem("has no hash", file, named[1], "run make lock"))
        elif normal(named[1]) in entries:
            problems.append(Problem("stands twice", file, named[1], "run make lock"))
        else:
            name = normal(named[1])
            entries[name] = Entry(name, named[2], tuple(sorted(match[1] for match in hashes if match)))
    missing = [key for key in _FIELDS[:4] if key not in fields]
    problems += [Problem(f"its head does not say `{key}`", file, fix="run make lock") for key in missing]
    sources = tuple(fields.get("from source", "").split())
    problems += [
        Problem("is built from source and not in the lock", file, name, "run make lock")
        for name in sources
        if name not in entries
    ]
    if not entries:
        problems.append(Problem("no package", file, fix="run make lock"))
    if problems:
        raise UserError(problems)
    head = (fields["lock"], fields["python"], fields["platform"], fields["before"])
    return Lock(*head, entries, sources, fields.get("on top of", ""))


def read(path: Path) -> Lock:
    """A lock file. Raises UserError where it is missing or not a lock."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"cannot be read: {error}", str(path), fix="run make lock")) from error
    return parse(text, str(path))
