"""A draft of a cluster file: what Slurm says about its nodes, and what one of them says about itself."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from clustertune.check.machines import STEP
from clustertune.cluster.hardware import read_hardware, recognise
from clustertune.cluster.schema import Cluster, Host, expand_hosts, shorten_hosts
from clustertune.host import collect
from clustertune.host.devices import has_nvlink
from clustertune.host.facts import HostFacts, Mount
from clustertune.host.mounts import lies_elsewhere
from clustertune.host.probe import ask

WAIT_SECONDS = 60
"""How long Slurm may take to give a node; a cluster that is full gives none."""
LOOK_SECONDS = 20.0
_OF_THE_SYSTEM = ("/", "/boot", "/boot/efi", "/usr", "/var", "/home", "/root", "/tmp", "/etc")  # noqa: S108
_ON_DISKS = ("xfs", "ext4", "btrfs", "zfs")


def look_at_one(cluster: Cluster) -> tuple[HostFacts | None, str]:
    """The facts of one compute node, by a short job with all its GPUs; or why there are none."""
    slurm, gpus = cluster.slurm, cluster.compute.gpus
    if slurm is None:
        return None, "there is no Slurm"
    command = ["srun", f"--partition={slurm.partition}", "--nodes=1", "--ntasks=1", "--time=5", f"--immediate={WAIT_SECONDS}"]
    command += [f"--gres={cluster.gres(gpus)}"] if gpus else []
    answer = ask([*command, "--quiet", *collect.probe_command(STEP, LOOK_SECONDS)], WAIT_SECONDS + 2 * LOOK_SECONDS + 20)
    found, faults, _ = collect.decode(answer.text.splitlines())
    if found:
        return next(iter(found.values())), ""
    return None, next(
        iter(faults.values()), answer.fault or ("the node printed nothing" if answer.present else "there is no srun")
    )


def accounts() -> list[str]:
    """The accounts that this user may charge; empty where Slurm's accounting does not say."""
    answer = ask(("sacctmgr", "-nP", "show", "assoc", f"user={os.environ.get('USER', '')}", "format=account"), 10)
    return sorted({line.strip() for line in answer.text.splitlines() if line.strip()}) if answer.good else []


def draft(cluster: Cluster, facts: HostFacts | None, fault: str, name: str, charged: Sequence[str] = ()) -> str:
    """The file's text. What was not seen is a comment that begins with ``unknown``.

    ``facts``: of one compute node, or None and ``fault``, why. ``charged``: :func:`accounts`.
    """
    origin = f"# Drafted by clustertune show-cluster --write from {cluster.source}"
    lines = [f"{origin} and a look at {facts.hostname}." if facts else f"{origin}."]
    if facts is None:
        reason = " ".join(fault.split())[:200]
        lines.append(f"# unknown: everything that only a node can tell (no node was inspected: {reason})")
    lines += [*(f"# note: {note}" for note in cluster.notes), f"name: {name}", "nodes:", *_nodes(cluster.nodes)]
    sections: dict[str, tuple[dict[str, Any], list[str]]] = {
        "compute": _compute(cluster, facts),
        "network": _network(cluster, facts),
        "storage": _storage(facts),
        "slurm": _slurm(cluster, charged),
    }
    for key, (values, unknown) in sections.items():
        lines += [f"# unknown: {text}" for text in unknown]
        lines += [f"{key}: {_flow(values)}"] if values else []
    runtime = "container (runtime: apptainer, singularity or pyxis, and its image); without it: none, the checkout's .venv"
    return "\n".join([*lines, f"# unknown: {runtime}"]) + "\n"


def _flow(values: dict[str, Any]) -> str:
    """A mapping in one line of YAML; JSON's scalars and lists are YAML's."""
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items()) + "}"


def _nodes(nodes: Sequence[Host]) -> Iterator[str]:
    """Machines of the same roles as lists of names where names and addresses count up together."""
    for roles, alike in itertools.groupby(nodes, key=lambda host: host.roles):
        addresses = {host.name: host.address for host in alike}
        for names, count in shorten_hosts(list(addresses)):
            own = expand_hosts(names) if count > 1 else [names]
            given = [addresses[one] for one in own]
            short = shorten_hosts(given)
            entry = {"name": names, "address": short[0][0] if len(short) == 1 else ",".join(part for part, _ in short)}
            if count > 1 and given == own:
                del entry["address"]
            yield f"  - {_flow({**entry, 'roles': list(roles)})}"


