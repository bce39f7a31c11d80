"""Parameters without values, their names, and a rank's part of them: what loading by rows is made of."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def empty_storage(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU that takes no memory: one element, repeated.

    Not on the meta device: PEFT puts an adapter where its base is and its values would be lost, and accelerate finds the
    optimizer's parameters again by their addresses.
    """
    return torch.zeros((), dtype=dtype).expand(shape)


def empty_part(shape: torch.Size, dtype: torch.dtype, mesh: Any, placement: Placement) -> DTensor:
    """A DTensor over a mesh of one dimension whose part here is :func:`empty_storage`.

    Not by ``DTensor.from_local``, which moves the part to the mesh's device: there it would take its memory.
    """
    local, _ = compute_local_shape_and_global_offset(shape, mesh, [placement])
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
    return DTensor(empty_storage(local, dtype), DTensorSpec(mesh, (placement,), meta), requires_grad=False)


def is_empty_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values of its own: :func:`empty_storage`, or on the meta device. Of a DTensor: its part here."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return bool(tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size())


def put(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Make ``value`` the parameter or buffer ``name`` of a module that has one of that name."""
    (module._parameters if name in module._parameters else module._buffers)[name] = value


def clean(name: str) -> str:
    """A parameter's name without what activation checkpointing and torch.compile put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def plain(name: str) -> str:
    """A parameter's name in the model as transformers made it, from its name in what PEFT made of that."""
    name = clean(name).removeprefix("base_model.model.")
    # Several where LoRA is on several bare parameters of one module: each has a wrapper.
    return re.sub(r"(\.base_layer)+\.|\.original_module\.|\.modules_to_save\.default\.", ".", name)


def region(like: DTensor) -> tuple[slice, ...]:
    """What this rank keeps of the whole, in each dimension. FSDP2 parts what is split over tp already: still one piece."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def span(like: DTensor) -> tuple[int, int]:
    """The rows of the whole that this rank keeps."""
    slices = region(like)
    return (slices[0].start, slices[0].stop) if slices else (0, 1)


def rows(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's part of a whole value, for a parameter that is sharded as ``like``."""
    return whole[region(like)].clone() if isinstance(like, DTensor) else whole


def broadcast(given: torch.Tensor, like: Any, device: torch.device) -> torch.Tensor:
    """Rank 0's value, on all ranks; small: what the files do not hold is what is trained beside the base.

    A collective of the group that ``given`` is split over, too.
    """
    if isinstance(given, DTensor):
        given = given.full_tensor()
    empty = torch.empty(like.shape, dtype=like.dtype, device=device)
    whole = empty if is_empty_storage(given) else given.detach().to(device=device, dtype=like.dtype).contiguous()
    dist.broadcast(whole, src=0)
    return whole


def placed(local: torch.Tensor, like: Any, device: torch.device, *, cpu_offload: bool) -> Any:
    """A rank's part as the sharded model holds it."""
    local = local.to(dtype=like.dtype).contiguous()
    if not isinstance(like, DTensor):
        return local.to("cpu" if cpu_offload else device)
    local = local.to(device)
    whole = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole.to("cpu") if cpu_offload else whole
