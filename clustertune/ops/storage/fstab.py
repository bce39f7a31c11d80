"""What fstab and exports hold that is not ours, and whether it is at odds with what is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertune.config.cluster_schema import Brick
from clustertune.errors import Problem
from clustertune.host.mounts import MountLine, export_lines, unescape

FSTAB = "/etc/fstab"
_BLANKS = re.compile(r"[ \t]+")
"""What parts the fields of fstab; other blanks are letters of a path."""
_BY = {"UUID": "by-uuid", "LABEL": "by-label", "PARTUUID": "by-partuuid", "PARTLABEL": "by-partlabel"}


@dataclass(frozen=True)
class FstabEntry:
    """One line of fstab that mounts something."""

    number: int
    text: str
    source: str
    target: str
    """Without needless slashes; ``none`` for swap."""


def entries(lines: Iterable[tuple[int, str]]) -> list[FstabEntry]:
    """The mounts among numbered lines; comments and what is not an entry are skipped."""
    found = []
    for number, line in lines:
        fields = _BLANKS.split(line.strip(" \t\r"))
        if len(fields) < 2 or fields[0].startswith("#"):
            continue
        source, target = (unescape(field) for field in fields[:2])
        found.append(FstabEntry(number, line.strip(), source, os.path.normpath(target).replace("//", "/", 1)))
    return found


def taken(found: Iterable[FstabEntry], targets: Iterable[str]) -> Iterator[Problem]:
    """Lines that mount something else where we would: a second line for one place is an error for systemd."""
    ours = set(targets)
    for entry in found:
        if entry.target in ours:
            fix = "remove that line, or choose another path in the cluster file"
            yield Problem(
                f"{entry.target} is mounted by this line already: {entry.text[:200]}", f"{FSTAB}:{entry.number}", fix=fix
            )


def elsewhere(
    found: Iterable[FstabEntry], mounted: Iterable[MountLine], bricks: Iterable[Brick], *, live: bool
) -> dict[str, str]:
    """Devices of bricks that are mounted above the exported folder by other means, and where.

    ``live``: the lines are this machine's own, so a device's other names (``UUID=``, links of ``/dev``) can be followed.
    """
    places = [(entry.source, entry.target) for entry in found] + [(m.source, m.point) for m in mounted if m.root == "/"]
    result: dict[str, str] = {}
    for brick in bricks:
        for source, target in places:
            if brick.device and brick.path.startswith(target.rstrip("/") + "/") and _same(source, brick.device, live):
                result.setdefault(brick.device, target)
    return result


def _same(one: str, other: str, live: bool) -> bool:
    if one == other:
        return True
    key, _, value = one.partition("=")
    if key in _BY:
        one = f"/dev/disk/{_BY[key]}/{value.strip(chr(34))}"
    return live and one.startswith("/dev/") and os.path.realpath(one) == os.path.realpath(other)


# --- exports -----------------------------------------------------------------------------------------------------------


def exported(texts: Mapping[str, bytes], paths: Iterable[str]) -> Iterator[Problem]:
    """Other files that export one of our folders: the server would serve it as one of them says, and it is unknown which."""
    ours = set(paths)
    for file, text in texts.items():
        for number, line, folder in export_lines(text.decode(errors="replace")):
            if folder in ours:
                fix = "remove that line: the cluster file says to whom the folder is exported"
                yield Problem(f"{folder} is exported by this line already: {line[:200]}", f"{file}:{number}", fix=fix)


def other_exports(folder: Path, own: str) -> list[str]:
    """The names in ``/etc/exports.d`` that exportfs reads beside ``own``."""
    try:
        names = sorted(found.name for found in folder.iterdir())
    except OSError:
        return []
    return [name for name in names if name.endswith(".exports") and not name.startswith(".") and name != own]
