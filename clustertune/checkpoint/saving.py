"""The state of a checkpoint, written behind training: copied to host memory, then written and hashed, all by a thread.

Training continues at once. Weights and optimizer state change in an optimizer step only, so the copy may take as long as the
forward and backward passes up to the next one, which waits for it (J. Mohan et al., CheckFreq, FAST 2021, 4.1).

``dcp.async_save`` is torch's stager and ``dcp.save`` in a thread. A checkpoint holds two states (model and optimizer), and two
saves at a time would cross their collectives, so one thread here saves both, and meets the other ranks' threads on a process
group of its own: for the folder, the digests, the manifest and what may go. torch 2.13, accelerate 1.15.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from clustertune.checkpoint.shards import Planner, ShardWriter, as_bytes, load, write_new
from clustertune.checkpoint.store import CheckpointStore
from clustertune.errors import is_full, storage_cause
from clustertune.host.system import Probe, memory
from clustertune.manifest import SHA256, TENSORS, XXH3_128, FileRecord, Ranks, new_hasher
from clustertune.plan.memory import COPY_SHARE


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A checkpoint that is whole, as one rank's thread sees it."""

    bytes: int
    """Of all ranks."""
    removed: list[Path]
    """Checkpoints that went in its place."""
    seconds: float
    copy_seconds: float = 0.0
    """Of the copy to host memory, in which training continues; 0 without one."""
    waited: str = ""
    """Why the copy that was to be made could not be: the next optimizer step has waited for all of the save."""


@dataclass
class RankState:
    """What one rank puts into a checkpoint."""

    states: Mapping[str, Any]
    """What is written in shards, by folder; or what ``alone`` writes."""
    parts: list[torch.Tensor]
    """This rank's part of the state, which its digest is of: the trained parameters first."""
    trained: int = 0
    """How many of the parts are parameters."""
    small: Mapping[str, bytes] = field(default_factory=dict)
    """Whole files, by their path relative to the checkpoint."""
    alone: Callable[[Path, Mapping[str, Any]], Mapping[str, FileRecord]] | None = None
    """Writes ``states`` into the folder, where this rank holds all of them; returns the files whose digests are known."""
    digest: str | None = None
    """Of the parts where it is known already: they change while they are written."""


class NotSaved(Exception):
    """No checkpoint was made: what each rank says; ``stored`` where the storage is to blame."""

    def __init__(self, text: str, *, stored: bool) -> None:
        super().__init__(text)
        self.stored = stored


