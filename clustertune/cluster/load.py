"""Which cluster: a file of ``ops/clusters``, a file anywhere, or this machine as it is found by looking.

What a file says is checked: facts that are missing, cannot be, or contradict each other, all of them at once.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clustertune.cluster.hardware import HARDWARE, near_gpus, read_hardware
from clustertune.cluster.local import LocalMachine, collect, judge
from clustertune.cluster.schema import (
    CONTAINER_OPTIONS,
    INTERCONNECTS,
    NETWORKS,
    Brick,
    Cluster,
    ClusterFile,
    Compute,
    Container,
    Host,
    Network,
    Pool,
    SlurmFacts,
    expand_nodes,
    same_host,
)
from clustertune.console import CONTROL_CATEGORIES
from clustertune.errors import Problem, UserError
from clustertune.host.credentials import speaks_of_secret
from clustertune.host.mounts import lies_below
from clustertune.host.system import parse_cpu_list
from clustertune.recipe.findings import Found, as_problems, parse_partial, schema_findings
from clustertune.recipe.layers import COMMAND_LINE, Document, KeyPath, did_you_mean, read_yaml
from clustertune.recipe.sections import NAME
from clustertune.tree import ROOT

CLUSTERS = ROOT / "ops" / "clusters"
"""The cluster files that come with the project, and where an operator of a checkout puts the own one."""
OWN_CLUSTERS = Path("ops", "clusters")
"""In the working folder: one's own, which go before the project's of the same name."""
LOCAL = "local"
"""The name of whatever is found by looking."""


def known_clusters(folder: Path | None = None) -> dict[str, Path]:
    """The cluster files by name: those of a folder, else of ``ops/clusters`` here and of the project's."""
    places = [folder] if folder else [CLUSTERS] if _same_folder() else [CLUSTERS, OWN_CLUSTERS.absolute()]
    files = {path.stem: path for place in places for path in place.glob("*.yaml") if re.fullmatch(NAME, path.stem)}
    return dict(sorted(files.items()))


def _same_folder() -> bool:
    """Whether the working folder is the project's own."""
    return OWN_CLUSTERS.absolute() == CLUSTERS


def _looked_in() -> str:
    """Where clusters are looked for by name, for errors."""
    return f"looked in {CLUSTERS}" if _same_folder() else f"looked in {OWN_CLUSTERS.absolute()} and {CLUSTERS}"


def load_cluster(name_or_path: str | None = None, *, look: Callable[[], LocalMachine] = collect) -> Cluster:
    """The cluster of a name in ``ops/clusters``, of a YAML file, or ``local``: found by looking.

    None: the file of ``ops/clusters`` that names this host, or all nodes that Slurm shows here; ``local`` where there is none.
    ``Cluster.source`` says what it was. Raises UserError with every problem, and the nearest name where there is no such file.
    """
    if name_or_path is None:
        return _find(look)
    if name_or_path == LOCAL:
        return judge(look())
    if not name_or_path or "\0" in name_or_path or len(name_or_path) > 4096:
        raise _refused(f"{name_or_path[:60]!r} is not a cluster")
    known = known_clusters()
    if name_or_path in known:
        return _read(known[name_or_path])
    path = Path(name_or_path)
    try:
        if path.is_file():
            return _read(path)
        exists = path.exists()
    except OSError as error:
        raise _refused(f"{name_or_path[:60]!r} cannot be read: {error.strerror or error}") from None
    fix = did_you_mean(path.stem, [*known, LOCAL])
    if exists or path.suffix in (".yaml", ".yml") or "/" in name_or_path:
        raise _refused(f"{name_or_path} {'is not a file' if exists else 'does not exist'}", fix)
    raise _refused(f"there is no cluster {name_or_path!r} ({_looked_in()})", fix)


