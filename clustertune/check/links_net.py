"""Rules of interfaces and TCP: which interface, which addresses, bonds, sockets, frames."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from clustertune.check.links import ENOUGH, LinkContext, gbit, names, number, short
from clustertune.check.machine import ONE_LINK
from clustertune.check.rule import FAIL, LINKS, PASS, WARN, Seen, rule
from clustertune.host.facts import HostFacts, Nic

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


def _hosts(context: LinkContext) -> list[str]:
    """Hosts whose interfaces are known."""
    if context.facts:
        return [facts.hostname for facts in context.facts]
    return sorted({*context.log.sockets, *context.log.bootstrap} - {""})


def _matters(context: LinkContext) -> bool:
    """Whether interfaces carry something between nodes: the start-up of NCCL always, and gloo."""
    return context.nodes > 1


@rule("interface-down", LINKS, rank=3)
def interface_down(context: LinkContext) -> Iterator[Seen]:
    """The interface that ranks were given is up and has an address.

    Why: Ranks fail at the start, or take another interface than the one that was meant.
    Fix: bring it up (`ip link set NAME up`, an address), or fix network.interface in the cluster file; the name must be that
      of every node
    See: https://github.com/NVIDIA/nccl/issues/1837
    """
    faults = [fault for fault in context.log.faults if fault.kind == "no-interface"]
    if faults:
        value = context.setting("NCCL_SOCKET_IFNAME") or context.setting("NCCL_OOB_NET_IFNAME")
        text = f" (NCCL_SOCKET_IFNAME is {value})" if value else ""
        yield Seen(FAIL, f"NCCL found no interface to use{text}: {faults[0].text}", where=names(fault.host for fault in faults))


@rule("wrong-interface", LINKS, rank=3)
def wrong_interface(context: LinkContext) -> Iterator[Seen]:
    """The interface that ranks use.

    Why: The first interface in the kernel's list is often a bridge of docker or the 1 GbE port for management.
    Fix: give network.interface in the cluster file, or set NCCL_SOCKET_IFNAME==NAME and GLOO_SOCKET_IFNAME=NAME, the interface
      of the fast network
    See: https://github.com/NVIDIA/nccl/issues/697
    """
    if not _matters(context):
        return
    interface, good = context.told_interface, set()
    for host in _hosts(context):
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
    mine = [nic for nic in facts.nics if nic.name in used and nic.mbit]
    others = [
        nic
        for nic in facts.nics
        if nic.name not in used and nic.up and nic.addresses and nic.mbit and not nic.virtual and not leads_nowhere(nic.name)
    ]
    if not mine or not others:
        return ""
    slow, fast = max(mine, key=_speed), max(others, key=_speed)
    if _speed(fast) < 4 * _speed(slow):
        return ""
    return f"{slow.name} ({gbit(_speed(slow))}) is used, while {fast.name} ({gbit(_speed(fast))}) is up"


def _speed(nic: Nic) -> float:
    return (nic.mbit or 0) / 1000


@rule("ifname-prefix", LINKS, rank=3)
def ifname_prefix(context: LinkContext) -> Iterator[Seen]:
    """What NCCL_SOCKET_IFNAME matches.

    Why: NCCL takes the value as the beginning of a name: bond0 matches bond0.2093 too.
    Fix: write the name with one more =: NCCL_SOCKET_IFNAME==bond0 in a shell, or network.interface in the cluster file
    See: https://github.com/NVIDIA/nccl-tests/issues/9
    """
    for value in sorted(context.settings("NCCL_SOCKET_IFNAME")):
        if not value or value.startswith(("^", "=")) or context.facts:
            continue
        wanted = [name for name in value.split(",") if name]
        taken = {device.name for devices in context.log.bootstrap.values() for device in devices} - set(wanted)
        other = [name for name in taken if any(name.startswith((f"{want}.", f"{want}:")) for want in wanted)]
        if other:
            yield Seen(WARN, f"NCCL_SOCKET_IFNAME={value} took {names(other)}")


@rule("extra-interfaces", LINKS, rank=3)
def extra_interfaces(context: LinkContext) -> Iterator[Seen]:
    """No bridges among the interfaces of NET/Socket.

    Why: NCCL opens connections over every interface that it lists, and those of a bridge lead nowhere.
    Fix: hold NCCL to one interface: network.interface in the cluster file, or NCCL_SOCKET_IFNAME==NAME
    See: https://github.com/NVIDIA/nccl/issues/697
    """
    if not context.by_socket:
        return
    for host, devices in sorted(context.log.sockets.items()):
        bad = [device.name for device in devices if leads_nowhere(device.name)]
        if bad and len(bad) < len(devices):
            yield Seen(FAIL, f"NET/Socket uses {names(bad)} beside {devices[0].name}", where=host)
            return


@rule("several-subnets", LINKS, rank=3)
def several_subnets(context: LinkContext) -> Iterator[Seen]:
    """Addresses of all nodes in one network.

    Why: Nodes in networks without a way between them cannot connect; over a router every byte takes a detour.
    Fix: give the interface of the network that joins all nodes (network.interface), with addresses of one subnet
    See: https://github.com/NVIDIA/nccl/issues/1581
    """
    if not _matters(context):
        return
    seen: dict[str, set[str]] = {}
    for facts in context.facts:
        mine = [net for nic in context.used_nics(facts) for net in map(_network, nic.addresses) if net and net.version == 4]
        if len(mine) == 1:
            seen.setdefault(str(mine[0]), set()).add(facts.hostname)
    if len(seen) > 1:
        text = "; ".join(f"{names(hosts)} in {net}" for net, hosts in sorted(seen.items())[:4])
        yield Seen(WARN, f"nodes are in different networks: {text}")
    elif seen:
        yield Seen(PASS, f"all nodes are in {next(iter(seen))}")


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


@rule("link-local", LINKS, rank=3)
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
    if not context.several:
        return
    for known in (log.sockets if context.by_socket else {}, log.bootstrap):
        # Ranks meet over the first interface; data goes over all of them.
        first = known is log.bootstrap
        bad = {
            host: many[0] for host, many in known.items() if many and _link_local(d.detail for d in many[: 1 if first else 99])
        }
        if bad:
            device = next(iter(bad.values()))
            yield Seen(FAIL, f"{device.name} is used with {device.detail.partition('%')[0]}", where=names(bad))
            return


def _link_local(addresses: Iterable[str]) -> bool:
    """Whether no other address stands beside them."""
    given = [address for address in addresses if address]
    return bool(given) and all(address.lower().startswith(("fe80", "169.254.")) for address in given)


@rule("bond-hash", LINKS, rank=3)
def bond_hash(context: LinkContext) -> Iterator[Seen]:
    """How a bond spreads its traffic.

    Why: With a hash over MAC addresses (layer2) everything between two nodes goes over one link of the bond.
    Fix: set xmit_hash_policy=layer3+4 on the nodes and the like on the switch, and several connections (NCCL_SOCKET_NTHREADS=4
      NCCL_NSOCKS_PERTHREAD=4)
    See: https://www.ibm.com/docs/en/linuxonibm/l0wlcb00/l0wlcb00_optionxmithashpolicy.html
    """
    if not _matters(context) or (context.over and not context.by_socket):
        return
    for facts in context.facts:
        for nic in context.used_nics(facts):
            one_link = nic.bond_mode in ("802.3ad", "balance-xor") and nic.bond_hash in ONE_LINK and len(nic.bond_links) > 1
            if one_link and (reached := _one_link(context, nic)):
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


@rule("one-socket", LINKS, rank=3)
def one_socket(context: LinkContext) -> Iterator[Seen]:
    """TCP connections for each of NCCL's channels.

    Why: One TCP connection is served by one core, which does not fill a line of 100 Gbit/s.
    Fix: set NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4 (their product is 64 at most); `clustertune nccl-check --tune`
      measures which pair is best here
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-nthreads
    """
    if not context.by_socket or context.line_gbit < VERY_FAST:
        return
    threads = _count(context.setting("NCCL_SOCKET_NTHREADS"))
    sockets = _count(context.setting("NCCL_NSOCKS_PERTHREAD"))
    thread_counts = context.log.socket_threads
    if threads * sockets == 0 and thread_counts:
        threads, sockets = thread_counts
    total = max(1, threads) * max(1, sockets)
    line = f"{gbit(context.line_gbit)} with {total} TCP connection{'s' if total > 1 else ''} for each channel"
    yield Seen(WARN if total == 1 else PASS, line)


def _count(text: str) -> int:
    return int(text) if text.isdigit() and len(text) < 5 else 0
