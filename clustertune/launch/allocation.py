"""What Slurm gave a job, read from its environment, and whether it is what the recipe asks for."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.host.system import MIB
from clustertune.launch import shape, slurm
from clustertune.recipe.sections import parse_minutes
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Resolved
from clustertune.rundir import STAGES

SCRIPT = "launch/run.sbatch"


@dataclass(frozen=True)
class Allocation:
    """One job's share of the cluster."""

    job_id: str
    restart: int
    """How often Slurm has started it before."""
    nodes: tuple[str, ...]
    """Names, in the order of the node list: the first is where the batch script runs."""
    gpus_per_node: int
    cpus_per_node: int | None
    """Of the node with the fewest."""
    tasks_per_node: int | None
    memory_mb: int | None
    """MiB on each node; None: all of it, or unknown."""
    limit_minutes: float | None = None
    """The time limit; None: none, or not known."""
    left_minutes: float | None = None
    """What was left of it when this was read."""
    partition: str | None = None
    array_task: int | None = None
    name: str = ""
    array_job: str | None = None
    """The id of the array that the job is a task of."""
    spare: tuple[str, ...] = ()
    """Further nodes of the job, which do not train: those of the servers beside the trainer."""

    @property
    def handle(self) -> str:
        """By which Slurm's commands mean this job alone: one task of an array has the id of the whole."""
        return self.job_id if self.array_job is None else f"{self.array_job}_{self.array_task}"

    def split(self, resolved: Resolved) -> Allocation:
        """The same with the last nodes left to the servers beside the trainer."""
        at = max(1, len(self.nodes) - resolved.recipe.server_nodes)
        return replace(self, nodes=self.nodes[:at], spare=self.nodes[at:])


def read() -> Allocation:
    """The allocation of this process's job. Raises UserError as :func:`from_environment` does."""
    return from_environment(os.environ)


