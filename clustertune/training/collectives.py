"""The few collectives that the training program itself makes, on whatever process group accelerate set up."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist


class Group:
    """All ranks of the job; with one process, every call returns at once."""

    def __init__(self) -> None:
        self._on = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if self._on else 0
        self.world_size: int = dist.get_world_size() if self._on else 1
        nccl = self._on and "nccl" in dist.get_backend()
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        box = [value]
        if self._on:
            dist.broadcast_object_list(box, src=0, device=self._device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value in rank order, on all ranks."""
        if not self._on:
            return [value]
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, value)
        return box

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._on:
            self.maximum([0.0])

    def maximum(self, values: list[float]) -> list[float]:
        """Element-wise maximum over ranks of a short list (float64: byte counts stay exact below 2**53)."""
        if not self._on:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return cast("list[float]", tensor.tolist())
