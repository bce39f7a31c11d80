"""One file for the planner, the report and the judge: what may be kept, and that a plan reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.errors import UserError
from clustertune.nccl_check import check
from clustertune.nccl_check import result as table
from clustertune.plan.measured import find_measured, read_measured
from clustertune.report import page


def entry(scope: str, collective: str = "all_gather", size: int = 1 << 30, busbw: float = 40.0, **more: Any) -> dict[str, Any]:
    figures = {"ranks": 16, "iterations": 20, "median_s": 0.02, "spread": 0.05, "correct": True, "bytes": size}
    return {"scope": scope, "collective": collective, "algbw_gb_s": busbw * 16 / 15, "busbw_gb_s": busbw, **figures, **more}


def document(**changes: Any) -> dict[str, Any]:
    """What a check of two nodes of eight GPUs finds."""
    pair = {key: value for key, value in entry("world", "p2p").items() if key != "scope"}
    found = {
        "schema": "clustertune.nccl-check/1", "cluster": "mine", "date": "2026-11-02", "nodes": 2, "gpus_per_node": 8,
        "backend": "nccl", "backend_why": "8 GPUs", "transport": "NET/IB", "hosts": ["n1", "n2"], "seconds": 118.2,
        "results": [entry("world"), entry("intra", busbw=350.0), entry("world", "p2p"), entry("world", "broadcast")],
        "per_node": [{"node": "n1", **pair}],
        "per_pair": [{"nodes": ["n1", "n2"], **pair}, {"nodes": ["n2", "n1"], **pair, "busbw_gb_s": 10.0}],
        "p2p_probe": [{"node": "n1", "gpus": [0, 1], "status": "ok", "seconds": 4.1, "message": ""}],
        "hung": [],
        "left_out": [],
        "problems": [],
        "facts": [{"hostname": "n1"}],
        "software": [{"node": "n1", "torch": "2.13.0", "ranks": [0]}],
        "environment": {"NCCL_DEBUG": "WARN"},
        "expected": {"inter": {"nominal_gb_s": 50.0, "expected_gb_s": 45.0}},
        "verdict": {"status": "pass", "headline": "PASS: fine", "findings": []},
    }  # fmt: skip
    return {**found, **changes}


def cluster(folder: Path, gpus: int = 8, nodes: int = 2) -> Cluster:
    """Of a file in ``folder``."""
    hosts = "".join(f"  - {{name: n{i}, address: 10.0.0.{i}, roles: [compute]}}\n" for i in range(1, nodes + 1))
    kind = "gpu: h100-sxm, interconnect: nvlink4, " if gpus else "interconnect: none, "
    path = folder / "mine.yaml"
    path.write_text(
        f"name: mine\nnodes:\n{hosts}compute: {{gpus: {gpus}, {kind}cores: 64, threads: 128, memory_gb: 1000}}\n"
        "network: {interface: eth0, kind: infiniband, gbit: 400}\n"
    )
    return load_cluster(str(path))


def test_a_plan_reads_what_is_kept(tmp_path: Path) -> None:
    """The whole document, beside the cluster file, for all who read that: a job writes with umask 077."""
    machine = cluster(tmp_path)
    (tmp_path / "mine.yaml").chmod(0o644)
    before = os.umask(0o077)
    try:
        path = check.keep(document(), machine)
    finally:
        os.umask(before)
    assert path == tmp_path / "mine.nccl-check.json"
    assert path.stat().st_mode & 0o777 == 0o644
    found = find_measured(machine)
    assert found is not None
    assert (found.inter_gb_s, found.intra_gb_s, found.world) == (40.0, 350.0, 16)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"backend": "gloo"}, "says nothing about the cluster's GPUs"),
        ({"hosts": ["n1", "laptop"]}, "laptop: no compute node of mine"),
        ({"nodes": 1, "hosts": ["n1"]}, "one node of several"),
        ({"hung": [{}]}, "hung or was wrong"),
        ({"results": [entry("world", correct=False)]}, "hung or was wrong"),
        ({"results": [entry("world", "all_reduce")]}, "no all_gather"),
        ({"results": []}, "no all_gather"),
    ],
)
def test_what_is_not_kept(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    """A plan would believe it for months."""
    with pytest.raises(UserError, match=word):
        check.keep(document(**changes), cluster(tmp_path))
    assert not (tmp_path / "mine.nccl-check.json").exists()


def test_a_cluster_that_was_found_has_no_place(tmp_path: Path) -> None:
    """Nothing is written anywhere."""
    machine = cluster(tmp_path).model_copy(update={"source": "this machine"})
    assert "no file" in check.not_kept(document(), machine)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("per_pair", 0, "nodes"), ["n1"]),
        (("per_pair", 0, "busbw_gb_s"), -1),
        (("results", 0, "collective"), "all_to_all"),
        (("results", 0, "spread"), "5 %"),
        (("unheard_of",), 1),
    ],
)
def test_the_file_is_read_strictly(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    """Also in what a plan does not need: a wrong file is another program's."""
    changed = json.loads(json.dumps(document()))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "x.json"
    file.write_text(json.dumps(changed))
    with pytest.raises(UserError) as error:
        read_measured(file)
    assert str(path[0]) in str(error.value)


