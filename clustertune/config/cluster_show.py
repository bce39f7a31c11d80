"""What is known of a cluster, for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from clustertune.config.cluster_schema import Cluster

if TYPE_CHECKING:
    from rich.console import Console


def as_json(cluster: Cluster) -> dict[str, Any]:
    """Every fact, defaults too, and where they are from; ``Cluster.model_validate`` reads it back."""
    return cluster.model_dump(mode="json")


def render(cluster: Cluster, console: Console) -> None:
    """Print the machines, the facts of a compute node, network, storage, Slurm and container, and the notes."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{cluster.name} ({cluster.source})", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for heading in ("machine", "address", "roles"):
        table.add_column(heading, overflow="fold")
    for host in cluster.nodes:
        table.add_row(Text(host.name), Text(host.address), Text(", ".join(host.roles)))
    console.print(table)
    for label, text in _lines(cluster):
        console.print(Text(f"{label:<10} {text}"), soft_wrap=True)
    for note in cluster.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def _lines(cluster: Cluster) -> Iterator[tuple[str, str]]:
    compute, network, storage, slurm = cluster.compute, cluster.network, cluster.storage, cluster.slurm
    gpus = f"{compute.gpus} x {compute.gpu or 'GPU'}" + (f" ({compute.interconnect})" if compute.interconnect else "")
    cpus = f"{compute.sockets} sockets, {compute.cores} cores, {compute.threads} threads, {compute.memory_gb:g} GB"
    yield "each node", f"{gpus if compute.gpus else 'no GPU'}; {cpus}"
    for node in range(max(len(compute.numa_gpus), len(compute.numa_cpus))):
        group = compute.numa_gpus[node] if compute.numa_gpus else ()
        sizes = [
            f"GPUs {', '.join(map(str, group))}" if group else "",
            f"CPUs {compute.numa_cpus[node]}" if compute.numa_cpus else "",
        ]
        yield f"NUMA {node}", "; ".join(filter(None, sizes))
    ports = f"{network.ports} x " if network.ports > 1 else ""
    speed = f", {ports}{network.gbit:g} Gbit/s" if network.gbit else ""
    yield "network", f"{network.kind}{speed}, {network.interface or 'default-route interface'}"
    for name, value in network.environment.items():
        yield "", f"{name}={value}"
    for brick in storage.bricks:
        yield "brick", f"{brick.mount}: {brick.node}:{brick.path}, {brick.filesystem}, {brick.tb:g} TB"
    if storage.pool:
        yield "pool", f"{storage.pool.mount}: {storage.pool.kind}, create={storage.pool.create}"
    yield "folders", f"shared {storage.shared or 'not given'}, scratch {storage.scratch}"
    defaults = {"caches": "~/.cache, or $HF_HOME", "models": "the caches", "runs": "./runs"}
    for what, default in defaults.items():
        yield what, storage.folder(what) or default
    if slurm:
        count = cluster.gres(compute.gpus) if compute.gpus else "no gres"
        sacct = "accounting" if slurm.accounting else "no accounting (sacct)"
        yield "Slurm", f"partition {slurm.partition}, {count}, time limit {slurm.max_time}, {sacct}"
        if slurm.site_options() or slurm.modules:
            yield "", " ".join([*slurm.site_options(), *(f"module load {name};" for name in slurm.modules)]).rstrip(";")
    else:
        yield "Slurm", "none"
    yield "container", f"{cluster.container.runtime}" + (f" {cluster.container.image}" if cluster.container.image else "")
    if cluster.container.megatron:
        yield "container of Megatron recipes", cluster.container.megatron
    if cluster.container.vllm:
        yield "vLLM", cluster.container.vllm
