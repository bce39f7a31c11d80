"""Ranks on the cores of their GPU: only where it is certain which GPU that is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.host.probe import Probe
from clustertune.host.system import format_cpu_list, numa_cpus, parse_cpu_list
from clustertune.launch.binding import bind, physical_gpus, rank_cpus

GPUS = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, [4, 5]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f3c,GPU-91aa"}, None),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, None),
        # a step: the node's own numbers, whichever way CUDA counts
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "4,5,6,7"}, [4, 5, 6, 7]),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "4-7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [4, 5, 6, 7]),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [4, 5, 6, 7]),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "3,2"}, [7, 6]),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "3,2,1,0"}, [3, 2, 1, 0]),
        # GPU 1 of the node or the second of the step: either
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "5"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "GPU-1"}, None),
        # the batch script's list is of the first node
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_GPUS": "2,3"}, [2, 3]),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_GPUS": "2,3", "SLURM_NODEID": "0"}, [2, 3]),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_GPUS": "2,3", "SLURM_NODEID": "1"}, None),
        # in Slurm CUDA's numbers alone say nothing: they may count from 0
        ({"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, None),
    ],
)
def test_the_nodes_own_numbers_of_the_gpus(env: dict[str, str], gpus: list[int] | None) -> None:
    """None where it could be another GPU: a rank on the wrong socket is slower than one that is not bound."""
    assert physical_gpus(env) == gpus


@pytest.mark.parametrize(
    ("local_rank", "ranks", "gpus", "cpus"),
    [
        (0, 4, None, ("0-63", "64-127")),  # which four of the eight?
        (2, 2, [3, 4], ("0-63", "64-127")),
        (0, 1, [9], ("0-63", "64-127")),
        (0, 0, [], ("0-63", "64-127")),
        (0, 8, None, ("0-31", "32-63", "64-95", "96-127")),  # a BIOS setting has made four NUMA nodes of the cluster file's two
        (4, 8, None, ("0-63", "rubbish")),
    ],
)
def test_what_is_not_certain_binds_nothing(local_rank: int, ranks: int, gpus: list[int] | None, cpus: tuple[str, ...]) -> None:
    assert isinstance(rank_cpus(local_rank, ranks, gpus, GPUS, cpus, range(256)), str)


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[list[int]], list[str], set[int], list[int] | None]:
    """NUMA groups of GPUs, CPU lists, allowed CPUs, visible GPUs."""
    nodes, gpus, cpus = draw(st.integers(1, 4)), draw(st.integers(0, 8)), draw(st.integers(1, 64))
    groups: list[list[int]] = [[] for _ in range(nodes)]
    for gpu in range(gpus):
        groups[draw(st.integers(0, nodes - 1))].append(gpu)
    lists: list[set[int]] = [set() for _ in range(nodes)]
    for cpu in range(cpus):
        lists[draw(st.integers(0, nodes - 1))].add(cpu)
    visible = draw(st.none() | st.permutations(range(gpus)))
    return groups, [format_cpu_list(group) for group in lists], draw(st.sets(st.integers(0, cpus - 1))), visible


@given(machines())
def test_a_binding_is_never_empty_nor_outside(machine: tuple[list[list[int]], list[str], set[int], list[int] | None]) -> None:
    """Whatever the machine: the job's CPUs on one NUMA node, the one of the rank's GPU; the kernel refuses others."""
    groups, lists, allowed, visible = machine
    count = sum(map(len, groups))
    for rank in range(count):
        found = rank_cpus(rank, count, visible, groups, lists, allowed)
        gpu = rank if visible is None else visible[rank]
        node = next(i for i, group in enumerate(groups) if gpu in group)
        if expected := parse_cpu_list(lists[node]) & allowed:
            assert found == (node, expected)
        else:
            assert isinstance(found, str)


def test_numa_nodes_are_read_in_their_order(tmp_path: Path) -> None:
    """By number, not by name: node10 comes after node2. One that has memory only is none for ranks."""
    for name, text in (("node10", "8-11\n"), ("node2", "4-7\n"), ("node0", "0-3\n"), ("node1", "\n"), ("power", "")):
        (folder := tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    (folder.parent / "online").write_text("0-10\n")
    assert list(numa_cpus(Probe(tmp_path)).values()) == ["0-3", "4-7", "8-11"]
    assert numa_cpus(Probe(tmp_path / "none")) == {}


BIND = """
import os, sys
from clustertune.launch.binding import bind
first = min(os.sched_getaffinity(0))
lists = (str(first), "60000")
print(bind(3, 0, 2, ((0,), (1,)), lists, {}))
print(sorted(os.sched_getaffinity(0)) == [first])
print(bind(4, 1, 2, ((0,), (1,)), lists, {}))
print(bind(5, 0, 1, ((0,), (1,)), lists, {}))
print(bind(6, 0, 1, ((0,), (1,), (2,)), lists, {"CUDA_VISIBLE_DEVICES": "0"}))
"""


def test_a_process_binds_itself_and_says_so() -> None:
    """In a process of its own: an affinity is inherited by all that follows."""
    done = subprocess.run([sys.executable, "-c", BIND], capture_output=True, check=True, text=True, cwd=Path.cwd())
    first = min(os.sched_getaffinity(0))
    assert done.stdout.splitlines() == [
        f"rank 3: NUMA node 0, CPUs {first}",
        "True",
        "rank 4: not bound, the job has no CPU of NUMA node 1 (60000)",
        "rank 5: not bound, the NUMA node of its GPU is not known",
        "rank 6: not bound, the node has 2 NUMA nodes and the cluster file 3",
    ]


def test_a_refused_binding_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may forbid the call: training continues, slower."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    first = str(min(os.sched_getaffinity(0)))
    assert bind(0, 0, 1, ((0,),), (first,), {}) == "rank 0: not bound to NUMA node 0: Operation not permitted"
