"""The size of each stage's job: nodes, GPUs, cores, memory and time, from the recipe and the cluster file, with formulas."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from clustertune.config import deepspeed as ds
from clustertune.config.cluster_schema import Cluster
from clustertune.config.hardware import load_hardware
from clustertune.config.resolved import Resolved
from clustertune.config.schema import NAME
from clustertune.errors import Problem
from clustertune.launch import fit
from clustertune.launch.slurm import format_minutes, parse_minutes
from clustertune.plan.host import RANK_HOST_BYTES
from clustertune.plan.schedule import TOKENS_PER_CPU_S, tokens_to_prepare
from clustertune.rundir import STAGES

GIB = 1 << 30
MERGE_SHARD_GB = 5
"""``clustertune merge``'s default shard size."""
PROCESS_GB = 4
"""An interpreter with torch, transformers and lm-eval loaded, rounded up."""
TINY_RANK_GB, TINY_CPUS = 4, 4
TINY_MINUTES = 60
PREPARE_MINUTES, EXPORT_MINUTES, REPORT_MINUTES = 120, 60, 30
PREPARE_CPUS, PREPARE_SECONDS, TOKENISER_GB = 8, 120.0, 0.5
"""Of prepare: cores at least, the time in which it should have tokenised, and a process's memory (docs/results/data.md)."""
MERGE_BYTES_PER_SECOND = 0.2e9
"""Network storage that reads and writes at once; docs/results/merge.md has four times that from a local disk."""
TINY_RANKS = 2
"""Ranks of a tiny run on a node without GPUs."""


@dataclass(frozen=True)
class Shape:
    """What one job asks of Slurm."""

    nodes: int
    gpus_per_node: int
    """GPUs asked for on each node; 0: none."""
    ranks_per_node: int
    cpus_per_node: int
    memory_gb: int | None
    """GiB on each node; None: all that the node has."""
    minutes: int
    partition: str | None = None
    gres: str | None = None
    """Type name of the GPUs."""
    site: tuple[str, ...] = ()
    """Further options of ``sbatch``: who pays, and which nodes (:meth:`SlurmFacts.site_options`)."""
    modules: tuple[str, ...] = ()
    """Environment modules that the job loads first."""

    def options(self) -> list[str]:
        """The options of ``sbatch``, one task per node. Values hold no blank: see :func:`check_word`."""
        options = [f"--nodes={self.nodes}", "--ntasks-per-node=1"]
        if self.gpus_per_node:
            kind = f"{check_word(self.gres)}:" if self.gres else ""
            options.append(f"--gpus-per-node={kind}{self.gpus_per_node}")
        options.append(f"--cpus-per-task={self.cpus_per_node}")
        options.append("--mem=0" if self.memory_gb is None else f"--mem={self.memory_gb}G")
        options.append(f"--time={format_minutes(self.minutes)}")
        if self.partition:
            options.append(f"--partition={check_word(self.partition)}")
        return [*options, *self.site]

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        gpus = f"{self.gpus_per_node} GPU{'s' if self.gpus_per_node > 1 else ''}" if self.gpus_per_node else "no GPU"
        memory = "all memory" if self.memory_gb is None else f"{self.memory_gb} GiB"
        return f"{nodes}, {gpus}, {self.cpus_per_node} CPUs, {memory} each, {format_minutes(self.minutes)}"


def check_word(value: str) -> str:
    """``value``, which becomes part of an ``#SBATCH`` line: a blank or a line break would begin an option of its own."""
    assert re.fullmatch(NAME, value), value
    return value


def overridden(resolved: Resolved, key: str) -> bool:
    """Whether the command line gave the value of a key."""
    return resolved.origins.get(key) == "override"


