"""Cluster files: what is read, and what is refused in one screen."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from clustertune.config import cluster as module
from clustertune.config.cluster import load_cluster, read_cluster
from clustertune.config.cluster_schema import Cluster, same_host
from clustertune.config.local_cluster import LocalMachine
from clustertune.config.show import render_cluster
from clustertune.config.yamlfile import parse_yaml, read_yaml
from clustertune.errors import Problem, UserError
from clustertune.host.system import format_cpu_list, parse_cpu_list
from tests.config.conftest import check_form

REFERENCE = Path("ops", "clusters", "rno-rtxpro6000.yaml")


@pytest.fixture(scope="module")
def body(repo: Path) -> dict[str, Any]:
    """The reference file as plain values."""
    return read_yaml(repo / REFERENCE, "reference").data


def problems_of(values: dict[str, Any]) -> list[Problem]:
    """What is wrong with a file of these values, each in readable form."""
    with pytest.raises(UserError) as caught:
        read_cluster(parse_yaml(yaml.safe_dump(values, sort_keys=False), "c.yaml"))
    check_form(caught.value)
    return caught.value.problems


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


def test_every_shipped_file_is_read_back_from_its_json(repo: Path) -> None:
    """tests/golden holds what is read."""
    for path in sorted((repo / "ops" / "clusters").glob("*.yaml")):
        found = load_cluster(path.stem)
        assert Cluster.model_validate_json(json.dumps(found.model_dump(mode="json"))) == found


# --- refusals ----------------------------------------------------------------------------------------------------------

NUMA = "compute.numa_gpus"
SECOND = {"node": "rno-it-gpu0007-1", "path": "/c2", "mount": "/c", "filesystem": "xfs", "tb": 14,
          "device": "/dev/mapper/vg_nvme-lv_scratch"}  # fmt: skip
REFUSALS: list[tuple[str, Any, str, str]] = [
    # path to change, value, key that is named, words
    ("name", ..., "name", "missing"),
    ("name", "two words", "name", "is not a name"),
    ("name", "../x", "name", "is not a name"),
    ("name", "local", "name", "found by looking"),
    ("nodes", ..., "nodes", "missing"),
    ("nodes", [], "nodes", "empty"),
    ("nodes", {"a": 1}, "nodes", "not a list"),
    ("nodes.0", "gpu1", "nodes[0]", "not a section"),
    ("compute", None, "compute", "empty"),
    ("nodes.0.name", "rno-it-gpu0007-1", "nodes[rno-it-gpu0007-1].name", "also the name of machine 1"),
    ("nodes.0.name", "RNO-it-gpu0007-1", "nodes[rno-it-gpu0007-1].name", "also the name"),
    ("nodes.0.address", "10.21.133.35", "nodes[rno-it-gpu0007-1].address", "also the address of machine 1"),
    ("nodes.0.name", "gpu_1", "nodes[gpu_1].name", "RFC 1123"),
    ("nodes.0.name", "-gpu", "nodes[-gpu].name", "is not a name"),
    ("nodes.0.name", "a" * 64 + ".example", "nodes[0].name", "RFC 1123"),
    ("nodes.0.name", "a..b", "nodes[a..b].name", "RFC 1123"),
    ("nodes.0.name", "10.0.0.1", "nodes[10.0.0.1].name", "an address, not a name"),
    ("nodes.0.name", "a b; rm -rf", "nodes[a b; rm -rf].name", "is not a name"),
    ("nodes.0.name", 7, "nodes[0].name", "string"),
    ("nodes.0.address", "10.21.133.310", "address", "neither an address nor a host name"),
    ("nodes.0.address", "10.21.133", "address", "neither"),
    ("nodes.0.address", "a b", "address", "neither"),
    ("nodes.0.address", "fe80::zz", "address", "neither"),
    ("nodes.0.address", "0.0.0.0", "address", "not a machine's address"),  # noqa: S104
    ("nodes.0.address", "239.1.1.1", "address", "not a machine's address"),
    ("nodes.0.address", "127.0.0.1", "address", "every machine's own"),
    ("nodes.0.address", "10.21.134.31", "address", "outside network.subnet 10.21.133.0/24"),
    ("nodes.0.address", "10.21.133.255", "address", "the network's own"),
    ("nodes.0.roles", [], "nodes[rno-it-gpu0006-1].roles", "empty"),
    ("nodes.0.roles", ["logni"], "nodes[rno-it-gpu0006-1].roles[0]", "did you mean login?"),
    ("nodes.0.roles", ["login", "login"], "roles", "appears twice"),
    ("nodes.0.roles", ["login", "slurmctld"], "nodes", "2 machines have the role slurmctld"),
    ("nodes.0.roles", ["nfs", "login"], "nodes[rno-it-gpu0006-1].roles", "role nfs but no brick"),
    ("nodes.0.role", "login", "nodes[rno-it-gpu0006-1].role", "did you mean roles?"),
    ("nodes.0.roles", ["compute"], "nodes", "no machine has the role login"),
    ("nodes.1.roles", ["compute", "nfs"], "nodes", "no machine has the role slurmctld"),
    ("slurm", ..., "nodes", "no section slurm"),
    ("compute.gpus", ..., "compute.gpus", "missing"),
    ("compute.gpus", -1, "compute.gpus", "greater than or equal to 0"),
    ("compute.gpus", True, "compute.gpus", "not a number"),
    ("compute.gpus", 0, "compute.gpu", "while gpus is 0"),
    ("compute.gpus", 0, "slurm.gres", "while compute.gpus is 0"),
    ("compute.gpus", 4, NUMA, "there is no GPU 4"),
    ("compute.gpu", ..., "compute.gpu", "missing"),
    ("compute.gpu", "rtx-pro-6000-blackwel-server", "compute.gpu", "did you mean rtx-pro-6000-blackwell-server?"),
    ("compute.interconnect", ..., "compute.interconnect", "missing"),
    ("compute.interconnect", "pci5", "compute.interconnect", "did you mean pcie5?"),
    ("compute.interconnect", "none", "compute.interconnect", "while a node has 8 GPUs"),
    ("compute.interconect", "pcie5", "compute.interconect", "did you mean interconnect?"),
    ("compute.sockets", 0, "compute.sockets", "greater than or equal to 1"),
    ("compute.sockets", 3, "compute.cores", "does not divide by 3 sockets"),
    ("compute.sockets", 4, NUMA, "2 NUMA nodes, but 4 sockets"),
    ("compute.sockets", 4, "compute.numa_cpus", "2 NUMA nodes, but 4 sockets"),
    ("compute.threads", 200, "compute.threads", "not a multiple of 128 cores"),
    ("compute.threads", 64, "compute.threads", "not a multiple of 128 cores"),
    ("compute.threads", 2048, "compute.threads", "16 threads per core"),
    ("compute.threads", 128, "compute.numa_cpus", "256 CPUs in all, but threads is 128"),
    ("compute.memory_gb", 0, "compute.memory_gb", "greater than 0"),
    ("compute.memory_gb", "3.9 TB", "compute.memory_gb", "number"),
    ("compute.memory_gb", float("inf"), "compute.memory_gb", "finite"),
    (NUMA, [[0, 1, 2, 3], [4, 5, 6]], NUMA, "GPU 7 missing"),
    (NUMA, [[0, 1, 2, 3], [3, 4, 5, 6, 7]], NUMA, "GPU 3 appears twice"),
    (NUMA, [[0, 1, 2, 3], [4, 5, 6, 8]], NUMA, "there is no GPU 8"),
    (NUMA, [0, 1, 2, 3], "compute.numa_gpus[0]", "not a list"),
    (NUMA, [[0, 1], [2, 3], [4, 5], [6, 7]], "compute.numa_cpus", "2 NUMA nodes, but numa_gpus has 4"),
    ("compute.numa_cpus", ["0-63,128-191", "63-127,192-255"], "compute.numa_cpus[1]", "CPU 63 is also of NUMA node 0"),
    ("compute.numa_cpus", ["0-63,128-191", "64-127"], "compute.numa_cpus", "192 CPUs in all"),
    ("compute.numa_cpus", ["0-63,128-191", "127-64"], "compute.numa_cpus[1]", "backwards"),
    ("compute.numa_cpus", ["0-63,128-191", "0x40"], "compute.numa_cpus[1]", "is not a CPU"),
    ("compute.numa_cpus", ["0-255", ""], "compute.numa_cpus[1]", "empty"),
    ("compute.numa_cpus", ["0-63,128-191", "64-999999"], "compute.numa_cpus[1]", "not a CPU number"),
    ("network", ..., "network", "missing"),
    ("network.kind", "ethernt", "network.kind", "did you mean ethernet?"),
    ("network.kind", "unknown", "network.kind", "must say it"),
    ("network.kind", "none", "network.kind", "while 2 machines have the role compute"),
    ("network.kind", "none", "network.gbit", "while kind is none"),
    ("network.interface", ..., "network.interface", "missing"),
    ("network.interface", "bond0,eth1", "network.interface", "name of a network interface"),
    ("network.interface", "=bond0", "network.interface", "name of a network interface"),
    ("network.interface", "a-very-long-name", "network.interface", "name of a network interface"),
    ("network.interface", "lo", "network.interface", "reaches no other machine"),
    ("network.gbit", ..., "network.gbit", "missing"),
    ("network.gbit", 0, "network.gbit", "greater than 0"),
    ("network.subnet", "10.21.133.0/33", "network.subnet", "write it as"),
    ("network.subnet", "10.21.133.7/24", "network.subnet", "host bits"),
    ("network.hca", ["mlx5_0"], "network.hca", "while kind is ethernet"),
    ("network.hca", ["mlx5_0;x"], "network.hca[0]", "RDMA adapter"),
    ("network.environment", ["NCCL_ALGO=Ring"], "network.environment", "not a section"),
    ("network.environment", {"NCCL_ALGO": True}, "network.environment.NCCL_ALGO", "put it in quotes"),
    ("network.environment", {"NCCL_ALGO": None}, "network.environment.NCCL_ALGO", "string"),
    ("network.environment", {"NCCL_ALGO": "$(id)"}, "network.environment.NCCL_ALGO", "invalid value"),
    ("network.environment", {"NCCL_ALGO": ""}, "network.environment.NCCL_ALGO", "invalid value"),
    ("network.environment", {"NCCL_NET_PLUGIN": "http://x"}, "network.environment.NCCL_NET_PLUGIN", "invalid value"),
    ("network.environment", {"NCCL_ALGO": 4, "LD_PRELOAD": "x.so"}, "network.environment.LD_PRELOAD", "no variable of"),
    ("network.environment", {"nccl_algo": "Ring"}, "network.environment.nccl_algo", "no variable of"),
    ("network.environment", {"FI_AUTH_TOKEN": "x"}, "network.environment.FI_AUTH_TOKEN", "a secret"),
    ("network.environment", {"NCCL_COMM_ID": "10.0.0.1:7"}, "network.environment.NCCL_COMM_ID", "one of its own"),
    ("network.environment", {f"NCCL_{n}": 1 for n in range(65)}, "network.environment", "64 at most"),
    ("storage.bricks.0.node", "rno-it-gpu0009-1", "storage.bricks[/shared].node", "there is no machine"),
    ("storage.bricks.0.node", "rno-it-gpu0006-1", "storage.bricks[/shared].node", "not the role nfs"),
    ("storage.bricks.0.path", "data/shared", "storage.bricks[/shared].path", "absolute path"),
    ("storage.bricks.0.path", "/data/../etc", "storage.bricks[/shared].path", "absolute path"),
    ("storage.bricks.0.mount", "/with space", "storage.bricks[/with space].mount", "absolute path"),
    ("storage.bricks.0.mount", "/a,b", "storage.bricks[/a,b].mount", "absolute path"),
    ("storage.bricks.0.mount", "/shared-b", "storage.bricks[/shared-b].mount", "also the mount of another brick"),
    ("storage.bricks.0.mount", "/shared-b/x", "mount", "are inside one another"),
    ("storage.bricks.0.mount", "/usr", "storage.bricks[/usr].mount", "system's own"),
    ("storage.bricks.0.mount", "/run/shared", "storage.bricks[/run/shared].mount", "system's own"),
    ("storage.bricks.0.path", "/etc", "storage.bricks[/shared].path", "system's own"),
    ("storage.bricks.0.path", "/shared-b", "storage.bricks[/shared-b].mount", "the exported folder of another brick"),
    ("storage.bricks.0.path", "/shared-b/x", "storage.bricks[/shared-b].mount", "lies in, or around, /shared-b/x"),
    ("storage.bricks.0.path", "/shared/x", "storage.bricks[/shared].mount", "where it is seen, are inside one another"),
    ("storage.bricks.0.device", "/etc/passwd", "storage.bricks[/shared].device", "is not a device"),
    ("storage.bricks.0.device", "/dev/mapper/ubuntu--vg-ubuntu--lv", "storage.bricks[/shared].device", "boots from"),
    ("storage.bricks.1", SECOND, "storage.bricks[/c].device", "also the device of another brick"),
    ("storage.staging", {"path": "/etc", "gb": 1}, "storage.staging.path", "system's own"),
    ("storage.staging", {"path": "/pool/a", "gb": 1}, "storage.staging.path", "which all machines share"),
    ("storage.staging", {"path": "/", "gb": 1}, "storage.staging.path", "lies in /, where copies make room"),
    ("storage.bricks.0.tb", 0, "storage.bricks[/shared].tb", "greater than 0"),
    ("storage.bricks.0.filesystem", "xsf", "filesystem", "did you mean xfs?"),
    ("storage.bricks", [], "storage.pool", "a pool without bricks"),
    ("storage.bricks", [], "nodes[rno-it-gpu0007-1].roles", "role nfs but no brick"),
    ("storage.pool.mount", "/shared", "storage.pool.mount", "is also a folder of the brick"),
    ("storage.pool.mount", "/shared/pool", "storage.pool.mount", "are inside one another"),
    ("storage.pool.mount", "/", "storage.pool.mount", "system's own"),
    ("storage.pool.kind", "unionfs", "storage.pool.kind", "not one of mergerfs"),
    ("storage.pool.create", "mfss", "storage.pool.create", "did you mean mfs?"),
    ("storage.pool.min_free_gb", 14000, "storage.pool.min_free_gb", "no file would go there"),
    ("storage.shared", "/elsewhere", "storage.shared", "is on none of the mounts"),
    ("storage.scratch", "/pool/tmp", "storage.scratch", "which all machines share"),
    ("storage.root.gb", ..., "storage.root.gb", "missing"),
    ("storage.nfs_version", 5, "storage.nfs_version", "not one of 3, 4, 4.1, 4.2"),
    ("slurm.partition", ..., "slurm.partition", "missing"),
    ("slurm.partition", "gpu,urgent", "slurm.partition", "is not a name"),
    ("slurm.gres", "gpu:rtx", "slurm.gres", "GRES type"),
    ("slurm.max_time", "two days", "slurm.max_time", "UNLIMITED or a Slurm time"),
    ("slurm.accounting", "perhaps", "slurm.accounting", "boolean"),
    ("container.image", ..., "container.image", "missing, while runtime is apptainer"),
    ("container.image", "train.sif", "container.image", "absolute path"),
    ("container.runtime", "none", "container.image", "while runtime is none"),
    ("container.runtime", "docker", "container.runtime", "not one of none, apptainer, singularity, pyxis"),
    ("container.runtime", "pyxis", "container.image", "a .sif, which enroot cannot open"),
    ("container.image", "docker://ubuntu:24.04", "container.image", "docker://NAME@sha256:DIGEST (a tag moves)"),
    ("container.image", "docker://ubuntu@sha256:" + "a" * 64, "container.image", "apptainer would fetch it again"),
    ("container.options", ["--bind=/etc"], "container.options[0]", "'--bind=/etc' is not among them"),
    ("container.options", ["--userns", "--userns"], "container.options[1]", "appears twice"),
    ("container.program", "apptainer", "container.program", "absolute path"),
    ("container.binds", ["/a,/b"], "container.binds[0]", "is not a bind"),
    ("container.binds", ["pool"], "container.binds[0]", "is not a bind"),
    ("container.binds", ["/pool:/pool:rx"], "container.binds[0]", "is not a bind"),
    ("container.binds", ["/pool/../etc"], "container.binds[0]", "is not a bind"),
    ("contaner", {}, "contaner", "did you mean container?"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "key", "words"), REFUSALS)
def test_a_missing_or_contradictory_fact_is_refused(body: dict[str, Any], path: str, value: Any, key: str, words: str) -> None:
    """Each by its key, with what to do; the file it is changed in is right."""
    values = copy.deepcopy(body)
    put(path, value)(values)
    found = problems_of(values)
    assert any(key in (problem.key or "") and words in str(problem) for problem in found), "\n".join(map(str, found))


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
    with pytest.raises(UserError) as caught:
        read_cluster(parse_yaml(text, "c.yaml"))
    check_form(caught.value)
    found = [(problem.file, problem.key) for problem in caught.value.problems]
    assert found == [
        ("c.yaml:5", "nodes[b].address"),
        ("c.yaml:6", "nodes[b].roles[1]"),
        ("c.yaml:7", "compute.memory_gb"),
        ("c.yaml:7", "compute.interconect"),
        ("c.yaml:7", "compute.gpu"),
        ("c.yaml:7", "compute.interconnect"),
        ("c.yaml:7", "compute.threads"),
        ("c.yaml:7", "compute.cores"),
        ("c.yaml:8", "network.interface"),
        ("c.yaml:11", "storage.bricks[/x].path"),
        ("c.yaml:11", "storage.bricks[/x].node"),
        ("c.yaml:12", "storage.bricks[/x].mount"),
        ("c.yaml:14", "container.image"),
    ]


def test_a_cluster_of_cpus_and_one_of_a_single_machine_are_right() -> None:
    """What a file may leave out."""
    text = """\
