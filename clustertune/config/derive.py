"""What follows from a recipe: ranks, gradient accumulation, where activations are checkpointed; each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config.distribution import mixed_precision, recomputed_layers
from clustertune.config.findings import Found
from clustertune.config.native_rules import show_value, usable
from clustertune.config.resolved import Derived
from clustertune.config.schema import ActivationCheckpointing, Megatron

_MESH = ("accelerate", "parallelism_config")
DEFAULT_MICRO_BATCH = 8
"""``TrainingArguments``' own ``per_device_train_batch_size``."""
FEW = "the gradients of adapters are few: to sum them in float32 costs next to nothing"


def world_size(values: Mapping[str, Any], ranks: int | None) -> tuple[int, str]:
    """The ranks of a run, and where the number is from."""
    if ranks is not None:
        return ranks, "given for this machine"
    nodes, gpus = size(values).values()
    return nodes * gpus, f"slurm.nodes {nodes} x slurm.gpus_per_node {gpus}"


def size(values: Mapping[str, Any]) -> dict[str, int]:
    """``slurm.nodes`` and ``slurm.gpus_per_node``."""
    slurm = values.get("slurm")
    slurm = slurm if isinstance(slurm, dict) else {}
    return {f"slurm.{key}": min(usable(slurm.get(key), 1), 10_000) for key in ("nodes", "gpus_per_node")}


