"""Whether a recipe can fit at all: lower bounds of what a GPU and a node must hold. What passes may still be too large.

Every part is certain to be in memory at the same moment (in the forward pass of the last layer); what depends on kernels,
the allocator and NCCL is left out. Counts are exact for the architectures that config/parameters.py knows; nothing is said
of others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config import quantization
from clustertune.config.derive import mixed_precision
from clustertune.config.parameters import Counted, count, lora_parameter_count, parameter_count
from clustertune.config.resolved import Resolved
from clustertune.config.sliced import IN_FLIGHT
from clustertune.plan.host import RANK_HOST_BYTES, one_rank_loads, reads_rows, rows_in_flight
from clustertune.plan.strategy import DEFAULT_MAX_LENGTH

HALF, FULL = 2, 4
"""Bytes of a bfloat16 and of a float32 number."""
PREFETCHED = 2
"""Layers gathered at once: the one that computes, and the next, whose all-gather runs beside it."""
MOST_NODES = 4096


@dataclass(frozen=True)
class Part:
    """One thing that takes memory."""

    what: str
    bytes: float

    def __str__(self) -> str:
        return f"{self.what} {self.bytes / 1e9:.1f} GB"


@dataclass(frozen=True)
class Spread:
    """Over how many ranks weights and optimizer state are split."""

    weights: int
    states: int
    offloaded: bool
    """Weights and states lie in host memory between uses."""
    gathered_whole: bool
    """Weights stay gathered from forward to backward (FSDP without resharding)."""
    name: str
    states_offloaded: bool = False
    """The optimizer's state and the float32 copy that it updates lie in host memory, on NVMe for some."""


def weight_bytes(resolved: Resolved) -> float | None:
    """Bytes of the model's weights in bfloat16; None where the architecture cannot be counted."""
    count = parameter_count(resolved.architecture)
    return None if count is None else float(HALF * count)


def trainable(resolved: Resolved) -> int | None:
    """Parameters that are trained; None where they cannot be counted."""
    if resolved.recipe.lora is None:
        return parameter_count(resolved.architecture)
    return lora_parameter_count(resolved.architecture, resolved.recipe.lora)


def spread(resolved: Resolved, world: int, per_node: int) -> Spread:
    """How the accelerate file splits the model over ``world`` ranks with ``per_node`` on a node."""
    body = resolved.accelerate
    kind = str(body.get("distributed_type", "NO"))
    if kind == "FSDP":
        return _fsdp(body, world, per_node)
    if kind == "DEEPSPEED":
        stage, offloaded, states = _zero(body, Path(resolved.folder), resolved.deepspeed)
        return Spread(world if stage >= 3 else 1, world if stage >= 1 else 1, offloaded, False, f"ZeRO-{stage}", states)
    return Spread(1, 1, False, False, kind)


