"""What the rules of a machine look at, and what differs between the nodes of a job.

A machine is its facts, what the cluster file says about it, and what the job expects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from clustertune.check.rule import (
    FAIL,
    MACHINE,
    NODES,
    PASS,
    WARN,
    Finding,
    Rules,
    Seen,
    checks,
    either,
    rule_broken,
    run,
)
from clustertune.host.facts import CONTAINER, CONTAINER_STEP, LOGIN, STEP, HostFacts, Mount, Nic
from clustertune.host.mounts import lies_below, lies_elsewhere, mount_of
from clustertune.text import listed

ONE_LINK = ("layer2", "layer2+3", "vlan+srcmac", "encap2+3")
"""Hashes of a bond that put all traffic between two nodes on one link (docs.kernel.org/networking/bonding.html)."""
RDMA_KINDS = ("infiniband", "roce", "omnipath")
"""Networks that NCCL reaches over libibverbs."""


@dataclass
class Expects:
    """What a job, or the cluster file, counts on; None: not given."""

    gpus: int | None = None
    """GPUs that this node's ranks use."""
    cpus: int | None = None
    """Hardware threads of this node that the ranks use."""
    nodes: int | None = None
    """Nodes of the job."""
    launched: bool = False
    """Whether ranks get the environment that clustertune derives (caches of their own, no packages of the user's)."""
    ran: bool = False
    """Whether ranks have run here: it is one of the job's machines, whatever the cluster file says."""
    p2p: bool | None = None
    """Whether its GPUs were seen to exchange data; False: an exchange did not end."""


@dataclass
class Machine:
    """One machine as the rules see it."""

    facts: HostFacts
    cluster: dict[str, Any] = field(default_factory=dict)
    """The cluster file as plain dicts and lists; empty: none."""
    expects: Expects = field(default_factory=Expects)

    @property
    def where(self) -> str:
        """How findings name it."""
        return self.facts.hostname

    @property
    def place(self) -> str:
        """One of :data:`PLACES`."""
        return self.facts.place

    @property
    def computes(self) -> bool:
        """Whether ranks run here: not on a login node, which has no GPUs and small limits by design."""
        if self.place != LOGIN:
            return True
        named = {first_part(name) for name in self.names_with("compute")}
        return bool(self.facts.nvidia_devices) and (not self.is_member or first_part(self.facts.hostname) in named)

    @property
    def rehearsal(self) -> bool:
        """Whether Slurm only says that there are GPUs and cores: the temporary cluster does."""
        return self.environ("SLURM_CLUSTER_NAME") == "rehearsal"

    @property
    def in_step(self) -> bool:
        """Whether limits and cores are those that ranks get."""
        return self.place in (STEP, CONTAINER_STEP)

    @property
    def in_container(self) -> bool:
        """Whether files and libraries are those of an image."""
        return self.place in (CONTAINER, CONTAINER_STEP) or bool(self.facts.container)

    @property
    def several(self) -> bool:
        """Whether ranks of several nodes talk to each other."""
        if self.expects.nodes is not None:
            return self.expects.nodes > 1
        return len(self.names_with("compute")) > 1

    def environ(self, name: str) -> str:
        """A variable of the environment; empty where it is not set."""
        return self.facts.environment.get(name, "")

    def section(self, name: str) -> dict[str, Any]:
        """A section of the cluster file; empty where it has none."""
        value = self.cluster.get(name)
        return value if isinstance(value, dict) else {}

    def names_with(self, role: str) -> list[str]:
        """The machines of the cluster file that have a role."""
        return [str(node.get("name")) for node in self.cluster.get("nodes") or () if role in (node.get("roles") or ())]

    @property
    def is_member(self) -> bool:
        """Whether the cluster file names this machine."""
        own = first_part(self.facts.hostname)
        return any(first_part(str(node.get("name"))) == own for node in self.cluster.get("nodes") or ())

    def mount_of(self, path: str) -> Mount | None:
        """The file system on which a path lies; None where no mount is known."""
        return mount_of(path, self.facts.mounts)

    def mounts_later(self, path: str) -> bool:
        """Whether something is mounted there when it is first used."""
        return any(lies_below(path, point) for point in self.facts.automounts)


