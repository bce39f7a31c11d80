"""Lists of machines in Slurm's form: ``gpu[01-16],login``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from clustertune.config.cluster_schema import Host

NODES_A_LINE = 64
"""Nodes of one ``NodeName`` line: the lines stay readable, and a changed node changes one of them."""
LONGEST = 1000
"""Characters of a list of nodes; a longer one is written as ``ALL``."""


def fold(names: Sequence[str]) -> str:
    """The names as one expression, in their order: ``n08,n09,n10`` is ``n[08-10]``.

    Only a number at the end of a name can stand in brackets: Slurm refuses ``a[1-2]-x`` (slurm.conf(5), NodeName). Numbers
    with leading zeros keep their width.
    """
    pieces: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        prefix, number = _split(name)
        if number and pieces and pieces[-1][0] == prefix and pieces[-1][1]:
            runs = pieces[-1][1]
            if _follows(runs[-1][1], number):
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        else:
            pieces.append((prefix, [(number, number)] if number else []))
    return ",".join(_piece(prefix, runs) for prefix, runs in pieces)


def node_lines(hosts: Sequence[Host]) -> Iterator[tuple[str, str]]:
    """Names and addresses of the hosts, a pair of expressions for each line; both of a pair count alike.

    The address is empty where every machine of the line is reached by its name.
    """
    group: list[Host] = []
    for host in hosts:
        alike = group and _split(group[-1].name)[0] == _split(host.name)[0] and _split(host.name)[1]
        if group and not (alike and len(group) < NODES_A_LINE and _named(group[-1]) == _named(host)):
            yield _line(group)
            group = []
        group.append(host)
    if group:
        yield _line(group)


def _line(hosts: Sequence[Host]) -> tuple[str, str]:
    addresses = [host.address for host in hosts]
    return fold([host.name for host in hosts]), "" if _named(hosts[0]) else fold(addresses)


def _named(host: Host) -> bool:
    return host.address == host.name


def _split(name: str) -> tuple[str, str]:
    """A name without the number at its end, and that number: nine digits at most, and none of IPv6, which are hexadecimal."""
    match = re.fullmatch(r"(.*?)([0-9]{1,9})", name)
    if not match or ":" in name or match[1][-1:].isdigit():
        return name, ""
    return match[1], match[2]


def _follows(last: str, number: str) -> bool:
    padded = last.startswith("0") or number.startswith("0")
    return int(number) == int(last) + 1 and (len(number) == len(last) or not padded)


def _piece(prefix: str, runs: Sequence[tuple[str, str]]) -> str:
    if not runs:
        return prefix
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return prefix + runs[0][0]
    return f"{prefix}[{','.join(first if first == last else f'{first}-{last}' for first, last in runs)}]"
