"""What NCCL's log says about a run: version, transports, interfaces, adapters, rings, settings, and what went wrong.

Standard library only, Python 3.8 or later. Any text is taken, cut off anywhere, of any version from 2.10 on; what is not said
stays empty. Several texts (one of each rank) are read into one :class:`Log`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# --- what was read -------------------------------------------------------------------------------------------------------

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
    """One of :data:`KINDS`, or ``other``."""
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

    @property
    def version(self) -> str:
        """The one version, or the several, of NCCL; empty: not logged."""
        return " and ".join(sorted(self.versions))

    def node_count(self) -> int:
        """Nodes, as the log says or its lines show; 0: not logged.

        The log of one rank names one host: more ranks than a node has GPUs are on several.
        """
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

    def crossing(self) -> Counter[NetEdge]:
        """The network connections that leave their node: what is not known is taken to leave it where there are several."""
        if self.node_count() == 1:
            return Counter()
        hosts = {rank: host for host, ranks in reversed(list(self.local_ranks.items())) for rank in ranks}
        peers = {edge: hosts.get(edge.peer, "") if edge.ranks == self.ranks else "" for edge in self.edges}
        inside = (edge for edge, peer in peers.items() if peer == edge.host and peer and self._nodes_named(peer) == 1)
        return self.edges - Counter({edge: self.edges[edge] for edge in inside})

    def between(self) -> Counter[str]:
        """Plugins of the connections between nodes."""
        found: Counter[str] = Counter()
        for edge, number in self.crossing().items():
            found[edge.plugin] += number
        return found


# --- faults ---------------------------------------------------------------------------------------------------------------

# What a warning of NCCL, or an error of torch about it, means: one word for each kind of fault.
#
# Words are those of NCCL's sources from 2.10 on, of its OFI plugin, and of torch's ProcessGroupNCCL; they are looked for
# without regard to case.

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
    ("rdma-error", r"async event|call to ibv_\w+ failed"),
    ("duplicate-gpu", r"duplicate gpu"),
    ("nccl-versions", r"mismatched nccl version|nccl library version is too old"),
    ("collectives-differ", r"mismatched collective|collective mismatch|symmetric registration check"),
    ("collectives-differ", r"net/socket.{0,80}message truncated"),
    ("no-algorithm", r"no algorithm/protocol available"),
    ("net-plugin", r"any net plugin|net/ofi|fi_getinfo|libfabric"),
    ("no-interface", r"no socket interface|no usable listening interface|no interface found|no ip interface|neither af_inet"),
    ("no-interface", r"no device found (matching|after)"),
    ("p2p-refused", r"peer access is not supported|open cuda ipc handle|could not enable p2p"),
    ("p2p-refused", r"p2p not supported|ipc(get|open)memhandle"),
    ("p2p-broken", r"p2p is disabled between nvlink"),
    ("imex", r"mnnvl|imex"),
    ("nvls", r"nvlink sharp|multicast|cannot be performed in the present state"),
    ("driver", r"driver version is insufficient|unsupported display driver|no kernel image|forward compatib"),
    ("driver", r"minor version mismatch|not supported in the installed cuda driver"),
    ("gpu-missing", r"invalid device ordinal|no cuda-capable device|busy or unavailable|devices are (busy|unavailable)"),
    ("nccl-memory", r"out of memory"),
    ("gpu-fault", r"uncorrectable|illegal memory|launch failure|system not yet initialized|hardware stack|nvlink error"),
    ("gpu-fault", r"fallen off"),
    ("cuda", r"cuda failure|unhandled cuda error|unhandledcudaerror"),
    ("no-transport", r"no transport found"),
    ("peers-disagree", r"wrong type|magic mismatch|mismatch in |has already checked in|message truncated|mismatched response"),
    ("refused", r"connection refused|no route to host|connection timed out|network is unreachable|connection abort"),
    ("refused", r"cannot assign requested"),
    ("peer-lost", r"connection reset|connection closed|closed by remote|broken pipe|remote process exited|remoteerror"),
    ("peer-lost", r"socket recv failed"),
    ("hung", r"watchdog caught coll|watchdog got stuck|operations have failed or timed out"),
    ("descriptors", r"too many open files"),
    (FOLLOWS, r"\[proxy service|proxy call to rank|failed to cuda|\[service thread|failed to execute operation|proxyservice"),
    ("failed", r"systemerror|system error|internalerror|internal error|invalidusage|invalid usage|invalidargument"),
    ("failed", r"invalid argument"),
)
"""What is closest to a cause first."""
_PATTERNS = tuple((kind, re.compile(words, re.IGNORECASE)) for kind, words in _KINDS)
KINDS = tuple(dict.fromkeys(kind for kind, _ in _KINDS))
"""Every kind, what is closest to a cause first."""
_BY_SOURCE = (("nvls", "nvls.cc", ("cuda", "gpu-fault", "gpu-missing")), ("p2p-refused", "p2p.cc", ("cuda", "gpu-missing")))
"""A failure of CUDA whose message says little, in a source file that says what was tried."""


def kind_of(text: str, source: str = "") -> str:
    """The kind of fault that a message tells; :data:`OTHER` where none is known. ``source``: source file and line."""
    kind = next((kind for kind, pattern in _PATTERNS if pattern.search(text)), OTHER)
    return next((by for by, file, kinds in _BY_SOURCE if file in source and kind in kinds), kind)


# --- reading --------------------------------------------------------------------------------------------------------------

MOST_FAULTS = 500
"""Different faults that are kept: a log of gigabytes may hold millions of lines of the same few."""


def read(texts: Iterable[str]) -> Log:
    """What the logs say together. Never raises."""
    log = Log()
    reader = _NcclLogReader(log)
    for text in texts:
        for record in records(text):
            reader.take(record)
    return log


_VERSION = re.compile(r"([NR]CCL) version *:? *(\d{1,3}\.\d{1,3}(?:\.\d{1,4})?)(?:[\w.-]{0,60}\+(?:cuda|hip)([\d.]{1,10})?)?")
_EDGE = re.compile(r"(\d{1,7})(?:\[\w{1,16}\])? -> (\d{1,7})(?:\[\w{1,16}\])?(?: \[(send|receive)\])? via (.{1,200})$")
_NET = re.compile(r"(NET|COLLNET)/([^/]{1,60})/(\d{1,5})(?:\(\d{1,5}\))?(/.*)?$")
_SOCKET = re.compile(r"(?:\[\d{1,3}\])?([A-Za-z][^\s:<]{0,40}):([^\s<]{0,80})<\d*>")
_ADAPTER = re.compile(r"([A-Za-z][\w.-]{0,40}):(\d{1,3})/(IB|RoCE|iWARP)")
_COMM = re.compile(r"\brank (\d{1,7}) n[rR]anks (\d{1,7})\b")
_NODES = re.compile(r" nNodes (\d{1,6}) (?:localRanks (\d{1,5}) )?")
_RETURNED = re.compile(r"\bgroup\.cc:\d{1,5} -> [1-6]\b")
_SETTING = re.compile(r"(NCCL_\w{1,60}) set (?:by environment )?to ?(.{0,300}?)\.?$")
_SHELL = re.compile(r"(?:export |declare -x |- )?(NCCL_[A-Z0-9_]{1,60})=(\S{0,200})$")
_CHANNELS = re.compile(r"(\d{1,4}) (coll|collnet|nvls|p2p) channels(?! per)")
_PATH = re.compile(r"(?:GPU/[\w-]{1,30} )\(\d{1,3}/[\d.]{1,12}/(\w{1,5})\)")
_ALGORITHM = re.compile(r"(\w{1,30}): \d{1,20} Bytes -> Algo (\w{1,20}) proto (\w{1,10})")
_NUMBERED_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_NUMBERED_PROTOCOLS = ("LL", "LL128", "Simple")
_GDR = re.compile(
    r"GPU Direct RDMA (?:\(\w{1,20}\) )?([Ee]nabled|[Dd]isabled) for "
    r"(?:(?:GPU \S+ / )?HCA \d{1,4}(?: '([^'\s]{1,40})'?)?|(\S{1,60}))"
)
_OFI_GDR_OFF = re.compile(
    r"disabling GDR|(?:does not|doesn't) support GDR|without (?:GDR|GPUDirect RDMA)|GDR (?:is )?(?:disabled|off|not sup)", re.I
)
"""The plugin for libfabric (EFA, Slingshot), in its own words: ``Could not disable CUDA API usage for HMEM, disabling GDR``."""
_PROVIDER = re.compile(r"[Ss]elected [Pp]rovider is (\w{1,30})")
_THREADS = re.compile(r"Using (\d{1,4}) threads and (\d{1,4}) sockets per thread")
_P2P_OFF = re.compile(r"(?:GPUs|dev) (\w{1,8})(?:\(=\w{1,16}\))? and (?:dev )?(\w{1,8})")
_USING = re.compile(r"using nccl==(\d{1,3}\.\d{1,3}\.\d{1,4})")
"""vLLM, SGLang."""
_VARIABLE = re.compile(r"\w{0,40}NCCL_\w{1,60}")
_BAD = re.compile(r"error|warn|fail|cannot|could\s?n|unable|not |invalid|abort|timed? ?out", re.IGNORECASE)
_AVERAGE = re.compile(r"Avg bus bandwidth\s{0,20}: ?(\d{1,9}(?:\.\d{1,9})?)")
_WRONG = re.compile(r"Out of bounds values\s{0,20}: ?(\d{1,12})")


class _NcclLogReader:
    """Puts records into a log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.comm: dict[tuple[str, str, str], int] = {}
        self.kinds: dict[str, str] = {}

    def take(self, record: Record) -> None:
        log, text = self.log, record.text
        if record.level == TEXT:
            self.other(record)
            return
        if record.level == ERROR:
            self.fault(record)
            return
        log.lines += 1
        if record.host:
            log.hosts.add(record.host)
        if record.gpu:
            log.highest_gpu = max(log.highest_gpu, int(record.gpu))
        if record.pid:
            log.processes.add((record.host, record.pid))
        if record.level == TRACE:
            log.trace = True
        elif record.level == WARN:
            self.fault(record)
        elif record.level == INFO:
            first = text.partition(" ")[0]
            _BY_WORD.get(first.split("/")[0].rstrip(":"), _NcclLogReader.anywhere)(self, record)

    # --- what begins with a word of its own ----------------------------------------------------------------------------

    def edge(self, record: Record) -> None:
        text = record.text
        found = _EDGE.search(text)
        if found is None:
            if "/" in text[:16] and " via " not in text:
                total = text.partition("/")[2].partition(" ")[0]
                self.log.rings = max(self.log.rings, int(total) if total.isdigit() and len(total) < 5 else 0)
            elif " via " in text:
                self.path(record, text.partition(" via ")[2])
            return
        own, peer = int(found.group(1)), int(found.group(2))
        if found.group(3) == "receive":
            own, peer = peer, own
        self.path(record, found.group(4), own, peer)

    def path(self, record: Record, via: str, own: int = -1, peer: int = -1) -> None:
        net = _NET.match(via)
        if net:
            gdr = "/GDR" in (net.group(4) or "")
            name = f"{net.group(1)}/{net.group(2)}" + ("/GDRDMA" if gdr else "")
            if net.group(1) == "NET" and own >= 0:
                ranks = self.comm.get((record.host, record.pid, record.gpu), 0)
                self.log.edges[NetEdge(record.host, own, peer, ranks, net.group(2), int(net.group(3)), gdr)] += 1
        elif via.startswith("direct shared memory"):
            name = "SHM/direct"
        elif via.startswith(("P2P/", "SHM/")):
            name = "/".join(via.split("/")[:2]).strip()
        else:
            return
        self.log.transports[name] += 1
        if channel := re.match(r"\w{1,8} (\d{1,4})", record.text):
            self.log.channels.setdefault(int(channel.group(1)), Counter())[name] += 1

    def net(self, record: Record) -> None:
        log, text, host = self.log, record.text, record.host
        if text.startswith("NET : Using interface "):  # 2.2 and 2.3
            _put(log.bootstrap, host, [LoggedDevice(*pair) for pair in _SOCKET.findall(text[20:])])
        elif text.startswith("NET/Socket") and "Using" in text:
            if threads := _THREADS.search(text):
                log.socket_threads = (int(threads.group(1)), int(threads.group(2)))
            self.interfaces(host, log.sockets.setdefault(host, []), text)
        elif " : Using" in text or ": Using" in text:
            before, _, oob = text.partition("OOB ")
            _put(log.adapters, host, [LoggedDevice(f"{name}:{port}", link) for name, port, link in _ADAPTER.findall(before)])
            if host not in log.bootstrap:
                _put(log.bootstrap, host, [LoggedDevice(*pair) for pair in _SOCKET.findall(oob)])
        elif "GPU Direct RDMA" in text:
            self.gdr(record)
        elif text.startswith("NET/OFI") and _OFI_GDR_OFF.search(text):
            log.gdr_off.setdefault(host, set()).add("OFI")
        elif "No device found" in text:
            log.no_adapter.add(host)
        elif text.startswith("NET/Plugin"):
            if "Loaded net plugin" in text:
                log.plugins.setdefault(text.partition("Loaded net plugin ")[2][:60].strip(), set()).add(host)
            elif "No plugin found" in text or "Could not find: libnccl-net" in text:
                log.plugins.setdefault("none", set()).add(host)
        elif provider := _PROVIDER.search(text):
            log.plugins.setdefault(f"OFI {provider.group(1)}", set()).add(host)

    def bootstrap(self, record: Record) -> None:
        devices: list[LoggedDevice] = []
        self.interfaces(record.host, devices, record.text.partition("Using")[2])
        if devices:
            self.log.bootstrap[record.host] = devices

    def interfaces(self, host: str, known: list[LoggedDevice], text: str) -> None:
        """Puts the interfaces that a line names to those that are known."""
        addresses = self.log.addresses.setdefault(host, {})
        for name, detail in _SOCKET.findall(text):
            device = LoggedDevice(name, detail)
            if device not in known:
                known.append(device)
            of_name = addresses.setdefault(name, set())
            if detail and len(of_name) < MOST_FAULTS:
                of_name.add(detail)

    def using(self, record: Record) -> None:
        for words in ("Using internal Network ", "Using network "):
            if record.text.startswith(words):
                self.log.networks.setdefault(record.text[len(words) : 74].strip(), set()).add(record.host)

    def communicator(self, record: Record) -> None:
        log, text = self.log, record.text
        found = _COMM.search(text)
        if found is None:
            return
        rank, ranks = int(found.group(1)), int(found.group(2))
        self.comm[record.host, record.pid, record.gpu] = ranks
        if ranks > log.ranks:
            log.ranks = ranks
            log.local_ranks.clear()
            log.nodes = log.local_count = 0
        if ranks == log.ranks:
            log.local_ranks.setdefault(record.host, set()).add(rank)
            if nodes := _NODES.search(text):
                log.nodes = int(nodes.group(1))
                log.local_count = max(log.local_count, int(nodes.group(2) or 0))
        log.started += "Init START" in text
        log.complete += "Init COMPLETE" in text

    def gdr(self, record: Record) -> None:
        if found := _GDR.search(record.text):
            into = self.log.gdr_on if found.group(1).lower() == "enabled" else self.log.gdr_off
            into.setdefault(record.host, set()).add(found.group(2) or found.group(3) or "")

    def topology(self, record: Record) -> None:
        if record.text.startswith("GPU Direct"):
            self.gdr(record)
            return
        own = record.text.partition(" ")[0]
        for found in _PATH.finditer(record.text, len(own)):
            if found.group(1) != "LOC":
                self.log.gpu_paths[found.group(1)] += 1

    def p2p(self, record: Record) -> None:
        words = ("P2P is disabled between", "Could not enable P2P")
        if any(word in record.text for word in words) and (pair := _P2P_OFF.search(record.text)):
            self.log.p2p_off.add((min(pair.groups()), max(pair.groups())))

    # --- what may stand anywhere ---------------------------------------------------------------------------------------

    def anywhere(self, record: Record) -> None:
        log, text = self.log, record.text
        if text.startswith("NCCL_"):
            if setting := _SETTING.match(text):
                self.setting(setting.group(1), setting.group(2), record.host)
        elif "Init " in text or " nranks " in text or " nRanks " in text:
            self.communicator(record)
        elif "channels" in text:
            for number, kind in _CHANNELS.findall(text):
                log.counts[kind] = max(log.counts.get(kind, 0), int(number))
        elif " -> Algo " in text:
            self.algorithm(text)
        elif text.startswith("cudaDriverVersion "):
            log.drivers.setdefault(text[18:30].strip(), set()).add(record.host)
        elif "version" in text:
            self.version(text, record.host)
        elif "libibverbs" in text:
            log.no_verbs.add(record.host)
        elif text.startswith(("Trees ", "Tree ")):
            log.trees = True
        elif "GPU Direct RDMA" in text:
            self.gdr(record)
        elif " -> " in text and _RETURNED.search(text):
            log.failed += 1

    def setting(self, name: str, value: str, host: str) -> None:
        self.log.settings.setdefault(name, {}).setdefault(value.strip().strip("\"'"), set()).add(host)

    def algorithm(self, text: str) -> None:
        if found := _ALGORITHM.search(text):
            algorithm = _named(found.group(2), _NUMBERED_ALGORITHMS)
            self.log.algorithms[f"{found.group(1)} {algorithm} {_named(found.group(3), _NUMBERED_PROTOCOLS)}"] += 1

    def version(self, text: str, host: str) -> None:
        if found := _VERSION.search(text):
            self.log.versions.setdefault(_plain(found.group(2)), set()).add(host)
            if found.group(3):
                self.log.cuda.add(found.group(3).strip("."))

    def other(self, record: Record) -> None:
        """A line of another program."""
        text, log = record.text, self.log
        # torch names the version of the library that failed: the same one, so it counts where NCCL named none itself.
        if "version" in text and ("+cuda" in text or "+hip" in text or not log.versions):
            self.version(text, "")
        using = _USING.search(text)
        if using and not log.versions:
            log.versions[using.group(1)] = {""}
        average, wrong = _AVERAGE.search(text), _WRONG.search(text)
        if average:
            log.average_gb_s = float(average.group(1))
        if wrong:
            log.wrong += int(wrong.group(1))
        shell = _SHELL.match(text.strip())
        if shell:
            self.setting(shell.group(1), shell.group(2), "")
        if "NCCL version" not in text and not shell and not average and not wrong:
            # The name of a variable (NCCL_MNNVL_ENABLE) is not a fault, nor is a plugin that only tells its name.
            kind = self.kind(_VARIABLE.sub("", text))
            if kind in ("imex", "nvls", "net-plugin") and not _BAD.search(text):
                return
            if kind not in (OTHER, "failed", "cuda", FOLLOWS):
                self.fault(record)

    def kind(self, text: str, source: str = "") -> str:
        file = source.rpartition(":")[0]
        key = file + "\n" + re.sub(r"\d+", "0", text)
        if key not in self.kinds and len(self.kinds) < 10 * MOST_FAULTS:
            self.kinds[key] = kind_of(text, file)
        return self.kinds.get(key) or kind_of(text, file)

    def fault(self, record: Record) -> None:
        log = self.log
        if record.level != WARN:
            if not log.versions:
                self.version(record.text, "")
            if "NCCL version" in record.text and " error in" in record.text and self.kind(record.text) == OTHER:
                return
        kind = self.kind(record.text, record.source)
        if kind == "no-verbs" and "libibverbs" in record.text:
            log.no_verbs.add(record.host)
        if kind == OTHER and record.level != WARN:
            return
        _, last, cause = record.text.partition("Last error:")
        text = cause if last and record.level != WARN and self.kind(cause) == kind else record.text
        if kind in ("nvls", "p2p-refused") and text.lower().startswith("cuda failure"):
            text = f"{record.source.partition(':')[0]}: {text}"  # the message alone does not say what was tried
        fault = LoggedFault(kind, record.host, text.strip()[:400])
        if fault in log.faults or len(log.faults) < MOST_FAULTS or not any(seen.kind == kind for seen in log.faults):
            log.faults[fault] += 1


