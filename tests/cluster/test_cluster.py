"""Cluster files: what is read, and what is refused in one screen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertune.cluster import load as module
from clustertune.cluster.cluster_file import read_cluster
from clustertune.cluster.hardware import price
from clustertune.cluster.load import load_cluster
from clustertune.cluster.local import LocalMachine
from clustertune.cluster.schema import Cluster
from clustertune.errors import Problem, UserError
from clustertune.recipe.layers import parse_yaml, read_yaml
from tests.command import run
from tests.recipe.conftest import readable

REFERENCE = Path("ops", "clusters", "rno-rtxpro6000.yaml")


@pytest.fixture(scope="module")
def body(repo: Path) -> dict[str, Any]:
    """The reference file as plain values."""
    return read_yaml(repo / REFERENCE, "reference").data


def problems_of(values: dict[str, Any]) -> list[Problem]:
    """What is wrong with a file of these values, each in readable form."""
    return readable(read_cluster, parse_yaml(yaml.safe_dump(values, sort_keys=False), "c.yaml"))


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit: the value at a path as ``nodes.0.name``; ``...`` removes it."""

    def edit(values: dict[str, Any]) -> None:
        *front, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in front:
            values = values[part]
        if value is ...:
            del values[last]
        else:
            values[last] = value

    return edit


# --- the reference -----------------------------------------------------------------------------------------------------


# --- refusals ----------------------------------------------------------------------------------------------------------

SECOND = {"node": "rno-it-gpu0007-1", "path": "/c2", "mount": "/c", "filesystem": "xfs", "tb": 14,
          "device": "/dev/mapper/vg_nvme-lv_scratch"}  # fmt: skip
