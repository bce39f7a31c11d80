"""Interfaces, bonds, RDMA and names: how ranks of several nodes find and reach each other. Python 3.8, standard library."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Sequence

from clustertune.check.machine import ONE_LINK, RDMA_KINDS, Machine
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Seen, rule
from clustertune.host.facts import Nic

FAST_MBIT = 25_000
"""From here on small frames show; 10 Gbit/s is filled by one core with frames of 1500 bytes."""
RENDEZVOUS = (20_000, 31_999)
"""Ports in which jobs of this project meet (launch/rendezvous.py)."""
WHOLE = 0.9
"""Share of the nominal speed from which a link counts as whole: a bond's sum and a file's round figure differ a little."""


def matches(value: str, names: Sequence[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME means: prefixes, exact after ``=``, all others after ``^`` (NCCL's guide)."""
    text = value.strip()
    exclude, exact = text.startswith("^"), False
    text = text[1:] if exclude else text
    exact = text.startswith("=")
    patterns = [word for word in text.lstrip("=").split(",") if word]
    hit = [name for name in names if any(name == word if exact else name.startswith(word) for word in patterns)]
    return [name for name in names if name not in hit and name != "lo"] if exclude else hit


def _named(m: Machine) -> str:
    """The interface of the cluster file; of a machine that is not in it, and has none of that name, none."""
    name = str(m.section("network").get("interface") or "")
    there = any(nic.name == name for nic in m.facts.nics)
    return name if there or m.is_member or m.in_step or m.expects.ran else ""


def _nic(m: Machine, name: str) -> Nic | None:
    return next((nic for nic in m.facts.nics if nic.name == name), None)


@rule("interface", MACHINE, rank=3)
def interface(m: Machine) -> Iterator[Seen]:
    """The interface is there, is up, and has an address; the variable means one interface.

    Looks at: the interface that the cluster file and NCCL_SOCKET_IFNAME name
    Why: NCCL takes every interface whose name begins so: the wrong one, or one that is down, hangs at the first collective
    See: https://github.com/NVIDIA/nccl/issues/286
    """
    nics = m.facts.nics
    name, value = _named(m), m.environ("NCCL_SOCKET_IFNAME")
    if not nics or not m.computes:
        return
    there = ", ".join(nic.name for nic in nics)
    if name:
        nic = _nic(m, name)
        status = FAIL if m.several else WARN
        if nic is None:
            fix = "network.interface of the cluster file must be the name on every compute node"
            yield Seen(status, f"there is no {name} (there are {there})", fix)
        elif nic.up is False or nic.carrier is False:
            fix = f"look at cable and switch: ip link show {name}; ethtool {name}"
            yield Seen(status, f"{name} is down", fix)
        elif not nic.addresses:
            yield Seen(status, f"{name} has no address", f"give it one on every node: ip addr show {name}")
        else:
            yield Seen(PASS, f"{name}, {nic.addresses[0]}")
    if value and not (name and m.expects.launched):  # jobs of clustertune replace it by the cluster file's
        found = matches(value, [nic.name for nic in nics])
        if not found:
            yield Seen(FAIL, f"NCCL_SOCKET_IFNAME={value} means none of {there}", "unset it, or name one exactly: =NAME")
        elif len(found) > 1 and not value.startswith(("^", "=")) and len(found) > len(value.split(",")):
            fix = f"name it exactly: NCCL_SOCKET_IFNAME=={found[0]}"
            yield Seen(WARN, f"NCCL_SOCKET_IFNAME={value} means {', '.join(found)}", fix)
        elif all(nic.up is False for nic in nics if nic.name in found):
            yield Seen(FAIL, f"NCCL_SOCKET_IFNAME={value} means {', '.join(found)}, which is down", "unset it")


