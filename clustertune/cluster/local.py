"""A cluster without a file: what Slurm, the driver and the kernel say about it; and the draft of its file.

:func:`collect` asks, with a time limit for each question, and accepts that some get no answer; :func:`judge` makes a cluster of
the texts, and is tested on recorded ones. A draft takes in what one of the nodes says about itself.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clustertune.cluster.hardware import read_hardware, recognise
from clustertune.cluster.schema import HOST, Cluster, Compute, Host, Network, SlurmFacts, expand_hosts, same_host, shorten_hosts
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.host import system
from clustertune.host.collect import decode, probe_command
from clustertune.host.facts import STEP, Gpu, HostFacts, Mount
from clustertune.host.mounts import lies_elsewhere
from clustertune.host.nvidia_text import gpus_of, has_nvlink, parse_csv
from clustertune.host.system import Probe, ask
from clustertune.recipe.sections import NAME

SECONDS = {"scontrol": 10, "nvidia-smi": 60}
"""``scontrol`` waits minutes for a controller that is down; a driver without persistence mode wakes one GPU after the other."""
TRIES, PAUSE = 8, 5.0
"""How often Slurm is asked again, and after how many seconds, where a job shows that there is one."""
_QUERY = "index,name,pci.bus_id,memory.total"


@dataclass(frozen=True)
class LocalMachine:
    """What was found on one machine; empty where there was nothing."""

    hostname: str = ""
    job: str = ""
    """The Slurm job in which was looked."""
    silent: str = ""
    """Why ``scontrol`` is there and says nothing; empty where it answered, or is not installed."""
    nodes: str = ""
    """``scontrol -o show nodes``"""
    partitions: str = ""
    """``scontrol -o show partition``"""
    config: str = ""
    """``scontrol show config``"""
    gpus: str = ""
    """``nvidia-smi --query-gpu=index,name,pci.bus_id,memory.total --format=csv,noheader``"""
    gpu_numa: dict[int, int] = field(default_factory=dict)
    """NUMA node of each GPU, as its PCI device says; -1 where the firmware does not tell."""
    numa_cpus: dict[int, str] = field(default_factory=dict)
    """CPU list of each NUMA node."""
    topology: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Package and core of each CPU."""
    memory_kb: int = 0
    """MemTotal of /proc/meminfo, KiB."""


def collect() -> LocalMachine:
    """Ask Slurm, the driver and the kernel. Takes seconds at most; raises nothing for what is not there."""
    probe = Probe()
    gpus, _ = _ask("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader")
    job = os.environ.get("SLURM_JOB_ID", "")
    nodes, silent = _ask("scontrol", "-o", "show", "nodes")
    for _ in range(TRIES if job else 0):  # a controller that is restarted answers again within a minute
        if nodes:
            break
        time.sleep(PAUSE)
        nodes, silent = _ask("scontrol", "-o", "show", "nodes")
    return LocalMachine(
        hostname=platform.node(),
        job=job,
        silent=silent,
        nodes=nodes,
        partitions=_ask("scontrol", "-o", "show", "partition")[0] if nodes else "",
        config=_ask("scontrol", "show", "config")[0] if nodes else "",
        gpus=gpus,
        gpu_numa=_gpu_numa(gpus, probe),
        numa_cpus=system.numa_cpus(probe),
        topology=system.topology(probe),
        memory_kb=(system.memory(probe)["memory_bytes"] or 0) // 1024,
    )


def _ask(*command: str) -> tuple[str, str]:
    """What a command says, and in one line why it says nothing; both empty where it is not installed."""
    answer = ask(command, SECONDS[command[0]])
    return answer.text if answer.good else "", answer.fault


def _gpu_numa(gpus: str, probe: Probe) -> dict[int, int]:
    nodes = {gpu.index: probe.number(f"/sys/bus/pci/devices/{gpu.bus}/numa_node") for gpu in parse_csv(gpus)}
    return {index: node for index, node in nodes.items() if node is not None}


