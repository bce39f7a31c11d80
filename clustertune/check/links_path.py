"""Rules of what carries the traffic between nodes: RDMA or TCP, adapters, GPUDirect, plugins."""

from __future__ import annotations

from collections.abc import Iterator

from clustertune.check.links import PLUGIN_KINDS, LinkContext, gbit, names, number, short
from clustertune.check.machine import RDMA_KINDS
from clustertune.check.rule import FAIL, LINKS, PASS, UNKNOWN, WARN, Seen, rule
from clustertune.host.system import version

IPOIB = ("ib", "ibp", "ibs", "hsn")
"""How interfaces of InfiniBand adapters (IP over IB) and of Slingshot are called: ib0, ibp12s0, ibs85f0, hsn0."""
GDR_BY_OLD_NAME = (2, 23)
"""First version that looks for the driver's own nvidia_peermem (https://github.com/NVIDIA/nccl/issues/1676)."""


def _port(device: str, port: int, speed: float | None, layer: str) -> str:
    link = " ".join(word for word in (gbit(speed) if speed else "", layer) if word)
    return f"{device} port {port} ({link})" if link else f"{device} port {port}"


def _sockets(context: LinkContext) -> str:
    """``NET/Socket on eth0``."""
    hosts = [facts.hostname for facts in context.facts] or sorted(context.log.sockets)
    used = names(device.name for host in hosts for device in context.used_interfaces(host))
    return f"NET/Socket on {used}" if used else "NET/Socket"


def _ipoib(name: str) -> bool:
    return name.rstrip("0123456789").startswith(IPOIB) and any(letter.isdigit() for letter in name)


@rule("socket-fallback", LINKS, rank=0)
def socket_fallback(context: LinkContext) -> Iterator[Seen]:
    """TCP between nodes although there is a faster way.

    Why: NCCL falls back to TCP without a word: a tenth of the bandwidth, and CPU time for every byte.
    Fix: find out why NCCL refused the adapter (NCCL_DEBUG=INFO, lines NET/IB): libibverbs and its providers in the container,
      /dev/infiniband bound into it, NCCL_IB_DISABLE and NCCL_NET unset, NCCL_IB_HCA naming adapters that are there
    See: https://github.com/NVIDIA/nccl/issues/451
    """
    if not context.over:
        return
    if not context.by_socket:
        yield Seen(PASS, f"traffic between nodes goes over {names(context.over)}")
        return
    way = f"traffic between nodes goes through {_sockets(context)}"
    fix = ""
    if context.is_on("NCCL_IB_DISABLE"):
        fix = "unset NCCL_IB_DISABLE; where the cluster file says network.kind: ethernet, give the kind that it is"
    ports = context.rdma_active("InfiniBand")
    listed = {device.name for devices in context.log.adapters.values() for device in devices if device.detail == "IB"}
    over_ib = names(device.name for devices in context.log.sockets.values() for device in devices if _ipoib(device.name))
    if ports:
        port = ports[0][1]
        where = names(facts.hostname for facts, _ in ports)
        yield Seen(FAIL, f"{way} although {_port(port.device, port.port, port.gbit, port.link_layer)} is active", fix, where)
    elif context.kind in (*RDMA_KINDS, *PLUGIN_KINDS):
        yield Seen(FAIL, f"{way} although the cluster file says {context.kind}", fix)
    elif listed:
        yield Seen(FAIL, f"{way} although NCCL lists {names(listed)}", fix or "unset NCCL_NET and NCCL_NET_PLUGIN")
    elif over_ib:
        yield Seen(FAIL, f"{way}, an interface of a fast adapter that TCP uses at a fraction of its speed", fix)
    elif context.kind != "ethernet" and _wants_rdma(context):
        yield Seen(FAIL, f"{way} although {_wants_rdma(context)} asks for RDMA", fix)
    elif context.facts or context.kind:
        yield Seen(PASS, f"{way}, and no InfiniBand port is active" if context.facts else f"{way}, as the cluster file says")
    else:
        yield Seen(UNKNOWN, f"{way}; whether there is an adapter for RDMA is not known here")


def _wants_rdma(context: LinkContext) -> str:
    """A setting that makes sense with RDMA only; empty where there is none."""
    if any(value == "0" for value in context.settings("NCCL_IB_DISABLE")):
        return "NCCL_IB_DISABLE=0"
    for name in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX"):
        if context.setting(name) not in ("", "none"):
            return f"{name}={context.setting(name)}"
    return ""


