"""The verdict of ``nccl-check``: its rules over what was measured and what NCCL logged, their order, and the headline.

Bandwidths are bus bandwidths in GB/s of 10^9 bytes. Against the hardware an all-gather counts, which the planner takes too: the
median of its largest sizes. What to expect comes with the document (``clustertune.nccl_check.link_check.expected``).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from clustertune.check.machines import RDMA_KINDS, Expects, JobNodes, Machine
from clustertune.check.rule import (
    FAIL,
    LINKS,
    MACHINE,
    NODES,
    PASS,
    UNKNOWN,
    WARN,
    Check,
    Finding,
    Rules,
    Seen,
    checks,
    either,
    grouped,
    in_order,
    render_page,
    rule_of,
    run,
    worst,
)
from clustertune.host.facts import HostFacts, Nic, RdmaPort, from_dict
from clustertune.host.nvidia_text import has_nvlink
from clustertune.nccl_check.nccl_log import FOLLOWS, OTHER, TABLE, Log, LoggedDevice
from clustertune.text import listed

# --- what rules look at ---------------------------------------------------------------------------------------------------

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "p2p")
"""What is measured, in the order of what training needs most: sharded data parallelism gathers and scatters."""
PLUGIN_KINDS = ("efa", "slingshot")
"""Networks that NCCL reaches through a plugin only."""


def names(items: Iterable[str], most: int = 4) -> str:
    """``n1, n2 and 6 more``; names that are empty are left out."""
    return listed(sorted({item for item in items if item}), most)


def short(host: str) -> str:
    """The first part of a host's name, as NCCL writes it."""
    return host.partition(".")[0]


