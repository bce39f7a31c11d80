"""The safetensors container: a strict reader of headers and a writer of the same bytes that ``safetensors`` would write.

Format: 8 bytes little-endian header length, a JSON object padded with spaces, then the tensors' bytes without holes
(https://huggingface.co/docs/safetensors#format). Own code because the library opens a file only by mapping it whole, and
mapped pages count as resident memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustertune.errors import Problem, raise_if, storage_error
from clustertune.manifest import once, open_to_read

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of one element, for every dtype of safetensors 0.8."""

FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""The types in which weights are published, by torch's names."""

MAX_HEADER = 100_000_000
"""Bytes; the limit of the reference implementation."""


@dataclass(frozen=True)
class Tensor:
    """One tensor in a file: ``size`` bytes from the absolute byte ``offset`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int


@dataclass(frozen=True)
class TensorHeader:
    """What one safetensors file holds, tensors in the order of their bytes."""

    tensors: list[Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    text: bytes = b""
    """The JSON as it stands in the file: the cheap part of a file's identity."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def byte_size(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor. Raises ValueError for an unknown dtype or a sub-byte dtype that does not fill its last byte."""
    if dtype not in BITS:
        raise ValueError(f"unknown dtype {dtype!r}")
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} of shape {list(shape)} does not fill whole bytes")
    return bits // 8


def _parse_entry(name: str, entry: object, path: Path, data_start: int) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: not an entry with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"tensor {name!r}: dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise ValueError(f"tensor {name!r}: shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise ValueError(f"tensor {name!r}: data_offsets {offsets!r}")
    begin, end = offsets
    try:
        expected = byte_size(dtype, shape)
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from None
    if end - begin != expected:
        raise ValueError(f"tensor {name!r}: {end - begin} bytes, {dtype} of shape {shape} takes {expected}")
    return Tensor(name, dtype, tuple(shape), path, data_start + begin, expected)


def read_header(path: Path) -> TensorHeader:
    """Read and check one file's header against the file's length.

    Raises ValueError with a message for whatever is not a whole safetensors file, and OSError where it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError("is not a plain file")
    with open_to_read(path) as src:
        size = os.fstat(src.fileno()).st_size
        prefix = src.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{size} bytes: too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER, size - 8):
            raise ValueError(f"the header should take {length} bytes, the file has {size}: truncated or not safetensors")
        text = src.read(length)
    if len(text) != length or not text.startswith(b"{"):
        raise ValueError("the header is not a JSON object")
    try:
        body = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the header is not JSON: {error}") from None
    metadata = body.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ is not a map of strings")
    start = 8 + length
    tensors = sorted((_parse_entry(n, e, path, start) for n, e in body.items()), key=lambda t: (t.offset, t.size))
    position = start
    for tensor in tensors:
        if tensor.offset != position:
            kind = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise ValueError(f"tensor {tensor.name!r} {kind}")
        position += tensor.size
    if position != size:
        raise ValueError(f"the header describes {position} bytes, the file has {size}: truncated or damaged")
    return TensorHeader(tensors, metadata, text)


FETCH = "fetch the file again (hf download, or clustertune stage), or take it from a whole copy"


def read_headers(paths: Iterable[Path], index: Mapping[str, str] | None = None) -> dict[Path, TensorHeader]:
    """The headers of a model's files.

    ``index``: tensor name -> file name, of the model's own index. Raises UserError with every file that is missing or damaged,
    every tensor that the index names and its file lacks, and every one that stands in two files; with exit code 73 where the
    storage fails.
    """
    headers, places, problems = dict[Path, TensorHeader](), dict[str, Path](), list[Problem]()
    for path in paths:
        try:
            headers[path] = read_header(path)
        except FileNotFoundError:
            problems.append(Problem("missing, although the index names it", file=str(path), fix=FETCH))
        except ValueError as error:
            problems.append(Problem(f"is not a whole safetensors file: {error}", file=str(path), fix=FETCH))
        except OSError as error:
            raise storage_error(error, "the model was not read", path) from None
    for path, header in headers.items():
        for tensor in header.tensors:
            if (other := places.setdefault(tensor.name, path)) != path:
                problems.append(Problem(f"is also in {other.name}", file=str(path), key=tensor.name, fix=FETCH))
    by_name = {path.name: path for path in headers}
    for name, file in (index or {}).items():
        if file in by_name and places.get(name) != by_name[file]:
            text = "is in the index, but not in the file it names"
            problems.append(Problem(text, file=str(by_name[file]), key=name, fix=FETCH))
    raise_if(problems)
    return headers


def build_header(tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a file that holds ``tensors`` one after another, as PyTorch's (``format: pt``), length included.

    ``metadata``: more words for the header.
    """
    body: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    position = 0
    for t in tensors:
        body[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [position, position + t.size]}
        position += t.size
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class CutShort(OSError):
    """A file ends before the bytes that were to be read."""


class OpenFiles:
    """Files of which any bytes are read plainly, opened once each for all threads, until :meth:`close`."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self.guard = threading.Lock()

    def descriptor(self, path: Path) -> int:
        """Of the open file. Raises OSError."""
        with self.guard:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]

    def read(self, path: Path, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset`` on. Raises OSError, :class:`CutShort` (EIO) where the file ends before."""
        descriptor, done = self.descriptor(path), 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if not count:
                raise CutShort(errno.EIO, f"the file ends at byte {offset + done}, while it was being read")
            done += count

    def close(self) -> None:
        """Close all files."""
        with self.guard:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
