"""The size of each stage's job: nodes, GPUs, cores, memory and time, from the recipe and the cluster file, with formulas."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clustertune.cluster.hardware import read_hardware
from clustertune.cluster.schema import LOCAL, Cluster
from clustertune.errors import Problem, UserError
from clustertune.host.system import GIB
from clustertune.launch import serving
from clustertune.launch.slurm import format_minutes
from clustertune.plan.calibration import find_calibrated
from clustertune.plan.machine import has_cudnn_attention
from clustertune.plan.memory import RANK_HOST_BYTES
from clustertune.plan.predict import Footprint, fewest_nodes, footprint
from clustertune.plan.schedule import TOKENS_PER_CPU_S, tokens_to_prepare
from clustertune.recipe.parameters import is_counted, trained_count, weight_bytes
from clustertune.recipe.sections import NAME, parse_minutes
from clustertune.resolve.resolve import asked_size, resolve
from clustertune.resolve.resolved import Resolved, how_to_load
from clustertune.rundir import STAGES

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
GPU_MEMORY = "slurm.nodes"
"""The key that a recipe which does not fit is reported under."""
TINY_RANKS = 2
"""Ranks of a tiny run on a node without GPUs."""


@dataclass(frozen=True)
class JobShape:
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
        nodes = f"{self.nodes} nodes, per node" if self.nodes > 1 else "1 node"
        gpus = f"{self.gpus_per_node} GPU{'s' if self.gpus_per_node != 1 else ''}"
        memory = "all memory" if self.memory_gb is None else f"{self.memory_gb} GiB"
        return f"{nodes}: {gpus}, {self.cpus_per_node} CPUs, {memory}; limit {format_minutes(self.minutes)}"


def check_word(value: str) -> str:
    """``value``, which becomes part of an ``#SBATCH`` line: a blank or a line break would begin an option of its own."""
    assert re.fullmatch(NAME, value), value
    return value


def overridden(resolved: Resolved, key: str) -> bool:
    """Whether the command line gave the value of a key."""
    return resolved.origins.get(key) == "override"


def resolve_on(recipe: str, overrides: Sequence[str], cluster: Cluster, *, tiny: bool) -> tuple[Resolved, list[str]]:
    """The recipe as a cluster runs it, and the overrides that say so: a tiny run takes as many nodes and GPUs as there are.

    The job of every stage, whatever its own size, has the ranks of the training. Raises UserError as ``resolve`` does.
    """
    changes = [*overrides, *(tiny_size(recipe, overrides, cluster) if tiny else [])]
    return resolve(recipe, changes, tiny=tiny), changes


def tiny_size(recipe: str, overrides: Sequence[str], cluster: Cluster) -> list[str]:
    """The overrides by which a tiny run takes no more nodes and GPUs than a cluster has; what is named stays as it is."""
    named, requested = {text.partition("=")[0] for text in overrides}, asked_size(recipe, overrides)
    most = _most(cluster)
    return [f"{key}={min(requested[key], most[key])}" for key in most if not named & {key, "slurm"}]


def _most(cluster: Cluster) -> dict[str, int]:
    return {"slurm.nodes": max(1, len(cluster.compute_nodes)), "slurm.gpus_per_node": cluster.compute.gpus or TINY_RANKS}


def _size(resolved: Resolved, cluster: Cluster) -> tuple[int, int]:
    """Nodes and ranks per node of the training, also of a tiny run that was resolved without the cluster."""
    requested = {"slurm.nodes": resolved.recipe.slurm.nodes, "slurm.gpus_per_node": resolved.recipe.slurm.gpus_per_node}
    if resolved.tiny:
        most = _most(cluster)
        requested = {key: size if overridden(resolved, key) else min(size, most[key]) for key, size in requested.items()}
    return requested["slurm.nodes"], requested["slurm.gpus_per_node"]


