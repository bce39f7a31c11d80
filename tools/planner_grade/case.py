"""A published run as the planner's own input: the strategy, the machine and the counted model that its source describes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from clustertune.config.cluster_checks import read_cluster
from clustertune.config.distribution import Recompute
from clustertune.config.parameters import count, lora_parameter_count
from clustertune.config.yamlfile import Document
from clustertune.plan import memory
from clustertune.plan.constants import Constants
from clustertune.plan.machine import PlanMachine, machine
from clustertune.plan.step import Step, step
from clustertune.plan.strategy import ModelShape, Strategy
from tools.planner_grade.data import DTYPE_BYTES, PublishedRun, published_clusters, published_models

HALF_LAYER = 0.5
"""Share of a layer's forward pass that torchtitan's selective recomputation repeats: every second matrix product."""


_SAME = (
    "kind", "tp", "pp", "cp", "ep", "virtual", "replicas", "reshard", "micro_batch", "accumulation", "sequence", "compiled",
    "attention", "sequence_parallel", "fused_loss", "overlap_tp", "reduce_each", "whole_loss", "half_loss", "holds_logits",
)  # fmt: skip
"""Fields that a published run and a strategy share."""


@dataclass(frozen=True)
class Case:
    """A published run ready to be planned."""

    run: PublishedRun
    shape: ModelShape
    machine: PlanMachine

    def step(self, constants: Constants) -> Step:
        return step(self.shape, self.machine, constants)

    def peak(self, constants: Constants) -> float:
        """Bytes of the largest moment."""
        return max(moment.bytes for moment in memory.moments(self.shape, constants))


def case(run: PublishedRun) -> Case:
    """Turn a row into what the model computes with."""
    architecture = published_models()[run.model].architecture
    counted = count(architecture)
    assert counted is not None, run.model
    adapters, rank, targets = _lora(run, architecture)
    found = _machine(run)
    shape = ModelShape(counted, _strategy(run), adapters or counted.total, adapters, rank, targets)
    return Case(run, replace(shape, cudnn_attention=found.has_cudnn_attention), found)


def _lora(run: PublishedRun, architecture: dict[str, Any]) -> tuple[int, int, tuple[str, ...]]:
    if run.lora is None:
        return 0, 1, ()
    targets = run.lora["target_modules"]
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapted = names if targets == "all-linear" else tuple(targets)
    return lora_parameter_count(architecture, run.lora) or 0, int(run.lora["r"]), adapted


def _machine(run: PublishedRun) -> PlanMachine:
    published = published_clusters()[run.cluster]
    document = cluster_document(run)
    document["network"] = {"interface": "eth0", **document["network"]}
    if run.nodes > 1 and document["network"]["kind"] == "none":
        document["network"] |= {"kind": "infiniband", "gbit": 400}  # no rank leaves the NVLink domain: nothing reads it
    found = machine(read_cluster(Document(f"published cluster {run.cluster}", document)), nodes=run.nodes)
    changes: dict[str, Any] = {"peak_flops": found.peak_flops * published.peak_share}
    if found.peak_flops_fp8:
        changes["peak_flops_fp8"] = found.peak_flops_fp8 * published.peak_share
    if published.hbm_gb_s:
        changes["hbm_bytes_per_s"] = published.hbm_gb_s * 1e9
    return replace(found, **changes)


def _strategy(run: PublishedRun) -> Strategy:
    """The sharding as each kind does it: FSDP over all data- and context-parallel ranks, Megatron's distributed optimizer."""
    sharded = run.dp * run.cp // run.replicas if run.kind.startswith("FSDP") else 1
    states = run.dp * run.cp if run.kind == "Megatron" else sharded
    weight, reduced = DTYPE_BYTES[run.weight_dtype], DTYPE_BYTES[run.reduce_dtype]
    trained_full = run.method == "full"
    share = run.checkpointed * (HALF_LAYER if run.recompute == "op" else 1.0)
    return Strategy(
        **{name: getattr(run, name) for name in _SAME}, world_size=run.world, ranks_per_node=run.gpus_per_node,
        data_parallel_size=run.dp, weight_shards=sharded, gradient_shards=sharded, state_shards=states,
        packing=run.packing == "full", recompute=Recompute(share=share), lora=not trained_full, weight_bytes=weight,
        gather_bytes=min(DTYPE_BYTES[run.gather_dtype], weight), gradient_bytes=reduced, reduce_bytes=reduced,
        state_bytes=2 * DTYPE_BYTES[run.state_dtype] + (4 if run.kind == "Megatron" and trained_full else 0),
        compute=run.compute_dtype,
    )  # fmt: skip


def cluster_document(run: PublishedRun) -> dict[str, Any]:
    """The content of a cluster file for the machine of a run, with as many nodes as the run used.

    Cores and storage are placeholders: no plan of time or memory per GPU reads them.
    """
    cluster = published_clusters()[run.cluster]
    roles = {"roles": ["compute"]}
    compute: dict[str, Any] = {
        "gpus": cluster.gpus_per_node, "gpu": cluster.gpu, "interconnect": cluster.interconnect, "cores": 64, "threads": 64,
        "memory_gb": cluster.host_gb,
    }  # fmt: skip
    if cluster.domain:
        compute["nvlink_domain"] = cluster.domain
    network: dict[str, Any] = {"kind": "none"}
    if cluster.network and run.nodes > 1:
        network = {"kind": cluster.network.kind, "ports": cluster.network.ports}
        network |= {"gbit": cluster.network.gbit} if cluster.network.gbit else {}
        network |= {"measured_gb_s": cluster.measured_gb_s} if cluster.measured_gb_s else {}
    nodes = [{"name": f"node{n}", "address": f"10.0.{n // 250}.{n % 250 + 1}"} | roles for n in range(run.nodes)]
    return {"name": run.cluster, "nodes": nodes, "compute": compute, "network": network}
