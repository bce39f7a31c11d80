"""The facts of one machine, as the rules of ``doctor`` and ``nccl-check`` read them.

Whatever could not be seen is None or empty: a rule says ``unknown`` then, never ``pass``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

LOGIN, HERE, STEP, CONTAINER, CONTAINER_STEP = "login", "here", "step", "container", "container+step"
PLACES = (LOGIN, HERE, STEP, CONTAINER, CONTAINER_STEP)
"""Where a machine is looked at. ``here``: a machine of its own; ``step``: an srun step; ``container``: not in a step."""


@dataclass
class Gpu:
    """One GPU, as the driver tells (NVML or nvidia-smi)."""

    index: int
    name: str = ""
    bus: str = ""
    """PCI address, domain with four digits: ``0000:c1:00.0``."""
    numa: int | None = None
    memory_mib: int | None = None
    used_mib: int | None = None
    pids: list[int] | None = None
    """Compute processes on it; None: the driver did not tell."""
    persistence: bool | None = None
    mig: bool | None = None
    ecc: bool | None = None
    """Whether ECC is on."""
    ecc_uncorrected: int | None = None
    """Uncorrected errors since the driver was loaded."""
    remap_pending: bool | None = None
    """Rows wait for a reset to be remapped."""
    remap_failed: bool | None = None
    pcie_gen: int | None = None
    """Highest generation that card and slot reach together (not the current one, which falls when idle)."""
    pcie_gen_max: int | None = None
    """Highest generation of the card."""
    pcie_width: int | None = None
    """Lanes in use."""
    pcie_width_max: int | None = None
    recovery_action: str = ""
    """What the driver recommends: ``None``, ``Reset``, ``Reboot``, ``Drain P2P``, ``Drain and Reset``; empty: not known."""
    throttle: list[str] = field(default_factory=list)
    """Reasons why clocks are held down now, ``gpu_idle`` left out."""


@dataclass
class Nic:
    """One network interface."""

    name: str
    up: bool | None = None
    """Operational state ``up``, or administratively up where the driver tells no more."""
    carrier: bool | None = None
    mbit: int | None = None
    """Speed; of a bond the sum of its links."""
    mtu: int | None = None
    kind: str = ""
    """``ethernet``, ``infiniband``, ``loopback``, ``other``."""
    virtual: bool | None = None
    """No device behind it: bridge, veth, tunnel, VLAN; a bond is none of these."""
    addresses: list[str] = field(default_factory=list)
    """``10.0.0.1/24``, IPv4 first."""
    bond_mode: str = ""
    """``802.3ad``, ``balance-rr``, ``active-backup``; empty: no bond."""
    bond_hash: str = ""
    """``layer2``, ``layer3+4``."""
    bond_links: list[str] = field(default_factory=list)
    bond_links_up: list[str] = field(default_factory=list)


@dataclass
class RdmaPort:
    """One port of an RDMA adapter (/sys/class/infiniband)."""

    device: str
    port: int
    active: bool | None = None
    state: str = ""
    """``ACTIVE``, ``INIT``, ``DOWN``."""
    physical: str = ""
    """``LinkUp``, ``Polling``, ``Disabled``."""
    gbit: float | None = None
    link_layer: str = ""
    """``InfiniBand`` or ``Ethernet`` (RoCE)."""


@dataclass
class Mount:
    """One mounted file system."""

    point: str
    kind: str
    """``xfs``, ``nfs4``, ``fuse.mergerfs``, ``tmpfs``."""
    source: str = ""
    options: list[str] = field(default_factory=list)
    """Those of the mount and of the file system (mountinfo has both)."""
    total_bytes: int | None = None
    free_bytes: int | None = None
    """What an ordinary user may still write."""
    free_inodes: int | None = None
    silent: bool = False
    """It did not answer in time: a server that is gone."""
    fault: str = ""
    """What it answered instead of its room: ``Stale file handle``, ``Transport endpoint is not connected``."""


@dataclass
class FolderProbe:
    """Something that was tried in a folder, with a file of the own, removed again."""

    folder: str
    what: str
    """``mmap`` (a shared mapping of a file), ``flock`` (a lock)."""
    ok: bool | None = None
    """None: it could not be tried, because nothing can be written there, or nothing answered in time."""
    message: str = ""
    """The system's error."""


@dataclass
class FileMode:
    """A file with secrets, which others should not read."""

    path: str
    mode: int = 0
    """Permission bits."""


@dataclass
class Package:
    """One installed Python package."""

    name: str
    """As it calls itself, lower case."""
    version: str
    location: str
    """The folder that holds it."""


