"""Output files cut into pieces, so that all threads work on one file, and what one thread does with a piece."""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustertune.errors import UserError, storage_error
from clustertune.manifest import XXH3_128, FileRecord, fsync_path, new_hasher
from clustertune.merge.lora import EXPONENTS, Adapter, Update, is_finite
from clustertune.tensorfile import BITS, FLOATS, OpenFiles, Tensor, build_header


@dataclass(frozen=True)
class Stored:
    """What stands in ``tensor``'s file from byte ``start`` of the tensor on, in ``dtype``: a saved module's may be another."""

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
    content: bytes | Stored | Merged

    @property
    def is_computed(self) -> bool:
        """Whether torch is needed for it."""
        return isinstance(self.content, Merged) or (
            isinstance(self.content, Stored) and self.content.dtype != self.content.tensor.dtype
        )


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


def _cut_tensor(tensor: Tensor, adapter: Adapter) -> Iterator[tuple[int, Stored | Merged]]:
    update, replacement = adapter.updates.get(tensor.name), adapter.replaced.get(tensor.name)
    if update:
        for part, own in update.matrices(tensor):
            yield from _cut_merged(part, own)
    elif replacement and replacement.dtype != tensor.dtype:
        width, stored = _width(tensor.dtype), _width(replacement.dtype)
        step, count = CHUNK // max(width, stored), tensor.size // width
        for start in range(0, count, step):
            yield min(step, count - start) * width, Stored(replacement, tensor.dtype, start * stored)
    else:
        for start in range(0, tensor.size, CHUNK):
            yield min(CHUNK, tensor.size - start), Stored(replacement or tensor, tensor.dtype, start)


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
            case Merged():
                self._merge(piece, piece.content, view, output)
            case Stored() if piece.is_computed:
                self._convert(piece, piece.content, view, output)
            case Stored():
                self._copy(piece, piece.content, view, output)
            case header:
                view[:] = header
                self._write(view, piece.offset, output)

    def _write(self, view: memoryview, offset: int, output: Output) -> None:
        try:
            output.write(view, offset)
        except OSError as error:
            raise storage_error(error, "writing", output.path) from error

    def _copy(self, piece: Piece, copied: Stored, view: memoryview, output: Output) -> None:
        file, offset = copied.tensor.file, copied.tensor.offset + copied.start
        self.source.announce(file, offset, piece.size)
        for start in range(0, piece.size, STEP):
            part = view[start : start + STEP]
            self.source.read(file, part, offset + start)
            # 85 GB per CPU second, as the part is still in the core's cache.
            _require_finite(part, copied.dtype, f"{copied.tensor.name} has NaN or infinity", file)
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
            text = f"{tensor.name} has NaN or infinity after the update ({tensor.dtype})"
            _require_finite(part, tensor.dtype, text, weight.file)
            self._write(part, piece.offset + (start - first) * width, output)

    def _convert(self, piece: Piece, converted: Stored, view: memoryview, output: Output) -> None:
        """The saved module's values in the base's dtype, as PEFT's ``ModulesToSaveWrapper`` keeps them."""
        tensor, width = converted.tensor, torch_dtype(converted.tensor.dtype).itemsize
        count = piece.size // torch_dtype(converted.dtype).itemsize
        raw = self.scratch.bytes(count * width)
        self.source.read(tensor.file, raw, tensor.offset + converted.start)
        as_tensor(view, converted.dtype, 1, count).copy_(as_tensor(raw, tensor.dtype, 1, count))
        _require_finite(view, converted.dtype, f"{tensor.name} has NaN or infinity", tensor.file)
        self._write(view, piece.offset, output)


def _require_finite(values: memoryview, dtype: str, text: str, file: Path) -> None:
    """Raise UserError where a buffer holds NaN or infinity."""
    # 85 GB per CPU second, as the part is still in the core's cache.
    if dtype in EXPONENTS and not is_finite(values, dtype):
        fix = "it would answer with noise: copy the base again, take an earlier checkpoint, or merge in bfloat16, not float16"
        raise UserError(text, file=str(file), fix=fix)


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

    return getattr(torch, FLOATS[name])


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


# --- streams ---------------------------------------------------------------------------------------------------------------

# Bytes in and out: whole reads, and output files that several threads write and that are hashed meanwhile.


CHUNK = 4 << 20
"""Bytes that one thread works on at a time."""
STEP = 256 << 10
"""Bytes per system call: what was read is still in the core's cache when it is written (0.6 CPU seconds per GB read, hashed
and written, against 0.9 to 2.0 with 4 MiB and 0.8 with a read beside ``copy_file_range``; ext4, Linux 6.18)."""
BUFFERS = 2
"""Buffers per thread: one is filled while the other may wait for its turn to be hashed."""
_AHEAD = 64 << 20
"""Bytes by which the kernel is asked to read ahead of the threads."""
_FLUSH = 64 << 20
"""Bytes after which what was written is sent to the device."""
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM}
"""What fallocate(2) answers where the filesystem cannot do it."""


