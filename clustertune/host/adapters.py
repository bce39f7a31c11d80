"""The network adapters of a machine: interfaces, bonds and RDMA adapters, as /sys shows them."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
from typing import Any

from clustertune.host.facts import Nic, RdmaPort
from clustertune.host.system import Probe

_NET = "/sys/class/net"
_IB = "/sys/class/infiniband"
_KINDS = {1: "ethernet", 32: "infiniband", 772: "loopback"}
"""ARPHRD_* of linux/if_arp.h, as /sys/class/net/*/type holds them."""
_PROVIDERS = ("/usr/lib", "/usr/lib64", "/lib", "/usr/local/lib")
_IFF_UP = 1


def addresses() -> dict[str, list[str]]:
    """Interface to addresses (``10.0.0.1/24``) of this machine, IPv4 first, link-local IPv6 left out."""
    import psutil

    by_interface: dict[str, list[str]] = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in sorted(entries, key=lambda one: one.family != socket.AF_INET):
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask and not entry.address.startswith("fe80:"):
                bits = int(ipaddress.ip_address(entry.netmask)).bit_count()
                by_interface.setdefault(interface, []).append(f"{entry.address}/{bits}")
    return by_interface


def interfaces(probe: Probe) -> dict[str, Any]:
    """All interfaces, with the addresses of this machine's."""
    own = addresses() if probe.live else {}
    names = [name for name in probe.names(_NET) if probe.path(f"{_NET}/{name}").is_dir()]  # bonding_masters is a file
    nics = [_nic(probe, name) for name in names]
    for nic in nics:
        nic.addresses = own.get(nic.name, [])
        if nic.bond_mode and not nic.mbit:
            each = [other.mbit for other in nics if other.name in nic.bond_links_up and other.mbit]
            nic.mbit = sum(each) or None
    return {"nics": nics}


def _nic(probe: Probe, name: str) -> Nic:
    folder = f"{_NET}/{name}"
    speed = probe.number(f"{folder}/speed")
    kind = probe.number(f"{folder}/type")
    links = probe.read(f"{folder}/bonding/slaves").split()
    bonded = probe.path(f"{folder}/bonding").is_dir()
    return Nic(
        name=name,
        up=_is_up(probe, folder),
        carrier={"1": True, "0": False}.get(probe.read(f"{folder}/carrier")),
        mbit=speed if speed and 0 < speed < 10_000_000 else None,  # -1, or 2^32-1 of old kernels, where it is unknown
        mtu=probe.number(f"{folder}/mtu"),
        kind=_KINDS.get(kind, "other") if kind is not None else "",
        virtual=not bonded and not probe.path(f"{folder}/device").exists(),
        bond_mode=(probe.read(f"{folder}/bonding/mode").split() or [""])[0],
        bond_hash=(probe.read(f"{folder}/bonding/xmit_hash_policy").split() or [""])[0],
        bond_links=links,
        bond_links_up=[link for link in links if probe.read(f"{_NET}/{link}/bonding_slave/mii_status") in ("up", "")],
    )


def _is_up(probe: Probe, folder: str) -> bool | None:
    """The state that the driver tells; where it tells none (loopback, tunnels), whether it was switched on."""
    state = probe.read(f"{folder}/operstate")
    if state in ("up", "down", "lowerlayerdown", "notpresent", "dormant"):
        return state == "up"
    try:
        return bool(int(probe.read(f"{folder}/flags"), 16) & _IFF_UP)
    except ValueError:
        return None


# --- RDMA --------------------------------------------------------------------------------------------------------------


def rdma(probe: Probe) -> dict[str, Any]:
    """Ports of RDMA adapters, the device files that this process may use, and the libraries that drive them."""
    listed = [(device, name) for device in probe.names(_IB) for name in probe.names(f"{_IB}/{device}/ports") if name.isdigit()]
    files = [f"/dev/infiniband/{name}" for name in probe.names("/dev/infiniband")]
    usable = [name for name in files if os.access(probe.path(name), os.R_OK | os.W_OK)]
    return {"rdma": [_port(probe, *port) for port in listed], "rdma_devices": usable, **_verbs(probe)}


def _port(probe: Probe, device: str, number: str) -> RdmaPort:
    folder = f"{_IB}/{device}/ports/{number}"
    state = probe.read(f"{folder}/state").partition(":")[2].strip()
    rate = re.match(r"([\d.]+)", probe.read(f"{folder}/rate"))
    return RdmaPort(
        device=device,
        port=int(number),
        active=state == "ACTIVE" if state else None,
        state=state,
        physical=probe.read(f"{folder}/phys_state").partition(":")[2].strip(),
        gbit=float(rate[1]) if rate else None,
        link_layer=probe.read(f"{folder}/link_layer"),
    )


def _verbs(probe: Probe) -> dict[str, Any]:
    patterns = ("libibverbs/lib*-rdmav*.so", "*/libibverbs/lib*-rdmav*.so")
    paths = [path for library in _PROVIDERS for pattern in patterns for path in probe.path(library).glob(pattern)]
    facts: dict[str, Any] = {"verbs_providers": sorted({path.name[3:].partition("-rdmav")[0] for path in paths})}
    if probe.live:
        try:
            ctypes.CDLL("libibverbs.so.1")
            facts["verbs"] = True
        except OSError:
            facts["verbs"] = False
    return facts


def nccl_files(probe: Probe) -> dict[str, Any]:
    """Settings of NCCL that stand in files, easily overlooked. The user's file wins over the system's, as in NCCL."""
    settings: dict[str, str] = {}
    home = os.environ.get("HOME", "") if probe.live else ""
    named = os.environ.get("NCCL_CONF_FILE", "") if probe.live else ""
    for path in filter(None, (named or (f"{home}/.nccl.conf" if home else ""), "/etc/nccl.conf")):
        for line in probe.read(path).splitlines():
            name, equals, value = line.partition("#")[0].strip().partition("=")
            if equals and re.fullmatch(r"NCCL_[A-Z0-9_]+", name.strip()):
                settings.setdefault(name.strip(), f"{value.strip()} ({path})")
    return {"nccl_conf": settings}
