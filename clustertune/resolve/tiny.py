"""The ``--tiny`` layer: what makes any recipe runnable on a laptop in a minute, over the same code and distribution files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertune.recipe import accelerate_file as acc
from clustertune.recipe import deepspeed_file as ds
from clustertune.recipe.findings import usable
from clustertune.recipe.layers import RECIPES, Document
from clustertune.recipe.native_rules import train_defaults
from clustertune.recipe.parameters import parameter_count
from clustertune.recipe.sections import CHOOSING, FIRST_TASK
from clustertune.resolve.resolved import Derived

CONVERSATIONS = Path("tiny-oasst2", "conversations.jsonl")
"""The conversations that come with the project, below ``recipes/``."""
PREFERENCES = Path("tiny-dpo", "preferences.jsonl")
PROMPTS = Path("tiny-grpo", "prompts.jsonl")
"""The same of prompts with instructions."""
"""The same of preferences."""
MAX_LENGTH = 256
MAX_STEPS = 6
EVERY = 2
MAX_ACCUMULATION = 2
MAX_NEW_TOKENS = 32
MAX_PROMPTS = 64
SIGNAL_SECONDS = 60
"""A tiny model's step and save take a second together."""
RANKS = 2
"""Ranks of a tiny run on one machine without GPUs."""
SMALL = 1.5e9
"""Parameters of the largest model that is trained as it is where there are no GPUs: two CPU cores take 12 hours for a million
tokens of it (1e11 FLOP/s)."""
_AXES = ("tp", "cp", "sp", "dp_replicate")
"""Axes of the mesh beside the one that FSDP splits over; with too few ranks the last goes first."""


def is_small(architecture: Mapping[str, Any]) -> bool:
    """Whether CPUs may train the model as it is."""
    return 0 < (parameter_count(architecture) or 0) <= SMALL


def ranks(accelerate: Mapping[str, Any]) -> int:
    """Ranks of a tiny run on one machine without GPUs: two for each axis of the mesh that FSDP splits over as well."""
    axes = _mesh(accelerate, 2 * RANKS)
    return 2 * RANKS if axes and not _alone(axes) else RANKS


def scale_mesh(document: Document, world: int) -> tuple[Document, list[Derived]]:
    """The accelerate file with every axis of its mesh at most 2, for ``world`` ranks; FSDP splits over those that are left.

    An axis for which there are too few ranks is left out, and that is reported.
    """
    mesh = acc.section(document.data, acc.MESH)
    sizes = acc.parallel_sizes(document.data)
    if not set(sizes) & set(_AXES):
        return document, []
    axes = _mesh(document.data, world)
    own = {key: value for key, value in mesh.items() if not key.endswith("_size")}
    section = {**own, **{acc.size_key(axis): size for axis, size in axes.items()}} if axes else None
    body = {key: value for key, value in document.data.items() if key != acc.MESH}
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    reason = f"{shown}, scaled down to {world} ranks"
    if left := [axis for axis in _AXES if axis in sizes and axis not in axes]:
        reason += f": too few for {' and '.join(left)}"
    value = " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "none"
    return replace(document, data={**body, acc.MESH: section} if section else body), [
        Derived(f"accelerate.{acc.MESH}", value, reason)
    ]


