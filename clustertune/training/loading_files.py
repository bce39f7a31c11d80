"""Rows of tensors out of safetensors files, by plain reads: only the bytes that are asked for, none of them mapped.

A mapped file counts as resident memory of whoever touches it, and over NFS or FUSE each page is a request of its own.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from clustertune.errors import Problem, UserError, storage_error
from clustertune.tensorfile import Tensor, read_header

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""safetensors' names of the dtypes that a base model's weights have."""

FETCH = "fetch the file again (hf download, or clustertune stage), or take it from a whole copy"


def survey(paths: Iterable[Path], index: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Every tensor of the files, by name, from their headers alone.

    ``index``: tensor name -> file name, of the checkpoint's own index. Raises UserError with every file that is not whole,
    every tensor that the index names and its file lacks, and every one that stands in two files.
    """
    found: dict[str, Tensor] = {}
    problems = []
    whole = set()
    for path in paths:
        try:
            tensors = read_header(path).tensors
        except ValueError as error:
            problems.append(Problem(f"is not a whole safetensors file: {error}", file=str(path), fix=FETCH))
            continue
        except OSError as error:
            raise storage_error(error, "the base model was not read", path) from None
        whole.add(path.name)
        for tensor in tensors:
            if tensor.name in found:
                other = found[tensor.name].file.name
                problems.append(Problem(f"stands in {other} too", file=str(path), key=tensor.name, fix=FETCH))
            elif tensor.dtype not in DTYPES:
                problems.append(Problem(f"has the dtype {tensor.dtype}", file=str(path), key=tensor.name, fix="another copy"))
            found.setdefault(tensor.name, tensor)
    for name, file in (index or {}).items():
        if name not in found and file in whole:
            folder = next(path for path in paths if path.name == file)
            problems.append(Problem("the index names it, the file does not hold it", file=str(folder), key=name, fix=FETCH))
    if problems:
        raise UserError(problems)
    return found


class RowReader:
    """Reads rows and counts bytes; files stay open until :meth:`close`. May be used by several threads."""

    def __init__(self) -> None:
        self.bytes = 0
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def rows(self, tensor: Tensor, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows ``begin`` to ``end`` of the first dimension (all of them by default), in the file's dtype, on the CPU.

        Raises UserError where the file ends early or cannot be read.
        """
        count = tensor.shape[0] if tensor.shape else 1
        end = count if end is None else end
        row = tensor.size // count if count else 0
        raw = torch.empty(max(end - begin, 0) * row, dtype=torch.uint8)
        if raw.numel():
            self._fill(raw, tensor, begin * row)
        shape = (max(end - begin, 0), *tensor.shape[1:]) if tensor.shape else ()
        return raw.view(DTYPES[tensor.dtype]).reshape(shape)

    def flat(self, tensor: Tensor, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin`` to ``end``, counted through all dimensions; otherwise as :meth:`rows`."""
        count = math.prod(tensor.shape)
        each = tensor.size // count if count else 0
        raw = torch.empty(max(end - begin, 0) * each, dtype=torch.uint8)
        if raw.numel():
            self._fill(raw, tensor, begin * each)
        return raw.view(DTYPES[tensor.dtype])

    def _fill(self, raw: torch.Tensor, tensor: Tensor, skip: int) -> None:
        done, size = 0, raw.numel()
        # Not through numpy: torch never resizes the storage of a tensor that numpy has seen, and FSDP frees by resizing.
        view = memoryview((ctypes.c_ubyte * size).from_address(raw.data_ptr())).cast("B")
        try:
            descriptor = self._descriptor(tensor.file)
            while done < size:
                count = os.preadv(descriptor, [view[done:]], tensor.offset + skip + done)
                if not count:
                    problem = Problem(
                        "the file ends before this tensor: it was cut since its header was read",
                        file=str(tensor.file),
                        key=tensor.name,
                        fix=FETCH,
                    )
                    raise UserError(problem)
                done += count
        except OSError as error:
            raise storage_error(error, "the base model was not read", tensor.file) from None
        with self._lock:
            self.bytes += size

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._open[path]

    def close(self) -> None:
        """Close the files; the count stays."""
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()
