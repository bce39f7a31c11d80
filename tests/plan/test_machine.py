"""The machine that a plan computes with: which bandwidth is taken, in which units, what of an nccl-check, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster, Compute, Host, Network, Storage
from clustertune.errors import UserError
from clustertune.host.system import MIB
from clustertune.plan.machine import MeasuredLinks, machine, read_measured
from tests.recipe.conftest import check_form


def checked(intra_gb_s: float = 362.0, inter_gb_s: float = 340.0, **change: Any) -> MeasuredLinks:
    """What was measured on two nodes, but for what is given."""
    results = [gather("intra", 1024, intra_gb_s), gather("world", 1024, inter_gb_s)]
    return MeasuredLinks.model_validate({**body(transport="NET/IB", results=results, **change), "source": "c.nccl-check.json"})


def cluster(
    nodes: int = 2, storage: dict[str, Any] | None = None, network: dict[str, Any] | None = None, **compute: Any
) -> Cluster:
    """HGX H100 nodes with eight ports of InfiniBand, but for what is given; as it may also be found by looking."""
    facts = {"gpus": 8, "gpu": "h100-sxm", "interconnect": "nvlink4", "cores": 96, "threads": 192, "memory_gb": 2000} | compute
    net = {"kind": "infiniband", "interface": "ib0", "gbit": 400, "ports": 8} | (network or {})
    return Cluster(
        name="c",
        nodes=tuple(Host(name=f"n{index}", address=f"10.0.0.{index + 1}", roles=("compute",)) for index in range(nodes)),
        compute=Compute(**facts),
        network=Network(**net),
        storage=Storage(**(storage or {})),
        source="c.yaml",
    )


def refused(*args: Any, **options: Any) -> str:
    """All problems, each in readable form."""
    with pytest.raises(UserError) as caught:
        machine(*args, **options)
    check_form(caught.value)
    return str(caught.value)


def test_the_reference_machine() -> None:
    """Units: GiB of RAM as Slurm counts them, 10^9 bytes of bandwidth, of a node between nodes and of a GPU inside one."""
    found = machine(load_cluster("rno-rtxpro6000"))
    assert (found.nodes, found.gpus_per_node, found.domain, found.generation) == (2, 8, 8, "blackwell-gddr")
    assert (found.peak_flops, found.peak_flops_fp8, found.hbm_bytes_per_s) == (480e12, 960e12, 1597e9)
    assert found.host_bytes == 3900 * 2**30
    assert found.intra.nominal_bytes_per_s == 64e9 and found.inter.nominal_bytes_per_s == 12.5e9
    assert 4.2e9 <= found.inter.bytes_per_s <= 8.0e9, "between the two published runs on 100 GbE"
    assert found.inter.source == "nominal" and "1 x 100 Gbit/s Ethernet" in found.inter.note
    assert "assumed" in found.storage_note and not found.notes


def test_a_check_comes_before_the_file_and_the_file_before_the_nominal_speed() -> None:
    """The nearer to the truth, the sooner it is taken; the note says which it is and its share of nominal. One node measured
    says nothing of the network."""
    stated = cluster(network={"measured_gb_s": 300}, measured_gb_s=350)
    for given, intra, inter, sources, words in (
        (machine(cluster()), 360e9, 352e9, "nominal nominal", "expected (ops/hardware.yaml)"),
        (machine(stated), 350e9, 300e9, "measured measured", "measured_gb_s of c.yaml: 300 GB/s, 75 % of nominal"),
        (machine(stated, measured=checked()), 362e9, 340e9, "measured measured", "of 2026-11-02: 340 GB/s over NET/IB, 85 %"),
        (machine(cluster(), measured=checked(nodes=1)), 362e9, 352e9, "measured nominal", "expected"),
    ):
        assert (given.intra.bytes_per_s, given.inter.bytes_per_s) == (intra, inter)
        assert f"{given.intra.source} {given.inter.source}" == sources and words in given.inter.note
    link = machine(cluster(network={"gbit": None, "measured_gb_s": 40})).inter  # nothing to divide by
    assert (link.bytes_per_s, link.nominal_bytes_per_s) == (40e9, 40e9) and "%" not in link.note


def test_an_nvlink_domain_reaches_over_nodes() -> None:
    """In an NVL72 a check over 16 nodes measures NVLink, per GPU, and says nothing of the network."""
    rack = cluster(16, gpus=4, gpu="gb200", interconnect="nvlink5", nvlink_domain=72, network={"gbit": 400, "ports": 4})
    plain = machine(rack)
    assert (plain.domain, plain.intra.bytes_per_s) == (72, pytest.approx(702e9))
    wide = machine(rack, measured=checked(nodes=16, gpus_per_node=4, intra_gb_s=720.0, inter_gb_s=650.0))
    assert (wide.intra.bytes_per_s, wide.inter.source) == (650e9, "nominal")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus": 0, "gpu": None, "interconnect": None}, "0 GPUs"),
        ({"gpu": "h100-smx"}, "did you mean h100-sxm?"),
        ({"gpu": None}, "which GPU it has is not known"),
        ({"interconnect": None}, "what connects the 8 GPUs"),
    ],
)
def test_a_cluster_that_cannot_be_planned_on_is_refused(given: dict[str, Any], words: str) -> None:
    """Each as one short screen."""
    assert words in refused(cluster(**given))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cluster": "d"}, "d, while the plan is for c"),
        ({"gpus_per_node": 16}, "a node of c has 8 GPUs"),
        ({"intra_gb_s": 480.0}, "480 GB/s inside a node, more than the nominal 450"),
        ({"inter_gb_s": 425.0}, "425 GB/s between nodes, more than the nominal 400"),
    ],
)
def test_a_check_of_another_machine_is_refused(change: dict[str, Any], words: str) -> None:
    """Its bandwidth would be believed before all else."""
    assert words in refused(cluster(), measured=checked(**change))


def gather(scope: str, mib: int, busbw: float, **change: Any) -> dict[str, Any]:
    """One size of an all-gather over 16 ranks."""
    algbw = round(busbw * 16 / 15, 3)
    line = {"scope": scope, "collective": "all_gather", "bytes": mib * MIB, "algbw_gb_s": algbw, "busbw_gb_s": busbw}
    return line | change


def body(**change: Any) -> dict[str, Any]:
    """A result of two nodes: the small size is bound by latency, and one of the large ones was disturbed."""
    results = [gather("intra", size, speed) for size, speed in ((1, 9.0), (256, 21.0), (512, 22.0), (1024, 22.4))]
    results += [gather("world", size, speed) for size, speed in ((1, 0.4), (256, 3.0), (512, 3.1), (1024, 1.2))]
    found = {
        "schema": "clustertune.nccl-check/1", "cluster": "c", "date": "2026-11-02", "nodes": 2, "gpus_per_node": 8,
        "backend": "nccl", "transport": "NET/Socket", "results": results,
    }  # fmt: skip
    return {key: value for key, value in (found | change).items() if value is not None}


def write(folder: Path, content: object) -> Path:
    path = folder / "c.nccl-check.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "other/1"}, "schema"),
        ({"schema": None}, "missing"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"nodes": "2"}, "integer"),
        ({"date": "2026-02-30"}, "date"),
        ({"backend": "mpi"}, "not one of nccl, gloo"),
        ({"results": []}, "empty"),
        ({"result": []}, "did you mean results?"),
        ({"results": [gather("rack", 1, 3)]}, "not one of intra, inter, world"),
        ({"results": [gather("world", 1, -3)]}, "greater than or equal to 0"),
        ({"results": [gather("world", 1, 3), gather("world", 1, 4)]}, "appears twice"),
        ({"results": [gather("world", 1, 3, busbw_gb_s=4.0)]}, "exceeds algbw_gb_s"),
        ({"results": [gather("world", 1, 0.0)]}, "busbw_gb_s 0"),
        ({"results": [gather("world", 1, 3, collective="all_reduce")]}, "no all_gather"),
        ({"nodes": 1, "results": [gather("inter", 1, 3)]}, "nodes is 1"),
        ({"gpus_per_node": 1, "results": [gather("intra", 1, 3)]}, "gpus_per_node is 1"),
    ],
)
def test_a_wrong_result_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """A result that was edited by hand and contradicts itself is refused with the reason."""
    with pytest.raises(UserError) as caught:
        read_measured(write(tmp_path, body(**change)))
    check_form(caught.value)
    assert any(words in str(problem) for problem in caught.value.problems), caught.value
