"""Interfaces, bonds, RDMA and names: how ranks of several nodes find and reach each other."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator, Sequence

from clustertune.check.machines import RDMA_KINDS, Machine, one_link
from clustertune.check.rule import FAIL, MACHINE, PASS, UNKNOWN, WARN, Rules, Seen, either
from clustertune.host.facts import Nic

RULES = Rules(MACHINE, __file__)

FAST_MBIT = 25_000
"""From here on small frames show; 10 Gbit/s is filled by one core with frames of 1500 bytes."""
WHOLE = 0.9
"""Share of the nominal speed from which a link counts as whole: a bond's sum and a file's round figure differ a little."""


def matches(value: str, names: Sequence[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME means: prefixes, exact after ``=``, all others after ``^`` (NCCL's guide)."""
    exclude, exact, listed = re.findall(r"^(\^?)(=*)(.*)", value.strip(), re.DOTALL)[0]
    patterns = [word for word in listed.split(",") if word]
    hit = [name for name in names if any(name == word if exact else name.startswith(word) for word in patterns)]
    return [name for name in names if name not in hit and name != "lo"] if exclude else hit


def _named(m: Machine) -> str:
    """The interface of the cluster file; of a machine that is not in it, and has none of that name, none."""
    name = str(m.section("network").get("interface") or "")
    present = any(nic.name == name for nic in m.facts.nics)
    return name if present or m.is_member or m.in_step or m.expects.ran else ""


def _nic(m: Machine, name: str) -> Nic | None:
    return next((nic for nic in m.facts.nics if nic.name == name), None)


@RULES("interface")
def interface(m: Machine) -> Iterator[Seen]:
    """The interface is there, is up, and has an address; the variable means one interface."""
    nics = m.facts.nics
    name, value = _named(m), m.environ("NCCL_SOCKET_IFNAME")
    if not nics or not m.computes:
        return
    names = ", ".join(nic.name for nic in nics)
    nic, status = _nic(m, name), FAIL if m.several else WARN
    if name and nic is None:
        fix = "network.interface of the cluster file must be the name on every compute node"
        yield Seen(status, f"there is no {name} (there are {names})", fix)
    elif nic and (nic.up is False or nic.carrier is False):
        yield Seen(status, f"{name} is down", f"look at cable and switch: ip link show {name}; ethtool {name}")
    elif nic:
        good = f"{name}, {nic.addresses[0]}" if nic.addresses else ""
        fix = f"give it one on every node: ip addr show {name}"
        yield from either(status, "" if good else f"{name} has no address", good, fix)
    if value and not (name and m.expects.launched):  # jobs of clustertune replace it by the cluster file's
        matched = matches(value, [nic.name for nic in nics])
        means = f"NCCL_SOCKET_IFNAME={value} means {', '.join(matched)}"
        if not matched:
            yield Seen(FAIL, f"{means}none of {names}", "unset it, or name one exactly: =NAME")
        elif len(matched) > 1 and not value.startswith(("^", "=")) and len(matched) > len(value.split(",")):
            yield Seen(WARN, means, f"name it exactly: NCCL_SOCKET_IFNAME=={matched[0]}")
        elif all(nic.up is False for nic in nics if nic.name in matched):
            yield Seen(FAIL, f"{means}, which is down", "unset it")


@RULES("interface-subnet")
def interface_subnet(m: Machine) -> Iterator[Seen]:
    """The interface's address is in the cluster's subnet."""
    value, nic = m.section("network").get("subnet"), _nic(m, _named(m))
    if not value or nic is None or not nic.addresses:
        return
    with contextlib.suppress(ValueError):
        subnet, own = ipaddress.ip_network(str(value), strict=False), []
        for text in nic.addresses:
            with contextlib.suppress(ValueError):
                own.append(ipaddress.ip_interface(text).ip)
        inside = any(address in subnet for address in own if address.version == subnet.version)
        outside = "" if inside else f"{nic.name} has {', '.join(nic.addresses)}, not in {subnet}"
        yield from either(FAIL if m.several else WARN, outside, f"{nic.name} is in {subnet}")