def _fsdp(body: Mapping[str, Any], world: int, per_node: int) -> Spread:
    config = acc.section(body, "fsdp_config")
    version = str(config.get("fsdp_version", config.get("version", 1)))
    offloaded = acc.flag(config, "offload_params")
    if version == "2":
        shards = max(1, world // acc.parallel_sizes(body).get("dp_replicate", 1))
        reshard = config.get("fsdp_reshard_after_forward", config.get("reshard_after_forward", True))
        whole = str(reshard).lower() == "false"
        return Spread(shards, shards, offloaded, whole, "FSDP2 without resharding" if whole else "FSDP2")
    name = str(config.get("fsdp_sharding_strategy", config.get("sharding_strategy", "FULL_SHARD"))).upper()
    words = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
    name = words.get(name, name)
    shards = 1 if name == "NO_SHARD" else per_node if name.startswith("HYBRID") else world
    return Spread(shards, shards, offloaded, name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"), name)


def _zero(body: Mapping[str, Any], folder: Path, deepspeed: Mapping[str, Any] | None) -> tuple[int, bool, bool]:
    """The ZeRO stage, and whether parameters and optimizer state are offloaded; of accelerate's section or DeepSpeed's file.

    ``deepspeed``: that file as it was resolved; runs of former releases do not have it.
    """
    config = acc.section(body, "deepspeed_config")
    stage, offload = config.get("zero_stage"), config.get("offload_param_device")
    states = config.get("offload_optimizer_device")
    named = config.get("deepspeed_config_file")
    if isinstance(named, str):
        try:
            found = deepspeed if deepspeed is not None else json.loads((folder / named).read_bytes())
            zero = found.get("zero_optimization", {})
            stage, offload = zero.get("stage", stage), zero.get("offload_param", {}).get("device", offload)
            states = zero.get("offload_optimizer", {}).get("device", states)
        except (OSError, ValueError, AttributeError):
            return 3, True, True  # unreadable: the widest split keeps the bound below the truth
    try:
        return int(stage) if stage is not None else 2, offload not in (None, "none"), states not in (None, "none")
    except (ValueError, TypeError):
        return 3, True, True


def rank_parts(resolved: Resolved, world: int, per_node: int) -> list[Part]:
    """What one rank holds on its GPU at least; empty where the architecture cannot be counted."""
    counted, trained = count(resolved.architecture), trainable(resolved)
    if counted is None or trained is None:
        return []
    total = counted.total
    if resolved.recipe.megatron is not None:
        return [*_megatron_parts(resolved, total, trained, world), *_token_parts(resolved, counted)]
    split = spread(resolved, world, per_node)
    frozen = total if resolved.recipe.lora is not None else 0
    parts = []
    config = quantization.of(resolved.train_args)
    # Of a quantised base the embeddings and the head stay in bf16: less is certain.
    packed = quantization.read(config, counted.hidden).packed if config else HALF
    if not split.offloaded:
        text = f"{'quantised' if config else 'bf16'} weights {packed * total / 1e9:.1f} GB / {split.weights} ranks"
        if frozen:
            parts.append(Part(text, packed * frozen / split.weights))
        parts += _trained_parts(resolved, trained, split)
    gathered = _gathered(counted, split, packed)
    parts += [gathered] if gathered else []
    return parts + _token_parts(resolved, counted)


def _megatron_parts(resolved: Resolved, total: int, trained: int, world: int) -> list[Part]:
    """Megatron-Core holds bf16 weights and float32 gradients of its part of the model; master weights and moments (12 B) are
    split over the data-parallel ranks too where the optimizer is distributed. Experts are split further: less is certain.
    """
    m = resolved.recipe.megatron
    assert m is not None
    cut = m.tensor_model_parallel_size * m.pipeline_model_parallel_size
    held = cut * m.expert_model_parallel_size
    states = max(world, held) if m.use_distributed_optimizer else held
    return [
        Part(f"bf16 weights {HALF * total / 1e9:.1f} GB / {held} ranks", HALF * total / held),
        Part("gradients (4 B each)", FULL * trained / held),
        Part("optimizer (12 B each)", 3 * FULL * trained / states),
    ]


def _trained_parts(resolved: Resolved, trained: int, split: Spread) -> list[Part]:
    """Trained parameters with gradients and the optimizer's two moments.

    In float32 for LoRA (PEFT's autocast_adapter_dtype) and under mixed precision where the model is split (accelerate and
    DeepSpeed upcast what is trained); plain data parallelism leaves it as loaded.
    """
    if split.states_offloaded:
        return [Part(f"trained weights ({HALF} B each)", HALF * trained / split.weights)]
    args = resolved.train_args
    upcast = mixed_precision(args) != "no" and resolved.accelerate.get("distributed_type") in ("FSDP", "DEEPSPEED")
    number = FULL if upcast or resolved.recipe.lora is not None else HALF
    if quantization.of(args) is not None:
        number = HALF  # TRL holds adapters on a quantised base in bfloat16
    optimizer = str(args.get("optim", "adamw_torch"))
    if "adam" not in optimizer:
        moments = 0
    else:
        moments = 2 if any(word in optimizer for word in ("8bit", "4bit", "paged", "anyprecision", "bnb")) else 2 * number
    parts = [Part(f"trained weights ({number} B each)", number * trained / split.weights)]
    return [*parts, Part(f"gradients and optimizer ({number + moments} B each)", (number + moments) * trained / split.states)]


def _gathered(counted: Counted, split: Spread, number: float) -> Part | None:
    """Weights that are gathered from the other ranks for the moment of their use; of unlike layers the smallest are certain."""
    if split.weights == 1 and not split.offloaded:
        return None
    if split.gathered_whole:
        return Part("all weights gathered from forward to backward", number * counted.total)
    layer = number * min(sum(linear.parameters for linear in kind.linears) for kind in counted.layers)
    layers = min(PREFETCHED, counted.num_layers)
    return Part(f"{layers} layers gathered ({layer / 1e9:.1f} GB each)", layers * layer)


def _token_parts(resolved: Resolved, counted: Counted) -> list[Part]:
    """Activations of one micro batch: a layer's input where they are checkpointed, else what the products' backward needs."""
    args = resolved.train_args
    tokens = int(args.get("per_device_train_batch_size") or 8) * int(args.get("max_length") or DEFAULT_MAX_LENGTH)
    shared = max(1, resolved.world_size // max(1, resolved.data_parallel_size))
    tokens = tokens // shared
    config = acc.section(resolved.accelerate, "fsdp_config")
    checkpointed = acc.flag(config, "activation_checkpointing") or bool(args.get("activation_checkpointing"))
    if resolved.recipe.megatron is not None:
        checkpointed = resolved.recipe.megatron.recompute_granularity == "full"
    settings = args.get("activation_checkpointing_kwargs") or args.get("gradient_checkpointing_kwargs")
    moved = isinstance(settings, dict) and bool(settings.get("offload"))
    offloaded = acc.flag(config, "activation_checkpointing_offload") or moved or bool(args.get("activation_offloading"))
    hidden = counted.hidden
    each = [0 if offloaded else hidden if checkpointed else 2 * (hidden + kind.inner) for kind in counted.layers]
    numbers = sum(number * kind.count for number, kind in zip(each, counted.layers, strict=True))
    what = "checkpointed activations" if checkpointed else "activations"
    return [Part(f"{what} of {tokens} tokens", HALF * numbers * tokens)]


def loading_parts(resolved: Resolved, per_node: int, *, first: bool = True) -> list[Part]:
    """Host memory of a node while the weights are loaded; ``first``: the node of rank 0."""
    weights = weight_bytes(resolved)
    if weights is None:
        return []
    own = Part(f"{per_node} ranks", per_node * RANK_HOST_BYTES)
    if resolved.recipe.megatron is not None:
        return [own]  # Megatron-Bridge: each rank its part
    counted = count(resolved.architecture)
    if reads_rows(resolved) and counted is not None:
        sizes = acc.parallel_sizes(resolved.accelerate)
        shards = max(1, resolved.world_size // (sizes.get("dp_replicate", 1) * sizes.get("tp", 1)))
        size = rows_in_flight(resolved, counted, per_node, shards)
        return [Part(f"{IN_FLIGHT} matrices' rows in each of {per_node} ranks", size), own]
    if one_rank_loads(resolved):
        return [Part("all weights in rank 0", weights), own] if first else [own]
    return [Part(f"all weights in each of {per_node} ranks", per_node * weights), own]


def total(parts: list[Part]) -> float:
    """Bytes of all parts together."""
    return math.fsum(part.bytes for part in parts)


def smallest_nodes(resolved: Resolved, per_node: int, available: float) -> int | None:
    """The fewest nodes with ``per_node`` ranks each on which a rank's parts fit into ``available`` bytes; None: on none."""
    if total(rank_parts(resolved, MOST_NODES * per_node, per_node)) > available:
        return None  # what is not split does not shrink: no need to count up to there
    nodes = 1
    while nodes <= MOST_NODES and total(rank_parts(resolved, nodes * per_node, per_node)) > available:
        nodes += 1
    return nodes if nodes <= MOST_NODES else None
