"""Saving and loading that FSDP1 needs done again: the stock way loses the adapter and the optimizer state, without a message.

Seen with accelerate 1.15, peft 0.20, torch 2.13: ``set_peft_model_state_dict`` looks for keys without the prefixes of
FSDP1's and activation checkpointing's wrappers, torch skips what it does not find, and a resumed run starts over from a
fresh adapter with exit code 0. torch's own state-dict functions know these wrappers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from accelerate.utils import save_fsdp_model
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""accelerate's folder names inside a checkpoint."""


def load_adapter(model: Any, checkpoint: Path) -> None:
    """Load an adapter-only sharded checkpoint into the wrapped model. The files name tensors without the adapter's name."""
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    stored = {name.replace(".default.", "."): name for name in trained}
    shards = {"model": {name: trained[own] for name, own in stored.items()}}
    dcp.load(shards, storage_reader=dcp.FileSystemReader(checkpoint / MODEL))
    loaded = {own: shards["model"][name] for name, own in stored.items()}
    set_model_state_dict(model, loaded, options=StateDictOptions(strict=False))


def save(accelerator: Any, model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Write the model's shards as accelerate does, and the optimizer state by parameter name."""
    adapter_only = isinstance(accelerator.unwrap_model(model), PeftModel)
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(checkpoint), adapter_only=adapter_only)
    inner = getattr(optimizer, "optimizer", optimizer)
    state = get_optimizer_state_dict(model, inner, options=StateDictOptions(ignore_frozen_params=True))
    dcp.save({"optimizer": state}, storage_writer=dcp.FileSystemWriter(checkpoint / OPTIMIZER))


def load_optimizer(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Load what :func:`save` wrote."""
    inner = getattr(optimizer, "optimizer", optimizer)
    options = StateDictOptions(ignore_frozen_params=True)
    state = {"optimizer": get_optimizer_state_dict(model, inner, options=options)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint / OPTIMIZER))
    set_optimizer_state_dict(model, inner, state["optimizer"], options=options)