name: small
nodes: [{name: box, address: 127.0.0.1, roles: [compute]}]
compute: {gpus: 0, cores: 4, threads: 4, memory_gb: 15.5}
network: {kind: none}
"""
    found = read_cluster(parse_yaml(text, "c.yaml"))
    assert found.slurm is None and found.controller is None and found.storage.scratch == "/tmp"
    assert found.gres(2) == "gpu:2"


def test_several_numa_nodes_per_socket_are_right(body: dict[str, Any]) -> None:
    """NPS2: a BIOS setting that most of these machines have; NUMA nodes without a GPU are usual then."""
    values = copy.deepcopy(body)
    values["compute"] |= {
        "numa_gpus": [[0, 1, 2, 3], [], [4, 5, 6, 7], []],
        "numa_cpus": ["0-31,128-159", "32-63,160-191", "64-95,192-223", "96-127,224-255"],
    }
    assert len(read_cluster(parse_yaml(yaml.safe_dump(values), "c.yaml")).compute.numa_gpus) == 4


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["/a", "gpu", "a,b", "0-3", "login", ""]),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "nodes", "mount", "node", "roles", "bricks", "pool", "path"]), inner),
        max_leaves=12,
    ),
    st.sampled_from(
        ["nodes", "nodes.1", "nodes.1.roles", "nodes.1.name", "compute", "compute.numa_gpus", "compute.numa_cpus",
         "compute.cores", "network", "network.subnet", "storage", "storage.bricks", "storage.bricks.0", "storage.pool",
         "storage.bricks.0.mount", "storage.shared", "slurm", "container", "container.binds"]
    ),
)  # fmt: skip
def test_whatever_stands_in_a_file_is_a_cluster_or_a_refusal(value: Any, path: str) -> None:
    """The checks look at parts of what could not be read: none of them may fall over it."""
    values = copy.deepcopy(read_yaml(module.CLUSTERS / REFERENCE.name, "reference").data)
    put(path, value)(values)
    try:
        read_cluster(parse_yaml(yaml.safe_dump(values), "c.yaml"))
    except UserError as error:
        check_form(error)


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


@pytest.mark.parametrize("host", ["rno-it-gpu0006-1", "RNO-IT-GPU0008-1", "rno-it-gpu0008-1.example.org"])
def test_the_file_that_names_this_host_is_taken(clusters: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """On the cluster nobody has to say which it is."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert load_cluster(None, look=nothing).name == "rno-rtxpro6000"


