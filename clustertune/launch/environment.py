"""The environment of the ranks, derived from the cluster: each variable with the reason why it is set.

What NCCL, gloo and torch choose rightly by themselves is left to them: torch's flight recorder keeps 2000 entries, its
watchdog tears a failed process down (TORCH_NCCL_ASYNC_ERROR_HANDLING=3), NCCL finds RDMA adapters and GPU paths. Sources: the
NCCL user guide (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), ``ProcessGroupNCCL.hpp``,
``FlightRecorder.hpp`` and ``CUDAAllocatorConfig.h`` of torch 2.13, gloo's ``transport/tcp/device.cc``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from clustertune.cluster.schema import Cluster, Network

FAST_ETHERNET = 100
"""Gbit/s from which NCCL's guide has one TCP connection replaced by several."""
MOST_OMP_THREADS = 16
"""The CPU's part in a step is small; more threads only wait for each other at the end of every loop."""


@dataclass(frozen=True)
class Setting:
    """One variable of the ranks' environment."""

    name: str
    value: str
    reason: str
    """Why it is set, one line."""


def environment(
    cluster: Cluster,
    *,
    world_size: int,
    ranks_per_node: int,
    cpus_per_node: int,
    job: str | None,
    cpu_only: bool,
    present: int | None = None,
    traces: str | None = None,
) -> list[Setting]:
    """What every rank of a job must find in its environment before Python starts.

    ``cpus_per_node``: CPUs of the allocation on one node, in Slurm's count (hardware threads). ``present``: CPUs that the node
    really has, where slurm.conf may list more. ``job``: the scheduler's id of the job, for folders of its own.
    ``traces``: folder for the flight recorder's files, best the attempt's own; None: the job's folder on the node.
    ``cpu_only``: no rank has a GPU, so that gloo is all they talk through. No reading of this machine goes in: two calls with
    the same arguments give the same list anywhere.
    """
    several = world_size > ranks_per_node
    derived = [
        *(_sockets(cluster.network, cpu_only=cpu_only) if several else ()),
        *(() if cpu_only else _of_gpus(cluster, several)),
        *(() if cpu_only else _caches(cluster.storage.scratch, job, traces)),
    ]
    of_threads = "tokenizers' threads do not survive the fork of a data loader: they warn or hang"
    return [
        *_overridden(cluster, derived, cpu_only=cpu_only),
        _omp_threads(cluster, ranks_per_node, cpus_per_node, present),
        Setting("TOKENIZERS_PARALLELISM", "false", of_threads),
        Setting("PYTHONNOUSERSITE", "1", "packages in ~/.local would shadow the pinned ones, in a container too"),
        Setting("PYTHONFAULTHANDLER", "1", "a crash in native code leaves the Python stack of every thread in the rank's log"),
    ]


def _sockets(network: Network, *, cpu_only: bool) -> Iterator[Setting]:
    """How the ranks of several nodes reach each other; nothing about an interface where none is known."""
    if network.interface and not cpu_only:
        reason = f"{network.interface} and no other: without '=' NCCL takes every name that begins so (NVIDIA/nccl#286)"
        yield Setting("NCCL_SOCKET_IFNAME", f"={network.interface}", reason)
    if network.interface:
        reason = "gloo takes the exact name, without '='; else it binds where the host name resolves to, which may be loopback"
        yield Setting("GLOO_SOCKET_IFNAME", network.interface, reason)
    if network.kind == "ethernet" and not cpu_only:
        reason = "the cluster file says ethernet: NCCL goes to sockets at once, and tries no stray RDMA device"
        yield Setting("NCCL_IB_DISABLE", "1", reason)
        if network.gbit is not None and network.gbit >= FAST_ETHERNET:
            reason = f"one TCP connection does not fill {network.gbit:g} Gbit/s: NCCL's guide has 4 threads, 64 sockets at most"
            yield Setting("NCCL_SOCKET_NTHREADS", "4", reason)
            yield Setting("NCCL_NSOCKS_PERTHREAD", "4", "4 x 4 connections, which a bond's hash also spreads over its links")
    elif network.hca and network.kind in ("infiniband", "roce") and not cpu_only:
        reason = "the adapters of the cluster file, exactly: without '=' NCCL takes every name that begins so"
        yield Setting("NCCL_IB_HCA", f"={','.join(network.hca)}", reason)


