"""A cluster file, read and checked: facts that are missing, cannot be, or contradict each other, all of them at once."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from clustertune.cluster.compute_rules import check_compute
from clustertune.cluster.network_rules import check_network, ip_address_of
from clustertune.cluster.schema import (
    CONTAINER_OPTIONS,
    INTERCONNECTS,
    LOCAL,
    NETWORKS,
    Cluster,
    ClusterFile,
    Compute,
    Container,
    Host,
    Network,
    SlurmFacts,
    expand_nodes,
)
from clustertune.cluster.storage_rules import check_storage
from clustertune.console import CONTROL_CATEGORIES
from clustertune.errors import Problem, UserError
from clustertune.recipe.findings import Found, as_problems, parse_partial, schema_findings
from clustertune.recipe.layers import Document, KeyPath

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
"""One label of a host name (RFC 1123, 2.1)."""
_BIND = re.compile(r"(/[^\s,:\x00-\x1f]*)(:/[^\s,:\x00-\x1f]*(:(ro|rw))?)?")


def read_cluster(document: Document, *, name: str | None = None) -> Cluster:
    """The cluster of a file. ``name``: what its file name says. Raises UserError with all problems in their order."""
    faults: list[Found] = []
    data, origin = document.data, list[int]()
    try:
        nodes, origin = expand_nodes(data.get("nodes"))
        data = {**data, "nodes": nodes} if nodes else data
    except UserError as error:
        faults += [((*str(p.key or "nodes").split("."),), p.message, p.fix) for p in error.problems]
    try:
        facts = ClusterFile.model_validate(data)
    except ValidationError as error:
        faults += [(path, text, _of_a_link(path, data) or fix) for path, text, fix in schema_findings(ClusterFile, error)]
    unread = {path for path, _, _ in faults}  # no facts to compare
    faults += [item for item in _contradictions(data, name) if item[0] not in unread]
    if problems := as_problems([(_entry(path, origin), text, fix) for path, text, fix in faults], document):
        raise UserError(sorted(problems, key=_line))
    return Cluster(**{name: getattr(facts, name) for name in ClusterFile.model_fields}, source=document.file)


_INFINIBAND = ("ib", "hdr", "hdr100", "hdr200", "ndr", "ndr200", "ndr400", "edr", "xdr", "mlx", "mellanox", "connectx")
_NETWORKS = {**dict.fromkeys(_INFINIBAND, "infiniband"), "rocev2": "roce", "eth": "ethernet", "opa": "omnipath"}
"""What people call the kinds of network."""


def _of_a_link(path: KeyPath, data: Mapping[str, Any]) -> str | None:
    """What to write for a link that is called otherwise than the file's names; None: nothing is known."""
    if path not in (("network", "kind"), ("compute", "interconnect")):
        return None
    section = data.get(path[0])
    word = str(section.get(path[1]) if isinstance(section, dict) else None).lower()
    network = _NETWORKS.get(word, word if word in NETWORKS else None)
    if path == ("network", "kind"):
        return network and f"did you mean {network}?"
    if network:
        return (
            f"{network} joins nodes: network.kind: {network}; here stands what joins the GPUs of one node: nvlink4, pcie5, ..."
        )
    known = [name for name in INTERCONNECTS if word and name.startswith(word)]
    return f"say the generation: {', '.join(known)}" if len(known) > 1 else None


def _entry(path: KeyPath, origin: Sequence[int]) -> KeyPath:
    """A path below ``nodes`` as the file has it, where one entry may be many machines."""
    if len(path) > 1 and path[0] == "nodes" and path[1].isdigit() and int(path[1]) < len(origin):
        return ("nodes", str(origin[int(path[1])]), *path[2:])
    return path


def _line(problem: Problem) -> int:
    line = (problem.file or "").rpartition(":")[2]
    return int(line) if line.isdigit() else 0


