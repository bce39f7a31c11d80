"""Whether the nodes of a cluster see a folder of this machine: by the cluster file and the kind of file system it lies on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from clustertune.config.cluster_schema import Cluster
from clustertune.errors import Problem

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|beegfs|ceph|wekafs|glusterfs|9p|cifs|smb3|panfs|afs|orangefs|pvfs2|virtiofs|fuse(\..+)?"
)
"""Kinds of file system that lie on other machines, or on a pool of them."""


def filesystem(path: Path, mounts: str) -> tuple[str, str]:
    """Mount point and kind of the file system on which ``path`` lies, from the text of ``/proc/self/mountinfo``."""
    best = ("/", "unknown")
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split(" ")
        if len(words) < 5 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, rest.split(" ")[0])
    return best


def shared_places(cluster: Cluster) -> list[str]:
    """Where a cluster file says that all its machines see the same."""
    storage = cluster.storage
    mounted = [storage.shared, storage.pool.mount if storage.pool else None, *(brick.mount for brick in storage.bricks)]
    return [place for place in mounted if place]


def is_shared(path: Path, cluster: Cluster, mounts: str) -> bool:
    """Whether a folder lies on other machines' disks: by its kind of file system, or by the cluster file."""
    return bool(_NETWORK.fullmatch(filesystem(path, mounts)[1])) or any(map(path.is_relative_to, shared_places(cluster)))


def find_problems(places: Sequence[tuple[str, Path]], cluster: Cluster, host: str, mounts: str) -> list[Problem]:
    """Folders (with what they are) that other nodes of the cluster cannot see.

    Nothing is said where the cluster file does not tell what is shared, or where this machine is none of the cluster's, or
    its only one: what it has mounted tells nothing then.
    """
    shared = shared_places(cluster)
    if cluster.host(host) is None or len(cluster.nodes) < 2 or not shared:
        return []
    problems = []
    for what, path in places:
        if is_shared(path, cluster, mounts):
            continue
        point, kind = filesystem(path, mounts)
        text = f"{what} lies on {kind} at {point} of this machine: the other nodes of {cluster.name} do not see it"
        fix = f"put it below {shared[0]}"
        problems.append(Problem(text, file=str(path), fix=fix))
    return problems
