"""A draft of a cluster file: what Slurm says about its nodes, and what one of them says about itself."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from clustertune.check.machine import STEP
from clustertune.config.cluster_schema import Cluster, Host, expand_hosts, shorten_hosts
from clustertune.config.hardware import read_hardware, recognise
from clustertune.doctor import wire
from clustertune.doctor.preflight import facts_command
from clustertune.host.facts import HostFacts, Mount
from clustertune.host.mounts import lies_elsewhere
from clustertune.host.probe import ask
from clustertune.process import captured

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
    try:
        done = captured([*command, "--quiet", *facts_command(STEP, LOOK_SECONDS)], WAIT_SECONDS + 2 * LOOK_SECONDS + 20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"srun: {error}"
    found, faults, _ = wire.decode(done.stdout.splitlines())
    if found:
        return next(iter(found.values())), ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return None, next(iter(faults.values()), lines[-1] if lines else "the node printed nothing")


def accounts() -> list[str]:
    """The accounts that this user may charge; empty where Slurm's accounting does not say."""
    answer = ask(("sacctmgr", "-nP", "show", "assoc", f"user={os.environ.get('USER', '')}", "format=account"), 10)
    return sorted({line.strip() for line in answer.text.splitlines() if line.strip()}) if answer.good else []


def draft(cluster: Cluster, facts: HostFacts | None, fault: str, name: str, charged: Sequence[str] = ()) -> str:
    """The file's text. What was not seen is a comment that begins with ``unknown``.

    ``facts``: of one compute node, or None and ``fault``, why. ``charged``: :func:`accounts`.
    """
    lines = [
        f"# Drafted by clustertune show-cluster --write from {cluster.source}"
        + (f" and a look at {facts.hostname}." if facts else ".")
    ]
    lines += (
        []
        if facts
        else [f"# unknown: everything that only a node can tell (no node was inspected: {' '.join(fault.split())[:200]})"]
    )
    lines += [f"# note: {note}" for note in cluster.notes]
    lines += [f"name: {name}", "nodes:", *_nodes(cluster.nodes)]
    network, more = _network(cluster, facts)
    sections: list[tuple[str, dict[str, Any], list[str]]] = [
        ("compute", *_compute(cluster, facts)),
        ("network", network, more),
        ("storage", *_storage(facts)),
        ("slurm", *_slurm(cluster, charged)),
    ]
    for key, values, unknown in sections:
        lines += [f"# unknown: {text}" for text in unknown]
        lines += [f"{key}: {_flow(values)}"] if values else []
    lines.append(
        "# unknown: container (runtime: apptainer, singularity or pyxis, and its image); without it: none, the checkout's .venv"
    )
    return "\n".join(lines) + "\n"


def _flow(values: dict[str, Any]) -> str:
    """A mapping in one line of YAML; JSON's scalars and lists are YAML's."""
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items()) + "}"


def _nodes(nodes: Sequence[Host]) -> Iterator[str]:
    """Machines of the same roles as lists of names where names and addresses count up together."""
    at = 0
    while at < len(nodes):
        roles, alike = nodes[at].roles, at + 1
        while alike < len(nodes) and nodes[alike].roles == roles:
            alike += 1
        group = nodes[at:alike]
        addresses = {host.name: host.address for host in group}
        for names, count in shorten_hosts([host.name for host in group]):
            given = [addresses[one] for one in expand_hosts(names)] if count > 1 else [addresses[names]]
            short = shorten_hosts(given)
            if count > 1 and given == expand_hosts(names):
                yield f"  - {_flow({'name': names, 'roles': list(roles)})}"
            elif len(short) == 1:
                yield f"  - {_flow({'name': names, 'address': short[0][0], 'roles': list(roles)})}"
            else:
                parts = ",".join(part for part, _ in short)
                yield f"  - {_flow({'name': names, 'address': parts, 'roles': list(roles)})}"
        at = alike


