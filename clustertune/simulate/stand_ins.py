"""What is replaced in the child process, because a fake tensor, or a machine without GPUs, cannot take part in it.

Each says what it stands for. None of them changes what is allocated, sent or waited for on a GPU, but where it says so.

Files, save and resume are the product's own code, but for bytes, other ranks and this machine's memory. Files are sparse and
have their real headers, indices and manifest. The thread that saves is a real one, so that it begins on device 0; training
waits for it, as two threads cannot dispatch fake tensors at once.
"""

from __future__ import annotations

import json
import os
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl.kernels.chunked_logprob as chunked
from peft import PeftModel
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param_group
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor import _utils as tensor_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, core_model_loading

from clustertune.checkpoint import saving, shards
from clustertune.checkpoint.shards import DTYPES
from clustertune.manifest import XXH3_128, FileRecord, new_hasher
from clustertune.simulate.fake_cuda import JOURNAL
from clustertune.simulate.follow import Follow, Memory
from clustertune.tensorfile import Tensor, build_header, byte_size
from clustertune.training import loading, packing, parallelism
from clustertune.training import trainer as training
from clustertune.training.collectives import Group
from clustertune.training.loading_sources import RowReader

aten = torch.ops.aten
GATHERED, REDUCED = "gathered weights", "gradients"
_ONE_KERNEL = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Operators that have a kernel on CUDA, and become several where there is none (torch 2.13)."""
_LIBRARY = torch.library.Library("aten", "IMPL")


class Inline:
    """For a thread pool: fake tensors belong to the thread that made their mode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def shutdown(self, *args: Any, **kwargs: Any) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args))
        except BaseException as error:
            done.set_exception(error)
        return done


