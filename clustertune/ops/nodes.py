"""Which machine of a cluster file is meant, and whether it is this one."""

from __future__ import annotations

import socket

from clustertune.config.cluster_schema import Cluster, Host
from clustertune.config.load import COMMAND_LINE, did_you_mean
from clustertune.errors import Problem, UserError


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
