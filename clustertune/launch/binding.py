"""Each rank on the cores of its GPU's NUMA node: memory and PCIe of the other socket are slower for every copy.

The counting of GPUs is where this goes wrong. Inside a Slurm step with constrained devices CUDA counts the GPUs it may use
from 0, while SLURM_STEP_GPUS, nvidia-smi on the bare machine, and a cluster file's NUMA map count all of the node. What
cannot be determined for certain is left unbound: a wrong binding is slower than none.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from clustertune.host import system
from clustertune.host.probe import Probe
from clustertune.host.system import format_cpu_list, parse_cpu_list


def physical_gpus(env: Mapping[str, str]) -> list[int] | None:
    """The node's own numbers of the GPUs that this process sees, in CUDA's order; None where that is not certain.

    In Slurm: SLURM_STEP_GPUS (of this node), or in the batch script, which has no step, SLURM_JOB_GPUS; CUDA_VISIBLE_DEVICES
    says which of these, counted either way. Elsewhere CUDA_VISIBLE_DEVICES alone, where it holds numbers.
    """
    visible = _numbers(env.get("CUDA_VISIBLE_DEVICES"))
    if "CUDA_VISIBLE_DEVICES" in env and visible is None:
        return None  # UUIDs, MIG devices
    if "SLURM_JOB_ID" not in env:
        return visible
    text = env.get("SLURM_STEP_GPUS")
    if text is None and env.get("SLURM_NODEID", "0") == "0":  # elsewhere it may be the first node's, passed on
        text = env.get("SLURM_JOB_GPUS")
    granted = _numbers(text)
    if granted is None or visible is None:
        return granted
    as_they_are = visible if set(visible) <= set(granted) else None
    renumbered = [granted[i] for i in visible] if all(i < len(granted) for i in visible) else None
    if as_they_are is not None and renumbered is not None and as_they_are != renumbered:
        return None
    return as_they_are if as_they_are is not None else renumbered


def one_gpu(world_size: int, env: Mapping[str, str]) -> dict[str, str]:
    """What limits a training of one rank to the first GPU that it sees; nothing for several ranks.

    TRL loads the model of a single process with ``device_map="auto"``, over all GPUs (trl/trainer/utils.py,
    ``create_model_from_path``), and transformers wraps one that fits a GPU in ``DataParallel``: the batch would be another one.
    Works until CUDA is initialised.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES", "0")
    return {"CUDA_VISIBLE_DEVICES": visible.partition(",")[0]} if world_size == 1 else {}


def _numbers(text: str | None) -> list[int] | None:
    """``0,1`` or ``0-3`` in their order; None for anything else, and where a number appears twice."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(",") if text.strip() else []:
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part, re.ASCII)
        if not match:
            return None
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found if len(set(found)) == len(found) else None


def numa_node(
    local_rank: int, ranks_per_node: int, gpus: Sequence[int] | None, numa_gpus: Sequence[Sequence[int]]
) -> int | None:
    """The NUMA node of a rank's GPU; None where it is not known.

    ``gpus``: the node's numbers of the visible GPUs (:func:`physical_gpus`). Where they are not known, they still are if the
    ranks take all GPUs of the node.
    """
    if gpus is None:
        every = sorted(gpu for group in numa_gpus for gpu in group)
        gpus = every if len(every) == ranks_per_node else []
    if not 0 <= local_rank < len(gpus):
        return None
    return next((node for node, group in enumerate(numa_gpus) if gpus[local_rank] in group), None)


def rank_cpus(
    local_rank: int,
    ranks_per_node: int,
    gpus: Sequence[int] | None,
    numa_gpus: Sequence[Sequence[int]],
    numa_cpus: Sequence[str],
    allowed: Iterable[int],
) -> tuple[int, frozenset[int]] | str:
    """The NUMA node of a rank's GPU with its CPUs that the rank may use; or why it is not bound.

    ``numa_gpus``: GPU numbers of each NUMA node. ``numa_cpus``: CPU list of each NUMA node, in the kernel's form.
    ``allowed``: CPUs that the job may use here.
    """
    node = numa_node(local_rank, ranks_per_node, gpus, numa_gpus)
    if node is None:
        return "the NUMA node of its GPU is not known"
    if len(numa_cpus) != len(numa_gpus):
        return f"the node has {len(numa_cpus)} NUMA nodes and the cluster file {len(numa_gpus)}"
    cpus: frozenset[int] = frozenset()
    with contextlib.suppress(ValueError):
        cpus = parse_cpu_list(numa_cpus[node]) & frozenset(allowed)
    return (node, cpus) if cpus else f"the job has no CPU of NUMA node {node} ({numa_cpus[node]})"


def bind(
    rank: int,
    local_rank: int,
    ranks_per_node: int,
    numa_gpus: Sequence[Sequence[int]],
    numa_cpus: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> str:
    """Bind this process, and every thread it starts from now on, to its GPU's NUMA node. Returns a line for the log.

    ``numa_cpus`` empty: read on this node. Never raises for what the machine is like: unbound is slower, and not wrong.
    """
    gpus = physical_gpus(os.environ if env is None else env)
    lists = tuple(numa_cpus) or tuple(system.numa_cpus(Probe()).values())
    found = rank_cpus(local_rank, ranks_per_node, gpus, numa_gpus, lists, os.sched_getaffinity(0))
    if isinstance(found, str):
        return f"rank {rank}: not bound, {found}"
    node, cpus = found
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"rank {rank}: not bound to NUMA node {node}: {error.strerror}"
    return f"rank {rank}: NUMA node {node}, CPUs {format_cpu_list(cpus)}"
