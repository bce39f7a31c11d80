"""Which cluster: a file of ``ops/clusters``, a file anywhere, or this machine as it is found by looking."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

from clustertune.config.cluster_checks import read_cluster
from clustertune.config.cluster_schema import Cluster, Compute, Host, Network, expand_nodes, same_host
from clustertune.config.hardware import HARDWARE, read_hardware
from clustertune.config.load import COMMAND_LINE, did_you_mean
from clustertune.config.local_cluster import LocalMachine, collect, judge
from clustertune.config.schema import NAME
from clustertune.config.yamlfile import read_yaml
from clustertune.errors import Problem, UserError
from clustertune.tree import ROOT

CLUSTERS = ROOT / "ops" / "clusters"
"""The cluster files that come with the project, and where an operator puts the own one."""
LOCAL = "local"
"""The name of whatever is found by looking."""


def known_clusters(folder: Path | None = None) -> dict[str, Path]:
    """The cluster files of ``ops/clusters`` by name."""
    return {path.stem: path for path in sorted((folder or CLUSTERS).glob("*.yaml")) if re.fullmatch(NAME, path.stem)}


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
    raise _refused(f"there is no cluster {name_or_path!r}", fix)


def of_gpus(text: str) -> Cluster:
    """The cluster of ``NODESxGPUSxNAME``, as ``2x8xh100-sxm``: nodes, GPUs of one, a GPU of ops/hardware.yaml.

    What is not given of its nodes is that file's ``nodes``; ``notes`` name it. Raises UserError.
    """
    known, found = read_hardware().gpus, re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,2})x(.+)", text)
    if found is None or found[3] not in known:
        what = "is not NODESxGPUSxNAME" if found is None else f"there are no figures of {found[3]}"
        of_that = [name for name in known if found and name.startswith(found[3].lower())]
        near = f"there are {', '.join(of_that)}" if of_that else found and did_you_mean(found[3], known)
        fix = f"write 2x8xh100-sxm; {near or 'known: ' + ', '.join(known)}"
        raise UserError(Problem(f"{text[:60]!r}: {what}", file=COMMAND_LINE, key="--gpus", fix=fix))
    nodes, each, name = int(found[1]), int(found[2]), found[3]
    gpu = known[name]
    kind = f"nvlink{gpu.nvlink}" if gpu.nvlink else "pcie"
    around = read_hardware().nodes[kind]  # type: ignore[index]
    link = kind if gpu.nvlink else gpu.host_link
    note = (
        f"beside the GPUs of {text} all is assumed ({HARDWARE.name}, nodes.{kind}): {each} x {around.gbit:g} Gbit/s "
        f"{around.network} and {each * around.memory_gb:g} GiB of RAM; a cluster file states what there is"
    )
    return Cluster(
        name=text,
        nodes=tuple(Host(name=f"node{n}", address=f"node{n}", roles=("compute",)) for n in range(1, nodes + 1)),
        compute=Compute(
            gpus=each, gpu=name, interconnect=link if each > 1 else None, cores=each * around.cores,
            threads=each * around.cores, memory_gb=each * around.memory_gb,
        ),
        network=Network(kind=around.network, gbit=around.gbit, ports=min(each, 64)),
        source=f"--gpus {text}",
        notes=(note,),
    )  # fmt: skip


def _refused(text: str, fix: str | None = None) -> UserError:
    return UserError(Problem(text, file=COMMAND_LINE, key="--cluster", fix=fix))


def _read(path: Path) -> Cluster:
    ours = path.parent == CLUSTERS
    shown = f"ops/clusters/{path.name}" if ours else str(path)
    return read_cluster(read_yaml(path, shown), name=path.stem if ours else None)


def argument(name_or_path: str) -> str:
    """``--cluster`` as a job gets it, which starts in another folder: a path from the root, a name as it is."""
    is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    return str(Path(name_or_path).absolute()) if is_path else name_or_path


def named(cluster: Cluster) -> str:
    """How a job finds the same cluster again: by the name of its file, or by looking as was done here."""
    return cluster.name if cluster.source.startswith("ops/clusters/") else LOCAL


def of_this_machine() -> Cluster | None:
    """The file of ``ops/clusters`` that names this machine; None: none does, or several. Raises UserError."""
    found = [path for path in known_clusters().values() if same_host(socket.gethostname(), _names_in(path))]
    return _read(found[0]) if len(found) == 1 else None


def _find(look: Callable[[], LocalMachine]) -> Cluster:
    """The file that is of this place; ``local`` where there is none."""
    host = socket.gethostname()
    names = {path: set(_names_in(path)) for path in known_clusters().values()}
    found = [path for path, names_given in names.items() if same_host(host, names_given)]
    if not found:
        seen = look()
        nodes = set(re.findall(r"^NodeName=(\S+)", seen.nodes, re.MULTILINE))
        found = [path for path, names_given in names.items() if nodes and all(same_host(node, names_given) for node in nodes)]
        if not found:
            return judge(seen)
    if len(found) > 1:
        text = f"{' and '.join(path.stem for path in found)} both name this machine or its nodes"
        raise UserError(Problem(text, file="ops/clusters", fix="say which: --cluster NAME"))
    return _read(found[0])


def _names_in(path: Path) -> list[str]:
    """The machines of a file, as far as it can be read: whether it is right matters only if it is chosen."""
    try:
        nodes, _ = expand_nodes(read_yaml(path, path.name).data.get("nodes"))
    except UserError:
        return []
    return [str(node["name"]) for node in nodes if isinstance(node, dict) and isinstance(node.get("name"), str)]