@rule("interface-subnet", MACHINE, rank=3)
def subnet(m: Machine) -> Iterator[Seen]:
    """The interface's address is in the cluster's subnet.

    Looks at: the interface's address, against the cluster file's subnet
    Why: an address outside of it is not reached by the other nodes: the ranks wait for each other until the time-out
    Fix: correct the address of the interface, or network.subnet or network.interface of the cluster file
    See: https://github.com/NVIDIA/nccl/issues/1581
    """
    value, nic = m.section("network").get("subnet"), _nic(m, _named(m))
    if not value or nic is None or not nic.addresses:
        return
    try:
        wanted = ipaddress.ip_network(str(value), strict=False)
    except ValueError:
        return
    own = []
    for text in nic.addresses:
        with contextlib.suppress(ValueError):
            own.append(ipaddress.ip_interface(text).ip)
    if any(address in wanted for address in own if address.version == wanted.version):
        yield Seen(PASS, f"{nic.name} is in {wanted}")
    else:
        yield Seen(FAIL if m.several else WARN, f"{nic.name} has {', '.join(nic.addresses)}, not in {wanted}")


@rule("interface-speed", MACHINE)
def speed(m: Machine) -> Iterator[Seen]:
    """The interface has the speed of the cluster file.

    Looks at: the interface's speed, against the cluster file
    Why: a link that came up at a tenth of its speed works, and makes the training as much slower; nothing else tells
    See: https://man7.org/linux/man-pages/man8/ethtool.8.html
    """
    value, nic = m.section("network").get("gbit"), _nic(m, _named(m))
    if not value or nic is None or m.section("network").get("kind") not in ("ethernet", "roce"):
        return
    if nic.mbit is None:
        if not m.rehearsal and not nic.virtual:
            yield Seen(UNKNOWN, f"{nic.name} does not report its speed")
    elif nic.mbit < float(value) * 1000 * WHOLE:
        fix = f"look at cable, transceiver and switch port: ethtool {nic.name}; or correct network.gbit of the cluster file"
        yield Seen(WARN, f"{nic.name} runs at {nic.mbit / 1000:g} Gbit/s, the cluster file says {value:g}", fix)
    else:
        yield Seen(PASS, f"{nic.name}: {nic.mbit / 1000:g} Gbit/s")


@rule("bond", MACHINE, rank=3)
def bond(m: Machine) -> Iterator[Seen]:
    """Links of bonds are up; of the one that carries the ranks, connections are spread.

    Looks at: all links of a bond are up, and connections are spread over them
    Why: with the hash layer2 all traffic between two nodes takes one link of the bond; a link that is down takes its share away
    See: https://docs.kernel.org/networking/bonding.html
    """
    for nic in m.facts.nics:
        if not nic.bond_mode or (nic.up is False and nic.name != _named(m)):
            continue
        down = [link for link in nic.bond_links if link not in nic.bond_links_up]
        if down:
            fix = f"look at cable and switch port: cat /proc/net/bonding/{nic.name}"
            yield Seen(WARN, f"{nic.name}: {', '.join(down)} of {', '.join(nic.bond_links)} down", fix)
        elif (
            nic.name == (_named(m) or nic.name)  # one for management, or for storage, may be as it is
            and m.section("network").get("kind") != "infiniband"
            and nic.bond_mode in ("802.3ad", "balance-xor")
            and nic.bond_hash in ONE_LINK
            and len(nic.bond_links) > 1
        ):
            fix = f"ip link set {nic.name} type bond xmit_hash_policy layer3+4, and the like on the switch; keep it in its file"
            yield Seen(WARN, f"{nic.name}: {nic.bond_mode} with hash {nic.bond_hash}", fix)
        else:
            yield Seen(PASS, f"{nic.name}: {nic.bond_mode}, {len(nic.bond_links)} links up")


@rule("mtu", MACHINE, rank=3)
def mtu(m: Machine) -> Iterator[Seen]:
    """A fast interface between nodes has large frames.

    Looks at: frame size of a fast interface
    Why: with frames of 1500 bytes a fast Ethernet link costs whole cores, and often does not reach its speed
    See: https://github.com/NVIDIA/dgx-spark-playbooks/pull/103
    """
    nic = _nic(m, _named(m))
    if m.section("network").get("kind") == "infiniband":
        return  # the ranks only meet there: what they send takes InfiniBand
    if nic is None or nic.kind not in ("ethernet", "") or not nic.mtu or (nic.mbit or 0) < FAST_MBIT:
        return
    if nic.mtu <= 1500:
        fix = f"set 9000 on every node and on the switch: ip link set {nic.name} mtu 9000"
        yield Seen(WARN, f"{nic.name}: {nic.mtu} bytes at {(nic.mbit or 0) / 1000:g} Gbit/s", fix)
    else:
        yield Seen(PASS, f"{nic.name}: {nic.mtu} bytes")


