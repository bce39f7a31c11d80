"""Files, save and resume of the rank that is simulated: the product's own code, but for bytes, other ranks and this machine's
memory.

Files are sparse and have their real headers, indices and manifest. The thread that saves is a real one, so that it begins on
device 0; training waits for it, as two threads cannot dispatch fake tensors at once.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from clustertune.checkpoint import saving, shards
from clustertune.manifest import XXH3_128, FileRecord, new_hasher
from clustertune.simulate.fake_cuda import JOURNAL
from clustertune.simulate.follow import Follow
from clustertune.simulate.stand_ins import for_real, put
from clustertune.tensorfile import Tensor, build_header, byte_size
from clustertune.training import trainer as training
from clustertune.training.collectives import Group


def write_base(folder: Path, architecture: Mapping[str, Any]) -> int:
    """Write config and weights of an architecture into ``folder``; returns the parameters. 812 GB of a 405B take no room."""
    folder.mkdir()
    keys = {key: value for key, value in architecture.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(architecture["model_type"], **keys)
    config.architectures = architecture["architectures"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for tied in getattr(model, "_tied_weights_keys", None) or () if config.tie_word_embeddings else ():
        shapes.pop(tied, None)
    files: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        files[name.split(".")[2] if ".layers." in name else "ends"][name] = shape
    index: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(files.values()):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        size += _sparse(path, tensors)
        index |= dict.fromkeys(tensors, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
    return sum(parameter.numel() for parameter in model.parameters())


def _entry(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, kind, shape, Path(), 0, byte_size(kind, shape))


def _sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """One file of bfloat16 tensors; returns their bytes."""
    entries = [_entry(name, "BF16", shape) for name, shape in shapes.items()]
    header, size = build_header(entries), sum(entry.size for entry in entries)
    with path.open("wb") as out:
        out.write(header)
        out.truncate(len(header) + size)
    return size


@dataclass
class Bytes:
    """What goes to storage and comes from it, and what host memory holds for it. Of one rank."""

    written: int = 0
    """Of the newest save."""
    read: int = 0
    pinned: int = 0
    pageable: int = 0


class Alone:
    """For the ranks that meet beside training: each is simulated as if it were the only one that saves."""

    rank, world_size, process_group = 0, 1, None

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        """No other."""


class _Hole:
    """Bytes that a fake tensor would have."""

    def __init__(self, size: int) -> None:
        self.size = size


def _pieces(tensor: torch.Tensor) -> Iterator[Any]:
    """For ``as_bytes``."""
    if not isinstance(tensor, FakeTensor):
        with _disable_current_modes():
            yield from _AS_BYTES(tensor)
        return
    JOURNAL.read()
    yield _Hole(tensor.numel() * tensor.element_size())


_AS_BYTES = shards.as_bytes


def _digest(tensors: list[torch.Tensor]) -> str:
    """For the digest of values: of their sizes and types."""
    found = new_hasher(XXH3_128)
    for tensor in tensors:
        found.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
    return str(found.hexdigest())


class _Replaced:
    """What is put in the place of the product's and torch's own, and what it counts."""

    def __init__(self, mode: FakeTensorMode, follow: Follow) -> None:
        self._mode, self._follow = mode, follow
        self.counted = Bytes()

    def pool(self) -> type[ThreadPoolExecutor]:
        """Of a thread of its own, for which training waits."""
        mode, follow = self._mode, self._follow

        class Beside(ThreadPoolExecutor):
            def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:  # type: ignore[override]
                def run() -> Any:
                    with mode, follow:
                        return work(*args)

                JOURNAL.begin()
                made = super().submit(run)
                wait([made])
                return made

        return Beside

    def stage(self, stager: DefaultStager, state: Any, **_: Any) -> Any:
        """Copy each storage once to host memory."""
        copies: dict[int, torch.Tensor] = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            local = (value._local_tensor if isinstance(value, DTensor) else value).detach()
            key = local.untyped_storage()._cdata
            if key not in copies:
                copies[key] = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")
                self._follow.memory.leave_out(copies[key])
                copies[key].copy_(local)
            made = copies[key]
            return DTensor(made, value._spec, requires_grad=False) if isinstance(value, DTensor) else made

        found = tree_map(copied, state)
        size = sum(one.numel() * one.element_size() for one in copies.values())
        pinned = stager._config.use_pinned_memory
        self.counted.pinned, self.counted.pageable = (size, 0) if pinned else (0, size)
        return found

    def write_new(self, path: Path, content: Iterator[Any], algorithm: str) -> FileRecord:
        """Write a sparse file, whose holes are counted."""
        found, size = new_hasher(algorithm), 0
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as out:
            for piece in content:
                if isinstance(piece, _Hole):
                    out.seek(piece.size, os.SEEK_CUR)
                    size += piece.size
                else:
                    found.update(piece)
                    size += out.write(piece)
            out.truncate(size)
        self.counted.written += size
        return FileRecord(size, found.hexdigest(), algorithm)

    def read_data(self, reader: Any, plan: Any, planner: Any) -> Any:
        """Count what would be read into tensors; read all else."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            target = planner.resolve_tensor(item).detach()
            found = torch.empty(target.shape, dtype=target.dtype)
            self.counted.read += found.numel() * found.element_size()
            target.copy_(found)
            planner.commit_tensor(item, target)
        plan.items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        return _READ(reader, plan, planner)

    def save_pretrained(self, model: Any, folder: Any, state_dict: Mapping[str, Any]) -> None:
        """Write one file, where transformers and PEFT may write several."""
        is_adapter = isinstance(model, PeftModel)
        unlike = {value.untyped_storage()._cdata: (name, value) for name, value in state_dict.items()}  # tied ones once
        entries = []
        for name, value in unlike.values():
            if not is_adapter or "lora_" in name:
                entries.append(_entry(name, shards.NAMES[value.dtype], tuple(value.shape)))
        file = Path(folder) / ("adapter_model.safetensors" if is_adapter else "model.safetensors")
        self.write_new(file, iter([build_header(entries), *(_Hole(one.size) for one in entries)]), XXH3_128)