def _plain(version: str) -> str:
    """torch before 1.11 wrote 2.10.3 as 21.0.3: the code 21003, cut as that of 2.8 was."""
    parts = [int(part) for part in version.split(".")]
    if parts[0] < 20 or len(parts) < 3:
        return version
    code = 1000 * parts[0] + 100 * parts[1] + parts[2]
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _named(value: str, names: tuple[str, ...]) -> str:
    """Until 2.25 algorithms and protocols were written as numbers, then in capitals."""
    if value.isdigit() and int(value) < len(names):
        return names[int(value)]
    return {name.upper(): name for name in names}.get(value.upper(), value)


def _put(into: dict[str, list[LoggedDevice]], host: str, devices: list[LoggedDevice]) -> None:
    known = into.setdefault(host, []) if devices else []
    known += [device for device in devices if device not in known]


_BY_WORD: dict[str, Callable[[_NcclLogReader, Record], None]] = {
    "Channel": _NcclLogReader.edge,
    "Ring": _NcclLogReader.edge,
    "CollNet": _NcclLogReader.edge,
    "NET": _NcclLogReader.net,
    "Bootstrap": _NcclLogReader.bootstrap,
    "Using": _NcclLogReader.using,
    "comm": _NcclLogReader.communicator,
    "ncclCommInitRank": _NcclLogReader.communicator,
    "ncclCommInitRankConfig": _NcclLogReader.communicator,
    "GPU": _NcclLogReader.topology,
    "P2P": _NcclLogReader.p2p,
    "Could": _NcclLogReader.p2p,
}


