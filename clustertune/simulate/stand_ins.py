"""What is replaced in the child process, because a fake tensor, or a machine without GPUs, cannot take part in it.

Each says what it stands for. None of them changes what is allocated, sent or waited for on a GPU, but where it says so.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import trl.kernels.chunked_logprob as chunked
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param_group
from torch.distributed.tensor import _utils as tensor_utils
from torch.distributed.tensor import placement_types
from torch.utils._python_dispatch import _disable_current_modes
from transformers import core_model_loading

from clustertune.checkpoint.shards import DTYPES
from clustertune.simulate.follow import Follow, Memory
from clustertune.training import loading, packing, parallelism
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

    def fill_and_hold(self: Any, device: Any, model: Any, given: Any, **options: Any) -> None:
        """Keep the state dicts without data of a model before and after it is split, which accelerate (1.15, fsdp_utils.py:828)
        and loading let go of. With two models, the end of these fake tensors corrupts the heap of torch 2.13; why is not known.
        """
        held.extend((dict(given), model.state_dict()))
        fill(self, device, model, given, **options)

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
