"""The state of a checkpoint, written behind training: copied to host memory, then written and hashed by a thread.

``dcp.async_save`` is torch's stager and ``dcp.save`` in a thread. A checkpoint holds two states (model and optimizer), and two
saves at a time would cross their collectives, so one thread here saves both. torch 2.13, accelerate 1.15.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from clustertune.checkpoint.shards import Planner, Writer, as_bytes
from clustertune.host.sight import Sight
from clustertune.host.system import memory
from clustertune.manifest import FileRecord, new_hasher, record_files
from clustertune.plan.host import COPY_SHARE

_PEER = timedelta(hours=24)
"""How long a rank's thread waits for the others' threads. A thread that hangs is found by the heartbeat of its rank."""


@dataclass(frozen=True)
class Written:
    """What one rank's thread wrote of a checkpoint."""

    records: dict[str, FileRecord]
    """Of each file, by its path relative to the checkpoint."""
    digest: str
    """Of this rank's part of the state."""
    seconds: float


def digest(tensors: list[torch.Tensor], algorithm: str = "xxh3_128") -> str:
    """The digest (hex) over the bytes of tensors, in their order."""
    found = new_hasher(algorithm)
    for tensor in tensors:
        for piece in as_bytes(tensor):
            found.update(piece)
    return found.hexdigest()


class StateWriter:
    """One rank's side of all saves of an attempt: one save at a time, in a thread, from host memory that is reused."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(cuda, False, False, cuda))  # pinned, shared, asynchronous, non-blocking
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        # Never the group of training: the collectives of two threads would cross.
        self._group = dist.new_group(backend="gloo", timeout=_PEER) if dist.is_initialized() else None
        self.copied_bytes = 0
        """Host memory that the copy takes once it was made."""

    def room_for(self, size: int) -> str | None:
        """Why a copy of ``size`` bytes for each rank of this node does not fit into its memory; None where it fits."""
        ranks, sight = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), Sight()
        found = memory(sight)
        free, limit = found["memory_available_bytes"], found["memory_limit_bytes"]
        if free is None:
            return "how much memory of this node is free is unknown"
        if limit is not None:
            resident = int(sight.read("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
            free = min(free, limit - ranks * resident)
        need = (size - self.copied_bytes) * ranks
        if need <= COPY_SHARE * max(0, free):  # a copy that is there needs nothing more
            return None
        return f"a copy of the state takes {need / 1e9:,.1f} GB of this node's memory, {free / 1e9:,.1f} GB are free"

    def copy(self, states: Mapping[str, Any], parts: list[torch.Tensor]) -> tuple[Mapping[str, Any], list[torch.Tensor]]:
        """The same in host memory. Storages that both hold are copied once."""
        held: Any = self._stager.stage({"states": _local(states), "parts": parts})
        self.copied_bytes = sum(part.nbytes for part in parts)
        return _put(states, held["states"]), held["parts"]

    def equals(self, folder: Path, states: Mapping[str, Any]) -> bool:
        """Whether this rank's part of ``states`` is what a checkpoint's folders of these names hold, however it was sharded."""
        for name, state in states.items():
            stored = _put(state, self._stager.stage(_local(state)))
            for part in _tensors(stored):
                part.zero_()
            dcp.load(stored, storage_reader=dcp.FileSystemReader(folder / name), process_group=self._group)
            if not all(torch.equal(one.cpu(), other) for one, other in zip(_tensors(state), _tensors(stored), strict=True)):
                return False
        return True

    def start(
        self, folder: Path, states: Mapping[str, Any], hashed: Callable[[], str], names: Callable[[], list[str]]
    ) -> Future[Written]:
        """In the thread: write ``states`` below ``folder``, fsync and hash what else this rank wrote, which ``names`` lists.

        ``hashed`` gives the digest of this rank's part of the state.
        """

        def write() -> Written:
            began, records = time.perf_counter(), dict[str, FileRecord]()
            for name, state in states.items():
                writer = Writer(folder / name)
                dcp.save(state, storage_writer=writer, planner=Planner(), process_group=self._group)
                records |= {f"{name}/{file}": record for file, record in writer.records.items()}
            records |= record_files(folder, [name for name in names() if name not in records])
            return Written(records, hashed(), time.perf_counter() - began)

        return self._pool.submit(write)


def _local(state: Any) -> Any:
    """A state with the shards of FSDP1's tensors in their place: torch's stager cannot copy a ShardedTensor."""
    if isinstance(state, Mapping):
        return {key: _local(value) for key, value in state.items()}
    return [shard.tensor for shard in state.local_shards()] if isinstance(state, ShardedTensor) else state


def _put(state: Any, copied: Any) -> Any:
    """``copied``, which is of :func:`_local`, with its shards as tensors like those of ``state``, in host memory."""
    if isinstance(state, Mapping):
        return {key: _put(value, copied[key]) for key, value in state.items()}
    if not isinstance(state, ShardedTensor):
        return copied
    whole = copy.deepcopy(state.metadata())
    mine = [copy.deepcopy(shard.metadata) for shard in state.local_shards()]
    for shard in [*whole.shards_metadata, *mine]:
        shard.placement._device = torch.device("cpu")  # as ShardedTensor.cpu does
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(tensor, metadata) for tensor, metadata in zip(copied, mine, strict=True)],
        sharded_tensor_metadata=whole,
        process_group=state._process_group,
    )


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """This rank's part of each tensor of a state."""
    for value in flatten_state_dict(state)[0].values():
        if isinstance(value, ShardedTensor):
            yield from (shard.tensor for shard in value.local_shards())
        elif isinstance(value, torch.Tensor):
            yield value.to_local() if hasattr(value, "to_local") else value


@contextmanager
def collected(plugin: Any) -> Iterator[dict[str, Any]]:
    """The states that accelerate's or our savers hand to ``dcp.save`` inside, by the name of their folder; nothing is written.

    ``plugin``: accelerate's of FSDP. Its options would have torch copy the state into new, unpinned host memory each time.
    """
    found: dict[str, Any] = {}

    def keep(state_dict: Any, *, storage_writer: Any, **_: Any) -> None:
        found[Path(storage_writer.path).name] = state_dict

    options = [made for made in (plugin.state_dict_config, plugin.optim_state_dict_config) if made is not None]
    before, save = [made.offload_to_cpu for made in options], dcp.save
    try:
        for made in options:
            made.offload_to_cpu = False
        dcp.save = keep
        yield found
    finally:
        dcp.save = save
        for made, value in zip(options, before, strict=True):
            made.offload_to_cpu = value
