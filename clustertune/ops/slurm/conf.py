"""``slurm.conf``: one for all machines of a cluster, made from the template ``ops/slurm/slurm.conf.j2``."""

from __future__ import annotations

import math
import re

from clustertune.config.cluster_schema import Cluster
from clustertune.ops.slurm.names import LONGEST, fold, node_lines
from clustertune.ops.slurm.version import Version, preempt_signal
from clustertune.tree import ROOT

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


def from_template(template: str, **values: object) -> tuple[str, ...]:
    """The lines of a template below ``ops/slurm``, filled in; each setting stands there with its reason."""
    import jinja2

    # Not HTML: the schema of the cluster file lets no value hold blanks or line ends.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    text = (ROOT / "ops" / "slurm" / f"{template}.j2").read_text(encoding="utf-8")
    everywhere = {"user": USER, "state": STATE, "spool": SPOOL, "logs": LOGS}
    return tuple(environment.from_string(text).render(everywhere | values).splitlines())


def conf_lines(cluster: Cluster, *, version: Version | None, accounting: bool) -> tuple[str, ...]:
    """The lines of the file. ``version``: the release that will read it, None where nobody knows."""
    compute, controller = cluster.compute, cluster.controller
    assert cluster.slurm and controller
    shape = f"Sockets={compute.sockets} CoresPerSocket={compute.cores // compute.sockets} "
    shape += f"ThreadsPerCore={compute.threads // compute.cores} RealMemory={real_memory(cluster)}"
    everyone = fold([host.name for host in cluster.compute_nodes])
    return from_template(
        "slurm.conf",
        name=cluster_name(cluster),
        controller=controller,
        compute=compute,
        slurm=cluster.slurm,
        accounting=accounting,
        ipv6=any(":" in host.address for host in (controller, *cluster.compute_nodes)),
        memory=real_memory(cluster),
        memory_share=f"{MEMORY_SHARE:.0%}",
        down_seconds=DOWN_SECONDS,
        unkillable_seconds=UNKILLABLE_SECONDS,
        min_job_age_seconds=MIN_JOB_AGE_SECONDS,
        grace_seconds=GRACE_SECONDS,
        preempt_signal="=".join(preempt_signal(version)),
        shape=shape + (f" Gres={cluster.gres(compute.gpus)}" if compute.gpus else ""),
        nodes=list(node_lines(cluster.compute_nodes)),
        everyone=everyone if len(everyone) <= LONGEST else "ALL",
    )
