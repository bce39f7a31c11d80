"""What NCCL's log says about a run: version, transports, interfaces, adapters, settings, and what went wrong.

The one reader of logs: of a check's own ranks, and of what anybody recorded. Any text is taken, cut off anywhere, of any
version from 2.10 on; what is not said stays empty. What the words mean stands in ``nccl_log.yaml``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from clustertune.text import listed

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
NODE_GPUS = 8
"""GPUs of a node where the log has no number: few machines have more."""
MOST_FAULTS = 500
"""Different faults that are kept: a log of gigabytes may hold millions of lines of the same few."""


class LoggedDevice(NamedTuple):
    """A network interface or an RDMA adapter that NCCL listed."""

    name: str
    """``bond0``, or adapter and port: ``mlx5_0:1``."""
    detail: str
    """Its address, or the link layer: ``IB``, ``RoCE``."""


class LoggedFault(NamedTuple):
    """A warning or an error."""

    kind: str
    """One of those of ``nccl_log.yaml``, or ``other``."""
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
    hosts: set[str] = field(default_factory=set)
    ranks: int = 0
    """Of the largest communicator."""
    nodes: int = 0
    """That it says it spans; 0: not logged (before 2.18)."""
    local_count: int = 0
    """Ranks of one node, as a rank of the largest communicator logged (since 2.18); 0: not logged."""
    local_ranks: dict[str, set[int]] = field(default_factory=dict)
    """Host -> ranks of the largest communicator on it."""
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
    no_verbs: set[str] = field(default_factory=set)
    """Hosts that could not load libibverbs, or open an adapter with it."""
    transports: Counter[str] = field(default_factory=Counter)
    """``P2P/CUMEM``, ``SHM/direct``, ``NET/IB/GDRDMA`` -> lines that name it."""
    edges: Counter[NetEdge] = field(default_factory=Counter)
    gdr_off: dict[str, set[str]] = field(default_factory=dict)
    """Host -> adapters for which the log says that GPUDirect RDMA is disabled."""
    gpu_paths: Counter[str] = field(default_factory=Counter)
    """Kind of path between two GPUs of a node: ``NVL``, ``PIX``, ``PHB``, ``SYS``."""
    p2p_off: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of GPUs between which the driver has P2P disabled."""
    settings: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """NCCL's variable -> value -> hosts."""
    started: int = 0
    """Communicators of ranks that began, and that were complete."""
    complete: int = 0
    failed: int = 0
    """Calls of NCCL that gave an error back."""
    highest_gpu: int = -1
    """CUDA's index of a GPU that a line names."""
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
        plugins: Counter[str] = Counter()
        for edge, number in self.crossing().items():
            plugins[edge.plugin] += number
        return plugins


# --- faults ---------------------------------------------------------------------------------------------------------------

OTHER = "other"
"""A warning that no kind knows."""
FOLLOWS = "follows"
"""Said because of another fault: no kind of its own."""
_PATTERNS = tuple((kind, re.compile(words, re.IGNORECASE)) for kind, words in TABLE["patterns"])
_BY_SOURCE = (("nvls", "nvls.cc", ("cuda", "gpu-fault", "gpu-missing")), ("p2p-refused", "p2p.cc", ("cuda", "gpu-missing")))
"""A failure of CUDA whose message says little, in a source file that says what was tried."""


@lru_cache(maxsize=10_000)
def _kind(text: str, source: str) -> str:
    kind = next((kind for kind, pattern in _PATTERNS if pattern.search(text)), OTHER)
    return next((by for by, file, kinds in _BY_SOURCE if file in source and kind in kinds), kind)


def kind_of(text: str, source: str = "") -> str:
    """The kind of fault that a message tells; :data:`OTHER` where none is known. ``source``: source file and line."""
    return _kind(text, source.rpartition(":")[0])


# --- reading --------------------------------------------------------------------------------------------------------------

BLOCK = 8 * 2**20
"""Bytes that are read at once: a log of many gigabytes needs no more memory."""


def read(texts: Iterable[str]) -> Log:
    """What the logs say together. Never raises."""
    log = Log()
    reader = _NcclLogReader(log)
    for text in texts:
        for record in records(text):
            reader.take(record)
    return log


def blocks(file: IO[bytes]) -> Iterator[str]:
    """The text of a file in pieces that end with a line, or that are as long as two blocks."""
    rest = b""
    while data := file.read(BLOCK):
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) > BLOCK:
            cut = len(data)
        rest = data[cut:]
        yield data[:cut].decode("utf-8", errors="replace")
    yield rest.decode("utf-8", errors="replace")