def _compute(cluster: Cluster, facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
    seen, unknown = cluster.compute, []
    values: dict[str, Any] = {"gpus": seen.gpus}
    models = sorted({gpu.name for gpu in facts.gpus}) if facts else []
    gpu = seen.gpu or (recognise(models[0]) if len(models) == 1 else None)
    if gpu:
        values["gpu"], known = gpu, read_hardware().gpus[gpu]
        if facts and known.nvlink and has_nvlink(facts.topology):
            values["interconnect"] = f"nvlink{known.nvlink}"
        elif facts and facts.topology and known.host_link.startswith("pcie") and seen.gpus > 1:
            values["interconnect"] = known.host_link
    elif seen.gpus:
        unknown.append(f"compute.gpu, a name of ops/hardware.yaml (the driver says {', '.join(models) or 'nothing'})")
    if seen.gpus > 1 and "interconnect" not in values:
        unknown.append("compute.interconnect (nvlink4, pcie5, ...): nvidia-smi topo -m was not seen")
    values |= {"sockets": seen.sockets, "cores": seen.cores, "threads": seen.threads, "memory_gb": seen.memory_gb}
    nodes = sorted(map(int, facts.numa_cpus)) if facts and all((gpu.numa or 0) >= 0 for gpu in facts.gpus) else []
    groups = [[gpu.index for gpu in facts.gpus if gpu.numa == node] for node in nodes] if facts else []
    if facts and nodes and len(facts.gpus) == sum(map(len, groups)) == seen.gpus > 0:
        values |= {"numa_gpus": groups, "numa_cpus": [facts.numa_cpus[str(node)] for node in nodes]}
    elif seen.gpus:
        unknown.append("compute.numa_gpus, the GPUs of each NUMA node (nvidia-smi topo -m)")
    return values, unknown


def _network(cluster: Cluster, facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
    if len(cluster.compute_nodes) < 2:
        return {"kind": "none"}, []
    nics = facts.nics if facts else []
    real = [nic for nic in nics if nic.up and not nic.virtual and nic.addresses and nic.kind != "loopback"]
    nic = max(real, key=lambda one: one.mbit or 0, default=None)
    active = [port for port in facts.rdma if port.active] if facts else []
    fastest = max((port.gbit or 0 for port in active), default=0)
    ports = [port for port in active if (port.gbit or 0) == fastest]
    values: dict[str, Any] = {"kind": "ethernet"}
    unknown: list[str] = []
    if ports:
        kind = "infiniband" if ports[0].link_layer == "InfiniBand" else "roce"
        values = {"kind": kind, "gbit": fastest, "ports": len(ports), "hca": [port.device for port in ports]}
    elif nic:
        values["gbit"] = max(nic.mbit or 0, 0) / 1000
    else:
        kinds = "infiniband, roce, omnipath, slingshot, efa"
        unknown.append(f"network.kind: ethernet is assumed; {kinds} where there is such a network")
    if nic and [one.mbit for one in real].count(nic.mbit) == 1:  # two of one speed leave open which carries the traffic
        values["interface"] = nic.name
    else:
        unknown.append("network.interface, the one that the nodes reach each other by")
    if not values.get("gbit"):
        values.pop("gbit", None)
        unknown.append("network.gbit, the speed of one port in Gbit/s (ethtool, ibstat)")
    return values, unknown


def _storage(facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
    def text(mount: Mount) -> str:
        return f"{mount.point} ({mount.kind}, {(mount.total_bytes or 0) / 1e12:.1f} TB)"

    mounts = sorted((m for m in facts.mounts if m.total_bytes), key=lambda m: -(m.total_bytes or 0)) if facts else []
    shared = [mount for mount in mounts if lies_elsewhere(mount.kind)]
    disk = next((mount for mount in mounts if mount.kind in _ON_DISKS and mount.point not in _OF_THE_SYSTEM), None)
    values, others = {}, ", ".join(map(text, shared[1:6]))
    unknown = ["storage.shared, the folder that all nodes see (for runs, models and caches)"]
    if shared:
        values["shared"] = shared[0].point
        unknown = [f"storage.shared is the largest file system of the network, {text(shared[0])}"]
        unknown[0] += f"; also {others}" if others else ""
    if disk:
        values["scratch"] = disk.point
        staging = "storage.staging: {path, gb} copies to it"
        unknown.append(f"storage.scratch is the largest disk of the node, {text(disk)}; {staging}")
    else:
        unknown.append("storage.scratch, a folder on a disk of the node itself; without it /tmp")
    return values, unknown


def _slurm(cluster: Cluster, charged: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    if cluster.slurm is None:
        return {}, ["slurm: there is none here"]
    found = cluster.slurm.model_dump(mode="json").items()
    values = {key: value for key, value in found if value not in (None, [], False)}
    if len(charged) == 1:
        return {**values, "account": charged[0]}, []
    accounts = f"one of {', '.join(charged)}" if charged else "where the site wants one"
    return values, [f"slurm.account ({accounts}), qos, constraint, modules"]
