"""What a job's first node lacks of what the cluster file says: told at once, not after hours of preparation."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from clustertune.config.cluster_schema import Cluster
from clustertune.errors import Problem

INTERFACES = Path("/sys/class/net")


def find_problems(cluster: Cluster, *, nodes: int, trains: bool) -> list[Problem]:
    """The container that is not there, and the interface by which the ranks of ``nodes`` nodes are to meet.

    Only the node that this runs on is looked at; each of the others looks when an attempt starts.
    """
    host, found = os.uname().nodename, []
    runtime, image, interface = cluster.container.runtime, cluster.container.image, cluster.network.interface
    if runtime != "none" and shutil.which(runtime) is None:
        fix = "install it on every node, or container: {runtime: none} and an environment that all nodes see"
        found.append(Problem(f"{host} has no {runtime}", file=cluster.source, key="container.runtime", fix=fix))
    if runtime != "none" and image is not None and not Path(image).exists():
        fix = "build it, or name the image that all nodes see"
        found.append(Problem(f"{host} has no {image}", file=cluster.source, key="container.image", fix=fix))
    if trains and nodes > 1 and interface and INTERFACES.is_dir() and not (INTERFACES / interface).exists():
        there = ", ".join(sorted(entry.name for entry in INTERFACES.iterdir()))
        fix = "the name must be that on every compute node"
        text = f"{host} has no interface {interface} (it has {there})"
        found.append(Problem(text, file=cluster.source, key="network.interface", fix=fix))
    return found
