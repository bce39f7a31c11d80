"""The lock files: pip's requirements format with hashes, and a head: for which Python and platform, of which day."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertune.containers.pins import FOLDER, normal
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


def parse(text: str, file: str) -> PackageLock:
    """A lock's text. Raises UserError with everything in it that pip would not hold to a hash."""
    fields: dict[str, str] = {}
    entries: dict[str, LockedPackage] = {}
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
            problems.append(Problem("appears twice", file, named[1], "run make lock"))
        else:
            name = normal(named[1])
            entries[name] = LockedPackage(name, named[2], tuple(sorted(match[1] for match in hashes if match)))
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
    return PackageLock(*head, entries, sources, fields.get("on top of", ""))


def read(path: Path) -> PackageLock:
    """A lock file. Raises UserError where it is missing or not a lock."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"cannot be read: {error}", str(path), fix="run make lock")) from error
    return parse(text, str(path))


# --- vulnerabilities ------------------------------------------------------------------------------------------------------

# Known vulnerabilities of what is locked, from the OSV database (osv.dev), where it can be had.
#
# Our own in place of pip-audit 2.10: that asks for one package a request (about 1,300 for the locks, here three of 500), asks
# for torch's ``2.13.0+cpu``, which the database does not know, and brings 30 packages.

DATABASE = "https://api.osv.dev"
"""Documented at https://google.github.io/osv.dev/post-v1-querybatch/ ."""
ACCEPTED = FOLDER / "vulnerabilities.txt"
"""``ID reason``, a line each: what is known and lived with."""
TIMEOUT_SECONDS = 30
_BATCH = 500


class NoDatabase(Exception):
    """It cannot be reached, or answers something else."""


@dataclass(frozen=True)
class Vulnerability:
    """One entry of the database that concerns a locked version."""

    package: str
    version: str
    id: str


def accepted(path: Path = ACCEPTED) -> Mapping[str, str]:
    """Ids that are lived with, each with its reason. Raises UserError for a line without one."""
    found, problems = {}, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line and not line.startswith("#"):
            name, _, reason = line.partition(" ")
            found[name] = reason.strip()
            if not reason.strip():
                problems.append(
                    Problem(f"{name} without a reason", f"{path}:{number}", fix="write why it does not matter here")
                )
    if problems:
        raise UserError(problems)
    return found


def ask(locks: Iterable[PackageLock], address: str = DATABASE) -> list[Vulnerability]:
    """What the database at ``address`` knows of the locked versions, each once. Raises NoDatabase where it does not answer."""
    pairs = sorted({(entry.name, entry.version.partition("+")[0]) for lock in locks for entry in lock.entries.values()})
    found = []
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        answers = _query(address, batch)
        if len(answers) != len(batch):
            raise NoDatabase(f"{address}: {len(answers)} answers to {len(batch)} questions")
        for (name, version), answer in zip(batch, answers, strict=True):
            found += [Vulnerability(name, version, str(item["id"])) for item in answer.get("vulns", [])]
    return found


def _query(address: str, pairs: list[tuple[str, str]]) -> list[Mapping[str, list[Mapping[str, object]]]]:
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in pairs]
    if not address.startswith(("https://", "http://")):
        raise NoDatabase(f"{address}: no web address")
    request = urllib.request.Request(  # noqa: S310 (the scheme is looked at above)
        f"{address}/v1/querybatch", json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310
            answers = json.load(response)["results"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoDatabase(f"{address}: {reason}") from error
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise NoDatabase(f"{address}: an answer without results")
    return answers


def judge(found: Iterable[Vulnerability], lived_with: Mapping[str, str]) -> list[Problem]:
    """A problem for each package with a known vulnerability and no written reason to keep it."""
    by_package: dict[tuple[str, str], list[str]] = {}
    for known in found:
        if known.id not in lived_with:
            by_package.setdefault((known.package, known.version), []).append(known.id)
    fix = "move its pin, or write the id with a reason into containers/vulnerabilities.txt"
    return [
        Problem(f"{version}: {', '.join(ids)}", "containers/*.lock", name, fix) for (name, version), ids in by_package.items()
    ]