def one_link(nic: Nic) -> bool:
    """Whether a bond puts all traffic between two nodes on one of its links."""
    return nic.bond_mode in ("802.3ad", "balance-xor") and nic.bond_hash in ONE_LINK and len(nic.bond_links) > 1


def first_part(name: str) -> str:
    """A host's name without its domain, in lower case."""
    return name.lower().partition(".")[0]


def gigabytes(count: float) -> str:
    """Bytes for people: ``1.5 GB``, ``64 MB``, ``66 kB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e3:.0f} kB" if 0 < count < 1e6 else f"{count / 1e6:.0f} MB"


# --- what differs between the nodes of a job ------------------------------------------------------------------------------

RULES = Rules(NODES, __file__)


def machine_findings(machine: Machine) -> list[Finding]:
    """What all machine rules find on one machine."""
    unread = [item for text in machine.facts.unread for item in rule_broken((text, machine.where))]
    return [*run(checks(MACHINE), machine, machine.where), *unread]


def cluster_findings(several: JobNodes) -> list[Finding]:
    """What the rules find on each of several machines, and between them."""
    findings = [item for machine in several.machines for item in machine_findings(machine)]
    return findings + list(run(checks(NODES), several))


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a job."""

    machines: Sequence[Machine]
    silent: Mapping[str, str] = field(default_factory=dict)
    """Nodes that gave no facts, with what is known of the reason."""
    started: float = 0.0
    ended: float = 0.0
    """Seconds since 1970 before and after, by the clock of the machine that asked; 0: clocks are not compared."""


SKEW_S = 1.0
"""Difference of clocks that is reported, beyond the uncertainty of the time that the question took."""
MUNGE_S = 300.0
"""Age at which munge refuses a credential by default (munge(7), TTL)."""


Values = Sequence[tuple[str, Callable[[Machine], object]]]
"""What is compared: a name for people, and how a machine tells it."""
NOTHING: tuple[object, ...] = (None, "", [], ())
"""What a machine says that does not tell."""


def differing(machines: Sequence[Machine], value: Callable[[Machine], object]) -> str:
    """``4: node1, node2; 5: node3`` where the machines do not have one value, the most common one first; else empty.

    A machine that does not tell (None, empty) is left out.
    """
    groups: dict[str, list[str]] = {}
    for machine in machines:
        answer = value(machine)
        if answer not in NOTHING:
            groups.setdefault(str(answer), []).append(machine.where)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])) if len(groups) > 1 else []
    return "; ".join(f"{text}: {listed(names, 6)}" for text, names in ordered[:6])


def _compare(machines: Sequence[Machine], status: str, values: Values, fix: str) -> Iterator[Seen]:
    if len(machines) < 2:
        return
    differences = [f"{name}: {difference}" for name, value in values if (difference := differing(machines, value))]
    for text in differences:
        yield Seen(status, text, fix)
    if not differences and any(value(machine) not in NOTHING for _, value in values for machine in machines):
        yield Seen(PASS, f"{', '.join(name for name, _ in values)}: the same on {len(machines)} nodes")


def about(values: Sequence[int | None]) -> dict[int, int]:
    """Each value to one that stands for all within 3 % of it: firmware keeps some MB more of one machine than of its twin."""
    heads: dict[int, int] = {}
    head = None
    for value in sorted(value for value in values if value is not None):
        head = value if head is None or value > head * 1.03 else head
        heads[value] = head
    return heads


def origin(source: str) -> str:
    """Where a mount comes from, of the many addresses of one server the network alone: each node is given another of them."""
    match = re.fullmatch(r"(\d+\.\d+\.\d+)\.\d+:(/.*)", source)
    return f"{match[1]}.0/24:{match[2]}" if match else source


