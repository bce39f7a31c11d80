"""Optimizer state on NVMe, as DeepSpeed 0.19 saves it, and all of it back when a run goes on.

``engine.load_checkpoint`` copies the swap files of the checkpoint back and takes the masters out of them, and no more: what
lies in memory (groups below the size that is swapped, the counts of steps) stays as it was made, and as the optimizer knows of
no moments before its first step, those in the files are written over with zeros (``engine.py``, ``_load_zero_checkpoint`` is
left out with ``zero_nvme_offload_optimizer``; ``swap_tensor/optimizer_utils.py``, ``_get_state_tensors``). Small parameters,
which every rank holds whole, stay those of the base model until the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def follow(engine: Any) -> None:
    """From here on a load of this engine's is a whole one, also where optimizer state lies on NVMe."""
    optimizer = engine.optimizer
    if getattr(optimizer, "optimizer_swapper", None) is None:
        return
    load = engine.load_checkpoint

    def whole(folder: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        found = load(folder, tag, *args, **kwargs)
        if found[0] is not None:
            tag = tag or Path(folder, "latest").read_text(encoding="utf-8").strip()
            states = engine._get_all_zero_checkpoints(folder, tag)
            restore(optimizer, states[torch.distributed.get_rank(engine.optimizer.dp_process_group)])
        return found

    engine.load_checkpoint = whole


def restore(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Lay this rank's saved state over what :func:`follow` describes. ``saved``: its file's ``optimizer_state_dict``."""
    inner, swapper = optimizer.optimizer, optimizer.optimizer_swapper
    optimizer._set_fp32_optimizer_param_groups()
    inner.load_state_dict(saved["optimizer_state_dict"])
    optimizer._clear_fp32_optimizer_param_groups()
    for number, (group, value) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)
    ):
        info = swapper.swap_params_info.get(getattr(group, "ds_id", None))
        if info is None:
            group.data.copy_(value)
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
            continue
        del info.tensors[1:]
        for name, moment in inner.state[group].items():
            if isinstance(moment, torch.Tensor) and moment.numel() == 0:  # its values are in a file of this name
                moment.ds_id = f"{name}-{group.ds_id}"
                info.add_state_tensors([moment])
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