@rule("roce-unused", LINKS, rank=4)
def roce_unused(context: LinkContext) -> Iterator[Seen]:
    """TCP over adapters that can do RoCE.

    Why: TCP passes every byte through the CPU; RoCE on the same port does not.
    Fix: have the switches set up for RoCE v2 (lossless queue, MTU 4200 or 9000), then network.kind: roce in the cluster file;
      network.kind: ethernet says that TCP is meant
    See: https://github.com/NVIDIA/nccl/issues/209
    """
    if not context.by_socket or context.kind in ("infiniband", "omnipath", "roce", *PLUGIN_KINDS):
        return
    ports = [(facts, port) for facts, port in context.rdma_active("Ethernet") if (port.gbit or 0) >= 25]
    if not ports:
        return
    facts, port = ports[0]
    adapter = _port(port.device, port.port, port.gbit, "RoCE")
    if context.kind == "ethernet":
        yield Seen(PASS, f"TCP, as the cluster file says; {adapter} could do RDMA", where=facts.hostname)
    else:
        yield Seen(
            WARN, f"traffic between nodes goes through {_sockets(context)} although {adapter} is active", where=facts.hostname
        )


@rule("ib-disabled", LINKS, rank=4)
def ib_disabled(context: LinkContext) -> Iterator[Seen]:
    """NCCL_IB_DISABLE against the adapters.

    Why: The variable takes InfiniBand and RoCE away from NCCL; it is often left over from another machine.
    Fix: unset NCCL_IB_DISABLE (look in /etc/nccl.conf and in the job's environment)
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    if not context.is_on("NCCL_IB_DISABLE"):
        return
    if context.rdma_active("InfiniBand") or context.kind in RDMA_KINDS:
        yield Seen(FAIL, "NCCL_IB_DISABLE is set although there is an adapter for RDMA")
    elif context.rdma_active() and context.kind != "ethernet":
        yield Seen(WARN, "NCCL_IB_DISABLE is set although an RDMA port is active")


@rule("no-verbs", LINKS, rank=4)
def no_verbs(context: LinkContext) -> Iterator[Seen]:
    """What RDMA needs where ranks run: libibverbs, its providers, /dev/infiniband.

    Why: NCCL loads libibverbs when it starts; without it, or without the device files, a container has no RDMA.
    Fix: install libibverbs1 and ibverbs-providers (rdma-core) in the image, bind /dev/infiniband into the container, and see
      that `ibv_devices` lists the adapters there
    See: https://github.com/NVIDIA/nccl/issues/451
    """
    wanted = context.kind in RDMA_KINDS
    layers = {port.link_layer for _, port in context.rdma_active()}
    # Where TCP is meant, verbs on an Ethernet adapter that could do RoCE are not needed.
    looked = bool(layers) and not (layers <= {"Ethernet", ""} and context.kind in ("", "ethernet"))
    hosts = context.log.no_verbs | {fault.host for fault in context.log.faults if fault.kind == "no-verbs"}
    if hosts and (wanted or looked):
        yield Seen(FAIL, "NCCL could not open libibverbs, or the adapter with it", where=names(hosts))
    elif hosts and any("unable to open device" in fault.text.lower() for fault in context.log.faults):
        yield Seen(FAIL, "NCCL sees an RDMA adapter and cannot open it", where=names(hosts))
    elif hosts and context.several:
        yield Seen(UNKNOWN, "NCCL found no libibverbs: right where there is no RDMA adapter", where=names(hosts))


@rule("rdma-port-down", LINKS, rank=4)
def rdma_port_down(context: LinkContext) -> Iterator[Seen]:
    """RDMA ports that should be up.

    Why: An adapter whose port is down is left out without a word.
    Fix: look at `ibstat`: cable, switch port, subnet manager (state INIT: none runs); then at network.hca of the cluster file
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#infiniband
    """
    missing = context.log.no_adapter - {host for host, devices in context.log.adapters.items() if devices}
    if missing and context.several and context.kind in RDMA_KINDS:
        yield Seen(FAIL, f"NCCL found no adapter, while the cluster file says {context.kind}", where=names(missing))


@rule("net-plugin", LINKS, rank=4)
def net_plugin(context: LinkContext) -> Iterator[Seen]:
    """NCCL's plugin for the vendor's network.

    Why: EFA and Slingshot are reached through a plugin only; without it NCCL uses TCP, or nothing.
    Fix: install aws-ofi-nccl and libfabric with the network's provider in the image, put libnccl-net.so on LD_LIBRARY_PATH, and
      bind /dev/infiniband (EFA) or /dev/cxi* (Slingshot) into the container
    See: https://github.com/aws/aws-ofi-nccl/issues/1020
    """
    faults = [fault for fault in context.log.faults if fault.kind == "net-plugin"]
    wanted = context.kind in PLUGIN_KINDS or bool(context.setting("NCCL_NET_PLUGIN"))
    if faults:
        status = FAIL if wanted or not context.log.complete else WARN
        yield Seen(status, faults[0].text, where=names(fault.host for fault in faults))
    elif context.kind in PLUGIN_KINDS and context.over:
        if context.by_socket or context.over <= {"IB"}:
            yield Seen(FAIL, f"the cluster file says {context.kind}, but NCCL runs without a plugin for it")
        else:
            yield Seen(PASS, f"traffic goes over {names(context.over)}")


@rule("mixed-plugins", LINKS, rank=4)
def mixed_plugins(context: LinkContext) -> Iterator[Seen]:
    """The same network on all nodes.

    Why: Nodes that pick different networks or plugins wait for each other for ever.
    Fix: give all nodes the same image: one has a network plugin (libnccl-net.so), or an adapter, that another has not
    See: https://github.com/NVIDIA/nccl/issues/1634
    """
    by_host: dict[str, set[str]] = {}
    for network, hosts in context.log.networks.items():
        for host in hosts:
            by_host.setdefault(host, set()).add(network)
    by_host.pop("", None)
    kinds = {frozenset(networks) for networks in by_host.values()}
    if len(kinds) > 1:
        text = "; ".join(f"{host}: {names(networks)}" for host, networks in sorted(by_host.items())[:4])
        yield Seen(FAIL, f"nodes use different networks: {text}")
    elif len(by_host) > 1:
        yield Seen(PASS, f"all nodes use {names(next(iter(kinds)))}")


@rule("gdr-off", LINKS, rank=4)
def gdr_off(context: LinkContext) -> Iterator[Seen]:
    """GPUDirect RDMA.

    Why: Without it every byte takes a way through the node's memory: half of the bandwidth, or less.
    Fix: load nvidia_peermem (`modprobe nvidia_peermem`) on the nodes, or use a kernel and driver with DMA-BUF; with ACS on it
      is slow
    See: https://github.com/NVIDIA/nccl/issues/1537
    """
    edges = [edge for edge in context.log.crossing() if edge.plugin.startswith("IB")]
    if not edges and not any(name.startswith("IB") for name in context.over):
        return
    if any(edge.gdr for edge in edges) or "GDRDMA" in context.text("transport"):
        yield Seen(PASS, "GPUDirect RDMA is in use")
        return
    off = {host for host, adapters in context.log.gdr_off.items() if adapters}
    absent = any(facts.peermem is False for facts in context.facts)  # the rule gpudirect-rdma says so
    oldest = min((version(text) for text in context.log.versions), default=(9,))
    loaded = any(facts.peermem for facts in context.facts)
    if off and loaded and oldest < GDR_BY_OLD_NAME:
        fix = "update NCCL: before 2.23 it looks for nv_peer_mem only, and not for the driver's nvidia_peermem"
        yield Seen(WARN, "GPUDirect RDMA is off although nvidia_peermem is loaded", fix, names(off))
    elif off:
        yield Seen(WARN, "GPUDirect RDMA is off: NCCL says that it is disabled", where=names(off))
    elif edges and not absent:
        yield Seen(UNKNOWN, "no connection uses GPUDirect RDMA: GPUs and adapters may be too far apart")


@rule("adapters-unused", LINKS, rank=4)
def adapters_unused(context: LinkContext) -> Iterator[Seen]:
    """All adapters of a node carry traffic.

    Why: Each adapter that stands idle takes its share of the bandwidth away.
    Fix: unset NCCL_IB_HCA, or name all of them (NCCL_IB_HCA==mlx5_0,mlx5_1,...); a job on part of a node's GPUs uses part of
      them
    See: https://github.com/NVIDIA/nccl/issues/981
    """
    log = context.log
    if not context.several or not any(name.startswith("IB") for name in context.over):
        return
    seen = False
    for host, listed in log.adapters.items():
        used = {edge.device for edge in log.edges if edge.host == host and edge.plugin.startswith("IB")}
        ranks = len(log.local_ranks.get(host, ())) or context.ranks
        seen = True
        wanted = min(len(listed), ranks)
        if used and 2 * len(used) <= wanted:
            found = f"{len(used)} of {len(listed)} adapters carries the traffic of {ranks} GPUs" if len(used) == 1 else ""
            yield Seen(WARN, found or f"{len(used)} of {len(listed)} adapters carry the traffic of {ranks} GPUs", where=host)
            return
        active = _fast_ports(context, host)
        if active and 2 * len(listed) <= min(len(active), ranks):
            idle = names(active - {device.name for device in listed})
            yield Seen(WARN, f"NCCL uses {names(d.name for d in listed)} only, while {idle} are active too", where=host)
            return
        stated = int(number(context.section("expected", "network").get("ports")))
        if not active and 2 * len(listed) <= min(stated, ranks):
            yield Seen(WARN, f"NCCL uses {len(listed)} adapters, while the cluster file says {stated} ports", where=host)
            return
    if seen:
        yield Seen(PASS, "all adapters that NCCL lists are in use")


def _fast_ports(context: LinkContext, host: str) -> set[str]:
    """Active ports of a host that are as fast as its fastest one, of the same link layer."""
    for facts in context.facts:
        if short(facts.hostname) == short(host):
            active = [port for port in facts.rdma if port.active]
            best = max((port.gbit or 0.0 for port in active), default=0.0)
            layer = next((port.link_layer for port in active if (port.gbit or 0.0) == best), "")
            same = [port for port in active if port.link_layer == layer and 2 * (port.gbit or 0.0) > best]
            return {f"{port.device}:{port.port}" for port in same}
    return set()
