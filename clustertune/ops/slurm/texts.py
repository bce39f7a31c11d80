"""What a machine must have for Slurm: files and folders with owner and mode, by its roles."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from clustertune.config.cluster_schema import Cluster, Host
from clustertune.ops.slurm.conf import LOGS, SPOOL, STATE, USER, conf_lines, from_template
from clustertune.ops.slurm.gres import gres_lines
from clustertune.ops.slurm.version import Version

ETC = "/etc/slurm"
"""Every user's to read: sbatch and srun of each need slurm.conf (slurm.conf(5))."""
SLURM_CONF = f"{ETC}/slurm.conf"
GRES_CONF = f"{ETC}/gres.conf"
CGROUP_CONF = f"{ETC}/cgroup.conf"
SLURMDBD_CONF = f"{ETC}/slurmdbd.conf"
HOSTS = "/etc/hosts"
DROP_IN = "/etc/systemd/system/slurmd.service.d/clustertune.conf"
MARIADB = "/etc/mysql/mariadb.conf.d/60-clustertune-slurm.cnf"
MUNGE_KEY = "/etc/munge/munge.key"
BLOCK = "slurm"
"""The name of our block in each of these files."""
DATABASE = "slurm_acct_db"

SLURM_ROLES = ("login", "compute", "slurmctld")
"""Machines on which a part of Slurm runs; one that only exports bricks has none."""


@dataclass(frozen=True)
class Wanted:
    """One file."""

    path: str
    lines: tuple[str, ...]
    """The lines of our block."""
    shared: bool = False
    """Whether others write into it too (``/etc/hosts``); else it is ours alone."""
    mode: int = 0o644
    owner: str = "root"


@dataclass(frozen=True)
class Folder:
    """One folder."""

    path: str
    owner: str
    mode: int
    why: str


def wanted_files(cluster: Cluster, node: Host, *, version: Version | None, accounting: bool, hybrid: bool) -> list[Wanted]:
    """The files of one machine. ``hybrid``: its cgroup hierarchy is of both versions."""
    files = [Wanted(HOSTS, tuple(hosts_lines(cluster.nodes)), shared=True)]
    if not set(node.roles) & set(SLURM_ROLES):
        return files
    files += [
        Wanted(SLURM_CONF, conf_lines(cluster, version=version, accounting=accounting)),
        # The controller reads it too, and one folder that is the same everywhere is compared at a glance.
        Wanted(GRES_CONF, gres_lines(cluster)),
        Wanted(CGROUP_CONF, from_template("cgroup.conf", hybrid=hybrid)),
    ]
    if "compute" in node.roles:
        files.append(Wanted(DROP_IN, from_template("slurmd.service")))
    if accounting and "slurmctld" in node.roles:
        database = from_template("slurmdbd.conf", controller=node, database=DATABASE)
        files.append(Wanted(SLURMDBD_CONF, database, mode=0o600, owner=USER))
        files.append(Wanted(MARIADB, from_template("mariadb.cnf")))
    return files


def wanted_folders(node: Host) -> list[Folder]:
    """The folders of one machine that the daemons need."""
    folders = []
    if "slurmctld" in node.roles:
        folders.append(Folder(STATE, USER, 0o700, "jobs, their scripts and environments"))
    if "compute" in node.roles:
        folders.append(Folder(SPOOL, "root", 0o755, "slurmd's credentials and the scripts of running jobs"))
    if set(node.roles) & {"slurmctld", "compute"}:
        folders.append(Folder(LOGS, USER, 0o755, "logs"))
    return folders


def hosts_lines(nodes: Sequence[Host]) -> list[str]:
    """A line for each machine that has an address; one that is reached by a name has it from elsewhere."""
    lines = []
    for host in nodes:
        try:
            ipaddress.ip_address(host.address)
        except ValueError:
            continue
        short = host.name.partition(".")[0]
        lines.append(f"{host.address} {host.name}" + (f" {short}" if short != host.name else ""))
    return lines
