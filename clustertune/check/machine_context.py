"""What the rules of a machine look at: its facts, what the cluster file says about it, and what the job expects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clustertune.host.facts import HostFacts, Mount, Nic
from clustertune.host.mounts import mount_of

LOGIN, HERE, STEP, CONTAINER, CONTAINER_STEP = "login", "here", "step", "container", "container+step"
PLACES = (LOGIN, HERE, STEP, CONTAINER, CONTAINER_STEP)
"""Where a machine is looked at. ``here``: a machine of its own; ``step``: an srun step; ``container``: not in a step."""

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
        found = self.cluster.get(name)
        return found if isinstance(found, dict) else {}

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


def one_link(nic: Nic) -> bool:
    """Whether a bond puts all traffic between two nodes on one of its links."""
    return nic.bond_mode in ("802.3ad", "balance-xor") and nic.bond_hash in ONE_LINK and len(nic.bond_links) > 1


def first_part(name: str) -> str:
    """A host's name without its domain, in lower case."""
    return name.lower().partition(".")[0]


def gigabytes(count: float) -> str:
    """Bytes for people: ``1.5 GB``, ``64 MB``, ``66 kB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e3:.0f} kB" if 0 < count < 1e6 else f"{count / 1e6:.0f} MB"