@RULES("interface-speed")
def interface_speed(m: Machine) -> Iterator[Seen]:
    """The interface has the speed of the cluster file."""
    value, nic = m.section("network").get("gbit"), _nic(m, _named(m))
    if not value or nic is None or m.section("network").get("kind") not in ("ethernet", "roce"):
        return
    if nic.mbit is None:
        if not m.rehearsal and not nic.virtual:
            yield Seen(UNKNOWN, f"{nic.name} does not report its speed")
        return
    runs = f"{nic.mbit / 1000:g} Gbit/s"
    slow = f"{nic.name} runs at {runs}, the cluster file says {value:g}" if nic.mbit < float(value) * 1000 * WHOLE else ""
    fix = f"look at cable, transceiver and switch port: ethtool {nic.name}; or correct network.gbit of the cluster file"
    yield from either(WARN, slow, f"{nic.name}: {runs}", fix)


@RULES("bond")
def bond(m: Machine) -> Iterator[Seen]:
    """Links of bonds are up; of the one that carries the ranks, connections are spread."""
    own = _named(m)
    for nic in m.facts.nics:
        if not nic.bond_mode or (nic.up is False and nic.name != own):
            continue
        down = [link for link in nic.bond_links if link not in nic.bond_links_up]
        # one for management, or for storage, may be as it is
        carries = nic.name == (own or nic.name) and m.section("network").get("kind") != "infiniband"
        if down:
            fix = f"look at cable and switch port: cat /proc/net/bonding/{nic.name}"
            yield Seen(WARN, f"{nic.name}: {', '.join(down)} of {', '.join(nic.bond_links)} down", fix)
        elif carries and one_link(nic):
            fix = f"ip link set {nic.name} type bond xmit_hash_policy layer3+4, and the like on the switch; keep it in its file"
            yield Seen(WARN, f"{nic.name}: {nic.bond_mode} with hash {nic.bond_hash}", fix)
        else:
            yield Seen(PASS, f"{nic.name}: {nic.bond_mode}, {len(nic.bond_links)} links up")


@RULES("mtu")
def mtu(m: Machine) -> Iterator[Seen]:
    """A fast interface between nodes has large frames."""
    nic, kind = _nic(m, _named(m)), m.section("network").get("kind")
    if kind == "infiniband" or nic is None:  # there the ranks only meet: what they send takes InfiniBand
        return
    speed = nic.mbit or 0
    if nic.kind in ("ethernet", "") and nic.mtu and speed >= FAST_MBIT:
        size = f"{nic.name}: {nic.mtu} bytes"
        fix = f"set 9000 on every node and on the switch: ip link set {nic.name} mtu 9000"
        yield from either(WARN, f"{size} at {speed / 1000:g} Gbit/s" if nic.mtu <= 1500 else "", size, fix)


@RULES("rdma-port")
def rdma_port(m: Machine) -> Iterator[Seen]:
    """The ports that the cluster file names are active; where it names none, one is."""
    network, ports = m.section("network"), m.facts.rdma
    if network.get("kind") not in RDMA_KINDS or not m.computes:
        return
    status = FAIL if m.several else WARN
    fix = "look at cable, switch and subnet manager: ibstat; in a container bind /dev/infiniband and mount /sys"
    if not ports:
        hidden = not m.facts.nics
        seen = Seen(UNKNOWN, "/sys is not visible here") if hidden else Seen(status, "there is no RDMA adapter", fix)
        yield seen
        return
    named, missing = network.get("hca") or (), []
    for value in named:
        device, _, number = str(value).partition(":")
        mine = [port for port in ports if port.device == device and (not number or port.port == int(number))]
        if not any(port.active for port in mine):
            missing.append(f"{value} ({', '.join(port.state or '?' for port in mine) or 'not there'})")
    active = [f"{port.device}:{port.port}" for port in ports if port.active]
    if missing:  # with some NCCL continues, slower
        yield Seen(status if len(missing) == len(named) else WARN, f"not active: {', '.join(missing)}", fix)
    elif not active:
        states = ", ".join(f"{port.device}:{port.port} {port.state or '?'} {port.physical}".strip() for port in ports)
        yield Seen(status, f"no port is active: {states}", fix)
    else:
        few = len(active) < int(network.get("ports") or 1)
        shortage = f"{len(active)} ports active, the cluster file says {network.get('ports')}" if few else ""
        yield from either(WARN, shortage, f"active: {', '.join(active)}", fix)


