"""NCCL's logs of any size, read in bounded memory, and what they say: as JSON, and in lines for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any

from clustertune.check.log_read import Log, LoggedDevice, read
from clustertune.check.rule import listed

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
    """What the files say together; ``-`` is standard input. Raises OSError, with the file's name."""

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


def summary(log: Log) -> Iterator[str]:
    """What a log says of the run, line by line for people."""
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


def _grouped(found: dict[str, list[LoggedDevice]]) -> Iterator[str]:
    """Devices of hosts that have the same ones, once."""
    groups: dict[str, list[str]] = {}
    for host, devices in found.items():
        groups.setdefault(", ".join(device.name for device in devices), []).append(host)
    for names, hosts in list(groups.items())[:8]:
        some = listed(sorted(hosts), 4)
        yield f"{names} ({some})" if some else names
