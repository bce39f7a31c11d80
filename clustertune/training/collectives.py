"""The few collectives that the training program itself makes, on whatever process group accelerate set up."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.launch.attempt import AttemptPlan

_PEER = timedelta(hours=24)
"""How long a rank's thread waits for the others' threads. A thread that hangs is found by the heartbeat of its rank."""
_MEET = timedelta(minutes=5)
"""How long ranks wait for each other's connections."""


class Group:
    """All ranks of the job; with one process, every call returns at once.

    ``process_group``: of all ranks, over gloo; by default the one that training has.
    """

    def __init__(self, process_group: Any = None) -> None:
        self._on = dist.is_available() and dist.is_initialized()
        self.process_group = process_group
        self.rank: int = dist.get_rank() if self._on else 0
        self.world_size: int = dist.get_world_size() if self._on else 1
        nccl = self._on and process_group is None and "nccl" in dist.get_backend()
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @classmethod
    def apart(cls) -> Group:
        """The same ranks on a group of their own: the collectives of a thread never cross those of training. All call this.

        The group is used once: gloo takes the interface that the host name resolves to unless GLOO_SOCKET_IFNAME names one, and
        NCCL may have another. Raises UserError (exit 1) where the ranks do not reach each other by it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        try:
            apart = cls(dist.new_group(backend="gloo", timeout=_MEET))
            apart.barrier()
        except (RuntimeError, ValueError) as error:
            name = os.environ.get("GLOO_SOCKET_IFNAME", "the one that the host name resolves to")
            text = f"the ranks do not reach each other over gloo, which saves need, by the interface {name}: {error}"
            fix = "set network.interface of the cluster file to the interface that joins the nodes"
            raise UserError(Problem(text.partition("\n")[0], fix=fix), ExitCode.FAILED) from error
        dist.distributed_c10d._set_pg_timeout(_PEER, apart.process_group)
        return apart

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        box = [value]
        if self._on:
            dist.broadcast_object_list(box, src=0, group=self.process_group, device=self._device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value in rank order, on all ranks."""
        if not self._on:
            return [value]
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, value, group=self.process_group)
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
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.process_group)
        return cast("list[float]", tensor.tolist())

    def gather_numbers(self, values: list[float]) -> list[list[float]]:
        """Every rank's list in rank order, on all ranks; all are of one length."""
        if not self._on:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        gathered = torch.empty(self.world_size * len(values), dtype=torch.float64, device=self._device)
        dist.all_gather_into_tensor(gathered, mine, group=self.process_group)
        return cast("list[list[float]]", gathered.view(self.world_size, -1).tolist())


FIX = "every node must be given the same rendezvous address, and its own node rank; look at the node-N.log files"


def check_world(group: Group, world_size: int, plan: AttemptPlan | None) -> None:
    """Raise UserError (exit 1) where the process group is not the one that was planned; called before 800 GB are loaded.

    ``world_size`` is the recipe's; ``plan`` is None where the launcher left none.
    """
    rank = int(os.environ.get("RANK", "0"))
    problems = []
    if plan is not None and plan.world_size != world_size:
        problems.append(Problem(f"the plan of this attempt is for {plan.world_size} ranks, the run for {world_size}"))
    if group.world_size != world_size:
        text = f"rank {rank} sees a world of {group.world_size}, the run is for {world_size}: the ranks did not find each other"
        problems.append(Problem(text, fix=FIX))
    if problems:
        raise UserError(problems, ExitCode.FAILED)
