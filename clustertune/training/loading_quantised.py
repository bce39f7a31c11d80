"""A base in 4 bits (bitsandbytes) by rows: each rank reads and quantises only what it keeps, bit for bit as the whole would be.

transformers 5.23 quantises all of the base in every rank, on its GPU: 215 GB of it for a model of 405B parameters. NF4 and
FP4 scale blocks of 64 elements by their largest one (arXiv 2305.14314), so a rank's elements need no others but those of
the blocks at its two ends. The scales themselves every rank needs for the products of whole layers: they are gathered, and
quantised in their turn where the recipe asks for it (double quantisation).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from clustertune.training.loading_files import RowReader
from clustertune.training.loading_sources import ParameterSource, Unfollowed
from clustertune.training.loading_storage import empty_storage, is_empty_storage, plain, put, span

NESTED_BLOCK = 256
"""Scales to one scale of theirs (bitsandbytes/functional.py, quantize_4bit)."""


def why_not(quantizer: Any) -> str | None:
    """Why a base that transformers' ``quantizer`` is for is not read by rows; None where it is."""
    config = quantizer.quantization_config
    if type(quantizer).__name__ != "Bnb4BitHfQuantizer" or quantizer.pre_quantized:
        return f"{getattr(config, 'quant_method', 'quantised')} weights are not parted by rows"
    if not config.bnb_4bit_quant_storage.is_floating_point:
        return "bnb_4bit_quant_storage is not a floating point dtype, without which FSDP does not shard it"
    return None


def is_packed(parameter: Any) -> bool:
    """Whether a parameter is bitsandbytes' of 4 bits."""
    return type(parameter).__name__ == "Params4bit"


def packed(parameter: Any, shape: tuple[int, ...], *, device: str = "cpu") -> Any:
    """A parameter of bitsandbytes without values, for a weight of ``shape``, with all that was asked of ``parameter``.

    ``device`` meta: one that FSDP shards. Raises Unfollowed where it does not fill whole elements of its storage.
    """
    size, storage = math.prod(shape), parameter.quant_storage
    if size % (2 * storage.itemsize):
        raise Unfollowed(f"a weight of shape {list(shape)} does not fill whole elements of {storage}")
    length = (size // (2 * storage.itemsize), 1)
    value = torch.empty(length, dtype=storage, device="meta") if device == "meta" else empty_storage(length, storage)
    others = {key: given for key, given in parameter.__dict__.items() if key not in ("data", "requires_grad", "bnb_quantized")}
    return type(parameter)(value, requires_grad=False, **{**others, "bnb_quantized": True})


def to_meta(model: Any, names: Collection[str]) -> list[tuple[str, torch.nn.Module, str, Any]]:
    """Put what is to be read, or has no values, on the meta device, where FSDP leaves it, ties kept.

    ``names``: what is to be read, as the model without PEFT names it.

    Returns each such entry: its name in the model, the module and the name there, and the parameter as it was.
    """
    made: dict[int, Any] = {}
    found = []
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module._parameters.items()):
            full = f"{prefix}.{name}" if prefix else name
            if parameter is None or not (plain(full) in names or is_empty_storage(parameter)):
                continue
            if id(parameter) not in made:
                shape = tuple(parameter.shape)
                made[id(parameter)] = (
                    packed(parameter, (math.prod(shape) * 2 * parameter.quant_storage.itemsize,), device="meta")
                    if is_packed(parameter)
                    else torch.nn.Parameter(torch.empty_like(parameter, device="meta").contiguous(), parameter.requires_grad)
                )
            put(module, name, made[id(parameter)])
            found.append((full, module, name, parameter))
    return found


@dataclass
class QuantisedPart:
    """What this rank makes of one weight."""

    values: torch.Tensor
    """Its rows of the packed weight, in the storage dtype."""
    scales: torch.Tensor
    """float32, of the blocks that begin in its rows."""


