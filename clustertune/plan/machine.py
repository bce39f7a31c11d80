"""The machine that a plan computes with: a cluster file's facts and the figures of ops/hardware.yaml in bytes and seconds.

Of each link the plan takes what was measured: the result of an ``nccl-check`` before ``measured_gb_s`` of the cluster file,
and only where neither is there the nominal speed times the share that ops/hardware.yaml expects. ``Link.note`` says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from clustertune.cluster.hardware import HARDWARE, GpuModel, LinkFacts, read_hardware
from clustertune.cluster.load import ABOVE, known_clusters
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, raise_if
from clustertune.plan.measured import MeasuredLinks
from clustertune.recipe.layers import did_you_mean

GB = 1e9
LOW = 0.25
"""Share of the nominal speed below which something is broken: TCP on 100 GbE reaches 34 % and more (ops/hardware.yaml)."""
FIGURES = f"ops/{HARDWARE.name}"
NETWORK_NAMES = {"infiniband": "InfiniBand", "roce": "RoCE", "ethernet": "Ethernet", "omnipath": "Omni-Path", "efa": "EFA"}


@dataclass(frozen=True)
class Link:
    """What one collective over this level moves."""

    bytes_per_s: float
    """Bus bandwidth as nccl-tests defines it: inside a node per GPU; between nodes per NODE and direction, all its ports."""
    nominal_bytes_per_s: float
    """The same, nominal; where it is not given, what was measured."""
    source: Literal["measured", "nominal"]
    note: str
    """Where the bandwidth is from, for people."""
    latency_s: float
    """Of one step of a ring."""


@dataclass(frozen=True)
class PlanMachine:
    """A cluster as a plan sees it: bytes, seconds and FLOP/s."""

    name: str
    gpu: str
    """A key of ops/hardware.yaml."""
    nodes: int
    """Compute nodes of the cluster."""
    gpus_per_node: int
    peak_flops: float
    """Dense, bf16 (fp16 where the GPU has no bf16: ``notes`` says so)."""
    peak_flops_fp8: float | None
    hbm_bytes_per_s: float
    usable_bytes: int
    """Of one GPU, as CUDA counts them."""
    memory_gb: float
    """Of one GPU, as sold."""
    domain: int
    """GPUs that the fast link joins: those of a node, or of an NVLink domain over several."""
    intra: Link
    inter: Link
    """``bytes_per_s`` is 0 where no network is stated."""
    host_bytes: float
    """RAM of a node."""
    host_link_bytes_per_s: float
    """Between a GPU and the node's memory, one direction."""
    storage_read_bytes_per_s: float
    """All nodes together."""
    storage_write_bytes_per_s: float
    storage_note: str
    mtbf_hours: float | None
    """Hours between two failures of one node; None: not counted."""
    generation: str
    """As in ops/hardware.yaml; ``blackwell-gddr``: those without HBM, whose tensor cores reach another share of their peak."""
    notes: tuple[str, ...] = ()
    """What a person should know about these figures."""

    @property
    def has_cudnn_attention(self) -> bool:
        """Whether sdpa may take cuDNN's kernel under a mask."""
        return self.generation in _WITH_CUDNN


_WITH_CUDNN = ("hopper", "blackwell")


def _generation(gpu: GpuModel) -> str:
    return "blackwell-gddr" if gpu.compute_capability.startswith("12.") else gpu.generation


def has_cudnn_attention(cluster: Cluster) -> bool:
    """The same of a cluster's GPUs, of which nothing else need be known."""
    known = read_hardware().gpus.get(cluster.compute.gpu or "")
    return known is not None and _generation(known) in _WITH_CUDNN


