"""Logs in NCCL's format, of any size and of several versions: values and host names are made up, the words are NCCL's.

By version (``src/debug.cc``, ``init.cc`` and the transports of each): 2.10 writes bus ids in brackets, no ``/0`` after the
channel and no number of nodes; from 2.18 on it has both; 2.27 has the version in every rank's log, ``Initialized NET plugin``
and a time before warnings; 2.29 ends channels of RDMA with ``/Shared`` and tells algorithms by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PREFIXES: dict[str, Callable[[int, str], str]] = {
    "plain": lambda rank, line: line,
    "slurm": lambda rank, line: f"{rank}: {line}",
    "torchrun": lambda rank, line: f"[rank{rank}]:{line}",
    "tee": lambda rank, line: f"[default{rank}]:{line}",
    "mpirun": lambda rank, line: f"[1,{rank}]<stdout>:{line}",
    "mpirun 5": lambda rank, line: f"[{rank}] {line}",
    "ray": lambda rank, line: f"\x1b[36m(Worker pid=77, ip=10.0.0.{rank})\x1b[0m {line}",
    "kubernetes": lambda rank, line: f"2026-05-16T16:39:51.208-07:00 {line}",
    "quoted": lambda rank, line: f"> {line.replace('>', '&gt;').replace('<', '&lt;')}",
    "windows": lambda rank, line: f"{line}\r",
}
"""What launchers, collectors and web pages make of a line."""


@dataclass(frozen=True)
class Job:
    """What a run of NCCL looks like."""

    version: str = "2.28.9"
    nodes: int = 2
    gpus: int = 8
    inside: str = "P2P/CUMEM"
    net: str = "IB"
    gdr: bool = True
    interface: str = "eth0"
    adapters: tuple[str, ...] = tuple(f"mlx5_{n}" for n in range(8))
    link: str = "IB"
    settings: tuple[tuple[str, str], ...] = ()
    path: str = "NVL"

    @property
    def minor(self) -> int:
        """2.28.9: 28."""
        return int(self.version.split(".")[1])

    def host(self, rank: int) -> str:
        """Where a rank runs."""
        return f"node{rank // self.gpus + 1}"


def lines(job: Job) -> Iterator[tuple[int, str]]:
    """Rank and line, in the order of one run; ranks take turns, as they do in one file."""
    ranks = range(job.nodes * job.gpus)
    if job.minor < 27:
        yield 0, f"NCCL version {job.version}+cuda12.4"
    steps = [list(_rank(job, rank)) for rank in ranks]
    for turn in range(max(map(len, steps))):
        for rank in ranks:
            if turn < len(steps[rank]):
                host, local = job.host(rank), rank % job.gpus
                yield rank, f"{host}:{4000 + local}:{4100 + local} [{local}] NCCL INFO {steps[rank][turn]}"


@functools.cache
def text(job: Job, prefix: str = "plain") -> str:
    """The log of all ranks in one file."""
    return "".join(f"{PREFIXES[prefix](rank, line)}\n" for rank, line in lines(job))


def _rank(job: Job, rank: int) -> Iterator[str]:
    world, node, local = job.nodes * job.gpus, rank // job.gpus + 1, rank % job.gpus
    yield "cudaDriverVersion 13000" if job.minor > 26 else "cudaDriverVersion 12040"
    if job.minor > 26:
        yield f"NCCL version {job.version}+cuda13.0"
    for name, value in job.settings:
        yield f"{name} set by environment to {value}."
    address = f"{job.interface}:10.0.0.{node}<0>"
    yield f"Bootstrap{'' if job.minor > 22 else ' '}: Using {address}"
    yield (
        "NET/Plugin: Could not find: libnccl-net.so."
        if job.minor > 22
        else ("NET/Plugin : No plugin found (libnccl-net.so), using internal implementation")
    )
    if job.net == "IB":
        listed = " ".join(f"[{n}]{name}:1/{job.link}" for n, name in enumerate(job.adapters))
        yield f"NET/IB : Using {listed} [RO]; OOB {address}"
    elif job.net == "Socket":
        yield "NET/IB : No device found."
        yield f"NET/Socket : Using [0]{address}"
    if job.minor > 26:
        yield f"Initialized NET plugin {job.net}"
        yield f"Assigned NET plugin {job.net} to comm"
    yield f"Using network {job.net}"
    head = f"comm 0x55d0{rank:04x} rank {rank} nranks {world} cudaDev {local} nvmlDev {local} busId {local + 1}b000"
    if job.minor > 17:
        yield f"ncclCommInitRank {head} commId 0x1f2e3d - Init START"
        at = f"localRanks {job.gpus} localRank {local} MNNVL 0"
        yield f"comm 0x55d0{rank:04x} rank {rank} nRanks {world} nNodes {job.nodes} {at}"
    if job.gpus > 1:
        paths = " ".join(f"GPU/0-{n + 1}b000 ({min(n, 2)}/48.0/{job.path})" for n in range(job.gpus) if n != local)
        yield f"GPU/0-{local + 1}b000 :GPU/0-{local + 1}b000 (0/5000.0/LOC) {paths} CPU/0-0 (2/24.0/PHB)"
    if rank == 0:
        yield f"Channel 00/02 : {' '.join(map(str, range(world)))}"
    yield f"Trees [0] {rank + 1}/-1/-1->{rank}->{rank - 1} [1] {rank + 1}/-1/-1->{rank}->{rank - 1}"
    yield from _edges(job, rank)
    yield "Connected all rings"
    yield "16 coll channels, 0 collnet channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer"
    yield f"{'ncclCommInitRank ' if job.minor > 17 else ''}{head} - Init COMPLETE"
    if job.minor > 25:
        yield "AllGather: 1073741824 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}"
    else:
        yield "AllGather: 1073741824 Bytes -> Algo 1 proto 2 time 5120.000000"


def _edges(job: Job, rank: int) -> Iterator[str]:
    old, several = job.minor < 12, job.net == "IB"
    for channel in range(max(2, len(job.adapters) if several else 2)):
        # Each channel's ring leaves the node at another GPU, over the adapter next to it.
        ring = [node * job.gpus + (n + channel) % job.gpus for node in range(job.nodes) for n in range(job.gpus)]
        at = ring.index(rank)
        for kind, source, target in (("receive", ring[at - 1], rank), ("send", rank, ring[(at + 1) % len(ring)])):
            title = f"Channel {channel:02d}{'' if old else '/0'}"
            ends = [f"{end}[{end % job.gpus + 1}b000]" if old else f"{end}[{end % job.gpus}]" for end in (source, target)]
            if job.host(source) != job.host(target):
                device = channel % max(1, len(job.adapters)) if several else 0
                suffix = ("/GDRDMA" if job.gdr else "") + ("/Shared" if job.minor > 28 else "") if several else ""
                yield f"{title} : {ends[0]} -> {ends[1]} [{kind}] via NET/{job.net}/{device}{suffix}"
            elif kind == "send" and source != target:
                yield f"{title} : {ends[0]} -> {ends[1]} via {job.inside}"