def read(source: ParameterSource, name: str, like: DTensor, parameter: Any, reader: RowReader, model: Any) -> torch.Tensor:
    """The elements of the weight that :func:`quantise` needs, on the CPU: this rank's, out to the ends of their blocks."""
    begin, end = blocks(source, like, parameter)
    if source.converter is None:
        return reader.flat(source.parts[0][2], begin, end).to(source.dtype)
    rows = source.shape[0] if source.shape else 1
    return source.read(name, reader, model, 0, rows).reshape(-1)[begin:end].clone()


def _elements(like: DTensor, parameter: Any) -> tuple[int, int]:
    each = 2 * parameter.quant_storage.itemsize
    first, last = span(like)
    return first * each, last * each


def blocks(source: ParameterSource, like: DTensor, parameter: Any) -> tuple[int, int]:
    """Elements from the begin of the first block to the end of the last one that hold any of this rank's."""
    first, last = _elements(like, parameter)
    if first >= last:
        return 0, 0
    block = parameter.blocksize
    return first // block * block, min(-(-last // block) * block, math.prod(source.shape))


def quantise(elements: torch.Tensor, source: ParameterSource, like: DTensor, parameter: Any) -> QuantisedPart:
    """Quantise what :func:`read` gave, on the device where it lies."""
    from bitsandbytes import functional

    storage, block = parameter.quant_storage, parameter.blocksize
    first, last = _elements(like, parameter)
    begin, _ = blocks(source, like, parameter)
    if first >= last:
        return QuantisedPart(torch.empty((0, 1), dtype=storage, device=elements.device), torch.empty(0, device=elements.device))
    whole, state = functional.quantize_4bit(
        elements, blocksize=block, compress_statistics=False, quant_type=parameter.quant_type, quant_storage=torch.uint8
    )
    values = whole.reshape(-1)[(first - begin) // 2 : (last - begin) // 2].clone().view(storage).reshape(-1, 1)
    mine, after = (-(-edge // block) for edge in (first, last))
    return QuantisedPart(values, state.absmax[mine - begin // block : after - begin // block].clone())


def state_of(scales: torch.Tensor, source: ParameterSource, like: DTensor, parameter: Any) -> Any:
    """bitsandbytes' ``QuantState`` of the whole weight, from every rank's own scales. A collective of the shard's group."""
    import bitsandbytes.functional as bnb

    functional: Any = bnb  # without annotations
    whole = _gathered(scales, like, parameter)
    given = {
        "shape": torch.Size(source.shape),
        "dtype": source.dtype,
        "blocksize": parameter.blocksize,
        "code": functional.get_4bit_type(parameter.quant_type, device=whole.device),
        "quant_type": parameter.quant_type,
    }
    if not parameter.compress_statistics:
        return functional.QuantState(absmax=whole, **given)
    offset = whole.mean()
    nested, state = functional.quantize_blockwise(whole - offset, blocksize=NESTED_BLOCK)
    return functional.QuantState(absmax=nested, offset=offset, state2=state, **given)


def _gathered(scales: torch.Tensor, like: DTensor, parameter: Any) -> torch.Tensor:
    """The scales of all blocks, in order: each rank of the shard's group has those that begin in its rows."""
    axis = next(i for i, placement in enumerate(like.placements) if isinstance(placement, Shard))
    group, ranks = like.device_mesh.get_group(axis), like.device_mesh.size(axis)
    each, rows = 2 * parameter.quant_storage.itemsize, like.shape[0]
    chunk = -(-rows // ranks)  # as torch.chunk parts them, which FSDP takes
    edges = [-(-min(rank * chunk, rows) * each // parameter.blocksize) for rank in range(ranks + 1)]
    counts = [after - before for before, after in pairwise(edges)]
    padded = scales.new_zeros(max(counts))
    padded[: len(scales)] = scales
    boxes = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(boxes, padded, group=group)
    return torch.cat([box[:count] for box, count in zip(boxes, counts, strict=True)])