def read_files(paths: Sequence[str]) -> Log:
    """What the files say together; ``-`` is standard input. Raises OSError, with the file's name."""

    def pieces() -> Iterator[str]:
        for path in paths:
            with ExitStack() as stack:
                yield from blocks(sys.stdin.buffer if path == "-" else stack.enter_context(Path(path).open("rb")))
            yield "\n"

    return read(pieces())


_VERSION = re.compile(r"[NR]CCL version *:? *(\d{1,3}\.\d{1,3}(?:\.\d{1,4})?)")
_EDGE = re.compile(r"(\d{1,7})(?:\[\w{1,16}\])? -> (\d{1,7})(?:\[\w{1,16}\])?(?: \[(send|receive)\])? via (.{1,200})$")
_NET = re.compile(r"(NET|COLLNET)/([^/]{1,60})/(\d{1,5})(?:\(\d{1,5}\))?(/.*)?$")
_SOCKET = re.compile(r"(?:\[\d{1,3}\])?([A-Za-z][^\s:<]{0,40}):([^\s<]{0,80})<\d*>")
_ADAPTER = re.compile(r"([A-Za-z][\w.-]{0,40}):(\d{1,3})/(IB|RoCE|iWARP)")
_COMM = re.compile(r"\brank (\d{1,7}) n[rR]anks (\d{1,7})\b")
_NODES = re.compile(r" nNodes (\d{1,6}) (?:localRanks (\d{1,5}) )?")
_RETURNED = re.compile(r"\bgroup\.cc:\d{1,5} -> [1-6]\b")
_SETTING = re.compile(r"(NCCL_\w{1,60}) set (?:by environment )?to ?(.{0,300}?)\.?$")
_SHELL = re.compile(r"(?:export |declare -x |- )?(NCCL_[A-Z0-9_]{1,60})=(\S{0,200})$")
_PATH = re.compile(r"(?:GPU/[\w-]{1,30} )\(\d{1,3}/[\d.]{1,12}/(\w{1,5})\)")
_GDR_OFF = re.compile(
    r"GPU Direct RDMA (?:\(\w{1,20}\) )?[Dd]isabled for (?:(?:GPU \S+ / )?HCA \d{1,4}(?: '([^'\s]{1,40})'?)?|(\S{1,60}))"
)
_OFI_GDR_OFF = re.compile(
    r"disabling GDR|(?:does not|doesn't) support GDR|without (?:GDR|GPUDirect RDMA)|GDR (?:is )?(?:disabled|off|not sup)", re.I
)
"""The plugin for libfabric (EFA, Slingshot), in its own words: ``Could not disable CUDA API usage for HMEM, disabling GDR``."""
_P2P_OFF = re.compile(r"(?:GPUs|dev) (\w{1,8})(?:\(=\w{1,16}\))? and (?:dev )?(\w{1,8})")
_USING = re.compile(r"using nccl==(\d{1,3}\.\d{1,3}\.\d{1,4})")
"""vLLM, SGLang."""
_VARIABLE = re.compile(r"\w{0,40}NCCL_\w{1,60}")
_BAD = re.compile(r"error|warn|fail|cannot|could\s?n|unable|not |invalid|abort|timed? ?out", re.IGNORECASE)
_WRONG = re.compile(r"Out of bounds values\s{0,20}: ?(\d{1,12})")


