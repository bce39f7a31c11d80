"""The machine that a plan computes with: a cluster file's facts and the figures of ops/hardware.yaml in bytes and seconds.

Of each link the plan takes what was measured: the result of an ``nccl-check`` before ``measured_gb_s`` of the cluster file,
and only where neither is there the nominal speed times the share that ops/hardware.yaml expects. ``Link.note`` says which.

The result of an ``nccl-check`` is a JSON file beside the cluster file, ``NAME.nccl-check.json``::

    {"schema": "clustertune.nccl-check/1", "cluster": "my-cluster", "date": "2026-11-02", "nodes": 2, "gpus_per_node": 8,
     "backend": "nccl", "transport": "NET/Socket",
     "results": [{"scope": "world", "collective": "all_gather", "bytes": 1073741824, "algbw_gb_s": 5.0, "busbw_gb_s": 4.7}]}

Bandwidths are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), GB/s of 10^9 bytes:
``algbw`` is the gathered size by the time, ``busbw`` of an all-gather over n ranks ``algbw (n - 1) / n``. ``bytes`` is the
gathered size.

The bus bandwidth of a collective inside a node (``intra``) is what each GPU sends and receives. Of one over several nodes
(``inter``, ``world``) it is what the ports of each NODE carry together in one direction: the ring, however many channels it is
split into, enters and leaves each node once, so that all but one n-th of the gathered bytes pass through its ports.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from clustertune.cluster.compute_rules import ABOVE
from clustertune.cluster.hardware import HARDWARE, GpuModel, IsoDate, LinkFacts, read_hardware
from clustertune.cluster.load import CLUSTERS, known_clusters
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError, raise_if
from clustertune.recipe.findings import Found, read_model
from clustertune.recipe.layers import Document, did_you_mean, parse_json, read_text
from clustertune.recipe.sections import Number, Positive, Section

# --- what an nccl-check measured ----------------------------------------------------------------------------------------

SCHEMA = "clustertune.nccl-check/1"
SUFFIX = ".nccl-check.json"
LARGEST = 3
"""The median of so many largest sizes: bandwidth bounds them, and one that a neighbour's job disturbed does not decide."""
ROUNDED = 1.02
"""nccl-tests prints two decimals, so that a small ``busbw`` may exceed ``algbw`` by its rounding."""


Bandwidth = Annotated[Number, Field(ge=0, le=100_000)]
Seconds = Annotated[Number, Field(ge=0)]
Text = Annotated[str, Field(max_length=1000)]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "p2p"]


class StrictSection(Section):
    """Values must have their own type: a program wrote them, and ``"8"`` is another program's."""

    model_config = ConfigDict(strict=True, defer_build=True)  # most plans have no check to read


class CollectiveResult(StrictSection):
    """One size of one collective."""

    scope: Literal["intra", "inter", "world"]
    """``intra``: the GPUs of one node; ``inter``: several nodes; ``world``: all GPUs of all nodes."""
    collective: Collective
    bytes: Positive
    algbw_gb_s: Bandwidth
    busbw_gb_s: Bandwidth
    ranks: Positive | None = None
    iterations: Positive | None = None
    median_s: Seconds | None = None
    spread: Seconds | None = None
    """(95th - 5th percentile) / median."""
    correct: bool | None = None


class NodeResult(CollectiveResult):
    """The same of one node by itself."""

    scope: Literal["intra"] = "intra"
    node: Text


class PairResult(CollectiveResult):
    """The same between two nodes."""

    scope: Literal["inter"] = "inter"
    nodes: Annotated[list[Text], Field(min_length=2, max_length=2)]


class CheckFile(StrictSection):
    """The file."""

    schema_: Annotated[Literal["clustertune.nccl-check/1"], Field(alias="schema")]
    cluster: Annotated[str, Field(min_length=1, max_length=64)]
    date: IsoDate
    nodes: Positive
    gpus_per_node: Positive
    backend: Literal["nccl", "gloo"]
    transport: Annotated[str, Field(max_length=200)]
    """How the bytes went, as NCCL's log says it: ``NET/IB``, ``NET/Socket``, ``P2P/CUMEM``."""
    results: Annotated[list[CollectiveResult], Field(min_length=1, max_length=10_000)]
    backend_why: Text | None = None
    interface: Text | None = None
    hosts: list[Text] | None = None
    seconds: Seconds | None = None
    not_judged: Text | None = None
    per_node: Annotated[list[NodeResult], Field(max_length=1_000_000)] | None = None
    per_pair: Annotated[list[PairResult], Field(max_length=1_000_000)] | None = None
    p2p_probe: list[dict[str, Any]] | None = None
    hung: list[dict[str, Any]] | None = None
    left_out: list[dict[str, Any]] | None = None
    problems: list[dict[str, Any]] | None = None
    facts: list[dict[str, Any]] | None = None
    environment: dict[str, str] | None = None
    expected: dict[str, Any] | None = None
    verdict: dict[str, Any] | None = None
    """From ``backend_why`` on: what ``clustertune nccl-check`` adds for its own verdict and the report
    (:mod:`clustertune.nccl_check.link_measure`); a plan does not need it."""


class MeasuredLinks(CheckFile):
    """What a plan takes from a check."""

    source: str
    """The file."""

    @property
    def world(self) -> int:
        """GPUs that took part."""
        return self.nodes * self.gpus_per_node

    @property
    def intra_gb_s(self) -> float | None:
        """Bus bandwidth of an all-gather inside a node, GB/s per GPU; None: not measured."""
        return _bandwidth(self.results, ("intra",))

    @property
    def inter_gb_s(self) -> float | None:
        """Over all nodes, GB/s per node and direction; None: not measured."""
        return _bandwidth(self.results, ("world", "inter")) if self.nodes > 1 else None


