"""The doctor of one machine: ``python3 -m clustertune.doctor``. It needs PyYAML alone, and with ``--facts`` no package at all.

It looks at the machine alone. ``--facts`` prints what was seen as JSON, with the standard library of Python 3.8 or later;
``clustertune doctor`` has that run on every node.
Exit codes: 0 nothing found, 1 warnings, 2 what would stop or spoil a job, or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from clustertune.check import report as reports
from clustertune.check.machine import PLACES, Expects, Machine
from clustertune.check.rule import as_json, exit_code, printable, worst
from clustertune.doctor import wire
from clustertune.host.collect import collect
from clustertune.host.facts import HostFacts, from_dict


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m clustertune.doctor", description="Look at this machine for what stops or slows a training."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--all", action="store_true", help="also show what passed or could not be checked")
    parser.add_argument("--list", action="store_true", help="list the rules")
    parser.add_argument("--ignore", metavar="RULE", action="append", default=[], help="skip a rule; may be repeated")
    parser.add_argument("--place", choices=PLACES, help="where this is (default: detected)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit in seconds for the whole check (default: 30)")
    parser.add_argument("--gpus", type=int, help="number of GPUs the machine should have")
    parser.add_argument("--python", metavar="PATH", help="Python of the ranks (default: this one)")
    parser.add_argument("--from", dest="file", metavar="FILE", help="check facts that were printed with --facts")
    parser.add_argument("--facts", action="store_true", help="print the facts as JSON without checking them")
    parser.add_argument("--lines", action="store_true", help="with --facts: packed, in lines that srun does not split")
    parser.add_argument("--name", action="append", default=[], help="with --facts: a host whose name must resolve")
    parser.add_argument("--folder", action="append", default=[], help="with --facts: a folder to test file locks and mmap in")
    given = parser.parse_args(argv)
    if not 0 < given.seconds <= 3600:
        parser.error("--seconds must be above 0, and 3600 at most")
    if given.gpus is not None and given.gpus < 0:
        parser.error("--gpus must not be negative")
    unknown = sorted(set(given.ignore) - {rule.id for rule in reports.machine_rules()}) if given.ignore else []
    if unknown:
        parser.error(f"--ignore: there is no rule {', '.join(unknown)} (--list shows them)")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Look, and say what was found. Returns the exit code."""
    given = arguments_of(argv)
    if given.list:
        reports.put("".join(f"{rule.id}: {rule.title}\n" for rule in reports.machine_rules()))
        return 0
    try:
        facts = _facts(given)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        sys.stderr.write(printable(f"error: {given.file}: {reason} -> give a file of --facts") + "\n")
        return 2
    if given.facts:
        packed = wire.encode(facts, os.environ.get("SLURMD_NODENAME", "")) if given.lines else None
        lines = packed or [json.dumps(facts.as_dict(), indent=1)]
        reports.put("".join(line + "\n" for line in lines))
        return 0
    machine = Machine(facts, expects=Expects(gpus=given.gpus))
    report = reports.Report(reports.machine_findings(machine), tuple(given.ignore))
    if given.json:
        document = {"place": facts.place, "host": facts.hostname, "verdict": worst(report.counted)}
        reports.put(json.dumps({**document, "findings": as_json(report.counted)}, indent=2) + "\n")
    else:
        reports.put("".join(line + "\n" for line in report.lines(everything=given.all)))
        reports.put(printable(f"{facts.hostname} ({facts.place}): {report.summary()}") + "\n")
    return exit_code(report.counted)


def _facts(given: argparse.Namespace) -> HostFacts:
    """Those of a file, or of this machine."""
    if given.file:
        facts = from_dict(json.loads(Path(given.file).read_text(encoding="utf-8")))
        facts.place = given.place or facts.place
        return facts
    return collect(given.place, given.seconds, names=given.name, folders=given.folder, python=given.python)


if __name__ == "__main__":
    code = main()
    # Threads that wait for a driver or a server which is gone would keep the interpreter from ending.
    os._exit(code)
