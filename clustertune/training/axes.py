"""What the axes of a recipe's mesh need in a rank's environment, before accelerate is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def set_environment(accelerate: Mapping[str, Any]) -> list[str]:
    """What accelerate reads that tensor parallelism needs otherwise; before it is imported. Returns a note for each.

    A model is split after it is loaded: every rank must have the weights, not rank 0 alone.
    """
    section = accelerate.get("parallelism_config") or {}
    config = accelerate.get("fsdp_config") or {}
    if int(section.get("parallelism_config_tp_size") or 1) == 1:
        return []
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    stated = str(config.get("fsdp_cpu_ram_efficient_loading", True)).lower() == "true"
    return (
        ["fsdp_cpu_ram_efficient_loading off: each rank takes its part of a layer from weights that it has"] if stated else []
    )
