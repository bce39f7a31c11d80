"""Whether the nodes of a cluster see a folder of this machine: by the cluster file and the kind of file system it lies on."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from clustertune.config.cluster_schema import Cluster
from clustertune.errors import Problem
from clustertune.host.mounts import lies_elsewhere, mount_lines, own_mounts


def filesystem(path: Path, mounts: str) -> tuple[str, str]:
    """Mount point and kind of the file system on which ``path`` lies, from the text of ``/proc/self/mountinfo``."""
    best = ("/", "unknown")
    for line in mount_lines(mounts):
        if path.is_relative_to(line.point) and len(line.point) >= len(best[0]):
            best = (line.point, line.fstype)
    return best


def shared_places(cluster: Cluster) -> list[str]:
    """Where a cluster file says that all its machines see the same."""
    storage = cluster.storage
    mounted = [storage.shared, storage.pool.mount if storage.pool else None, *(brick.mount for brick in storage.bricks)]
    return [path for path in mounted if path]


def is_shared(path: Path, cluster: Cluster, mounts: str) -> bool:
    """Whether a folder lies on other machines' disks: by its kind of file system, or by the cluster file."""
    return lies_elsewhere(filesystem(path, mounts)[1]) or any(map(path.is_relative_to, shared_places(cluster)))


def find_problems(
    places: Sequence[tuple[str, Path]], cluster: Cluster, host: str | None = None, mounts: str | None = None
) -> list[Problem]:
    """Folders (with what they are) that other nodes of the cluster cannot see. ``host``, ``mounts``: None are this machine's.

    None where the cluster file does not list what is shared, or where this machine is not one of the cluster's, or
    its only one: what it has mounted tells nothing then.
    """
    shared = shared_places(cluster)
    if cluster.host(host or platform.node()) is None or len(cluster.nodes) < 2 or not shared:
        return []
    if mounts is None:
        mounts = own_mounts()
    problems = []
    for what, path in places:
        if is_shared(path, cluster, mounts):
            continue
        point, kind = filesystem(path, mounts)
        text = f"{what} lies on {kind} at {point} of this machine: the other nodes of {cluster.name} do not see it"
        fix = f"put it below {shared[0]}"
        problems.append(Problem(text, file=str(path), fix=fix))
    return problems