def machine(cluster: Cluster, *, measured: MeasuredLinks | None = None, nodes: int | None = None) -> PlanMachine:
    """The machine of a cluster.

    ``measured``: the result of an nccl-check on it. ``nodes``: how many the plan uses, all by default; a network that is not
    stated is a problem only where it uses more than one NVLink domain.
    Raises UserError with everything that is missing or contradicts.
    """
    problems = list(_problems(cluster, measured, nodes or len(cluster.compute_nodes)))
    raise_if(problems)
    compute, hardware = cluster.compute, read_hardware()
    gpu = hardware.gpus[compute.gpu or ""]
    host = hardware.host_links[gpu.host_link]
    read, write, storage_note = _storage(cluster)
    return PlanMachine(
        name=cluster.name,
        gpu=compute.gpu or "",
        nodes=len(cluster.compute_nodes),
        gpus_per_node=compute.gpus,
        peak_flops=(gpu.bf16_tflops or gpu.fp16_tflops or 0.0) * 1e12,
        peak_flops_fp8=None if gpu.fp8_tflops is None else gpu.fp8_tflops * 1e12,
        hbm_bytes_per_s=gpu.hbm_gb_s * GB,
        usable_bytes=gpu.usable_bytes,
        memory_gb=gpu.memory_gb,
        domain=_domain(cluster),
        intra=_intra(cluster, measured),
        inter=_inter(cluster, measured),
        host_bytes=compute.memory_gb * 2**30,
        host_link_bytes_per_s=host.gb_s * host.share * GB,
        storage_read_bytes_per_s=read * GB,
        storage_write_bytes_per_s=write * GB,
        storage_note=storage_note,
        mtbf_hours=compute.mtbf_hours,
        generation=_generation(gpu),
        notes=(*cluster.notes, *_notes(compute.gpu or "", gpu, measured)),
    )


def _domain(cluster: Cluster) -> int:
    return cluster.compute.nvlink_domain or cluster.compute.gpus


def _notes(name: str, gpu: GpuModel, measured: MeasuredLinks | None) -> Iterator[str]:
    if gpu.bf16_tflops is None:
        yield f"{name} has no bfloat16: the figures are fp16's; what is trained in, float32 (train.bf16=false), is slower"
    if measured and measured.backend != "nccl":
        yield f"{measured.source} measured {measured.backend}, which does not move data between GPUs as NCCL does"


def _storage(cluster: Cluster) -> tuple[float, float, str]:
    """GB/s of reading and writing, and where they are from."""
    described, assumed = cluster.storage, read_hardware().storage
    read, write = described.read_gb_s or assumed.read_gb_s, described.write_gb_s or assumed.write_gb_s
    parts = [
        f"{word} {value:g} GB/s {'of the cluster file' if stated else f'assumed ({FIGURES})'}"
        for word, value, stated in (("reads", read, described.read_gb_s), ("writes", write, described.write_gb_s))
    ]
    return read, write, ", ".join(parts)


def _spans(cluster: Cluster, measured: MeasuredLinks) -> bool:
    """Whether a check over all its nodes went through the network, not only through an NVLink domain."""
    return measured.world > _domain(cluster)


def _link(note: str, gb_s: float, nominal: float, latency_us: float, transport: str = "") -> Link:
    """A link whose bandwidth was measured."""
    text = f"{note}: {gb_s:.3g} GB/s{_of(gb_s, nominal, transport)}"
    return Link(gb_s * GB, (nominal or gb_s) * GB, "measured", text, latency_us / 1e6)


def _of(gb_s: float, nominal: float, transport: str) -> str:
    """The share of nominal as a phrase, and what to do where it is so low that something must be broken."""
    went = f" over {transport}" if transport else ""
    if not nominal:
        return went
    share = gb_s / nominal
    return f"{went}, {100 * share:.0f} % of nominal" + (": see nccl-check" if share < LOW else "")


def _intra(cluster: Cluster, measured: MeasuredLinks | None) -> Link:
    compute = cluster.compute
    if _domain(cluster) == 1:
        return Link(0.0, 0.0, "nominal", "one GPU in a node: there is no link inside it", 0.0)
    facts: LinkFacts | None = read_hardware().links.get(compute.interconnect or "")
    nominal, latency = (facts.gb_s, facts.latency_us or 0.0) if facts else (0.0, 0.0)
    if measured:
        wide = None if _spans(cluster, measured) else measured.inter_gb_s
        if found := wide or measured.intra_gb_s:
            return _link(f"nccl-check of {measured.date}", found, nominal, latency, measured.transport)
    if compute.measured_gb_s:
        return _link(f"measured_gb_s of {cluster.source}", compute.measured_gb_s, nominal, latency)
    if facts is None:
        raise AssertionError("machine() refuses a cluster whose interconnect is not given")
    note = f"{_interconnect(compute.interconnect or '')} {nominal:g} GB/s, {100 * facts.share:.0f} % expected ({FIGURES})"
    return Link(nominal * facts.share * GB, nominal * GB, "nominal", _hinted(note, facts.hint), latency / 1e6)


def _interconnect(name: str) -> str:
    return name.replace("pcie", "PCIe ").replace("nvlink", "NVLink ")


def _hinted(note: str, hint: str) -> str:
    return f"{note}; {hint}" if hint else note


def _network_nominal(cluster: Cluster) -> float:
    """GB/s of all ports of a node; 0 where it is not given."""
    return (cluster.network.gbit or 0.0) * cluster.network.ports / 8


