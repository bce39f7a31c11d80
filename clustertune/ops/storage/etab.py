"""What the NFS server exports now: ``/var/lib/nfs/etab``, which exportfs writes (exportfs(8))."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from clustertune.ops.bounded import ask_all

ETAB = "/var/lib/nfs/etab"
_CLIENT = re.compile(r"(\S+?)\(([^)]*)\)")
_REQUIRED = ("rw", "sync", "root_squash", "no_subtree_check")
"""The options that etab writes as exports does."""


def read(path: Path = Path(ETAB)) -> str:
    """The text of etab; empty where there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def clients(text: str) -> dict[tuple[str, str], frozenset[str]]:
    """The options of each exported folder and client."""
    found = {}
    for line in text.splitlines():
        folder, *rest = line.split(None, 1)
        for client, options in _CLIENT.findall(rest[0] if rest else ""):
            found[folder, client] = frozenset(options.split(","))
    return found


def faults(lines: Iterable[str], text: str, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Folders that the server does not export as our ``lines`` say, each with what is wrong; ``names`` of :func:`canonical`."""
    now = clients(text)
    for (folder, client), options in clients("\n".join(lines)).items():
        seen = now.get((folder, _written(client, folder, now, names)))
        if seen is None:
            yield folder, f"is not exported to {client}"
        elif lost := [option for option in _REQUIRED if option in options and option not in seen]:
            yield folder, f"is exported to {client} without {', '.join(lost)}"


def others(lines: Iterable[str], text: str, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Our folders that the server exports to machines that our ``lines`` do not name, with their names."""
    now = clients(text)
    ours = {(folder, _written(client, folder, now, names)) for folder, client in clients("\n".join(lines))}
    folders = {folder for folder, _ in ours}
    yield from ((folder, client) for folder, client in now if folder in folders and (folder, client) not in ours)


def _written(client: str, folder: str, now: Mapping[tuple[str, str], frozenset[str]], names: Mapping[str, str]) -> str:
    """The client as etab writes it: a network may stand there with its mask written out, a host by its full name."""
    if (folder, client) in now:
        return client
    if "/" not in client:
        return names.get(client, client)
    network = ipaddress.ip_network(client)
    return f"{network.network_address}/{network.netmask}"


def canonical(lines: Iterable[str], text: str, seconds: float) -> dict[str, str]:
    """Full names of those clients of our ``lines`` that etab does not name as we do: exportfs asks the resolver for them."""
    now = {client for _, client in clients(text)}
    requested = {client for _, client in clients("\n".join(lines)) if "/" not in client and client not in now}
    answers = ask_all({client: partial(_resolve, client) for client in requested}, seconds)
    return {client: answer.found["name"] for client, answer in answers.items() if answer.found}


def _resolve(client: str) -> dict[str, str]:
    return {"name": socket.getaddrinfo(client, None, flags=socket.AI_CANONNAME)[0][3] or client}
