"""Which machine of a cluster file is meant, whether it is this one, where its programs are; and the templates below ``ops/``,
in which each setting stands with its reason."""

from __future__ import annotations

import os
import shlex
import shutil
import socket

from clustertune.cluster.schema import Cluster, Host
from clustertune.console import escape
from clustertune.errors import Problem, UserError
from clustertune.recipe.layers import COMMAND_LINE, did_you_mean
from clustertune.tree import ROOT


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


def tool(name: str) -> str | None:
    """Where a program is; a user's PATH may lack sbin, where daemons and file system tools lie."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def render(name: str, /, **values: object) -> str:
    """The text of ``ops/NAME.j2``, filled in; the filter ``quote`` makes a shell word.

    No value makes a line of its own: the path of a cluster file, which stands in a comment of a script that root runs, may hold
    line ends.
    """
    import jinja2

    # Not HTML.
    environment = jinja2.Environment(  # noqa: S701
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: escape(value, keep="") if isinstance(value, str) else value,
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string((ROOT / "ops" / f"{name}.j2").read_text(encoding="utf-8")).render(values)