def scale_deepspeed(body: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--tiny`` lays over a DeepSpeed file that offloads: what needs a compiler or a disk of its own is done in memory.

    DeepSpeed compiles its Adam for CPUs for minutes when it is first used, and reads NVMe by libaio alone.
    """
    devices = {part: ds.get(body, f"{ds.ZERO}.{part}.device") for part in ds.OFFLOADS}
    if not {"cpu", "nvme"} & {device for device in devices.values() if isinstance(device, str)}:
        return {}
    moved = {part: {"device": "cpu", "nvme_path": None} for part, device in devices.items() if device == "nvme"}
    own = {} if "zero_force_ds_cpu_optimizer" in body else {"zero_force_ds_cpu_optimizer": False}
    return {**({ds.ZERO: moved} if moved else {}), **own}


def _mesh(accelerate: Mapping[str, Any], world: int) -> dict[str, int]:
    """The axes of 2 ranks each for which ``world`` is enough."""
    sizes = acc.parallel_sizes(accelerate)
    axes = {axis: 2 for axis in _AXES if axis in sizes}
    while axes:
        others = math.prod(axes.values())
        if world % others == 0 and (world > others or (_alone(axes) and world == others)):
            return axes
        axes.popitem()
    return axes


def _alone(axes: Mapping[str, int]) -> bool:
    """Context parallelism alone: FSDP splits over its ranks too (accelerate/parallelism_config.py, fsdp_dim_names)."""
    return list(axes) == ["cp"]


def tiny_layer(values: dict[str, Any], folder: Path, data_parallel_size: int) -> dict[str, Any]:
    """The values that ``--tiny`` lays between the recipe and the overrides.

    ``values`` are the recipe's with the overrides on top: the global batch follows the micro batch that will be used.
    """
    train = values.get("train")
    train = train if isinstance(train, dict) else {}
    trainer, data = values.get("trainer"), values.get("data")
    rows, form = {"dpo": (PREFERENCES, "preference"), "grpo": (PROMPTS, "prompt")}.get(
        str(trainer), (CONVERSATIONS, "oasst-tree")
    )
    shipped = {
        "name": rows.parent.name,
        "input": _shipped(rows, folder),
        "format": form,
        "language": "en" if rows is CONVERSATIONS else None,
        "revision": None,
        "expect": None,
        **{key: None for key in CHOOSING if isinstance(data, dict) and data.get(key) is not None},
    }
    during = isinstance(scored := values.get("eval"), dict) and scored.get("during") is not None
    own: dict[str, Any] = data if trainer == "grpo" and isinstance(data, dict) and data.get("input") is not None else {}
    return {
        "model": {"weights": "random", "revision": None, "path": None},
        # A reward of the recipe's own reads columns that no other prompts have.
        "data": {"limit": min(usable(own.get("limit"), MAX_PROMPTS), MAX_PROMPTS), "expect": None} if own else shipped,
        # Its servers would need vLLM; a command line that has a program in its place asks for them.
        **({"rollout": "colocate"} if values.get("rollout") == "servers" else {}),
        **({"servers": None} if values.get("servers") is not None else {}),
        **({"reward": [FIRST_TASK]} if trainer == "grpo" and not own else {}),
        "train": _train(train, data_parallel_size) if trainer != "grpo" else _rollouts(train, data_parallel_size),
        "eval": {
            **{"tasks": [FIRST_TASK], "max_gen_toks": MAX_NEW_TOKENS, "base": False, "pass_mark": {}, "pass_difference": {}},
            **({"during": {"every": EVERY, "tasks": [FIRST_TASK], "limit": 4}} if during else {}),
        },
        "expect": {},
        "push": None,
        "slurm": {"signal_seconds": SIGNAL_SECONDS},
    }


def _rollouts(train: dict[str, Any], data_parallel_size: int) -> dict[str, Any]:
    """The same of GRPO: two short answers to each prompt."""
    result = _train(train, data_parallel_size)
    del result["max_length"]
    pair = {} if result["global_batch_size"] % 2 == 0 else {"global_batch_size": 2 * result["global_batch_size"]}
    result |= {"num_generations": 2, "num_generations_eval": 1, **pair}
    result |= {"max_completion_length": min(usable(train.get("max_completion_length"), MAX_NEW_TOKENS), MAX_NEW_TOKENS)}
    # The tokenizer of a tiny run knows few words: prompts have more tokens.
    result["max_prompt_length"] = 4 * MAX_LENGTH
    result |= {"use_vllm": False} if train.get("use_vllm") else {}
    return result | ({"steps_per_generation": None} if train.get("steps_per_generation") is not None else {})


def _train(train: dict[str, Any], data_parallel_size: int) -> dict[str, Any]:
    micro_batch = usable(train.get("per_device_train_batch_size"), train_defaults()["per_device_train_batch_size"])
    stated = usable(train.get("global_batch_size"), 0)
    per_pass = micro_batch * data_parallel_size
    result: dict[str, Any] = {
        "max_length": min(usable(train.get("max_length"), MAX_LENGTH), MAX_LENGTH),
        "max_steps": min(usable(train.get("max_steps"), MAX_STEPS), MAX_STEPS),
        "logging_steps": 1,
        "global_batch_size": per_pass * max(1, min(stated // per_pass, MAX_ACCUMULATION)),
    }
    for key in ("save_steps", "eval_steps"):
        result[key] = min(usable(train.get(key), EVERY), EVERY)
    if train.get("tf32") is not None:
        # TrainingArguments refuses it on anything but an NVIDIA GPU of Ampere or newer.
        result["tf32"] = None
    # The tokenizer of a tiny run is trained locally and brings its own special tokens.
    result |= {key: None for key in ("pad_token", "eos_token") if train.get(key) is not None}
    init = train.get("model_init_kwargs")
    if isinstance(init, dict) and str(init.get("attn_implementation", "")).startswith("flash_attention"):
        result["model_init_kwargs"] = {"attn_implementation": None}
    return result


def _shipped(file: Path, folder: Path) -> str:
    """Relative to the recipe where that lies beside it, so that a run says the same on every machine."""
    if folder.parent != RECIPES:
        return str(RECIPES / file)
    return file.name if folder.name == file.parent.name else f"../{file.as_posix()}"
