"""Generated files on a machine that is not the cluster: what must change there, in one place, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping


def move_conf(text: str, settings: Mapping[str, str | None], *, addresses: bool = True) -> str:
    """``slurm.conf`` with other ``settings`` (None: without it); those that it lacks are added before the nodes.

    Without ``addresses`` the nodes are looked up by name, in the hosts file that is there.
    """
    left = {key.lower(): (key, value) for key, value in settings.items()}
    lines, at = list[str](), None
    for said in text.splitlines():
        line = said if addresses else re.sub(r"^(NodeName=\S+) NodeAddr=\S+", r"\1", said)
        key = line.partition("=")[0].strip().lower()
        if key == "nodename":
            at = len(lines) if at is None else at
        if key in left:
            name, value = left.pop(key)
            lines += [] if value is None else [f"{name}={value}"]
        else:
            lines.append(line)
    added = [f"{name}={value}" for name, value in left.values() if value is not None]
    at = len(lines) if at is None else at
    return "\n".join([*lines[:at], *added, *lines[at:]]) + "\n"


def move_gres(text: str, devices: str, *, cores: bool) -> str:
    """``gres.conf`` with the GPUs' devices below the folder ``devices``; without ``cores`` where this machine's are counted."""
    return (text if cores else re.sub(r" Cores=\S+", "", text)).replace("File=/dev/nvidia", f"File={devices}/nvidia")


def move_hosts(lines: str, addresses: Mapping[str, str]) -> str:
    """Lines of ``/etc/hosts`` with other addresses for some names."""
    found = []
    for line in lines.splitlines():
        words = line.split()
        known = len(words) > 1 and words[1] in addresses
        found.append(" ".join([addresses[words[1]], *words[1:]]) if known else line)
    return "".join(f"{line}\n" for line in found)