class Reading:
    """For the bytes of weight files: counted, not read."""

    def __init__(self) -> None:
        self.bytes = 0

    def flat(self, tensor: Any, begin: int, end: int) -> torch.Tensor:
        kind, count = DTYPES[tensor.dtype], max(end - begin, 0)
        self.bytes += count * kind.itemsize
        return torch.empty(count, dtype=kind)

    def whole(self, tensor: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
        """One rank alone: transformers reads a whole tensor, of which ``tensor`` is safetensors' slice."""
        kind = DTYPES[tensor.get_dtype()]
        made = torch.empty(tensor.get_shape(), dtype=kind)
        self.bytes += made.numel() * kind.itemsize
        return made.to(device=device, dtype=dtype)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,  # noqa: ARG001
) -> Any:  # fmt: skip
    """What sdpa dispatches to on CUDA in 16 bits: FlashAttention without a mask, the memory-efficient kernel with one, which
    takes a bias of the queries' type. torch built without CUDA chooses the kernel that writes out all scores."""
    if attn_mask is None or isinstance(attn_mask, str):
        causal = is_causal or attn_mask is not None
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, causal, False, scale=scale)[0]
    bias = attn_mask
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def _move(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Module.to`` as for real tensors: another device makes new parameters. Fake ones would be swapped, which weak references
    forbid."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for module in self.modules():
        for held in (module._parameters, module._buffers):
            for key, value in held.items():
                if value is None:
                    continue
                kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
                if (device is None or value.device == device) and kind == value.dtype:
                    continue
                new = value.detach().to(device=device or value.device, dtype=kind)
                held[key] = torch.nn.Parameter(new, value.requires_grad) if isinstance(value, torch.nn.Parameter) else new
    return self


class _Kernel:
    """For a Triton kernel, which works in place in memory that its caller made."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


def for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Outside of fake tensors: a mesh, and numbers that are no part of a model, have values."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def _without_index(make: Callable[..., Any]) -> Callable[..., Any]:
    """A real tensor on ``cpu:0`` is on ``cpu``; a fake one would differ from it."""

    def new(cls: Any, mode: Any = None, elements: Any = None, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(device, torch.device) and device.type == "cpu":
            device = torch.device("cpu")
        return make(cls, mode, elements, device, *args, **kwargs)

    return new


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a fake tensor reached a kernel")


def put(owner: Any, **values: Any) -> None:
    """Replace for the rest of this process."""
    for name, value in values.items():
        setattr(owner, name, value)


def install(memory: Memory, follow: Follow, *, two_models: bool) -> Reading:
    """Replace them all. ``memory`` learns what FSDP gathers and reduces, and what it empties behind the dispatcher."""
    put(FakeTensorMode, avoid_device_init=property(lambda _: True))
    # accelerate finds the optimizer's parameters by address (accelerator.py:4020).
    put(FakeTensor, data_ptr=lambda self: self.untyped_storage()._cdata)
    put(FakeTensor, __new__=staticmethod(_without_index(FakeTensor.__new__)))
    put(torch.nn.Module, to=_move)
    put(torch.nn.functional, scaled_dot_product_attention=_attention)
    for name in _ONE_KERNEL:
        _LIBRARY.impl(name, _never, "CUDA")
    resize = torch.UntypedStorage.resize_
    put(torch.UntypedStorage, resize_=lambda storage, size: memory.resized(storage, size, resize))
    # On a GPU TRL's tiles are Triton's: its torch ones would be counted. On "cpu" it takes those.
    if memory.device == "cpu":
        nothing = lambda *_, **__: None  # noqa: E731
        put(chunked, _forward_tile=nothing, _backward_tile=nothing, _addmm_fp32=nothing)
    put(chunked, _forward_kernel=_Kernel(), _backward_kernel=_Kernel(), _TRITON_AVAILABLE=True)
    put(chunked, triton=types.SimpleNamespace(cdiv=lambda a, b: -(-a // b)))
    mesh = device_mesh.DeviceMesh
    for name in ("__init__", "_compute_coordinates_from_mesh", "_flatten", "__getitem__", "get_local_rank",
                 "_compute_coordinate_on_dim", "get_group", "size"):  # fmt: skip
        own = mesh.__dict__.get(name)
        if own is not None and not isinstance(own, staticmethod | classmethod):
            setattr(mesh, name, for_real(own))
    device_mesh.init_device_mesh = _fsdp_init.init_device_mesh = torch.distributed.init_device_mesh = for_real(
        device_mesh.init_device_mesh
    )
    # Where a shard of FSDP2 lies in one of tensor parallelism torch looks up in a list of all rows, one fake number each.
    put(tensor_utils, _compute_local_shape_and_global_offset=for_real(tensor_utils._compute_local_shape_and_global_offset))
    strided = placement_types._StridedShard
    put(strided, local_shard_size_and_offset=for_real(strided.local_shard_size_and_offset))
    for name, purpose in (
        ("foreach_all_gather", GATHERED),
        ("foreach_all_gather_copy_out", GATHERED),
        ("foreach_reduce", REDUCED),
    ):
        setattr(_fsdp_param_group, name, _for_purpose(getattr(_fsdp_param_group, name), memory, purpose))
    return _replace_own(follow, two_models=two_models)


def _conversations(tokens: int, _: Any, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of so many tokens each, as the rows of a simulation are made; their lengths would be values."""
    for parts in zip(*(tensor.split(tokens) for tensor in tensors), strict=True):
        yield tuple(part.transpose(0, 1).unsqueeze(0) for part in parts)


def _for_purpose(function: Callable[..., Any], memory: Memory, purpose: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with memory.purpose(purpose):
            return function(*args, **kwargs)

    return run


def _replace_own(follow: Follow, *, two_models: bool) -> Reading:
    """The project's: bytes of files, threads, and what ranks tell each other beside training."""
    reading = Reading()
    put(RowReader, flat=lambda _, tensor, begin, end: reading.flat(tensor, begin, end))
    put(loading, ThreadPoolExecutor=Inline)
    fill = loading.Loading._fill
    held: list[dict[str, Any]] = []

    def fill_and_hold(self: Any, device: Any, model: Any, state: Any, **options: Any) -> None:
        """Keep the state dicts without data of a model before and after it is split, which accelerate (1.15, fsdp_utils.py:828)
        and loading let go of. With two models, the end of these fake tensors corrupts the heap of torch 2.13; why is not known.
        """
        held.extend((dict(state), model.state_dict()))
        fill(self, device, model, state, **options)

    if two_models:  # without a compiler what is held counts as memory of the device
        put(loading.Loading, _fill=fill_and_hold)
    put(core_model_loading, ThreadPoolExecutor=Inline, _materialize_copy=reading.whole)

    def meeting(kind: str, result: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def meet(self: Any, value: Any) -> Any:
            follow.meet(kind)
            return result(self, value)

        return meet

    put(Group, gather=meeting("gather of values", lambda self, value: [value] * self.world_size))
    put(Group, broadcast=meeting("broadcast of a value", lambda _, value: value))
    put(Group, maximum=meeting("maximum of values", lambda _, values: list(values)))
    put(packing, _each=partial(_conversations, follow.length // 4))
    put(parallelism, causal_lower_right=lambda *_: "lower right")
    return reading


# --- files, save and resume -------------------------------------------------------------------------------------------


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
    hasher = new_hasher(XXH3_128)
    for tensor in tensors:
        hasher.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
    return str(hasher.hexdigest())


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

        copy = tree_map(copied, state)
        size = sum(one.numel() * one.element_size() for one in copies.values())
        pinned = stager._config.use_pinned_memory
        self.counted.pinned, self.counted.pageable = (size, 0) if pinned else (0, size)
        return copy

    def write_new(self, path: Path, content: Iterator[Any], algorithm: str) -> FileRecord:
        """Write a sparse file, whose holes are counted."""
        hasher, size = new_hasher(algorithm), 0
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as out:
            for piece in content:
                if isinstance(piece, _Hole):
                    out.seek(piece.size, os.SEEK_CUR)
                    size += piece.size
                else:
                    hasher.update(piece)
                    size += out.write(piece)
            out.truncate(size)
        self.counted.written += size
        return FileRecord(size, hasher.hexdigest(), algorithm)

    def read_data(self, reader: Any, plan: Any, planner: Any) -> Any:
        """Count what would be read into tensors; read all else."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            target = planner.resolve_tensor(item).detach()
            tensor = torch.empty(target.shape, dtype=target.dtype)
            self.counted.read += tensor.numel() * tensor.element_size()
            target.copy_(tensor)
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


def install_files(mode: FakeTensorMode, follow: Follow) -> Bytes:
    """Replace what files, save and resume cannot have. Threads of saves dispatch to ``mode`` and ``follow``."""
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