def stage_shapes(resolved: Resolved, cluster: Cluster) -> dict[str, JobShape]:
    """The shape of each stage's job."""
    limit = _limit(cluster)
    # The trained weights in float32, once as read and once as written, beside the process.
    export_gb = PROCESS_GB + 2 * 4 * (trained_count(resolved.architecture, resolved.lora) or 0) / GIB
    # Half an hour beside the merge itself; rounded up to ten minutes. Memory does not grow with the model: 192 MiB of buffers,
    # and two shards of page cache for the device to keep up.
    merge_minutes = 10 * math.ceil((30 + merge_seconds(resolved) / 60) / 10)
    shapes = {
        "prepare": _prepare(resolved, cluster),
        "train": train_shape(resolved, cluster),
        "export": _helper(resolved, cluster, cpus=4, memory=export_gb, minutes=EXPORT_MINUTES),
        "merge": _helper(resolved, cluster, cpus=16, memory=PROCESS_GB + 2 * MERGE_SHARD_GB, minutes=merge_minutes),
        "eval": _eval(resolved, cluster),
        "report": _helper(resolved, cluster, cpus=2, memory=PROCESS_GB, minutes=REPORT_MINUTES),
    }
    assert tuple(shapes) == STAGES
    return {
        name: shape if name == "train" else replace(shape, minutes=min(shape.minutes, limit)) for name, shape in shapes.items()
    }


def train_shape(resolved: Resolved, cluster: Cluster) -> JobShape:
    """The training: the recipe's nodes and ranks, and of each node the share of cores and memory that the GPUs are."""
    nodes, ranks = _size(resolved, cluster)
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
        least = host_bytes(resolved, cluster) / GIB
        memory = _at_most_node(max(math.floor(compute.memory_gb * share), math.ceil(1.1 * least)), cluster)
    return JobShape(nodes + resolved.recipe.server_nodes, gpus, ranks, cpus, memory, minutes, *site_fields(cluster))


def _helper(resolved: Resolved, cluster: Cluster, *, cpus: int, memory: float, minutes: float) -> JobShape:
    """A stage of one process without a GPU."""
    if resolved.tiny:
        cpus, memory, minutes = min(cpus, TINY_CPUS), min(memory, 2 * PROCESS_GB), TINY_MINUTES
    cpus = min(cpus, cluster.compute.threads)
    return JobShape(1, 0, 1, cpus, _at_most_node(memory, cluster), math.ceil(minutes), *site_fields(cluster))


def _prepare(resolved: Resolved, cluster: Cluster) -> JobShape:
    """Enough cores to tokenise in two minutes, and time for at least twice as long as it takes."""
    cpu_seconds = (tokens_to_prepare(resolved) or 0.0) / TOKENS_PER_CPU_S
    cpus = min(max(PREPARE_CPUS, math.ceil(cpu_seconds / PREPARE_SECONDS)), cluster.compute.threads)
    memory = 3 * PROCESS_GB + TOKENISER_GB * cpus
    return _helper(resolved, cluster, cpus=cpus, memory=memory, minutes=max(PREPARE_MINUTES, 30 + 2 * cpu_seconds / cpus / 60))


def merge_seconds(resolved: Resolved) -> float:
    """An estimate of the merge: the model once read and once written; 0 without an adapter."""
    return 2 * (weight_bytes(resolved.architecture) or 0) / MERGE_BYTES_PER_SECOND if resolved.lora is not None else 0.0


