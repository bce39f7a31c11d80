"""Faults of the compute section: counts, GPUs and NUMA nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clustertune.cluster.hardware import near_gpus, read_hardware
from clustertune.cluster.schema import Compute
from clustertune.host.system import parse_cpu_list
from clustertune.recipe.findings import Found

# A part that could not be read is None here: the rest is still compared.


ABOVE = 1.05
"""Above the nominal bandwidth by more than this, a measured one is wrong; vendors and nccl-tests both count 10^9 bytes."""


def check_compute(compute: Compute) -> Iterator[Found]:
    if compute.gpus:
        yield from _check_gpu(compute)
    elif compute.gpus == 0:
        for key in ("gpu", "interconnect", "nvlink_domain", "measured_gb_s"):
            if getattr(compute, key) not in (None, "none"):
                yield ("compute", key), f"{getattr(compute, key)}, while gpus is 0", "leave it out, or say how many"
    if compute.threads and compute.cores:
        each, left = divmod(compute.threads, compute.cores)
        if left:
            message = f"{compute.threads} is not a multiple of {compute.cores} cores"
            yield ("compute", "threads"), message, "threads of the whole node"
        elif each > 8:
            yield ("compute", "threads"), f"{each} threads per core: no CPU has them", None
    if compute.cores and compute.sockets and compute.cores % compute.sockets:
        message = f"{compute.cores} does not divide by {compute.sockets} sockets"
        yield ("compute", "cores"), message, "cores of the whole node"
    groups, lists = compute.numa_gpus or (), compute.numa_cpus or ()
    if groups and lists and len(groups) != len(lists):
        message = f"{len(lists)} NUMA nodes, but numa_gpus has {len(groups)}"
        yield ("compute", "numa_cpus"), message, "one entry for each NUMA node in both"
    # A socket is one NUMA node or, by a BIOS setting (NPS2, SNC4), several; never the other way round.
    for key, count in (("numa_gpus", len(groups) if isinstance(compute.gpus, int) else 0), ("numa_cpus", len(lists))):
        if count and compute.sockets and count % compute.sockets:
            message = f"{count} NUMA nodes, but {compute.sockets} sockets"
            yield ("compute", key), message, "each socket has the same number: lscpu shows it"
    if groups and isinstance(compute.gpus, int):
        yield from _check_partition(groups, compute.gpus)
    yield from _check_lists(lists, compute.threads)


def _check_gpu(compute: Compute) -> Iterator[Found]:
    known = read_hardware().gpus
    if not compute.gpu:
        yield ("compute", "gpu"), f"missing, while gpus is {compute.gpus}", f"one of {', '.join(known)}"
    elif compute.gpu not in known:
        fix = near_gpus(compute.gpu)
        yield ("compute", "gpu"), f"ops/hardware.yaml has no {compute.gpu}", f"{fix or 'name one'}; or add it there"
    if not compute.interconnect:
        fix = "pcie5 where GPUs are PCIe cards, nvlink4 for HGX H100, none for one GPU"
        yield ("compute", "interconnect"), f"missing, while gpus is {compute.gpus}", fix
    elif compute.interconnect == "none" and compute.gpus > 1:
        yield ("compute", "interconnect"), f"none, while a node has {compute.gpus} GPUs", "at least PCIe connects them: pcie5"
    if not (link := compute.interconnect or "") or (link == "none" and compute.gpus > 1):
        return
    gpu = known.get(compute.gpu or "")
    if gpu and link.startswith("nvlink") and link != f"nvlink{gpu.nvlink}":
        has = f"NVLink {gpu.nvlink}" if gpu.nvlink else "no NVLink that joins all GPUs of a node"
        fix = f"nvlink{gpu.nvlink}" if gpu.nvlink else gpu.host_link
        yield ("compute", "interconnect"), f"{link}, but a {compute.gpu} has {has}", f"write {fix}"
    domain = compute.nvlink_domain
    if domain and not link.startswith("nvlink"):
        yield ("compute", "nvlink_domain"), f"given, while interconnect is {link}", "leave it out"
    elif domain and (domain < compute.gpus or domain % compute.gpus):
        message = f"{domain} GPUs are not several whole nodes of {compute.gpus}"
        yield ("compute", "nvlink_domain"), message, "GPUs of the whole domain, over all its nodes: 72 in an NVL72"
    facts = read_hardware().links.get(link)
    if compute.measured_gb_s and (facts is None or compute.measured_gb_s > ABOVE * facts.gb_s):
        what = f"more than the {facts.gb_s:g} GB/s of {link}" if facts else "given, while interconnect is none"
        fix = "busbw of all_gather_perf, of one GPU in one direction, in GB/s" if facts else "leave it out"
        yield ("compute", "measured_gb_s"), f"{compute.measured_gb_s:g}: {what}" if facts else what, fix


def _check_partition(groups: Sequence[Sequence[int]], gpus: int) -> Iterator[Found]:
    key = ("compute", "numa_gpus")
    flat = [gpu for group in groups for gpu in group]
    for gpu in sorted(set(flat)):
        if flat.count(gpu) > 1:
            yield key, f"GPU {gpu} appears twice", "each GPU has one NUMA node"
        if gpu >= gpus:
            yield key, f"there is no GPU {gpu}: {gpus} are counted from 0", None
    if missing := sorted(set(range(gpus)) - set(flat)):
        text = f"GPU{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        yield key, f"{text} missing: of each GPU the NUMA node", "nvidia-smi topo -m shows it"


def _check_lists(lists: Sequence[str], threads: int | None) -> Iterator[Found]:
    key, fix = ("compute", "numa_cpus"), "lscpu shows the lists"
    seen: dict[int, int] = {}
    readable = True
    for index, text in enumerate(lists):
        try:
            cpus = parse_cpu_list(text)
        except ValueError as error:
            yield (*key, str(index)), str(error), fix
            readable = False
            continue
        if not cpus:
            yield (*key, str(index)), "empty", fix
        if twice := sorted(cpu for cpu in cpus if seen.setdefault(cpu, index) != index):
            yield (*key, str(index)), f"CPU {twice[0]} is also of NUMA node {seen[twice[0]]}", fix
    if lists and readable and threads and len(seen) != threads:
        yield key, f"{len(seen)} CPUs in all, but threads is {threads}", "every CPU belongs to one NUMA node"
