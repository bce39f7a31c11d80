"""A cluster that nobody described, judged from recorded answers of Slurm, the driver and the kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clustertune.cluster import local as local_cluster
from clustertune.cluster.local import LocalMachine, judge
from tests.folders import program

RECORDED = Path(__file__).parent / "recorded"
EIGHT = (RECORDED / "nvidia-smi-8-gpus.txt").read_text()


def recorded(version: str, hostname: str = "login1") -> LocalMachine:
    """What scontrol of a Slurm release said. 22.05 is of a real test cluster; later ones are written after their forms."""
    texts = {key: (RECORDED / f"slurm-{version}-{key}.txt").read_text() for key in ("nodes", "partition", "config")}
    return LocalMachine(hostname=hostname, nodes=texts["nodes"], partitions=texts["partition"], config=texts["config"])


def test_nodes_of_two_kinds_in_23_11() -> None:
    """The kind that most nodes are of is taken and the others are named. What an admin wrote into Reason is not a fact."""
    found = judge(recorded("23.11"))
    assert [host.name for host in found.compute_nodes] == ["gpu-a01", "gpu-a02"]
    assert found.compute.gpus == 8 and found.compute.gpu == "h100-sxm"
    assert found.compute.memory_gb == 2063937 // 1024
    assert found.slurm and found.slurm.accounting and found.slurm.max_time == "2-00:00:00"
    assert found.controller and found.controller.name == "head1"
    assert found.notes == ("cpu-b01 of partition batch differ from the other 2 nodes and are left out",)


def test_one_node_with_cores_set_aside_in_24_11() -> None:
    """What the system keeps cannot be asked for; GPUs are counted over both sockets; an A100 may be of 40 or 80 GB."""
    found = judge(recorded("24.11", "n01"))
    assert len(found.nodes) == 1 and found.nodes[0].roles == ("compute", "slurmctld", "login")
    assert (found.compute.gpus, found.compute.gpu, found.compute.threads, found.compute.cores) == (4, None, 60, 60)
    assert found.compute.memory_gb == (1031000 - 16384) // 1024
    assert found.slurm and found.slurm.gres == "a100" and not found.slurm.accounting
    assert found.network.kind == "none"
    assert len(found.notes) == 1 and "a100" in found.notes[0]


NUMA = {0: "0-63,128-191", 1: "64-127,192-255"}


def test_a_compute_node_tells_its_gpus_and_their_numa_nodes() -> None:
    """Slurm does not say which GPU lies at which socket; the kernel does, where one looks on a compute node."""
    numa = {gpu: gpu // 4 for gpu in range(8)}
    node = replace(recorded("22.05", "node2"), gpus=EIGHT, gpu_numa=numa, numa_cpus=NUMA)
    found = judge(node)
    assert found.compute.numa_gpus == ((0, 1, 2, 3), (4, 5, 6, 7)) and found.compute.numa_cpus == tuple(NUMA.values())
    assert judge(replace(node, hostname="ctl")).compute.numa_gpus == ()


def test_a_controller_that_comes_back_is_waited_for_in_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else a job that starts while slurmctld is restarted takes its first node for the whole cluster."""
    for key in ("nodes", "partition", "config"):
        (tmp_path / key).write_text((RECORDED / f"slurm-22.05-{key}.txt").read_text())
    once = f"cd {tmp_path}; [ -e up ] || {{ [ -e once ] && touch up; touch once; exit 1; }}"
    program(tmp_path / "scontrol", f'{once}\nfor last; do :; done; cat "$last"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(local_cluster, "PAUSE", 0.01)
    assert len(judge(local_cluster.collect()).compute_nodes) == 2
