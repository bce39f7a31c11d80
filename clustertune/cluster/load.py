"""The cluster to work on: a file of ``ops/clusters``, a file anywhere, or this machine as it is found by looking."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

from clustertune.cluster.cluster_file import read_cluster
from clustertune.cluster.hardware import HARDWARE, near_gpus, read_hardware
from clustertune.cluster.local import LocalMachine, collect, judge
from clustertune.cluster.schema import LOCAL, Cluster, Compute, Host, Network, expand_nodes, same_host
from clustertune.errors import Problem, UserError
from clustertune.recipe.layers import COMMAND_LINE, did_you_mean, read_yaml
from clustertune.recipe.sections import NAME
from clustertune.tree import ROOT

CLUSTERS = ROOT / "ops" / "clusters"
"""The cluster files that come with the project, and where an operator of a checkout puts the own one."""
OWN_CLUSTERS = Path("ops", "clusters")
"""In the working folder: one's own, which go before the project's of the same name."""


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
