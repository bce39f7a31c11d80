"""What a machine must have for Slurm: files and folders with owner and mode, by its roles."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from clustertune.cluster.schema import Cluster, Compute, Host
from clustertune.errors import Problem, raise_if
from clustertune.host.system import format_cpu_list, parse_cpu_list
from clustertune.setup.setup_machine import render

ETC = "/etc/slurm"
"""Every user's to read: sbatch and srun of each need slurm.conf (slurm.conf(5))."""
SLURM_CONF = f"{ETC}/slurm.conf"
GRES_CONF = f"{ETC}/gres.conf"
CGROUP_CONF = f"{ETC}/cgroup.conf"
SLURMDBD_CONF = f"{ETC}/slurmdbd.conf"
HOSTS = "/etc/hosts"
DROP_IN = "/etc/systemd/system/slurmd.service.d/clustertune.conf"
MARIADB = "/etc/mysql/mariadb.conf.d/60-clustertune-slurm.cnf"
DATABASE = "slurm_acct_db"

SLURM_ROLES = ("login", "compute", "slurmctld")
"""Machines on which a part of Slurm runs; one that only exports bricks has none."""


@dataclass(frozen=True)
class NodeFile:
    """One file."""

    path: str
    lines: tuple[str, ...]
    """The lines of our block."""
    shared: bool = False
    """Whether others write into it too (``/etc/hosts``); else it is ours alone."""
    mode: int = 0o644
    owner: str = "root"


@dataclass(frozen=True)
class NodeFolder:
    """One folder that the daemons need."""

    path: str
    owner: str
    mode: int


def node_files(cluster: Cluster, node: Host, *, version: Version | None, accounting: bool, hybrid: bool) -> list[NodeFile]:
    """The files of one machine. ``hybrid``: its cgroup hierarchy is of both versions."""
    files = [NodeFile(HOSTS, tuple(hosts_lines(cluster.nodes)), shared=True)]
    if not set(node.roles) & set(SLURM_ROLES):
        return files
    files += [
        NodeFile(SLURM_CONF, conf_lines(cluster, version=version, accounting=accounting)),
        # The controller reads it too, and one folder that is the same everywhere is compared at a glance.
        NodeFile(GRES_CONF, gres_lines(cluster)),
        NodeFile(CGROUP_CONF, from_template("cgroup.conf", hybrid=hybrid)),
    ]
    if "compute" in node.roles:
        files.append(NodeFile(DROP_IN, from_template("slurmd.service")))
    if accounting and "slurmctld" in node.roles:
        database = from_template("slurmdbd.conf", controller=node, database=DATABASE)
        files.append(NodeFile(SLURMDBD_CONF, database, mode=0o600, owner=USER))
        files.append(NodeFile(MARIADB, from_template("mariadb.cnf")))
    return files


def node_folders(node: Host) -> list[NodeFolder]:
    """The folders of one machine that the daemons need."""
    folders = []
    if "slurmctld" in node.roles:
        folders.append(NodeFolder(STATE, USER, 0o700))  # jobs, their scripts and environments
    if "compute" in node.roles:
        folders.append(NodeFolder(SPOOL, "root", 0o755))  # slurmd's credentials and the scripts of running jobs
    if set(node.roles) & {"slurmctld", "compute"}:
        folders.append(NodeFolder(LOGS, USER, 0o755))
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


# --- gres -----------------------------------------------------------------------------------------------------------------

# ``gres.conf``: the device of each GPU, and the cores next to it in Slurm's own count.


def gres_lines(cluster: Cluster) -> tuple[str, ...]:
    """The file's lines. It is one for all nodes, which are equal; no GPUs leave a comment."""
    cores, note = gpu_cores(cluster.compute)
    lines = []
    for group_key, group in groupby(range(cluster.compute.gpus), key=lambda gpu: cores[gpu]):
        gpus = list(group)
        lines.append((str(gpus[0]) if len(gpus) == 1 else f"[{format_cpu_list(gpus)}]", group_key))
    return from_template("gres.conf", lines=lines, note=note, kind=cluster.slurm and cluster.slurm.gres)