FOUR = [[0, 1], [2, 3], [4, 5], [6, 7]]
LOW = "0-63,128-191"
REFUSALS: dict[str, list[tuple[Any, ...]]] = {
    "name": [(..., "missing"), ("two words", "is not a name"), ("local", "is reserved")],
    "nodes": [(..., "missing"), ([], "empty"), ({"a": 1}, "not a list")],
    "nodes.0": [("gpu1", "not a section")],
    "nodes.0.name": [
        ("rno-it-gpu0007-1", "also the name of machine 1"), ("RNO-it-gpu0007-1", "also the name"), ("gpu_1", "RFC 1123"),
        ("a" * 64 + ".example", "RFC 1123"), ("10.0.0.1", "an address, not a name"), ("a b; rm -rf", "is not a name"),
    ],
    "nodes.0.address": [
        ("10.21.133.35", "also the address of machine 1"), ("10.21.133.310", "neither an address nor a host name"),
        ("a b", "neither"), ("fe80::zz", "neither"), ("0.0.0.0", "not a machine's address"),  # noqa: S104
        ("239.1.1.1", "not a machine's address"), ("127.0.0.1", "every machine's own"),
        ("10.21.134.31", "outside network.subnet 10.21.133.0/24"), ("10.21.133.255", "the network's own"),
    ],
    "nodes.0.roles": [
        ([], "empty"), (["logni"], "did you mean login?", "roles[0]"), (["login", "login"], "appears twice"),
        (["login", "slurmctld"], "2 machines have the role slurmctld", "nodes"),
        (["nfs", "login"], "role nfs but no brick"), (["compute"], "no machine has the role login", "nodes"),
    ],
    "nodes.0.role": [("login", "did you mean roles?")],
    "slurm": [(..., "no section slurm", "nodes")],
    "compute": [(None, "empty")],
    "compute.gpus": [
        (..., "missing"), (-1, "greater than or equal to 0"), (True, "not a number"), (0, "while gpus is 0", "compute.gpu"),
        (0, "while compute.gpus is 0", "slurm.gres"), (4, "there is no GPU 4", "compute.numa_gpus"),
    ],
    "compute.gpu": [
        (..., "missing"), ("rtx-pro-6000-blackwel-server", "did you mean rtx-pro-6000-blackwell-server?"),
        ("a100", "a100-sxm-80 (80 GB), a100-sxm-40 (40 GB)"),
    ],
    "compute.interconnect": [
        (..., "missing"), ("pci5", "did you mean pcie5?"), ("none", "while a node has 8 GPUs"),
        ("ib", "network.kind: infiniband"), ("nvlink", "say the generation"),
    ],
    "compute.sockets": [
        (0, "greater than or equal to 1"), (3, "does not divide by 3 sockets", "compute.cores"),
        (4, "2 NUMA nodes, but 4 sockets", "compute.numa_gpus"), (4, "2 NUMA nodes, but 4 sockets", "compute.numa_cpus"),
    ],
    "compute.threads": [
        (200, "not a multiple of 128 cores"), (64, "not a multiple of 128 cores"), (2048, "16 threads per core"),
        (128, "256 CPUs in all, but threads is 128", "compute.numa_cpus"),
    ],
    "compute.memory_gb": [(0, "greater than 0"), ("3.9 TB", "number"), (float("inf"), "finite")],
    "compute.numa_gpus": [
        ([[0, 1, 2, 3], [4, 5, 6]], "GPU 7 missing"), ([[0, 1, 2, 3], [3, 4, 5, 6, 7]], "GPU 3 appears twice"),
        ([[0, 1, 2, 3], [4, 5, 6, 8]], "there is no GPU 8"), ([0, 1, 2, 3], "not a list", "compute.numa_gpus[0]"),
        (FOUR, "2 NUMA nodes, but numa_gpus has 4", "compute.numa_cpus"),
    ],
    "compute.numa_cpus": [
        ([LOW, "63-127,192-255"], "CPU 63 is also of NUMA node 0", "[1]"), ([LOW, "64-127"], "192 CPUs in all"),
        ([LOW, "127-64"], "backwards", "[1]"), (["0-255", ""], "empty", "[1]"),
    ],
    "network": [(..., "missing")],
    "network.kind": [
        ("ethernt", "did you mean ethernet?"), ("ib", "did you mean infiniband?"), ("NDR", "mean infiniband?"),
        ("unknown", "must say it"),
        ("none", "while 2 machines have the role compute"), ("none", "while kind is none", "network.gbit"),
    ],
    "network.interface": [(..., "missing"), ("bond0,eth1", "name of a network interface"), ("lo", "reaches no other machine")],
    "network.gbit": [(..., "missing"), (0, "greater than 0")],
    "network.subnet": [("10.21.133.0/33", "write it as"), ("10.21.133.7/24", "host bits")],
    "network.hca": [(["mlx5_0"], "while kind is ethernet"), (["mlx5_0;x"], "RDMA adapter", "network.hca[0]")],
    "network.environment": [
        (["NCCL_ALGO=Ring"], "not a section"), ({"NCCL_ALGO": True}, "put it in quotes", "NCCL_ALGO"),
        ({"NCCL_ALGO": None}, "string", "NCCL_ALGO"), ({"NCCL_ALGO": "$(id)"}, "invalid value", "NCCL_ALGO"),
        ({"NCCL_NET_PLUGIN": "http://x"}, "invalid value", "NCCL_NET_PLUGIN"),
        ({"NCCL_ALGO": 4, "LD_PRELOAD": "x.so"}, "no variable of", "LD_PRELOAD"),
        ({"nccl_algo": "Ring"}, "no variable of", "nccl_algo"), ({"FI_AUTH_TOKEN": "x"}, "a secret", "FI_AUTH_TOKEN"),
        ({"NCCL_COMM_ID": "10.0.0.1:7"}, "one of its own", "NCCL_COMM_ID"),
        ({f"NCCL_{n}": 1 for n in range(65)}, "64 at most"),
    ],
    "storage.bricks": [
        ([], "a pool without bricks", "storage.pool"), ([], "role nfs but no brick", "nodes[rno-it-gpu0007-1].roles"),
    ],
    "storage.bricks.0.node": [("rno-it-gpu0009-1", "there is no machine"), ("rno-it-gpu0006-1", "not the role nfs")],
    "storage.bricks.0.path": [
        ("data/shared", "absolute path"), ("/data/../etc", "absolute path"), ("/etc", "system's own"),
        ("/shared-b", "the exported folder of another brick", "storage.bricks[/shared-b].mount"),
        ("/shared-b/x", "lies in, or around, /shared-b/x", "storage.bricks[/shared-b].mount"),
        ("/shared/x", "where it is seen, are inside one another", "storage.bricks[/shared].mount"),
    ],
    "storage.bricks.0.mount": [
        ("/with space", "absolute path"), ("/a,b", "absolute path"), ("/shared-b", "also the mount of another brick"),
        ("/shared-b/x", "are inside one another"), ("/usr", "system's own"), ("/run/shared", "system's own"),
    ],
    "storage.bricks.0.device": [("/etc/passwd", "not a device"), ("/dev/mapper/ubuntu--vg-ubuntu--lv", "boots from")],
    "storage.bricks.1": [(SECOND, "also the device of another brick", "storage.bricks[/c].device")],
    "storage.bricks.0.filesystem": [("xsf", "did you mean xfs?")],
    "storage.staging": [
        ({"path": "/etc", "gb": 1}, "system's own"), ({"path": "/pool/a", "gb": 1}, "which all machines share"),
        ({"path": "/", "gb": 1}, "lies in /, where copies make room"),
    ],
    "storage.pool.mount": [
        ("/shared", "is also a folder of the brick"), ("/shared/pool", "are inside one another"), ("/", "system's own"),
    ],
    "storage.pool.create": [("mfss", "did you mean mfs?")],
    "storage.pool.min_free_gb": [(14000, "no file would go there")],
    "storage.shared": [("/elsewhere", "is on none of the mounts")],
    "storage.scratch": [("/pool/tmp", "which all machines share")],
    "storage.root.gb": [(..., "missing")],
    "storage.nfs_version": [(5, "not one of 3, 4, 4.1, 4.2")],
    "slurm.partition": [("gpu,urgent", "is not a name")],
    "slurm.gres": [("gpu:rtx", "GRES type")],
    "slurm.max_time": [("two days", "UNLIMITED or a Slurm time")],
    "slurm.accounting": [("perhaps", "boolean")],
    "container.runtime": [
        ("none", "while runtime is none", "container.image"), ("docker", "not one of none, apptainer, singularity, pyxis"),
        ("pyxis", "a .sif, which enroot cannot open", "container.image"),
    ],
    "container.image": [
        (..., "missing, while runtime is apptainer"), ("train.sif", "absolute path"),
        ("docker://ubuntu:24.04", "docker://NAME@sha256:DIGEST (a tag moves)"),
        ("docker://ubuntu@sha256:" + "a" * 64, "apptainer would fetch it again"),
    ],
    "container.options": [(["--bind=/etc"], "is not among them"), (["--userns", "--userns"], "appears twice")],
    "container.program": [("apptainer", "absolute path")],
    "container.binds": [
        (["/a,/b"], "is not a bind"), (["pool"], "is not a bind"), (["/pool:/pool:rx"], "is not a bind"),
        (["/pool/../etc"], "is not a bind"),
    ],
    "contaner": [({}, "did you mean container?")],
}  # fmt: skip
"""By the path that is changed: the value, words of the message, and the key that is named where it is another one."""