# --- log lines ------------------------------------------------------------------------------------------------------------

# NCCL's lines out of any text: a rank's log, a job's output of many ranks, text pasted into an issue.
#
# Standard library only, Python 3.8 or later. A line of NCCL is, by version (``src/debug.cc``)::
#
#     host:pid:tid [gpu] NCCL INFO text
#     host:pid:tid [gpu] file.cc:12 NCCL WARN text                        before 2.27
#     [2026-01-31 12:00:00] host:pid:tid [gpu] file.cc:12 NCCL WARN text          2.27
#     [2026-01-31 12:00:00] host:pid:tid [gpu] file.cc:12 (function) NCCL WARN text       later ones
#     host:pid:tid [gpu] 12.345 function:12 NCCL TRACE text               a build with TRACE=1
#     NCCL version 2.29.7+cuda13.1                                        rank 0 alone, before 2.27
#
# Launchers put more in front of it (``0: ``, ``[rank0]:``, ``(Worker pid=7) ``), people cut the host away, and where ranks
# write into one file a second line may begin in the middle of a first. So the level is looked for, and what stands before it
# is read backwards. Time is linear in the size of the text.

INFO, WARN, TRACE, ERROR, TEXT = "INFO", "WARN", "TRACE", "ERROR", "TEXT"
"""``ERROR``: what torch says about a failed call of NCCL; ``TEXT``: a line of another program that speaks of NCCL."""

