"""The ranks' environment: each variable for a reason, and none without effect."""

from __future__ import annotations

import re
from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.cluster.schema import Cluster
from clustertune.launch.environment import environment


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("rno-rtxpro6000")


def values(cluster: Cluster, **changes: Any) -> dict[str, str]:
    job = {"world_size": 16, "ranks_per_node": 8, "cpus_per_node": 256, "job": "123_4", "cpu_only": False}
    settings = environment(cluster, **(job | changes))  # type: ignore[arg-type]
    assert len({setting.name for setting in settings}) == len(settings)
    for setting in settings:
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*", setting.name)
        assert setting.reason and "\n" not in setting.reason and len(setting.reason) <= 180, setting
        assert re.fullmatch(r"[\x21-\x7e]+", setting.value), setting
    return {setting.name: setting.value for setting in settings}


def with_network(cluster: Cluster, **changes: Any) -> Cluster:
    return cluster.model_copy(update={"network": cluster.network.model_copy(update=changes)})


def test_infiniband_is_left_on(cluster: Cluster) -> None:
    """Sockets still find the peers; the adapters that the file names are the only ones."""
    found = values(with_network(cluster, kind="infiniband", hca=("mlx5_0:1", "mlx5_1")))
    assert "NCCL_IB_DISABLE" not in found and "NCCL_SOCKET_NTHREADS" not in found
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1" and found["NCCL_SOCKET_IFNAME"] == "=bond0"
    assert "NCCL_IB_HCA" not in values(with_network(cluster, kind="roce"))


# --- what the cluster file says itself ---------------------------------------------------------------------------------


def test_the_cluster_file_wins_and_it_is_told(cluster: Cluster) -> None:
    """network.environment takes the place of what is derived, each variable once; without GPUs only gloo's counts."""
    own = {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "4", "NCCL_MIN_NCHANNELS": "8", "GLOO_SOCKET_IFNAME": "eth9"}
    file = with_network(cluster, environment=own)
    assert values(file).items() >= own.items()
    found = environment(file, world_size=16, ranks_per_node=8, cpus_per_node=256, job="1", cpu_only=False)
    reasons = {setting.name: setting.reason for setting in found if "the cluster file says so" in setting.reason}
    assert reasons == {
        "NCCL_SOCKET_NTHREADS": "the cluster file says so, instead of 4",
        "NCCL_MIN_NCHANNELS": "the cluster file says so",
        "GLOO_SOCKET_IFNAME": "the cluster file says so, instead of bond0",
    }
    on_cpus = values(file, cpu_only=True)
    assert on_cpus["GLOO_SOCKET_IFNAME"] == "eth9" and not [name for name in on_cpus if name.startswith("NCCL_")]
