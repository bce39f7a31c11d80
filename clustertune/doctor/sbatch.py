"""Mistakes in batch scripts that are seen only in the queue, or never: found in front of it, with line and remedy.

Standard library only, Python 3.8 or later: ``python3 -m clustertune.doctor.sbatch FILE...`` runs on a bare login node.
Exit codes: 0 nothing found, 1 findings, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from clustertune.check.report import put
from clustertune.check.rule import SCRIPT, Finding, checks, printable
from clustertune.check.script_batch import Batch

MAX_BYTES = 256 * 1024
"""A batch script is some kB; Slurm itself refuses more than 4 MB (max_script_size)."""


def lint(text: str, path: str, cwd: Path | None = None) -> list[Finding]:
    """The mistakes in a batch script, by line. ``cwd`` is where sbatch would be called: log folders lie below it.

    Any text is taken; nothing is run, and no file is read but for the question whether a log folder is there.
    """
    batch = Batch(text, path, cwd or Path.cwd())
    found = dict.fromkeys(item for rule in checks(SCRIPT) for item in rule(batch))
    return sorted(found, key=lambda item: (int(item.where), item.rule))


def lint_file(path: str) -> list[Finding]:
    """As :func:`lint`, of a file. Raises OSError, and ValueError where it cannot be a script."""
    file = Path(path)
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes: no batch script")
    if not file.is_file():
        raise ValueError("is not a file")
    return lint(file.read_bytes().decode("utf-8", errors="replace"), path)


def report(path: str, findings: Sequence[Finding]) -> list[str]:
    """One line a finding: ``FILE:LINE: rule: message -> remedy``."""
    return [printable(f"{path}:{f.where}: {f.rule}: {f.found} -> {f.fix}") for f in findings]


def as_json(found: Sequence[tuple[str, Sequence[Finding]]]) -> dict[str, object]:
    """The ``--json`` form, of each file its findings."""
    files = [{"file": path, "findings": [_as_json(f) for f in findings]} for path, findings in found]
    return {"files": files, "findings": sum(len(findings) for _, findings in found)}


def _as_json(item: Finding) -> dict[str, object]:
    names = {"rule": item.rule, "message": item.found, "remedy": item.fix, "link": item.link}
    return {"line": int(item.where), **names}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of a bare login node."""
    parser = argparse.ArgumentParser(
        prog="python3 -m clustertune.doctor.sbatch", description="Look for mistakes in batch scripts."
    )
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    given = parser.parse_args(arguments)
    found = []
    for path in given.files:
        try:
            found.append((path, lint_file(path)))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            sys.stderr.write(printable(f"error: {path}: {reason} -> give a batch script") + "\n")
            return 2
    if given.json:
        put(json.dumps(as_json(found), indent=2) + "\n")
    else:
        put("".join(line + "\n" for path, findings in found for line in report(path, findings)))
    return 1 if any(findings for _, findings in found) else 0


if __name__ == "__main__":
    sys.exit(main())
