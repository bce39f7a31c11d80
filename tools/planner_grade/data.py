"""Published runs and throughput tables of others: what the planner is graded against.

The rows stand in the YAML files beside this module, each with its source. They are this project's own: a wrong one ends in
pydantic's error.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from clustertune.cluster.cluster_file import read_cluster
from clustertune.plan import memory
from clustertune.plan.constants import Constants, total
from clustertune.plan.machine import PlanMachine, machine
from clustertune.plan.predict import make_plan
from clustertune.plan.step import Step, step
from clustertune.plan.strategy import ModelShape, Strategy
from clustertune.recipe.layers import Document, read_yaml
from clustertune.recipe.native_rules import filled, lora_defaults
from clustertune.recipe.parameters import count, lora_parameter_count
from clustertune.recipe.sections import NAME, Count, Number, Positive, Section
from clustertune.resolve.resolve import resolve
from clustertune.resolve.resolved import Recompute

FOLDER = Path(__file__).resolve().parent
REPO = FOLDER.parents[1]

Key = Annotated[str, Field(pattern=rf"^{NAME}$")]
Quantity = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Dtype = Literal["fp32", "bf16", "fp8", "nf4"]

DTYPE_BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256)}
"""Bytes of one number. nf4: 4 bits, an 8-bit scale for 64 numbers and a 32-bit scale for 256 of those (double quantisation,
https://arxiv.org/abs/2305.14314, section 3)."""


class PublishedModel(Section):
    """A model that a run or a claim names."""

    name: Text
    """Its id on the Hub."""
    parameters: Positive
    """The integer that its weights files hold in all."""
    architecture: dict[str, Any]
    """Keys of its config.json."""


class PublishedNetwork(Section):
    """What connects the nodes."""

    kind: Literal["ethernet", "infiniband", "roce", "omnipath"]
    gbit: Quantity | None
    """Nominal speed of one port, Gbit/s; None: the source does not say."""
    ports: Positive
    """Ports of one node."""

    @property
    def gb_s(self) -> float | None:
        """Nominal GB/s of a node and direction over all its ports."""
        return None if self.gbit is None else self.gbit * self.ports / 8


class PublishedCluster(Section):
    """What runs ran on."""

    file: Text | None = None
    """The cluster file of this project that describes it."""
    gpu: Key
    """A key of ops/hardware.yaml."""
    gpus_per_node: Positive
    interconnect: Key
    """As in a cluster file: nvlink4, pcie5, ..."""
    domain: Positive | None = None
    """GPUs that one NVLink domain joins across nodes; None: those of a node."""
    network: PublishedNetwork | None = None
    """None: no run leaves the NVLink domain."""
    measured_gb_s: Quantity | None = None
    """Bus bandwidth of an all-gather between nodes, per node and direction, GB/s."""
    host_gb: Quantity
    """RAM of a node, GB."""
    memory_gib: Quantity | None = None
    """Memory of its GPU where that is not the one of ops/hardware.yaml."""
    hbm_gb_s: Quantity | None = None
    """The same for its memory bandwidth, GB/s."""
    peak_share: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """What its GPU's peak is of the one in ops/hardware.yaml: a lower power limit."""
    source: Text
    note: str = ""


class PublishedRun(Section):
    """One run or one row of a table: how it was run, and what was published about it."""

    id: Key
    set: Key
    """The set that it is counted in: idris-csv, idris-other, idris-nemo, nutanix, nebius, dllm, table, table-moe, table-fp8,
    megatron, megatron-moe, fms."""
    source: Text
    place: Text
    """Where in the source."""
    model: Key
    cluster: Key
    nodes: Positive
    gpus_per_node: Positive

    method: Literal["full", "lora", "qlora"]
    lora: dict[str, Any] | None = None
    """Fields of PEFT's LoraConfig."""
    kind: Literal["DDP", "FSDP1", "FSDP2", "Megatron"]
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    virtual: Positive = 1
    """Virtual pipeline stages a GPU."""
    replicas: Positive = 1
    """Groups that hold a full copy (HSDP)."""
    reshard: bool = True
    """Weights are given back after forward and gathered again for backward."""
    reduce_each: bool = True
    """Gradients are reduced and sharded after each micro batch; False: they stay whole until the last one (no_sync)."""
    sequence_parallel: bool = False
    overlap_tp: bool = False
    """Tensor-parallel collectives run beside the products (asynchronous TP, tp_comm_overlap)."""

    micro_batch: Positive
    """Sequences of one forward pass of a data-parallel group (tp x pp x cp GPUs)."""
    accumulation: Positive = 1
    sequence: Positive
    packing: Literal["full", "padded"] = "full"
    useful_share: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Share of the tokens that are not padding."""
    checkpointed: Share
    """Share of the layers whose activations are recomputed."""
    recompute: Literal["layer", "op"] = "layer"
    """What of a checkpointed layer: all of it, or torchtitan's "selective op" (every second matrix product, not attention)."""
    compiled: bool
    """Element-wise kernels are fused, by torch.compile or by hand."""
    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    fused_loss: bool = False
    """The logits are never whole."""
    whole_loss: bool = False
    """The cross-entropy is not compiled though the layers are: its logits have a copy in float32."""
    half_loss: bool = False
    """The cross-entropy takes bf16 logits as they are."""
    holds_logits: bool = False
    """The loop's variable keeps them through the backward pass."""

    weight_dtype: Dtype
    """As stored between uses."""
    gather_dtype: Dtype = "bf16"
    """As all-gathered."""
    reduce_dtype: Dtype
    """Gradients in a reduce-scatter or all-reduce."""
    state_dtype: Dtype
    """Each of AdamW's two moments."""
    compute_dtype: Dtype = "bf16"
    """Operands of the matrix products of the layers."""

    step_s: Quantity | None = None
    """Seconds of an optimizer step."""
    tokens_per_s_per_gpu: Quantity | None = None
    peak_gib: Quantity | None = None
    """Most memory that torch had allocated on a GPU, GiB."""
    tflops_per_gpu: Quantity | None = None
    """As the source counts them, TFLOP/s."""
    hours: Quantity | None = None
    """Wall hours of the whole run."""
    steps: Positive | None = None
    """Optimizer steps of the run, or of what was timed."""
    startup_s: Quantity | None = None
    """Seconds before the first step: load, cast and shard."""
    eval_steps: Positive | None = None
    """Steps between evaluations."""
    gathers: Count | None = None
    """All-gathers of the whole model in the run."""

    verified: bool = True
    """Whether the figures were read at the source."""
    assumed: tuple[str, ...] = ()
    """Fields that the source does not state."""
    excluded: str | None = None
    """Why the row does not count; None: it does."""
    note: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """What a row cannot be."""
        if self.step_s is None and self.tokens_per_s_per_gpu is None and self.hours is None:
            raise ValueError("a run needs a published time: step_s, tokens_per_s_per_gpu or hours")
        if self.world % (self.tp * self.pp * self.cp):
            raise ValueError(f"{self.world} GPUs are not a multiple of tp {self.tp} x pp {self.pp} x cp {self.cp}")
        if (self.lora is None) != (self.method == "full"):
            raise ValueError("lora stands with method lora or qlora, and only there")
        if unknown := sorted(set(self.assumed) - set(type(self).model_fields)):
            raise ValueError(f"assumed names fields that there are not: {', '.join(unknown)}")
        if (self.packing == "full") != (self.useful_share == 1.0) and "useful_share" in self.model_fields_set:
            raise ValueError("useful_share is for padded sequences")
        return self

    @property
    def world(self) -> int:
        """GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def dp(self) -> int:
        """Groups that read different sequences."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def global_batch(self) -> int:
        """Sequences of an optimizer step."""
        return self.dp * self.micro_batch * self.accumulation

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step over all GPUs, padding included."""
        return self.global_batch * self.sequence

    @property
    def seconds(self) -> float | None:
        """Published seconds of a step, from the throughput where only that is published; None where only hours are."""
        if self.step_s is not None:
            return self.step_s
        if self.tokens_per_s_per_gpu is not None:
            return self.step_tokens / (self.tokens_per_s_per_gpu * self.world)
        return None

    @property
    def rate(self) -> float | None:
        """Published tokens per second and GPU, padding included."""
        if self.tokens_per_s_per_gpu is not None:
            return self.tokens_per_s_per_gpu
        return None if self.step_s is None else self.step_tokens / (self.step_s * self.world)


def read(path: Path) -> dict[str, Any]:
    """The values of a data file. Raises UserError where it cannot be read or parsed."""
    return read_yaml(path, path.name).data


@cache
def published_models() -> Mapping[str, PublishedModel]:
    """The models by key."""
    return {name: PublishedModel(**body) for name, body in read(FOLDER / "models.yaml")["models"].items()}


@cache
def published_clusters() -> Mapping[str, PublishedCluster]:
    """The clusters by key; one with a ``file`` takes GPU, nodes and network from there."""
    clusters = {}
    for name, body in read(FOLDER / "clusters.yaml")["clusters"].items():
        clusters[name] = PublishedCluster(**{**(_from_file(REPO / body["file"]) if "file" in body else {}), **body})
    return clusters


def _from_file(path: Path) -> dict[str, Any]:
    """A cluster of this project's own files, in the form of the published ones."""
    compute, network = read(path)["compute"], read(path)["network"]
    return {
        "gpu": compute["gpu"],
        "gpus_per_node": compute["gpus"],
        "interconnect": compute["interconnect"],
        "network": {"kind": network["kind"], "gbit": network["gbit"], "ports": network.get("ports", 1)},
        "host_gb": compute["memory_gb"],
    }


@cache
def published_runs(path: Path = FOLDER / "runs.yaml") -> Mapping[str, PublishedRun]:
    """All runs by id, in the order of the file."""
    runs: dict[str, PublishedRun] = {}
    for group in read(path)["groups"]:
        for own in group["runs"]:
            body = {"set": group["set"], "source": group["source"], **group.get("common", {}), **own}
            body.setdefault("gpus_per_node", published_clusters()[body["cluster"]].gpus_per_node)
            run = PublishedRun(**body)
            assert run.model in published_models(), f"{run.id}: there is no model {run.model}"
            assert run.id not in runs, f"{run.id} stands twice"
            runs[run.id] = run
    return runs


# --- a published run as the planner's own input: the strategy, the machine and the counted model that its source describes ---

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
        """Bytes of the largest moment of training: published peaks are of training steps."""
        return memory.training_peak(memory.moments(self.shape, constants)).bytes

    def fits(self, constants: Constants) -> bool:
        """Whether the plan says that its GPUs hold it."""
        peak = self.peak(constants)
        return peak + total(memory.reserved(peak, constants)) <= self.machine.usable_bytes


def case(run: PublishedRun) -> Case:
    """Turn a row into what the model computes with. What Megatron-Core ran is planned from a recipe, as a user's is."""
    if run.kind == "Megatron":
        hardware = _machine(run)
        return Case(run, _planned(run, hardware), hardware)
    architecture = published_models()[run.model].architecture
    counted = count(architecture)
    assert counted is not None, run.model
    adapters, rank, targets = _lora(run, architecture)
    hardware = _machine(run)
    shape = ModelShape(counted, _strategy(run), adapters or counted.total, adapters, rank, targets)
    return Case(run, replace(shape, cudnn_attention=hardware.has_cudnn_attention), hardware)


def _planned(run: PublishedRun, hardware: PlanMachine) -> ModelShape:
    """The divided model that :func:`clustertune.plan.predict.make_plan` computes with for the recipe of a run."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "published"
        recipe.mkdir()
        for name, body in (("recipe.yaml", recipe_of(run)), ("model.json", published_models()[run.model].architecture)):
            (recipe / name).write_text(json.dumps(body), encoding="utf-8")  # JSON is YAML
        return make_plan(resolve(str(recipe)), hardware, sure=False).shape


def recipe_of(run: PublishedRun) -> dict[str, Any]:
    """The recipe.yaml of a run of Megatron-Core: its sizes in the section ``megatron``, what its program does otherwise than
    this project's settings in ``plan``."""
    parts = run.pp * run.virtual
    uneven = published_models()[run.model].architecture["num_hidden_layers"] % parts != 0
    megatron: dict[str, Any] = {
        "tensor_model_parallel_size": run.tp, "pipeline_model_parallel_size": run.pp, "context_parallel_size": run.cp,
        "expert_model_parallel_size": run.ep, "sequence_parallel": run.sequence_parallel,
        "virtual_pipeline_model_parallel_size": run.virtual if run.virtual > 1 else None,
        "account_for_embedding_in_pipeline_split": uneven, "account_for_loss_in_pipeline_split": uneven,
        "recompute_granularity": "full" if run.checkpointed == 1 else None,
        "fp8": "hybrid" if run.compute_dtype == "fp8" else None,
    }  # fmt: skip
    return {
        "model": {"name": "published", "weights": "random"},
        "data": {"name": "published", "input": "rows.jsonl", "format": "messages"},
        "train": {
            "global_batch_size": run.global_batch, "per_device_train_batch_size": run.micro_batch, "max_length": run.sequence,
            "packing": True, "model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_torch_fused", "max_steps": 100,
        },
        **({"lora": {"lora_alpha": 32, **run.lora}} if run.lora else {}),
        "megatron": megatron,
        "plan": {
            "overlap_tp": run.overlap_tp, "overlap_dp": True, "overlap_pp": run.virtual > 1, "reduce_dtype": run.reduce_dtype,
        },
        "slurm": {"nodes": run.nodes, "gpus_per_node": run.gpus_per_node},
    }  # fmt: skip


def _lora(run: PublishedRun, architecture: dict[str, Any]) -> tuple[int, int, tuple[str, ...]]:
    if run.lora is None:
        return 0, 1, ()
    targets = run.lora["target_modules"]
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapted = names if targets == "all-linear" else tuple(targets)
    return lora_parameter_count(architecture, filled(lora_defaults(), run.lora)) or 0, int(run.lora["r"]), adapted


def _machine(run: PublishedRun) -> PlanMachine:
    published = published_clusters()[run.cluster]
    document = cluster_document(run)
    document["network"] = {"interface": "eth0", **document["network"]}
    if run.nodes > 1 and document["network"]["kind"] == "none":
        document["network"] |= {"kind": "infiniband", "gbit": 400}  # no rank leaves the NVLink domain: nothing reads it
    hardware = machine(read_cluster(Document(f"published cluster {run.cluster}", document)), nodes=run.nodes)
    changes: dict[str, Any] = {"peak_flops": hardware.peak_flops * published.peak_share}
    if hardware.peak_flops_fp8:
        changes["peak_flops_fp8"] = hardware.peak_flops_fp8 * published.peak_share
    if published.hbm_gb_s:
        changes["hbm_bytes_per_s"] = published.hbm_gb_s * 1e9
    return replace(hardware, **changes)


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