def gpu_cores(compute: Compute) -> tuple[list[str], str]:
    """Of each GPU the cores next to it, as ``0-63``, empty where it is unknown; and a sentence on where it comes from.

    ``Cores=`` counts cores (not hardware threads) from the first of the first socket on, whatever their numbers in Linux
    (gres.conf(5)): NUMA nodes in the order of their first CPU, each with as many cores as it has CPUs over threads per core.
    They are widened to whole sockets: Slurm chooses by sockets, and 24.11 takes a node out of use (INVAL) with "GRES core
    specification 0-31 ... doesn't match socket boundaries", which 22.05 took.
    """
    nothing = [""] * compute.gpus
    if not compute.numa_gpus:
        return nothing, "No Cores: the cluster file does not say to which NUMA node a GPU belongs (compute.numa_gpus)."
    if compute.sockets == 1:
        return nothing, "No Cores: there is one socket, so that all cores are next to all GPUs."
    if not compute.numa_cpus:
        return nothing, "No Cores: the cluster file does not say which CPUs a NUMA node has (compute.numa_cpus)."
    cpus = [parse_cpu_list(text) for text in compute.numa_cpus]
    each = compute.threads // compute.cores
    if any(len(numbers) % each for numbers in cpus):
        return nothing, f"No Cores: a NUMA node of compute.numa_cpus has no whole number of cores of {each} threads."
    cores, start = list(nothing), 0
    socket = compute.cores // compute.sockets
    for node in sorted(range(len(cpus)), key=lambda index: min(cpus[index])):
        end = start + len(cpus[node]) // each
        first, last = start // socket * socket, -(-end // socket) * socket - 1
        for gpu in compute.numa_gpus[node]:
            cores[gpu] = f"{first}-{last}" if last - first + 1 < compute.cores else ""
        start = end
    wider = ", widened to whole sockets" if len(cpus) > compute.sockets else ""
    return cores, f"Cores counts cores, not threads, socket by socket, from numa_gpus and numa_cpus{wider}."


# --- conf -----------------------------------------------------------------------------------------------------------------

# ``slurm.conf``: one for all machines of a cluster, made from the template ``ops/slurm/slurm.conf.j2``.

USER = "slurm"
"""Whom slurmctld and slurmdbd run as; the packages make him."""
STATE = "/var/lib/slurm/slurmctld"
SPOOL = "/var/spool/slurmd"
LOGS = "/var/log/slurm"
MEMORY_SHARE = 0.98
"""Of ``memory_gb``. A node whose MemTotal is below RealMemory is taken out of use, and the kernel keeps 1.6 % of what is
installed for its page table entries (64 bytes of struct page to 4096) before it counts."""
GRACE_SECONDS = 1800
"""Between the warning and the end of a preempted job. Of the steps that are known here the longest, 14 minutes of a 405B model
on 16 GPUs, asks for 1.5 steps + a save + 30 s = 1410 s (``--signal`` of its jobs); a job that has saved exits earlier."""
DOWN_SECONDS = 120
"""Until a silent node counts as lost and its job is requeued. Slurm's 300 s leave all other GPUs of the job idle as long; much
less takes a node for lost whose slurmd waits for storage."""
UNKILLABLE_SECONDS = 180
"""For processes that hang in the kernel, on hard-mounted NFS or in the driver, before Slurm drains the node (default 60)."""
MIN_JOB_AGE_SECONDS = 86_400
"""How long ended jobs can be asked for without accounting: ``submit --status`` has nothing else then."""


def real_memory(cluster: Cluster) -> int:
    """``RealMemory`` of a node, MiB."""
    return math.floor(cluster.compute.memory_gb * 1024 * MEMORY_SHARE)


def cluster_name(cluster: Cluster) -> str:
    """Slurm's name of the cluster: lower case, which the accounting database makes of it anyway."""
    return re.sub(r"[^a-z0-9_-]", "-", cluster.name.lower())


def from_template(template: str, **values: object) -> tuple[str, ...]:
    """The lines of a template below ``ops/slurm``, filled in; each setting stands there with its reason."""
    everywhere = {"user": USER, "state": STATE, "spool": SPOOL, "logs": LOGS}
    return tuple(render(f"slurm/{template}", **everywhere | values).splitlines())


def conf_lines(cluster: Cluster, *, version: Version | None, accounting: bool) -> tuple[str, ...]:
    """The lines of the file. ``version``: the release that will read it, None where it is unknown."""
    compute, controller = cluster.compute, cluster.controller
    assert cluster.slurm and controller
    shape = f"Sockets={compute.sockets} CoresPerSocket={compute.cores // compute.sockets} "
    shape += f"ThreadsPerCore={compute.threads // compute.cores} RealMemory={real_memory(cluster)}"
    everyone = fold([host.name for host in cluster.compute_nodes])
    return from_template(
        "slurm.conf",
        name=cluster_name(cluster),
        controller=controller,
        compute=compute,
        slurm=cluster.slurm,
        accounting=accounting,
        ipv6=any(":" in host.address for host in (controller, *cluster.compute_nodes)),
        memory=real_memory(cluster),
        memory_share=f"{MEMORY_SHARE:.0%}",
        down_seconds=DOWN_SECONDS,
        unkillable_seconds=UNKILLABLE_SECONDS,
        min_job_age_seconds=MIN_JOB_AGE_SECONDS,
        grace_seconds=GRACE_SECONDS,
        preempt_signal="=".join(preempt_signal(version)),
        shape=shape + (f" Gres={cluster.gres(compute.gpus)}" if compute.gpus else ""),
        nodes=list(node_lines(cluster.compute_nodes)),
        everyone=everyone if len(everyone) <= LONGEST else "ALL",
    )