def run_shape(resolved: Resolved, cluster: Cluster) -> tuple[int, int]:
    """Nodes and ranks per node of the training: the recipe's; of a tiny run, as many of them as the cluster has."""
    nodes, ranks = resolved.recipe.slurm.nodes, resolved.recipe.slurm.gpus_per_node
    if resolved.tiny and not overridden(resolved, "slurm.nodes"):
        nodes = min(nodes, max(1, len(cluster.compute_nodes)))
    if resolved.tiny and not overridden(resolved, "slurm.gpus_per_node"):
        ranks = min(ranks, cluster.compute.gpus or TINY_RANKS)
    return nodes, ranks


def shape_overrides(resolved: Resolved, cluster: Cluster) -> list[str]:
    """The overrides by which the job of every stage, whatever its own size, sees the ranks of a tiny run's training."""
    if not resolved.tiny:
        return []
    nodes, ranks = run_shape(resolved, cluster)
    return [f"slurm.nodes={nodes}", f"slurm.gpus_per_node={ranks}"]


def stage_shapes(resolved: Resolved, cluster: Cluster) -> dict[str, Shape]:
    """The shape of each stage's job."""
    limit = _limit(cluster)
    shapes = {
        "prepare": _prepare(resolved, cluster),
        "train": train_shape(resolved, cluster),
        "export": _helper(resolved, cluster, cpus=4, memory=_export_gb(resolved), minutes=EXPORT_MINUTES),
        "merge": _helper(resolved, cluster, cpus=16, memory=PROCESS_GB + 2 * MERGE_SHARD_GB, minutes=_merge_minutes(resolved)),
        "eval": _eval(resolved, cluster),
        "report": _helper(resolved, cluster, cpus=2, memory=PROCESS_GB, minutes=REPORT_MINUTES),
    }
    assert tuple(shapes) == STAGES
    return {
        name: shape if name == "train" else replace(shape, minutes=min(shape.minutes, limit)) for name, shape in shapes.items()
    }


def train_shape(resolved: Resolved, cluster: Cluster) -> Shape:
    """The training: the recipe's nodes and ranks, and of each node the share of cores and memory that the GPUs are."""
    nodes, ranks = run_shape(resolved, cluster)
    compute = cluster.compute
    gpus = ranks if compute.gpus else 0
    share = min(1.0, gpus / compute.gpus) if compute.gpus else 1.0
    cpus = max(1, math.floor(compute.threads * share))
    minutes = math.ceil(parse_minutes(resolved.recipe.slurm.time) or 0)
    if resolved.tiny:
        cpus = min(cpus, TINY_CPUS * ranks)
        memory: int | None = _at_most_node(PROCESS_GB + TINY_RANK_GB * ranks, cluster)
        minutes = minutes if overridden(resolved, "slurm.time") else min(minutes, TINY_MINUTES)
    elif share == 1.0:
        memory = None
    else:
        least = fit.total(fit.loading_parts(resolved, ranks)) / GIB
        memory = _at_most_node(max(math.floor(compute.memory_gb * share), math.ceil(1.1 * least)), cluster)
    return Shape(nodes, gpus, ranks, cpus, memory, minutes, *_place(cluster))


def _helper(resolved: Resolved, cluster: Cluster, *, cpus: int, memory: float, minutes: float) -> Shape:
    """A stage of one process without a GPU."""
    if resolved.tiny:
        cpus, memory, minutes = min(cpus, TINY_CPUS), min(memory, 2 * PROCESS_GB), TINY_MINUTES
    cpus = min(cpus, cluster.compute.threads)
    return Shape(1, 0, 1, cpus, _at_most_node(memory, cluster), math.ceil(minutes), *_place(cluster))


def _prepare(resolved: Resolved, cluster: Cluster) -> Shape:
    """Enough cores to tokenise in two minutes, and time for at least twice as long as it takes."""
    cpu_seconds = (tokens_to_prepare(resolved) or 0.0) / TOKENS_PER_CPU_S
    cpus = min(max(PREPARE_CPUS, math.ceil(cpu_seconds / PREPARE_SECONDS)), cluster.compute.threads)
    memory = 3 * PROCESS_GB + TOKENISER_GB * cpus
    return _helper(resolved, cluster, cpus=cpus, memory=memory, minutes=max(PREPARE_MINUTES, 30 + 2 * cpu_seconds / cpus / 60))


