"""``gres.conf``: the device of each GPU, and the cores next to it in Slurm's own count."""

from __future__ import annotations

from itertools import groupby

from clustertune.config.cluster_schema import Cluster, Compute
from clustertune.host.cpus import format_cpu_list, parse_cpu_list
from clustertune.ops.slurm.conf import from_template


def gres_lines(cluster: Cluster) -> tuple[str, ...]:
    """The file's lines. It is one for all nodes, which are alike; no GPUs leave a comment."""
    cores, note = gpu_cores(cluster.compute)
    lines = []
    for place, group in groupby(range(cluster.compute.gpus), key=lambda gpu: cores[gpu]):
        gpus = list(group)
        lines.append((str(gpus[0]) if len(gpus) == 1 else f"[{format_cpu_list(gpus)}]", place))
    return from_template("gres.conf", lines=lines, note=note, kind=cluster.slurm and cluster.slurm.gres)


def gpu_cores(compute: Compute) -> tuple[list[str], str]:
    """Of each GPU the cores next to it, as ``0-63``, empty where that is not to be told; and in words where it comes from.

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
    found, start = list(nothing), 0
    socket = compute.cores // compute.sockets
    for node in sorted(range(len(cpus)), key=lambda index: min(cpus[index])):
        end = start + len(cpus[node]) // each
        first, last = start // socket * socket, -(-end // socket) * socket - 1
        for gpu in compute.numa_gpus[node]:
            found[gpu] = f"{first}-{last}" if last - first + 1 < compute.cores else ""
        start = end
    wider = ", widened to whole sockets" if len(cpus) > compute.sockets else ""
    return found, f"Cores counts cores, not threads, socket by socket, from numa_gpus and numa_cpus{wider}."
