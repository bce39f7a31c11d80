"""One file for the planner, the report and the judge: what may be kept, and that a plan reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clustertune.cluster.hardware import read_hardware
from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.errors import UserError
from clustertune.nccl_check import link_check as check
from clustertune.plan.machine import find_measured, read_measured
from clustertune.plan.machine import machine as planned_machine
from clustertune.report import page
from tests.launch.machines import machine


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
        "environment": {"NCCL_DEBUG": "WARN"},
        "expected": {"inter": {"nominal_gb_s": 50.0, "expected_gb_s": 45.0}},
        "verdict": {"status": "pass", "headline": "PASS: fine", "findings": []},
    }  # fmt: skip
    return {**found, **changes}


def cluster(folder: Path) -> Cluster:
    """Of a file in ``folder``."""
    path = folder / "mine.yaml"
    path.touch()
    return machine(name="mine", source=str(path))


def test_a_plan_reads_what_is_kept(tmp_path: Path) -> None:
    """The whole document, beside the cluster file, for all who read that: a job writes with umask 077."""
    mine = cluster(tmp_path)
    (tmp_path / "mine.yaml").chmod(0o644)
    before = os.umask(0o077)
    try:
        path = check.keep(document(), mine)
    finally:
        os.umask(before)
    assert path == tmp_path / "mine.nccl-check.json"
    assert path.stat().st_mode & 0o777 == 0o644
    found = find_measured(mine)
    assert found is not None
    assert (found.inter_gb_s, found.intra_gb_s, found.world) == (40.0, 350.0, 16)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"backend": "gloo"}, "says nothing about the cluster's GPUs"),
        ({"hosts": ["n1", "laptop"]}, "laptop: no compute node of mine"),
        ({"nodes": 1, "hosts": ["n1"]}, "one node of several"), ({"hung": [{}]}, "hung or was wrong"),
        ({"results": [entry("world", correct=False)]}, "hung or was wrong"),
        ({"results": [entry("world", "all_reduce")]}, "no all_gather"), ({"results": []}, "no all_gather"),
    ],
)  # fmt: skip
def test_what_is_not_kept(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    """A plan would believe it for months."""
    with pytest.raises(UserError, match=word):
        check.keep(document(**changes), cluster(tmp_path))
    assert not (tmp_path / "mine.nccl-check.json").exists()


def test_the_file_is_read_strictly(tmp_path: Path) -> None:
    """Also in what a plan does not need: a wrong file is another program's."""
    pair, row, file = document()["per_pair"][0], document()["results"][0], tmp_path / "x.json"
    wrong = [{"per_pair": [{**pair, "nodes": ["n1"]}]}, {"per_pair": [{**pair, "busbw_gb_s": -1}]}, {"unheard_of": 1}]
    for changes in [*wrong, {"results": [{**row, "collective": "all_to_all"}]}, {"results": [{**row, "spread": "5 %"}]}]:
        file.write_text(json.dumps(document(**changes)))
        with pytest.raises(UserError, match=next(iter(changes))):
            read_measured(file)


# --- for people --------------------------------------------------------------------------------------------------------


def test_the_report_shows_it(tmp_path: Path) -> None:
    """The newest of the run."""
    for name, headline in (("7-0", "old"), ("7-1", "<b>new</b>")):
        folder = tmp_path / "nccl-check" / name
        folder.mkdir(parents=True)
        sizes = [entry("world", name, 1 << n, 40.0 * n / 30) for name in ("all_gather", "p2p") for n in range(10, 31, 4)]
        verdict = {"status": "warn", "headline": headline, "findings": []}
        (folder / "result.json").write_text(json.dumps(document(results=sizes, verdict=verdict)))
        os.utime(folder / "result.json", (int(name[-1]) + 1, int(name[-1]) + 1))
    found = page.section(tmp_path)
    assert found is not None
    assert found["headline"] == "<b>new</b>", "the page escapes it"
    assert found["file"] == "nccl-check/7-1/result.json"


# --- what a cluster's links should carry: the planner's figures, and nothing where the cluster file says nothing ------------

REFERENCE = "rno-rtxpro6000"


def changed(section: str, **values: object) -> Cluster:
    """The reference cluster with other facts."""
    cluster = load_cluster(REFERENCE)
    return cluster.model_copy(update={section: getattr(cluster, section).model_copy(update=values)})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("network", {}), ("network", {"kind": "infiniband", "gbit": 400.0, "ports": 8}), ("network", {"gbit": 1.0}),
        ("network", {"kind": "roce", "gbit": 100.0, "ports": 2}), ("compute", {"interconnect": "pcie4"}),
        ("compute", {"interconnect": "nvlink4", "gpu": "h100-sxm"}),
    ],
)  # fmt: skip
def test_it_is_what_the_planner_computes_with(section: str, values: dict[str, object]) -> None:
    """One home for each figure: a plan and a verdict that differ are both doubted."""
    cluster = changed(section, **values)
    found, planned = check.expected(cluster), planned_machine(cluster)
    for level, link in (("intra", planned.intra), ("inter", planned.inter)):
        assert found[level]["expected_gb_s"] == pytest.approx(link.bytes_per_s / 1e9)
        assert found[level]["nominal_gb_s"] == pytest.approx(link.nominal_bytes_per_s / 1e9)
        assert found[level]["sources"] and all("ops/hardware.yaml" in source for source in found[level]["sources"])


def test_the_rules_are_told_what_the_file_says() -> None:
    """Kind, interface and adapters of the cluster file are what several rules compare with."""
    found = check.expected(changed("network", hca=("mlx5_0:1",)))
    assert found["network"]["kind"] == "ethernet" and found["network"]["interface"] == "bond0"
    assert found["network"]["hca"] == ["mlx5_0:1"] and found["network"]["subnet"] == "10.21.133.0/24"
    assert found["compute"] == {"gpus": 8, "gpu": "rtx-pro-6000-blackwell-server", "interconnect": "pcie5", "nvlink_domain": 0}
    assert read_hardware().links["pcie5"].hint == found["intra"]["hint"]