@RULES("nodes-driver")
def nodes_driver(several: JobNodes) -> Iterator[Seen]:
    """One driver."""
    fix = "install one version on all nodes; until then leave the odd one out: --exclude=NODE"
    # NCCL chooses features by the driver's CUDA version, cuMem from 12.0 on (src/misc/cudawrap.cc): ranks would disagree.
    if cuda := differing(several.machines, lambda m: m.facts.cuda_driver):
        yield Seen(FAIL, f"CUDA of the driver: {cuda}", fix)
    yield from _compare(several.machines, WARN, [("driver", lambda m: m.facts.driver)], fix)


CORE = re.compile(r"(Python|torch|nvidia-nccl-cu\d+|transformers|accelerate|trl|peft|datasets|safetensors): ")
"""What ranks must have alike; for the others a difference is only shown."""


@RULES("nodes-packages")
def nodes_packages(several: JobNodes) -> Iterator[Seen]:
    """One version of each package, and one Python."""
    machines = several.machines
    names = sorted({package.name for machine in machines for package in machine.facts.packages})

    def version_of(machine: Machine, name: str) -> object:
        version = next((package.version for package in machine.facts.packages if package.name == name), "")
        return version or ("none" if machine.facts.packages else None)

    if len(machines) < 2:
        return
    values = [("Python", differing(machines, lambda m: m.facts.python.rpartition(".")[0]))]
    values += [(name, differing(machines, partial(version_of, name=name))) for name in names]
    lines = [f"{name}: {text}" for name, text in values if text]
    hard = [text for text in lines if CORE.match(text)]
    shown = "; ".join([*hard, *(text for text in lines if text not in hard)][:6])
    good = f"{len(names)} packages: the same on {len(machines)} nodes" if names else ""
    yield from either(FAIL if hard else WARN, shown, good)


@RULES("nodes-gpus")
def nodes_gpus(several: JobNodes) -> Iterator[Seen]:
    """As many GPUs, of the same kind."""

    def kinds(machine: Machine) -> object:
        names = Counter(gpu.name or "?" for gpu in machine.facts.gpus)
        return ", ".join(f"{count} x {name}" for name, count in sorted(names.items())) or "none"

    if any(machine.facts.gpus for machine in several.machines):
        fix = "ask for one kind of node (--constraint, --gres=gpu:TYPE:N), or leave the odd one out: --exclude=NODE"
        yield from _compare(several.machines, FAIL, [("GPUs", kinds)], fix)


@RULES("nodes-system")
def nodes_system(several: JobNodes) -> Iterator[Seen]:
    """Kernel, C library, memory and cores are alike."""
    sizes = about([machine.facts.memory_bytes for machine in several.machines])

    def memory(machine: Machine) -> object:
        total = machine.facts.memory_bytes
        return f"{sizes[total] / 2**30:.0f} GiB" if total else None

    values: Values = [("kernel", lambda m: m.facts.kernel), ("C library", lambda m: m.facts.glibc), ("memory", memory)]
    fix = "bring the nodes to one state, or leave the odd one out: --exclude=NODE"
    yield from _compare(several.machines, WARN, [*values, ("CPUs", lambda m: m.facts.cpus)], fix)


@RULES("nodes-limits")
def nodes_limits(several: JobNodes) -> Iterator[Seen]:
    """Limits of the steps are alike."""
    sizes = about([machine.facts.shm_bytes for machine in several.machines])

    def memlock(machine: Machine) -> object:
        limit = machine.facts.memlock_bytes
        return None if limit is None else "unlimited" if limit < 0 else gigabytes(limit)

    def shm(machine: Machine) -> object:
        total = machine.facts.shm_bytes
        return None if total is None else f"{sizes[total] / 1e9:.0f} GB" if total >= 1e9 else gigabytes(sizes[total])

    values: Values = [("memlock", memlock), ("open files", lambda m: m.facts.nofile), ("shared memory", shm)]
    fix = "the same unit of slurmd on all nodes (LimitMEMLOCK, LimitNOFILE), then systemctl restart slurmd on the odd one"
    yield from _compare(several.machines, WARN, [*values, ("cores", lambda m: m.facts.affinity)], fix)


