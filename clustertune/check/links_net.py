"""Rules of how bytes travel: interfaces and TCP between nodes, inside a node, RDMA, adapters and plugins."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from clustertune.check.links import ENOUGH, PLUGIN_KINDS, LinkContext, gbit, logged, names, number, short
from clustertune.check.machine import RDMA_KINDS, one_link
from clustertune.check.rule import FAIL, PASS, UNKNOWN, WARN, Seen, either
from clustertune.host.facts import HostFacts, Nic
from clustertune.host.system import version

# --- interfaces and TCP ---------------------------------------------------------------------------------------------------

VIRTUAL = (
    *("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "tailscale", "tun", "zt", "vmnet", "podman", "lxc"),
    *("ip6tnl", "ip6gre", "gre", "sit", "dummy", "kube", "nodelocaldns", "weave", "cilium"),
)
"""Interfaces that lead to no other node, by their names; ``br-`` is what docker calls its bridges."""
VERY_FAST = 100
"""Gbit/s from which frames of 1500 bytes, and one TCP connection, keep a CPU from filling the line (NCCL's guide: 100)."""


_TO_LINK_LOCAL = re.compile(r"\bto (?:fe80:|169\.254\.)", re.IGNORECASE)


def leads_nowhere(name: str) -> bool:
    """Whether an interface's name says that no other node is behind it."""
    return name == "lo" or any(name.startswith(start) for start in VIRTUAL if start != "lo")


def interface_down(context: LinkContext) -> Iterator[Seen]:
    """The interface that ranks were given is up and has an address.

    Why: Ranks fail at the start, or take another interface than the one that was meant.
    Fix: bring it up (`ip link set NAME up`, an address), or fix network.interface in the cluster file; the name must be that
      of every node
    See: https://github.com/NVIDIA/nccl/issues/1837
    """
    value = context.setting("NCCL_SOCKET_IFNAME") or context.setting("NCCL_OOB_NET_IFNAME")
    text = f" (NCCL_SOCKET_IFNAME is {value})" if value else ""
    for seen in context.from_log("no-interface"):
        yield seen._replace(found=f"NCCL found no interface to use{text}: {seen.found}")


def wrong_interface(context: LinkContext) -> Iterator[Seen]:
    """The interface that ranks use.

    Why: The first interface in the kernel's list is often a bridge of docker or the 1 GbE port for management.
    Fix: give network.interface in the cluster file, or set NCCL_SOCKET_IFNAME==NAME and GLOO_SOCKET_IFNAME=NAME, the interface
      of the fast network
    See: https://github.com/NVIDIA/nccl/issues/697
    """
    # Interfaces carry something between nodes: the start-up of NCCL always, and gloo.
    hosts = [facts.hostname for facts in context.facts] or sorted({*context.log.sockets, *context.log.bootstrap} - {""})
    interface, good = context.configured_interface, set()
    for host in hosts if context.nodes > 1 else ():
        used = [device.name for device in context.used_interfaces(host)]
        bad = [name for name in used if leads_nowhere(name)]
        facts = next((item for item in context.facts if short(item.hostname) == short(host)), None)
        # Over RDMA the interface carries the start-up only: its speed does not matter then.
        slow = _slower(facts, used) if facts and (context.by_socket or context.backend == "gloo") else ""
        if bad and len(bad) == len(used):
            yield Seen(FAIL, f"traffic between nodes uses {names(bad)}, which leads to no other node", where=host)
        elif interface and used and interface not in used and context.over <= {"Socket"}:
            yield Seen(FAIL, f"traffic uses {names(used)} instead of {interface}", where=host)
        elif slow:
            yield Seen(FAIL, slow, where=host)
        else:
            good |= set(used)
    if good:
        yield Seen(PASS, f"ranks use {names(good)}")


def _slower(facts: HostFacts, used: list[str]) -> str:
    """Words where an interface four times as fast, up and with an address, stands idle; empty otherwise."""

    def speed(nic: Nic) -> float:
        return (nic.mbit or 0) / 1000

    others = [nic for nic in facts.nics if nic.up and nic.addresses and not nic.virtual and not leads_nowhere(nic.name)]
    slow = max((nic for nic in facts.nics if nic.name in used and nic.mbit), key=speed, default=None)
    fast = max((nic for nic in others if nic.name not in used and nic.mbit), key=speed, default=None)
    if not slow or not fast or speed(fast) < 4 * speed(slow):
        return ""
    return f"{slow.name} ({gbit(speed(slow))}) is used, while {fast.name} ({gbit(speed(fast))}) is up"


def ifname_prefix(context: LinkContext) -> Iterator[Seen]:
    """What NCCL_SOCKET_IFNAME matches.

    Why: NCCL takes the value as the beginning of a name: bond0 matches bond0.2093 too.
    Fix: write the name with one more =: NCCL_SOCKET_IFNAME==bond0 in a shell, or network.interface in the cluster file
    See: https://github.com/NVIDIA/nccl-tests/issues/9
    """
    taken = {device.name for devices in context.log.bootstrap.values() for device in devices}
    for value in sorted(context.settings("NCCL_SOCKET_IFNAME")) if not context.facts else ():
        wanted = [name for name in value.split(",") if name] if not value.startswith(("^", "=")) else []
        other = [name for name in taken - set(wanted) if any(name.startswith((f"{one}.", f"{one}:")) for one in wanted)]
        if other:
            yield Seen(WARN, f"NCCL_SOCKET_IFNAME={value} took {names(other)}")


def extra_interfaces(context: LinkContext) -> Iterator[Seen]:
    """No bridges among the interfaces of NET/Socket.

    Why: NCCL opens connections over every interface that it lists, and those of a bridge lead nowhere.
    Fix: hold NCCL to one interface: network.interface in the cluster file, or NCCL_SOCKET_IFNAME==NAME
    See: https://github.com/NVIDIA/nccl/issues/697
    """
    for host, devices in sorted(context.log.sockets.items()) if context.by_socket else ():
        bad = [device.name for device in devices if leads_nowhere(device.name)]
        if bad and len(bad) < len(devices):
            yield Seen(FAIL, f"NET/Socket uses {names(bad)} beside {devices[0].name}", where=host)
            return


def several_subnets(context: LinkContext) -> Iterator[Seen]:
    """Addresses of all nodes in one network.

    Why: Nodes in networks without a way between them cannot connect; over a router every byte takes a detour.
    Fix: give the interface of the network that joins all nodes (network.interface), with addresses of one subnet
    See: https://github.com/NVIDIA/nccl/issues/1581
    """
    seen: dict[str, set[str]] = {}
    for facts in context.facts if context.nodes > 1 else ():
        mine = [net for nic in context.used_nics(facts) for net in map(_network, nic.addresses) if net and net.version == 4]
        if len(mine) == 1:
            seen.setdefault(str(mine[0]), set()).add(facts.hostname)
    text = "; ".join(f"{names(hosts)} in {net}" for net, hosts in sorted(seen.items())[:4])
    good = f"all nodes are in {next(iter(seen))}" if seen else ""
    yield from either(WARN, f"nodes are in different networks: {text}" if len(seen) > 1 else "", good)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def link_local(context: LinkContext) -> Iterator[Seen]:
    """No link-local addresses between nodes.

    Why: An address that begins with fe80: or 169.254. is valid on one wire only: other nodes cannot connect to it.
    Fix: give the interface an address, or set NCCL_SOCKET_FAMILY=AF_INET and NCCL_SOCKET_IFNAME to one that has an IPv4 address
    See: https://github.com/NVIDIA/nccl/issues/975
    """
    log = context.log
    refused = [fault for fault in log.faults if fault.kind == "refused" and _TO_LINK_LOCAL.search(fault.text)]
    if refused:
        yield Seen(FAIL, refused[0].text, where=names(fault.host for fault in refused))
        return
    # Ranks meet over the first interface; data goes over all of them.
    first = {host: many[:1] for host, many in log.bootstrap.items()}
    for known in (log.sockets if context.by_socket else {}, first) if context.several else ():
        bad = {host: many[0] for host, many in known.items() if many and _link_local(device.detail for device in many)}
        if bad:
            device = next(iter(bad.values()))
            yield Seen(FAIL, f"{device.name} is used with {device.detail.partition('%')[0]}", where=names(bad))
            return


def _link_local(addresses: Iterable[str]) -> bool:
    """Whether no other address stands beside them."""
    given = [address for address in addresses if address]
    return bool(given) and all(address.lower().startswith(("fe80", "169.254.")) for address in given)


def bond_hash(context: LinkContext) -> Iterator[Seen]:
    """How a bond spreads its traffic.

    Why: With a hash over MAC addresses (layer2) everything between two nodes goes over one link of the bond.
    Fix: set xmit_hash_policy=layer3+4 on the nodes and the like on the switch, and several connections (NCCL_SOCKET_NTHREADS=4
      NCCL_NSOCKS_PERTHREAD=4)
    See: https://www.ibm.com/docs/en/linuxonibm/l0wlcb00/l0wlcb00_optionxmithashpolicy.html
    """
    for facts in context.facts if context.nodes > 1 and (context.by_socket or not context.over) else ():
        for nic in context.used_nics(facts):
            if one_link(nic) and (reached := _one_link(context, nic)):
                found = f"{nic.name} ({nic.bond_mode}, {len(nic.bond_links)} links) hashes by {nic.bond_hash}{reached}"
                yield Seen(FAIL, found, where=facts.hostname)


def _one_link(context: LinkContext, nic: Nic) -> str:
    """Words where what was measured is about the speed of one link."""
    speeds = [number(item.get("busbw_gb_s")) for item in context.entries("results") if item.get("scope") in ("world", "inter")]
    best = max(speeds, default=0.0)
    link = (nic.mbit or 0) / 8000 / len(nic.bond_links)
    enough = ENOUGH * number(context.section("expected", "inter").get("expected_gb_s"))
    if not best or not link or not 0.5 <= best / link <= 1.1 or 0 < enough <= best:
        return ""
    return f"; {best:.3g} GB/s were measured, the speed of one link ({link:.3g} GB/s)"


def one_socket(context: LinkContext) -> Iterator[Seen]:
    """TCP connections for each of NCCL's channels.

    Why: One TCP connection is served by one core, which does not fill a line of 100 Gbit/s.
    Fix: set NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4 (their product is 64 at most) below
      network.environment of the cluster file, and compare the bandwidth of two checks
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-nthreads
    """
    if not context.by_socket or context.line_gbit < VERY_FAST:
        return
    texts = (context.setting("NCCL_SOCKET_NTHREADS"), context.setting("NCCL_NSOCKS_PERTHREAD"))
    threads, sockets = (int(text) if text.isdigit() and len(text) < 5 else 0 for text in texts)
    if threads * sockets == 0 and context.log.socket_threads:
        threads, sockets = context.log.socket_threads
    total = max(1, threads) * max(1, sockets)
    line = f"{gbit(context.line_gbit)} with {total} TCP connection{'s' if total > 1 else ''} for each channel"
    yield Seen(WARN if total == 1 else PASS, line)


# --- inside a node --------------------------------------------------------------------------------------------------------


def _gpus(context: LinkContext) -> int:
    """Most GPUs of a node that NCCL used."""
    if context.backend != "nccl":
        return 0
    return max(context.ranks, context.log.highest_gpu + 1 if context.nodes else 0)


def p2p_hang(context: LinkContext) -> Iterator[Seen]:
    """Two GPUs of a node exchange data.

    Why: Behind an IOMMU or ACS the first all-reduce over PCIe never ends, and the GPUs stay at 100 % until they are reset.
    Fix: turn the IOMMU and ACS off in the BIOS (or iommu=pt and `setpci -s BRIDGE ECAP_ACS+6.w=0000` on each PCIe bridge);
      until then NCCL_P2P_DISABLE=1 goes through the node's memory
    See: https://github.com/NVIDIA/nccl/issues/2079
    """
    good: set[str] = set()
    for item in context.entries("p2p_probe"):
        node, status, given = str(item.get("node", "")), item.get("status"), item.get("gpus")
        what = f"an all-reduce between GPUs {' and '.join(map(str, given)) if isinstance(given, list) else '?'}"
        if status == "hung":
            yield Seen(FAIL, f"{what} did not end in time", where=node)
        elif status == "failed":
            yield Seen(FAIL, f"{what} failed: {str(item.get('message') or 'it failed')[:200]}", where=node)
        elif status == "ok":
            good.add(node)
    if good:
        yield Seen(PASS, "pairs of GPUs exchange data", where=names(good))


@logged("p2p-refused", "no-transport")
def p2p_refused() -> None:
    """The driver lets GPUs reach each other's memory.

    Why: NCCL was set to use P2P, and the driver refuses it when the first buffer is opened.
    Fix: give ranks all GPUs of the node (no CUDA_VISIBLE_DEVICES or cgroup of one GPU each); cards without P2P:
      NCCL_P2P_DISABLE=1
    See: https://github.com/NVIDIA/nccl/issues/2079
    """


def nvlink_unused(context: LinkContext) -> Iterator[Seen]:
    """NVLink carries the traffic inside a node.

    Why: Through PCIe or the node's memory it is a tenth of NVLink's bandwidth.
    Fix: look at `nvidia-smi nvlink -s` and at the fabric manager (`systemctl status nvidia-fabricmanager`); all ranks of a node
      in one container, which sees all its GPUs; NCCL_P2P_DISABLE and NCCL_P2P_LEVEL unset
    See: https://github.com/NVIDIA/nccl/issues/1781
    """
    if not context.nvlink or _gpus(context) < 2:
        return
    if broken := context.from_log("p2p-broken"):
        yield from broken
        return
    inside = _inside(context)
    slow = [name for name in inside if not name.startswith("P2P")]
    bad = {kind for kind in context.log.gpu_paths if kind in ("PHB", "SYS", "NODE")}
    if context.log.p2p_off:
        yield Seen(FAIL, f"P2P is disabled between {len(context.log.p2p_off)} pairs of GPUs")
    elif slow:
        yield Seen(FAIL, f"GPUs of a node talk over {names(slow)}, while NVLink joins them")
    else:
        paths = f"NCCL sees paths of kind {names(bad)} between GPUs that NVLink should join" if bad else ""
        yield from either(FAIL, paths, f"GPUs of a node talk over {names(inside)}" if inside else "")


def _inside(context: LinkContext) -> dict[str, int]:
    """Transports inside a node, with how often the log names them."""
    found = {name: count for name, count in context.log.transports.items() if name.startswith(("P2P/", "SHM/"))}
    crossing = context.log.crossing()
    for edge, count in context.log.edges.items():
        if edge not in crossing:
            found[f"NET/{edge.plugin}"] = found.get(f"NET/{edge.plugin}", 0) + count
    return found


def p2p_disabled(context: LinkContext) -> Iterator[Seen]:
    """P2P between the GPUs of a node.

    Why: Without it everything passes through the node's memory, twice.
    Fix: unset NCCL_P2P_DISABLE, and where the first all-reduce hangs then: turn the IOMMU and ACS off in the BIOS (or iommu=pt
      and `setpci -s BRIDGE ECAP_ACS+6.w=0000` on each PCIe bridge); until then NCCL_P2P_DISABLE=1 goes through the node's
      memory
    See: https://github.com/NVIDIA/nccl/issues/631
    """
    log, off = context.log, FAIL if context.nvlink else WARN
    counted = bool(log.nodes or context.document.get("gpus_per_node"))
    if context.backend == "gloo" or (context.ranks == 1 and counted):
        return
    peer = [name for name in log.transports if name.startswith("P2P")]
    shared = any(name.startswith("SHM") for name in log.transports)
    if context.is_on("NCCL_P2P_DISABLE"):
        yield Seen(off, "NCCL_P2P_DISABLE is set")
    elif context.setting("NCCL_P2P_LEVEL") in ("LOC", "0"):
        yield Seen(off, f"NCCL_P2P_LEVEL={context.setting('NCCL_P2P_LEVEL')} turns P2P off")
    elif log.p2p_off and not context.nvlink:
        yield Seen(WARN, f"the driver has P2P disabled between {len(log.p2p_off)} pairs of GPUs")
    elif _gpus(context) > 1 and peer:
        yield Seen(PASS, f"{names(peer)} is in use")
    elif _gpus(context) > 1 and not context.nvlink and shared and (near := _near(context)):
        yield Seen(WARN, f"{near} share a PCIe switch, but talk through the node's memory")


def _near(context: LinkContext) -> str:
    """The first pair of GPUs that share a PCIe switch, by ``nvidia-smi topo -m``; empty where none does."""
    for facts in context.facts:
        for row in map(str.split, facts.topology.splitlines()):
            if row and row[0].startswith("GPU") and "X" in row:
                for index, word in enumerate(row[1 : len(facts.gpus) + 1]):
                    if word in ("PIX", "PXB"):
                        return f"{row[0]} and GPU{index}"
    return ""


def shm_disabled(context: LinkContext) -> Iterator[Seen]:
    """Shared memory inside a node.

    Why: GPUs without P2P between them talk through shared memory; without that too, over the network card.
    Fix: unset NCCL_SHM_DISABLE; where it was set for want of space, enlarge /dev/shm
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    inside = [name for name in _inside(context) if name.startswith("NET/")]
    if context.is_on("NCCL_SHM_DISABLE"):
        yield Seen(FAIL if inside else WARN, "NCCL_SHM_DISABLE is set" + (f": {names(inside)} inside a node" if inside else ""))
    elif inside and _gpus(context) > 1:
        fix = "run all ranks of a node in one container, with one /dev/shm"
        yield Seen(WARN, f"GPUs of a node talk over {names(inside)}", fix)


def acs_redirect(context: LinkContext) -> Iterator[Seen]:
    """No ACS or IOMMU between GPUs on PCIe.

    Why: They send what one GPU writes to another up to the CPU: slow at best, and with some boards it hangs.
    Fix: turn the IOMMU and ACS off in the BIOS (or iommu=pt and `setpci -s BRIDGE ECAP_ACS+6.w=0000` on each PCIe bridge);
      until then NCCL_P2P_DISABLE=1 goes through the node's memory
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#pci-access-control-services-acs
    """
    faults = [f for f in context.log.faults if "iommu=pt" in f.text]
    if faults:
        yield Seen(WARN, faults[0].text, "add iommu=pt to the kernel's command line", names(fault.host for fault in faults))


@logged("shm", name="small-shm")
def small_shm() -> None:
    """Room in /dev/shm.

    Why: Ranks of a node map 10 MB for each connection there; docker and Kubernetes give 64 MiB.
    Fix: give the container --shm-size=16g or --ipc=host (Kubernetes: an emptyDir with medium: Memory at /dev/shm), and remove
      stale files /dev/shm/nccl-*
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#shared-memory
    """


@logged("shm-lost")
def shm_lost() -> None:
    """Shared memory of other ranks can be opened.

    Why: A rank's file in /dev/shm was gone when its neighbour opened it: another container's, removed, or that rank had ended.
    Fix: run all ranks of a node in one container (or with one /dev/shm, --ipc=host), set RemoveIPC=no in logind.conf; look for
      the rank that failed first
    See: https://github.com/NVIDIA/nccl/issues/1589
    """


@logged("memlock", name="low-memlock")
def low_memlock() -> None:
    """Locked memory for RDMA.

    Why: RDMA registers memory that must stay in place; Slurm's services start with a limit of 64 KiB or 8 MiB.
    Fix: LimitMEMLOCK=infinity in slurmd's unit (limits.conf does not reach services), PropagateResourceLimitsExcept=MEMLOCK in
      slurm.conf, --ulimit memlock=-1 for a container; check with `srun bash -c 'ulimit -l'`
    See: https://github.com/NVIDIA/nccl-tests/issues/206
    """


# --- between nodes --------------------------------------------------------------------------------------------------------

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


def socket_fallback(context: LinkContext) -> Iterator[Seen]:
    """TCP between nodes although there is a faster way.

    Why: NCCL falls back to TCP without a message: a tenth of the bandwidth, and CPU time for every byte.
    Fix: find out why NCCL refused the adapter (NCCL_DEBUG=INFO, lines NET/IB): libibverbs and its providers in the container,
      /dev/infiniband bound into it, NCCL_IB_DISABLE and NCCL_NET unset, NCCL_IB_HCA naming adapters that are there
    See: https://github.com/NVIDIA/nccl/issues/451
    """
    log, kind = context.log, context.kind
    if not context.by_socket:
        yield from either(FAIL, "", f"traffic between nodes goes over {names(context.over)}" if context.over else "")
        return
    fix = "unset NCCL_IB_DISABLE; where the cluster file says network.kind: ethernet, give the kind that it is"
    fix = fix if context.is_on("NCCL_IB_DISABLE") else ""
    ports = context.rdma_active("InfiniBand")
    listed = {device.name for devices in log.adapters.values() for device in devices if device.detail == "IB"}
    over_ib = any(_ipoib(device.name) for devices in log.sockets.values() for device in devices)
    bad = where = ""
    if ports:
        where, port = names(facts.hostname for facts, _ in ports), ports[0][1]
        bad = f" although {_port(port.device, port.port, port.gbit, port.link_layer)} is active"
    elif kind in (*RDMA_KINDS, *PLUGIN_KINDS):
        bad = f" although the cluster file says {kind}"
    elif listed:
        bad, fix = f" although NCCL lists {names(listed)}", fix or "unset NCCL_NET and NCCL_NET_PLUGIN"
    elif over_ib:
        bad = ", an interface of a fast adapter that TCP uses at a fraction of its speed"
    elif kind != "ethernet" and (setting := _wants_rdma(context)):
        bad = f" although {setting} asks for RDMA"
    way = f"traffic between nodes goes through {_sockets(context)}"
    if not bad and not context.facts and not kind:
        yield Seen(UNKNOWN, f"{way}; whether there is an adapter for RDMA is not known here")
        return
    good = ", and no InfiniBand port is active" if context.facts else ", as the cluster file says"
    yield from either(FAIL, f"{way}{bad}" if bad else "", f"{way}{good}", fix, where)


def _wants_rdma(context: LinkContext) -> str:
    """A setting that makes sense with RDMA only; empty where there is none."""
    if any(value == "0" for value in context.settings("NCCL_IB_DISABLE")):
        return "NCCL_IB_DISABLE=0"
    for name in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX"):
        if context.setting(name) not in ("", "none"):
            return f"{name}={context.setting(name)}"
    return ""


def roce_unused(context: LinkContext) -> Iterator[Seen]:
    """TCP over adapters that can do RoCE.

    Why: TCP passes every byte through the CPU; RoCE on the same port does not.
    Fix: have the switches set up for RoCE v2 (lossless queue, MTU 4200 or 9000), then network.kind: roce in the cluster file;
      network.kind: ethernet says that TCP is meant
    See: https://github.com/NVIDIA/nccl/issues/209
    """
    ports = [(facts, port) for facts, port in context.rdma_active("Ethernet") if (port.gbit or 0) >= 25]
    if not ports or not context.by_socket or context.kind in ("infiniband", "omnipath", "roce", *PLUGIN_KINDS):
        return
    facts, port = ports[0]
    adapter = _port(port.device, port.port, port.gbit, "RoCE")
    idle = f"traffic between nodes goes through {_sockets(context)} although {adapter} is active"
    good = f"TCP, as the cluster file says; {adapter} could do RDMA"
    yield from either(WARN, "" if context.kind == "ethernet" else idle, good, where=facts.hostname)


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


def rdma_port_down(context: LinkContext) -> Iterator[Seen]:
    """RDMA ports that should be up.

    Why: An adapter whose port is down is left out without a message.
    Fix: look at `ibstat`: cable, switch port, subnet manager (state INIT: none runs); then at network.hca of the cluster file
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#infiniband
    """
    missing = context.log.no_adapter - {host for host, devices in context.log.adapters.items() if devices}
    if missing and context.several and context.kind in RDMA_KINDS:
        yield Seen(FAIL, f"NCCL found no adapter, while the cluster file says {context.kind}", where=names(missing))


def net_plugin(context: LinkContext) -> Iterator[Seen]:
    """NCCL's plugin for the vendor's network.

    Why: EFA and Slingshot are reached through a plugin only; without it NCCL uses TCP, or nothing.
    Fix: install aws-ofi-nccl and libfabric with the network's provider in the image, put libnccl-net.so on LD_LIBRARY_PATH, and
      bind /dev/infiniband (EFA) or /dev/cxi* (Slingshot) into the container
    See: https://github.com/aws/aws-ofi-nccl/issues/1020
    """
    faults = context.from_log("net-plugin")
    wanted = context.kind in PLUGIN_KINDS or bool(context.setting("NCCL_NET_PLUGIN"))
    for seen in faults:
        yield seen._replace(status=FAIL if wanted or not context.log.complete else WARN)
    if not faults and context.kind in PLUGIN_KINDS and context.over:
        lacks = f"the cluster file says {context.kind}, but NCCL runs without a plugin for it"
        without = context.by_socket or context.over <= {"IB"}
        yield from either(FAIL, lacks if without else "", f"traffic goes over {names(context.over)}")


def mixed_plugins(context: LinkContext) -> Iterator[Seen]:
    """The same network on all nodes.

    Why: Nodes that pick different networks or plugins wait for each other for ever.
    Fix: give all nodes the same image: one has a network plugin (libnccl-net.so), or an adapter, that another has not
    See: https://github.com/NVIDIA/nccl/issues/1634
    """
    by_host: dict[str, set[str]] = {}
    for network, hosts in context.log.networks.items():
        for host in hosts - {""}:
            by_host.setdefault(host, set()).add(network)
    kinds = {frozenset(networks) for networks in by_host.values()}
    text = "; ".join(f"{host}: {names(networks)}" for host, networks in sorted(by_host.items())[:4])
    good = f"all nodes use {names(next(iter(kinds)))}" if len(by_host) > 1 else ""
    yield from either(FAIL, f"nodes use different networks: {text}" if len(kinds) > 1 else "", good)


RDMA_PLUGINS = ("IB", "AWS Libfabric", "Libfabric", "OFI", "UCX")
"""How the names of plugins begin that move bytes by RDMA."""


def gdr_off(context: LinkContext) -> Iterator[Seen]:
    """GPUDirect RDMA.

    Why: Without it every byte goes through the node's memory: half of the bandwidth, or less.
    Fix: load nvidia_peermem (`modprobe nvidia_peermem`) on the nodes, or use a kernel and driver with DMA-BUF; with ACS on it
      is slow
    See: https://github.com/NVIDIA/nccl/issues/1537
    """
    edges = [edge for edge in context.log.crossing() if edge.plugin.startswith(RDMA_PLUGINS)]
    if not edges and not any(name.startswith(RDMA_PLUGINS) for name in context.over):
        return
    served = {edge.host for edge in edges if edge.gdr}
    off = {host for host, adapters in context.log.gdr_off.items() if adapters} - served
    if (served and not off) or "GDRDMA" in context.text("transport"):
        yield Seen(PASS, "GPUDirect RDMA is in use")
        return
    absent = any(facts.peermem is False for facts in context.facts)  # the rule gpudirect-rdma says so
    oldest = min((version(text) for text in context.log.versions), default=(9,))
    loaded = any(facts.peermem for facts in context.facts)
    if off and loaded and oldest < GDR_BY_OLD_NAME:
        fix = "update NCCL: before 2.23 it looks for nv_peer_mem only, and not for the driver's nvidia_peermem"
        yield Seen(WARN, "GPUDirect RDMA is off although nvidia_peermem is loaded", fix, names(off))
    elif any("OFI" in context.log.gdr_off[host] for host in off):
        fix = "update libfabric, aws-ofi-nccl and the adapter's driver together (EFA: its installer), and load nvidia_peermem"
        fix += " or use a kernel and driver with DMA-BUF; an instance type may not have it"
        yield Seen(WARN, "GPUDirect RDMA is off: the network plugin says that it disables it", fix, names(off))
    elif off:
        yield Seen(WARN, "GPUDirect RDMA is off: NCCL says that it is disabled", where=names(off))
    elif edges and not absent:
        yield Seen(UNKNOWN, "no connection uses GPUDirect RDMA: GPUs and adapters may be too far apart")


def adapters_unused(context: LinkContext) -> Iterator[Seen]:
    """All adapters of a node carry traffic.

    Why: Each adapter that stands idle takes its share of the bandwidth away.
    Fix: unset NCCL_IB_HCA, or name all of them (NCCL_IB_HCA==mlx5_0,mlx5_1,...); a job on part of a node's GPUs uses part of
      them
    See: https://github.com/NVIDIA/nccl/issues/981
    """
    log = context.log
    stated = int(number(context.section("expected", "network").get("ports")))
    over_ib = context.several and any(name.startswith("IB") for name in context.over)
    for host, listed in log.adapters.items() if over_ib else ():
        used = {edge.device for edge in log.edges if edge.host == host and edge.plugin.startswith("IB")}
        ranks = len(log.local_ranks.get(host, ())) or context.ranks
        active = _fast_ports(context, host)
        found = ""
        if used and 2 * len(used) <= min(len(listed), ranks):
            carry = "carries" if len(used) == 1 else "carry"
            found = f"{len(used)} of {len(listed)} adapters {carry} the traffic of {ranks} GPUs"
        elif active and 2 * len(listed) <= min(len(active), ranks):
            idle = names(active - {device.name for device in listed})
            found = f"NCCL uses {names(d.name for d in listed)} only, while {idle} are active too"
        elif not active and 2 * len(listed) <= min(stated, ranks):
            found = f"NCCL uses {len(listed)} adapters, while the cluster file says {stated} ports"
        if found:
            yield Seen(WARN, found, where=host)
            return
    if over_ib and log.adapters:
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