# --- for people --------------------------------------------------------------------------------------------------------


def test_the_table_has_the_share_of_nominal_and_the_slow_way() -> None:
    """What a person looks for first."""
    rows = [row for row in table.result_rows(document()) if row[:2] == ["world", "all_gather"]]
    assert rows == [["world", "all_gather", "1 GiB", "42.67", "40", "80%", "20 ms", "5%", "ok"]]
    assert next(table.pair_rows(document()))[:4] == ["n2", "n1", "1 GiB", "10"]


def test_the_table_says_what_went_wrong() -> None:
    """Hung, wrong, left out, and what a node said."""
    hung = {"scope": "world", "collective": "all_reduce", "bytes": 1024, "seconds": 9.0, "ranks": [1], "hosts": ["n2"]}
    hung["message"] = "x"
    left = [{"scope": "world", "collective": "p2p", "bytes": 1 << n, "reason": "no time was left"} for n in range(10, 20)]
    lines = list(table.notes(document(hung=[hung], left_out=left, problems=[{"node": "n1", "message": "no facts"}])))
    assert lines[0] == "did not end: all_reduce (world) of 1 KiB on n2: x"
    assert lines[1] == "n1: no facts"
    assert lines[2].startswith("left out: p2p (world) of 512 KiB, 256 KiB") and lines[2].endswith(
        "and 6 more: no time was left"
    )
    assert next(table.result_rows(document(results=[entry("world", correct=False)])))[-1] == "WRONG"


def test_the_report_draws_it(tmp_path: Path) -> None:
    """The newest of the run, a line for each collective, and the nominal one."""
    for name, headline in (("7-0", "old"), ("7-1", "<b>new</b>")):
        folder = tmp_path / "nccl-check" / name
        folder.mkdir(parents=True)
        sizes = [entry("world", name, 1 << n, 40.0 * n / 30) for name in ("all_gather", "p2p") for n in range(10, 31, 4)]
        verdict = {"status": "warn", "headline": headline, "findings": []}
        (folder / "result.json").write_text(json.dumps(document(results=sizes, verdict=verdict)))
        import os

        os.utime(folder / "result.json", (int(name[-1]) + 1, int(name[-1]) + 1))
    found = page.section(tmp_path, None)
    assert found is not None
    assert found["headline"] == "<b>new</b>", "the page escapes it"
    assert "nominal 50" in found["svg"] and "all_gather" in found["svg"] and "broadcast" not in found["svg"]
    assert found["rows"][0][:2] == ["world", "all_gather"]


def test_the_report_takes_the_clusters(tmp_path: Path) -> None:
    """A run without a check of its own; one that cannot be read is left out."""
    machine = cluster(tmp_path)
    dumped = machine.model_dump(mode="json")
    assert page.section(tmp_path / "run", dumped) is None
    check.keep(document(), machine)
    found = page.section(tmp_path / "run", dumped)
    assert found is not None
    assert "NET/IB" in found["subtitle"]
    (tmp_path / "mine.nccl-check.json").write_text("{")
    assert page.section(tmp_path / "run", dumped) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "clustertune.nccl-check/1"}', '{"schema": "clustertune.nccl-check/1", "results": 3}']
)
def test_the_report_comes_without_a_broken_one(tmp_path: Path, text: str) -> None:
    """A run that failed is the one that a person wants to look at."""
    folder = tmp_path / "nccl-check" / "1-0"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(text)
    assert page.section(tmp_path, {"source": 3}) is None