@RULES("nodes-network")
def nodes_network(several: JobNodes) -> Iterator[Seen]:
    """The interface between the nodes, and the RDMA ports, are alike."""
    machines = several.machines

    def nic(machine: Machine, key: str) -> object:
        # where the cluster file names no interface, the one that is there, if there is one
        real = [nic.name for nic in machine.facts.nics if nic.up and nic.addresses and nic.kind != "loopback"]
        name = machine.section("network").get("interface") or (real[0] if len(real) == 1 else "")
        return next((getattr(nic, key) for nic in machine.facts.nics if nic.name == name), None)

    def rdma(machine: Machine) -> object:
        active = [port for port in machine.facts.rdma if port.active]
        rates = sorted(f"{port.gbit:g}" for port in active if port.gbit)
        return f"{len(active)} active ports, {'/'.join(rates) or '?'} Gbit/s"

    fix = "set it alike on all nodes and on the switch: ip link show, ethtool"
    yield from _compare(machines, FAIL, [("MTU", partial(nic, key="mtu"))], fix)
    values: Values = [("speed in Mbit/s", partial(nic, key="mbit"))]
    values = [*values, ("RDMA", rdma)] if any(machine.facts.rdma for machine in machines) else values
    for name, value in values:
        if len(machines) > 1 and (difference := differing(machines, value)):
            yield Seen(WARN, f"{name}: {difference}", "look at cables and ports of the odd node: ibstat, ethtool")


@RULES("nodes-mounts")
def nodes_mounts(several: JobNodes) -> Iterator[Seen]:
    """File systems of the network are mounted on all nodes, from the same place."""
    machines, lines = several.machines, []
    if len(machines) < 2:
        return
    tables = {id(m): {mount.point: mount.source for mount in m.facts.mounts if lies_elsewhere(mount.kind)} for m in machines}
    own = {str(brick.get("mount")) for m in machines for brick in m.section("storage").get("bricks") or ()}
    points = sorted({point for table in tables.values() for point in table} - own)  # a brick is local on its own node
    for point in points:
        lacking = [m.where for m in machines if point not in tables[id(m)] and not m.mounts_later(point)]
        sources = {origin(table[point]): table[point] for table in tables.values() if point in table}
        if lacking:
            lines.append(f"{point} is not mounted on {', '.join(lacking[:6])}")
        elif len(sources) > 1:
            lines.append(f"{point} is mounted from {', '.join(sorted(sources.values())[:4])}")
    good = f"{len(points)} network file systems: the same on {len(machines)} nodes" if points else ""
    yield from either(WARN, "; ".join(lines[:6]), good)


@RULES("nodes-clock")
def nodes_clock(several: JobNodes) -> Iterator[Seen]:
    """Each node's clock was, when it answered, between the times at which it was asked and had answered."""
    sent, answered = several.started, several.ended
    if len(several.machines) < 2 or not answered:
        return
    times = {m.where: m.facts.time for m in several.machines if m.facts.time}
    # by how many seconds a clock is off at least that showed this time between the asking and the answer
    off = {name: max(0.0, sent - time, time - answered) * (1 if time >= sent else -1) for name, time in times.items()}
    bad = {name: seconds for name, seconds in sorted(off.items()) if abs(seconds) > SKEW_S}
    listed = ", ".join(f"{name} by {seconds:+.1f} s" for name, seconds in list(bad.items())[:8])
    status = FAIL if max(map(abs, bad.values()), default=0.0) > MUNGE_S else WARN
    good = f"within {answered - sent + SKEW_S:.1f} s on {len(off)} nodes" if off else ""
    fix = "chrony with the same servers on all nodes; at once, as root: chronyc makestep"
    yield from either(status, f"off at least: {listed}" if bad else "", good, fix)


@RULES("node-silent")
def node_silent(several: JobNodes) -> Iterator[Seen]:
    """Every node answered; where not, what is known of the reason."""
    for name, reason in several.silent.items():
        yield Seen(FAIL, reason, where=name)
