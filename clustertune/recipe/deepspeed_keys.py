"""What may stand in a DeepSpeed configuration: the keys of the pinned DeepSpeed, those that it has removed, and its ``auto``.

DeepSpeed takes an unknown key of the top level without a message (runtime/config.py asks for the ones that it knows).
It refuses one of ``zero_optimization``, ``bf16`` and ``fp16`` only when the model is being wrapped. It reads ``auto`` where
nothing fills it in as if the key were not there (runtime/config_utils.py, DeepSpeedConfigModel.__init__).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ZERO = "zero_optimization"
ALIGNMENT = f"{ZERO}.parameter_alignment"
OFFLOADS = ("offload_param", "offload_optimizer")

AUTO = frozenset(
    (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "bf16.enabled", "fp16.enabled", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
        "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path",
    )
)  # fmt: skip
"""Keys whose ``auto`` is filled in: transformers (integrations/deepspeed.py, HfTrainerDeepSpeedConfig) and accelerate
(utils/dataclasses.py, DeepSpeedPlugin.__post_init__; accelerator.py, _prepare_deepspeed)."""


def get(body: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a configuration; None where there is none."""
    found: Any = body
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def text(body: Mapping[str, Any], path: str) -> str | None:
    """The same as a word."""
    found = get(body, path)
    return None if found is None else str(found)


def secondary_partition(body: Mapping[str, Any]) -> bool:
    """Whether a second copy of the weights is split over the ranks of each node (ZeRO++'s hpZ)."""
    given = str(get(body, f"{ZERO}.zero_hpz_partition_size"))
    return given.isdecimal() and int(given) > 1


def quantizes_traffic(body: Mapping[str, Any]) -> bool:
    """Whether weights or gradients travel quantised (ZeRO++)."""
    return any(bool(get(body, f"{ZERO}.zero_quantized_{what}")) for what in ("weights", "gradients"))


def offload_problems(stage: int, devices: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """What a ZeRO stage does not offload: the part of ``devices``, what is wrong, and what to do
    (deepspeed/runtime/zero/config.py, offload_config.py)."""
    for part, lowest, what in (("offload_param", 3, "parameters are"), ("offload_optimizer", 1, "optimizer state is")):
        device = devices.get(part)
        if device in ("cpu", "nvme") and stage < lowest:
            yield part, f"{what} offloaded from stage {lowest} on, here it is {stage}", "use stage 3, or leave it out"
        elif device == "nvme" and stage < 3:
            yield part, f"nvme takes state of stage 3 only, here it is {stage}", "use cpu"


def nvme_paths(body: Mapping[str, Any]) -> dict[str, str]:
    """What is swapped to a local disk, and where: a folder or ``auto``."""
    on_disk = [part for part in OFFLOADS if get(body, f"{ZERO}.{part}.device") == "nvme"]
    return {part: str(get(body, f"{ZERO}.{part}.nvme_path")) for part in on_disk}


def move_to_memory(body: dict[str, Any]) -> list[str]:
    """Have what is swapped to a disk offloaded to host memory in a configuration; returns what was moved."""
    moved = list(nvme_paths(body))
    for part in moved:
        section = get(body, f"{ZERO}.{part}")
        section.pop("nvme_path", None)
        section["device"] = "cpu"
    return moved


def keep_own_optimizer(body: dict[str, Any]) -> bool:
    """Have torch's optimizer offloaded instead of DeepSpeed's Adam; whether the configuration offloads one of its own."""
    own = get(body, f"{ZERO}.offload_optimizer.device") == "cpu" and "optimizer" not in body
    if own:
        body["zero_force_ds_cpu_optimizer"] = False
    return own
