"""Published runs, throughput tables and figures of others as data: what the planner is graded against.

The rows stand in the YAML files beside this module, each with its source. Nothing here computes a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from clustertune.config.schema import Section
from clustertune.config.yamlfile import read_text
from clustertune.errors import Problem, UserError
from clustertune.plan.published.rows import DTYPE_BYTES, Claim, PublishedCluster, PublishedModel, PublishedNetwork, PublishedRun

FOLDER = Path(__file__).resolve().parent
ROOT = Path(__file__).resolve().parents[3]
Row = TypeVar("Row", bound=Section)

__all__ = [
    "DTYPE_BYTES",
    "Claim",
    "ClaimsFile",
    "PublishedCluster",
    "PublishedModel",
    "PublishedNetwork",
    "PublishedRun",
    "claims_file",
    "cluster_document",
    "published_clusters",
    "published_models",
    "published_run",
    "published_runs",
]


def read(path: Path) -> dict[str, Any]:
    """The values of a data file. Raises UserError where it cannot be read or parsed.

    libyaml's parser where PyYAML has it: recipes are read by one in Python, which needs half a second for these files.
    """
    text = read_text(path, path.name)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        data = loader.get_single_data()
    except yaml.YAMLError as error:
        raise UserError(Problem(f"not valid YAML: {' '.join(str(error).split())}", file=path.name)) from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise UserError(Problem("holds no sections", file=path.name))
    return data


def _rows(kind: type[Row], named: list[tuple[str, Any]], file: str) -> list[Row]:
    """Each row checked; every problem of the file at once."""
    found, problems = [], []
    adapter = TypeAdapter(kind)
    for name, body in named:
        try:
            found.append(adapter.validate_python(body))
        except ValidationError as error:
            for item in error.errors(include_url=False):
                key = ".".join([name, *map(str, item["loc"])])
                problems.append(Problem(item["msg"].removeprefix("Value error, "), file=file, key=key))
    if problems:
        raise UserError(problems)
    return found


@cache
def published_models(path: Path = FOLDER / "models.yaml") -> Mapping[str, PublishedModel]:
    """The models by key. Raises UserError with every problem of the file."""
    named = list(read(path)["models"].items())
    return dict(zip((name for name, _ in named), _rows(PublishedModel, named, path.name), strict=True))


@cache
def published_clusters(path: Path = FOLDER / "clusters.yaml") -> Mapping[str, PublishedCluster]:
    """The clusters by key; one with a ``file`` takes GPU, nodes and network from there. Raises UserError."""
    named = [(name, _from_file(body) if "file" in body else body) for name, body in read(path)["clusters"].items()]
    return dict(zip((name for name, _ in named), _rows(PublishedCluster, named, path.name), strict=True))


def _from_file(body: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster of this project's own files, in the form of the published ones."""
    told = read(ROOT / body["file"])
    compute, network = told["compute"], told["network"]
    return {
        "gpu": compute["gpu"],
        "gpus_per_node": compute["gpus"],
        "interconnect": compute["interconnect"],
        "network": {"kind": network["kind"], "gbit": network["gbit"], "ports": network.get("ports", 1)},
        "host_gb": compute["memory_gb"],
        **body,
    }


@cache
def published_runs(path: Path = FOLDER / "runs.yaml") -> tuple[PublishedRun, ...]:
    """All runs, in the order of the file. Raises UserError with every problem of the file."""
    clusters, models = published_clusters(), published_models()
    named = []
    for group in read(path)["groups"]:
        for own in group["runs"]:
            body = {"set": group["set"], "source": group["source"], **group.get("common", {}), **own}
            cluster = clusters.get(body.get("cluster", ""))
            body.setdefault("gpus_per_node", cluster.gpus_per_node if cluster else 1)
            named.append((str(own.get("id", "?")), body))
    runs = _rows(PublishedRun, named, path.name)
    problems = [
        Problem(f"there is no such {what}: {key!r}", file=path.name, key=f"{run.id}.{what}")
        for run in runs
        for what, key, known in (("cluster", run.cluster, clusters), ("model", run.model, models))
        if key not in known
    ]
    ids = [run.id for run in runs]
    problems += [Problem("stands twice", file=path.name, key=name) for name in sorted({i for i in ids if ids.count(i) > 1})]
    if problems:
        raise UserError(problems)
    return tuple(runs)


def published_run(name: str) -> PublishedRun:
    """The run of an id. Raises UserError where there is none."""
    for run in published_runs():
        if run.id == name:
            return run
    raise UserError(Problem(f"there is no published run {name!r}", file="runs.yaml"))


def cluster_document(run: PublishedRun) -> dict[str, Any]:
    """The content of a cluster file for the machine of a run, with as many nodes as the run used.

    Cores and storage are placeholders: no plan of time or memory per GPU reads them.
    """
    cluster = published_clusters()[run.cluster]
    nodes = [{"name": f"node{index}", "address": f"10.0.{index // 250}.{index % 250 + 1}"} for index in range(run.nodes)]
    compute: dict[str, Any] = {
        "gpus": cluster.gpus_per_node,
        "gpu": cluster.gpu,
        "interconnect": cluster.interconnect,
        "cores": 64,
        "threads": 64,
        "memory_gb": cluster.host_gb,
    }
    if cluster.domain:
        compute["nvlink_domain"] = cluster.domain
    network: dict[str, Any] = {"kind": "none"}
    if cluster.network and run.nodes > 1:
        network = {"kind": cluster.network.kind, "ports": cluster.network.ports}
        network |= {"gbit": cluster.network.gbit} if cluster.network.gbit else {}
        network |= {"measured_gb_s": cluster.measured_gb_s} if cluster.measured_gb_s else {}
    return {
        "name": run.cluster,
        "nodes": [node | {"roles": ["compute"]} for node in nodes],
        "compute": compute,
        "network": network,
    }


class ClaimsFile(Section):
    """The claims and how far a figure may be off."""

    sources: dict[str, str]
    """The documents by key."""
    tolerance: float
    """Relative distance up to which a figure is right."""
    coarse: float
    """Relative distance up to which it is imprecise; beyond it is refuted."""
    claims: tuple[Claim, ...]


@cache
def claims_file(path: Path = FOLDER / "claims.yaml") -> ClaimsFile:
    """The claims. Raises UserError with every problem of the file."""
    body = read(path)
    claims = _rows(Claim, [(str(claim.get("id", "?")), claim) for claim in body["claims"]], path.name)
    problems = [
        Problem(f"there is no source {claim.source!r}", file=path.name, key=f"{claim.id}.source")
        for claim in claims
        if claim.source not in body["sources"]
    ]
    ids = [claim.id for claim in claims]
    problems += [Problem("stands twice", file=path.name, key=name) for name in sorted({i for i in ids if ids.count(i) > 1})]
    if problems:
        raise UserError(problems)
    return ClaimsFile(sources=body["sources"], tolerance=body["tolerance"], coarse=body["coarse"], claims=tuple(claims))
