"""What a machine has of Slurm: versions, shape, devices, users, keys, folders. It only looks, and not for long."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from clustertune.config.cluster_schema import Cluster, Host
from clustertune.host import probe
from clustertune.ops.files import NODE, inside
from clustertune.ops.nodes import has_systemd, is_here, tool
from clustertune.ops.slurm.texts import CGROUP_CONF, ETC, GRES_CONF, LOGS, MUNGE_KEY, SLURM_CONF, SLURMDBD_CONF, SPOOL, STATE

SECONDS = 10.0
"""For one program to answer; each of them only reads this machine."""


@dataclass(frozen=True)
class PathState:
    """A file or folder as it is."""

    folder: bool
    mode: int
    uid: int
    size: int


@dataclass(frozen=True)
class NodeFacts:
    """One machine, or a tree that will be one. Empty or None: not to be seen."""

    local: bool
    """Whether it is this machine itself, so that its programs and devices can be asked."""
    versions: tuple[str, ...] = ()
    """Answers of ``slurmctld -V`` and ``slurmd -V``, else of ``sinfo -V``."""
    shape: str = ""
    """``slurmd -C``"""
    devices: tuple[int, ...] | None = None
    """The numbers N of /dev/nvidiaN."""
    minors: dict[str, int] = field(default_factory=dict)
    """Minor number of each NVIDIA GPU by its PCI address, as its driver tells."""
    cgroup: str = ""
    """``v1``, ``v2`` or ``hybrid``."""
    users: dict[str, tuple[int, int]] | None = None
    """Ids of users; None: there is no list of them."""
    places: dict[str, PathState] = field(default_factory=dict)
    """Of the files and folders that have an owner and a mode, those that are there."""
    systemd: bool = False
    owns: bool = True
    """Whether whoever asks may give files to others: root may."""


def collect(cluster: Cluster, node: Host, root: Path = NODE) -> NodeFacts:
    """Look at this machine, or at a tree. Raises nothing for what is not there."""
    local = root == NODE and is_here(cluster, node)
    watched = (STATE, SPOOL, LOGS, MUNGE_KEY, SLURMDBD_CONF, ETC, SLURM_CONF, GRES_CONF, CGROUP_CONF)
    places = {path: state for path in watched if (state := _path_state(inside(root, path))) is not None}
    if not local:
        return NodeFacts(False, users=_users(root), places=places, owns=os.geteuid() == 0)
    versions = [text for name in ("slurmctld", "slurmd") if (text := ask(name, "-V"))] or [ask("sinfo", "-V")]
    return NodeFacts(
        True,
        versions=tuple(text for text in versions if text),
        shape=ask("slurmd", "-C"),
        devices=_devices(Path("/dev")),
        minors=_minors(Path("/proc/driver/nvidia/gpus")),
        cgroup=_cgroup(Path("/sys/fs/cgroup")),
        users=_users(root),
        places=places,
        systemd=has_systemd(),
        owns=os.geteuid() == 0,
    )


def ask(*words: str) -> str:
    """What a program prints; empty where it is not there, fails or does not answer."""
    program = tool(words[0])
    answer = probe.ask([program, *words[1:]], SECONDS) if program else probe.ABSENT
    return answer.text.strip() if answer.good else ""


def _path_state(path: Path) -> PathState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return PathState(stat.S_ISDIR(found.st_mode), stat.S_IMODE(found.st_mode), found.st_uid, found.st_size)


def _devices(folder: Path) -> tuple[int, ...]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return ()
    return tuple(sorted(int(match[1]) for name in names if (match := re.fullmatch(r"nvidia(\d{1,4})", name))))


def _minors(folder: Path) -> dict[str, int]:
    found = {}
    try:
        for gpu in folder.iterdir():
            if match := re.search(r"Device Minor:\s*(\d+)", (gpu / "information").read_text(errors="replace")):
                found[gpu.name] = int(match[1])
    except OSError:
        return {}
    return found


def _cgroup(folder: Path) -> str:
    if (folder / "cgroup.controllers").exists():
        return "v2"
    if (folder / "unified" / "cgroup.controllers").exists():
        return "hybrid"
    return "v1" if (folder / "cpuset").is_dir() or (folder / "memory").is_dir() else ""


def _users(root: Path) -> dict[str, tuple[int, int]] | None:
    """The users of /etc/passwd; on this machine also what other sources know of those that matter."""
    found: dict[str, tuple[int, int]] = {}
    try:
        text = inside(root, "/etc/passwd").read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        parts = line.split(":")
        if len(parts) > 3 and parts[2].isdigit() and parts[3].isdigit():
            found[parts[0]] = (int(parts[2]), int(parts[3]))
    if root == NODE:
        for name in {"slurm", "munge"} - set(found):
            if match := re.match(r"[^:]*:[^:]*:(\d+):(\d+):", ask("getent", "passwd", name)):
                found[name] = (int(match[1]), int(match[2]))
    return found