class LinkContext:
    """A result of ``nccl-check`` and NCCL's logs, as the rules ask for them; what is absent is empty."""

    def __init__(self, document: Mapping[str, Any], log: Log) -> None:
        self.document, self.log = document, log
        expected = document.get("expected") or {}
        self.compute: Mapping[str, Any] = expected.get("compute") or {}
        self.network: Mapping[str, Any] = expected.get("network") or {}
        self.environment: Mapping[str, str] = document.get("environment") or {}
        self.transport: str = document.get("transport") or ""
        self.backend: str = document.get("backend") or ("nccl" if log.lines else "")
        self.facts = [from_dict(item) for item in self.entries("facts")]
        self.nodes: int = document.get("nodes") or log.node_count() or len(self.facts)
        """Nodes that took part; 0: not known."""
        most = max((len(ranks) for ranks in log.local_ranks.values()), default=0)
        spread = -(-log.ranks // log.nodes) if log.nodes else 0
        self.ranks: int = document.get("gpus_per_node") or log.local_count or max(most, spread)
        """Ranks of each node that took part; 0: not known."""
        kind = self.network.get("kind") or ""
        self.kind: str = kind if kind not in ("unknown", "none") else ""
        """The network's kind, as the cluster file says; empty where it does not."""
        self.configured_interface: str = document.get("interface") or self.network.get("interface") or ""
        """The interface that ranks of several nodes must use; empty: none is named."""

    def entries(self, key: str) -> list[dict[str, Any]]:
        """A list of the document."""
        return self.document.get(key) or []

    def from_log(self, *kinds: str) -> list[Seen]:
        """What NCCL said first of these kinds of fault, a failure of all hosts that said it; nothing where it said nothing."""
        faults = [fault for fault in self.log.faults if fault.kind in kinds]
        return [Seen(FAIL, faults[0].text, where=names(fault.host for fault in faults))] if faults else []

    @cached_property
    def over(self) -> set[str]:
        """How bytes went between nodes, as NCCL names it: ``Socket``, ``IB``, ``AWS Libfabric``; empty: not known."""
        if self.nodes < 2 or self.backend != "nccl":
            return set()
        parts = [part.strip() for part in self.transport.split(",")]
        named = {part.split("/")[1] for part in parts if part.startswith("NET/")}
        return set(self.log.between()) or set(self.log.networks) or named

    @property
    def by_socket(self) -> bool:
        """Whether TCP carried the traffic between nodes."""
        return "Socket" in self.over

    def used_interfaces(self, host: str) -> list[LoggedDevice]:
        """Interfaces that carried TCP on a host: by the log, or by what ranks were given."""
        for known in (self.log.sockets, self.log.bootstrap):
            for name, devices in known.items():
                if name and short(name) == short(host):
                    return devices
        return [LoggedDevice(self.configured_interface, "")] if self.configured_interface else []

    def rdma_active(self, layer: str = "") -> list[tuple[HostFacts, RdmaPort]]:
        """Ports of RDMA adapters that are up, of a link layer or of all."""
        ports = [(facts, port) for facts in self.facts for port in facts.rdma if port.active]
        return [(facts, port) for facts, port in ports if not layer or port.link_layer == layer]

    @cached_property
    def machines(self) -> list[Machine]:
        """The nodes as the rules of a machine see them, with the interface and the variables that ranks had."""
        tried = [(item["node"], item["status"]) for item in self.entries("p2p_probe")]
        variables = dict(self.environment)
        if not self.rdma_active() and self.kind not in RDMA_KINDS:  # there is nothing that the variable could take away
            variables.pop("NCCL_IB_DISABLE", None)
        gpus = (self.ranks or None) if self.backend == "nccl" else None
        machines = []
        for facts in self.facts:
            used = [device.name for device in self.used_interfaces(facts.hostname)]
            named = self.configured_interface or (used[0] if len(used) == 1 else "")
            mine = {status for node, status in tried if node == facts.hostname}
            p2p = False if "hung" in mine else True if "ok" in mine else None
            network = {"hca": [], "environment": {}, **self.network, "kind": self.kind, "interface": named}
            cluster = {"network": network, "compute": {"interconnect": self.compute.get("interconnect")}}
            expects = Expects(gpus=gpus, nodes=self.nodes, ran=True, p2p=p2p)
            machines.append(Machine(replace(facts, environment={**facts.environment, **variables}), cluster, expects))
        return machines

    def settings(self, name: str) -> set[str]:
        """The values of one of NCCL's variables."""
        stated = self.environment.get(name)
        return set(self.log.settings.get(name, {})) | ({stated} if stated is not None else set())

    def setting(self, name: str) -> str:
        """The value of a variable, where it is set; the first of several."""
        return next(iter(sorted(value for value in self.settings(name) if value)), "")

    def is_on(self, name: str) -> bool:
        """Whether a variable is set to something else than 0, anywhere."""
        return bool(self.settings(name) - {"", "0"})

    @cached_property
    def nvlink(self) -> bool:
        """Whether NVLink joins the GPUs of a node, by the cluster file, what a node says, or the log."""
        stated = self.compute.get("interconnect") or "none"
        if stated != "none":
            return bool(stated.startswith("nvlink"))
        topology = next((facts.topology for facts in self.facts if facts.topology), "")
        return has_nvlink(topology) if topology else "NVL" in self.log.gpu_paths


# --- what NCCL reported ---------------------------------------------------------------------------------------------------


def _repeating(name: str, row: Mapping[str, Any]) -> Check:
    """The rule that repeats what NCCL said: a row of ``nccl_log.yaml``."""
    kinds, status = row.get("kinds", [name]), row.get("status", FAIL)

    def look(context: LinkContext) -> Iterator[Seen]:
        faults = [fault for fault in context.log.faults if fault.kind in kinds]
        if faults:
            times = sum(context.log.faults[fault] for fault in faults)
            # What torch says around a reason is longer than the reason, and comes first.
            faults.sort(key=lambda fault: "NCCL error" in fault.text or "ncclRemoteError" in fault.text)
            again = f" ({times} times)" if times > 1 else ""
            other = next((fix for words, fix in row.get("fixes", ()) if re.search(words, faults[0].text, re.IGNORECASE)), "")
            yield Seen(status, f"{faults[0].text}{again}", other, names(fault.host for fault in faults))

    return Check(rule_of(name, row), look, LINKS)


RULES = Rules(LINKS, __file__)
RULES += [_repeating(name, row) for name, row in TABLE["rules"].items()]
_CUDA_KINDS = ("duplicate-gpu", "gpu-missing", "nccl-memory", "gpu-fault", "driver", "p2p-refused", "nvls")
"""Errors of CUDA that have rules of their own."""


@RULES("cuda")
def cuda(context: LinkContext) -> Iterator[Seen]:
    """No errors of CUDA."""
    faults = context.log.faults
    cuda_faults = [fault for fault in faults if fault.kind == "cuda"]
    # torch says "unhandled cuda error" whatever it was.
    if cuda_faults and not any(fault.kind in _CUDA_KINDS for fault in faults):
        first = next((fault for fault in cuda_faults if "failure" in fault.text.lower()), cuda_faults[0])
        yield Seen(FAIL, first.text, where=names(fault.host for fault in cuda_faults))


@RULES("collective-hung")
def collective_hung(context: LinkContext) -> Iterator[Seen]:
    """Every collective ends."""
    log, hung, logged = context.log, context.entries("hung"), context.from_log("hung")
    for item in hung:
        what = f"{item['collective']} ({item['scope']}, {item['bytes']} bytes)"
        yield Seen(FAIL, f"{what} did not end within {item['seconds']:.0f} s", where=names(item["hosts"]))
    yield from logged
    others = {fault.kind for fault in log.faults} - {"no-verbs"}  # every log of a machine without RDMA names that
    if context.entries("results"):
        if not logged and not hung:
            yield Seen(PASS, "every collective ended")
    elif log.started and not log.complete and not log.faults:
        began = f"{log.started} ranks" if log.started > 1 else "a rank"
        yield Seen(WARN, f"{began} began to connect, and the log ends before any was ready")
    elif log.networks and not (log.started or log.complete or log.transports or others):
        yield Seen(UNKNOWN, "the log ends before ranks are connected")


@RULES("wrong-result")
def wrong_result(context: LinkContext) -> Iterator[Seen]:
    """Collectives compute what they should."""
    if context.log.wrong:
        yield Seen(FAIL, f"nccl-tests found {context.log.wrong} values out of bounds")
    items = [item for key in ("results", "per_node", "per_pair") for item in context.entries(key)]
    bad = next((item for item in items if item.get("correct") is False), None)
    if bad:
        where = names(bad.get("nodes") or [bad.get("node", "")])
        yield Seen(FAIL, f"{bad['collective']} of {bad['bytes']} bytes has wrong values", where=where)
    elif any(item.get("correct") is True for item in items) and not context.log.wrong:
        yield Seen(PASS, "every value was correct")


@RULES("unexplained-error")
def unexplained_error(context: LinkContext) -> Iterator[Seen]:
    """No error without a reason."""
    faults = context.log.faults
    failures = [fault for fault in faults if fault.kind in ("failed", FOLLOWS)]
    known = any(fault.kind not in (OTHER, FOLLOWS, "failed", "no-verbs") for fault in faults)
    if not known and (failures or context.log.failed):
        warned = [fault for fault in faults if fault.kind == OTHER]
        why = f"; the last warning: {warned[-1].text}" if warned else ""
        text = failures[0].text if failures else "a call of NCCL failed"
        yield Seen(FAIL, text + why, where=names(fault.host for fault in failures or warned[-1:]))


@RULES("other-warning")
def other_warning(context: LinkContext) -> Iterator[Seen]:
    """No other warnings of NCCL."""
    faults = [fault for fault in context.log.faults if fault.kind == OTHER]
    for text in list(dict.fromkeys(fault.text for fault in faults))[:3]:
        yield Seen(WARN, text, where=names(fault.host for fault in faults if fault.text == text))
    if context.log.lines and not context.log.faults:
        yield Seen(PASS, "NCCL gave no warning")


@RULES("net-plugin")
def net_plugin(context: LinkContext) -> Iterator[Seen]:
    """NCCL's plugin for the vendor's network."""
    needed = context.kind in PLUGIN_KINDS or bool(context.setting("NCCL_NET_PLUGIN"))
    for seen in context.from_log("net-plugin"):
        yield seen._replace(status=FAIL if needed or not context.log.complete else WARN)


# --- between nodes --------------------------------------------------------------------------------------------------------

VIRTUAL = (
    *("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "tailscale", "tun", "zt", "vmnet", "podman", "lxc"),
    *("ip6tnl", "ip6gre", "gre", "sit", "dummy", "kube", "nodelocaldns", "weave", "cilium"),
)
"""Interfaces that lead to no other node, by their names; ``br-`` is what docker calls its bridges."""
LINK_LOCAL = ("fe80", "169.254.")
"""Beginnings of addresses that are valid on one wire only."""
IPOIB = ("ib", "ibp", "ibs", "hsn")
"""How interfaces of InfiniBand adapters (IP over IB) and of Slingshot are called: ib0, ibp12s0, ibs85f0, hsn0."""
SAME_EVERYWHERE = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_IB_DISABLE", "NCCL_NET")
"""Variables that ranks must agree about: they decide what both ends of a connection expect."""
RDMA_PLUGINS = ("IB", "AWS Libfabric", "Libfabric", "OFI", "UCX")
"""How the names of plugins begin that move bytes by RDMA."""


def leads_nowhere(name: str) -> bool:
    """Whether an interface's name says that no other node is behind it."""
    return name == "lo" or name.startswith(VIRTUAL)


@RULES("wrong-interface")
def wrong_interface(context: LinkContext) -> Iterator[Seen]:
    """The interface that ranks use."""
    if context.nodes < 2:
        return
    # Interfaces carry something between nodes: the start-up of NCCL always, and gloo.
    hosts = [facts.hostname for facts in context.facts] or sorted({*context.log.sockets, *context.log.bootstrap} - {""})
    interface, good = context.configured_interface, set()
    for host in hosts:
        devices = context.used_interfaces(host)
        used = [device.name for device in devices]
        nowhere = {one.name: "" for one in devices if leads_nowhere(one.name)}
        nowhere |= {one.name: f" with {one.detail}" for one in devices if one.detail.lower().startswith(LINK_LOCAL)}
        bad = [name for name in used if name in nowhere]
        facts = next((item for item in context.facts if short(item.hostname) == short(host)), None)
        # Over RDMA the interface carries the start-up only: its speed does not matter then, and one that works is enough.
        by_tcp = context.by_socket or context.backend == "gloo"
        if bad and bad[0] == used[0]:  # ranks meet over the first one
            yield Seen(FAIL, f"traffic between nodes uses {bad[0]}{nowhere[bad[0]]}, which leads to no other node", where=host)
        elif bad and by_tcp:
            yield Seen(FAIL, f"NET/Socket uses {names(bad)} beside {used[0]}", where=host)
        elif interface and used and interface not in used and context.over <= {"Socket"}:
            yield Seen(FAIL, f"traffic uses {names(used)} instead of {interface}", where=host)
        elif slow := _slower(facts, used) if facts and by_tcp else "":
            yield Seen(FAIL, slow, where=host)
        else:
            good |= set(used)
    if good:
        yield Seen(PASS, f"ranks use {names(good)}")


def _slower(facts: HostFacts, used: list[str]) -> str:
    """Words where an interface four times as fast, up and with an address, stands idle; empty otherwise."""

    def gbit(nic: Nic) -> float:
        return (nic.mbit or 0) / 1000

    others = [nic for nic in facts.nics if nic.up and nic.addresses and not nic.virtual and not leads_nowhere(nic.name)]
    slow = max((nic for nic in facts.nics if nic.name in used and nic.mbit), key=gbit, default=None)
    fast = max((nic for nic in others if nic.name not in used and nic.mbit), key=gbit, default=None)
    if not slow or not fast or gbit(fast) < 4 * gbit(slow):
        return ""
    return f"{slow.name} ({gbit(slow):g} Gbit/s) is used, while {fast.name} ({gbit(fast):g} Gbit/s) is up"


@RULES("socket-fallback")
def socket_fallback(context: LinkContext) -> Iterator[Seen]:
    """TCP between nodes although there is a faster way."""
    log, kind = context.log, context.kind
    if not context.by_socket:
        if context.over:
            yield Seen(PASS, f"traffic between nodes goes over {names(context.over)}")
        return
    hosts = [facts.hostname for facts in context.facts] or sorted(log.sockets)
    used = names(device.name for host in hosts for device in context.used_interfaces(host))
    way = f"traffic between nodes goes through NET/Socket{f' on {used}' if used else ''}"
    ports = context.rdma_active("InfiniBand")
    roce = [(facts, port) for facts, port in context.rdma_active("Ethernet") if (port.gbit or 0) >= 25]
    listed = {device.name for devices in log.adapters.values() for device in devices if device.detail == "IB"}
    over_ib = any(one.name.startswith(IPOIB) and one.name[-1:].isdigit() for many in log.sockets.values() for one in many)
    why, status, where = "", FAIL, ""
    if ports or (roce and kind not in ("ethernet", *RDMA_KINDS, *PLUGIN_KINDS)):
        port = (ports or roce)[0][1]
        status, where = (FAIL if ports else WARN), names(one.hostname for one, _ in ports or roce)
        layer = "RoCE" if not ports else port.link_layer
        why = f" although {port.device} port {port.port} ({port.gbit or 0:g} Gbit/s {layer}) is active"
    elif kind in (*RDMA_KINDS, *PLUGIN_KINDS):
        why = f" although the cluster file says {kind}"
    elif listed:
        why = f" although NCCL lists {names(listed)}"
    elif over_ib:
        why = ", an interface of a fast adapter that TCP uses at a fraction of its speed"
    elif kind != "ethernet" and (setting := _wants_rdma(context)):
        why = f" although {setting} asks for RDMA"
    if why:
        reason = "; NCCL_IB_DISABLE is set" if context.is_on("NCCL_IB_DISABLE") else ""
        reason = reason or ("; NCCL could not open libibverbs" if log.no_verbs else "")
        yield Seen(status, f"{way}{why}{reason}", where=where)
    elif not context.facts and not kind:
        yield Seen(UNKNOWN, f"{way}; whether there is an adapter for RDMA is not known here")
    else:
        yield Seen(PASS, way + (", and no InfiniBand port is active" if context.facts else ", as the cluster file says"))


def _wants_rdma(context: LinkContext) -> str:
    """A setting that makes sense with RDMA only; empty where there is none."""
    if "0" in context.settings("NCCL_IB_DISABLE"):
        return "NCCL_IB_DISABLE=0"
    settings = {name: context.setting(name) for name in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX")}
    return next((f"{name}={value}" for name, value in settings.items() if value not in ("", "none")), "")


@RULES("nodes-differ")
def nodes_differ(context: LinkContext) -> Iterator[Seen]:
    """One version, one network and the same settings on all nodes."""
    if seen := context.from_log("nccl-versions"):
        yield from seen
        return
    told: dict[str, dict[str, set[str]]] = {"NCCL": context.log.versions, "torch": {}, "the network": context.log.networks}
    for facts in context.facts:
        for package in facts.packages:
            if package.name == "torch":
                told["torch"].setdefault(package.version, set()).add(facts.hostname)
    settings = {name: context.log.settings.get(name, {}) for name in SAME_EVERYWHERE}
    bad = False
    for status, values in ((FAIL, told), (WARN, settings)):
        for what, by_value in values.items():
            hosts = [host for these in by_value.values() for host in these - {""}]
            if len(by_value) > 1 and hosts and (status == FAIL or len(hosts) == len(set(hosts))) and len(set(hosts)) > 1:
                bad = True
                shown = "; ".join(f"{value} on {names(these) or 'others'}" for value, these in sorted(by_value.items())[:4])
                yield Seen(status, f"{what} differs: {shown}")
    if not bad and (told["NCCL"] or told["torch"]):
        yield Seen(PASS, ", ".join(f"{what} {names(values)}" for what, values in told.items() if values))


@RULES("gdr-off")
def gdr_off(context: LinkContext) -> Iterator[Seen]:
    """GPUDirect RDMA."""
    edges = [edge for edge in context.log.crossing() if edge.plugin.startswith(RDMA_PLUGINS)]
    if not edges and not any(name.startswith(RDMA_PLUGINS) for name in context.over):
        return
    served = {edge.host for edge in edges if edge.gdr}
    off = {host for host, adapters in context.log.gdr_off.items() if adapters} - served
    if (served and not off) or "GDRDMA" in context.transport:
        yield Seen(PASS, "GPUDirect RDMA is in use")
    elif off:
        yield Seen(WARN, "GPUDirect RDMA is off: NCCL says that it is disabled", where=names(off))
    elif edges and not any(facts.peermem is False for facts in context.facts):  # the rule gpudirect-rdma says so
        yield Seen(UNKNOWN, "no connection uses GPUDirect RDMA: GPUs and adapters may be too far apart")


# --- inside a node --------------------------------------------------------------------------------------------------------


@RULES("p2p-hang")
def p2p_hang(context: LinkContext) -> Iterator[Seen]:
    """Two GPUs of a node exchange data."""
    good: set[str] = set()
    for item in context.entries("p2p_probe"):
        node, status = item["node"], item["status"]
        what = f"an all-reduce between GPUs {' and '.join(map(str, item.get('gpus', [])))}"
        if status == "hung":
            yield Seen(FAIL, f"{what} did not end in time", where=node)
        elif status == "failed":
            yield Seen(FAIL, f"{what} failed: {item.get('message') or 'it failed'}", where=node)
        elif status == "ok":
            good.add(node)
    if good:
        yield Seen(PASS, "pairs of GPUs exchange data", where=names(good))


@RULES("nvlink-unused")
def nvlink_unused(context: LinkContext) -> Iterator[Seen]:
    """NVLink carries the traffic inside a node."""
    if not context.nvlink or context.backend != "nccl" or context.ranks < 2:
        return
    if broken := context.from_log("p2p-broken"):
        yield from broken
        return
    log = context.log
    inside = {name for name in log.transports if name.startswith(("P2P/", "SHM/"))}
    inside |= {f"NET/{edge.plugin}" for edge in log.edges.keys() - log.crossing().keys()}
    slow = {name for name in inside if not name.startswith("P2P")}
    far = {kind for kind in log.gpu_paths if kind in ("PHB", "SYS", "NODE")}
    if log.p2p_off:
        yield Seen(FAIL, f"P2P is disabled between {len(log.p2p_off)} pairs of GPUs")
    elif slow:
        yield Seen(FAIL, f"GPUs of a node talk over {names(slow)}, while NVLink joins them")
    elif far:
        yield Seen(FAIL, f"NCCL sees paths of kind {names(far)} between GPUs that NVLink should join")
    elif inside:
        yield Seen(PASS, f"GPUs of a node talk over {names(inside)}")


@RULES("p2p-disabled")
def p2p_disabled(context: LinkContext) -> Iterator[Seen]:
    """P2P between the GPUs of a node."""
    log, off = context.log, FAIL if context.nvlink else WARN
    counted = bool(log.nodes or context.document.get("gpus_per_node"))
    if context.backend == "gloo" or (context.ranks == 1 and counted):
        return
    peer = [name for name in log.transports if name.startswith("P2P")]
    if context.is_on("NCCL_P2P_DISABLE"):
        yield Seen(off, "NCCL_P2P_DISABLE is set")
    elif context.setting("NCCL_P2P_LEVEL") in ("LOC", "0"):
        yield Seen(off, f"NCCL_P2P_LEVEL={context.setting('NCCL_P2P_LEVEL')} turns P2P off")
    elif log.p2p_off and not context.nvlink:
        yield Seen(WARN, f"the driver has P2P disabled between {len(log.p2p_off)} pairs of GPUs")
    elif context.ranks > 1 and peer:
        yield Seen(PASS, f"{names(peer)} is in use")


# --- what was measured ----------------------------------------------------------------------------------------------------

ENOUGH = 0.8
"""Share of the expected bandwidth below which a rule warns: published figures of healthy clusters spread by a fifth
(ops/hardware.yaml)."""
LARGEST = 3
"""The median of so many largest sizes, as the planner's."""
LEAST_S = 1e-3
"""A shorter collective tells the latency, not the bandwidth."""
HALF = 0.5
"""The same, below which a rule fails: a fall-back to another way costs half and more."""
UNEVEN = 0.8
"""Share of the typical node, or of the other direction, below which a node or direction is slow."""
CPU_SHARE = 0.5
"""gloo copies through the CPU: between nodes it is no faster than inside one, and is held to half of that."""
GLOO_SHARE = 0.65
"""Of what the line should carry: gloo has one connection for each pair of ranks, in which what one rank is ready to take waits
behind what it sends; its all-gather of two nodes reached 0.63 to 0.66 of lines that were shaped to known rates."""
CPU_GB_S = 0.25
"""What gloo is held to at most where that was not measured: one core copies and sums more."""


def speed(items: Iterable[Mapping[str, Any]], collective: str = "all_gather") -> tuple[float, float, float]:
    """Bandwidth of the largest sizes of one collective, the time of one of them and its spread; zeros where there is none."""
    sizes = {item["bytes"]: item for item in items if item["collective"] == collective}
    # A budget may end in the middle of the sizes: small ones must not drag the median down.
    largest = [sizes[size] for size in sorted(sizes)[-LARGEST:] if size * 16 >= max(sizes)]
    if not largest:
        return 0.0, 0.0, 0.0
    last = largest[-1]
    return statistics.median(item["busbw_gb_s"] for item in largest), last["median_s"], last.get("spread", 0.0)


def _scope(context: LinkContext, name: str) -> list[dict[str, Any]]:
    return [item for item in context.entries("results") if item["scope"] == name]


def _judged(
    context: LinkContext, level: str, where: str, gb_s: float, seconds: float, expected: float | None = None
) -> Iterator[Seen]:
    """What a figure means against what is expected. ``level``: of the document's ``expected``."""
    stated = _stated(context, level)
    expected = stated.get("expected_gb_s") or 0.0 if expected is None else expected
    text, hint = f"{gb_s:.3g} GB/s {where}", stated.get("hint")
    if expected <= 0:
        yield Seen(UNKNOWN, f"{text}; what the link should carry is not known (no cluster file)")
        return
    share, nominal = gb_s / expected, stated.get("nominal_gb_s") or 0.0
    text += f", {100 * gb_s / nominal:.2g} % of nominal ({nominal:.3g} GB/s)" if nominal > 0 else ""
    text += f", {100 * share:.0f} % of what is expected"
    if share < ENOUGH and seconds < LEAST_S:
        yield Seen(UNKNOWN, f"{text}; sizes were too small to judge")
    else:
        fix = f"look at the other findings first; then: {hint}" if hint else ""
        yield from either(FAIL if share < HALF else WARN, text if share < ENOUGH else "", text, fix)


def _stated(context: LinkContext, level: str) -> Mapping[str, Any]:
    return (context.document.get("expected") or {}).get(level) or {}


@RULES("intra-speed")
def intra_speed(context: LinkContext) -> Iterator[Seen]:
    """Bandwidth inside a node."""
    if context.backend != "nccl":
        return
    gb_s, seconds, _ = speed(_scope(context, "intra"))
    if not gb_s and context.nodes == 1:
        gb_s, seconds, _ = speed(_scope(context, "world"))
    if gb_s:
        yield from _judged(context, "intra", "inside a node", gb_s, seconds)


@RULES("inter-speed")
def inter_speed(context: LinkContext) -> Iterator[Seen]:
    """Bandwidth between nodes."""
    if context.nodes < 2 or context.nodes * context.ranks <= context.compute.get("nvlink_domain", 0):
        return
    gb_s, seconds, _ = speed(_scope(context, "world"))
    if not gb_s and context.network.get("ports", 0) <= 1:
        # One rank of each node drives one adapter: that says nothing of several.
        gb_s, seconds, _ = speed(_scope(context, "inter"))
    if not gb_s:
        return
    expected = _stated(context, "inter").get("expected_gb_s") or 0.0
    if context.backend == "gloo" and expected:
        local = max((item["busbw_gb_s"] for item in _scope(context, "intra")), default=0.0)
        most = CPU_SHARE * local if local else CPU_GB_S
        ways, carries = _pairs(context).values(), min(expected, most)
        line = min(pair.at_best for pair in ways) if len(ways) == context.nodes * (context.nodes - 1) else 0.0
        expected = min(GLOO_SHARE * expected, most)
        if line / carries > gb_s / expected:  # the lines are good: what is slow is gloo, or the CPUs
            yield from _judged(context, "inter", "one way between the slowest pair of nodes", line, LEAST_S, carries)
            return
    yield from _judged(context, "inter", "between nodes", gb_s, seconds, expected)


class Pair(NamedTuple):
    """What one node sends to another."""

    gb_s: float
    at_best: float
    """The same of its quickest repetitions: a machine that is busy is not taken for a slow cable."""


def _pairs(context: LinkContext) -> dict[tuple[str, str], Pair]:
    """Bandwidth from one node to another."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for item in context.entries("per_pair"):
        first, second = item["nodes"]
        grouped.setdefault((first, second), []).append(item)
    speeds = {pair: speed(items, "p2p") for pair, items in grouped.items()}
    return {pair: Pair(gb_s, gb_s * (1 + spread)) for pair, (gb_s, seconds, spread) in speeds.items() if seconds >= LEAST_S}


def _slow_nodes(pairs: Mapping[tuple[str, str], Pair]) -> dict[str, tuple[float, float, str]]:
    """Nodes that are slow with every other one: bandwidth at best, that of a typical node, whether it sends or receives.

    A node's best pair is that with the fastest other node, so that one slow node does not make the others look slow.
    """
    slow: dict[str, tuple[float, float, str]] = {}
    nodes = sorted({node for pair in pairs for node in pair})
    if len(nodes) < 3:
        return slow
    for side, verb in ((0, "sends"), (1, "receives")):
        best = {node: max((p for pair, p in pairs.items() if pair[side] == node), default=None) for node in nodes}
        typical = statistics.median(pair.gb_s for pair in best.values() if pair) if any(best.values()) else 0.0
        for node, pair in best.items():
            if pair and pair.at_best < UNEVEN * typical and (node not in slow or pair.gb_s < slow[node][0]):
                slow[node] = (pair.gb_s, typical, verb)
    return slow


@RULES("slow-node")
def slow_node(context: LinkContext) -> Iterator[Seen]:
    """All nodes are alike."""
    pairs = _pairs(context)
    slow, inside = _slow_nodes(pairs), _per_node(context)
    for node, (gb_s, typical, verb) in sorted(slow.items()):
        ordered = sorted(pairs.items(), key=lambda item: item[1])
        worst = ", ".join(f"{a} to {b} {pair.gb_s:.3g}" for (a, b), pair in ordered if node in (a, b))
        text = f"{node} {verb} {gb_s:.3g} GB/s at best, the others {typical:.3g} ({worst[:160]})"
        yield Seen(FAIL if gb_s < HALF * typical else WARN, text, where=node)
    typical = max(inside.values()) if len(inside) == 2 else statistics.median(inside.values() or [0.0])
    bad = {node: gb_s for node, gb_s in sorted(inside.items()) if gb_s < UNEVEN * typical}
    for node, gb_s in bad.items():
        text = f"{gb_s:.3g} GB/s inside {node}, {typical:.3g} inside the others"
        yield Seen(FAIL if gb_s < HALF * typical else WARN, text, where=node)
    if not slow and not bad and (len({node for pair in pairs for node in pair}) > 2 or inside):
        yield Seen(PASS, "no node is slower than the others")


def _per_node(context: LinkContext) -> dict[str, float]:
    """Bandwidth inside each node; empty for one node, and for gloo, which measures the CPU's load."""
    entries = context.entries("per_node") if context.backend == "nccl" else []
    speeds = {node: speed(one for one in entries if one["node"] == node) for node in {one["node"] for one in entries}}
    measured = {node: gb_s for node, (gb_s, seconds, _) in speeds.items() if seconds >= LEAST_S}
    return measured if len(measured) > 1 else {}


@RULES("slow-pair")
def slow_pair(context: LinkContext) -> Iterator[Seen]:
    """No good node sends to another one slower than it receives, or than good nodes typically do (of four and more)."""
    pairs = _pairs(context)
    slow = _slow_nodes(pairs)
    ways = {way: pair for way, pair in pairs.items() if way[::-1] in pairs and not slow.keys() & {*way}}
    many = len({node for pair in pairs for node in pair}) > 3
    typical = statistics.median(pair.gb_s for pair in pairs.values()) if many else 0.0
    bad = []
    for way, pair in ways.items():
        back = pairs[way[::-1]].gb_s
        if pair.at_best < UNEVEN * max(back, typical):
            bad.append((pair.gb_s, way, back))
    for gb_s, (first, second), back in sorted(bad)[:1]:
        more = f"; {len(bad) - 1} more ways are slow" if len(bad) > 1 else ""
        text = f"{first} sends {gb_s:.3g} GB/s to {second}, and receives {back:.3g}"
        text += f", nodes typically send {typical:.3g}" if many else ""
        yield Seen(FAIL if gb_s < HALF * back else WARN, text + more, where=f"{first}, {second}")
    if ways and not bad:
        yield Seen(PASS, "no pair is slower than the others" if many else "pairs are as fast in both directions")


# --- the verdict ---------------------------------------------------------------------------------------------------------

INTERFACES = ("wrong-interface", "interface", "interface-subnet", "bond", "mtu", "nodes-network")
"""The rules of interfaces, which gloo uses too."""
VERDICT: list[str] = TABLE["order"]
"""The rules for links, machines and nodes, as ``nccl_log.yaml`` orders them."""


def ranked() -> list[Check]:
    """The rules of ``nccl-check`` in the order of :data:`VERDICT`; those about links that it does not name come last."""
    asked = [one for one in checks(LINKS, MACHINE, NODES) if one.subject == LINKS or one.rule.id in VERDICT]
    return sorted(asked, key=lambda one: VERDICT.index(one.rule.id) if one.rule.id in VERDICT else len(VERDICT))


def judge_log(document: Mapping[str, Any], log: Log) -> list[Finding]:
    """What is wrong with a cluster's collectives, worst first; every rule that applies says what it saw.

    ``document`` as in :mod:`clustertune.nccl_check.link_measure`, every key optional: what is absent is unknown. ``log``: what
    NCCL's logs say together. Never raises.
    """
    context = LinkContext(document, log)
    several = JobNodes(context.machines)
    findings: list[Finding] = []
    for one in ranked():
        if one.subject == LINKS:
            findings += one(context)
        elif context.backend == "nccl" or (context.nodes > 1 and one.rule.id in INTERFACES):
            subjects: Sequence[Any] = [several] if one.subject == NODES else several.machines
            seen = [item for subject in subjects for item in run([one], subject, getattr(subject, "where", ""))]
            findings += [replace(item, where=names(places)) for item, places in grouped(seen)]
    return in_order(findings)


def headline_of(document: Mapping[str, Any], log: Log, findings: Sequence[Finding]) -> str:
    """The verdict in one plain sentence."""
    status = worst(findings)
    if status in (FAIL, WARN):
        first = next(item for item in findings if item.status == status)
        more = sum(item.status in (FAIL, WARN) for item in findings) - 1
        where = f" ({first.where})" if first.where and first.where not in first.found else ""
        return f"{status.upper()}: {first.found}{where}" + (f"; {more} more finding{'s' if more > 1 else ''}" if more else "")
    context = LinkContext(document, log)
    parts = []
    if context.nodes and context.ranks:
        many = f"{context.nodes} nodes" if context.nodes > 1 else "1 node"
        of = f"{many} of {context.ranks} rank{'s' if context.ranks > 1 else ''}"
        # The log of one rank, before NCCL logged how many are on a node.
        parts.append(f"{log.ranks} ranks on {many}" if log.ranks > context.nodes * context.ranks else of)
    over = ", ".join(sorted(log.transports)) or context.transport
    if over:
        parts.append(f"over {over}")
    elif log.networks:
        version = f" {log.version}" if log.version else ""
        parts.append(f"with NCCL{version} and the network {', '.join(sorted(log.networks))}")
    elif context.backend:
        parts.append(f"with {context.backend}")
    speeds = [item.found for item in findings if item.rule in ("inter-speed", "intra-speed") and item.status in (PASS, UNKNOWN)]
    text = " ".join(parts) + (": " if parts and speeds else "") + "; ".join(speeds)
    if why := context.document.get("not_judged"):
        return f"UNKNOWN: {why}{f' (measured: {text})' if text else ''}"
    cut = next((item.found for item in findings if item.rule == "collective-hung" and item.status == UNKNOWN), "")
    if cut:
        return f"UNKNOWN: {text}{', but ' if text else ''}{cut}"
    if not text and not any(item.status == PASS for item in findings):
        return "UNKNOWN: there is nothing here to judge"
    return f"PASS: {text or 'nothing to fix'}"


def page() -> str:
    """The rules as a page of the docs."""
    rules, hosts = ([one.rule for one in ranked() if (one.subject == LINKS) is of_links] for of_links in (True, False))
    return render_page(Path(__file__).with_name("page.md.jinja"), rules=rules, hosts=hosts)
