"""The arithmetic, in row blocks through buffers that are allocated once.

PEFT's default ``merge_and_unload()`` on CPU (peft 0.20): A and B are float32 (``autocast_adapter_dtype``), the update is
``(B @ A) * scaling`` in float32, and ``weight += update`` adds in float32 and rounds once to the weight's dtype.
``safe_merge=True`` rounds the update first and so differs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

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


def add_update(weight: Any, a: Any, b: Any, scaling: float, scratch: Scratch) -> None:
    """Do ``weight += (b @ a) * scaling``; ``weight`` (rows, in) of any float dtype, ``a`` (r, in), ``b`` (rows, r) float32."""
    import torch

    rows, columns = weight.shape
    update = torch.mm(b, a, out=scratch.floats("update", rows, columns)).mul_(scaling)
    if weight.dtype == torch.float32:
        weight.add_(update)
    else:
        weight.copy_(scratch.floats("sum", rows, columns).copy_(weight).add_(update))