def _eval(resolved: Resolved, cluster: Cluster) -> JobShape:
    """The GPUs of the backend, for twice the most time that is foreseen; the recipe's time limit where nothing is."""
    compute, evaluation = cluster.compute, serving.evaluation(resolved, cluster)
    if resolved.tiny and not evaluation.serving:
        small = _helper(resolved, cluster, cpus=TINY_CPUS, memory=PROCESS_GB, minutes=TINY_MINUTES)
        return replace(small, gpus_per_node=min(1, compute.gpus))
    if evaluation.seconds_range is not None:
        minutes = min(max(TINY_MINUTES, 10 * math.ceil(2 * evaluation.seconds_range[1] / 600)), _limit(cluster))
    else:
        minutes = TINY_MINUTES if evaluation.serving else math.ceil(parse_minutes(resolved.recipe.slurm.time) or 0)
    gpus = compute.gpus if evaluation.gpus_per_node is None else evaluation.gpus_per_node
    share = gpus / compute.gpus if compute.gpus else 1.0
    cpus = max(1, math.floor(compute.threads * share))
    memory = None if share == 1.0 else _at_most_node(compute.memory_gb * share, cluster)
    return JobShape(
        evaluation.serving.nodes if evaluation.serving else 1, gpus, 1, cpus, memory, minutes, *site_fields(cluster)
    )


def usable_gpu_bytes(cluster: Cluster) -> float | None:
    """Memory of one GPU of the cluster; None without GPUs, or where their model is not known."""
    if not cluster.compute.gpus or cluster.compute.gpu is None:
        return None
    known = read_hardware().gpus.get(cluster.compute.gpu)
    return float(known.usable_bytes) if known else None


def _at_most_node(memory: float, cluster: Cluster) -> int | None:
    """Whole GiB; None (all of the node) where it has no more than that."""
    return math.ceil(memory) if memory <= 0.95 * cluster.compute.memory_gb else None


def site_fields(cluster: Cluster) -> tuple[str | None, str | None, tuple[str, ...], tuple[str, ...]]:
    """The last four fields of a :class:`JobShape`: what the cluster file says about all jobs."""
    slurm = cluster.slurm
    return (slurm.partition, slurm.gres, slurm.site_options(), slurm.modules) if slurm else (None, None, (), ())


def _limit(cluster: Cluster) -> int:
    minutes = parse_minutes(cluster.slurm.max_time) if cluster.slurm else None
    return math.floor(minutes) if minutes is not None else 10**9


def find_problems(resolved: Resolved, cluster: Cluster) -> list[Problem]:
    """What a recipe asks for that the cluster does not have: nodes, GPUs, memory, and time beyond the signal's margin."""
    margin = signal_problems(resolved.recipe.slurm.signal_seconds, train_shape(resolved, cluster).minutes, file=resolved.name)
    return [*size_problems(resolved, cluster), *fit_problems(resolved, cluster), *margin]


def size_problems(resolved: Resolved, cluster: Cluster) -> list[Problem]:
    """Nodes, GPUs and time that a recipe asks for and the cluster does not have."""
    nodes, ranks = _size(resolved, cluster)
    have, compute = len(cluster.compute_nodes), cluster.compute
    called = f"cluster {cluster.name}{' (this machine)' if cluster.name == LOCAL and not cluster.slurm else ''}"
    problems = []

    def add(key: str, message: str, fix: str | None = None) -> None:
        problems.append(Problem(message, file=resolved.name, key=key, fix=fix))

    if (nodes := nodes + resolved.recipe.server_nodes) > have:
        left = have - resolved.recipe.server_nodes
        fix = f"{f'slurm.nodes={left}, or ' if left > 0 else ''}--cluster NAME for another cluster"
        add("slurm.nodes", f"the recipe needs {nodes} nodes; {called} has {have} compute node{'s' if have != 1 else ''}", fix)
    if compute.gpus and ranks > compute.gpus:
        fix = f"slurm.gpus_per_node={compute.gpus}"
        add("slurm.gpus_per_node", f"the recipe needs {ranks} GPUs per node; {called} has {compute.gpus}", fix)
    if compute.gpus and resolved.recipe.beside is not None and resolved.recipe.beside.tensor_parallel_size > ranks:
        wide = resolved.recipe.beside.tensor_parallel_size
        text = f"a server takes {wide} GPUs, and the job has {ranks} on each node"
        add("servers.tensor_parallel_size", text, f"servers.tensor_parallel_size={ranks}, or a larger slurm.gpus_per_node")
    answers_itself = resolved.recipe.eval.during is not None and not resolved.recipe.scores_beside
    shared = serving.evaluation(resolved, cluster).serving if answers_itself else None
    if shared is not None and shared.nodes > nodes:
        text = f"the model is served over {shared.nodes} nodes, and the training has {nodes}: no place to score checkpoints"
        add("eval.during", text, "leave it out, or train on as many nodes")
    minutes = parse_minutes(resolved.recipe.slurm.time) or 0
    if not minutes:
        add("slurm.time", f"{resolved.recipe.slurm.time} leaves no time to run", "slurm.time=24:00:00")
    elif minutes > _limit(cluster) and cluster.slurm and (not resolved.tiny or overridden(resolved, "slurm.time")):
        most = cluster.slurm.max_time
        text = f"{resolved.recipe.slurm.time}, partition {cluster.slurm.partition} allows {most}"
        add("slurm.time", text, f"slurm.time={most}: the run continues in another job")
    return problems