# --- judging -----------------------------------------------------------------------------------------------------------


def judge(seen: LocalMachine) -> Cluster:
    """The cluster of what was found: Slurm's default partition, else this machine alone.

    Raises UserError (exit 75) inside of a job whose Slurm says nothing: this machine alone would be the wrong cluster.
    """
    notes: list[str] = []
    if (facts := _slurm(seen, notes)) is not None:
        return facts
    if seen.job:
        problem = Problem(
            f"Slurm does not report its nodes: {seen.silent or 'scontrol is not installed here'}",
            file="scontrol show nodes",
            fix="name the cluster: --cluster NAME, or run the same command again",
        )
        raise UserError(problem, ExitCode.AGAIN)
    if seen.silent:
        notes.append(f"scontrol is installed but failed ({seen.silent}); treating this machine as having no Slurm")
    return _machine(seen, notes)


def fields(line: str) -> dict[str, str]:
    """The ``Key=value`` words of one line of ``scontrol -o``; a value goes on to the next key, and the first of two counts.

    Values that people write (Reason, Comment, Extra) stand at the end and may hold anything, ``State=IDLE`` too.
    """
    values: dict[str, str] = {}
    places = list(re.finditer(r"(?:^|\s)([A-Z][A-Za-z_:]*)=", line))
    ends = [match.start() for match in places[1:]] + [len(line)]
    for match, end in zip(places, ends, strict=False):
        values.setdefault(match[1], line[match.end() : end].strip())
    return values


class _Shape(NamedTuple):
    """What makes two nodes equal."""

    gpus: int
    types: tuple[str, ...]
    sockets: int
    cores: int
    threads: int
    memory_mib: int


