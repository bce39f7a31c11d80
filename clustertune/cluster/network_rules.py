"""Faults of the network section: links, subnets and addresses, and the variables of the libraries that carry the bytes."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence

from clustertune.cluster.compute_rules import ABOVE
from clustertune.cluster.schema import NETWORKS, Host, Network
from clustertune.host.credentials import speaks_of_secret
from clustertune.recipe.findings import Found
from clustertune.recipe.layers import did_you_mean


def ip_address_of(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text or "")
    except ValueError:
        return None


def check_network(network: Network, hosts: Sequence[Host | None]) -> Iterator[Found]:
    kind, workers = network.kind, sum("compute" in (host.roles or ()) for host in hosts if host)
    several = workers > 1
    if kind == "unknown":
        yield ("network", "kind"), "a file must say it", f"one of {', '.join(name for name in NETWORKS if name != 'unknown')}"
    if kind == "none":
        if several:
            yield ("network", "kind"), f"none, while {workers} machines have the role compute", "ethernet, infiniband or roce"
        for key in ("gbit", "hca", "measured_gb_s"):
            if getattr(network, key):
                yield ("network", key), "given, while kind is none", "leave it out"
    elif kind and kind != "unknown":
        if network.interface is None:
            yield ("network", "interface"), "missing: sockets need it, with RDMA too: it finds the peers", "interface: bond0"
        if network.gbit is None and network.measured_gb_s is None:
            yield ("network", "gbit"), "missing: plans need it, or measured_gb_s", "gbit: 100, of one port"
        nominal = (network.gbit or 0) * (network.ports or 0) / 8
        # A bandwidth that the ports cannot carry is a figure of something else, most often in Gbit/s.
        if nominal and network.measured_gb_s and network.measured_gb_s > ABOVE * nominal:
            message = f"{network.measured_gb_s:g}: more than {network.ports} x {network.gbit:g} Gbit/s carry, {nominal:g} GB/s"
            fix = "busbw of all_gather_perf over several nodes in GB/s; or fix gbit or ports"
            yield ("network", "measured_gb_s"), message, fix
    if network.interface == "lo" and several:
        yield ("network", "interface"), "lo reaches no other machine", "ip route get ADDRESS of another node shows it"
    if network.hca and kind and kind not in ("infiniband", "roce", "none"):
        yield ("network", "hca"), f"RDMA adapters, while kind is {kind}", "write kind: roce, or leave it out"
    yield from _check_addresses(network, hosts, several)
    yield from check_environment(network.environment)


def _check_addresses(network: Network, hosts: Sequence[Host | None], several: bool) -> Iterator[Found]:
    subnet = None
    if network.subnet:
        try:
            subnet = ipaddress.ip_network(network.subnet)
        except ValueError as error:
            yield ("network", "subnet"), f"{network.subnet!r}: {error}", "write it as 10.0.0.0/24"
    if subnet is not None and _holds_strangers(subnet):
        text = f"{subnet} holds machines of others: the bricks would be exported to all of them"
        yield ("network", "subnet"), text, "the nodes' own subnet, as 10.0.0.0/24; or leave it out: each node is named"
    for index, host in enumerate(hosts):
        address = ip_address_of(host.address) if host else None
        path = ("nodes", str(index), "address")
        if address is None:
            continue
        if address.is_loopback and (several or len(hosts) > 1):
            yield path, f"{address} is every machine's own", "write the one by which the others reach it"
        elif subnet and address not in subnet:
            yield path, f"{address} is outside network.subnet {subnet}", "fix the one that is wrong"
        elif subnet and subnet.num_addresses > 2 and address in (subnet.network_address, subnet.broadcast_address):
            yield path, f"{address} is the network's own, not a machine's", "fix the address or network.subnet"


def _holds_strangers(subnet: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    """Whether a subnet is too wide to be one site's: wider than the largest private one (10.0.0.0/8, fc00::/7), or public and
    wider than an organisation's usual share (/16, /32)."""
    private, public = (8, 16) if subnet.version == 4 else (7, 32)
    return subnet.prefixlen < private or (subnet.is_global and subnet.prefixlen < public)


# --- variables of the libraries that carry the bytes between ranks -----------------------------------------------------
# What network.environment may hold. They reach every rank, run.json and reports: nothing that a program would run by, or that
# others must not read, belongs there.


_NAME = re.compile(r"(NCCL|GLOO|UCX|FI)(_[A-Z0-9]+)+")
_VALUE = re.compile(r"[A-Za-z0-9_=^.,:;/%+*\[\]-]{1,256}")
"""What values of these libraries are made of: nothing that a shell between here and a rank would read otherwise."""
_OWN = {
    "NCCL_COMM_ID": "every job has one of its own",
    "NCCL_HOSTID": "every node has one of its own: with one for all NCCL takes them for one machine",
}
_KNOWN = (
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA",
    "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SL", "NCCL_IB_SPLIT_DATA_ON_QPS", "NCCL_IB_TC", "NCCL_IB_TIMEOUT",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NET_PLUGIN", "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS", "NCCL_TOPO_FILE", "GLOO_SOCKET_IFNAME", "FI_PROVIDER", "UCX_NET_DEVICES", "UCX_TLS",
)  # fmt: skip
"""For a hint where a name is none."""


def check_environment(values: Mapping[str, object] | None) -> Iterator[Found]:
    """What is wrong with names and values."""
    for name, value in (values or {}).items():
        path = ("network", "environment", name)
        if name in _OWN:
            yield path, _OWN[name], "leave it out"
        elif not _NAME.fullmatch(name) or len(name) > 64:
            fix = did_you_mean(name, _KNOWN) or "names that begin with NCCL_, GLOO_, UCX_, FI_"
            yield path, "no variable of NCCL, gloo, UCX or libfabric", fix
        elif speaks_of_secret(name):
            yield path, "a secret: everybody reads this file", "leave it out"
        elif not isinstance(value, str):
            continue  # the schema reports it
        elif not _VALUE.fullmatch(value) or "://" in value:
            yield path, f"invalid value {value[:60]!r} of a variable", "letters, digits and _ = ^ . , : ; / % + * [ ] -"
    if len(values or {}) > 64:
        yield ("network", "environment"), f"{len(values or {})} variables", "64 at most"
