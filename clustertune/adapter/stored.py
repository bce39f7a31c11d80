"""What a checkpoint says of one of its tensors; every reader speaks of this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """One tensor as the checkpoint describes it, before it is read."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name, such as ``torch.float32``, or safetensors' such as ``F32``."""
    floating: bool
