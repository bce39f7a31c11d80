"""How the output is cut into files: the rule and the names of ``save_pretrained``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clustertune.errors import Problem, UserError
from clustertune.tensorfile import BITS, Tensor, build_header

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


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
    """Bytes from ``5GB`` (decimal, as Hugging Face counts), ``512MiB`` (binary) or a plain number. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", str(text).upper())
    unit = (match[2] or "") if match else ""
    size = int(float(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size < 1:
        raise UserError(Problem(f"{text!r} is no size", key="--shard-size", fix="such as 5GB, 500MB or a number of bytes"))
    return size


def split(tensors: Sequence[Tensor], shard_size: int) -> list[list[Tensor]]:
    """Group tensors, in order, into shards of at most ``shard_size`` bytes of data; a larger tensor gets one of its own.

    The rule of ``huggingface_hub.split_torch_state_dict_into_shards``, its order included: a tensor that is too large is
    put before the shard that is being filled.
    """
    groups: list[list[Tensor]] = []
    current: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if tensor.size > shard_size:
            groups.append([tensor])
            continue
        if filled + tensor.size > shard_size:
            groups.append(current)
            current, filled = [], 0
        current.append(tensor)
        filled += tensor.size
    if current:
        groups.append(current)
    return groups


def plan_shards(tensors: Sequence[Tensor], shard_size: int) -> list[Shard]:
    """The output files. In a file wide dtypes come first, as ``safetensors`` orders them: each tensor is aligned."""
    groups = [sorted(group, key=lambda t: -BITS[t.dtype]) for group in split(tensors, shard_size)]
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0], build_header(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group, build_header(group))
        for number, group in enumerate(groups, 1)
    ]