def _export_gb(resolved: Resolved) -> float:
    """The trained weights in float32, once as read and once as written, beside the process."""
    return PROCESS_GB + 2 * 4 * (fit.trainable(resolved) or 0) / GIB


def _merge_minutes(resolved: Resolved) -> float:
    """Half an hour, and the model once read and once written; rounded up to ten minutes.

    Memory does not grow with the model: 192 MiB of buffers, and two shards of page cache for the device to keep up.
    """
    seconds = 2 * (fit.weight_bytes(resolved) or 0) / MERGE_BYTES_PER_SECOND
    return 10 * math.ceil((30 + seconds / 60) / 10)


def _eval(resolved: Resolved, cluster: Cluster) -> Shape:
    """One node, with as many GPUs as hold the merged model in bfloat16 and a tenth more; the recipe's time limit."""
    compute = cluster.compute
    if resolved.tiny:
        small = _helper(resolved, cluster, cpus=TINY_CPUS, memory=PROCESS_GB, minutes=TINY_MINUTES)
        return replace(small, gpus_per_node=min(1, compute.gpus))
    minutes = math.ceil(parse_minutes(resolved.recipe.slurm.time) or 0)
    gpus = min(compute.gpus, eval_gpus(resolved, cluster) or compute.gpus)
    share = gpus / compute.gpus if compute.gpus else 1.0
    cpus = max(1, math.floor(compute.threads * share))
    memory = None if share == 1.0 else _at_most_node(compute.memory_gb * share, cluster)
    return Shape(1, gpus, 1, cpus, memory, minutes, *_place(cluster))


def eval_gpus(resolved: Resolved, cluster: Cluster) -> int | None:
    """GPUs that hold the merged weights in bfloat16 with a tenth for caches; None where that cannot be told."""
    weights, room = fit.weight_bytes(resolved), usable_gpu_bytes(cluster)
    if weights is None or room is None:
        return None
    return max(1, math.ceil(1.1 * weights / room))


def usable_gpu_bytes(cluster: Cluster) -> float | None:
    """Memory of one GPU of the cluster; None without GPUs, or where their model is not known."""
    if not cluster.compute.gpus or cluster.compute.gpu is None:
        return None
    known = load_hardware().get(cluster.compute.gpu)
    return float(known.usable_bytes) if known else None


def _at_most_node(memory: float, cluster: Cluster) -> int | None:
    """Whole GiB; None (all of the node) where it has no more than that."""
    return math.ceil(memory) if memory <= 0.95 * cluster.compute.memory_gb else None


def _place(cluster: Cluster) -> tuple[str | None, str | None, tuple[str, ...], tuple[str, ...]]:
    slurm = cluster.slurm
    return (slurm.partition, slurm.gres, slurm.site_options(), slurm.modules) if slurm else (None, None, (), ())


def _limit(cluster: Cluster) -> int:
    found = parse_minutes(cluster.slurm.max_time) if cluster.slurm else None
    return math.floor(found) if found is not None else 10**9