def held(resolved: Resolved, cluster: Cluster) -> Footprint | None:
    """The memory that ``plan`` foresees on a cluster; None where the model cannot be counted, or for a tiny run, which fits."""
    if resolved.tiny or not is_counted(resolved.architecture):
        return None
    try:
        return footprint(resolved, find_calibrated(cluster).constants, cudnn=has_cudnn_attention(cluster))[0]
    except UserError:
        return None  # plan and doctor say why


def host_bytes(resolved: Resolved, cluster: Cluster) -> float:
    """RAM of the fullest node, bytes; 0 where it cannot be foreseen."""
    memory = held(resolved, cluster)
    return memory.host_bytes if memory else 0.0


def gpu_room(resolved: Resolved, cluster: Cluster) -> float | None:
    """Bytes that a rank may take: of its GPU, or of RAM on a cluster without GPUs; None where the GPU is not known."""
    if cluster.compute.gpus:
        return usable_gpu_bytes(cluster)
    return max(0.0, cluster.compute.memory_gb * GIB / resolved.distribution.ranks_per_node - RANK_HOST_BYTES)


def least_nodes(resolved: Resolved, cluster: Cluster) -> int | None:
    """The fewest nodes, with the recipe's ranks on each, that hold it; None: none, or it cannot be foreseen."""
    room = gpu_room(resolved, cluster)
    if room is None or held(resolved, cluster) is None:
        return None
    return fewest_nodes(resolved, find_calibrated(cluster).constants, room, cudnn=has_cudnn_attention(cluster))


def fit_problems(resolved: Resolved, cluster: Cluster) -> list[Problem]:
    """What does not fit into GPU or host memory by the figures of ``clustertune plan``; a tiny run always fits."""
    memory, room = held(resolved, cluster), gpu_room(resolved, cluster)
    if memory is None:
        return []
    problems = []
    if room is not None and memory.needed > room:
        each = resolved.distribution.ranks_per_node
        location = f"a {cluster.compute.gpu}" if cluster.compute.gpus else f"each of {each} processes per node"
        shares = ", ".join(f"{part.name} {part.value / GIB:.1f}" for part in memory.peak.parts)
        text = f"predicted {memory.needed / GIB:.1f} GiB on each rank at the {memory.peak.name}, "
        text += f"{location} has {room / GIB:.1f} GiB"
        least = least_nodes(resolved, cluster)
        fix = f"slurm.nodes={least} is the least with {each} ranks per node" if least else "no number of nodes helps"
        fix += f"; clustertune plan {resolved.name} --advise lists what fits"
        if cluster.name == LOCAL and not cluster.slurm and not cluster.compute.gpus:
            fix = "this machine has no GPUs: name a cluster with --cluster NAME"
        problems.append(Problem(f"{text} (GiB: {shares})", file=resolved.name, key=GPU_MEMORY, fix=fix))
    node_bytes = cluster.compute.memory_gb * GIB
    if cluster.compute.gpus and memory.host_bytes > node_bytes:
        parts = ", ".join(f"{part.name} {part.value / GIB:,.0f}" for part in memory.host)
        text = f"predicted {memory.host_bytes / GIB:,.0f} GiB of host memory on a node, it has {node_bytes / GIB:,.0f} GiB"
        key, fix = how_to_load(resolved.distribution)
        file = f"{resolved.name}/{resolved.accelerate_file}"
        problems.append(Problem(f"{text} (GiB: {parts})", file=file, key=key, fix=fix))
    return problems