def read_measured(path: str | Path) -> MeasuredLinks:
    """The result in a file. Raises UserError with every problem in it."""
    shown = str(path)
    data = parse_json(read_text(Path(path), shown), shown, "run nccl-check again")
    if not isinstance(data, dict):
        raise UserError(Problem("contains no nccl-check result", file=shown, fix=f"give a file with schema {SCHEMA}"))
    check = read_model(CheckFile, Document(shown, data), _contradictions)
    return MeasuredLinks.model_construct(**vars(check), source=shown)


def find_measured(cluster: Cluster) -> MeasuredLinks | None:
    """The result of nccl-check stored next to the cluster file; None without one. Raises UserError if it cannot be read."""
    path = beside(cluster)
    return read_measured(path) if path is not None and path.is_file() else None


def beside(cluster: Cluster, suffix: str = SUFFIX) -> Path | None:
    """Where the result of a cluster lies, whether there is one or not; None where the cluster was found by looking."""
    file = Path(cluster.source)
    # The project's own files are named from its root, others as they were given.
    folder = CLUSTERS if cluster.source == f"ops/clusters/{file.name}" else file.parent
    return folder / f"{file.stem}{suffix}" if file.suffix in (".yaml", ".yml") else None


def _bandwidth(results: Sequence[CollectiveResult], scopes: Sequence[str]) -> float | None:
    """The bus bandwidth of an all-gather in the first scope that has one: the median of its largest sizes, GB/s."""
    for scope in scopes:
        sizes = {item.bytes: item.busbw_gb_s for item in results if (item.scope, item.collective) == (scope, "all_gather")}
        if sizes:
            return statistics.median(sizes[size] for size in sorted(sizes)[-LARGEST:])
    return None


def _contradictions(check: CheckFile) -> Iterator[Found]:
    seen: set[tuple[str, str, int]] = set()
    for index, item in enumerate(check.results):
        at = ("results", str(index))
        kind = (item.scope, item.collective, item.bytes)
        if kind in seen:
            yield at, f"{item.collective} ({item.scope}) of {item.bytes} bytes appears twice", "keep one"
        seen.add(kind)
        if item.scope == "inter" and check.nodes == 1:
            yield (*at, "scope"), "inter, while nodes is 1", "run the check on several nodes"
        if item.scope == "intra" and check.gpus_per_node == 1:
            yield (*at, "scope"), "intra, while gpus_per_node is 1", "there is no link inside a node"
        if item.collective in ("all_gather", "reduce_scatter") and item.busbw_gb_s > ROUNDED * item.algbw_gb_s:
            message = (
                f"{item.busbw_gb_s:g} exceeds algbw_gb_s {item.algbw_gb_s:g}: of a {item.collective} it is (n - 1) / n of it"
            )
            yield (*at, "busbw_gb_s"), message, "both are columns of nccl-tests, in GB/s"
    if not any(item.collective == "all_gather" for item in check.results):
        yield ("results",), "no all_gather: it is what a plan takes", "run all_gather_perf"
    if any(_bandwidth(check.results, (scope,)) == 0 for scope in ("intra", "inter", "world")):
        text = "the all_gather of the largest sizes has busbw_gb_s 0"
        yield ("results",), text, "run it with larger sizes, to 1 GiB at least"


# --- the machine --------------------------------------------------------------------------------------------------------

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


def generation(gpu: GpuModel) -> str:
    """As :attr:`PlanMachine.generation`."""
    return "blackwell-gddr" if gpu.compute_capability.startswith("12.") else gpu.generation


def has_cudnn_attention(cluster: Cluster) -> bool:
    """The same of a cluster's GPUs, of which nothing else need be known."""
    known = read_hardware().gpus.get(cluster.compute.gpu or "")
    return known is not None and generation(known) in _WITH_CUDNN


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
        intra=inside(cluster, measured),
        inter=_inter(cluster, measured),
        host_bytes=compute.memory_gb * 2**30,
        host_link_bytes_per_s=host.gb_s * host.share * GB,
        storage_read_bytes_per_s=read * GB,
        storage_write_bytes_per_s=write * GB,
        storage_note=storage_note,
        mtbf_hours=compute.mtbf_hours,
        generation=generation(gpu),
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


def is_joined(cluster: Cluster, measured: MeasuredLinks | None = None) -> bool:
    """Whether it is known what connects the GPUs of a node."""
    stated = cluster.compute.measured_gb_s or (measured and measured.intra_gb_s)
    return cluster.compute.gpus <= 1 or cluster.compute.interconnect not in (None, "none") or bool(stated)


def inside(cluster: Cluster, measured: MeasuredLinks | None = None) -> Link:
    """The link that joins the GPUs of a node, which is known (:func:`is_joined`)."""
    compute = cluster.compute
    if _domain(cluster) == 1:
        return Link(0.0, 0.0, "nominal", "one GPU in a node: there is no link inside it", 0.0)
    facts: LinkFacts | None = read_hardware().links.get(compute.interconnect or "")
    nominal, latency = (facts.gb_s, facts.latency_us or 0.0) if facts else (0.0, 0.0)
    if measured:
        wide = None if _spans(cluster, measured) else measured.inter_gb_s
        if bandwidth := wide or measured.intra_gb_s:
            return _link(f"nccl-check of {measured.date}", bandwidth, nominal, latency, measured.transport)
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
    if not is_joined(cluster, measured):
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
