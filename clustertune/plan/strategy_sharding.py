"""Over which ranks weights, gradients and optimizer state are split: FSDP, ZeRO, plain data parallelism, Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config.resolved import Resolved
from clustertune.errors import Problem

_FSDP1 = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
"""accelerate takes the number of torch's ShardingStrategy too."""
_DEFAULT_STAGE = 2
"""accelerate's own ``zero_stage`` (accelerate/utils/dataclasses.py, DeepSpeedPlugin)."""


@dataclass(frozen=True)
class Sharding:
    """Sizes of a distribution; see :class:`clustertune.plan.strategy.Strategy` for their meaning."""

    kind: str
    gpus_per_node: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    ulysses: int = 1
    """Part of ``cp`` that splits attention by heads instead of passing keys and values around."""
    virtual: int = 1
    replicas: int = 1
    weights: int = 1
    gradients: int = 1
    states: int = 1
    reshard: bool = False
    offload_params: str = "none"
    offload_optimizer: str = "none"
    sequence_parallel: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's configuration where a file holds it."""
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def read(resolved: Resolved) -> Sharding:
    """The distribution of a resolved recipe. What would be refused on the ranks is in ``problems``."""
    per_node = min(resolved.recipe.slurm.gpus_per_node, resolved.world_size)
    if resolved.recipe.megatron is not None:
        return _megatron(resolved, per_node)
    kind = str(resolved.accelerate.get("distributed_type", "NO"))
    if kind == "FSDP":
        return _fsdp(resolved, per_node)
    if kind == "DEEPSPEED":
        return _deepspeed(resolved, per_node)
    if kind == "MULTI_GPU":
        return _with_axes(Sharding("DDP", per_node), resolved)
    problems = []
    if resolved.world_size > 1:
        text = f"NO starts one process, the recipe is for {resolved.world_size} ranks"
        fix = "accelerate.distributed_type=MULTI_GPU, or FSDP"
        problems.append(Problem(text, file=f"{resolved.name}/{resolved.accelerate_file}", key="distributed_type", fix=fix))
    return Sharding("NO", per_node, problems=tuple(problems))


def _with_axes(sharding: Sharding, resolved: Resolved) -> Sharding:
    sizes = acc.parallel_sizes(resolved.accelerate)
    ulysses = sizes.get("sp", 1)
    notes = [*sharding.notes]
    if ulysses > 1:
        notes.append(f"sp {ulysses} (Ulysses) is counted as context parallelism")
    return replace(sharding, tp=sizes.get("tp", 1), cp=sizes.get("cp", 1) * ulysses, ulysses=ulysses, notes=tuple(notes))