@dataclass
class HostFacts:
    """One machine, seen from one place on it."""

    hostname: str
    place: str = "here"
    """``login``, ``container``, ``step`` (an srun step), ``container+step`` or ``here``."""
    time: float = 0.0
    """Seconds since 1970 when it was looked."""
    clock_synchronised: bool | None = None
    clock_offset_s: float | None = None
    """Of the time daemon's last estimate."""
    kernel: str = ""
    glibc: str = ""
    python: str = ""
    """Version of the ranks' Python."""
    executable: str = ""
    user: str = ""
    cpus: int | None = None
    """Hardware threads of the machine."""
    affinity: int | None = None
    """Those that this process may use."""
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """Of the cgroup; None: none, or not seen."""
    memlock_bytes: int | None = None
    """Soft limit; -1: unlimited."""
    nofile: int | None = None
    shm_bytes: int | None = None
    """Size of /dev/shm."""
    shm_free_bytes: int | None = None
    driver: str = ""
    """Version of the NVIDIA kernel driver."""
    cuda_driver: str = ""
    """Highest CUDA version that this driver serves."""
    peermem: bool | None = None
    """Kernel module nvidia_peermem (or nv_peer_mem) is loaded, or dma-buf serves."""
    gpus: list[Gpu] = field(default_factory=list)
    topology: str = ""
    """``nvidia-smi topo -m``, as it is printed."""
    xids: list[str] = field(default_factory=list)
    """Lines of the kernel's log with ``NVRM: Xid``, newest last."""
    kernel_log_read: bool = False
    iommu: bool | None = None
    """Whether an IOMMU translates (groups exist and it is not in passthrough)."""
    acs_redirect: list[str] | None = None
    """PCI bridges whose ACS control redirects peer-to-peer traffic; None: needs root, or not seen."""
    nics: list[Nic] = field(default_factory=list)
    rdma: list[RdmaPort] = field(default_factory=list)
    rdma_devices: list[str] = field(default_factory=list)
    """Files of /dev/infiniband that this process can open."""
    verbs: bool | None = None
    """Whether libibverbs can be loaded here."""
    verbs_providers: list[str] = field(default_factory=list)
    """Of what it drives: ``mlx5``, ``efa``, from the provider libraries that are installed."""
    mounts: list[Mount] = field(default_factory=list)
    automounts: list[str] = field(default_factory=list)
    """Points at or below which something is mounted when it is first used."""
    container: str = ""
    """``apptainer``, ``docker``, ``podman``, ``enroot``, ``kubernetes``; empty: none."""
    packages: list[Package] = field(default_factory=list)
    """The training stack's, of the ranks' Python."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that steer Slurm, NCCL, gloo, torch, CUDA, HF, caches and proxies; what looks like a secret is left out."""
    affinity_list: str = ""
    """The CPUs that this process may use, ``0-3,8``."""
    numa_cpus: dict[str, str] = field(default_factory=dict)
    """CPU list of each NUMA node, by its number."""
    own_addresses: list[str] = field(default_factory=list)
    """What the machine's own name resolves to."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """What the names that were asked for resolve to; empty: to nothing."""
    nccl_conf: dict[str, str] = field(default_factory=dict)
    """NCCL's settings that stand in files, ``NCCL_ALGO`` to ``Tree (/etc/nccl.conf)``."""
    nvidia_devices: int | None = None
    """NVIDIA GPUs on the PCI bus, whether a driver serves them or not."""
    nvidia_smi: str = ""
    """Why ``nvidia-smi`` says nothing; empty where it answered, or is not installed."""
    cuda_init: int | None = None
    """What cuInit returned in a process of its own; None: there is no libcuda, or it did not return."""
    cuda_devices: int | None = None
    """GPUs that CUDA counts."""
    cuda_library: str = ""
    """The libcuda that is loaded."""
    torch_cuda: str = ""
    """CUDA that the installed torch was built for, ``13.0``; empty: none, or no torch."""
    libraries: list[str] = field(default_factory=list)
    """Libraries below LD_LIBRARY_PATH that torch brings itself: ``/usr/lib/x/libnccl.so.2``."""
    user_site: str = ""
    """Folder of the user's own packages."""
    user_site_used: bool | None = None
    """Whether the ranks' Python looks there."""
    exports: dict[str, str] = field(default_factory=dict)
    """Folders of /etc/exports, each with its clients and their options."""
    probes: list[FolderProbe] = field(default_factory=list)
    files: list[FileMode] = field(default_factory=list)
    slurm: dict[str, str] = field(default_factory=dict)
    """What ``scontrol show config`` says, the keys that rules read."""
    slurm_nodes: dict[str, str] = field(default_factory=dict)
    """State and reason of each node that takes no jobs."""
    slurm_gres: dict[str, str] = field(default_factory=dict)
    """Generic resources of each node, ``gpu:h100:8(S:0-1)``."""
    slurm_limits: dict[str, str] = field(default_factory=dict)
    """Time limit of each partition, ``1-00:00:00`` or ``infinite``."""
    slurm_scripts: dict[str, str] = field(default_factory=dict)
    """Prolog and epilog as configured, each with why this machine cannot run it; empty: it can."""
    slurm_silent: str = ""
    """Why Slurm's controller says nothing; empty where it answered, or Slurm is not installed."""
    uptime_s: float | None = None
    """How long the kernel runs; times in its log count from its start."""
    unread: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form; :func:`from_dict` reads it."""
        return asdict(self)


def from_dict(data: dict[str, Any]) -> HostFacts:
    """The facts of a JSON document. Unknown keys are skipped, null is what is not known. Raises ValueError, in one line."""
    from pydantic import TypeAdapter, ValidationError  # not on the nodes, which only write facts

    try:
        stated = {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data
        return TypeAdapter(HostFacts).validate_python(stated)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"contains no facts of a machine: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
