"""Start the files that were made for a cluster as a throw-away Slurm here, before a machine of that cluster gets them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from clustertune.cluster.cluster import Cluster, Failed
from clustertune.cluster.spec import Given, Spec
from clustertune.config import cluster_schema
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.ops.slurm.texts import GRES_CONF, HOSTS, SLURM_CONF, SLURMDBD_CONF

NODES = 4
"""Of a cluster with more only so many are started; the others stand in the files, and are down."""


def given(cluster: cluster_schema.Cluster, texts: Mapping[str, str]) -> Given:
    """The generated files (path to text) in the form that a throw-away cluster takes."""
    assert cluster.slurm
    return Given(
        slurm_conf=texts[SLURM_CONF],
        gres_conf=texts[GRES_CONF] if cluster.compute.gpus else "",
        hosts=texts[HOSTS],
        dbd_conf=texts.get(SLURMDBD_CONF),
        partition=cluster.slurm.partition,
    )


def shape(cluster: cluster_schema.Cluster, texts: Mapping[str, str], nodes: int = NODES) -> Spec:
    """A throw-away cluster of the first ``nodes`` compute nodes, under their own names."""
    names = tuple(host.name for host in cluster.compute_nodes[:nodes])
    return Spec(nodes=names, gpus=cluster.compute.gpus, isolation="netns", given=given(cluster, texts))


def try_out(cluster: cluster_schema.Cluster, texts: Mapping[str, str]) -> dict[str, Any]:
    """Start Slurm with the files, run a job on all started nodes that takes all of their GPUs, and end it again.

    Returns the names of the nodes, and the seconds until all were idle. Raises UserError where it cannot be started here, or
    does not work, with Slurm's own words.
    """
    began = time.monotonic()
    try:
        with Cluster(shape(cluster, texts)) as slurm:
            seconds = time.monotonic() - began
            gpus = [f"--gpus-per-node={cluster.compute.gpus}"] if cluster.compute.gpus else []
            command = ["srun", f"--nodes={len(slurm.names)}", "--ntasks-per-node=1", "--exclusive", *gpus, "hostname"]
            seen = slurm.run(command, timeout=120).stdout.split()
    except Failed as error:
        raise UserError(Problem(str(error), fix="the lines above are Slurm's own"), ExitCode.FAILED) from None
    if sorted(seen) != sorted(slurm.names):
        text = f"a job on {', '.join(slurm.names)} ran on {', '.join(seen) or 'none'}"
        raise UserError(Problem(text, fix="compare the names with what hostname prints there"), ExitCode.FAILED)
    return {"nodes": slurm.names, "seconds": round(seconds, 2)}
