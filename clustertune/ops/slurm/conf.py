"""``slurm.conf``: one for all machines of a cluster, each setting with its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from clustertune.config.cluster_schema import Cluster
from clustertune.ops.slurm.names import LONGEST, fold, node_lines
from clustertune.ops.slurm.version import Version, preempt_signal

USER = "slurm"
"""Whom slurmctld and slurmdbd run as; the packages make him."""
STATE = "/var/lib/slurm/slurmctld"
SPOOL = "/var/spool/slurmd"
LOGS = "/var/log/slurm"
MEMORY_SHARE = 0.98
"""Of ``memory_gb``. A node whose MemTotal is below RealMemory is taken out of use, and the kernel keeps 1.6 % of what is
installed for its page table entries (64 bytes of struct page to 4096) before it counts."""
GRACE_SECONDS = 1800
"""Between the warning and the end of a preempted job. Of the steps that are known here the longest, 14 minutes of a 405B model
on 16 GPUs, asks for 1.5 steps + a save + 30 s = 1410 s (``--signal`` of its jobs); a job that has saved lets go earlier."""
DOWN_SECONDS = 120
"""Until a silent node counts as lost and its job is requeued. Slurm's 300 s leave all other GPUs of the job idle as long; much
less takes a node for lost whose slurmd waits for storage."""
UNKILLABLE_SECONDS = 180
"""For processes that hang in the kernel, on hard-mounted NFS or in the driver, before Slurm drains the node (default 60)."""
MIN_JOB_AGE_SECONDS = 86_400
"""How long ended jobs can be asked for without accounting: ``submit --status`` has nothing else then."""


def real_memory(cluster: Cluster) -> int:
    """``RealMemory`` of a node, MiB."""
    return math.floor(cluster.compute.memory_gb * 1024 * MEMORY_SHARE)


def cluster_name(cluster: Cluster) -> str:
    """Slurm's name of the cluster: lower case, which the accounting database makes of it anyway."""
    return re.sub(r"[^a-z0-9_-]", "-", cluster.name.lower())


def gres_of(cluster: Cluster) -> str:
    """``gpu:TYPE:COUNT`` of a node; empty without GPUs."""
    return cluster.gres(cluster.compute.gpus) if cluster.compute.gpus else ""


def conf_lines(cluster: Cluster, *, version: Version | None, accounting: bool) -> list[str]:
    """The lines of the file. ``version``: the release that will read it, None where nobody knows."""
    assert cluster.slurm and cluster.controller
    return [
        *_identity(cluster),
        "",
        *_resources(cluster),
        "",
        *_losses(version),
        "",
        *_accounting(cluster, accounting),
        "",
        *_nodes(cluster),
    ]


def _identity(cluster: Cluster) -> Iterator[str]:
    controller = cluster.controller
    assert controller
    place = "" if controller.address == controller.name else f"({controller.address})"
    yield f"ClusterName={cluster_name(cluster)}"
    yield f"SlurmctldHost={controller.name}{place}"
    yield f"SlurmUser={USER}"
    yield "AuthType=auth/munge"
    if any(":" in host.address for host in (controller, *cluster.compute_nodes)):
        yield "CommunicationParameters=EnableIPv6"
    yield f"StateSaveLocation={STATE}"
    yield f"SlurmdSpoolDir={SPOOL}"
    yield "SlurmctldPidFile=/run/slurmctld.pid"
    yield "SlurmdPidFile=/run/slurmd.pid"
    yield f"SlurmctldLogFile={LOGS}/slurmctld.log"
    yield f"SlurmdLogFile={LOGS}/slurmd.log"
    yield "MpiDefault=none"


def _resources(cluster: Cluster) -> Iterator[str]:
    yield "# Processes of a job are found, bound and limited by cgroups: cgroup.conf."
    yield "ProctrackType=proctrack/cgroup"
    yield "TaskPlugin=task/cgroup,task/affinity"
    yield "SelectType=select/cons_tres"
    yield "SelectTypeParameters=CR_Core_Memory"
    yield "# A job that asks for no memory would get all of a node, and every other job would wait: its share for each CPU."
    yield f"DefMemPerCPU={real_memory(cluster) // cluster.compute.threads}"
    if cluster.compute.gpus:
        yield "GresTypes=gpu"
    yield "# A job that can never run is refused by sbatch, and does not wait for ever."
    yield "EnforcePartLimits=ALL"
    yield "# The login shell's limit on locked memory (often 8 MiB) would replace slurmd's, and RDMA and pinned buffers fail."
    yield "PropagateResourceLimitsExcept=MEMLOCK"


def _losses(version: Version | None) -> Iterator[str]:
    yield "# A lost node, a preemption, a full time limit: the job goes back into the queue and on from its last checkpoint."
    yield "JobRequeue=1"
    yield f"SlurmdTimeout={DOWN_SECONDS}"
    yield "# 2: a node that comes back after a crash or a reboot is used again without a hand; 1 leaves it down."
    yield "ReturnToService=2"
    yield "# Seconds between SIGTERM and SIGKILL; the launcher counts on 30."
    yield "KillWait=30"
    yield f"UnkillableStepTimeout={UNKILLABLE_SECONDS}"
    yield "# A job is preempted by one of a partition with a higher PriorityTier; its warning (--signal) comes at once, and"
    yield "# GraceTime of its partition is what it has then."
    yield "PreemptType=preempt/partition_prio"
    yield "PreemptMode=REQUEUE"
    yield "=".join(preempt_signal(version))


def _accounting(cluster: Cluster, accounting: bool) -> Iterator[str]:
    controller = cluster.controller
    assert controller
    if not accounting:
        yield "# No accounting: ended jobs stay in scontrol show job."
        yield f"MinJobAge={MIN_JOB_AGE_SECONDS}"
        return
    yield "# slurmdbd proves who it talks to by munge: there is no password."
    yield "AccountingStorageType=accounting_storage/slurmdbd"
    yield f"AccountingStorageHost={controller.name}"
    if cluster.compute.gpus:
        yield "AccountingStorageTRES=gres/gpu"
    yield "JobAcctGatherType=jobacct_gather/linux"


def _nodes(cluster: Cluster) -> Iterator[str]:
    compute, slurm = cluster.compute, cluster.slurm
    assert slurm
    shape = f"Sockets={compute.sockets} CoresPerSocket={compute.cores // compute.sockets} "
    shape += f"ThreadsPerCore={compute.threads // compute.cores} RealMemory={real_memory(cluster)}"
    gres = f" Gres={gres_of(cluster)}" if compute.gpus else ""
    yield f"# RealMemory is {MEMORY_SHARE:.0%} of memory_gb: a node that has less is not used at all."
    yield f"NodeName=DEFAULT {shape}{gres} State=UNKNOWN"
    for names, addresses in node_lines(cluster.compute_nodes):
        yield f"NodeName={names}" + (f" NodeAddr={addresses}" if addresses else "")
    everyone = fold([host.name for host in cluster.compute_nodes])
    nodes = everyone if len(everyone) <= LONGEST else "ALL"
    partition = f"PartitionName={slurm.partition} Nodes={nodes} Default=YES MaxTime={slurm.max_time} State=UP"
    yield f"{partition} PriorityTier=10 GraceTime={GRACE_SECONDS}"