@rule("rdma-port", MACHINE, rank=4)
def rdma_port(m: Machine) -> Iterator[Seen]:
    """The ports that the cluster file names are active; where it names none, one is.

    Looks at: the RDMA ports that the cluster file counts on
    Why: without an active port NCCL falls back to sockets without a message: the same all-reduce takes several times as long
    See: https://github.com/areal-project/AReaL/issues/639
    """
    network = m.section("network")
    if network.get("kind") not in RDMA_KINDS or not m.computes:
        return
    ports = m.facts.rdma
    status = FAIL if m.several else WARN
    fix = "look at cable, switch and subnet manager: ibstat; in a container bind /dev/infiniband and mount /sys"
    if not ports and not m.facts.nics:
        yield Seen(UNKNOWN, "/sys is not to be seen here")
        return
    if not ports:
        yield Seen(status, "there is no RDMA adapter", fix)
        return
    missing = []
    for value in network.get("hca") or ():
        device, _, number = str(value).partition(":")
        mine = [port for port in ports if port.device == device and (not number or port.port == int(number))]
        if not any(port.active for port in mine):
            missing.append(f"{value} ({', '.join(port.state or '?' for port in mine) or 'not there'})")
    active = [f"{port.device}:{port.port}" for port in ports if port.active]
    if missing:
        whole = status if len(missing) == len(network.get("hca") or ()) else WARN  # with some NCCL continues, slower
        yield Seen(whole, f"not active: {', '.join(missing)}", fix)
    elif not active:
        states = ", ".join(f"{port.device}:{port.port} {port.state or '?'} {port.physical}".strip() for port in ports)
        yield Seen(status, f"no port is active: {states}", fix)
    elif len(active) < int(network.get("ports") or 1):
        yield Seen(WARN, f"{len(active)} ports active, the cluster file says {network.get('ports')}", fix)
    else:
        yield Seen(PASS, f"active: {', '.join(active)}")


@rule("rdma-verbs", MACHINE, rank=4)
def verbs(m: Machine) -> Iterator[Seen]:
    """What uses an active port is in this place.

    Looks at: device files and libraries of active RDMA ports in this place
    Why: a container without /dev/infiniband or the adapter's provider library has NCCL fall back to sockets without a message
    See: https://github.com/areal-project/AReaL/issues/639
    """
    f = m.facts
    active = [port for port in f.rdma if port.active]
    kind = m.section("network").get("kind")
    if not active or not m.computes or kind == "ethernet" or m.environ("NCCL_IB_DISABLE") == "1" or not m.several:
        return
    lacking = []
    if not any("uverbs" in name for name in f.rdma_devices):
        lacking.append("/dev/infiniband/uverbs* cannot be opened")
    if f.verbs is False:
        lacking.append("libibverbs.so.1 cannot be loaded")
    drivers = {port.device.rstrip("0123456789").rstrip("_") for port in active}
    without = sorted(
        name for name in drivers if f.verbs_providers and not any(p in name or name in p for p in f.verbs_providers)
    )
    hard = bool(lacking) and kind in RDMA_KINDS  # providers may lie in another folder
    if f.verbs and not f.verbs_providers:
        lacking.append("no provider library is installed")
    elif without and "mlx5" in without:
        lacking.append(f"no provider library for {', '.join(without)}")
    if lacking:
        fix = (
            "install rdma-core (libibverbs, ibverbs-providers) in the image, and bind /dev/infiniband"
            if m.in_container
            else ("install rdma-core; let users open /dev/infiniband/uverbs* (udev rules, Slurm's ConstrainDevices)")
        )
        yield Seen(FAIL if hard else WARN, "; ".join(lacking), fix)
    else:
        yield Seen(PASS, f"{len(f.rdma_devices)} device files, {', '.join(f.verbs_providers) or 'library'}")


