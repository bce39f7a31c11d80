"""What was read from NCCL's logs. Standard library only, Python 3.8 or later."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

NODE_GPUS = 8
"""GPUs of a node where the log has no number: few machines have more."""


class LoggedDevice(NamedTuple):
    """A network interface or an RDMA adapter that NCCL listed."""

    name: str
    """``bond0``, or adapter and port: ``mlx5_0:1``."""
    detail: str
    """Its address, or the link layer: ``IB``, ``RoCE``."""


class LoggedFault(NamedTuple):
    """A warning or an error."""

    kind: str
    """One of ``log_faults.KINDS``, or ``other``."""
    host: str
    text: str


class NetEdge(NamedTuple):
    """A connection over the network, as one side of it tells."""

    host: str
    own: int
    """Rank of the side that tells."""
    peer: int
    ranks: int
    """Of the communicator; ranks are counted in it."""
    plugin: str
    """``Socket``, ``IB``, ``IBext_v8``, ``AWS Libfabric``."""
    device: int
    gdr: bool
    """Whether the adapter reads and writes GPU memory itself (GPUDirect RDMA)."""


@dataclass
class Log:
    """What was read; every part may be empty. ``hosts`` below are names as NCCL writes them, "" where a line does not say."""

    lines: int = 0
    """Lines that NCCL itself wrote."""
    versions: dict[str, set[str]] = field(default_factory=dict)
    """Version -> hosts that logged it."""
    cuda: set[str] = field(default_factory=set)
    """CUDA version that NCCL was built with."""
    drivers: dict[str, set[str]] = field(default_factory=dict)
    """CUDA version of the driver, ``12080`` -> hosts."""
    hosts: set[str] = field(default_factory=set)
    ranks: int = 0
    """Of the largest communicator."""
    nodes: int = 0
    """That it says it spans; 0: not logged (before 2.18)."""
    local_count: int = 0
    """Ranks of one node, as a rank of the largest communicator logged (since 2.18); 0: not logged."""
    local_ranks: dict[str, set[int]] = field(default_factory=dict)
    """Host -> ranks of the largest communicator on it."""
    processes: set[tuple[str, str]] = field(default_factory=set)
    networks: dict[str, set[str]] = field(default_factory=dict)
    """``Using network ...`` -> hosts."""
    adapters: dict[str, list[LoggedDevice]] = field(default_factory=dict)
    """Host -> what stands after ``NET/IB : Using``."""
    sockets: dict[str, list[LoggedDevice]] = field(default_factory=dict)
    """Host -> what stands after ``NET/Socket : Using``."""
    bootstrap: dict[str, list[LoggedDevice]] = field(default_factory=dict)
    """Host -> interface of the first connection, by ``Bootstrap : Using`` or ``OOB``."""
    addresses: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Host -> interface -> addresses that it had: several where nodes share one name (``localhost``, ``worker``)."""
    no_adapter: set[str] = field(default_factory=set)
    """Hosts whose NCCL found no RDMA adapter."""
    no_verbs: set[str] = field(default_factory=set)
    """Hosts that could not load libibverbs."""
    plugins: dict[str, set[str]] = field(default_factory=dict)
    """Network plugin or libfabric provider -> hosts; ``none``: none was found."""
    transports: Counter[str] = field(default_factory=Counter)
    """``P2P/CUMEM``, ``SHM/direct``, ``NET/IB/GDRDMA`` -> lines that name it."""
    channels: dict[int, Counter[str]] = field(default_factory=dict)
    """The same by channel."""
    edges: Counter[NetEdge] = field(default_factory=Counter)
    gdr_off: dict[str, set[str]] = field(default_factory=dict)
    """Host -> adapters for which the log says that GPUDirect RDMA is disabled."""
    gdr_on: dict[str, set[str]] = field(default_factory=dict)
    rings: int = 0
    trees: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    """Kind of channel (``coll``, ``nvls``, ``p2p``) -> most of them."""
    gpu_paths: Counter[str] = field(default_factory=Counter)
    """Kind of path between two GPUs of a node: ``NVL``, ``PIX``, ``PHB``, ``SYS``."""
    p2p_off: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of GPUs between which the driver has P2P disabled."""
    algorithms: Counter[str] = field(default_factory=Counter)
    """``AllGather Ring Simple`` -> calls."""
    settings: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """NCCL's variable -> value -> hosts."""
    socket_threads: tuple[int, int] | None = None
    """Threads and sockets per thread of NET/Socket."""
    started: int = 0
    """Communicators of ranks that began, and that were complete."""
    complete: int = 0
    failed: int = 0
    """Calls of NCCL that gave an error back."""
    highest_gpu: int = -1
    """CUDA's index of a GPU that a line names."""
    trace: bool = False
    average_gb_s: float | None = None
    """nccl-tests' "Avg bus bandwidth", GB/s."""
    wrong: int = 0
    """Values that nccl-tests found out of bounds."""
    faults: Counter[LoggedFault] = field(default_factory=Counter)
    _counted: tuple[tuple[int, ...], int] = ((), 0)
    """What :meth:`node_count` said, and of how much: it is asked for every connection."""

    @property
    def version(self) -> str:
        """The one version, or the several, of NCCL; empty: not logged."""
        return " and ".join(sorted(self.versions))

    def host_of(self, ranks: int, rank: int) -> str:
        """Where a rank of the largest communicator runs; empty: not known."""
        if ranks == self.ranks:
            for host, numbers in self.local_ranks.items():
                if rank in numbers:
                    return host
        return ""

    def node_count(self) -> int:
        """Nodes, as the log says or its lines show; 0: not logged.

        The log of one rank names one host: more ranks than a node has GPUs are on several.
        """
        much = (self.lines, self.nodes, self.ranks, len(self.hosts), len(self.edges), len(self.addresses))
        if self._counted[0] != much:
            self._counted = (much, self._count_nodes())
        return self._counted[1]

    def _count_nodes(self) -> int:
        shown = sum(map(self._nodes_named, self.hosts))
        if shown == 1 and self.ranks > NODE_GPUS > self.highest_gpu:
            shown = -(-self.ranks // NODE_GPUS)
        elif shown == 1 and self._talks_to_others():
            shown = 2
        return self.nodes or shown

    def _nodes_named(self, host: str) -> int:
        """How many nodes have a host's name: one interface has one address."""
        return max([1, *map(len, self.addresses.get(host, {}).values())])

    def _talks_to_others(self) -> bool:
        """Whether the one host that tells has connections over the network to ranks of which it tells nothing.

        Inside a node NCCL takes the network only where P2P and shared memory are turned off.
        """
        off = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_HOSTID")
        own = {edge.own for edge in self.edges}.union(*self.local_ranks.values())
        return not any(name in self.settings for name in off) and any(edge.peer not in own for edge in self.edges)

    def is_between(self, edge: NetEdge) -> bool:
        """Whether a network connection leaves the node: what is not known is taken to leave it where there are several."""
        if self.node_count() == 1:
            return False
        peer = self.host_of(edge.ranks, edge.peer)
        return not peer or peer != edge.host or self._nodes_named(peer) > 1

    def between(self) -> Counter[str]:
        """Plugins of the connections between nodes."""
        found: Counter[str] = Counter()
        for edge, number in self.edges.items():
            if self.is_between(edge):
                found[edge.plugin] += number
        return found


# --- log faults -----------------------------------------------------------------------------------------------------------

# What a warning of NCCL, or an error of torch about it, means: one word for each kind of fault.
#
# Standard library only, Python 3.8 or later. Words are those of NCCL's sources from 2.10 on, of its OFI plugin, and of torch's
# ProcessGroupNCCL; they are looked for without regard to case.

OTHER = "other"
"""A warning that no kind knows."""
FOLLOWS = "follows"
"""Said because of another fault: no kind of its own."""

_KINDS = (
    ("shm-lost", r"attaching to shared memory segment|shared memory segment.{0,200}no such file"),
    ("shm", r"shared memory segment|failed to extend|posix_fallocate|no space left on device"),
    # Before 2.14 NCCL tells no reason; that of queues is the limit of locked memory (https://github.com/NVIDIA/pyxis/issues/60).
    ("memlock", r"ibv_\w+ failed.{0,80}cannot allocate memory|call to ibv_create_(qp|cq) failed\s*$"),
    ("no-verbs", r"unable to open device|ibv_open_device failed|failed to open libibverbs|ibv_get_device_list"),
    ("rdma-timeout", r"got completion.{0,200}(error 12\b|status=12\b|\(12\)|retry_exc|vendor.err.129)"),
    ("rdma-error", r"got completion"),
    ("rdma-connect", r"ibv_modify_qp failed|ibv_query_gid|ibv_create_qp failed"),
    ("rdma-link", r"async event.{0,40}(port|lid|gid|sm change|client rereg)"),
    ("rdma-error", r"async event"),
    ("rdma-error", r"call to ibv_\w+ failed"),
    ("duplicate-gpu", r"duplicate gpu"),
    ("nccl-versions", r"mismatched nccl version|nccl library version is too old"),
    (
        "collectives-differ",
        r"mismatched collective|collective mismatch|net/socket.{0,80}message truncated|symmetric registration check",
    ),
    ("no-algorithm", r"no algorithm/protocol available"),
    ("net-plugin", r"any net plugin|net/ofi|fi_getinfo|libfabric"),
    (
        "no-interface",
        r"no socket interface|no usable listening interface|no interface found|no device found (matching|after)|no ip interface"
        r"|neither af_inet",
    ),
    (
        "p2p-refused",
        r"peer access is not supported|open cuda ipc handle|could not enable p2p|p2p not supported|ipc(get|open)memhandle",
    ),
    ("p2p-broken", r"p2p is disabled between nvlink"),
    ("imex", r"mnnvl|imex"),
    ("nvls", r"nvlink sharp|multicast|cannot be performed in the present state"),
    (
        "driver",
        r"driver version is insufficient|unsupported display driver|no kernel image|forward compatib|minor version mismatch"
        r"|not supported in the installed cuda driver",
    ),
    ("gpu-missing", r"invalid device ordinal|no cuda-capable device|busy or unavailable|devices are (busy|unavailable)"),
    ("gpu-memory", r"out of memory"),
    (
        "gpu-fault",
        r"uncorrectable|illegal memory|launch failure|system not yet initialized|hardware stack|nvlink error|fallen off",
    ),
    ("cuda", r"cuda failure|unhandled cuda error|unhandledcudaerror"),
    ("no-transport", r"no transport found"),
    ("peers-disagree", r"wrong type|magic mismatch|mismatch in |has already checked in|message truncated|mismatched response"),
    (
        "refused",
        r"connection refused|no route to host|connection timed out|network is unreachable|connection "
        r"abort|cannot assign requested",
    ),
    (
        "peer-lost",
        r"connection reset|connection closed|closed by remote|broken pipe|remote process exited|remoteerror|socket recv failed",
    ),
    ("hung", r"watchdog caught coll|watchdog got stuck|operations have failed or timed out"),
    ("descriptors", r"too many open files"),
    (FOLLOWS, r"\[proxy service|proxy call to rank|failed to cuda|\[service thread|failed to execute operation|proxyservice"),
    (
        "failed",
        r"systemerror|system error|internalerror|internal error|invalidusage|invalid usage|invalidargument|invalid argument",
    ),
)
_PATTERNS = tuple((kind, re.compile(words, re.IGNORECASE)) for kind, words in _KINDS)
KINDS = tuple(dict.fromkeys(kind for kind, _ in _KINDS))
"""Every kind, what is closest to a cause first."""


_BY_SOURCE = (("nvls", "nvls.cc", ("cuda", "gpu-fault", "gpu-missing")), ("p2p-refused", "p2p.cc", ("cuda", "gpu-missing")))
"""A failure of CUDA whose message says little, in a source file that says what was tried."""


def kind_of(text: str, source: str = "") -> str:
    """The kind of fault that a message tells; :data:`OTHER` where none is known. ``source``: source file and line."""
    for kind, pattern in _PATTERNS:
        if pattern.search(text):
            return next((by for by, file, kinds in _BY_SOURCE if file in source and kind in kinds), kind)
    return OTHER