def from_environment(environ: Mapping[str, str], run: slurm.Run = slurm.call) -> Allocation:
    """The allocation of the job that this process runs in. Raises UserError (exit 2) outside of a job.

    ``run`` asks Slurm for what the environment lacks (node names, time limit); where it cannot, these stay unknown or are
    worked out here.
    """
    job = environ.get("SLURM_JOB_ID", "")
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not job.isdigit() or not listed:
        fix = "clustertune submit RECIPE, or sbatch launch/run.sbatch RECIPE; clustertune run RECIPE works without Slurm"
        raise UserError("this is not the batch step of a Slurm job: SLURM_JOB_ID or its nodes are not set", fix=fix)
    cpus = _counts(environ.get("SLURM_JOB_CPUS_PER_NODE")) or _counts(environ.get("SLURM_CPUS_ON_NODE"))
    tasks = _counts(environ.get("SLURM_NTASKS_PER_NODE")) or _counts(environ.get("SLURM_TASKS_PER_NODE"))
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), _whole(environ.get("SLURM_ARRAY_TASK_ID"))
    array = array if array and array.isdigit() and task is not None else None
    limit, left = _times(job if array is None else f"{array}_{task}", run)
    return Allocation(
        job_id=job,
        restart=_whole(environ.get("SLURM_RESTART_COUNT")) or 0,
        nodes=tuple(slurm.hostnames(listed, run)),
        gpus_per_node=_gpus(environ),
        cpus_per_node=min(cpus) if cpus else None,
        tasks_per_node=max(tasks) if tasks else None,
        memory_mb=_memory_mb(environ, min(cpus) if cpus else None),
        limit_minutes=limit,
        left_minutes=left,
        partition=environ.get("SLURM_JOB_PARTITION"),
        array_task=task,
        name=environ.get("SLURM_JOB_NAME", ""),
        array_job=array,
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _counts(text: str | None) -> list[int]:
    """``4(x2),8`` as 4, 4, 8; the repeat does not matter here and is left out."""
    return [int(part) for part in re.findall(r"(?:^|,)(\d+)(?:\(x\d+\))?(?=,|$)", text or "")]


def _gpus(environ: Mapping[str, str]) -> int:
    """GPUs of this node: by count, by list, or by what was asked for (``h100:8``, ``8``, ``a:2,b:2``)."""
    if (count := _whole(environ.get("SLURM_GPUS_ON_NODE"))) is not None:
        return count
    if listed := environ.get("SLURM_JOB_GPUS") or environ.get("SLURM_STEP_GPUS"):
        return len([part for part in listed.split(",") if part.strip()])
    requested = environ.get("SLURM_GPUS_PER_NODE", "")
    return sum(_whole(part.rpartition(":")[2]) or 0 for part in requested.split(","))


def _memory_mb(environ: Mapping[str, str], cpus: int | None) -> int | None:
    """MiB on a node; ``--mem=0`` leaves no variable (measured on 22.05), or a 0."""
    if megabytes := _whole(environ.get("SLURM_MEM_PER_NODE")):
        return megabytes
    if (each := _whole(environ.get("SLURM_MEM_PER_CPU"))) and cpus:
        return each * cpus
    if (each := _whole(environ.get("SLURM_MEM_PER_GPU"))) and (gpus := _gpus(environ)):
        return each * gpus
    return None


def _times(job: str, run: slurm.Run) -> tuple[float | None, float | None]:
    try:
        limit, _, left = run(["squeue", "-h", "-j", job, "-o", "%l|%L"]).strip().partition("|")
    except UserError:
        return None, None
    return parse_minutes(limit), parse_minutes(left)


def ranks_per_node(allocation: Allocation, resolved: Resolved) -> int:
    """Ranks on each node: the recipe's; of a tiny run one per GPU that there is, and where there is none, two at most."""
    requested = resolved.recipe.slurm.gpus_per_node
    if not _takes_any(resolved, "slurm.gpus_per_node"):
        return requested
    return allocation.gpus_per_node or min(requested, shape.TINY_RANKS)


def _takes_any(resolved: Resolved, key: str) -> bool:
    """Whether the job runs with what it got: a tiny run, whose size was not given."""
    return resolved.tiny and not shape.overridden(resolved, key)


def resolve_for(allocation: Allocation, recipe: str, overrides: Sequence[str], *, tiny: bool) -> Resolved:
    """The recipe as this allocation runs it: a tiny run takes the nodes and GPUs that there are, unless slurm.* names them.

    Raises UserError as :func:`clustertune.resolve.resolve.resolve` does.
    """
    resolved = resolve(recipe, overrides, tiny=tiny)
    slurm_section = resolved.recipe.slurm
    has = len(allocation.nodes) - resolved.recipe.server_nodes
    nodes = has if _takes_any(resolved, "slurm.nodes") else slurm_section.nodes
    ranks = nodes * ranks_per_node(allocation, resolved)
    return resolved if not tiny or ranks == resolved.world_size else resolve(recipe, overrides, tiny=True, ranks=ranks)


def check(
    allocation: Allocation,
    resolved: Resolved,
    cluster: Cluster,
    arguments: Sequence[str],
    stages: tuple[str, str] = (STAGES[0], STAGES[-1]),
) -> list[Problem]:
    """What keeps the training of a recipe from running in this allocation; each fix is the whole line to use instead.

    ``arguments``: what the user gave to the script: the recipe, overrides, flags. ``stages`` are the first and
    the last that the job runs: where the training is not among them, any allocation will do.
    """
    if not STAGES.index(stages[0]) <= STAGES.index("train") <= STAGES.index(stages[1]):
        return []
    asked_nodes, asked_ranks = resolved.recipe.slurm.nodes, resolved.recipe.slurm.gpus_per_node
    nodes = len(allocation.nodes) - resolved.recipe.server_nodes
    faults = []
    if nodes != asked_nodes and not _takes_any(resolved, "slurm.nodes"):
        beside = f" beside {_count(resolved.recipe.server_nodes, 'node')} of servers" if resolved.recipe.server_nodes else ""
        faults.append(("slurm.nodes", f"the job has {_count(nodes, 'node')}{beside}, the recipe asks for {asked_nodes}"))
    if not _takes_any(resolved, "slurm.gpus_per_node"):
        has = allocation.gpus_per_node
        if has != asked_ranks and (cluster.compute.gpus or has):
            text = f"the job has {_count(has, 'GPU')} on each node, the recipe asks for {asked_ranks}"
            faults.append(("slurm.gpus_per_node", text))
    if allocation.tasks_per_node not in (None, 1):
        text = f"the job has {allocation.tasks_per_node} tasks on each node; one starts all of a node's ranks"
        faults.append(("--ntasks-per-node", text))
    if not resolved.tiny and allocation.memory_mb is not None:
        need = shape.host_bytes(resolved, cluster)
        if need > allocation.memory_mb * MIB:
            has_gb = allocation.memory_mb * MIB / 1e9
            text = f"the job has {has_gb:.1f} GB on each node, the ranks of a node take {need / 1e9:.1f} GB"
            faults.append(("--mem", text))
    line = sbatch_line(resolved, cluster, arguments)
    problems = [Problem(text, file=f"job {allocation.job_id}", key=key, fix=f"use: {line}") for key, text in faults]
    # What does not fit even in the shape that was asked for gets the line for the smallest shape that would hold it.
    unfit = shape.fit_problems(resolved, cluster)
    least = shape.least_nodes(resolved, cluster) if unfit else None
    if least is not None and least > asked_nodes:
        more = [word for word in arguments if not word.startswith("slurm.nodes=")]
        line = sbatch_line(resolved, cluster, insert_overrides(more, [f"slurm.nodes={least}"]), nodes=least)
        unfit = [replace(problem, file=f"job {allocation.job_id}", fix=f"use: {line}") for problem in unfit]
    return problems + unfit


def insert_overrides(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The arguments of a job with further overrides, before its first option."""
    at = next((i for i, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    return [*arguments[:at], *overrides, *arguments[at:]]


def sbatch_line(
    resolved: Resolved,
    cluster: Cluster,
    arguments: Sequence[str],
    *,
    nodes: int | None = None,
) -> str:
    """The command, quoted for a shell, whose allocation is the recipe's."""
    train_shape = shape.train_shape(resolved, cluster)
    options = replace(train_shape, nodes=nodes or train_shape.nodes).options()
    if not train_shape.gpus_per_node:
        options.insert(2, "--gpus-per-node=0")  # the script's own header asks for some
    # The script's own is the reference recipe's, which would use up a short job.
    options.append(f"--signal=B:USR1@{resolved.recipe.slurm.signal_seconds}")
    return shlex.join(["sbatch", *(word for word in options if word != "--ntasks-per-node=1"), SCRIPT, *arguments])


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number in (0, 1) else 's'}"