MAX_MESSAGE = 4096
"""Characters of a message that are read: NCCL's own buffer holds 1024."""
_MAX_HEAD = 400
"""Characters before the level in which host, process and place are looked for."""

_LEVEL = re.compile(r"NCCL (INFO|WARN|TRACE|CALL|ABORT)(?: |$)")
_OLD_LEVEL = re.compile(r"\[\d{1,4}\] (?:[\w./]{1,200}:\d{1,6} )?(INFO|WARN) ")  # 2.2 and 2.3 had no NCCL in front
_SIMPLE = re.compile(r"([A-Za-z0-9][\w.-]{0,255}):(\d{1,10}):(\d{1,10}) \[(\d{1,4})\] (?:(\S{1,200}:\d{1,6}) )?$")
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]|ESC\[[0-9;]{0,32}m")
_SOURCE = re.compile(r"[^\s:]{1,200}:\d{1,6}$")
_GPU = re.compile(r"\[(\d{1,4})\]$")
_TIME = re.compile(r"\d{1,16}\.\d{1,9}$")
_NOT_HOST = re.compile(r"[^A-Za-z0-9._-]")
_GLUED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?")
"""A time that a log service puts in front of a line without a space."""
_WHO = re.compile(r"(?<![\w.-])([A-Za-z0-9][\w.-]{0,255}):(\d{1,10}):\d{1,10} \[(\d{1,4})\] ")

_MARKS = re.compile(
    "CCL version|NCCL_|nccl|NCCL (?:[eE]rror|failure|operations)|atchdog|Avg bus bandwidth|Out of bounds values|Duplicate GPU"
    "|C(?:uda|UDA) failure|Last error|ibv_"
)
"""It is in every line of other programs that says something about NCCL."""
_FAILED = ("NCCL error", "NCCL Error", "NCCL failure", "NCCL operation nccl", "ncclRemoteError", "ncclSystemError")
"""Words of torch, vLLM, nccl-tests and XLA about a call that failed."""


class Record(NamedTuple):
    """One thing that NCCL, or another program about it, says."""

    level: str
    text: str
    host: str = ""
    """As NCCL writes it: without a domain. Empty: the line does not say."""
    pid: str = ""
    gpu: str = ""
    """CUDA's index of the GPU."""
    source: str = ""
    """Source file and line."""


def clean(text: str) -> str:
    """Without colours, carriage returns and the entities of a web page."""
    if "\x1b" in text or "ESC[" in text:
        text = _COLOUR.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "&gt;" in text:
        text = text.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&")
    return text


def records(text: str) -> Iterator[Record]:
    """Everything in a text that NCCL logged, in its order; any text is taken."""
    error_follows = False
    for line in clean(text).split("\n"):
        if "NCCL " in line:
            heads = list(_LEVEL.finditer(line))
            if heads:
                error_follows = False
                yield from _split(line, heads)
                continue
        if error_follows:
            error_follows = False
            yield Record(ERROR, line[:MAX_MESSAGE])
        elif _MARKS.search(line):
            error_follows = "Last error" in line
            level = ERROR if any(mark in line for mark in _FAILED) else TEXT
            yield Record(level, line[:MAX_MESSAGE])
        elif "] " in line and ("INFO " in line or "WARN " in line) and (old := _OLD_LEVEL.search(line[:_MAX_HEAD])):
            host, pid, gpu, _, _ = _head(line, 0, old.start(1))
            if pid:
                yield Record(old.group(1), line[old.end() : old.end() + MAX_MESSAGE], host, pid, gpu)


def _split(line: str, heads: list[re.Match[str]]) -> Iterator[Record]:
    """The records of one physical line: usually one."""
    ends = [0, *(head.end() for head in heads)]
    parts = [_head(line, end, head.start()) for end, head in zip(ends, heads)]  # noqa: B905 - Python 3.8
    for at, (host, pid, gpu, source, _) in enumerate(parts):
        head, stop = heads[at], parts[at + 1][4] if at + 1 < len(parts) else len(line)
        text = line[head.end() : min(stop, head.end() + MAX_MESSAGE)]
        yield Record(head.group(1), text.rstrip(), host, pid, gpu, source)


def _head(line: str, begin: int, end: int) -> tuple[str, str, str, str, int]:
    """Host, process, GPU and place before a level, and where in the line they begin."""
    begin = max(begin, end - _MAX_HEAD)
    simple = _SIMPLE.match(line, begin, end)
    if simple:
        return simple.group(1), simple.group(2), simple.group(4), simple.group(5) or "", begin
    source = gpu = ""
    tokens = [(found.group(), found.start()) for found in re.finditer(r"\S+", line[begin:end])]
    start = end - begin

    def last() -> str:
        return tokens[-1][0] if tokens else ""

    if last().startswith("(") and last().endswith(")"):
        tokens.pop()
    if "](http" in last():  # a page has made a link of file.cc:12
        tokens.pop()
    elif _SOURCE.match(last()) and last().count(":") == 1:
        source, start = tokens.pop()
    if _TIME.match(last()):
        tokens.pop()
    found = _GPU.search(last())
    if found and found.start() == 0:
        gpu, start = found.group(1), tokens.pop()[1]
    parts = last().rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        name = _GLUED.sub(" ", parts[0], count=1)
        # People write <node> in place of a host's name.
        host = name[name.rfind("<") :] if name.endswith(">") and "<" in name else _NOT_HOST.split(name)[-1]
        return host, parts[1], gpu, source, begin + tokens[-1][1] + len(parts[0]) - len(host)
    # The name of a function with spaces in it may stand between (plugins of other makers).
    for who in _WHO.finditer(line, begin, end):
        return who.group(1), who.group(2), who.group(3), source, who.start()
    return "", "", gpu, source, begin + start