def _fsdp(resolved: Resolved, per_node: int) -> Sharding:
    config = acc.section(resolved.accelerate, "fsdp_config")
    # FSDP's offload takes parameters, gradients and optimizer state alike (torch, CPUOffloadPolicy and CPUOffload).
    place = "cpu" if acc.flag(config, "offload_params") else "none"
    base = Sharding("FSDP2", per_node, offload_params=place, offload_optimizer=place)
    if str(config.get("fsdp_version", config.get("version", 1))) == "2":
        sizes = acc.parallel_sizes(resolved.accelerate)
        replicas = sizes.get("dp_replicate", 1)
        # accelerate/parallelism_config.py:132: FSDP shards over dp_shard and cp together.
        shards = max(1, resolved.world_size // (replicas * sizes.get("tp", 1) * sizes.get("sp", 1)))
        given = config.get("fsdp_reshard_after_forward", config.get("reshard_after_forward", True))
        reshard = str(given).lower() != "false" and shards > 1
        split = replace(base, replicas=replicas, weights=shards, gradients=shards, states=shards, reshard=reshard)
        return _with_axes(split, resolved)
    name = str(config.get("fsdp_sharding_strategy", config.get("sharding_strategy", "FULL_SHARD"))).upper()
    name = _FSDP1.get(name, name)
    problems: tuple[Problem, ...] = ()
    shards = resolved.world_size
    if name == "NO_SHARD":
        shards = 1
    elif name.startswith("HYBRID"):
        # torch/distributed/fsdp/_init_utils.py: the group of one node holds a copy of the model.
        shards = per_node
        if resolved.world_size % per_node:
            text = f"{name} needs whole nodes: {resolved.world_size} ranks are no multiple of {per_node} on a node"
            file = f"{resolved.name}/{resolved.accelerate_file}"
            problems = (Problem(text, file=file, key="fsdp_config.fsdp_sharding_strategy", fix="use whole nodes"),)
    replicas = max(1, resolved.world_size // shards) if name.startswith("HYBRID") else 1
    reshard = name in ("FULL_SHARD", "HYBRID_SHARD") and shards > 1
    return replace(
        base,
        kind="FSDP1",
        replicas=replicas,
        weights=shards,
        gradients=shards,
        states=shards,
        reshard=reshard,
        problems=problems,
    )


def _deepspeed(resolved: Resolved, per_node: int) -> Sharding:
    """ZeRO. Sequence-parallel ranks (Ulysses) are among those over which it splits (DeepSpeed's ALST)."""
    keys = acc.section(resolved.accelerate, "deepspeed_config")
    body = resolved.deepspeed or {}
    zero = body.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    if resolved.deepspeed is None:
        stage = _whole(keys.get("zero_stage"), _DEFAULT_STAGE)
        params, states = (_device(keys.get(f"offload_{what}_device")) for what in ("param", "optimizer"))
    else:
        stage = _whole(zero.get("stage"), 0)
        params, states = (_device(acc.section(zero, f"offload_{what}").get("device")) for what in ("param", "optimizer"))
    axes = _with_axes(Sharding(f"ZeRO-{stage}", per_node), resolved)
    ranks = max(1, resolved.world_size // axes.tp)
    notes = [*axes.notes]
    if _whole(zero.get("zero_hpz_partition_size"), 1) > 1:
        notes.append("zero_hpz_partition_size keeps a second copy of the weights on each node: not counted")
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        notes.append("quantised weights or gradients on the way (ZeRO++): not counted")
    return replace(
        axes,
        weights=ranks if stage >= 3 else 1,
        gradients=ranks if stage >= 2 else 1,
        states=ranks if stage >= 1 else 1,
        reshard=stage >= 3 and ranks > 1,
        offload_params=params,
        offload_optimizer=states,
        settings=body,
        notes=tuple(notes),
        problems=tuple(_zero_problems(resolved, stage, params, states)),
    )


def _zero_problems(resolved: Resolved, stage: int, params: str, states: str) -> list[Problem]:
    """DeepSpeed's own rules (deepspeed/runtime/zero/config.py, offload_config.py)."""
    file = f"{resolved.name}/{resolved.accelerate_file}"
    if resolved.deepspeed is not None:
        file = f"{resolved.name}/{acc.section(resolved.accelerate, 'deepspeed_config').get('deepspeed_config_file')}"
    problems = []
    if not 0 <= stage <= 3:
        problems.append(Problem(f"there is no ZeRO stage {stage}", file=file, key="zero_stage", fix="write 0, 1, 2 or 3"))
    elif params != "none" and stage < 3:
        text = f"parameters are offloaded only by ZeRO stage 3, here it is {stage}"
        problems.append(Problem(text, file=file, key="offload_param", fix="use stage 3, or offload the optimizer alone"))
    elif states != "none" and stage < 1:
        text = f"optimizer state is offloaded only by ZeRO stages 1 to 3, here it is {stage}"
        problems.append(Problem(text, file=file, key="offload_optimizer", fix="use stage 2 or 3"))
    elif states == "nvme" and stage < 3:
        problems.append(Problem("NVMe takes state only of ZeRO stage 3", file=file, key="offload_optimizer", fix="use cpu"))
    return problems


def _device(value: object) -> str:
    return str(value) if value in ("cpu", "nvme") else "none"


def _whole(value: object, default: int) -> int:
    """A number as a file gives it; ``auto`` and the like are the default."""
    try:
        return int(str(value))
    except ValueError:
        return default


def _megatron(resolved: Resolved, per_node: int) -> Sharding:
    """Weights and gradients lie whole on every data-parallel rank; the distributed optimizer splits its state over dp x cp
    (Megatron-Core, docs/source/api-guide/dist_optimizer.md)."""
    m = resolved.recipe.megatron
    assert m is not None
    cp = m.context_parallel_size
    states = resolved.data_parallel_size * cp if m.use_distributed_optimizer else 1
    return Sharding(
        "Megatron",
        per_node,
        tp=m.tensor_model_parallel_size,
        pp=m.pipeline_model_parallel_size,
        cp=cp,
        ep=m.expert_model_parallel_size,
        virtual=m.virtual_pipeline_model_parallel_size or 1,
        states=states,
        sequence_parallel=m.sequence_parallel,
        notes=("Megatron-Bridge: the accelerate file is not used",),
    )