@pytest.mark.parametrize("path", REFUSALS)
def test_a_missing_or_contradictory_fact_is_refused(body: dict[str, Any], path: str) -> None:
    """Each by its key, with what to do; the file it is changed in is right."""
    for value, words, *other in REFUSALS[path]:
        values = copy.deepcopy(body)
        put(path, value)(values)
        key = other[0] if other else path.rsplit(".", maxsplit=1)[-1] if path != "nodes.0" else "nodes["
        found = problems_of(values)
        assert any(key in (problem.key or "") and words in str(problem) for problem in found), "\n".join(map(str, found))


def hgx(compute: dict[str, Any], network: dict[str, Any], nodes: int = 2, **sections: Any) -> Cluster:
    """A cluster of HGX H100 nodes with InfiniBand, but for what is given; None takes a key away."""
    facts = {"gpus": 8, "gpu": "h100-sxm", "interconnect": "nvlink4", "cores": 96, "threads": 192, "memory_gb": 2000} | compute
    net = {"kind": "infiniband", "interface": "ib0", "gbit": 400, "ports": 8} | network
    hosts = [{"name": f"n{index}", "address": f"10.0.0.{index + 1}", "roles": ["compute"]} for index in range(nodes)]
    shown = [{key: value for key, value in section.items() if value is not None} for section in (facts, net)]
    text = yaml.safe_dump({"name": "c", "nodes": hosts, "compute": shown[0], "network": shown[1], **sections})
    return read_cluster(parse_yaml(text, "c.yaml"))


