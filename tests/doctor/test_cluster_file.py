"""A cluster file drafted from Slurm and a look at one node: it is read back, and says what was not seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from clustertune.cluster.load import load_cluster
from clustertune.cluster.local import LocalMachine, draft, judge
from clustertune.cluster.schema import expand_hosts, shorten_hosts
from clustertune.host.facts import Gpu, HostFacts, Mount, Nic, RdmaPort
from tests.refusal import problems
from tests.slurm import FaultyCluster

NODE = (
    "NodeName={0} NodeAddr={0} CPUTot=192 Sockets=2 CoresPerSocket=48 ThreadsPerCore=2 RealMemory=2063937"
    " Gres=gpu:h100:8 Partitions=gpu"
)
SEEN = LocalMachine(
    hostname="head",
    nodes="\n".join(NODE.format(f"gpu{number:02d}") for number in range(1, 33)),
    partitions="PartitionName=gpu Default=YES MaxTime=1-00:00:00",
    config="SlurmctldHost[0]=head(10.0.0.1)\nAccountingStorageType = accounting_storage/slurmdbd\nSLURM_VERSION = 24.11.5\n",
)
FACTS = HostFacts(
    "gpu07",
    gpus=[Gpu(index, "NVIDIA H100 80GB HBM3", numa=index // 4) for index in range(8)],
    numa_cpus={"0": "0-47,96-143", "1": "48-95,144-191"},
    topology="\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n",
    nics=[
        Nic("eno1", up=True, mbit=10_000, virtual=False, kind="ethernet", addresses=["10.0.0.17/24"]),
        Nic("docker0", up=True, mbit=400_000, virtual=True, kind="ethernet", addresses=["172.17.0.1/16"]),
    ],
    rdma=[
        *(RdmaPort(f"mlx5_{index}", 1, active=True, gbit=400.0, link_layer="InfiniBand") for index in range(8)),
        RdmaPort("mlx5_8", 1, active=True, gbit=100.0, link_layer="Ethernet"),
    ],
    mounts=[
        Mount("/", "ext4", total_bytes=10**12), Mount("/raid", "xfs", total_bytes=28 * 10**12),
        Mount("/home", "nfs4", total_bytes=10**13), Mount("/lustre", "lustre", total_bytes=10**15),
    ],
)  # fmt: skip


def drafted(folder: Path, facts: HostFacts | None, fault: str = "", accounts: tuple[str, ...] = ()) -> tuple[str, Path]:
    text, file = draft(judge(SEEN), facts, fault, "my-cluster", accounts), folder / "my-cluster.yaml"
    file.write_text(text)
    return text, file


def unwritten(file: Path) -> set[str]:
    """The keys that a person has to write into a draft."""
    return {problem.key for problem in problems(load_cluster, str(file))}


def test_what_slurm_and_a_node_say(tmp_path: Path) -> None:
    """32 machines in one line; GPUs, their links and NUMA nodes, network, storage, time limit and account."""
    text, file = drafted(tmp_path, FACTS, accounts=("abc@h100",))
    found = load_cluster(str(file))
    assert 'gpu[01-32]"' in text and [host.name for host in found.compute_nodes] == [f"gpu{n:02d}" for n in range(1, 33)]
    assert found.controller and found.controller.address == "10.0.0.1" and found.host("gpu31")
    compute, network, storage, job = found.compute, found.network, found.storage, found.slurm
    assert (compute.gpus, compute.gpu, compute.interconnect, compute.memory_gb) == (8, "h100-sxm", "nvlink4", 2015)
    assert compute.numa_gpus == ((0, 1, 2, 3), (4, 5, 6, 7)) and compute.numa_cpus[1] == "48-95,144-191"
    assert (network.kind, network.gbit, network.ports, network.interface) == ("infiniband", 400, 8, "eno1")
    assert network.hca == tuple(f"mlx5_{index}" for index in range(8))
    assert (storage.shared, storage.scratch) == ("/lustre", "/raid")
    assert job and (job.gres, job.account, job.max_time, job.accounting) == ("h100", "abc@h100", "1-00:00:00", True)


def test_what_was_not_seen_is_said(tmp_path: Path) -> None:
    """No node answered, or one that tells little: the file is read all the same, and each gap has its line."""
    text, file = drafted(tmp_path, None, "srun: job 7 was not given\na node", ("a", "b"))
    gaps = [line for line in text.splitlines() if line.startswith("# unknown: ")]
    keys = ("interconnect", "numa_gpus", "network.kind", "network.interface", "network.gbit", "storage.shared")
    for word in (*keys, "a node)", "one of a, b"):
        assert any(word in gap for gap in gaps), word
    assert unwritten(file) == {"compute.interconnect", "network.interface", "network.gbit"}
    assert "h100-sxm" in text  # by the GRES type
    two = replace(FACTS, rdma=[], nics=[*FACTS.nics, replace(FACTS.nics[0], name="eno2")], gpus=FACTS.gpus[:2], topology="")
    text, file = drafted(tmp_path, two)
    assert unwritten(file) == {"compute.interconnect", "network.interface"}
    assert "# unknown: network.interface" in text and "# unknown: compute.numa_gpus" in text


@given(st.lists(st.from_regex(r"[a-c]{1,2}(0?[0-9]|[1-2][0-9])(-ib)?", fullmatch=True), max_size=12))
def test_lists_of_names_are_shortened_without_loss(names: list[str]) -> None:
    shown = shorten_hosts(names)
    assert [name for text, _ in shown for name in expand_hosts(text)] == names
    assert [len(expand_hosts(text)) for text, _ in shown] == [count for _, count in shown]


def test_drafted_on_a_real_slurm(slurm: FaultyCluster, tmp_path: Path) -> None:
    """One command on the login node; what it wrote is a cluster file, and is not written over."""
    file = tmp_path / "my-cluster.yaml"
    words = [sys.executable, "-m", "clustertune", "show-cluster", "--write", file]
    done = slurm.run(words, timeout=300)
    text = file.read_text()
    assert done.returncode == 0 and 'node[1-2]"' in text and "a look at node" in text and f"wrote {file}" in done.stderr
    again = slurm.run(words, check=False, timeout=300)
    assert again.returncode == 2 and "exists already" in again.stderr and file.read_text() == text


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = next((kind for kind in parts(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        yield from keys(inner, f"{prefix}{name}.") if inner else [prefix + name]


def parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)