class NotFinite(Exception):
    """No checkpoint was made: trained parameters of these ranks are not finite."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"trained parameters of ranks {ranks} are not finite")
        self.ranks = ranks


def describe_error(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return next(iter(str(storage_cause(error) or error).splitlines()), type(error).__name__)


def digest(tensors: list[torch.Tensor]) -> str:
    """The digest (hex) over the bytes of tensors, in their order."""
    hasher = new_hasher(XXH3_128)
    for tensor in tensors:
        for piece in as_bytes(tensor):
            hasher.update(piece)
    return hasher.hexdigest()


class StateWriter:
    """One rank's side of all saves of an attempt: one save at a time, in a thread, from host memory that is reused."""

    def __init__(self, store: CheckpointStore, ranks: Ranks, group: Any) -> None:
        """``store`` and ``ranks`` meet on ``group``, never the one of training: the collectives of two threads would cross."""
        self._store, self._ranks, self._group = store, ranks, group
        self._cuda = cuda = torch.cuda.is_available()
        self._stager = self._new_stager()
        self._stream = torch.cuda.Stream() if cuda else None
        # A thread begins on device 0, and leaving a stream's context there makes a CUDA context of every rank on the first GPU
        # (torch/cuda/__init__.py, StreamContext.__exit__; CUDA 12's cudaSetDevice).
        on_device = {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)} if cuda else {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save", **on_device)
        self.copied_bytes = 0
        """Host memory that the copy takes once it was made."""
        self._places: list[Any] = []
        self._copied: Any = None
        self._held: list[torch.Tensor] = []
        """The copy of the save before: where its bytes came from, and where they lie, each place once."""
        self._is_copied = threading.Event()
        self._is_copied.set()

    def _new_stager(self) -> DefaultStager:
        """Pinned; each copy has ended when it returns."""
        return DefaultStager(StagingOptions(self._cuda, False, False, False))

    def room_for(self, size: int, ranks: int) -> str | None:
        """Why a copy of ``size`` bytes for each of so many ranks does not fit into this node's memory; None where it does."""
        if size <= self.copied_bytes:  # it is there already
            return None
        probe = Probe()
        figures = memory(probe)
        free, limit = figures["memory_available_bytes"], figures["memory_limit_bytes"]
        if free is None:
            return "how much memory of this node is free is unknown"
        if limit is not None:
            resident = int(probe.read("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
            free = min(free, limit - ranks * resident)
        need = (size - self.copied_bytes) * ranks
        if need <= COPY_SHARE * max(0, free):
            return None
        return f"a copy of the state takes {need / 1e9:,.1f} GB of this node's memory, {free / 1e9:,.1f} GB are free"

    def copy(self, states: Mapping[str, Any], parts: list[torch.Tensor]) -> tuple[Mapping[str, Any], list[torch.Tensor]]:
        """The same in host memory. Storages that both hold are copied once.

        The state of a training keeps its place. So the second copy makes nothing again (torch's stager copies each DTensor's
        description too, which takes longer than the bytes of a small one): it moves the bytes.
        """
        taken = {"states": states, "parts": parts}
        leaves = _leaves(taken)
        places = [tree_structure(taken), *map(_identity, leaves)]
        if self._copied is not None and places == self._places:
            sources = {_identity(tensor): tensor for tensor in leaves}
            for target, source in zip(self._held, sources.values(), strict=True):
                target.copy_(source, non_blocking=self._cuda)
            if self._cuda:
                torch.cuda.current_stream().synchronize()
        else:
            self._copied, self._held, self._places = None, [], []  # its memory goes before the new one comes
            self._copied = self._stager.stage(taken)
            copies = zip(leaves, _leaves(self._copied), strict=True)
            self._held = list({_identity(one): copied for one, copied in copies}.values())
            self._places = places
            self.copied_bytes = sum(part.nbytes for part in parts)
        held = _with_values_of(taken, self._copied)
        return held["states"], held["parts"]

    def equals(self, folder: Path, states: Mapping[str, Any]) -> bool:
        """Whether this rank's part of ``states`` is what a checkpoint's folders of these names hold, however it was sharded."""
        for name, state in states.items():
            stored = self._stager.stage(state)
            for part in _leaves(stored):
                part.zero_()
            load(stored, folder / name, self._group)
            if not all(torch.equal(one.cpu(), other) for one, other in zip(_leaves(state), _leaves(stored), strict=True)):
                return False
        return True

    @property
    def is_copying(self) -> bool:
        """Tensors of training are being read."""
        return not self._is_copied.is_set()

    def wait_for_copy(self) -> None:
        """Wait until no tensor of training is read any more: call it before they change."""
        self._is_copied.wait()

    def start(
        self,
        step: int,
        state: RankState,
        meta: Mapping[str, Any],
        folder: Path | None = None,
        *,
        copied: bool = False,
    ) -> Future[WrittenCheckpoint]:
        """Have the thread make the checkpoint of a step, or finish the one in ``folder`` that others have begun to write.

        ``copied``: from a copy, so that training may change the state
        after :meth:`wait_for_copy`; else it must not before the future is done.

        The future raises NotSaved, NotFinite, OSError or UserError on all ranks alike; anything else where a peer is lost.
        """
        ready = None
        if copied:
            self._is_copied.clear()
            ready = torch.cuda.current_stream().record_event() if self._cuda else None
        return self._pool.submit(self._save, step, state, meta, folder, copied, ready)

    def _copy_of(self, state: RankState, ready: Any) -> RankState:
        """The state in host memory. On CUDA on a stream beside training's, behind ``ready``."""
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(ready)
            states, parts = self.copy(state.states, state.parts)
        return replace(state, states=states, parts=parts)

    def _save(
        self,
        step: int,
        state: RankState,
        meta: Mapping[str, Any],
        folder: Path | None,
        copied: bool,
        ready: Any,
    ) -> WrittenCheckpoint:
        try:
            began, copying, waited = time.perf_counter(), 0.0, ""
            if copied:
                copy_of, waited = self._copied_by_all(state, ready)
                if not waited:
                    self._is_copied.set()
                    state, copying = copy_of, time.perf_counter() - began
                    began += copying
            written = self._write_all(step, state, meta, folder)
        finally:
            self._is_copied.set()
        size, removed = written
        return WrittenCheckpoint(size, removed, time.perf_counter() - began, copying, waited)

    def _copied_by_all(self, state: RankState, ready: Any) -> tuple[RankState, str]:
        """The state in host memory, and why a rank has none: memory that cannot be pinned, such as beyond ``ulimit -l``.

        All ranks write their copies then, or all the state itself, which training leaves alone until that is done.
        """
        reason = None
        try:
            state = self._copy_of(state, ready)
        except Exception as error:
            reason = describe_error(error)
        reasons = [f"rank {rank}: {one}" for rank, one in enumerate(self._ranks.gather(reason)) if one]
        if reasons:  # what was copied goes
            self._copied, self._held, self._places, self.copied_bytes = None, [], [], 0
            self._stager = self._new_stager()
        return state, "; ".join(reasons)

    def _write_all(self, step: int, state: RankState, meta: Mapping[str, Any], folder: Path | None) -> tuple[int, list[Path]]:
        """Write, hash and commit a state; the checkpoint's bytes, and the checkpoints that went in its place."""
        records, fault, own_digest, finite = dict[str, FileRecord](), None, state.digest, True
        folder = folder or self._store.begin(step)
        try:
            records = self._write(folder, state)
            finite = all(bool(torch.isfinite(part).all()) for part in state.parts[: state.trained])
            own_digest = own_digest or (digest(state.parts) if state.parts else None)
        except (Exception, CheckpointException) as error:  # torch derives its own from BaseException
            fault = (describe_error(error), isinstance(error, OSError) or bool(storage_cause(error)) or is_full(folder))
        gathered = self._ranks.gather((fault, own_digest, finite))
        if failed := [f"rank {rank}: {one[0]}" for rank, (one, _, _) in enumerate(gathered) if one]:
            raise NotSaved("; ".join(failed), stored=any(one and one[1] for one, _, _ in gathered))
        if ranks := [rank for rank, (_, _, good) in enumerate(gathered) if not good]:
            raise NotFinite(ranks)
        size = self._store.commit(folder, {**meta, "state_digests": [one for _, one, _ in gathered if one]}, records)
        return size, self._store.prune()

    def _write(self, folder: Path, state: RankState) -> dict[str, FileRecord]:
        """Write this rank's files, durably; returns those whose digests are known."""
        records: dict[str, FileRecord] = {}
        if state.alone is not None:
            records |= state.alone(folder, state.states)
        else:
            for name, part in state.states.items():
                writer = ShardWriter(folder / name)
                dcp.save(part, storage_writer=writer, planner=Planner(), process_group=self._group)
                records |= {f"{name}/{file}": record for file, record in writer.records.items()}
        for name, content in state.small.items():
            algorithm = XXH3_128 if name.endswith(TENSORS) else SHA256
            records[name] = write_new(folder / name, iter([content]), algorithm)
        return records


def _leaves(state: Any) -> list[torch.Tensor]:
    """This rank's part of each tensor of a nested state."""
    tensors = (one for one in tree_leaves(state) if isinstance(one, torch.Tensor))
    return [(one.to_local() if hasattr(one, "to_local") else one).detach() for one in tensors]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _with_values_of(state: Any, copied: Any) -> Any:
    """The tensors of ``copied``, of an earlier save, among the other values of ``state``, such as the learning rate."""
    return tree_map(lambda one, other: other if isinstance(one, torch.Tensor) else copy.deepcopy(one), state, copied)


# --- the two states of a sharded model ----------------------------------------------------------------------------------

MODEL, OPTIMIZER = f"{FSDP_MODEL_NAME}_0", f"{OPTIMIZER_NAME}_0"
"""Their folders in a checkpoint, by accelerate's names."""


def _trained(model: Any) -> dict[str, Any]:
    """This rank's part of the parameters that are trained; of an adapter by PEFT's names."""
    if _is_adapter(model):
        return dict(get_peft_model_state_dict(model, adapter_name=model.active_adapter))
    return dict(get_model_state_dict(model))


def _is_adapter(model: Any) -> bool:
    return isinstance(getattr(model, "_orig_mod", model), PeftModel)


def sharded_states(model: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    """By folder: the parameters that are trained and their optimizer state. All ranks call this together."""
    return {MODEL: {"model": _trained(model)}, OPTIMIZER: {"optimizer": get_optimizer_state_dict(model, optimizer)}}


def load_model(model: Any, checkpoint: Path) -> None:
    """Give a sharded model what :func:`sharded_states` of it were saved. Raises UserError."""
    state = {"model": _trained(model)}
    load(state, checkpoint / MODEL)
    if _is_adapter(model):
        set_peft_model_state_dict(model, state["model"], adapter_name=model.active_adapter)
    else:
        set_model_state_dict(model, state["model"])


def load_optimizer(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """The same of its optimizer. Raises UserError."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint / OPTIMIZER)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
