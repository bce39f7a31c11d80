"""Whether a run's ranks read only the part of the weights that they keep, from its configuration alone.

The training does so (``clustertune/training/loading.py``); the plan and doctor reckon with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clustertune.config import accelerate_file as acc
from clustertune.config import deepspeed as ds

IN_FLIGHT = 5
"""Parts of weights that a rank holds in host memory at once while it reads: four reads, and the one that is placed."""


def reads_parts(
    accelerate: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, quantized: Mapping[str, Any] | None
) -> bool:
    """Whether each rank reads only what it keeps. ``deepspeed``: DeepSpeed's file; ``quantized``: ``quantization_config``."""
    if ds.stage(accelerate, deepspeed) == 3:
        # What loading_zero.why_not looks for in the model itself; transformers makes a quantised base before it is parted.
        zero = ds.get(deepspeed or {}, ds.ZERO) or {}
        secondary = int(zero.get("zero_hpz_partition_size") or 1) > 1
        return not (quantized or secondary)
    return is_wanted(accelerate) and why_not(quantized) is None


def is_wanted(accelerate: Mapping[str, Any]) -> bool:
    """Whether the accelerate file asks for FSDP2 without a whole copy in every rank."""
    config = acc.section(accelerate, "fsdp_config")
    version = str(config.get("fsdp_version", 1))
    return accelerate.get("distributed_type") == "FSDP" and version == "2" and acc.flag(config, "cpu_ram_efficient_loading")


def _is_parted(quantized: Mapping[str, Any]) -> bool:
    storage = str(quantized.get("bnb_4bit_quant_storage", "uint8"))
    return bool(quantized.get("load_in_4bit")) and "float" in storage


def why_not(quantized: Mapping[str, Any] | None) -> str | None:
    """Why a recipe that asks for it cannot have it; None where it can. ``quantized``: the ``quantization_config``, if any."""
    if quantized and not _is_parted(quantized):
        return "its quantisation is none of 4 bits in a floating point bnb_4bit_quant_storage"
    return None