def warnings(resolved: Resolved, cluster: Cluster) -> list[str]:
    """What may go wrong and cannot be determined for certain."""
    notes = []
    if not resolved.tiny and cluster.compute.gpus and usable_gpu_bytes(cluster) is None:
        notes.append(
            f"cluster {cluster.name} does not say which GPU it has (compute.gpu): whether the recipe fits is not checked"
        )
    if resolved.recipe.slurm.staging and cluster.storage.staging is None:
        notes.append(f"slurm.staging: true copies nothing: cluster {cluster.name} names no disk for it (storage.staging)")
    chosen = serving.evaluation(resolved, cluster)
    if chosen.note:
        notes.append(f"eval: {chosen.note}")
    return notes


# --- the signal before the limit ------------------------------------------------------------------------------------------

# How long before its time limit Slurm signals a job (``slurm.signal_seconds``): it ends the step it is in, saves, and exits.
# Slurm looks at its jobs now and then and may send the signal up to 60 seconds early (sbatch(1), --signal): that only costs
# time. A signal that comes too late costs everything since the last save.

EARLY_SECONDS = 60
"""How much earlier than asked the signal may come."""
_SIGNAL = re.compile(r"^#SBATCH\s+(?:.*\s)?--signal[=\s]+['\"]?(?:R?B:|R:)?[A-Z0-9]+@(\d+)", re.MULTILINE)


def signal_given(text: str) -> int | None:
    """The seconds of a script's ``#SBATCH --signal=B:USR1@N``; None where it has none."""
    signals = _SIGNAL.findall(text)
    return int(signals[-1]) if signals else None


def signal_warning(seconds: int | None, needed: int, limit_minutes: float | None = None) -> str | None:
    """What to say at the start of a job whose script signals too late, or halfway to its limit or before; None if it is right.

    ``seconds``: what the script asks for. ``needed``: what the recipe does. ``limit_minutes``: the job's time limit, None
    where there is none or it is not known. What sbatch was given on its command line replaces the script's, and Slurm does
    not report it: the message names the script.
    """
    again = f"-> sbatch --signal=B:USR1@{needed} ..."
    if seconds is None or seconds < needed:
        has = "no --signal" if seconds is None else f"--signal=B:USR1@{seconds}"
        return (
            f"{has}: too late to save before the time limit, slurm.signal_seconds is {needed}; what was computed since the "
            f"last save would be lost {again}"
        )
    if limit_minutes is not None and limit_minutes * 60 < 2 * (seconds + EARLY_SECONDS):
        left = max(0, round(limit_minutes * 60 - seconds))
        return (
            f"the script's --signal=B:USR1@{seconds} tells a job of {limit_minutes:g} minutes to stop {left} s after its "
            f"start, and it goes back into the queue each time; slurm.signal_seconds is {needed} {again}"
        )
    return None


def signal_problems(seconds: int, minutes: float, *, file: str) -> list[Problem]:
    """A time limit that the warning would use up: the job would be asked to stop as soon as it starts."""
    least = 2 * (seconds + EARLY_SECONDS) / 60
    if minutes >= least:
        return []
    text = f"{minutes:g} minutes leave no time to train: the signal comes slurm.signal_seconds={seconds} before the end"
    fix = f"give at least {math.ceil(least)} minutes, or a smaller slurm.signal_seconds"
    return [Problem(text, file=file, key="slurm.time", fix=fix)]
