"""Which machine of a cluster file is meant, whether it is this one, and what is installed on it."""

from __future__ import annotations

import contextlib
import grp
import os
import shutil
import socket
from pathlib import Path

from clustertune.cluster.schema import Cluster, Host
from clustertune.errors import Problem, UserError
from clustertune.recipe.load import COMMAND_LINE, did_you_mean


def choose_node(cluster: Cluster, name: str | None) -> Host:
    """The machine that is meant: the one named, else this one. Raises UserError with the nearest name."""
    host = cluster.host(socket.gethostname() if name is None else name)
    if host is not None:
        return host
    names = [other.name for other in cluster.nodes]
    fix = f"name one: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
    if name is None:
        message = f"this machine, {socket.gethostname()}, is not in {cluster.source}"
    else:
        message, fix = f"{cluster.name} has no machine {name[:80]!r}", did_you_mean(name, names) or fix
    raise UserError(Problem(message, file=COMMAND_LINE, key="--node", fix=fix))


def is_here(cluster: Cluster, node: Host) -> bool:
    """Whether this machine is ``node``, and no other of the cluster: n1 of one domain is not n1 of another."""
    return cluster.host(socket.gethostname()) == node


def require_here(cluster: Cluster, node: Host) -> None:
    """Raise UserError unless ``node`` is this machine: its files are written, its mounts are looked at."""
    if not is_here(cluster, node):
        message = f"this machine is {socket.gethostname()}, not {node.name}"
        fix = f"run it on {node.name}, or into a tree: --root DIR"
        raise UserError(Problem(message, file=COMMAND_LINE, key="--node", fix=fix))


def tool(name: str) -> str | None:
    """Where a program is; a user's PATH may lack sbin, where daemons and file system tools lie."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def has_systemd() -> bool:
    """Whether systemd runs this machine (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir()


def group_id(name: str | None) -> int | None:
    """The number of a group; None where this machine has no such group."""
    with contextlib.suppress(KeyError):
        return grp.getgrnam(name).gr_gid if name else None
    return None