@rule("network-kind", MACHINE)
def network_kind(m: Machine) -> Iterator[Seen]:
    """What the cluster file says is what there is; a variable does not switch off what the file counts on.

    Looks at: the kind of network in the cluster file, against the adapters
    Why: where the file says ethernet RDMA is switched off: an InfiniBand that is there is not used
    See: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    kind = m.section("network").get("kind")
    fabric = [f"{port.device}:{port.port}" for port in m.facts.rdma if port.active and port.link_layer == "InfiniBand"]
    if kind == "ethernet" and fabric:
        fix = "network: {kind: infiniband} in the cluster file, unless it is kept for storage"
        yield Seen(WARN, f"the cluster file says ethernet, {', '.join(fabric)} is InfiniBand and active", fix)
    elif kind in RDMA_KINDS and m.environ("NCCL_IB_DISABLE") == "1":
        yield Seen(FAIL if m.several else WARN, f"NCCL_IB_DISABLE=1, the cluster file says {kind}", "unset NCCL_IB_DISABLE")
    elif kind and m.facts.nics and m.computes:
        yield Seen(PASS, str(kind))


@rule("ephemeral-ports", MACHINE)
def ports(m: Machine) -> Iterator[Seen]:
    """Jobs meet outside of the ephemeral ports; a port in the environment does too.

    Looks at: the kernel's range of ephemeral ports
    Why: any outgoing connection may take a port of this range: a rendezvous inside of it ends with 'address already in use'
    See: https://github.com/NVIDIA/enroot/issues/243
    """
    range_ = m.facts.port_range
    if not range_ or len(range_) != 2:
        return
    low, high = range_
    value = m.environ("MASTER_PORT")
    fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999' (and in /etc/sysctl.d)"
    if value.isdigit() and low <= int(value) <= high:
        text = f"MASTER_PORT={value} is among {low} to {high}"
        yield Seen(WARN, text, f"choose one below {low}, another one for each job")
    elif low <= RENDEZVOUS[0] + 1000 and high >= RENDEZVOUS[0]:
        yield Seen(WARN, f"{low} to {high}: hardly a port is left for jobs to meet", fix)
    else:
        yield Seen(PASS, f"{low} to {high}")


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False


@rule("hostname-loopback", MACHINE)
def loopback(m: Machine) -> Iterator[Seen]:
    """The own name is an address that others reach, where gloo is given no interface.

    Looks at: what the machine's own name resolves to
    Why: gloo binds to it: where it is loopback the other nodes cannot reach this one, and the job waits until its time-out
    Fix: give the node's own name its address in /etc/hosts (not 127.0.1.1), or set network.interface in the cluster file
    See: https://github.com/aws-samples/aws-do-eks/pull/69
    """
    own = m.facts.own_addresses
    if not m.computes or not m.several:
        return
    held = bool(m.section("network").get("interface") or m.environ("GLOO_SOCKET_IFNAME"))
    if not own:
        yield Seen(WARN, f"{m.facts.hostname} does not resolve")
    elif all(map(_is_loopback, own)) and not held:
        yield Seen(WARN, f"{m.facts.hostname} is {', '.join(own)}")
    else:
        yield Seen(PASS, ", ".join(own))


@rule("node-names", MACHINE)
def node_names(m: Machine) -> Iterator[Seen]:
    """The other nodes' names resolve, to none of this machine's own addresses of loopback.

    Looks at: names of the other nodes
    Why: a name that does not resolve on every node keeps the ranks from meeting
    Fix: put the nodes into DNS, or into /etc/hosts of every node (clustertune ops slurm plan shows it)
    See: https://github.com/pytorch/pytorch/issues/73656
    """
    addresses = m.facts.names
    if not addresses or not (m.is_member or m.in_step or not m.cluster):
        return
    own = m.facts.hostname.partition(".")[0]
    unknown = sorted(name for name, found in addresses.items() if not found)
    wrong = sorted(
        name for name, found in addresses.items() if found and all(map(_is_loopback, found)) and name.partition(".")[0] != own
    )
    if unknown:
        yield Seen(FAIL if m.several and m.computes else WARN, f"unknown: {', '.join(unknown[:10])}")
    if wrong:
        yield Seen(FAIL if m.several and m.computes else WARN, f"resolve to loopback: {', '.join(wrong[:10])}")
    if not unknown and not wrong:
        yield Seen(PASS, f"{len(addresses)} names resolve")
