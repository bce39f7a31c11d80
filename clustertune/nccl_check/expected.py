"""What the links of a cluster should carry, from its file and ops/hardware.yaml: what measurements are judged against.

The same figures as the planner's for a cluster that nobody measured (``clustertune.plan.machine``): nominal speed by the share
of it that healthy clusters were seen to reach. ``measured_gb_s`` of the cluster file is left aside: it may be what is wrong.
"""

from __future__ import annotations

from typing import Any

from clustertune.config.cluster_schema import Cluster
from clustertune.config.hardware import HARDWARE, LinkFacts, NetworkFacts, read_hardware

_FILE = f"ops/{HARDWARE.name}"


def expected(cluster: Cluster | None) -> dict[str, Any]:
    """What a check on ``cluster`` should find; empty without a cluster.

    ``intra``: an all-gather inside a node, GB/s for each GPU; ``inter``: over several nodes, GB/s for each node and direction
    (all its ports). Each has ``nominal_gb_s``, ``expected_gb_s``, ``sources`` and ``hint``, and is left out where the cluster
    file does not say enough. ``network`` and ``compute``: what the rules ask of the cluster file. Raises UserError where
    ops/hardware.yaml cannot be read.
    """
    if cluster is None:
        return {}
    compute, network, hardware = cluster.compute, cluster.network, read_hardware()
    found: dict[str, Any] = {
        "compute": {
            "gpus": compute.gpus,
            "gpu": compute.gpu,
            "interconnect": compute.interconnect,
            "nvlink_domain": compute.nvlink_domain or 0,
        },
        "network": {
            "kind": network.kind,
            "gbit": network.gbit,
            "ports": network.ports,
            "interface": network.interface,
            "subnet": network.subnet,
            "hca": list(network.hca),
        },
    }
    link = hardware.links.get(compute.interconnect or "")
    if link is not None and compute.gpus > 1:
        found["intra"] = _carries(f"links.{compute.interconnect}", link.gb_s, link.gb_s * link.share, link)
    facts = hardware.networks.get(network.kind)
    nominal = (network.gbit or 0.0) * network.ports / 8
    if facts is not None and nominal and len(cluster.compute_nodes) > 1:
        reached = min(nominal * facts.share, facts.most_gb_s or nominal)
        found["inter"] = _carries(f"networks.{network.kind}", nominal, reached, facts)
    return found


def _carries(key: str, nominal: float, reached: float, facts: LinkFacts | NetworkFacts) -> dict[str, Any]:
    return {
        "nominal_gb_s": nominal,
        "expected_gb_s": reached,
        "sources": [f"{_FILE} {key}: {name}: {source}" for name, source in facts.sources.items() if name != "latency_us"],
        "hint": facts.hint,
    }