def of_gpus(text: str) -> Cluster:
    """The cluster of ``NODESxGPUSxNAME``, as ``2x8xh100-sxm``: nodes, GPUs of one, a GPU of ops/hardware.yaml.

    What is not given of its nodes is that file's ``nodes``; ``notes`` name it. Raises UserError.
    """
    known, match = read_hardware().gpus, re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,2})x(.+)", text)
    if match is None or match[3] not in known:
        what = "is not NODESxGPUSxNAME" if match is None else f"there are no figures of {match[3]}"
        of_one_node = re.fullmatch(r"([1-9]\d{0,2})x(.+)", text)  # 8xh100: how many nodes is not said
        word = match[3] if match else of_one_node[2] if of_one_node else None
        near = near_gpus(word) if word else None
        fix = f"write 1x8xh100-sxm for a node of 8; {near or 'known: ' + ', '.join(known)}"
        raise UserError(Problem(f"{text[:60]!r}: {what}", file=COMMAND_LINE, key="--gpus", fix=fix))
    nodes, each, name = int(match[1]), int(match[2]), match[3]
    gpu = known[name]
    kind = f"nvlink{gpu.nvlink}" if gpu.nvlink else "pcie"
    around = read_hardware().nodes[kind]  # type: ignore[index]
    link = kind if gpu.nvlink else gpu.host_link
    note = (
        f"beside the GPUs of {text} all is assumed ({HARDWARE.name}, nodes.{kind}): {each} x {around.gbit:g} Gbit/s "
        f"{around.network}, {each * around.memory_gb:g} GiB of RAM, vLLM for evaluations; a cluster file states what there is"
    )
    return Cluster(
        name=text,
        nodes=tuple(Host(name=f"node{n}", address=f"node{n}", roles=("compute",)) for n in range(1, nodes + 1)),
        compute=Compute(
            gpus=each, gpu=name, interconnect=link if each > 1 else None, cores=each * around.cores,
            threads=each * around.cores, memory_gb=each * around.memory_gb,
        ),
        network=Network(kind=around.network, gbit=around.gbit, ports=min(each, 64)),
        assumes_vllm=True,
        source=f"--gpus {text}",
        notes=(note,),
    )  # fmt: skip


def _refused(text: str, fix: str | None = None) -> UserError:
    return UserError(Problem(text, file=COMMAND_LINE, key="--cluster", fix=fix))


def _read(path: Path) -> Cluster:
    ours = path.parent == CLUSTERS
    shown = f"ops/clusters/{path.name}" if ours else str(path)
    return read_cluster(read_yaml(path, shown), name=path.stem if ours or path.parent == OWN_CLUSTERS.absolute() else None)


def reference(cluster: Cluster) -> str:
    """``--cluster`` of a job for the same cluster. It starts in another folder: a file of one's own is an absolute path."""
    if not cluster.source.endswith((".yaml", ".yml")):
        return LOCAL
    path = Path(cluster.source).absolute()
    return str(path) if path.is_file() and path.parent != CLUSTERS else cluster.name


def of_this_machine() -> Cluster | None:
    """The file of ``ops/clusters`` that names this machine; None: none does, or several. Raises UserError."""
    files = _that_name(socket.gethostname())
    return _read(files[0]) if len(files) == 1 else None


def _find(look: Callable[[], LocalMachine]) -> Cluster:
    """The file that is of this place; ``local`` where there is none."""
    files = _that_name(socket.gethostname())
    if not files:
        seen = look()
        files = _that_name(*set(re.findall(r"^NodeName=(\S+)", seen.nodes, re.MULTILINE)))
        if not files:
            return judge(seen)
    if len(files) > 1:
        text = f"{' and '.join(path.stem for path in files)} both name this machine or its nodes"
        raise UserError(Problem(text, file="ops/clusters", fix="say which: --cluster NAME"))
    return _read(files[0])


def _that_name(*hosts: str) -> list[Path]:
    """The files that name all of ``hosts``, as far as they can be read: whether one is right matters only if it is chosen."""
    files = []
    for path in known_clusters().values():
        try:
            nodes, _ = expand_nodes(read_yaml(path, path.name).data.get("nodes"))
        except UserError:
            continue
        names = {node["name"] for node in nodes if isinstance(node, dict) and isinstance(node.get("name"), str)}
        if hosts and all(same_host(host, names) for host in hosts):
            files.append(path)
    return files


# --- what is wrong with a file -----------------------------------------------------------------------------------------


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
        if host.name and _address(host.name):
            yield (*path, "name"), f"{host.name} is an address, not a name", "write what hostname prints there"
        elif host.name and not _is_host_name(host.name):
            message = f"{host.name} is not a host name (RFC 1123: letters, digits and '-', 63 to a label)"
            yield (*path, "name"), message, None
        address, text = _address(host.address), host.address or ""
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
        address = _address(host.address) if host else None
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


# --- the compute section: counts, GPUs and NUMA nodes ------------------------------------------------------------------
# A part that could not be read is None here: the rest is still compared.


