"""What a machine must have for Slurm: files and folders with owner and mode, by its roles."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from clustertune.config.cluster_schema import Cluster, Host
from clustertune.ops.slurm.conf import LOGS, SPOOL, STATE, USER, conf_lines
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
        Wanted(SLURM_CONF, tuple(conf_lines(cluster, version=version, accounting=accounting))),
        # The controller reads it too, and one folder that is the same everywhere is compared at a glance.
        Wanted(GRES_CONF, tuple(gres_lines(cluster))),
        Wanted(CGROUP_CONF, tuple(cgroup_lines(hybrid))),
    ]
    if "compute" in node.roles:
        files.append(Wanted(DROP_IN, _DROP_IN))
    if accounting and "slurmctld" in node.roles:
        files.append(Wanted(SLURMDBD_CONF, tuple(dbd_lines(node)), mode=0o600, owner=USER))
        files.append(Wanted(MARIADB, _MARIADB))
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


def cgroup_lines(hybrid: bool) -> list[str]:
    """``cgroup.conf``: words that every release since 22.05 knows."""
    lines = [
        "# A job sees the cores and GPUs that it has, and ends, not the node, where it needs more memory than it asked for.",
        "ConstrainCores=yes",
        "ConstrainDevices=yes",
        "ConstrainRAMSpace=yes",
    ]
    if hybrid:
        lines += [
            "# Here both versions of cgroups are mounted, and autodetection ends with an error.",
            "CgroupPlugin=cgroup/v1",
        ]
    return lines


def dbd_lines(controller: Host) -> list[str]:
    """``slurmdbd.conf``, without a password: the database knows its user by the socket's peer."""
    place = [] if controller.address == controller.name else [f"DbdAddr={controller.address}"]
    return [
        "AuthType=auth/munge",
        f"DbdHost={controller.name}",
        *place,
        f"SlurmUser={USER}",
        "# No StoragePass: the user is known by the unix socket (IDENTIFIED VIA unix_socket).",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        f"StorageUser={USER}",
        f"StorageLoc={DATABASE}",
        f"LogFile={LOGS}/slurmdbd.log",
        "PidFile=/run/slurmdbd.pid",
    ]


_DROP_IN = (
    "# Jobs get slurmd's own limits. The packages set most of these; a Slurm that was built by hand often does not.",
    "[Service]",
    "LimitMEMLOCK=infinity",
    "LimitSTACK=infinity",
    "LimitNOFILE=131072",
    "TasksMax=infinity",
    "# Slurm makes cgroups below its own, and its jobs live on while it is restarted.",
    "Delegate=yes",
    "KillMode=process",
)
_MARIADB = (
    "# slurmdbd warns below these sizes; a roll-up of a month may hold a row for minutes.",
    "[mariadbd]",
    "innodb_buffer_pool_size=1G",
    "innodb_log_file_size=64M",
    "innodb_lock_wait_timeout=900",
)
