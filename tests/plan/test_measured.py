"""Results of an nccl-check: what is read, what a plan takes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.errors import UserError
from clustertune.plan.measured import find_measured, read_measured
from tests.recipe.conftest import check_form

MIB = 2**20


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


def test_what_is_taken_of_a_result(tmp_path: Path) -> None:
    """The median of the three largest sizes, so that neither the small size nor the disturbed one decides; an all-gather alone,
    for an all-reduce may run in the switch (NVLink SHARP): 475 GB/s on links of 450; and all GPUs of all nodes before some:
    ``inter`` may be one GPU per node, which one port serves."""
    found = read_measured(write(tmp_path, body()))
    assert (found.world, found.transport, found.date) == (16, "NET/Socket", "2026-11-02")
    sharp = [gather("intra", 1024, 360.0), gather("intra", 2048, 475.0, collective="all_reduce", algbw_gb_s=271.0)]
    some = gather("inter", 512, 2.0)
    for change, intra, inter in (
        ({}, 22.0, 3.0), ({"results": sharp}, 360.0, None), ({"results": [some]}, None, 2.0),
        ({"results": [some, gather("world", 512, 8.0)]}, None, 8.0),
    ):  # fmt: skip
        found = read_measured(write(tmp_path, body(**change)))
        assert (found.intra_gb_s, found.inter_gb_s) == (intra, inter)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "other/1"}, "schema"),
        ({"schema": None}, "missing"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"nodes": "2"}, "integer"),
        ({"nodes": True}, "nodes"),
        ({"date": "2 November"}, "date"),
        ({"date": "2026-02-30"}, "date"),
        ({"backend": "mpi"}, "not one of nccl, gloo"),
        ({"results": []}, "empty"),
        ({"result": []}, "did you mean results?"),
        ({"results": [gather("rack", 1, 3)]}, "not one of intra, inter, world"),
        ({"results": [gather("world", 1, -3)]}, "greater than or equal to 0"),
        ({"results": [gather("world", 1, 3, busbw_gb_s="3")]}, "number"),
        ({"results": [gather("world", 1, 3), gather("world", 1, 4)]}, "appears twice"),
        ({"results": [gather("world", 1, 3, busbw_gb_s=4.0)]}, "exceeds algbw_gb_s"),
        ({"results": [gather("world", 1, 0.0)]}, "busbw_gb_s 0"),
        ({"results": [gather("world", 1, 3, collective="all_reduce")]}, "no all_gather"),
        ({"nodes": 1, "results": [gather("inter", 1, 3)]}, "nodes is 1"),
        ({"gpus_per_node": 1, "results": [gather("intra", 1, 3)]}, "gpus_per_node is 1"),
    ],
)
def test_a_wrong_result_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """A program writes the file; whoever edits it by hand learns what no longer holds."""
    with pytest.raises(UserError) as caught:
        read_measured(write(tmp_path, body(**change)))
    check_form(caught.value)
    assert any(words in str(problem) for problem in caught.value.problems), caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"), ("[]", "no nccl-check result"), ("{", "not valid JSON"), ('{"schema": NaN}', "NaN"),
        ('{"nodes": 1, "nodes": 2}', "'nodes' appears twice"), ("[" * 5000, "not valid JSON"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """A cut file, a list, a key that appears twice; a mistyped path is not a missing measurement."""
    with pytest.raises(UserError, match=words) as caught:
        read_measured(write(tmp_path, text))
    check_form(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        read_measured(tmp_path / "none.json")


def test_every_problem_comes_at_once(tmp_path: Path) -> None:
    """One run of the check fixes them all."""
    with pytest.raises(UserError) as caught:
        read_measured(write(tmp_path, body(nodes=0, backend="mpi", date="x")))
    assert {problem.key for problem in caught.value.problems} == {"nodes", "backend", "date"}


def test_the_result_beside_the_cluster_file_is_found(tmp_path: Path, repo: Path) -> None:
    """By its name, wherever the cluster file lies; none is not an error."""
    text = (repo / "ops" / "clusters" / "rno-rtxpro6000.yaml").read_text()
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("name: rno-rtxpro6000", "name: c"))
    cluster = load_cluster(str(path))
    assert find_measured(cluster) is None
    write(tmp_path, body())
    found = find_measured(cluster)
    assert found and found.inter_gb_s == 3.0


def test_the_result_of_a_shipped_cluster_lies_in_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the command happens to be called."""
    cluster = load_cluster("rno-rtxpro6000")
    path = tmp_path / "rno-rtxpro6000.nccl-check.json"
    path.write_text(json.dumps(body(cluster="rno-rtxpro6000")))
    monkeypatch.setattr("clustertune.plan.measured.CLUSTERS", tmp_path)
    found = find_measured(cluster)
    assert found and found.source == str(path)
