"""Output files cut into pieces, so that all threads work on one file, and what one thread does with a piece."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clustertune.errors import storage_error
from clustertune.merge.lora import Adapter, Update
from clustertune.merge.streams import CHUNK, STEP, InputFiles, Output, Shard
from clustertune.tensorfile import BITS, Tensor


@dataclass(frozen=True)
class CopiedBytes:
    """Bytes that stand in ``tensor``'s file as they are, from byte ``start`` of the tensor on."""

    tensor: Tensor
    start: int


@dataclass(frozen=True)
class ConvertedElements:
    """Elements of a saved module, from ``start`` on, in another dtype."""

    tensor: Tensor
    dtype: str
    start: int


@dataclass(frozen=True)
class Merged:
    """Row blocks of a tensor that takes an update."""

    tensor: Tensor
    update: Update
    blocks: list[tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """``size`` bytes of an output file from ``offset`` on. A header's bytes are their own content."""

    offset: int
    size: int
    content: bytes | CopiedBytes | ConvertedElements | Merged


def _width(dtype: str) -> int:
    return BITS[dtype] // 8


def _cut_merged(tensor: Tensor, update: Update) -> Iterator[tuple[int, Merged]]:
    rows, columns = tensor.shape
    width, blocks = columns * _width(tensor.dtype), list[tuple[int, int]]()
    for block in row_blocks(rows, columns):
        if blocks and (block[1] - blocks[0][0]) * width > CHUNK:
            yield (blocks[-1][1] - blocks[0][0]) * width, Merged(tensor, update, blocks)
            blocks = []
        blocks.append(block)
    yield (blocks[-1][1] - blocks[0][0]) * width, Merged(tensor, update, blocks)


def _cut_tensor(tensor: Tensor, adapter: Adapter) -> Iterator[tuple[int, CopiedBytes | ConvertedElements | Merged]]:
    update, replacement = adapter.updates.get(tensor.name), adapter.replaced.get(tensor.name)
    if update:
        for part, own in update.matrices(tensor):
            yield from _cut_merged(part, own)
    elif replacement and replacement.dtype != tensor.dtype:
        width, step = _width(tensor.dtype), CHUNK // max(_width(tensor.dtype), _width(replacement.dtype))
        for start in range(0, tensor.size // width, step):
            yield min(step * width, tensor.size - start * width), ConvertedElements(replacement, tensor.dtype, start)
    else:
        for start in range(0, tensor.size, CHUNK):
            yield min(CHUNK, tensor.size - start), CopiedBytes(replacement or tensor, start)


def cut(shard: Shard, adapter: Adapter) -> Iterator[Piece]:
    """All pieces of one output file in the order of their bytes, none empty, each of about ``CHUNK`` bytes at most.

    A tensor whose single row block is larger (see :func:`row_blocks`) is the exception.
    """
    yield Piece(0, len(shard.header), shard.header)
    position = len(shard.header)
    for tensor in shard.tensors:
        if tensor.size:
            for size, content in _cut_tensor(tensor, adapter):
                yield Piece(position, size, content)
                position += size


class Worker:
    """One thread's buffers while it makes pieces. Reading raises UserError (exit 73), so does writing."""

    def __init__(self, source: InputFiles) -> None:
        self.source, self.scratch = source, Scratch()
        self._loaded: tuple[Tensor, int] | None = None

    def make(self, piece: Piece, view: memoryview, output: Output) -> None:
        """Fill ``view`` with the piece's bytes and write them to ``output``; they stay in ``view`` to be hashed."""
        match piece.content:
            case CopiedBytes():
                self._copy(piece, piece.content, view, output)
            case Merged():
                self._merge(piece, piece.content, view, output)
            case ConvertedElements():
                self._convert(piece, piece.content, view, output)
            case header:
                view[:] = header
                self._write(view, piece.offset, output)

    def _write(self, view: memoryview, offset: int, output: Output) -> None:
        try:
            output.write(view, offset)
        except OSError as error:
            raise storage_error(error, "writing", output.path) from error

    def _copy(self, piece: Piece, copied: CopiedBytes, view: memoryview, output: Output) -> None:
        file, offset = copied.tensor.file, copied.tensor.offset + copied.start
        self.source.announce(file, offset, piece.size)
        for start in range(0, piece.size, STEP):
            part = view[start : start + STEP]
            self.source.read(file, part, offset + start)
            self._write(part, piece.offset + start, output)

    def _load(self, name: str, tensor: Tensor, first: int, last: int) -> Any:
        """Rows ``first`` to ``last`` of a factor in float32, in pieces, so that no second copy of it is ever held."""
        columns = tensor.shape[1]
        width = columns * torch_dtype(tensor.dtype).itemsize
        matrix = self.scratch.floats(name, last - first, columns)
        step = max(1, CHUNK // max(1, width))
        for start in range(first, last, step):
            end = min(last, start + step)
            view = self.scratch.bytes((end - start) * width)
            self.source.read(tensor.file, view, tensor.offset + start * width)
            matrix[start - first : end - first].copy_(as_tensor(view, tensor.dtype, end - start, columns))
        return matrix

    def _merge(self, piece: Piece, merged: Merged, view: memoryview, output: Output) -> None:
        tensor, update, weight = merged.tensor, merged.update, merged.update.weight
        columns, first = tensor.shape[1], merged.blocks[0][0]
        width = columns * torch_dtype(tensor.dtype).itemsize
        self.source.announce(weight.file, weight.offset + first * width, piece.size)
        rank, expert = update.rank, update.expert or 0
        held = self._loaded is not None and self._loaded[0] is update.a and self._loaded[1] == expert
        a = self.scratch.floats("a", rank, columns) if held else self._load("a", update.a, expert * rank, (expert + 1) * rank)
        self._loaded = update.a, expert
        for start, end in merged.blocks:
            b = self._load("b", update.b, update.row + start, update.row + end)
            if update.experts:  # peft 0.20 ParamWrapper.get_delta_weight: B's columns go round the experts
                b = b[:, expert :: update.experts].contiguous()
            part = view[(start - first) * width : (end - first) * width]
            self.source.read(weight.file, part, weight.offset + start * width)
            block = as_tensor(part, tensor.dtype, end - start, columns)
            add_update(block, a, b, update.scaling, self.scratch, rounded=update.experts > 0)
            self._write(part, piece.offset + (start - first) * width, output)

    def _convert(self, piece: Piece, converted: ConvertedElements, view: memoryview, output: Output) -> None:
        """The saved module's values in the base's dtype, as PEFT's ``ModulesToSaveWrapper`` keeps them."""
        tensor, width = converted.tensor, torch_dtype(converted.tensor.dtype).itemsize
        count = piece.size // torch_dtype(converted.dtype).itemsize
        raw = self.scratch.bytes(count * width)
        self.source.read(tensor.file, raw, tensor.offset + converted.start * width)
        as_tensor(view, converted.dtype, 1, count).copy_(as_tensor(raw, tensor.dtype, 1, count))
        self._write(view, piece.offset, output)


# --- kernel ---------------------------------------------------------------------------------------------------------------

# The arithmetic, in row blocks through buffers that are allocated once.
#
# PEFT's default ``merge_and_unload()`` on CPU (peft 0.20): A and B are float32 (``autocast_adapter_dtype``), the update is
# ``(B @ A) * scaling`` in float32, and ``weight += update`` adds in float32 and rounds once to the weight's dtype.
# ``safe_merge=True`` rounds the update first and so differs.

BLOCK_ELEMENTS = 1 << 17
"""Elements of one block: 512 KiB in float32, so that update and sum stay in a core's cache (0.8 CPU seconds per GB of merged
bfloat16 at rank 16, against 1.6 with blocks of 8 MiB; Xeon of 2.5 GHz)."""
MIN_ROWS = 32
"""Row blocks of a product are bit-equal to the whole as long as MKL does not see a single row, for which it takes the
matrix-vector kernel with another order of summation; 32 leaves room. A single column is a matrix-vector product as well, and
is left whole."""


def row_blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    """Cut ``rows`` into near-equal blocks of about ``BLOCK_ELEMENTS`` elements, none under ``MIN_ROWS`` rows but the only one.

    Near-equal, and not a short rest at the end: a rest of one row would change the bits (see ``MIN_ROWS``).
    """
    if columns == 1:
        return [(0, rows)]
    fitting = max(MIN_ROWS, BLOCK_ELEMENTS // max(1, columns))
    count = max(1, min(math.ceil(rows / fitting), rows // MIN_ROWS))
    size, longer = divmod(rows, count)
    bounds = [0]
    for number in range(count):
        bounds.append(bounds[-1] + size + (number < longer))
    return list(itertools.pairwise(bounds))


def block_elements(rows: int, columns: int) -> int:
    """Elements of the largest block of a tensor of this shape."""
    return max(end - start for start, end in row_blocks(rows, columns)) * columns


def torch_dtype(name: str) -> Any:
    """The torch dtype of a safetensors float dtype."""
    import torch

    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[name]


class Scratch:
    """The buffers of one worker: raw bytes, the update, the sum, A and a block of B. They grow and are never given back."""

    def __init__(self) -> None:
        self.raw = bytearray()
        self._floats: dict[str, Any] = {}

    def bytes(self, size: int) -> memoryview:
        """``size`` writable bytes."""
        if len(self.raw) < size:
            self.raw = bytearray(size)
        return memoryview(self.raw)[:size]

    def floats(self, name: str, rows: int, columns: int) -> Any:
        """A float32 matrix over the buffer ``name``; its content is undefined."""
        import torch

        if name not in self._floats or self._floats[name].numel() < rows * columns:
            self._floats.pop(name, None)  # free the old one before the larger one is taken
            self._floats[name] = torch.empty(rows * columns, dtype=torch.float32)
        return self._floats[name][: rows * columns].view(rows, columns)


def as_tensor(raw: memoryview, dtype: str, rows: int, columns: int) -> Any:
    """The matrix that ``raw`` holds, sharing its memory."""
    import torch

    return torch.frombuffer(raw, dtype=torch_dtype(dtype), count=rows * columns).view(rows, columns)


def add_update(weight: Any, a: Any, b: Any, scaling: float, scratch: Scratch, *, rounded: bool = False) -> None:
    """Do ``weight += (b @ a) * scaling``; ``weight`` (rows, in) of any float dtype, ``a`` (r, in), ``b`` (rows, r) float32.

    ``rounded``: the update to the weight's dtype before the sum, as PEFT does to experts.
    """
    import torch

    rows, columns = weight.shape
    update = torch.mm(b, a, out=scratch.floats("update", rows, columns)).mul_(scaling)
    if rounded:
        update.copy_(update.to(weight.dtype))
    if weight.dtype == torch.float32:
        weight.add_(update)
    else:
        weight.copy_(scratch.floats("sum", rows, columns).copy_(weight).add_(update))