def _slurm(seen: LocalMachine, notes: list[str]) -> Cluster | None:
    nodes = [node for line in seen.nodes.splitlines() if (node := fields(line)).get("NodeName")]
    partition = _partition(seen.partitions, notes)
    if not nodes or partition is None:
        return None
    name = partition["PartitionName"]
    members = [node for node in nodes if name in node.get("Partitions", "").split(",")]
    members = [node for node in members if re.fullmatch(HOST, node["NodeName"])]
    if not members:
        return None
    shapes = {node["NodeName"]: _shape(node) for node in members}
    shape, count = Counter(shapes.values()).most_common(1)[0]
    if count < len(members):
        others = [other for other, theirs in shapes.items() if theirs != shape]
        some = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        notes.append(f"{some} of partition {name} differ from the other {count} nodes and are left out")
    workers = [node for node in members if shapes[node["NodeName"]] == shape]
    if shape.memory_mib < 1024:
        notes.append("slurm.conf has no RealMemory for the nodes: --mem will be refused")
    hosts = _hosts([(node["NodeName"], node.get("NodeAddr") or node["NodeName"]) for node in workers], seen)
    gres = shape.types[0] if shape.types else None
    if len(shape.types) > 1:
        notes.append(f"the nodes have GPUs of several types ({', '.join(shape.types)}): none is asked for by name")
        gres = None
    local = _of_this_node(seen, [node["NodeName"] for node in workers], shape.gpus)
    if gres and (named := recognise(gres)):
        local["gpu"] = named
    if shape.gpus and local.get("gpu") is None:
        notes.append(f"which GPU the nodes have ({gres or 'no type'}) is not known: whether a model fits is not checked")
    return Cluster(
        name="local",
        nodes=tuple(hosts),
        compute=Compute(
            gpus=shape.gpus,
            sockets=shape.sockets,
            cores=shape.cores,
            threads=shape.threads,
            memory_gb=max(1, shape.memory_mib // 1024),
            **local,
        ),
        network=Network(kind="unknown" if len(workers) > 1 else "none"),
        slurm=_facts(seen.config, partition, gres),
        source=f"scontrol, as seen from {seen.hostname or 'here'}",
        notes=tuple(notes),
    )


def _facts(config: str, partition: dict[str, str], gres: str | None) -> SlurmFacts:
    version = re.search(r"^SLURM_VERSION\s*=\s*([0-9A-Za-z.+~-]{1,32})\s*$", config, re.MULTILINE)
    limit = partition.get("MaxTime", "UNLIMITED")
    return SlurmFacts(
        partition=partition["PartitionName"],
        gres=gres,
        accounting=bool(re.search(r"^AccountingStorageType\s*=\s*\S*slurmdbd", config, re.MULTILINE)),
        max_time=limit if re.fullmatch(r"(\d{1,4}-)?\d{1,3}(:\d{2}){0,2}", limit) else "UNLIMITED",
        version=version[1] if version else None,
    )


def _partition(text: str, notes: list[str]) -> dict[str, str] | None:
    partitions = [
        partition for line in text.splitlines() if re.fullmatch(NAME, (partition := fields(line)).get("PartitionName", ""))
    ]
    default = [partition for partition in partitions if partition.get("Default") == "YES"]
    if not default and partitions:
        notes.append(f"Slurm has no default partition: {partitions[0]['PartitionName']}, the first, is taken")
    return next(iter(default or partitions), None)


def _shape(node: dict[str, str]) -> _Shape:
    def number(key: str, otherwise: int = 1) -> int:
        match = re.match(r"\d+", node.get(key, ""))
        return int(match[0]) if match and int(match[0]) else otherwise

    sockets, each, threads = number("Sockets"), number("CoresPerSocket"), number("ThreadsPerCore")
    cores, total = sockets * each, number("CPUTot", sockets * each * threads)
    if total not in (cores * threads, cores):  # slurm.conf says how many CPUs there are, and no more
        sockets, cores, threads = 1, total, 1
    usable = min(total, number("CPUEfctv", total))  # without those that are set aside for the system
    if usable < total:
        sockets, cores = 1, min(cores, usable)
    count, types = gpus_of(node.get("Gres", ""))
    memory = number("RealMemory") - number("MemSpecLimit", 0)
    return _Shape(count, tuple(types), sockets, cores, usable, memory)


def _hosts(workers: list[tuple[str, str]], seen: LocalMachine) -> list[Host]:
    """The compute nodes, the controller, and this machine, from which jobs are submitted."""
    roles: dict[str, list[str]] = {name: ["compute"] for name, _ in workers}
    addresses = dict(workers)
    control = re.search(r"^(?:SlurmctldHost\[0\]|ControlMachine)\s*=\s*([^\s(]+)(?:\(([^)]*)\))?", seen.config, re.MULTILINE)
    others = [(control[1], control[2], "slurmctld")] if control else []
    for name, address, role in [*others, (seen.hostname, "", "login")]:
        known = same_host(name, roles) or name
        if re.fullmatch(HOST, known):
            roles.setdefault(known, []).append(role)
            addresses.setdefault(known, address or name)
    return [Host(name=name, address=addresses[name], roles=tuple(roles_of)) for name, roles_of in roles.items()]


def _of_this_node(seen: LocalMachine, workers: list[str], gpus: int) -> dict[str, Any]:
    """What only a compute node can tell, where this machine is one: the GPU's model and the NUMA map."""
    if same_host(seen.hostname, workers) is None:
        return {}
    groups = _groups(seen, gpus)
    cpus = tuple(seen.numa_cpus[node] for node in sorted(seen.numa_cpus)) if groups else ()
    return {"gpu": _model(parse_csv(seen.gpus)), "numa_gpus": groups, "numa_cpus": cpus}


def _groups(seen: LocalMachine, gpus: int) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each NUMA node; empty where one of the node's ``gpus`` is not known.

    Inside of a job's cgroup ``nvidia-smi`` shows only the job's GPUs, counted from 0: a map of fewer is not the node's.
    """
    if not gpus or sorted(seen.gpu_numa) != list(range(gpus)) or not set(seen.gpu_numa.values()) <= set(seen.numa_cpus):
        return ()
    return tuple(tuple(gpu for gpu in range(gpus) if seen.gpu_numa[gpu] == node) for node in sorted(seen.numa_cpus))


def _model(gpus: Sequence[Gpu]) -> str | None:
    names = {gpu.name for gpu in gpus}
    return recognise(names.pop()) if len(names) == 1 else None


def _machine(seen: LocalMachine, notes: list[str]) -> Cluster:
    """This machine alone."""
    rows = parse_csv(seen.gpus)
    cores = len(set(seen.topology.values())) or 1
    sockets = len({package for package, _ in seen.topology.values()}) or 1
    name = seen.hostname if re.fullmatch(HOST, seen.hostname) else "localhost"
    if rows and _model(rows) is None:
        notes.append(f"ops/hardware.yaml does not know {rows[0].name}: whether a model fits is not checked")
    return Cluster(
        name="local",
        nodes=(Host(name=name, address="127.0.0.1", roles=("login", "compute")),),
        compute=Compute(
            gpus=len(rows),
            sockets=sockets,
            cores=cores,
            threads=max(len(seen.topology), cores),
            memory_gb=max(1, seen.memory_kb // 2**20),
            **_of_this_node(seen, [seen.hostname], len(rows)),
        ),
        network=Network(kind="none"),
        source=f"this machine ({name})",
        notes=tuple(notes),
    )


# --- a draft of a cluster file -------------------------------------------------------------------------------------------

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
    answer = ask([*command, "--quiet", *probe_command(STEP, LOOK_SECONDS)], WAIT_SECONDS + 2 * LOOK_SECONDS + 20)
    hosts, faults, _ = decode(answer.text.splitlines())
    if hosts:
        return next(iter(hosts.values())), ""
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
    lines += [*(f"# note: {note}" for note in cluster.notes), f"name: {name}", "nodes:", *_node_entries(cluster.nodes)]
    sections: dict[str, tuple[dict[str, Any], list[str]]] = {
        "compute": _compute_section(cluster, facts),
        "network": _network_section(cluster, facts),
        "storage": _storage_section(facts),
        "slurm": _slurm_section(cluster, charged),
    }
    for key, (values, unknown) in sections.items():
        lines += [f"# unknown: {text}" for text in unknown]
        lines += [f"{key}: {_flow(values)}"] if values else []
    runtime = "container (runtime: apptainer, singularity or pyxis, and its image); without it: none, the checkout's .venv"
    return "\n".join([*lines, f"# unknown: {runtime}"]) + "\n"


def _flow(values: dict[str, Any]) -> str:
    """A mapping in one line of YAML; JSON's scalars and lists are YAML's."""
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items()) + "}"


def _node_entries(nodes: Sequence[Host]) -> Iterator[str]:
    """Machines of the same roles as lists of names where names and addresses count up together."""
    for roles, alike in itertools.groupby(nodes, key=lambda host: host.roles):
        addresses = {host.name: host.address for host in alike}
        for names, count in shorten_hosts(list(addresses)):
            own = expand_hosts(names) if count > 1 else [names]
            own_addresses = [addresses[one] for one in own]
            short = shorten_hosts(own_addresses)
            entry = {"name": names, "address": short[0][0] if len(short) == 1 else ",".join(part for part, _ in short)}
            if count > 1 and own_addresses == own:
                del entry["address"]
            yield f"  - {_flow({**entry, 'roles': list(roles)})}"


def _compute_section(cluster: Cluster, facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
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


def _network_section(cluster: Cluster, facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
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


def _storage_section(facts: HostFacts | None) -> tuple[dict[str, Any], list[str]]:
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


def _slurm_section(cluster: Cluster, charged: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    if cluster.slurm is None:
        return {}, ["slurm: there is none here"]
    items = cluster.slurm.model_dump(mode="json").items()
    values = {key: value for key, value in items if value not in (None, [], False)}
    if len(charged) == 1:
        return {**values, "account": charged[0]}, []
    accounts = f"one of {', '.join(charged)}" if charged else "where the site wants one"
    return values, [f"slurm.account ({accounts}), qos, constraint, modules"]