class _NcclLogReader:
    """Puts records into a log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.comm: dict[tuple[str, str, str], int] = {}

    def take(self, record: Record) -> None:
        log = self.log
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
        if record.level == WARN:
            self.fault(record)
        elif record.level == INFO:
            self.info(record)

    def info(self, record: Record) -> None:
        """By the word that a line begins with, which is the quickest: a log of a day has millions of lines."""
        log, text, host = self.log, record.text, record.host
        word = text.partition(" ")[0].split("/")[0].rstrip(":")
        if word in ("Channel", "Ring", "CollNet"):
            self.edge(record)
        elif word == "NET":
            self.net(record)
        elif word == "Bootstrap":
            log.bootstrap[host] = self.interfaces(host, [], text.partition("Using")[2]) or log.bootstrap.get(host, [])
        elif text.startswith("Using network "):
            log.networks.setdefault(text[14:74].strip(), set()).add(host)
        elif word in ("GPU", "MNNVL") or "GPU Direct RDMA" in text:
            self.gpu(record)
        elif word in ("P2P", "Could"):
            words = ("P2P is disabled between", "Could not enable P2P")
            if any(one in text for one in words) and (pair := _P2P_OFF.search(text)):
                log.p2p_off.add((min(pair.groups()), max(pair.groups())))
        elif word.startswith("NCCL_") and (setting := _SETTING.match(text)):
            self.setting(setting[1], setting[2], host)
        elif "Init " in text or " nranks " in text or " nRanks " in text:
            self.communicator(record)
        elif "version" in text:
            self.version(text, host)
        elif "libibverbs" in text:
            log.no_verbs.add(host)
        elif " -> " in text and _RETURNED.search(text):
            log.failed += 1

    def fabric(self, record: Record) -> None:
        """What NVML says of the fabric that joins GPUs of several nodes: ``MNNVL busId ... state 3 healthMask 0xaa``."""
        if (mask := _HEALTH.search(record.text)) and (bad := fabric_faults(int(mask[1], 16))):
            self.keep(LoggedFault("fabric-health", record.host, f"healthMask 0x{mask[1]}: {', '.join(bad)}"))

    def edge(self, record: Record) -> None:
        match = _EDGE.search(record.text)
        via = match[4] if match else record.text.partition(" via ")[2]
        if net := _NET.match(via):
            gdr = "/GDR" in (net[4] or "")
            name = f"{net[1]}/{net[2]}" + ("/GDRDMA" if gdr else "")
            if net[1] == "NET" and match:
                own, peer = int(match[1]), int(match[2])
                own, peer = (peer, own) if match[3] == "receive" else (own, peer)
                ranks = self.comm.get((record.host, record.pid, record.gpu), 0)
                self.log.edges[NetEdge(record.host, own, peer, ranks, net[2], int(net[3]), gdr)] += 1
        elif via.startswith("direct shared memory"):
            name = "SHM/direct"
        elif via.startswith(("P2P/", "SHM/")):
            name = "/".join(via.split("/")[:2]).strip()
        else:
            return
        self.log.transports[name] += 1

    def net(self, record: Record) -> None:
        log, text, host = self.log, record.text, record.host
        if text.startswith("NET/Socket") and "Using" in text:
            self.interfaces(host, log.sockets.setdefault(host, []), text)
        elif ": Using" in text:
            before, _, oob = text.partition("OOB ")
            _put(log.adapters, host, [LoggedDevice(f"{name}:{port}", link) for name, port, link in _ADAPTER.findall(before)])
            if host not in log.bootstrap:
                _put(log.bootstrap, host, [LoggedDevice(*pair) for pair in _SOCKET.findall(oob)])
        elif "GPU Direct RDMA" in text:
            self.gpu(record)
        elif text.startswith("NET/OFI") and _OFI_GDR_OFF.search(text):
            log.gdr_off.setdefault(host, set()).add("OFI")

    def interfaces(self, host: str, known: list[LoggedDevice], text: str) -> list[LoggedDevice]:
        """Put the interfaces that a line names to those that are known."""
        addresses = self.log.addresses.setdefault(host, {})
        for name, detail in _SOCKET.findall(text):
            device = LoggedDevice(name, detail)
            if device not in known:
                known.append(device)
            of_name = addresses.setdefault(name, set())
            if detail and len(of_name) < MOST_FAULTS:
                of_name.add(detail)
        return known

    def communicator(self, record: Record) -> None:
        log, text = self.log, record.text
        match = _COMM.search(text)
        if match is None:
            return
        rank, ranks = int(match[1]), int(match[2])
        self.comm[record.host, record.pid, record.gpu] = ranks
        if ranks > log.ranks:
            log.ranks = ranks
            log.local_ranks.clear()
            log.nodes = log.local_count = 0
        if ranks == log.ranks:
            log.local_ranks.setdefault(record.host, set()).add(rank)
            if nodes := _NODES.search(text):
                log.nodes = int(nodes[1])
                log.local_count = max(log.local_count, int(nodes[2] or 0))
        log.started += "Init START" in text
        log.complete += "Init COMPLETE" in text

    def gpu(self, record: Record) -> None:
        """Paths between GPUs, and what is said of GPUDirect RDMA and of the fabric."""
        self.fabric(record)
        if match := _GDR_OFF.search(record.text):
            self.log.gdr_off.setdefault(record.host, set()).add(match[1] or match[2] or "")
        own = record.text.partition(" ")[0]
        for path in _PATH.finditer(record.text, len(own)):
            if path[1] != "LOC":
                self.log.gpu_paths[path[1]] += 1

    def setting(self, name: str, value: str, host: str) -> None:
        self.log.settings.setdefault(name, {}).setdefault(value.strip().strip("\"'"), set()).add(host)

    def version(self, text: str, host: str) -> None:
        if match := _VERSION.search(text):
            self.log.versions.setdefault(match[1], set()).add(host)

    def other(self, record: Record) -> None:
        """A line of another program."""
        text, log = record.text, self.log
        # torch names the version of the library that failed: the same one, so it counts where NCCL named none itself.
        if "version" in text and ("+cuda" in text or "+hip" in text or not log.versions):
            self.version(text, "")
        using, wrong, shell = _USING.search(text), _WRONG.search(text), _SHELL.match(text.strip())
        if using and not log.versions:
            log.versions[using[1]] = {""}
        if wrong:
            log.wrong += int(wrong[1])
        if shell:
            self.setting(shell[1], shell[2], "")
        if "NCCL version" in text or shell or wrong:
            return
        # The name of a variable (NCCL_MNNVL_ENABLE) is not a fault, nor is a plugin that only tells its name.
        kind = kind_of(_VARIABLE.sub("", text))
        if kind in ("imex", "nvls", "net-plugin") and not _BAD.search(text):
            return
        if kind not in (OTHER, "failed", "cuda", FOLLOWS):
            self.fault(record)

    def fault(self, record: Record) -> None:
        log, kind = self.log, kind_of(record.text, record.source)
        if record.level != WARN:
            if not log.versions:
                self.version(record.text, "")
            if kind == OTHER:
                return
        if kind == "no-verbs" and "libibverbs" in record.text:
            log.no_verbs.add(record.host)
        _, last, cause = record.text.partition("Last error:")
        text = cause if last and record.level != WARN and kind_of(cause) == kind else record.text
        if kind in ("nvls", "p2p-refused") and text.lower().startswith("cuda failure"):
            text = f"{record.source.partition(':')[0]}: {text}"  # the message alone does not say what was tried
        self.keep(LoggedFault(kind, record.host, text.strip()[:400]))

    def keep(self, fault: LoggedFault) -> None:
        """Count a fault; the first of each kind always."""
        log, kind = self.log, fault.kind
        if fault in log.faults or len(log.faults) < MOST_FAULTS or not any(seen.kind == kind for seen in log.faults):
            log.faults[fault] += 1


_HEALTH = re.compile(r"\bhealthMask (?:0x)?([0-9a-fA-F]{1,8})\b")
_TRUE = 1
"""Of the fields of two bits: 0 is not supported, 1 true, 2 false; of the manager's state 2 is disconnected."""
_FABRIC = {
    "degraded bandwidth": (0, 0x3, (_TRUE,)), "a route recovers": (2, 0x3, (_TRUE,)),
    "a route is unhealthy": (4, 0x3, (_TRUE,)),
    "recovers from an access time-out": (6, 0x3, (_TRUE,)), "incorrect configuration": (8, 0xF, tuple(range(2, 16))),
    "the fabric manager is disconnected": (14, 0x3, (2,)),
}  # fmt: skip
"""Shift, width and bad values of the fields of NVML's mask (nvml.h of 13.615, NVML_GPU_FABRIC_HEALTH_MASK_*)."""