def shard_size(accelerate: Mapping[str, Any], world: int) -> tuple[Derived | None, list[Found]]:
    """``dp_shard`` of FSDP2 where the file gives other sizes and not this one: the ranks that are left to shard over.

    accelerate would take 1 and refuse: the product of its sizes must be the number of ranks (parallelism_config.py:372), and
    something must be left to shard over (parallelism_config.py:381).
    """
    sizes, section = acc.parallel_sizes(accelerate), acc.section(accelerate, "parallelism_config")
    others = math.prod(sizes.get(axis, 1) for axis in ("dp_replicate", "tp", "cp", "sp"))
    if accelerate.get("distributed_type") != "FSDP" or not section or section.get(acc.SHARD_SIZE) is not None or world == 1:
        return None, []
    if world % others:
        if world % (others // sizes.get("dp_replicate", 1)):
            return None, []  # data_parallel says so
        text = f"dp_replicate {sizes['dp_replicate']} x tp x cp x sp is {others}, which does not divide {world} ranks"
        return None, [(_MESH, text, f"use a multiple of {others} ranks")]
    left = world // others
    if left == 1 and ("cp" not in sizes or "dp_replicate" in sizes):
        text = f"its sizes take all {world} ranks: FSDP has none left to shard over"
        return None, [(_MESH, text, "use smaller sizes or more ranks")]
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    reason = f"{world} ranks" + (f" / ({shown})" if shown else "")
    return Derived(f"accelerate.parallelism_config.{acc.SHARD_SIZE}", left, reason), []


def megatron_parallel(m: Megatron, world: int) -> tuple[int, Derived]:
    """The ranks that read different sequences under Megatron."""
    shared = m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
    size = max(1, world // shared)
    return size, Derived("data_parallel_size", size, f"{world} ranks" + (f" / {shared} (tp x pp x cp)" if shared > 1 else ""))


def data_parallel(accelerate: Mapping[str, Any], world: int) -> tuple[int, Derived, list[Found]]:
    """The ranks that read different sequences: all, but for those that share a sequence or a layer (tp, cp, sp)."""
    sizes = acc.parallel_sizes(accelerate)
    shared = sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("sp", 1)
    fsdp = accelerate.get("distributed_type") == "FSDP"
    stated = fsdp and acc.section(accelerate, "parallelism_config").get(acc.SHARD_SIZE) is not None
    replicas = 1 if fsdp and not stated else sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    found: list[Found] = []
    if world % shared:
        text = f"tp x cp x sp is {shared}, which does not divide {world} ranks"
        found.append((_MESH, text, f"use a multiple of {shared} ranks"))
    elif (replicas > 1 or stated) and replicas * shared != world:
        text = f"its sizes make {replicas * shared} ranks; there are {world}"
        fix = f"let dp_replicate x dp_shard x tp x cp x sp be the number of ranks, or leave {acc.SHARD_SIZE} out: it is derived"
        found.append((_MESH, text, fix))
    elif stated and world > 1 and "dp_shard" not in sizes and ("cp" not in sizes or "dp_replicate" in sizes):
        # accelerate 1.15, parallelism_config.py:325 and 381: a KeyError or a ValueError of every rank.
        text = f"{acc.SHARD_SIZE} is 1: FSDP has no ranks to shard over"
        found.append((_MESH, text, f"use smaller sizes, and leave {acc.SHARD_SIZE} out"))
    size = max(1, world // shared)
    reason = f"{world} ranks" + (f" / {shared} (tp x cp x sp)" if shared > 1 else "")
    return size, Derived("data_parallel_size", size, reason), found


def alone(accelerate: Mapping[str, Any], world: int) -> Iterator[Found]:
    """``distributed_type: NO`` with several ranks: each would train a model of its own, on all of the data."""
    if accelerate.get("distributed_type") == "NO" and world > 1:
        fix = "write MULTI_GPU (the whole model on every rank) or FSDP, or use slurm.nodes=1 slurm.gpus_per_node=1"
        yield ("accelerate", "distributed_type"), f"NO starts one process; there are {world} ranks", fix


def accumulation(train: Mapping[str, Any], world: int, dp: int) -> tuple[Derived | None, list[Found]]:
    """``gradient_accumulation_steps`` = global batch / (micro batch x data-parallel ranks), or what would divide."""
    path = ("train", "global_batch_size")
    batch = train.get("global_batch_size")
    if batch is None:
        fix = "write how many sequences one optimizer step takes over all ranks, such as 32"
        return None, [(path, "missing", fix)]
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= 10**7:
        text = f"{show_value(batch)} is not a whole number from 1"
        return None, [(path, text, "write how many sequences one step takes")]
    micro = int(train.get("per_device_train_batch_size") or DEFAULT_MICRO_BATCH)
    per_pass = micro * dp
    if batch % per_pass == 0:
        reason = f"global batch {batch} / (micro batch {micro} x {dp} data-parallel ranks)"
        return Derived("train.gradient_accumulation_steps", batch // per_pass, reason), []
    below, above = batch // per_pass * per_pass, (batch // per_pass + 1) * per_pass
    batches = " or ".join(str(size) for size in (below, above) if size)
    shared = max(1, world // dp)
    fitting = [ranks * shared for ranks in range(1, min(batch // micro, 10**5) + 1) if batch % (micro * ranks) == 0]
    near = [ranks for ranks in fitting if ranks < world][-1:] + [ranks for ranks in fitting if ranks > world][:1]
    fix = f"write {batches}"
    if near:
        fix += f", or use {' or '.join(map(str, near))} ranks"
    elif batch % micro:
        fix += f", or a per_device_train_batch_size that divides {batch}"
    text = f"{batch} is not a multiple of {per_pass} = per_device_train_batch_size {micro} x {dp} data-parallel ranks"
    return None, [(path, text, fix)]


def checkpointing(train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str) -> tuple[Derived, list[Found]]:
    """Activations are checkpointed once: by FSDP where accelerate.yaml says so, else by the model.

    Both together recompute every layer twice and gather its weights again (huggingface/transformers#30404); TRL's default
    is true, so that the recipe that says nothing would get both.
    """
    key = "activation_checkpointing"
    stated = train.get(key, train.get("gradient_checkpointing"))
    wrapped = acc.recomputes(accelerate)
    if wrapped and stated:
        named = key if train.get(key) is not None else "gradient_checkpointing"
        text = f"true, and {file} has fsdp_activation_checkpointing: true: activations would be checkpointed twice"
        return Derived(f"train.{key}", False, ""), [(("train", named), text, "keep one of the two (FSDP's)")]
    if wrapped:
        return Derived(f"train.{key}", False, f"FSDP checkpoints them ({file}); once is enough"), []
    if stated is not None:
        named = key if train.get(key) is not None else "gradient_checkpointing"
        return Derived(f"train.{key}", bool(stated), f"train.{named}"), []
    return Derived(f"train.{key}", True, f"TRL's default; {file} does not checkpoint activations"), []


def reduce_dtype(
    given: object, train: Mapping[str, Any], accelerate: Mapping[str, Any], *, lora: bool
) -> tuple[Derived | None, list[Found]]:
    """The type in which FSDP sums gradients under mixed precision; None where the recipe says it or it is not a choice.

    accelerate 1.15 takes bfloat16 for all (utils/dataclasses.py:2137). ``given``: the recipe's ``reduce_dtype``.
    """
    if accelerate.get("distributed_type") == "FSDP" and mixed_precision(train) != "no":
        if given is not None:
            return None, []
        if lora:
            return Derived("reduce_dtype", "float32", FEW), []
        reason = "accelerate's; float32 is exact, and doubles their traffic and what micro batches accumulate"
        return Derived("reduce_dtype", "bfloat16", reason), []
    if given is None:
        return None, []
    fix = "leave it out; under DeepSpeed write communication_data_type in its own file"
    text = f"{given}, which only FSDP under mixed precision reads: elsewhere gradients are summed in the type that they have"
    return None, [(("reduce_dtype",), text, fix)]


def check_precision(train: Mapping[str, Any], accelerate: Mapping[str, Any]) -> Iterator[Found]:
    """``mixed_precision`` of the accelerate file must be what ``bf16`` says: the trainer follows that."""
    named, wanted = accelerate.get("mixed_precision"), mixed_precision(train)
    if named in ("no", "bf16", False) and (named or "no") != wanted:
        text = f"{named or 'no'}, while the recipe's train section means {wanted} (TRL's default is bf16)"
        yield ("accelerate", "mixed_precision"), text, "leave it out, or change train.bf16"


# --- recomputation --------------------------------------------------------------------------------------------------------

# ``activation_checkpointing``: which decoder layers are recomputed and what of them is kept; given once, in one place.

SECTION = "activation_checkpointing"
ALIASES = (SECTION, "gradient_checkpointing")
"""The key of ``train`` and its deprecated name."""


def reason(section: ActivationCheckpointing, layers: int) -> str:
    """What the section makes of a model with ``layers`` decoder layers, as a phrase."""
    count = len(recomputed_layers(section.ratio, layers))
    saved = f"; of them {', '.join(section.save)} kept" if section.save else ""
    return f"{SECTION}.ratio {section.ratio:g}: {count} of {layers} layers{saved}"


def find_problems(
    section: ActivationCheckpointing, train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str
) -> Iterator[Found]:
    """Everything that is wrong with the section beside ``train`` and the accelerate configuration in ``file``."""
    if not section.model_fields_set & {"ratio", "save"}:
        fix = f"write {SECTION}.ratio=1 for all layers, or {SECTION}.save=[attention]"
        yield (SECTION,), "says neither ratio nor save", fix
    saved, save = section.save or [], (SECTION, "save")
    if len(set(saved)) < len(saved):
        yield save, f"[{', '.join(saved)}] names one twice", "name each once"
    if {"matmul", "every_second_matmul"} <= set(saved):
        yield save, "matmul keeps every product, every_second_matmul each second one", "keep one of the two"
    if saved and section.ratio == 0:
        yield save, "given, and ratio 0 recomputes nothing that could be kept", "leave one of the two out"
    if "attention" in saved and (train.get("model_init_kwargs") or {}).get("attn_implementation") == "eager":
        text = "attention, and eager attention is not a single operation whose result could be kept"
        yield save, text, "use attn_implementation: sdpa or flash_attention_2, or leave attention out"
    yield from _twice(section, train, accelerate, file)


def _twice(
    section: ActivationCheckpointing, train: Mapping[str, Any], accelerate: Mapping[str, Any], file: str
) -> Iterator[Found]:
    """What else says which layers are recomputed, or what of them is kept: each is a second home."""
    key_of_section = "ratio" if "ratio" in section.model_fields_set or not section.save else "save"
    own, fix = f"{SECTION}.{key_of_section}", "keep one of the two"
    for key in ALIASES:
        if train.get(key) is not None:
            yield ("train", key), f"{train[key]}, and {own} says which layers are recomputed: that is given twice", fix
        named = ("train", f"{key}_kwargs")
        arguments = given if isinstance(given := train.get(named[1]), dict) else {}
        if "every_n_layers" in arguments:
            yield (*named, "every_n_layers"), f"{own} says which layers are recomputed: that is given twice", fix
        if section.save and arguments.get("selective"):
            yield (*named, "selective"), f"TRL's name for {SECTION}.save=[attention], which is given too", fix
        if section.save and arguments.get("use_reentrant"):
            text = f"reentrant checkpointing keeps no results, and {SECTION}.save asks for some"
            yield (*named, "use_reentrant"), text, "leave it out"
    if acc.recomputes(accelerate):
        text = f"given, and {file} has fsdp_activation_checkpointing: true, for all layers: that is given twice"
        what = "accelerate.fsdp_config.fsdp_activation_checkpointing=false, or leave the section out"
        yield (SECTION, key_of_section), text, what