NO_GPU = {"gpus": 0, "gpu": None, "interconnect": None}


@pytest.mark.parametrize(
    ("compute", "network", "key", "words"),
    [
        ({"measured_gb_s": 480}, {}, "compute.measured_gb_s", "more than the 450 GB/s of nvlink4"),
        ({"gpus": 1, "interconnect": "none", "measured_gb_s": 5}, {}, "compute.measured_gb_s", "while interconnect is none"),
        ({**NO_GPU, "measured_gb_s": 5}, {}, "compute.measured_gb_s", "while gpus is 0"),
        ({**NO_GPU, "nvlink_domain": 8}, {}, "compute.nvlink_domain", "while gpus is 0"),
        ({"nvlink_domain": 4}, {}, "compute.nvlink_domain", "not several whole nodes of 8"),
        ({"nvlink_domain": 12}, {}, "compute.nvlink_domain", "not several whole nodes of 8"),
        ({"interconnect": "pcie5", "nvlink_domain": 16}, {}, "compute.nvlink_domain", "while interconnect is pcie5"),
        ({"interconnect": "nvlink3"}, {}, "compute.interconnect", "h100-sxm has NVLink 4"),
        ({"gpu": "l40s"}, {}, "compute.interconnect", "l40s has no NVLink that joins all GPUs"),
        ({}, {"measured_gb_s": 425}, "network.measured_gb_s", "more than 8 x 400 Gbit/s carry, 400 GB/s"),
        ({}, {"gbit": None}, "network.gbit", "or measured_gb_s"),
        ({}, {"kind": "none", "measured_gb_s": 3}, "network.measured_gb_s", "while kind is none"),
        ({}, {"kind": "slingshot", "hca": ["mlx5_0"]}, "network.hca", "while kind is slingshot"),
    ],
)
def test_a_link_that_cannot_be_is_refused(compute: dict[str, Any], network: dict[str, Any], key: str, words: str) -> None:
    """Most often Gbit/s written as GB/s, both directions counted, or one port of eight."""
    found = readable(hgx, compute, network)
    assert any(problem.key == key and words in str(problem) for problem in found), found


def test_all_problems_come_at_once_with_their_lines() -> None:
    """One wrong key of a section does not hide that two others of it contradict each other."""
    text = """\
name: c
nodes:
  - {name: a, address: 10.0.0.1, roles: [compute, nfs, login]}
  - name: b
    address: 10.0.1.1
    roles: [compute, loginn]
compute: {gpus: 8, gpu: h100-smx, interconect: nvlink4, sockets: 2, cores: 3, threads: 256, memory_gb: 0}
network: {interface: "bond 0", kind: ethernet, gbit: 100, subnet: 10.0.0.0/24}
storage:
  bricks:
    - {node: zz, path: data, mount: /x, filesystem: xfs, tb: 1}
    - {node: a, path: /data, mount: /x, filesystem: xfs, tb: 1}
slurm: {partition: gpu}
container: {runtime: apptainer}
"""
    found = readable(read_cluster, parse_yaml(text, "c.yaml"))
    assert [(problem.file, problem.key) for problem in found] == [
        ("c.yaml:5", "nodes[b].address"), ("c.yaml:6", "nodes[b].roles[1]"), ("c.yaml:7", "compute.memory_gb"),
        ("c.yaml:7", "compute.interconect"), ("c.yaml:7", "compute.gpu"), ("c.yaml:7", "compute.interconnect"),
        ("c.yaml:7", "compute.threads"), ("c.yaml:7", "compute.cores"), ("c.yaml:8", "network.interface"),
        ("c.yaml:11", "storage.bricks[/x].path"), ("c.yaml:11", "storage.bricks[/x].node"),
        ("c.yaml:12", "storage.bricks[/x].mount"), ("c.yaml:14", "container.image"),
    ]  # fmt: skip


# --- which cluster -----------------------------------------------------------------------------------------------------