# --- names ----------------------------------------------------------------------------------------------------------------

# Lists of machines in Slurm's form: ``gpu[01-16],login``.

NODES_A_LINE = 64
"""Nodes of one ``NodeName`` line: the lines stay readable, and a changed node changes one of them."""
LONGEST = 1000
"""Characters of a list of nodes; a longer one is written as ``ALL``."""


def fold(names: Sequence[str]) -> str:
    """The names as one expression, in their order: ``n08,n09,n10`` is ``n[08-10]``.

    Only a number at the end of a name can stand in brackets: Slurm refuses ``a[1-2]-x`` (slurm.conf(5), NodeName). Numbers
    with leading zeros keep their width.
    """
    pieces: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        prefix, number = _split(name)
        if number and pieces and pieces[-1][0] == prefix and pieces[-1][1]:
            runs = pieces[-1][1]
            if _follows(runs[-1][1], number):
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        else:
            pieces.append((prefix, [(number, number)] if number else []))
    return ",".join(_piece(prefix, runs) for prefix, runs in pieces)


def node_lines(hosts: Sequence[Host]) -> Iterator[tuple[str, str]]:
    """Names and addresses of the hosts, a pair of expressions for each line; both of a pair count alike.

    The address is empty where every machine of the line is reached by its name.
    """
    group: list[Host] = []
    for host in hosts:
        alike = group and _split(group[-1].name)[0] == _split(host.name)[0] and _split(host.name)[1]
        if group and not (alike and len(group) < NODES_A_LINE and _named(group[-1]) == _named(host)):
            yield _line(group)
            group = []
        group.append(host)
    if group:
        yield _line(group)


def _line(hosts: Sequence[Host]) -> tuple[str, str]:
    addresses = [host.address for host in hosts]
    return fold([host.name for host in hosts]), "" if _named(hosts[0]) else fold(addresses)


def _named(host: Host) -> bool:
    return host.address == host.name


def _split(name: str) -> tuple[str, str]:
    """A name without the number at its end, and that number: nine digits at most, and none of IPv6, which are hexadecimal."""
    match = re.fullmatch(r"(.*?)([0-9]{1,9})", name)
    if not match or ":" in name or match[1][-1:].isdigit():
        return name, ""
    return match[1], match[2]


def _follows(last: str, number: str) -> bool:
    padded = last.startswith("0") or number.startswith("0")
    return int(number) == int(last) + 1 and (len(number) == len(last) or not padded)


def _piece(prefix: str, runs: Sequence[tuple[str, str]]) -> str:
    if not runs:
        return prefix
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return prefix + runs[0][0]
    return f"{prefix}[{','.join(first if first == last else f'{first}-{last}' for first, last in runs)}]"


# --- version --------------------------------------------------------------------------------------------------------------

# Slurm's versions, and the keys that only some of them know: an unknown key makes every client command fail.
#
# ``packaging`` reads versions of Python packages (PEP 440), which ``slurm-wlm 24.11.5-1`` is not.


class Version(NamedTuple):
    """A release of Slurm: year and month, such as 24.11."""

    year: int
    month: int

    def __str__(self) -> str:
        return f"{self.year:02d}.{self.month:02d}"


OLDEST, NEWEST = Version(22, 5), Version(24, 11)
"""Releases whose parsers and daemons took the files: Debian 12 and Debian 13."""


def parse_version(text: str) -> Version | None:
    """The release in ``22.05.8``, ``slurm-wlm 24.11.5`` or ``23.11``; None where there is none."""
    match = re.search(r"(?<![\d.])(\d\d)\.(0[1-9]|1[0-2])(?!\d)", text)
    return Version(int(match[1]), int(match[2])) if match else None


def preempt_signal(version: Version | None) -> tuple[str, str]:
    """Key and value by which a preempted job gets the signal of its ``--signal`` at once.

    ``PreemptParameters`` is not known to 22.05 ("unrecognized key"). The word in ``SlurmctldParameters``, a list whose unknown
    members do no harm, works in 22.05 and 24.11 alike: one file serves machines of different releases, and of an unknown one.
    24.11 documents the other word only, so that what comes after may have forgotten the first.
    """
    if version is not None and version > NEWEST:
        return "PreemptParameters", "send_user_signal"
    return "SlurmctldParameters", "preempt_send_user_signal"


