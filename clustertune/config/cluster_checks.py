"""Facts of a cluster file that are missing, cannot be, or contradict each other: all of them at once."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from clustertune.config.cluster_compute import ABOVE, check_compute
from clustertune.config.cluster_environment import check_environment
from clustertune.config.cluster_schema import (
    CONTAINER_OPTIONS,
    NETWORKS,
    Cluster,
    ClusterFile,
    Compute,
    Container,
    Host,
    Network,
    SlurmFacts,
)
from clustertune.config.cluster_storage import check_storage
from clustertune.config.cluster_words import Found, key_of, place_of, salvage, schema_problems
from clustertune.config.yamlfile import Document
from clustertune.errors import Problem, UserError

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
"""One label of a host name (RFC 1123, 2.1)."""
_BIND = re.compile(r"(/[^\s,:\x00-\x1f]*)(:/[^\s,:\x00-\x1f]*(:(ro|rw))?)?")


def read_cluster(document: Document, *, name: str | None = None) -> Cluster:
    """The cluster of a file. ``name``: what its file name says. Raises UserError with every problem."""
    problems, facts = [], None
    try:
        facts = ClusterFile.model_validate(document.data)
    except ValidationError as error:
        problems = schema_problems(ClusterFile, error, document)
    told = {problem.key for problem in problems}
    for path, message, fix in (*_check_name(document.data.get("name"), name), *_contradictions(document.data)):
        if key_of(document, path) in told:  # what cannot be read was said already, and is no fact to compare
            continue
        problems.append(Problem(message, file=place_of(document, path), key=key_of(document, path), fix=fix))
    if facts is None or problems:
        raise UserError(sorted(problems, key=_line))
    return Cluster(**{name: getattr(facts, name) for name in ClusterFile.model_fields}, source=document.file)


def _line(problem: Problem) -> int:
    """Problems are told in the order of the file."""
    return int((problem.file or "").rpartition(":")[2]) if re.search(r":\d+$", problem.file or "") else 0


def _check_name(said: object, name: str | None) -> Iterator[Found]:
    if said == "local":
        yield ("name",), "local is what is found by looking", "give it a name of its own"
    elif name is not None and isinstance(said, str) and said != name:
        yield ("name",), f"{said}, but the file is called {name}.yaml: --cluster takes the latter", "make them one"


def _contradictions(data: dict[str, Any]) -> Iterator[Found]:
    """What the readable parts of the sections say against themselves and each other."""
    listed = data.get("nodes")
    found = [salvage(Host, item) for item in listed] if isinstance(listed, list) else []
    hosts = [host for host, _ in found]
    complete = bool(hosts) and all(whole for _, whole in found)
    compute, _ = salvage(Compute, data.get("compute"))
    network, _ = salvage(Network, data.get("network"))
    slurm, _ = salvage(SlurmFacts, data.get("slurm"))
    container, _ = salvage(Container, data.get("container"))
    yield from _check_hosts(hosts)
    if complete:  # else who is missing may be the one that cannot be read
        yield from _check_roles([host for host in hosts if host], data.get("slurm") is not None)
    if compute:
        yield from check_compute(compute)
    if network:
        yield from _check_network(network, hosts)
    if compute and slurm and slurm.gres and compute.gpus == 0:
        yield ("slurm", "gres"), f"{slurm.gres}, while compute.gpus is 0", "leave it out"
    if container:
        yield from _check_container(container)
    storage = data.get("storage", {})
    if isinstance(storage, dict):
        yield from check_storage(storage, hosts)


def _check_hosts(hosts: Sequence[Host | None]) -> Iterator[Found]:
    seen: dict[tuple[str, str], int] = {}
    for index, host in enumerate(hosts):
        if host is None:
            continue
        path = ("nodes", str(index))
        for key, message, fix in _check_host(host):
            yield (*path, key), message, fix
        for key in ("name", "address"):
            value = str(getattr(host, key) or index).lower()
            first = seen.setdefault((key, value), index)
            if first != index:
                yield (*path, key), f"{value} is also the {key} of machine {first + 1} of the list", "each machine stands once"
        if twice := [role for role in host.roles or () if host.roles.count(role) > 1]:
            yield (*path, "roles"), f"{twice[0]} stands twice", "keep one"


def _check_roles(hosts: Sequence[Host], slurm: bool) -> Iterator[Found]:
    roles = [role for host in hosts for role in host.roles]
    if "compute" not in roles:
        yield ("nodes",), "no machine has the role compute", "give it to those that run jobs"
    controllers = roles.count("slurmctld")
    if slurm and controllers != 1:
        message = f"{controllers or 'no'} machine{'s have' if controllers > 1 else ' has'} the role slurmctld"
        yield ("nodes",), message, "give it to the one machine on which slurmctld runs"
    if not slurm and controllers:
        yield ("nodes",), "a machine has the role slurmctld, while there is no section slurm", "write slurm: {partition: ...}"
    if slurm and "login" not in roles:
        yield ("nodes",), "no machine has the role login: nobody could submit", "give it to those where sbatch works"


def _check_host(host: Host) -> Iterator[tuple[str, str, str | None]]:
    if not host.name:
        pass
    elif _address(host.name):
        yield "name", f"{host.name} is an address, not a name", "write what hostname prints there"
    elif not all(_LABEL.fullmatch(label) for label in host.name.split(".")):
        yield "name", f"{host.name} is no host name (RFC 1123: letters, digits and '-', 63 to a label)", None
    address = _address(host.address)
    if address is None:
        if not host.address:
            pass
        elif re.fullmatch(r"[0-9.]+|.*:.*", host.address) or not all(map(_LABEL.fullmatch, host.address.split("."))):
            yield "address", f"{host.address[:60]!r} is neither an address nor a host name", "write it as 10.0.0.1"
    elif address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        yield "address", f"{address} is no machine's address", "write it as 10.0.0.1"


def _address(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text or "")
    except ValueError:
        return None


def _check_network(network: Network, hosts: Sequence[Host | None]) -> Iterator[Found]:
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
        yield from _check_speed(network)
    if network.interface == "lo" and several:
        yield ("network", "interface"), "lo reaches no other machine", "ip route get ADDRESS of another node shows it"
    if network.hca and kind and kind not in ("infiniband", "roce", "none"):
        yield ("network", "hca"), f"RDMA adapters, while kind is {kind}", "write kind: roce, or leave it out"
    yield from _check_addresses(network, hosts, several)
    yield from check_environment(network.environment)


def _check_speed(network: Network) -> Iterator[Found]:
    """A bandwidth that the ports cannot carry is a figure of something else, most often in Gbit/s."""
    if network.gbit and network.ports and network.measured_gb_s:
        nominal = network.gbit * network.ports / 8
        if network.measured_gb_s > ABOVE * nominal:
            message = f"{network.measured_gb_s:g}: more than {network.ports} x {network.gbit:g} Gbit/s carry, {nominal:g} GB/s"
            yield (
                ("network", "measured_gb_s"),
                message,
                "busbw of all_gather_perf over several nodes in GB/s; or fix gbit or ports",
            )


def _check_addresses(network: Network, hosts: Sequence[Host | None], several: bool) -> Iterator[Found]:
    subnet = None
    if network.subnet:
        try:
            subnet = ipaddress.ip_network(network.subnet)
        except ValueError as error:
            yield ("network", "subnet"), f"{network.subnet!r}: {error}", "write it as 10.0.0.0/24"
    for index, host in enumerate(hosts):
        address = _address(host.address) if host else None
        path = ("nodes", str(index), "address")
        if address is None:
            continue
        if address.is_loopback and (several or len(hosts) > 1):
            yield path, f"{address} is every machine's own", "write the one by which the others reach it"
        elif subnet and address not in subnet:
            yield path, f"{address} lies outside network.subnet {subnet}", "fix the one that is wrong"
        elif subnet and subnet.num_addresses > 2 and address in (subnet.network_address, subnet.broadcast_address):
            yield path, f"{address} is the network's own, not a machine's", "fix the address or network.subnet"


def _check_options(container: Container) -> Iterator[Found]:
    allowed = CONTAINER_OPTIONS.get(container.runtime, ())
    options = container.options or ()  # None where it could not be read
    for index, option in enumerate(options):
        if allowed and option not in allowed:
            yield ("container", "options", str(index)), f"{option[:60]!r} is not among them", f"one of {', '.join(allowed)}"
        elif option in options[:index]:
            yield ("container", "options", str(index)), f"{option} stands twice", "keep one"
    if {"--container-writable", "--container-readonly"} <= set(options):
        yield ("container", "options"), "writable and read-only at once", "keep one"


def _check_container(container: Container) -> Iterator[Found]:
    runtime, image = container.runtime, container.image
    if runtime == "none":
        for key in ("image", "megatron", "binds", "options", "program"):
            if getattr(container, key):
                yield ("container", key), "given, while runtime is none", "write runtime: apptainer, or leave it out"
    elif runtime and image is None:
        kind = (
            "a .sqsh that all nodes see, or docker://NAME@sha256:DIGEST" if runtime == "pyxis" else "a .sif that all nodes see"
        )
        yield ("container", "image"), f"missing, while runtime is {runtime}", kind
    for key, named in {"image": image, "megatron": container.megatron}.items() if runtime != "none" else ():
        if runtime == "pyxis" and named and named.endswith(".sif"):
            yield ("container", key), "a .sif, which enroot cannot open", "runtime: apptainer; or a .sqsh of enroot import"
        elif runtime and runtime != "pyxis" and named and named.startswith("docker://"):
            yield ("container", key), f"{runtime} would fetch it anew on every node", "make build-sif, and name the file"
    if runtime == "pyxis" and container.program:
        yield ("container", "program"), "given, while pyxis is a part of srun", "leave it out"
    yield from _check_options(container)
    for index, bind in enumerate(container.binds or ()):
        match = _BIND.fullmatch(bind)
        if not match or "/../" in f"{bind}/".replace(":", "/"):
            yield (
                ("container", "binds", str(index)),
                f"{bind[:60]!r} is no bind",
                "write /path, /path:/inside or /path:/inside:ro",
            )