ABOVE = 1.05
"""Above the nominal bandwidth by more than this, a measured one is wrong; vendors and nccl-tests both count 10^9 bytes."""


def check_compute(compute: Compute) -> Iterator[Found]:
    if compute.gpus:
        yield from _check_gpu(compute)
    elif compute.gpus == 0:
        for key in ("gpu", "interconnect", "nvlink_domain", "measured_gb_s"):
            if getattr(compute, key) not in (None, "none"):
                yield ("compute", key), f"{getattr(compute, key)}, while gpus is 0", "leave it out, or say how many"
    if compute.threads and compute.cores:
        each, left = divmod(compute.threads, compute.cores)
        if left:
            message = f"{compute.threads} is not a multiple of {compute.cores} cores"
            yield ("compute", "threads"), message, "threads of the whole node"
        elif each > 8:
            yield ("compute", "threads"), f"{each} threads per core: no CPU has them", None
    if compute.cores and compute.sockets and compute.cores % compute.sockets:
        message = f"{compute.cores} does not divide by {compute.sockets} sockets"
        yield ("compute", "cores"), message, "cores of the whole node"
    groups, lists = compute.numa_gpus or (), compute.numa_cpus or ()
    if groups and lists and len(groups) != len(lists):
        message = f"{len(lists)} NUMA nodes, but numa_gpus has {len(groups)}"
        yield ("compute", "numa_cpus"), message, "one entry for each NUMA node in both"
    # A socket is one NUMA node or, by a BIOS setting (NPS2, SNC4), several; never the other way round.
    for key, count in (("numa_gpus", len(groups) if isinstance(compute.gpus, int) else 0), ("numa_cpus", len(lists))):
        if count and compute.sockets and count % compute.sockets:
            message = f"{count} NUMA nodes, but {compute.sockets} sockets"
            yield ("compute", key), message, "each socket has the same number: lscpu shows it"
    if groups and isinstance(compute.gpus, int):
        yield from _check_partition(groups, compute.gpus)
    yield from _check_lists(lists, compute.threads)


def _check_gpu(compute: Compute) -> Iterator[Found]:
    known = read_hardware().gpus
    if not compute.gpu:
        yield ("compute", "gpu"), f"missing, while gpus is {compute.gpus}", f"one of {', '.join(known)}"
    elif compute.gpu not in known:
        fix = near_gpus(compute.gpu)
        yield ("compute", "gpu"), f"ops/hardware.yaml has no {compute.gpu}", f"{fix or 'name one'}; or add it there"
    if not compute.interconnect:
        fix = "pcie5 where GPUs are PCIe cards, nvlink4 for HGX H100, none for one GPU"
        yield ("compute", "interconnect"), f"missing, while gpus is {compute.gpus}", fix
    elif compute.interconnect == "none" and compute.gpus > 1:
        yield ("compute", "interconnect"), f"none, while a node has {compute.gpus} GPUs", "at least PCIe connects them: pcie5"
    if not (link := compute.interconnect or "") or (link == "none" and compute.gpus > 1):
        return
    gpu = known.get(compute.gpu or "")
    if gpu and link.startswith("nvlink") and link != f"nvlink{gpu.nvlink}":
        has = f"NVLink {gpu.nvlink}" if gpu.nvlink else "no NVLink that joins all GPUs of a node"
        fix = f"nvlink{gpu.nvlink}" if gpu.nvlink else gpu.host_link
        yield ("compute", "interconnect"), f"{link}, but a {compute.gpu} has {has}", f"write {fix}"
    domain = compute.nvlink_domain
    if domain and not link.startswith("nvlink"):
        yield ("compute", "nvlink_domain"), f"given, while interconnect is {link}", "leave it out"
    elif domain and (domain < compute.gpus or domain % compute.gpus):
        message = f"{domain} GPUs are not several whole nodes of {compute.gpus}"
        yield ("compute", "nvlink_domain"), message, "GPUs of the whole domain, over all its nodes: 72 in an NVL72"
    facts = read_hardware().links.get(link)
    if compute.measured_gb_s and (facts is None or compute.measured_gb_s > ABOVE * facts.gb_s):
        what = f"more than the {facts.gb_s:g} GB/s of {link}" if facts else "given, while interconnect is none"
        fix = "busbw of all_gather_perf, of one GPU in one direction, in GB/s" if facts else "leave it out"
        yield ("compute", "measured_gb_s"), f"{compute.measured_gb_s:g}: {what}" if facts else what, fix


