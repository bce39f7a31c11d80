"""The schema of a cluster file, which describes the machines. All that launchers and administrators need is derived from it.

What a person writes is checked by :mod:`clustertune.cluster.cluster_file`, far beyond what the types say; a cluster that was
detected may lack facts that nothing on the machine reports. :func:`clustertune.cluster.load.load_cluster` is
the way in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from clustertune.errors import Problem, UserError
from clustertune.recipe.sections import Count, Number, Plain, Positive, Section, form, within

LOCAL = "local"
"""The name of the cluster that is this machine, found by looking."""
ROLES = ("login", "compute", "nfs", "slurmctld")
INTERCONNECTS = ("pcie3", "pcie4", "pcie5", "pcie6", "nvlink2", "nvlink3", "nvlink4", "nvlink5", "none")
"""``pcieN``: PCI Express of that generation only; ``nvlinkN``: NVLink of that generation between all GPUs of a node."""
NETWORKS = ("ethernet", "infiniband", "roce", "omnipath", "slingshot", "efa", "none", "unknown")
"""``none``: a single machine. ``unknown``: not given, and not found by looking; a file may not hold it."""
CREATE_POLICIES = ("mfs", "eplfs", "epmfs", "ff", "lfs", "lus", "rand", "pfrd")
"""mergerfs' policies for where a new file goes (https://trapexit.github.io/mergerfs/config/functions_categories_and_policies/)."""

HOST = r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?"
PATH = r"/|(/\.?[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*)+"
"""An absolute path of plain characters, without ``..``: it becomes a field of fstab and exports, a part of a mount unit's name,
and an argument."""
FOLDER = r"(/|~/|\$([A-Za-z_]\w*|\{[A-Za-z_]\w*\})(/|$))[^\x00-\x1f\x7f,:\\\\]*"
"""A folder of a user: absolute, or below ``~`` or a variable such as ``$SCRATCH``. ``,`` and ``:`` part the words of a bind,
and Slurm takes a backslash in the path of a log for an order."""
FOLDERS = {"caches": "hf_cache", "models": "models", "runs": "checkpoints", "logs": "logs"}
"""What ``clustertune setup storage`` makes below ``storage.shared``, on every brick: the pool then finds each where it wants to
write. The first three are also where jobs keep things, where the file says nothing else."""
CONSTRAINT = r"[A-Za-z0-9_\[(][A-Za-z0-9_.:&|*,()\[\]-]{0,255}"
"""sbatch(1), --constraint, without blanks and quotes."""
MODULE = r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,127}"
"""Of environment modules and Lmod. It becomes a word of a shell's line."""
DOCKER = r"docker://([A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?/)?[a-z0-9][a-z0-9._/-]*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?@sha256:[0-9a-f]{64}"
"""An image of a registry. By its digest: what a tag means changes while a run is restarted."""
_OF_APPTAINER = ("--userns", "--no-privs", "--nvccli", "--rocm", "--unsquash")
CONTAINER_OPTIONS = {
    "apptainer": _OF_APPTAINER,
    "singularity": tuple(option for option in _OF_APPTAINER if option != "--unsquash"),
    "pyxis": ("--container-remap-root", "--container-writable", "--container-readonly", "--container-entrypoint"),
}
"""What ``container.options`` may hold: how a container is started, and its devices and its root. Whatever shows it more of the
machine is not among them."""
INTERFACE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}"
"""Linux allows 15 characters. NCCL gives ``^ = : ,`` a meaning of their own."""


