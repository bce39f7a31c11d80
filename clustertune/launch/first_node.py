"""What a job's first node lacks of what the cluster file says: told at once, not after hours of preparation."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from clustertune.config.cluster_schema import Cluster
from clustertune.errors import Problem
from clustertune.process import captured

INTERFACES = Path("/sys/class/net")
HELP_SECONDS = 30.0


def find_problems(cluster: Cluster, *, nodes: int, trains: bool) -> list[Problem]:
    """The container that is not there, and the interface by which the ranks of ``nodes`` nodes are to meet.

    Only the node that this runs on is looked at; each of the others looks when an attempt starts.
    """
    host, found = os.uname().nodename, []
    runtime, image, interface = cluster.container.runtime, cluster.container.image, cluster.network.interface
    if runtime == "pyxis":
        if not _has_pyxis():
            fix = "have the plugin loaded (plugstack.conf, https://github.com/NVIDIA/pyxis), or runtime: apptainer"
            text = f"srun of {host} knows no --container-image"
            found.append(Problem(text, file=cluster.source, key="container.runtime", fix=fix))
    elif runtime != "none" and shutil.which(cluster.container.command) is None:
        fix = "install it on every node, or container: {runtime: none} and an environment that all nodes see"
        found.append(
            Problem(f"{host} has no {cluster.container.command}", file=cluster.source, key="container.runtime", fix=fix)
        )
    if runtime != "none" and image is not None and not image.startswith("docker://") and not Path(image).exists():
        fix = "build it, or name the image that all nodes see"
        found.append(Problem(f"{host} has no {image}", file=cluster.source, key="container.image", fix=fix))
    if trains and nodes > 1 and interface and INTERFACES.is_dir() and not (INTERFACES / interface).exists():
        there = ", ".join(sorted(entry.name for entry in INTERFACES.iterdir()))
        fix = "the name must be that on every compute node"
        text = f"{host} has no interface {interface} (it has {there})"
        found.append(Problem(text, file=cluster.source, key="network.interface", fix=fix))
    return found


def _has_pyxis() -> bool:
    """Whether srun lists the plugin's options; true where it cannot be asked: it says so itself then."""
    try:
        done = captured(["srun", "--help"], HELP_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return "--container-image" in done.stdout + done.stderr