def _inter(cluster: Cluster, measured: MeasuredLinks | None) -> Link:
    network, nominal = cluster.network, _network_nominal(cluster)
    facts = read_hardware().networks.get(network.kind)
    latency = facts.latency_us if facts else 0.0
    if measured and measured.inter_gb_s and _spans(cluster, measured):
        return _link(f"nccl-check of {measured.date}", measured.inter_gb_s, nominal, latency, measured.transport)
    if network.measured_gb_s:
        return _link(f"measured_gb_s of {cluster.source}", network.measured_gb_s, nominal, latency)
    if not nominal or facts is None:
        return Link(0.0, 0.0, "nominal", f"no bandwidth between nodes is stated (network.kind {network.kind})", latency / 1e6)
    speed = min(nominal * facts.share, facts.most_gb_s or nominal)
    name = NETWORK_NAMES.get(network.kind, network.kind.capitalize())
    note = f"{network.ports} x {network.gbit:g} Gbit/s {name}, {100 * speed / nominal:.0f} % expected ({FIGURES})"
    return Link(speed * GB, nominal * GB, "nominal", _hinted(note, facts.hint), latency / 1e6)


def _problems(cluster: Cluster, measured: MeasuredLinks | None, nodes: int) -> Iterator[Problem]:
    """Everything that keeps a plan from computing."""
    compute, known = cluster.compute, read_hardware().gpus
    if not cluster.compute_nodes:
        yield Problem("no machine has the role compute", file=cluster.source, key="nodes", fix="give it to those that run jobs")
    if compute.gpus == 0:
        fix = f"--gpus 2x8xh100-sxm (a GPU of {FIGURES}), or --cluster NAME: {', '.join(known_clusters())}"
        yield Problem("0 GPUs: a plan is for training on GPUs", file=cluster.source, key="compute.gpus", fix=fix)
        return
    if compute.gpu not in known:
        what = f"there are no figures of {compute.gpu}" if compute.gpu else "which GPU it has is not known"
        near = did_you_mean(compute.gpu, known) if compute.gpu else None
        names = near or "one of " + ", ".join(known)
        fix = f"{names}, or add it to {FIGURES}"
        yield Problem(what, file=cluster.source, key="compute.gpu", fix=fix)
    stated = compute.measured_gb_s or (measured and measured.intra_gb_s)
    if compute.gpus > 1 and compute.interconnect in (None, "none") and not stated:
        message = f"what connects the {compute.gpus} GPUs of a node is not known"
        yield Problem(message, file=cluster.source, key="compute.interconnect", fix="write a cluster file: docs/clusters.md")
    yield from _measured_problems(cluster, measured)
    inter = _inter(cluster, measured)
    if nodes * compute.gpus > _domain(cluster) and not inter.bytes_per_s:
        message = f"{nodes} nodes, but no bandwidth between them (network.kind {cluster.network.kind})"
        fix = "give network.kind and network.gbit, or network.measured_gb_s, in a cluster file"
        yield Problem(message, file=cluster.source, key="network.gbit", fix=fix)


def _measured_problems(cluster: Cluster, measured: MeasuredLinks | None) -> Iterator[Problem]:
    """A result of another cluster, or one that the links of this one cannot carry."""
    if measured is None:
        return
    compute, file = cluster.compute, measured.source
    if measured.cluster != cluster.name:
        yield Problem(
            f"{measured.cluster}, while the plan is for {cluster.name}", file=file, key="cluster", fix="check that one"
        )
    if measured.gpus_per_node > compute.gpus:
        message = f"{measured.gpus_per_node}, but a node of {cluster.name} has {compute.gpus} GPUs"
        yield Problem(message, file=file, key="gpus_per_node", fix="fix compute.gpus, or check that cluster")
    facts = read_hardware().links.get(compute.interconnect or "")
    inside = facts.gb_s if facts else 0.0
    between = _network_nominal(cluster) if _spans(cluster, measured) else inside
    for where, gb_s, nominal, keys in (
        ("inside a node", measured.intra_gb_s, inside, "compute.interconnect"),
        ("between nodes", measured.inter_gb_s, between, "network.gbit and network.ports"),
    ):
        if gb_s and nominal and gb_s > ABOVE * nominal:
            message = f"{gb_s:.4g} GB/s {where}, more than the nominal {nominal:g} of {cluster.source}"
            yield Problem(message, file=file, key="results", fix=f"fix {keys}, or run nccl-check again")
