"""What a cluster's links should carry: the planner's figures, and nothing where the cluster file says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertune.cluster.hardware import read_hardware
from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.nccl_check.check import expected
from clustertune.plan.machine import machine

REFERENCE = "rno-rtxpro6000"


def changed(section: str, **values: object) -> Cluster:
    """The reference cluster with other facts."""
    cluster = load_cluster(REFERENCE)
    return cluster.model_copy(update={section: getattr(cluster, section).model_copy(update=values)})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("network", {}),
        ("network", {"kind": "infiniband", "gbit": 400.0, "ports": 8}),
        ("network", {"kind": "roce", "gbit": 100.0, "ports": 2}),
        ("network", {"gbit": 1.0}),
        ("compute", {"interconnect": "nvlink4", "gpu": "h100-sxm"}),
        ("compute", {"interconnect": "pcie4"}),
    ],
)
def test_it_is_what_the_planner_computes_with(section: str, values: dict[str, object]) -> None:
    """One home for each figure: a plan and a verdict that differ are both doubted."""
    cluster = changed(section, **values)
    found, planned = expected(cluster), machine(cluster)
    for level, link in (("intra", planned.intra), ("inter", planned.inter)):
        assert found[level]["expected_gb_s"] == pytest.approx(link.bytes_per_s / 1e9)
        assert found[level]["nominal_gb_s"] == pytest.approx(link.nominal_bytes_per_s / 1e9)
        assert found[level]["sources"] and all("ops/hardware.yaml" in source for source in found[level]["sources"])


def test_what_was_measured_is_not_what_should_be() -> None:
    """A cluster file may hold the figure of the fault that the check looks for."""
    slow = changed("network", measured_gb_s=0.1)
    assert expected(slow)["inter"] == expected(load_cluster(REFERENCE))["inter"]


def test_what_nobody_said_is_left_out() -> None:
    """No nominal speed, no verdict on speed."""
    assert "inter" not in expected(changed("network", gbit=None))
    assert "inter" not in expected(changed("network", kind="unknown"))
    assert "intra" not in expected(changed("compute", interconnect=None))
    assert "intra" not in expected(changed("compute", gpus=1))
    alone = load_cluster(REFERENCE)
    assert "inter" not in expected(alone.model_copy(update={"nodes": alone.nodes[:2]}))


def test_the_rules_are_told_what_the_file_says() -> None:
    """Kind, interface and adapters of the cluster file are what several rules compare with."""
    found = expected(changed("network", hca=("mlx5_0:1",)))
    assert found["network"]["kind"] == "ethernet" and found["network"]["interface"] == "bond0"
    assert found["network"]["hca"] == ["mlx5_0:1"] and found["network"]["subnet"] == "10.21.133.0/24"
    assert found["compute"] == {"gpus": 8, "gpu": "rtx-pro-6000-blackwell-server", "interconnect": "pcie5", "nvlink_domain": 0}
    assert read_hardware().links["pcie5"].hint == found["intra"]["hint"]


def test_reading_takes_the_clusters_of_the_repository() -> None:
    """Every cluster file that is shipped has something to expect."""
    for path in (Path(__file__).resolve().parents[2] / "ops" / "clusters").glob("*.yaml"):
        assert {"intra", "inter"} <= set(expected(load_cluster(path.stem)))