def find_problems(resolved: Resolved, cluster: Cluster) -> list[Problem]:
    """What a recipe asks for that the cluster does not have: nodes, GPUs, time, memory (GPU and host) to fit at all."""
    nodes, ranks = run_shape(resolved, cluster)
    have, compute = len(cluster.compute_nodes), cluster.compute
    problems = []

    def add(key: str, message: str, fix: str | None = None) -> None:
        problems.append(Problem(message, file=resolved.name, key=key, fix=fix))

    if nodes > have:
        fix = f"slurm.nodes={have}, or --cluster names another one" if have else "--cluster names another one"
        add("slurm.nodes", f"{nodes} nodes, cluster {cluster.name} has {have} that compute", fix)
    if compute.gpus and ranks > compute.gpus:
        fix = f"slurm.gpus_per_node={compute.gpus}"
        add("slurm.gpus_per_node", f"{ranks} GPUs per node, cluster {cluster.name} has {compute.gpus}", fix)
    minutes = parse_minutes(resolved.recipe.slurm.time) or 0
    if not minutes:
        add("slurm.time", f"{resolved.recipe.slurm.time} is no time to run in", "slurm.time=24:00:00")
    elif minutes > _limit(cluster) and cluster.slurm and (not resolved.tiny or overridden(resolved, "slurm.time")):
        most = cluster.slurm.max_time
        text = f"{resolved.recipe.slurm.time}, partition {cluster.slurm.partition} allows {most}"
        add("slurm.time", text, f"slurm.time={most}: the run goes on in another job")
    return problems + fit_problems(resolved, cluster, nodes, ranks)


def fit_problems(resolved: Resolved, cluster: Cluster, nodes: int, ranks: int) -> list[Problem]:
    """What cannot fit into GPU or host memory on ``nodes`` nodes with ``ranks`` ranks each; a tiny run always fits."""
    parts = fit.rank_parts(resolved, nodes * ranks, ranks)
    if resolved.tiny or not parts:
        return []
    problems = []
    node_bytes = cluster.compute.memory_gb * GIB
    room = usable_gpu_bytes(cluster)
    if not cluster.compute.gpus:
        room = max(0.0, node_bytes / ranks - RANK_HOST_BYTES)
    if room is not None and (need := fit.total(parts)) > room:
        place = f"a {cluster.compute.gpu}" if cluster.compute.gpus else f"each of {ranks} processes on a node"
        words = ", ".join(map(str, parts))
        text = f"needs at least {need / 1e9:.1f} GB on each rank, {place} has {room / 1e9:.1f} GB ({words})"
        least = fit.smallest_nodes(resolved, ranks, room)
        fix = (
            f"slurm.nodes={least} is the least with {ranks} ranks per node" if least else "no number of nodes helps: split more"
        )
        problems.append(Problem(text, file=resolved.name, key="slurm.nodes", fix=fix))
    loading = fit.loading_parts(resolved, ranks)
    if (need := fit.total(loading)) > node_bytes and cluster.compute.gpus:
        text = f"loading needs {need / 1e9:.1f} GB of host memory on a node, it has {node_bytes / 1e9:.1f} GB"
        text += f" ({', '.join(map(str, loading))})"
        key, fix = "fsdp_config", "fsdp_version: 2 with fsdp_cpu_ram_efficient_loading: true: each rank reads its rows"
        if (stage := ds.stage(resolved.accelerate, resolved.deepspeed)) is not None:
            key = f"deepspeed_config (ZeRO stage {stage})"
            fix = (
                "stage 3 without zero_hpz_partition_size and without a quantised base: each rank reads its part; or fewer ranks"
            )
        problems.append(Problem(text, file=f"{resolved.name}/{resolved.accelerate_file}", key=key, fix=fix))
    return problems


def warnings(resolved: Resolved, cluster: Cluster) -> list[str]:
    """What may go wrong and cannot be told for certain."""
    found = []
    if not resolved.tiny and cluster.compute.gpus and usable_gpu_bytes(cluster) is None:
        found.append(
            f"cluster {cluster.name} does not say which GPU it has (compute.gpu): whether the recipe fits is not checked"
        )
    if resolved.recipe.slurm.staging and cluster.storage.staging is None:
        found.append(f"slurm.staging: true copies nothing: cluster {cluster.name} names no disk for it (storage.staging)")
    needed = None if resolved.tiny else eval_gpus(resolved, cluster)
    if needed and needed > cluster.compute.gpus > 0:
        found.append(
            f"eval: the merged model needs {needed} GPUs of this kind in bfloat16, a node has {cluster.compute.gpus}: "
            "layers that do not fit are computed from host memory, which is slow"
        )
    return found