def install(mode: FakeTensorMode, follow: Follow) -> Bytes:
    """Replace them for the rest of this process. Threads of saves dispatch to ``mode`` and ``follow``."""
    new = _Replaced(mode, follow)
    for module in (shards, saving, training):
        for name, function in (("as_bytes", _pieces), ("write_new", new.write_new), ("digest", _digest)):
            if hasattr(module, name):
                setattr(module, name, function)
    # A bound method in a class would not be given the reader.
    put(shards.ShardReader, read_data=lambda reader, plan, planner: new.read_data(reader, plan, planner))  # noqa: PLW0108
    put(saving, ThreadPoolExecutor=new.pool())
    put(DefaultStager, stage=lambda stager, state, **_: new.stage(stager, state))
    put(saving.StateWriter, room_for=lambda *_: None)  # this machine's memory says nothing
    put(Group, apart=classmethod(lambda _: Alone()))
    put(_DistWrapper, __init__=_alone)
    put(default_planner, _validate_global_plan=lambda *_: [])  # other ranks hold the rest
    for kind in (PeftModel, PreTrainedModel):
        put(kind, save_pretrained=lambda model, folder, state_dict, **_: new.save_pretrained(model, folder, state_dict))
    for name in ("_save_rng_state", "_load_rng_state", "_save_scheduler"):
        setattr(training.RankTrainer, name, for_real(getattr(training.RankTrainer, name)))
    put(shards, load_small=for_real(shards.load_small))
    return new.counted


_READ = shards.ShardReader.read_data


def _alone(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:  # noqa: ARG001
    self.group, self.use_dist, self.coordinator_rank = group, False, coordinator_rank
    self.global_coordinator_rank, self.rank, self.is_coordinator = 0, 0, True