def _text(value: Any) -> Any:
    """YAML reads 4.2 as a number; a version is a name."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_PLAIN_PATH = "an absolute path of letters, digits and . _ @ + -"
HostName = Annotated[str, form(HOST, "a name of letters, digits, '.', '_' and '-'")]
AbsolutePath = Annotated[
    str, Field(max_length=1024), form(PATH, f"{_PLAIN_PATH} (it becomes a field of fstab and an argument)")
]
Image = Annotated[
    str, Field(max_length=1024), form(rf"{PATH}|{DOCKER}", f"{_PLAIN_PATH}, nor docker://NAME@sha256:DIGEST (a tag moves)")
]
StoragePath = Annotated[
    str, Field(max_length=1024), form(FOLDER, "an absolute path, nor one below ~ or a variable such as $SCRATCH")
]
Account = Annotated[str, form(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}", "a name of letters, digits, '.', '_', '@' and '-'")]
Quantity = Annotated[Number, Field(gt=0), within(1e-6, 1e9)]
"""GB, TB, GiB, Gbit/s, hours: no machine has less or more."""
Version = Annotated[str, BeforeValidator(_text), form(r"[0-9A-Za-z][0-9A-Za-z.+~-]{0,31}", "a version, as 23.11.4")]
Adapter = Annotated[str, form(r"[A-Za-z0-9_]{1,32}(:[0-9]{1,3})?", "an RDMA adapter, as mlx5_0 or mlx5_0:1")]
Module = Annotated[str, form(MODULE, "the name of an environment module, as cuda/12.8")]
Words = Annotated[str, BeforeValidator(_text)]


class Host(Section):
    """One machine."""

    name: HostName
    """What ``hostname`` prints there, and what Slurm calls it."""
    address: Annotated[str, Field(min_length=1, max_length=253)]
    """The address or name that the other machines reach it by."""
    roles: Annotated[tuple[Literal[ROLES], ...], Field(min_length=1)]  # type: ignore[valid-type]
    """``login``: jobs are submitted there; ``compute``: runs jobs; ``nfs``: exports bricks; ``slurmctld``: controls Slurm."""


class Compute(Section):
    """One compute node; all are equal."""

    gpus: Annotated[Count, Field(le=1_000)]
    """GPUs of one node; 0: a CPU cluster."""
    gpu: Plain | None = None
    """Model of the GPUs: a name in ops/hardware.yaml."""
    interconnect: Literal[INTERCONNECTS] | None = None  # type: ignore[valid-type]
    """What connects the GPUs of one node."""
    nvlink_domain: Annotated[Positive, Field(le=10_000)] | None = None
    """GPUs that one NVLink domain joins, over several nodes (NVL72: 72); None: those of one node."""
    mtbf_hours: Quantity | None = None
    """Mean hours between two failures of one node that end its job; None: not counted, and a published figure is taken."""
    measured_gb_s: Quantity | None = None
    """Bus bandwidth of an NCCL all-gather over the GPUs of a node (nccl-tests' busbw), GB/s; None: not measured."""
    sockets: Positive = 1
    """CPU packages of one node."""
    cores: Positive
    """Physical cores of one node, over all sockets."""
    threads: Positive
    """Hardware threads of one node (Slurm's CPUs), over all cores."""
    memory_gb: Quantity
    """RAM that jobs may use, GiB as Slurm counts them (``--mem=1G`` is 1024 MiB)."""
    numa_gpus: tuple[tuple[Count, ...], ...] = ()
    """GPU indices (as ``nvidia-smi`` counts) of each NUMA node, for the Cores of gres.conf."""
    numa_cpus: tuple[str, ...] = ()
    """CPU list of each NUMA node in the kernel's form (``0-63,128-191``), for the Cores of gres.conf."""


class Network(Section):
    """The network between the compute nodes."""

    interface: Annotated[str, form(INTERFACE, "the name of a network interface, as bond0")] | None = None
    """Interface for all traffic between ranks, the same name on every node; None: the one that the route takes."""
    kind: Literal[NETWORKS]  # type: ignore[valid-type]
    gbit: Quantity | None = None
    """Nominal speed of one port of a node, Gbit/s; a bond counts as one port of its whole speed."""
    ports: Annotated[Positive, Field(le=64)] = 1
    """Ports of a node that carry the traffic between ranks."""
    measured_gb_s: Quantity | None = None
    """Bus bandwidth of an NCCL all-gather over several nodes, GB/s: what a node's ports carry together in one direction."""
    subnet: Annotated[str, Field(max_length=64)] | None = None
    """Where the nodes' addresses lie, as 10.0.0.0/24."""
    hca: Annotated[tuple[Adapter, ...], Field(max_length=32)] = ()
    """RDMA adapters (and port) to use, as mlx5_0:1; empty: all active ones."""
    internet: Literal["all", "login", "none"] = "all"
    """Which machines reach the Hub: all of them, only the login nodes, or none. Jobs ask the Hub only with ``all``."""
    environment: dict[str, Words] = Field(default_factory=dict)
    """Variables of NCCL, gloo, UCX and libfabric for every rank, instead of those that are derived from the keys above.
    :mod:`clustertune.cluster.network_rules` says which."""


class Brick(Section):
    """One file system of one node that all hosts mount over NFS."""

    node: HostName
    """The node that has the disk."""
    path: AbsolutePath
    """The exported folder on that node."""
    mount: AbsolutePath
    """Folder in which every host sees the brick; a bind mount on the node that has the disk."""
    filesystem: Literal["xfs", "ext4", "zfs", "btrfs"]
    tb: Quantity
    """Size, TB."""
    device: AbsolutePath | None = None
    """The block device; None: the file system is mounted by other means, and only its export is ours."""


class Pool(Section):
    """All bricks as one folder."""

    mount: AbsolutePath
    kind: Literal["mergerfs"] = "mergerfs"
    create: Literal[CREATE_POLICIES] = "mfs"  # type: ignore[valid-type]
    """Which brick a new file goes to: ``mfs`` is the one with most free space."""
    min_free_gb: Quantity | None = None
    """A brick with less free space takes no new file, GB: more than the largest file that is written."""


class RootDisk(Section):
    """The disk that each compute node boots from."""

    device: AbsolutePath | None = None
    gb: Quantity
    """Size, GB."""


class Staging(Section):
    """Where models and data are copied to, on a disk of each node, before ranks read them."""

    path: AbsolutePath
    gb: Quantity
    """Space that the copies may take, GB; the least recently used copies are removed to make room."""


class Storage(Section):
    """Where data lies."""

    bricks: tuple[Brick, ...] = ()
    nfs_version: Annotated[Literal["3", "4", "4.1", "4.2"], BeforeValidator(_text)] = "4.2"
    pool: Pool | None = None
    shared: AbsolutePath | None = None
    """Folder that all hosts see, for runs, models and caches; None: unknown."""
    caches: StoragePath | None = None
    """Folder for ``HF_HOME`` of every stage and rank; ``~``, ``$USER`` and variables of the shell that submits are put in.
    None: ``hf_cache/$USER`` below ``shared`` where that is on our bricks, else as the libraries have it (``~/.cache``)."""
    models: StoragePath | None = None
    """Folder of what ``clustertune stage RECIPE`` collected, a folder of the recipe's name for each; jobs look there first.
    None: ``models`` below ``shared`` in the same way, else nowhere."""
    runs: StoragePath | None = None
    """Folder below which runs lie. None: ``checkpoints/$USER`` below ``shared`` in the same way, else ``runs`` here."""
    group: Plain | None = None
    """Unix group whose members share what is in it; None: everybody may write, as in /tmp."""
    group_reads: bool = False
    """Whether the group of a run's folder may read the run (umask 027). False: its user alone (umask 077)."""
    scratch: AbsolutePath = "/tmp"  # noqa: S108 - what is put there is created with mode 0700
    """Folder on a disk of the node itself, for compiler caches."""
    staging: Staging | None = None
    """None: ranks read models and data from where they are."""
    root: RootDisk | None = None
    read_gb_s: Quantity | None = None
    """What all nodes together read from ``shared``, GB/s; None: not measured."""
    write_gb_s: Quantity | None = None
    """The same for writing."""

    def folder(self, what: str) -> str | None:
        """The folder for ``caches``, ``models`` or ``runs`` as the file says it, else the one that ``setup storage`` makes.

        Caches and runs are of each user: jobs write with umask 077, and two users of one recipe would share a run's name.
        """
        stated: str | None = getattr(self, what)
        if stated is not None or self.shared is None or not self.bricks:
            return stated
        return f"{self.shared.rstrip('/')}/{FOLDERS[what]}" + ("" if what == "models" else "/$USER")


class SlurmFacts(Section):
    """How jobs are submitted. The controller is the node with the role ``slurmctld``; none has it where the site's own Slurm is
    used as it is."""

    partition: Plain
    gres: Annotated[str, form(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "a GRES type name, as rtx_pro_6000")] | None = None
    """Type name of the GPUs, as in ``gpu:TYPE:8``; None: they have none. The count is ``compute.gpus``."""
    account: Account | None = None
    """Account that is charged (``--account``); SBATCH_ACCOUNT of the submitting shell wins. The same for the next three."""
    qos: Account | None = None
    constraint: Annotated[str, form(CONSTRAINT, "what sbatch takes as --constraint, without blanks and quotes")] | None = None
    """Features of the nodes (``--constraint``), as ``h100`` or ``v100-32g``."""
    reservation: Account | None = None
    modules: Annotated[tuple[Module, ...], Field(max_length=32)] = ()
    """Environment modules that a job loads on its first node before anything else (``module load``), in this order; what they
    set reaches the other nodes too."""
    accounting: bool = False
    """Whether slurmdbd runs and ``sacct`` answers."""
    max_time: Annotated[
        str, form(r"UNLIMITED|(\d{1,4}-)?\d{1,3}(:\d{2}){0,2}", "UNLIMITED or a Slurm time such as 48:00:00 or 2-00:00:00")
    ] = "UNLIMITED"
    """Longest ``--time`` of the partition, in Slurm's form."""
    version: Version | None = None

    def site_options(self) -> tuple[str, ...]:
        """The options of ``sbatch`` by which a site charges and places jobs."""
        named = {"account": self.account, "qos": self.qos, "constraint": self.constraint, "reservation": self.reservation}
        return tuple(f"--{name}={value}" for name, value in named.items() if value)


class Container(Section):
    """What the ranks run in."""

    runtime: Literal["none", "apptainer", "singularity", "pyxis"] = "none"
    """``none``: the Python environment of the checkout, which all nodes see. ``pyxis``: enroot through srun's plugin."""
    image: Image | None = None
    """A file that all nodes see (``.sif``; with pyxis ``.sqsh``), or with pyxis ``docker://NAME@sha256:DIGEST``."""
    megatron: Image | None = None
    """The same for the ranks of Megatron recipes: NVIDIA's image of ``containers/megatron.def``."""
    vllm: Annotated[str, Field(max_length=1024, pattern=rf"^({PATH}|{DOCKER})$")] | None = None
    """The same for vLLM's servers, which evaluations ask; with ``none`` vLLM's program."""
    binds: tuple[Annotated[str, Field(max_length=2048)], ...] = ()
    """Folders that the container sees beside the run's own: ``/path``, ``/path:/inside`` or ``/path:/inside:ro``."""
    packages: Annotated[tuple[Plain, ...], Field(max_length=200)] = ()
    """Python packages that an ``image`` of your own has beside those of the locks in ``containers/``."""
    program: AbsolutePath | None = None
    """The runtime's program on every node; None: it is on the PATH that Slurm gives a job."""
    options: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """Further options of the runtime, of :data:`CONTAINER_OPTIONS`."""

    @property
    def command(self) -> str:
        """What starts it, of ``apptainer`` and ``singularity``."""
        return self.program or self.runtime


class NcclProlog(Section):
    """The short nccl-check that goes before every training job."""

    seconds: Annotated[Positive, Field(ge=10, le=3600)] = 120
    """Its time limit; what is not measured by then is left out."""
    on_fail: Literal["warn", "stop"] = "warn"
    """What a failed verdict does to the job."""


class Doctor(Section):
    """What ``clustertune doctor`` leaves out on this cluster, and whether jobs begin with it."""

    ignore: Annotated[tuple[Plain, ...], Field(max_length=200)] = ()
    """Ids of rules whose findings neither warn nor stop a job. An id that is not a rule is an error."""
    preflight: bool = True
    """Whether each node of a training job is looked at before its ranks start."""


class Monitor(Section):
    """What follows a run while it trains."""

    co2_kg_per_kwh: Quantity | None = None
    """CO2 of the site's electricity, kg per kWh; None: no CO2 is reported."""
    openmetrics: AbsolutePath | None = None
    """Folder of node_exporter's textfile collector, on the first node of a run; None: no metrics file."""


class ClusterFile(Section):
    """A cluster as a file says it."""

    name: Plain
    nodes: Annotated[tuple[Host, ...], Field(min_length=1, max_length=10_000)]
    compute: Compute
    network: Network
    storage: Storage = Storage()
    slurm: SlurmFacts | None = None
    """Absent: there is no Slurm."""
    container: Container = Container()
    nccl_check: NcclProlog | None = None
    """None: training jobs begin without one."""
    doctor: Doctor = Doctor()
    monitor: Monitor = Monitor()


class Cluster(ClusterFile):
    """A cluster, and how it is known."""

    source: str
    """The file, or what was looked at."""
    notes: tuple[str, ...] = ()
    """What a person should know about how it was found; one sentence each."""
    assumes_vllm: Annotated[bool, Field(exclude=True)] = False
    """Evaluations are planned with vLLM although nothing names it: of machines that no file describes."""

    @property
    def compute_nodes(self) -> tuple[Host, ...]:
        """The machines that run jobs, in the order of the file."""
        return self.with_role("compute")

    @property
    def controller(self) -> Host | None:
        """The machine of slurmctld; None without Slurm, and where the site's own is used as it is."""
        return next(iter(self.with_role("slurmctld")), None)

    def with_role(self, role: str) -> tuple[Host, ...]:
        """The machines that have a role."""
        return tuple(host for host in self.nodes if role in host.roles)

    def host(self, name: str) -> Host | None:
        """The machine of a host name, with or without its domain; None where there is none."""
        known = same_host(name, (host.name for host in self.nodes))
        return next((host for host in self.nodes if host.name == known), None)

    def gres(self, count: int) -> str:
        """Slurm's form for ``count`` GPUs of a node: ``gpu:rtx_pro_6000:8``."""
        return ":".join(part for part in ("gpu", self.slurm.gres if self.slurm else None, str(count)) if part)


def same_host(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` names that means the machine ``name``: the whole name, else alike but for a missing domain."""
    names, label = list(known), name.lower().partition(".")[0]
    if exact := [other for other in names if other.lower() == name.lower()]:
        return exact[0]
    alike = [other for other in names if ("." in other) != ("." in name) and other.lower().partition(".")[0] == label]
    return alike[0] if len(alike) == 1 else None


# --- lists of hosts, as Slurm writes them ------------------------------------------------------------------------------------


def expand_hosts(expression: str) -> list[str]:
    """``node[1-3,07],b-[01-02]`` as names, in order. Raises UserError for what is not a node list.

    Digits keep their width: ``[08-10]`` is 08, 09, 10. Several brackets in one name multiply, as in Slurm. Our own for where
    ``scontrol`` is not available (an image, a compute node without the client); python-hostlist is under the GPL.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[\]]*\])", expression):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if not part or any("[" in piece or "]" in piece for piece in pieces[::2]):
            raise UserError(f"{expression[:200]!r} is not a list of nodes", fix="names with ranges, as gpu[01-32]")
        expanded = [pieces[0]]
        for inside, after in zip(pieces[1::2], pieces[2::2], strict=True):
            expanded = [name + number + after for name in expanded for number in _numbers(inside, expression)]
        names += expanded
    return names


def _numbers(inside: str, expression: str) -> list[str]:
    numbers = []
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or (match[2] and not int(match[1]) <= int(match[2]) < int(match[1]) + 65_536):
            raise UserError(Problem(f"{expression[:200]!r} is not a list of nodes", fix="names with ranges, as gpu[01-32]"))
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def shorten_hosts(names: Sequence[str]) -> list[tuple[str, int]]:
    """Names as few lists, ``gpu[01-32]``, each with how many it means; only neighbours that count up are joined."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _following(runs[-1][-1]) == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [(_as_list(run[0], run[-1]) if len(run) > 1 else run[0], len(run)) for run in runs]


_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


def _following(name: str) -> str | None:
    """The name with the next number, of as many digits; None where there is none."""
    match = _NUMBERED.fullmatch(name)
    number = f"{int(match[2]) + 1:0{len(match[2])}d}" if match else ""
    return f"{match[1]}{number}{match[3]}" if match and len(number) == len(match[2]) else None


def _as_list(first: str, last: str) -> str:
    one, other = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    assert one is not None and other is not None
    return f"{one[1]}[{one[2]}-{other[2]}]{one[3]}"


def expand_nodes(nodes: object) -> tuple[list[Any], list[int]]:
    """The machines of ``nodes``, an entry with a list of names as one for each, and for each the entry that it is from.

    Such an entry has an address for each name, or none: then the name. Raises UserError for what is not a list of names.
    """
    machines: list[Any] = []
    origin: list[int] = []
    for index, node in enumerate(nodes if isinstance(nodes, list) else ()):
        made = [node]
        if isinstance(node, dict) and isinstance(name := node.get("name"), str) and "[" in name:
            names, stated = expand_hosts(name), node.get("address")
            addresses = expand_hosts(stated) if isinstance(stated, str) else names
            if len(addresses) != len(names):
                text = f"{len(addresses)} addresses for the {len(names)} names of {name}"
                raise UserError(Problem(text, key=f"nodes.{index}.address", fix="as many, or leave address out"))
            made = [{**node, "name": one, "address": address} for one, address in zip(names, addresses, strict=True)]
        machines += made
        origin += [index] * len(made)
    return machines, origin