@pytest.fixture
def clusters(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of cluster files with the reference, in place of the shipped one."""
    folder = tmp_path / "clusters"
    folder.mkdir()
    (folder / REFERENCE.name).write_text((repo / REFERENCE).read_text())
    monkeypatch.setattr(module, "CLUSTERS", folder)
    return folder


def nothing() -> LocalMachine:
    return LocalMachine(hostname="elsewhere", memory_kb=2**21)


def test_which_file_is_taken(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that names this host; from another login node the one that names all of Slurm's nodes: one unknown node, and it
    is another cluster. Two files of one place are refused; a broken one of another place is no matter until it is chosen."""
    for host in ("rno-it-gpu0006-1", "RNO-IT-GPU0008-1", "rno-it-gpu0008-1.example.org"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert load_cluster(None, look=nothing).name == "rno-rtxpro6000"
    (clusters / "broken.yaml").write_text("nodes: [{name: x")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    two = "NodeName=rno-it-gpu0007-1 Partitions=gpu\nNodeName=rno-it-gpu0008-1 Partitions=gpu\n"
    assert load_cluster(None, look=lambda: LocalMachine(nodes=two)).name == "rno-rtxpro6000"
    assert load_cluster(None, look=lambda: LocalMachine(nodes=two + "NodeName=other Partitions=gpu\n")).name == "local"
    assert load_cluster(None, look=nothing).source == "this machine (elsewhere)"
    with pytest.raises(UserError, match="not valid YAML"):
        load_cluster("broken")
    (clusters / "copy.yaml").write_text((clusters / REFERENCE.name).read_text())
    with pytest.raises(UserError, match=r"the file is called copy\.yaml"):
        load_cluster("copy")
    monkeypatch.setattr("socket.gethostname", lambda: "rno-it-gpu0006-1")
    with pytest.raises(UserError, match="copy and rno-rtxpro6000 both name"):
        load_cluster(None, look=nothing)
    (clusters.parent / "any name.yaml").write_text((clusters / REFERENCE.name).read_text())
    assert load_cluster(str(clusters.parent / "any name.yaml")).source == str(clusters.parent / "any name.yaml")


def test_a_site_with_a_slurm_of_its_own_is_read_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine of its file is the controller; ``ops/clusters`` here goes before the project's."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ops" / "clusters"
    folder.mkdir(parents=True)
    body = {
        "name": "lustre-site",
        "nodes": [
            {"name": "login1", "address": "192.0.2.1", "roles": ["login"]},
            {"name": "gpu[01-03]", "roles": ["compute"]},
        ],
        "compute": {"gpus": 4, "gpu": "a100-sxm-80", "interconnect": "nvlink3", "cores": 64, "threads": 64, "memory_gb": 512},
        "network": {"interface": "ib0", "kind": "infiniband", "gbit": 200},
        "storage": {"shared": "/lustre"},
        "slurm": {"partition": "gpu"},
    }
    (folder / "lustre-site.yaml").write_text(yaml.safe_dump(body))
    found = load_cluster("lustre-site")
    named = module.reference(found)
    assert found.controller is None and named == str(folder / "lustre-site.yaml")
    for wanted in ("slurm", "storage"):
        refused = run("setup", wanted, "--cluster", named, "--node", "gpu01", "--out", tmp_path / "out")
        assert refused.code == 2 and "to set up" in refused.err and not (tmp_path / "out").exists()
    (folder / "dgx-h100.yaml").write_text(yaml.safe_dump(body | {"name": "dgx-h100"}))
    assert load_cluster("dgx-h100").compute.gpu == "a100-sxm-80"
    assert str(folder) in str(readable(load_cluster, "nowhere"))


def test_prices_of_the_working_folder_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = price("h100-sxm")
    (tmp_path / "ops").mkdir()
    text = "date: 2026-11-01\ncurrency: EUR\ngpus:\n  h100-sxm: {on_demand: 1.5, source: our contract}\n"
    (tmp_path / "ops" / "prices.yaml").write_text(text)
    mine = price("h100-sxm")
    assert theirs and mine and (mine.on_demand, mine.currency) == (1.5, "EUR") != (theirs.on_demand, theirs.currency)