def _check_partition(groups: Sequence[Sequence[int]], gpus: int) -> Iterator[Found]:
    key = ("compute", "numa_gpus")
    flat = [gpu for group in groups for gpu in group]
    for gpu in sorted(set(flat)):
        if flat.count(gpu) > 1:
            yield key, f"GPU {gpu} appears twice", "each GPU has one NUMA node"
        if gpu >= gpus:
            yield key, f"there is no GPU {gpu}: {gpus} are counted from 0", None
    if missing := sorted(set(range(gpus)) - set(flat)):
        text = f"GPU{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        yield key, f"{text} missing: of each GPU the NUMA node", "nvidia-smi topo -m shows it"


def _check_lists(lists: Sequence[str], threads: int | None) -> Iterator[Found]:
    key, fix = ("compute", "numa_cpus"), "lscpu shows the lists"
    seen: dict[int, int] = {}
    readable = True
    for index, text in enumerate(lists):
        try:
            cpus = parse_cpu_list(text)
        except ValueError as error:
            yield (*key, str(index)), str(error), fix
            readable = False
            continue
        if not cpus:
            yield (*key, str(index)), "empty", fix
        if twice := sorted(cpu for cpu in cpus if seen.setdefault(cpu, index) != index):
            yield (*key, str(index)), f"CPU {twice[0]} is also of NUMA node {seen[twice[0]]}", fix
    if lists and readable and threads and len(seen) != threads:
        yield key, f"{len(seen)} CPUs in all, but threads is {threads}", "every CPU belongs to one NUMA node"


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


# --- the storage section: what would fail when it is mounted ------------------------------------------------------------


_SYSTEM = re.compile(r"/(bin|boot|dev|etc|lib|lib64|proc|root|run|sbin|sys|tmp|usr|var)?")
"""A file system that is mounted there hides what a machine needs to run."""
_KERNEL = re.compile(r"/(dev|proc|run|sys)(/.*)?")
"""Nothing that is made there is there after the next boot."""


def check_storage(storage: Mapping[str, Any], hosts: Sequence[Host | None]) -> Iterator[Found]:
    """Everything that is wrong with bricks, pool and folders; a part that could not be read is None."""
    listed = storage.get("bricks", [])
    parsed = [parse_partial(Brick, item) for item in listed] if isinstance(listed, list) else []
    bricks = [(("storage", "bricks", str(index)), brick) for index, (brick, _) in enumerate(parsed) if brick]
    complete = isinstance(listed, list) and all(good for _, good in parsed)
    names = {host.name: host for host in hosts if host and host.name}
    for path, brick in bricks:
        host = names.get(brick.node)
        if host is None and all(host and host.name for host in hosts):
            yield (*path, "node"), f"there is no machine {brick.node}", did_you_mean(str(brick.node), names)
        elif host is not None and host.roles is not None and "nfs" not in host.roles:
            yield (*path, "node"), f"{brick.node} has a brick but not the role nfs", "add nfs to its roles"
        root = storage.get("root") if host and "compute" in (host.roles or ()) else None  # only compute nodes are alike
        yield from _check_brick(path, brick, root.get("device") if isinstance(root, dict) else None)
    yield from _clashes(bricks)
    owners = {brick.node for _, brick in bricks}
    for index, host in enumerate(hosts):
        if complete and host and "nfs" in (host.roles or ()) and host.name not in owners:
            message = f"{host.name} has the role nfs but no brick"
            yield ("nodes", str(index), "roles"), message, "add it to storage.bricks, or take the role away"
    pool, _ = parse_partial(Pool, storage.get("pool"))
    if pool and pool.mount:
        yield from _check_pool(pool, bricks, complete)
    mounts = [brick.mount for _, brick in bricks if brick.mount] + ([pool.mount] if pool and pool.mount else [])
    yield from _check_folders(storage, mounts, complete)


def _check_brick(path: KeyPath, brick: Brick, root: str | None) -> Iterator[Found]:
    """What one brick alone says. ``root``: the device that its machine boots from; None: unknown."""
    for key, value in (("mount", brick.mount), ("path", brick.path)):
        if value and _is_system(value):
            fix = "mount it elsewhere" if key == "mount" else "a folder of its own"
            yield (*path, key), f"{value} is the system's own", fix
    if brick.mount and brick.path and _nested(brick.mount, brick.path):
        message = f"{brick.path} and {brick.mount}, where it is seen, are inside one another"
        yield (*path, "mount"), message, "the same folder, or one beside it"
    if brick.device and not brick.device.startswith("/dev/"):
        yield (*path, "device"), f"{brick.device} is not a device", "write it as /dev/disk/by-id/...; lsblk shows them"
    if brick.device and brick.device == root:
        yield (*path, "device"), f"{brick.device} is storage.root.device, which the machine boots from", "the brick's own disk"