@RULES("rdma-verbs")
def rdma_verbs(m: Machine) -> Iterator[Seen]:
    """What uses an active port is in this place."""
    f, kind = m.facts, m.section("network").get("kind")
    active = [port for port in f.rdma if port.active]
    if not active or not m.computes or kind == "ethernet" or m.environ("NCCL_IB_DISABLE") == "1" or not m.several:
        return
    lacking = [] if any("uverbs" in name for name in f.rdma_devices) else ["/dev/infiniband/uverbs* cannot be opened"]
    lacking += ["libibverbs.so.1 cannot be loaded"] if f.verbs is False else []
    hard = bool(lacking) and kind in RDMA_KINDS  # providers may lie in another folder
    drivers = {port.device.rstrip("0123456789").rstrip("_") for port in active} if f.verbs_providers else set()
    without = sorted(name for name in drivers if not any(p in name or name in p for p in f.verbs_providers))
    if f.verbs and not f.verbs_providers:
        lacking.append("no provider library is installed")
    elif "mlx5" in without:
        lacking.append(f"no provider library for {', '.join(without)}")
    image = "install rdma-core (libibverbs, ibverbs-providers) in the image, and bind /dev/infiniband"
    host = "install rdma-core; let users open /dev/infiniband/uverbs* (udev rules, Slurm's ConstrainDevices)"
    good = f"{len(f.rdma_devices)} device files, {', '.join(f.verbs_providers) or 'library'}"
    yield from either(FAIL if hard else WARN, "; ".join(lacking), good, image if m.in_container else host)


@RULES("network-kind")
def network_kind(m: Machine) -> Iterator[Seen]:
    """What the cluster file says is what there is; a variable does not switch off what the file counts on."""
    kind = m.section("network").get("kind")
    fabric = [f"{port.device}:{port.port}" for port in m.facts.rdma if port.active and port.link_layer == "InfiniBand"]
    if kind == "ethernet" and fabric:
        fix = "network: {kind: infiniband} in the cluster file, unless it is kept for storage"
        yield Seen(WARN, f"the cluster file says ethernet, {', '.join(fabric)} is InfiniBand and active", fix)
    elif kind in RDMA_KINDS and m.environ("NCCL_IB_DISABLE") == "1":
        yield Seen(FAIL if m.several else WARN, f"NCCL_IB_DISABLE=1, the cluster file says {kind}", "unset NCCL_IB_DISABLE")
    elif kind and m.facts.nics and m.computes:
        yield Seen(PASS, str(kind))


def _is_loopback(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    return False


@RULES("hostname-loopback")
def hostname_loopback(m: Machine) -> Iterator[Seen]:
    """The own name is an address that others reach, where gloo is given no interface."""
    own, name = m.facts.own_addresses, m.facts.hostname
    held = bool(m.section("network").get("interface") or m.environ("GLOO_SOCKET_IFNAME"))
    if m.computes and m.several:
        bad = f"{name} resolves to {', '.join(own)}" if own and all(map(_is_loopback, own)) and not held else ""
        yield from either(WARN, bad if own else f"{name} does not resolve", ", ".join(own))


@RULES("node-names")
def node_names(m: Machine) -> Iterator[Seen]:
    """The other nodes' names resolve, to none of this machine's own addresses of loopback."""
    names, own = m.facts.names, m.facts.hostname.partition(".")[0]
    if not names or not (m.is_member or m.in_step or not m.cluster):
        return
    unknown = sorted(name for name, addresses in names.items() if not addresses)
    looped = [name for name, addresses in names.items() if addresses and all(map(_is_loopback, addresses))]
    wrong = sorted(name for name in looped if name.partition(".")[0] != own)
    for what, bad in (("unknown", unknown), ("resolve to loopback", wrong)):
        if bad:
            yield Seen(FAIL if m.several and m.computes else WARN, f"{what}: {', '.join(bad[:10])}")
    if not unknown and not wrong:
        yield Seen(PASS, f"{len(names)} names resolve")
