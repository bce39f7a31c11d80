"""Reads NCCL's logs on a bare login node and says what is wrong: ``python3 -m clustertune.nccl_check.log FILE...``

Standard library only, Python 3.8 or later. The logs of all ranks and nodes may be given together, of any version of NCCL from
2.10 on; a file may be a job's whole output. ``-`` reads standard input. Exit codes: 0 nothing to fix, 1 warnings, 2 failures,
or a file that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any

from clustertune.check.log_read import Log, LoggedDevice, read
from clustertune.check.report import describe, put
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Finding, as_json, exit_code, listed, printable, worst
from clustertune.nccl_check.judge import headline, judge_log

BLOCK = 8 * 2**20
"""Bytes that are read at once: a log of many gigabytes needs no more memory."""
SHOWN_SETTINGS = 40


def blocks(file: IO[bytes]) -> Iterator[str]:
    """The text of a file in pieces that end with a line, or that are as long as two blocks."""
    rest = b""
    while True:
        data = file.read(BLOCK)
        if not data:
            break
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) > BLOCK:
            cut = len(data)
        rest = data[cut:]
        yield data[:cut].decode("utf-8", errors="replace")
    yield rest.decode("utf-8", errors="replace")


def read_files(paths: Sequence[str]) -> Log:
    """What the files say together. Raises OSError, with the file's name."""

    def pieces() -> Iterator[str]:
        for path in paths:
            with ExitStack() as stack:
                yield from blocks(sys.stdin.buffer if path == "-" else stack.enter_context(open(path, "rb")))  # noqa: PTH123
            yield "\n"

    return read(pieces())


def as_dict(log: Log) -> dict[str, Any]:
    """What a log says, as JSON."""
    return {
        "lines": log.lines,
        "versions": _sorted(log.versions),
        "cuda": sorted(log.cuda),
        "driver_cuda": _sorted(log.drivers),
        "hosts": sorted(log.hosts),
        "nodes": log.node_count(),
        "ranks": log.ranks,
        "networks": _sorted(log.networks),
        "between_nodes": dict(log.between().most_common()),
        "transports": dict(log.transports.most_common()),
        "channels": {str(number): dict(log.channels[number].most_common()) for number in sorted(log.channels)},
        "bootstrap": _devices(log.bootstrap),
        "sockets": _devices(log.sockets),
        "adapters": _devices(log.adapters),
        "plugins": _sorted(log.plugins),
        "gdr_disabled": _sorted(log.gdr_off),
        "gdr_enabled": _sorted(log.gdr_on),
        "rings": log.rings,
        "trees": log.trees,
        "channel_counts": log.counts,
        "gpu_paths": dict(log.gpu_paths.most_common()),
        "algorithms": dict(log.algorithms.most_common()),
        "settings": {name: _sorted(values) for name, values in sorted(log.settings.items())},
        "communicators": {"started": log.started, "complete": log.complete},
        "average_gb_s": log.average_gb_s,
        "faults": [{**fault._asdict(), "times": times} for fault, times in log.faults.most_common(50)],
    }


def _sorted(found: dict[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(hosts - {""}) for name, hosts in sorted(found.items())}


def _devices(found: dict[str, list[LoggedDevice]]) -> dict[str, list[str]]:
    return {host: [" ".join(device).strip() for device in devices] for host, devices in sorted(found.items())}


def show(log: Log, findings: Sequence[Finding], verdict: str) -> Iterator[str]:
    """The report for people, line by line."""
    yield verdict
    cuda = f" (CUDA {', '.join(sorted(log.cuda))})" if log.cuda else ""
    yield f"  version      {', '.join(sorted(log.versions)) + cuda if log.versions else 'not logged'}"
    if log.ranks or log.hosts:
        yield f"  size         {log.ranks or '?'} ranks on {log.node_count() or '?'} nodes"
    for title, counted in (("transports", log.transports), ("between nodes", log.between())):
        if counted:
            yield f"  {title:<12} {', '.join(f'{name} ({times})' for name, times in counted.most_common())}"
    if log.networks:
        yield f"  network      {', '.join(sorted(log.networks))}"
    for title, found in (("interfaces", log.sockets or log.bootstrap), ("adapters", log.adapters)):
        for line in _grouped(found):
            yield f"  {title:<12} {line}"
    if log.counts or log.rings:
        counts = ", ".join(f"{number} {kind}" for kind, number in log.counts.items() if number)
        yield f"  channels     {counts or log.rings}{', trees' if log.trees else ''}"
    if log.settings:
        given = [f"{name}={'|'.join(sorted(values))}" for name, values in sorted(log.settings.items())]
        yield f"  settings     {' '.join(given[:SHOWN_SETTINGS])}"
    for item in findings:
        if item.status in (FAIL, WARN):
            yield from describe(item, [item.where] if item.where else [], 5)
    passed = sum(item.status == PASS for item in findings)
    unknown = sum(item.status == UNKNOWN for item in findings)
    yield f"{passed} rules passed" + (f", {unknown} could not be judged" if unknown else "")


def _grouped(found: dict[str, list[LoggedDevice]]) -> Iterator[str]:
    """Devices of hosts that have the same ones, once."""
    groups: dict[str, list[str]] = {}
    for host, devices in found.items():
        groups.setdefault(", ".join(device.name for device in devices), []).append(host)
    for names, hosts in list(groups.items())[:8]:
        some = listed(sorted(hosts), 4)
        yield f"{names} ({some})" if some else names


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of a bare login node."""
    parser = argparse.ArgumentParser(
        prog="python3 -m clustertune.nccl_check.log",
        description="Read logs of NCCL (NCCL_DEBUG=INFO), and say which transports it used and what is wrong.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="logs of any ranks and nodes of one run; - for standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    given = parser.parse_args(arguments)
    try:
        log = read_files(given.files)
    except OSError as error:
        return _refuse(f"{error.filename or given.files[0]}: {error.strerror or error}", "give a log of NCCL")
    if not log.lines and not log.faults and not log.versions:
        return _refuse(f"{', '.join(given.files)}: no line of NCCL", "run the job with NCCL_DEBUG=INFO")
    findings = judge_log({}, log)
    verdict = headline({}, log, findings)
    if given.json:
        document = {"status": worst(findings), "headline": verdict, "log": as_dict(log), "findings": as_json(findings)}
        put(json.dumps(document, indent=2) + "\n")
    else:
        put("".join(f"{printable(line)}\n" for line in show(log, findings, verdict)))
    return exit_code(findings)


def _refuse(message: str, fix: str) -> int:
    sys.stderr.write(printable(f"error: {message} -> {fix}") + "\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