def test_the_file_that_names_all_of_slurms_nodes_is_taken(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a login node that the file does not name. One unknown node, and it is another cluster."""
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    two = "NodeName=rno-it-gpu0007-1 Partitions=gpu\nNodeName=rno-it-gpu0008-1 Partitions=gpu\n"
    assert load_cluster(None, look=lambda: LocalMachine(nodes=two)).name == "rno-rtxpro6000"
    assert load_cluster(None, look=lambda: LocalMachine(nodes=two + "NodeName=other Partitions=gpu\n")).name == "local"
    assert load_cluster(None, look=nothing).source == "this machine (elsewhere)"


def test_two_files_of_one_place_are_refused(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess would be right half of the time."""
    (clusters / "copy.yaml").write_text((clusters / REFERENCE.name).read_text())
    monkeypatch.setattr("socket.gethostname", lambda: "rno-it-gpu0006-1")
    with pytest.raises(UserError, match="copy and rno-rtxpro6000 both name"):
        load_cluster(None, look=nothing)


def test_a_broken_file_of_another_place_is_no_matter(clusters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported when it is chosen."""
    (clusters / "broken.yaml").write_text("nodes: [{name: x")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert load_cluster(None, look=nothing).name == "local"
    with pytest.raises(UserError, match="not valid YAML"):
        load_cluster("broken")


def test_a_file_in_the_folder_bears_its_cluster_name(clusters: Path) -> None:
    """Else ``--cluster`` takes a name that no output shows."""
    (clusters / "mine.yaml").write_text((clusters / REFERENCE.name).read_text())
    with pytest.raises(UserError, match=r"the file is called mine\.yaml"):
        load_cluster("mine")


def test_a_file_anywhere_is_taken_by_its_path(tmp_path: Path, repo: Path) -> None:
    path = tmp_path / "any name.yaml"
    path.write_text((repo / REFERENCE).read_text())
    assert load_cluster(str(path)).source == str(path)


@pytest.mark.parametrize(
    ("given_name", "words"),
    [
        ("rno-rtxpro600", "did you mean rno-rtxpro6000?"),
        ("locl", "did you mean local?"),
        ("ops/clusters/rno-rtx.yaml", "does not exist"),
        ("/", "is not a file"),
        ("", "is not a cluster"),
        ("a\0b", "is not a cluster"),
        ("x" * 5000, "is not a cluster"),
        ("y" * 300 + ".yaml", "cannot be read"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(given_name: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("?", r"\?")) as caught:
        load_cluster(given_name)
    check_form(caught.value)


def test_host_names_match_with_and_without_a_domain() -> None:
    """Slurm often knows the short name where ``hostname`` prints the long one; two long ones are two machines."""
    assert same_host("a.x.org", ["b", "a"]) == "a"
    assert same_host("A", ["b.x", "a.x"]) == "a.x"
    assert same_host("a.x", ["a.y"]) is None
    assert same_host("a", ["a.x", "a.y"]) is None
    assert same_host("a.y", ["a.x", "a.y"]) == "a.y"


# --- CPU lists ---------------------------------------------------------------------------------------------------------


@given(st.frozensets(st.integers(0, 5000), max_size=60))
def test_a_cpu_list_and_its_set_are_one(cpus: frozenset[int]) -> None:
    """What is written is what is read."""
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus


@given(st.text(alphabet="0123456789-, x:/\n", max_size=20))
def test_any_text_is_a_cpu_list_or_a_value_error(text: str) -> None:
    try:
        assert all(cpu >= 0 for cpu in parse_cpu_list(text))
    except ValueError as error:
        assert "\n" not in str(error)


def test_the_example_of_the_documentation_is_right(repo: Path) -> None:
    """It is what people copy."""
    text = (repo / "docs" / "clusters.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    assert read_cluster(parse_yaml(text, "docs/clusters.md")).name == "my-cluster"


def test_variables_of_the_libraries_are_shown(body: dict[str, Any], tmp_path: Path) -> None:
    """Numbers are taken as they are written; what ranks get instead of derived values is seen before a job."""
    values = copy.deepcopy(body)
    values["network"]["environment"] = {"NCCL_IB_GID_INDEX": 3, "NCCL_ALGO": "^Tree"}
    file = tmp_path / f"{values['name']}.yaml"
    file.write_text(json.dumps(values))
    found, stream = load_cluster(str(file)), io.StringIO()
    assert found.network.environment == {"NCCL_IB_GID_INDEX": "3", "NCCL_ALGO": "^Tree"}
    render_cluster(found, Console(file=stream, width=120))
    assert "NCCL_IB_GID_INDEX=3" in stream.getvalue() and "NCCL_ALGO=^Tree" in stream.getvalue()