def fabric_faults(mask: int) -> list[str]:
    """What is wrong in a fabric's health mask; empty where nothing is."""
    return [words for words, (shift, width, bad) in _FABRIC.items() if mask >> shift & width in bad]


def _put(into: dict[str, list[LoggedDevice]], host: str, devices: list[LoggedDevice]) -> None:
    known = into.setdefault(host, []) if devices else []
    known += [device for device in devices if device not in known]


# --- log lines ------------------------------------------------------------------------------------------------------------

# NCCL's lines out of any text: a rank's log, a job's output of many ranks, text pasted into an issue. A line of NCCL is, by
# version (``src/debug.cc``)::
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

INFO, WARN, ERROR, TEXT = "INFO", "WARN", "ERROR", "TEXT"
"""``ERROR``: what torch says about a failed call of NCCL; ``TEXT``: a line of another program that speaks of NCCL."""

MAX_MESSAGE = 4096
"""Characters of a message that are read: NCCL's own buffer holds 1024."""
_MAX_HEAD = 400
"""Characters before the level in which host, process and place are looked for."""

_LEVEL = re.compile(r"NCCL (INFO|WARN|TRACE|CALL|ABORT)(?: |$)")
_WHO = re.compile(r"(?<![\w.-])(<?[A-Za-z0-9][\w.-]{0,255}>?):(\d{1,10}):\d{1,10} (?:\[(\d{1,4})\] )?")
_GPU = re.compile(r"\[(\d{1,4})\] ")
_SOURCE = re.compile(r"(?<!\S)([^\s:\[\]]{1,200}:\d{1,6}) (?:\([^\s()]{1,80}\) )?$")
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]|ESC\[[0-9;]{0,32}m")
_GLUED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?")
"""A time that a log service puts in front of a line without a space."""

_MARKS = re.compile(
    "CCL version|NCCL_|nccl|NCCL (?:[eE]rror|failure|operations)|atchdog|Out of bounds values|Duplicate GPU"
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
        if "NCCL " in line and (heads := list(_LEVEL.finditer(line))):
            error_follows = False
            yield from _split(line, heads)
        elif error_follows:
            error_follows = False
            yield Record(ERROR, line[:MAX_MESSAGE])
        elif _MARKS.search(line):
            error_follows = "Last error" in line
            level = ERROR if any(mark in line for mark in _FAILED) else TEXT
            yield Record(level, line[:MAX_MESSAGE])


def _split(line: str, heads: list[re.Match[str]]) -> Iterator[Record]:
    """The records of one physical line: usually one."""
    ends = [0, *(head.end() for head in heads)]
    parts = [_head(line, end, head.start()) for end, head in zip(ends, heads, strict=False)]
    for at, (host, pid, gpu, source, _) in enumerate(parts):
        head, stop = heads[at], parts[at + 1][4] if at + 1 < len(parts) else len(line)
        text = line[head.end() : min(stop, head.end() + MAX_MESSAGE)]
        yield Record(head.group(1), text.rstrip(), host, pid, gpu, source)


def _head(line: str, begin: int, end: int) -> tuple[str, str, str, str, int]:
    """Host, process, GPU and place before a level, and where in the line they begin."""
    begin = max(begin, end - _MAX_HEAD)
    before = _GLUED.sub(lambda time: " " * len(time[0]), line[begin:end])
    place = _SOURCE.search(before)
    source = place[1] if place else ""
    if who := next(_WHO.finditer(before), None):
        return who[1], who[2], who[3] or "", source, begin + who.start()
    gpu = _GPU.search(before)
    first = gpu or place
    return "", "", gpu[1] if gpu else "", source, begin + first.start() if first else end


# --- for people and programs -------------------------------------------------------------------------------------------


def as_dict(log: Log) -> dict[str, Any]:
    """What a log says, as JSON."""
    return {
        "lines": log.lines,
        "versions": _sorted(log.versions),
        "hosts": sorted(log.hosts),
        "nodes": log.node_count(),
        "ranks": log.ranks,
        "networks": _sorted(log.networks),
        "between_nodes": dict(log.between().most_common()),
        "transports": dict(log.transports.most_common()),
        "sockets": _devices(log.sockets or log.bootstrap),
        "adapters": _devices(log.adapters),
        "settings": {name: _sorted(values) for name, values in sorted(log.settings.items())},
        "faults": [{**fault._asdict(), "times": times} for fault, times in log.faults.most_common(50)],
    }


def _sorted(hosts_by_name: dict[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(hosts - {""}) for name, hosts in sorted(hosts_by_name.items())}


def _devices(devices_by_host: dict[str, list[LoggedDevice]]) -> dict[str, list[str]]:
    return {host: [" ".join(device).strip() for device in devices] for host, devices in sorted(devices_by_host.items())}


def summary(log: Log) -> Iterator[str]:
    """What a log says of the run, line by line for people."""
    yield f"  version      {', '.join(sorted(log.versions)) or 'not logged'}"
    if log.ranks or log.hosts:
        yield f"  size         {log.ranks or '?'} ranks on {log.node_count() or '?'} nodes"
    for title, names in (("transports", log.transports), ("between nodes", log.between()), ("network", log.networks)):
        if names:
            yield f"  {title:<12} {', '.join(sorted(names))}"
    for title, by_host in (("interfaces", log.sockets or log.bootstrap), ("adapters", log.adapters)):
        groups: dict[str, list[str]] = {}
        for host, devices in by_host.items():
            groups.setdefault(", ".join(device.name for device in devices), []).append(host)
        for device_names, hosts in list(groups.items())[:8]:
            yield f"  {title:<12} {device_names} ({listed(sorted(hosts), 4)})"
    if log.settings:
        settings = [f"{name}={'|'.join(sorted(values))}" for name, values in sorted(log.settings.items())]
        yield f"  settings     {' '.join(settings)}"