def _overridden(cluster: Cluster, derived: Sequence[Setting], *, cpu_only: bool) -> Iterator[Setting]:
    """``derived`` with what the cluster file says itself, which wins; without GPUs only gloo's, all others have no effect."""
    own = {name: value for name, value in cluster.network.environment.items() if not cpu_only or name.startswith("GLOO_")}
    for setting in derived:
        value = own.pop(setting.name, setting.value)
        instead = replace(setting, value=value, reason=f"the cluster file says so, instead of {setting.value}")
        yield setting if value == setting.value else instead
    yield from (Setting(name, value, "the cluster file says so") for name, value in own.items())


def _of_gpus(cluster: Cluster, several: bool) -> Iterator[Setting]:
    yield Setting("NCCL_DEBUG", "WARN", "NCCL says why it fails; by default it says nothing")
    if cluster.compute.interconnect and cluster.compute.interconnect.startswith("pcie"):
        reason = "GPUs of a node talk over PCIe; where the first all-reduce hangs, IOMMU or ACS is in the way: "
        yield Setting("NCCL_P2P_DISABLE", "0", f"{reason}turn it off, or set this to 1 (NVIDIA/nccl#1999)")
    if several or cluster.compute.gpus > 1:
        reason = "a collective that times out leaves torch's flight recorder: which rank waited for what"
        yield Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason)
    reason = "GPU n of CUDA is GPU n of nvidia-smi and of the cluster file's NUMA map"
    yield Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", reason)
    reason = (
        "gathered layers differ in size: without it freed memory is left in pieces (PYTORCH_CUDA_ALLOC_CONF, where set, wins)"
    )
    yield Setting("PYTORCH_ALLOC_CONF", "expandable_segments:True", reason)


def _caches(scratch: str, job: str | None, traces: str | None) -> Iterator[Setting]:
    folder = PurePosixPath(scratch) / f"clustertune-{_plain(job)}"
    nfs = "on the node's own disk, of this job alone: on NFS a stale handle kills one rank, and the others wait for it"
    yield Setting("TRITON_CACHE_DIR", str(folder / "triton"), f"compiled kernels {nfs} (triton-lang/triton#11512)")
    yield Setting("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"), f"compiled code {nfs} (pytorch/pytorch#173679)")
    reason = "where the flight recorder writes, one file per rank; by default below the home folder"
    place = PurePosixPath(traces) if traces else folder
    yield Setting("TORCH_FR_DUMP_TEMP_FILE", str(place / "nccl-trace-rank-"), reason)


def _plain(job: str | None) -> str:
    """A job's id as a part of a file name; another one for two jobs wherever their ids differ in letters and digits."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", job or "local")[:64].strip("-") or "local"


def _omp_threads(cluster: Cluster, ranks_per_node: int, cpus_per_node: int, present: int | None) -> Setting:
    cpus = min(cpus_per_node, present or cpus_per_node)
    each_core = max(1, cluster.compute.threads // max(1, cluster.compute.cores))
    share = cpus // (max(1, ranks_per_node) * each_core)
    threads = max(1, min(share, MOST_OMP_THREADS))
    origin = f"{cpus} CPUs / {ranks_per_node} ranks" + (f" / {each_core} threads per core" if each_core > 1 else "")
    capped = f", {MOST_OMP_THREADS} at most" if share > MOST_OMP_THREADS else ""
    return Setting("OMP_NUM_THREADS", str(threads), f"{origin}{capped}: launchers give 1, or every rank all cores")


def one_gpu(world_size: int, env: Mapping[str, str]) -> dict[str, str]:
    """What limits a training of one rank to the first GPU that it sees; nothing for several ranks.

    TRL loads the model of a single process with ``device_map="auto"``, over all GPUs (trl/trainer/utils.py,
    ``create_model_from_path``), and transformers wraps one that fits a GPU in ``DataParallel``: the batch would be another one.
    Works until CUDA is initialised.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES", "0")
    return {"CUDA_VISIBLE_DEVICES": visible.partition(",")[0]} if world_size == 1 else {}
