"""The result of an ``nccl-check``: what the links of a cluster carried when they were measured.

A JSON file beside the cluster file, ``NAME.nccl-check.json``::

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

from clustertune.cluster.hardware import IsoDate
from clustertune.cluster.load import CLUSTERS
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.recipe.findings import Found, read_model
from clustertune.recipe.layers import Document, parse_json, read_text
from clustertune.recipe.sections import Number, Positive, Section

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


@dataclass(frozen=True)
class MeasuredLinks:
    """What a plan takes from a check."""

    cluster: str
    date: str
    nodes: int
    gpus_per_node: int
    backend: str
    transport: str
    intra_gb_s: float | None
    """Bus bandwidth of an all-gather inside a node, GB/s per GPU; None: not measured."""
    inter_gb_s: float | None
    """Over all nodes, GB/s per node and direction; None: not measured."""
    source: str
    """The file."""

    @property
    def world(self) -> int:
        """GPUs that took part."""
        return self.nodes * self.gpus_per_node


def read_measured(path: str | Path) -> MeasuredLinks:
    """The result in a file. Raises UserError with every problem in it."""
    shown = str(path)
    data = parse_json(read_text(Path(path), shown), shown, "run nccl-check again")
    if not isinstance(data, dict):
        raise UserError(Problem("contains no nccl-check result", file=shown, fix=f"give a file with schema {SCHEMA}"))
    check = read_model(CheckFile, Document(shown, data), _contradictions)
    return MeasuredLinks(
        cluster=check.cluster,
        date=check.date,
        nodes=check.nodes,
        gpus_per_node=check.gpus_per_node,
        backend=check.backend,
        transport=check.transport,
        intra_gb_s=_bandwidth(check.results, ("intra",)),
        inter_gb_s=_bandwidth(check.results, ("world", "inter")) if check.nodes > 1 else None,
        source=shown,
    )


def find_measured(cluster: Cluster) -> MeasuredLinks | None:
    """The result that lies beside the cluster's file; None where there is none. Raises UserError where it cannot be read."""
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