def _contradictions(data: dict[str, Any], name: str | None) -> Iterator[Found]:
    """What the readable parts of the sections say against themselves and each other."""
    if (stated := data.get("name")) == LOCAL:
        yield ("name",), "the name local is reserved for the machine as it is detected", "give it another name"
    elif name is not None and isinstance(stated, str) and stated != name:
        yield ("name",), f"{stated}, but the file is called {name}.yaml: --cluster takes the latter", "make them one"
    listed = data.get("nodes")
    parsed = [parse_partial(Host, item) for item in listed] if isinstance(listed, list) else []
    hosts = [host for host, _ in parsed]
    complete = bool(hosts) and all(good for _, good in parsed)
    compute, _ = parse_partial(Compute, data.get("compute"))
    network, _ = parse_partial(Network, data.get("network"))
    slurm, _ = parse_partial(SlurmFacts, data.get("slurm"))
    container, _ = parse_partial(Container, data.get("container"))
    yield from _check_texts(data)
    yield from _check_hosts(hosts)
    if complete:  # else who is missing may be the one that cannot be read
        yield from _check_roles([host for host in hosts if host], data.get("slurm") is not None)
    if compute:
        yield from check_compute(compute)
    if network:
        yield from check_network(network, hosts)
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
        if host.name and ip_address_of(host.name):
            yield (*path, "name"), f"{host.name} is an address, not a name", "write what hostname prints there"
        elif host.name and not _is_host_name(host.name):
            message = f"{host.name} is not a host name (RFC 1123: letters, digits and '-', 63 to a label)"
            yield (*path, "name"), message, None
        address, text = ip_address_of(host.address), host.address or ""
        if text and address is None and (re.fullmatch(r"[0-9.]+|.*:.*", text) or not _is_host_name(text)):
            yield (*path, "address"), f"{text[:60]!r} is neither an address nor a host name", "write it as 10.0.0.1"
        elif address and (address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255"):
            yield (*path, "address"), f"{address} is not a machine's address", "write it as 10.0.0.1"
        for key in ("name", "address"):
            value = str(getattr(host, key) or index).lower()
            first = seen.setdefault((key, value), index)
            if first != index:
                yield (*path, key), f"{value} is also the {key} of machine {first + 1} of the list", "each machine appears once"
        if twice := [role for role in host.roles or () if host.roles.count(role) > 1]:
            yield (*path, "roles"), f"{twice[0]} appears twice", "keep one"


def _check_roles(hosts: Sequence[Host], slurm: bool) -> Iterator[Found]:
    roles = [role for host in hosts for role in host.roles]
    if "compute" not in roles:
        yield ("nodes",), "no machine has the role compute", "give it to those that run jobs"
    controllers = roles.count("slurmctld")
    if slurm and controllers > 1:
        message = f"{controllers} machines have the role slurmctld"
        fix = "give it to the one machine on which slurmctld runs; to none where a site's own Slurm is used as it is"
        yield ("nodes",), message, fix
    if not slurm and controllers:
        yield ("nodes",), "a machine has the role slurmctld, while there is no section slurm", "write slurm: {partition: ...}"
    if slurm and "login" not in roles:
        yield ("nodes",), "no machine has the role login: nobody could submit", "give it to those where sbatch works"


def _is_host_name(text: str) -> bool:
    return all(map(_LABEL.fullmatch, text.split(".")))


def _check_texts(value: Any, path: KeyPath = ()) -> Iterator[Found]:
    """Control characters, which end a line of a script or a table that root reads, and what no file's encoding holds."""
    if isinstance(value, str):
        if bad := next((c for c in value if unicodedata.category(c) in CONTROL_CATEGORIES), None):
            yield (
                path,
                f"holds the character {bad!a}, which no text of a cluster file may",
                "write it on one line, plainly",
            )
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _check_texts(key, (*path, ascii(str(key))[1:-1]))
            yield from _check_texts(inner, (*path, ascii(str(key))[1:-1]))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _check_texts(inner, (*path, str(at)))


def _check_container(container: Container) -> Iterator[Found]:  # noqa: PLR0912 - a branch for each thing that can be wrong
    """What could not be read is None."""
    runtime, image = container.runtime, container.image
    if runtime == "none":
        for key in ("image", "megatron", "binds", "options", "packages", "program"):
            if getattr(container, key):
                yield ("container", key), "given, while runtime is none", "write runtime: apptainer, or leave it out"
    elif runtime and image is None:
        fix = (
            "a .sqsh that all nodes see, or docker://NAME@sha256:DIGEST" if runtime == "pyxis" else "a .sif that all nodes see"
        )
        yield ("container", "image"), f"missing, while runtime is {runtime}", fix
    for key in ("image", "megatron", "vllm") if runtime not in (None, "none") else ():
        named = getattr(container, key) or ""
        if runtime == "pyxis" and named.endswith(".sif"):
            yield ("container", key), "a .sif, which enroot cannot open", "runtime: apptainer; or a .sqsh of enroot import"
        elif runtime != "pyxis" and named.startswith("docker://"):
            yield ("container", key), f"{runtime} would fetch it again on every node", "make build-sif, and name the file"
    if runtime == "pyxis" and container.program:
        yield ("container", "program"), "given, while pyxis is a part of srun", "leave it out"
    allowed, options = CONTAINER_OPTIONS.get(runtime, ()), container.options or ()
    for index, option in enumerate(options):
        if allowed and option not in allowed:
            yield ("container", "options", str(index)), f"{option[:60]!r} is not among them", f"one of {', '.join(allowed)}"
        elif option in options[:index]:
            yield ("container", "options", str(index)), f"{option} appears twice", "keep one"
    if {"--container-writable", "--container-readonly"} <= set(options):
        yield ("container", "options"), "writable and read-only at once", "keep one"
    for index, bind in enumerate(container.binds or ()):
        match = _BIND.fullmatch(bind)
        if not match or "/../" in f"{bind}/".replace(":", "/"):
            fix = "write /path, /path:/inside or /path:/inside:ro"
            yield ("container", "binds", str(index)), f"{bind[:60]!r} is not a bind", fix