class InputFiles(OpenFiles):
    """The input files. A failing read is a UserError (exit 73) that names the file."""

    def read(self, path: Path, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``path``."""
        try:
            super().read(path, view, offset)
        except OSError as error:
            raise storage_error(error, "reading", path) from error

    def announce(self, path: Path, offset: int, size: int) -> None:
        """Have the kernel read what follows soon: threads that take turns look to it like random access."""
        try:
            os.posix_fadvise(self.descriptor(path), offset + _AHEAD, size, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            raise storage_error(error, "reading", path) from error


def _reserve(fd: int, size: int) -> None:
    """Take the file's blocks at once where the filesystem can (writing is a fifth cheaper, and a full disk shows first).

    Not ``os.posix_fallocate``: where the filesystem cannot, glibc writes into every block instead.
    """
    if size and ctypes.CDLL(None, use_errno=True).fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code not in _NO_FALLOCATE:
            raise OSError(code, os.strerror(code))


class Output:
    """A file of ``size`` bytes, written at any place by several threads, and hashed in the order of its bytes.

    It has its name only when all of it is on the device; until then it is ``<name>.part``. Every method raises OSError.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._part = path.with_name(path.name + ".part")
        self._hasher, self._hashed, self._flushed = new_hasher(XXH3_128), 0, 0
        self._guard, self._hashing = threading.Lock(), False
        self._waiting: dict[int, tuple[memoryview, Callable[[], None]]] = {}
        self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _reserve(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise

    def write(self, view: memoryview, offset: int) -> None:
        """Write ``view`` at ``offset``."""
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done : done + STEP], offset + done)

    def add(self, view: memoryview, offset: int, release: Callable[[], None]) -> bool:
        """Hash what was written at ``offset`` as soon as all before it is hashed, by this thread or another.

        Then ``release`` is called. True for the one call with which the file is complete.
        """
        with self._guard:
            self._waiting[offset] = view, release
            if self._hashing:
                return False
            self._hashing = True
        while True:
            with self._guard:
                if self._hashed not in self._waiting:
                    self._hashing = False
                    return self._hashed == self.size
                view, release = self._waiting.pop(self._hashed)
            self._hasher.update(view)
            self._hashed += len(view)
            release()
            self._flush()

    def _flush(self) -> None:
        if self._hashed - self._flushed >= _FLUSH:
            # Starts writing to the device and does not wait (Linux, mm/fadvise.c); else a large file waits for its fsync.
            os.posix_fadvise(self._fd, self._flushed, self._hashed - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._hashed

    def finish(self) -> FileRecord:
        """Put the complete file on the device and give it its name."""
        try:
            os.fsync(self._fd)
        finally:
            self.abandon()
        self._part.replace(self.path)
        fsync_path(self.path.parent)
        return FileRecord(self.size, self._hasher.hexdigest(), XXH3_128)

    def abandon(self) -> None:
        """Close the file; what is not finished stays a part."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


# --- shards ---------------------------------------------------------------------------------------------------------------

# How the output is cut into files: the rule and the names of ``save_pretrained``.


@dataclass(frozen=True)
class Shard:
    """One output file: its header, then ``tensors`` in the order of their bytes."""

    name: str
    tensors: list[Tensor]
    header: bytes

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(t.size for t in self.tensors)


def parse_size(text: str | int) -> int:
    """Bytes from ``5GB`` (decimal, as Hugging Face counts) or a plain number. Raises UserError."""
    from huggingface_hub.serialization._base import parse_size_to_int

    size = 0
    with suppress(ValueError, OverflowError):
        size = int(text) if str(text).isdigit() else parse_size_to_int(str(text))
    if size < 1:
        raise UserError(f"{text!r} is not a size", key="--shard-size", fix="such as 5GB, 500MB or a number of bytes")
    return size


def plan_shards(tensors: Sequence[Tensor], shard_size: int) -> list[Shard]:
    """The output files of at most ``shard_size`` bytes of data; a larger tensor gets one of its own.

    In a file wide dtypes come first, as ``safetensors`` orders them: each tensor is aligned.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name, get_storage_size=lambda t: t.size, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_size
    )
    shards = []
    for name, keys in split.filename_to_tensors.items():
        group = sorted((by_name[key] for key in keys), key=lambda t: -BITS[t.dtype])
        shards.append(Shard(name, group, build_header(group)))
    return shards