# --- elsewhere ------------------------------------------------------------------------------------------------------------

# Generated files on a machine that is not the cluster: what must change there, in one place, and nothing else.


def move_conf(text: str, settings: Mapping[str, str | None], *, addresses: bool = True) -> str:
    """``slurm.conf`` with other ``settings`` (None: without it); those that it lacks are added before the nodes.

    Without ``addresses`` the nodes are looked up by name, in the hosts file that is there.
    """
    left = {key.lower(): (key, value) for key, value in settings.items()}
    lines, at = list[str](), None
    for conf_line in text.splitlines():
        line = conf_line if addresses else re.sub(r"^(NodeName=\S+) NodeAddr=\S+", r"\1", conf_line)
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
    moved = []
    for line in lines.splitlines():
        fields = line.split()
        known = len(fields) > 1 and fields[1] in addresses
        moved.append(" ".join([addresses[fields[1]], *fields[1:]]) if known else line)
    return "".join(f"{line}\n" for line in moved)


# --- check ----------------------------------------------------------------------------------------------------------------

# What a cluster file must say, and may not say, before Slurm's files can be made from it.

LONGEST_CLUSTER = 40
"""Characters of a ClusterName (slurm.conf(5))."""
RESERVED = ("all", "default")
"""Names of nodes and partitions that mean something else to Slurm, in any case of letters (slurm.conf(5))."""
LONGEST_NODE = 63
"""Characters of a node's name: a host name's own limit (HOST_NAME_MAX is 64)."""


def require_slurm(cluster: Cluster) -> None:
    """Raises UserError with everything for which no Slurm can be set up from this cluster file."""
    raise_if(_problems(cluster))


def _problems(cluster: Cluster) -> Iterator[Problem]:
    file = cluster.source
    if cluster.name == "local":
        fix = "write it down first: docs/clusters.md, then --cluster NAME|FILE"
        yield Problem("local describes this machine as it is, not a plan for it", file="command line", key="--cluster", fix=fix)
        return
    slurm = cluster.slurm
    if slurm is None:
        yield Problem("missing: from it come Slurm's files", file=file, key="slurm", fix="write slurm: {partition: gpu}")
        return
    if cluster.controller is None:
        text = "no machine has the role slurmctld: the site's own Slurm is used as it is, and there is nothing to set up"
        yield Problem(
            text, file=file, key="nodes", fix="to have one set up, give the role to the machine on which it is to run"
        )
    if len(cluster.name) > LONGEST_CLUSTER:
        text = f"{len(cluster.name)} characters: Slurm takes {LONGEST_CLUSTER} for a cluster's name"
        yield Problem(text, file=file, key="name", fix="shorten it, and the file's name with it")
    if slurm.partition.lower() in RESERVED:
        text = f"{slurm.partition} is not a partition: Slurm means something else by it"
        yield Problem(text, file=file, key="slurm.partition", fix="another name, such as gpu")
    if slurm.version is not None and parse_version(slurm.version) is None:
        text = f"{slurm.version!r} is not a release of Slurm"
        yield Problem(text, file=file, key="slurm.version", fix='write it as "22.05" or "24.11.5"; sinfo --version shows it')
    if re.fullmatch(r"[0:-]+", slurm.max_time):
        text = f"{slurm.max_time} is no time: no job may run"
        yield Problem(text, file=file, key="slurm.max_time", fix="UNLIMITED, or as 1-00:00:00")
    if real_memory(cluster) < cluster.compute.threads:
        text = f"{cluster.compute.memory_gb:g} GiB is less than 1 MiB for each of {cluster.compute.threads} threads"
        yield Problem(text, file=file, key="compute.memory_gb", fix="GiB of one node, as free -g shows")
    for host in cluster.nodes:
        if "compute" in host.roles or "slurmctld" in host.roles:
            for text, fix in _name_problems(host.name):
                yield Problem(text, file=file, key=f"nodes[{host.name}].name", fix=fix)


def _name_problems(name: str) -> Iterator[tuple[str, str]]:
    if name.lower() in RESERVED or name.lower() == "localhost":
        yield f"{name} cannot be a node of Slurm: it means something else", "the machine's own host name"
    if len(name) > LONGEST_NODE:
        yield f"{name[:20]}... has {len(name)} characters, a node's name at most {LONGEST_NODE}", "its name without the domain"
    if re.search(r"\d{10}$", name):
        yield f"{name} ends in a number of ten digits or more, with which Slurm counts", "another host name"