def _compute(cluster: Cluster, facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
    seen, unknown = cluster.compute, []
    values: dict[str, Any] = {"gpus": seen.gpus}
    models = {gpu.name for gpu in facts.gpus} if facts else set()
    gpu = seen.gpu or (recognise(models.copy().pop()) if len(models) == 1 else None)
    if seen.gpus and gpu is None:
        unknown.append(f"compute.gpu, a name of ops/hardware.yaml (the driver says {', '.join(sorted(models)) or 'nothing'})")
    if gpu:
        values["gpu"] = gpu
        known = read_hardware().gpus[gpu]
        linked = facts is not None and any(f"NV{n}" in facts.topology for n in range(1, 37))
        if linked and known.nvlink:
            values["interconnect"] = f"nvlink{known.nvlink}"
        elif facts and facts.topology and known.host_link.startswith("pcie") and seen.gpus > 1:
            values["interconnect"] = known.host_link
    if seen.gpus > 1 and "interconnect" not in values:
        unknown.append("compute.interconnect (nvlink4, pcie5, ...): nvidia-smi topo -m was not seen")
    values |= {"sockets": seen.sockets, "cores": seen.cores, "threads": seen.threads, "memory_gb": seen.memory_gb}
    if (
        facts
        and seen.gpus
        and len(facts.gpus) == seen.gpus
        and all((gpu.numa or 0) >= 0 for gpu in facts.gpus)
        and facts.numa_cpus
    ):
        nodes = sorted(int(node) for node in facts.numa_cpus)
        groups = [[gpu.index for gpu in facts.gpus if gpu.numa == node] for node in nodes]
        if sum(map(len, groups)) == seen.gpus:
            values |= {"numa_gpus": groups, "numa_cpus": [facts.numa_cpus[str(node)] for node in nodes]}
    if seen.gpus and "numa_gpus" not in values:
        unknown.append("compute.numa_gpus, the GPUs of each NUMA node (nvidia-smi topo -m)")
    return values, unknown


def _network(cluster: Cluster, facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
    if len(cluster.compute_nodes) < 2:
        return {"kind": "none"}, []
    real = (
        [nic for nic in facts.nics if nic.up and not nic.virtual and nic.addresses and nic.kind != "loopback"] if facts else []
    )
    nic = max(real, key=lambda one: one.mbit or 0, default=None)
    ports = [port for port in facts.rdma if port.active] if facts else []
    fastest = max((port.gbit or 0 for port in ports), default=0)
    ports = [port for port in ports if (port.gbit or 0) == fastest]
    unknown: list[str] = []
    values: dict[str, Any] = {"kind": "ethernet"}
    if ports:
        values = {"kind": "infiniband" if ports[0].link_layer == "InfiniBand" else "roce", "gbit": fastest, "ports": len(ports)}
        values["hca"] = [port.device for port in ports]
    elif nic:
        values |= {"gbit": nic.mbit / 1000} if nic.mbit and nic.mbit > 0 else {}
    else:
        unknown.append(
            "network.kind: ethernet is assumed; infiniband, roce, omnipath, slingshot, efa where there is such a network"
        )
    if nic and [one.mbit for one in real].count(nic.mbit) == 1:  # two of one speed leave open which carries the traffic
        values["interface"] = nic.name
    else:
        unknown.append("network.interface, the one that the nodes reach each other by")
    if not values.get("gbit"):
        values.pop("gbit", None)
        unknown.append("network.gbit, the speed of one port in Gbit/s (ethtool, ibstat)")
    return values, unknown


def _storage(facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    unknown: list[str] = []
    mounts = facts.mounts if facts else []
    shared = sorted((m for m in mounts if lies_elsewhere(m.kind) and m.total_bytes), key=lambda m: -(m.total_bytes or 0))
    local = [m for m in mounts if m.kind in _ON_DISKS and m.point not in _OF_THE_SYSTEM and m.total_bytes]
    disk = max(local, key=lambda m: m.total_bytes or 0, default=None)
    if shared:
        values["shared"] = shared[0].point
        others = ", ".join(_as_text(mount) for mount in shared[1:6])
        unknown.append(
            f"storage.shared is the largest file system of the network, {_as_text(shared[0])}"
            + (f"; also {others}" if others else "")
        )
    else:
        unknown.append("storage.shared, the folder that all nodes see (for runs, models and caches)")
    if disk:
        values["scratch"] = disk.point
        unknown.append(
            f"storage.scratch is the largest disk of the node, {_as_text(disk)}; storage.staging: {{path, gb}} copies to it"
        )
    else:
        unknown.append("storage.scratch, a folder on a disk of the node itself; without it /tmp")
    return values, unknown


def _as_text(mount: Mount) -> str:
    return f"{mount.point} ({mount.kind}, {(mount.total_bytes or 0) / 1e12:.1f} TB)"


def _slurm(cluster: Cluster, charged: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    found = cluster.slurm
    if found is None:
        return {}, ["slurm: there is none here"]
    values = {key: value for key, value in found.model_dump(mode="json").items() if value not in (None, [], False)}
    unknown = []
    if len(charged) == 1:
        values["account"] = charged[0]
    else:
        text = f"one of {', '.join(charged)}" if charged else "where the site wants one"
        unknown.append(f"slurm.account ({text}), qos, constraint, modules")
    return values, unknown
