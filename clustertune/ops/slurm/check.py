"""What a cluster file must say, and may not say, before Slurm's files can be made from it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from clustertune.config.cluster_schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.ops.slurm.conf import real_memory
from clustertune.ops.slurm.version import parse_version

LONGEST_CLUSTER = 40
"""Characters of a ClusterName (slurm.conf(5))."""
RESERVED = ("all", "default")
"""Names of nodes and partitions that mean something else to Slurm, in any case of letters (slurm.conf(5))."""
LONGEST_NODE = 63
"""Characters of a node's name: a host name's own limit (HOST_NAME_MAX is 64)."""


def require_slurm(cluster: Cluster) -> None:
    """Raises UserError with everything for which no Slurm can be set up from this cluster file."""
    if problems := list(_problems(cluster)):
        raise UserError(problems)


def _problems(cluster: Cluster) -> Iterator[Problem]:
    file = cluster.source
    if cluster.name == "local":
        fix = "write it down first: docs/clusters.md, then --cluster NAME|FILE"
        yield Problem("local is what is found by looking, not what shall be", file="command line", key="--cluster", fix=fix)
        return
    slurm = cluster.slurm
    if slurm is None:
        yield Problem("missing: from it come Slurm's files", file=file, key="slurm", fix="write slurm: {partition: gpu}")
        return
    if len(cluster.name) > LONGEST_CLUSTER:
        text = f"{len(cluster.name)} characters: Slurm takes {LONGEST_CLUSTER} for a cluster's name"
        yield Problem(text, file=file, key="name", fix="shorten it, and the file's name with it")
    if slurm.partition.lower() in RESERVED:
        text = f"{slurm.partition} is no partition: Slurm means something else by it"
        yield Problem(text, file=file, key="slurm.partition", fix="another name, such as gpu")
    if slurm.version is not None and parse_version(slurm.version) is None:
        text = f"{slurm.version!r} is no release of Slurm"
        yield Problem(text, file=file, key="slurm.version", fix='write it as "22.05" or "24.11.5"; sinfo --version tells')
    if re.fullmatch(r"[0:-]+", slurm.max_time):
        text = f"{slurm.max_time} is no time: no job may run"
        yield Problem(text, file=file, key="slurm.max_time", fix="UNLIMITED, or as 1-00:00:00")
    if real_memory(cluster) < cluster.compute.threads:
        text = f"{cluster.compute.memory_gb:g} GiB is less than 1 MiB for each of {cluster.compute.threads} threads"
        yield Problem(text, file=file, key="compute.memory_gb", fix="GiB of one node, as free -g tells")
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
