"""Links, measured bandwidths and storage speeds in cluster files."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from clustertune.config.cluster import read_cluster
from clustertune.config.cluster_schema import Cluster
from clustertune.config.yamlfile import parse_yaml
from clustertune.errors import UserError
from tests.config.conftest import check_form


def file(compute: dict[str, Any], network: dict[str, Any], nodes: int = 2, **sections: Any) -> Cluster:
    """A cluster of HGX H100 nodes with InfiniBand, but for what is given; None takes a key away."""
    facts = {"gpus": 8, "gpu": "h100-sxm", "interconnect": "nvlink4", "cores": 96, "threads": 192, "memory_gb": 2000} | compute
    net = {"kind": "infiniband", "interface": "ib0", "gbit": 400, "ports": 8} | network
    body = {
        "name": "c",
        "nodes": [{"name": f"n{index}", "address": f"10.0.0.{index + 1}", "roles": ["compute"]} for index in range(nodes)],
        "compute": {key: value for key, value in facts.items() if value is not None},
        "network": {key: value for key, value in net.items() if value is not None},
        **sections,
    }
    return read_cluster(parse_yaml(yaml.safe_dump(body, sort_keys=False), "c.yaml"))


def test_the_new_keys_are_read() -> None:
    """Defaults say one port, no domain beyond the node, and nothing measured."""
    plain = file({}, {"ports": None})
    assert (plain.network.ports, plain.network.measured_gb_s) == (1, None)
    assert (plain.compute.nvlink_domain, plain.compute.measured_gb_s, plain.storage.read_gb_s) == (None, None, None)
    full = file({"measured_gb_s": 361.5}, {"measured_gb_s": 340}, storage={"read_gb_s": 12, "write_gb_s": 4})
    assert (full.compute.measured_gb_s, full.network.measured_gb_s, full.storage.write_gb_s) == (361.5, 340, 4)
    rack = {"gpus": 4, "gpu": "gb200", "interconnect": "nvlink5", "nvlink_domain": 72}
    assert file(rack, {}, nodes=16).compute.nvlink_domain == 72


@pytest.mark.parametrize("kind", ["omnipath", "slingshot", "efa"])
def test_networks_with_a_plugin_of_their_own_are_known(kind: str) -> None:
    """They are neither Ethernet nor verbs: nothing is set for them, and a plan has a share."""
    assert file({}, {"kind": kind, "gbit": 100, "ports": 4}).network.kind == kind


def test_who_knows_only_what_was_measured_gives_that() -> None:
    """A tenant of a cloud sees no port speed."""
    assert file({}, {"gbit": None, "ports": None, "measured_gb_s": 40}).network.gbit is None


@pytest.mark.parametrize(
    ("compute", "network", "key", "words"),
    [
        ({"measured_gb_s": 480}, {}, "compute.measured_gb_s", "more than the 450 GB/s of nvlink4"),
        ({"measured_gb_s": 0}, {}, "compute.measured_gb_s", "greater than 0"),
        ({"gpus": 1, "interconnect": "none", "measured_gb_s": 5}, {}, "compute.measured_gb_s", "while interconnect is none"),
        ({"gpus": 0, "gpu": None, "interconnect": None, "measured_gb_s": 5}, {}, "compute.measured_gb_s", "while gpus is 0"),
        ({"gpus": 0, "gpu": None, "interconnect": None, "nvlink_domain": 8}, {}, "compute.nvlink_domain", "while gpus is 0"),
        ({"nvlink_domain": 4}, {}, "compute.nvlink_domain", "not several whole nodes of 8"),
        ({"nvlink_domain": 12}, {}, "compute.nvlink_domain", "not several whole nodes of 8"),
        ({"interconnect": "pcie5", "nvlink_domain": 16}, {}, "compute.nvlink_domain", "while interconnect is pcie5"),
        ({"interconnect": "nvlink3"}, {}, "compute.interconnect", "h100-sxm has NVLink 4"),
        ({"gpu": "l40s"}, {}, "compute.interconnect", "l40s has no NVLink that joins all GPUs"),
        ({}, {"measured_gb_s": 425}, "network.measured_gb_s", "more than 8 x 400 Gbit/s carry, 400 GB/s"),
        ({}, {"ports": None, "measured_gb_s": 340}, "network.measured_gb_s", "fix gbit or ports"),
        ({}, {"ports": 0}, "network.ports", "greater than or equal to 1"),
        ({}, {"gbit": None}, "network.gbit", "or measured_gb_s"),
        ({}, {"kind": "none", "measured_gb_s": 3}, "network.measured_gb_s", "while kind is none"),
        ({}, {"kind": "slingshot", "hca": ["mlx5_0"]}, "network.hca", "while kind is slingshot"),
        ({}, {"kind": "omnipaht"}, "network.kind", "did you mean omnipath?"),
    ],
)
def test_a_link_that_cannot_be_is_refused(compute: dict[str, Any], network: dict[str, Any], key: str, words: str) -> None:
    """Most often Gbit/s written as GB/s, both directions counted, or one port of eight."""
    with pytest.raises(UserError) as caught:
        file(compute, network, nodes=2)
    check_form(caught.value)
    assert any(problem.key == key and words in str(problem) for problem in caught.value.problems), caught.value


def test_what_measuring_adds_in_noise_is_no_contradiction() -> None:
    """Clocks and rounding put a perfect link a few percent above its name."""
    assert file({"measured_gb_s": 455}, {"measured_gb_s": 410})
