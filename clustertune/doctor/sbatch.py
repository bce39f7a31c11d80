"""Mistakes in batch scripts that are seen only in the queue, or never: found in front of it, with line and remedy.

Standard library only, Python 3.8 or later: ``python3 -m clustertune.doctor.sbatch FILE...`` runs on a bare login node.
Exit codes: 0 nothing found, 1 findings, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from clustertune.check.rule import printable
from clustertune.doctor import header_rules, secret_rules, signal_rules, task_rules
from clustertune.doctor.batch import read_batch
from clustertune.doctor.finding import Finding

MAX_BYTES = 256 * 1024
"""A batch script is some kB; Slurm itself refuses more than 4 MB (max_script_size)."""

_RULES = (
    header_rules.check_places,
    header_rules.check_options,
    header_rules.check_log_folder,
    header_rules.check_limits,
    signal_rules.check_signals,
    task_rules.check_expansion,
    task_rules.check_processes,
    task_rules.check_gpus,
    task_rules.check_cpus,
    task_rules.check_host,
    task_rules.check_port,
    secret_rules.check_secrets,
)


def lint(text: str, path: str, cwd: Path | None = None) -> list[Finding]:
    """The mistakes in a batch script, by line. ``cwd`` is where sbatch would be called: log folders lie below it.

    Any text is taken; nothing is run, and no file is read but for the question whether a log folder is there.
    """
    plain = text.lstrip("\ufeff").replace("\r\n", "\n")
    batch = read_batch(plain, path, cwd or Path.cwd())
    found = list(header_rules.check_file(batch, text))
    for rule in _RULES:
        found += rule(batch)
    return sorted(dict.fromkeys(found), key=lambda f: (f.line, f.rule))


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
    return [printable(f"{path}:{f.line}: {f.rule}: {f.message} -> {f.remedy}") for f in findings]


def as_json(found: Sequence[tuple[str, Sequence[Finding]]]) -> dict[str, object]:
    """The ``--json`` form, of each file its findings."""
    files = [{"file": path, "findings": [asdict(f) for f in findings]} for path, findings in found]
    return {"files": files, "findings": sum(len(findings) for _, findings in found)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of a bare login node."""
    parser = argparse.ArgumentParser(
        prog="python3 -m clustertune.doctor.sbatch", description="Look for mistakes in batch scripts."
    )
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
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
        sys.stdout.write(json.dumps(as_json(found), indent=2) + "\n")
    else:
        sys.stdout.write("".join(line + "\n" for path, findings in found for line in report(path, findings)))
    return 1 if any(findings for _, findings in found) else 0


if __name__ == "__main__":
    sys.exit(main())
