"""Known vulnerabilities of what is locked, from the OSV database (osv.dev), where it can be had.

Our own in place of pip-audit 2.10: that asks for one package a request (about 1,300 for the locks, here three of 500), asks for
torch's ``2.13.0+cpu``, which the database does not know, and brings 30 packages.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertune.containers.lockfile import Lock
from clustertune.containers.pins import FOLDER
from clustertune.errors import Problem, UserError

DATABASE = "https://api.osv.dev"
"""Documented at https://google.github.io/osv.dev/post-v1-querybatch/ ."""
ACCEPTED = FOLDER / "vulnerabilities.txt"
"""``ID reason``, a line each: what is known and lived with."""
TIMEOUT_SECONDS = 30
_BATCH = 500


class NoDatabase(Exception):
    """It cannot be reached, or answers something else."""


@dataclass(frozen=True)
class Known:
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


def ask(locks: Iterable[Lock], address: str = DATABASE) -> list[Known]:
    """What the database at ``address`` knows of the locked versions, each once. Raises NoDatabase where it does not answer."""
    pairs = sorted({(entry.name, entry.version.partition("+")[0]) for lock in locks for entry in lock.entries.values()})
    found = []
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        answers = _query(address, batch)
        if len(answers) != len(batch):
            raise NoDatabase(f"{address}: {len(answers)} answers to {len(batch)} questions")
        for (name, version), answer in zip(batch, answers, strict=True):
            found += [Known(name, version, str(item["id"])) for item in answer.get("vulns", [])]
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoDatabase(f"{address}: {reason}") from error
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise NoDatabase(f"{address}: an answer without results")
    return answers


def judge(found: Iterable[Known], lived_with: Mapping[str, str]) -> list[Problem]:
    """A problem for each package that the database knows something of and nobody gave a reason for."""
    by_package: dict[tuple[str, str], list[str]] = {}
    for known in found:
        if known.id not in lived_with:
            by_package.setdefault((known.package, known.version), []).append(known.id)
    fix = "move its pin, or write the id with a reason into containers/vulnerabilities.txt"
    return [
        Problem(f"{version}: {', '.join(ids)}", "containers/*.lock", name, fix) for (name, version), ids in by_package.items()
    ]
