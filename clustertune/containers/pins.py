"""``containers/versions.env``: every version that is installed anywhere, each once."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clustertune.errors import Problem, UserError, raise_if
from clustertune.tree import ROOT

FOLDER = ROOT / "containers"
FILE = FOLDER / "versions.env"
BASES = FOLDER / "base.env"

PY, DEV, BUILD, EXTRA, REF, TOOL, DATE = "PY", "DEV", "BUILD", "EXTRA", "REF", "TOOL", "DATE"
GROUPS = (PY, DEV, BUILD, EXTRA, REF, TOOL)
"""The stack, tools of tests and lint, tools of image builds, optional layers, the source document's stack, what uv runs."""
_VERSION = re.compile(rf"({'|'.join(GROUPS)})_([A-Z0-9_]+)=([0-9][^\s#]*)")
_DATE = re.compile(r"DATE_([A-Z0-9_]+)=(\d{4}-\d{2}-\d{2})")
_BASE = re.compile(r"([A-Z0-9_]+)=(\S+)")


@dataclass
class Pins:
    """What the file says: for each group the packages with their versions, and the dates of the locks."""

    groups: dict[str, dict[str, str]] = field(default_factory=lambda: {group: {} for group in GROUPS})
    dates: dict[str, str] = field(default_factory=dict)
    """Lock (or ``locks`` for all others) -> the day before which its files must have been published."""

    def __getitem__(self, group: str) -> dict[str, str]:
        return self.groups[group]

    def date_of(self, lock: str) -> str:
        """The day (UTC, 00:00) of a lock."""
        return self.dates.get(lock, self.dates["locks"])


def normal(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str, file: str = "containers/versions.env") -> Pins:
    """The pins of a text. Raises UserError with every line that is neither a pin, a date, a comment nor blank."""
    pins, problems = Pins(), []
    for number, line in enumerate(text.splitlines(), 1):
        version, date = _VERSION.fullmatch(line), _DATE.fullmatch(line)
        if version:
            group, name = pins[version[1]], normal(version[2])
            if name in group:
                problems.append(Problem(f"{name} is pinned twice", f"{file}:{number}", fix="leave one"))
            group[name] = version[3]
        elif date:
            pins.dates[normal(date[1])] = date[2]
        elif line and not line.startswith("#"):
            fix = "a version stands bare, without blanks"
            problems.append(Problem(f"no KEY=VERSION: {line!r}", f"{file}:{number}", fix=fix))
    if "locks" not in pins.dates:
        problems.append(Problem("missing", file, "DATE_LOCKS", "the day of the locks: DATE_LOCKS=2030-01-31"))
    raise_if(problems)
    return pins


def read(path: Path = FILE) -> Pins:
    """The pins of the tree."""
    return parse(path.read_text(), str(path))


def read_bases(path: Path = BASES) -> Mapping[str, str]:
    """The base images, by name and digest, and what a stand-in is made from."""
    bases = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line and not line.startswith("#"):
            match = _BASE.fullmatch(line)
            if not match:
                fix = "a value stands bare, without blanks"
                raise UserError(f"no KEY=VALUE: {line!r}", file=f"{path}:{number}", fix=fix)
            bases[match[1]] = match[2]
    return bases


def find_tool(name: str) -> str:
    """A program that the pins name: of this environment, else on PATH. Raises UserError where it is not here."""
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.is_file() else shutil.which(name)
    if not program:
        raise UserError(f"{name} is not here", fix="run make setup")
    return program