def _is_system(path: str) -> bool:
    return bool(_SYSTEM.fullmatch(path) or _KERNEL.fullmatch(path))


_ONCE = {
    "mount": "two file systems cannot be mounted there",
    "path": "one folder of one machine",
    "device": "its space would count twice",
}
"""Keys of which two bricks cannot have the same value, or one inside of the other, and why."""


def _clashes(bricks: Sequence[tuple[KeyPath, Brick]]) -> Iterator[Found]:
    """Bricks at one place, and one that is seen, on the machine of another one, where that has its own exported folder."""
    for number, (path, brick) in enumerate(bricks):
        for before, (_, other) in enumerate(bricks):
            for key, why in _ONCE.items() if before < number else ():
                mine, theirs = getattr(brick, key), getattr(other, key)
                if not (mine and theirs) or (key != "mount" and other.node != brick.node):
                    continue
                if mine == theirs:
                    yield (*path, key), f"{mine} is also the {key} of another brick: {why}", "give each its own"
                elif key != "device" and _nested(mine, theirs):
                    yield (*path, key), f"{mine} and {theirs} of another brick are inside one another", "give each its own"
            mine, theirs = brick.mount, other.path
            if before != number and mine and theirs and (mine == theirs or _nested(mine, theirs)):
                what = "is" if mine == theirs else f"lies in, or around, {theirs},"
                message = f"{mine} {what} the exported folder of another brick, on {other.node}"
                yield (*path, "mount"), message, "see each brick at a place of its own"


def _inside(inner: str, outer: str) -> bool:
    return inner != outer and lies_below(inner, outer)


def _nested(one: str, other: str) -> bool:
    return _inside(one, other) or _inside(other, one)


def _check_pool(pool: Pool, bricks: Sequence[tuple[KeyPath, Brick]], complete: bool) -> Iterator[Found]:
    path = ("storage", "pool", "mount")
    if not bricks and complete:
        yield ("storage", "pool"), "a pool without bricks", "name them in storage.bricks"
    if _is_system(pool.mount):
        yield path, f"{pool.mount} is the system's own", "mount it elsewhere"
    for _, brick in bricks:
        for value in filter(None, (brick.mount, brick.path)):
            if pool.mount == value or _nested(pool.mount, value):
                what = "is also" if pool.mount == value else "and"
                tail = f"a folder of the brick of {brick.node}" if pool.mount == value else f"{value} are inside one another"
                yield path, f"{pool.mount} {what} {tail}", "a pool has a mount point of its own"
                break
    if pool.min_free_gb and complete and bricks and pool.min_free_gb >= 1000 * min(brick.tb for _, brick in bricks):
        yield ("storage", "pool", "min_free_gb"), "more than the smallest brick holds: no file would go there", None


def _check_folders(storage: Mapping[str, Any], mounts: Sequence[str], complete: bool) -> Iterator[Found]:
    shared, scratch = storage.get("shared"), storage.get("scratch", "")
    staging = storage["staging"].get("path") if isinstance(storage.get("staging"), dict) else None
    if complete and mounts and isinstance(shared, str) and not any(_inside(shared, m) or shared == m for m in mounts):
        message = f"{shared} is on none of the mounts {', '.join(mounts)}: other machines do not see it"
        yield ("storage", "shared"), message, "choose a folder below one of them"
    if isinstance(staging, str) and _SYSTEM.fullmatch(staging):
        yield ("storage", "staging", "path"), f"{staging} is the system's own", "a folder of its own on a local disk"
    for key, folder in (("scratch", scratch), ("staging", staging)):
        for mount in mounts:
            if key == "staging" and isinstance(folder, str) and _inside(mount, folder):
                yield ("storage", key, "path"), f"{mount} lies in {folder}, where copies make room for others", "one beside it"
                break
            if isinstance(folder, str) and (folder == mount or _inside(folder, mount)):
                at = ("storage", key) if key == "scratch" else ("storage", key, "path")
                yield at, f"{folder} is on {mount}, which all machines share", "a folder of a local disk"
                break
