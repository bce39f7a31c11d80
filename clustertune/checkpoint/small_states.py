"""The small states of a checkpoint (optimizer of a model that is not sharded, schedule, random numbers) without a pickle.

One safetensors file each: the tensors, and how they are nested as JSON in its header.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clustertune.checkpoint.shards import DTYPES, NAMES, as_bytes, write_new
from clustertune.errors import Problem, UserError
from clustertune.manifest import XXH3_128, FileRecord
from clustertune.tensorfile import Tensor, build_header, read_header

OPTIMIZER, SCHEDULER, SCALER = "optimizer", "scheduler", "scaler"
_KEY = "clustertune.values"


def random_of(rank: int, world_size: int) -> str:
    """The name of a rank's random numbers; without a number where there is one process, as transformers has it."""
    return f"rng_state_{rank}" if world_size > 1 else "rng_state"


def file_of(name: str) -> str:
    """The name of the file in a checkpoint."""
    return f"{name}.safetensors"


def save(folder: Path, name: str, value: Any) -> dict[str, FileRecord]:
    """Write a value, durably; returns its record. TypeError for more than tensors, arrays, numbers and text, nested."""
    return {file_of(name): write_new(folder / file_of(name), content(value), XXH3_128)}


def put(folder: Path, name: str, value: Any) -> None:
    """The same where a commit makes the file durable later: no disk is waited for."""
    (folder / file_of(name)).write_bytes(b"".join(content(value)))


def content(value: Any) -> Iterator[Any]:
    """The bytes of a value's file, piece by piece."""
    found: list[torch.Tensor] = []
    shape = json.dumps(_pack(value, found), separators=(",", ":"))
    # The widest elements first, so that each tensor is aligned.
    order = sorted(range(len(found)), key=lambda at: -found[at].element_size())
    entries = [Tensor(str(at), NAMES[found[at].dtype], tuple(found[at].shape), Path(), 0, found[at].nbytes) for at in order]
    yield build_header(entries, {_KEY: shape})
    for at in order:
        yield from as_bytes(found[at])


def _pack(value: Any, found: list[torch.Tensor]) -> Any:
    """A value as JSON; its tensors go to ``found``. A list, of a kind and what it holds, stands for any other value."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        found.append(torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value)
        if found[-1].dtype not in NAMES:
            raise TypeError(f"a tensor of {found[-1].dtype}, which safetensors has no name for")
        return ["array" if isinstance(value, np.ndarray) else "tensor", len(found) - 1]
    if isinstance(value, Mapping):
        return ["dict", [[_pack(key, found), _pack(one, found)] for key, one in value.items()]]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [_pack(one, found) for one in value]]
    raise TypeError(f"a {type(value).__name__}: a checkpoint keeps tensors, numbers and text")


def _unpack(body: Any, found: list[torch.Tensor]) -> Any:
    if not isinstance(body, list):
        return body
    kind, held = body
    if kind in ("tensor", "array"):
        return found[held] if kind == "tensor" else found[held].numpy()
    if kind == "dict":
        return {_unpack(key, found): _unpack(one, found) for key, one in held}
    return {"list": list, "tuple": tuple}[kind](_unpack(one, found) for one in held)


def load(folder: Path, name: str) -> Any:
    """The value that :func:`save` wrote, its tensors in host memory; None where there is none.

    Raises UserError for a file that contains no value.
    """
    path = folder / file_of(name)
    if not path.is_file():
        return None
    try:
        header = read_header(path)
        found: dict[str, torch.Tensor] = {}
        with path.open("rb") as src:
            for entry in header.tensors:
                data, dtype = bytearray(entry.size), DTYPES[entry.dtype]
                src.seek(entry.offset)
                if src.readinto(data) != entry.size:
                    raise ValueError("it is cut short")
                flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                found[entry.name] = flat.view(entry.shape)
        return _unpack(json.loads(header.metadata[_KEY]), [found[str(at)] for at in range(len(found))])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        fix = "find out who wrote it; resume from another checkpoint, or train again"
        text = f"contains no state of a training: {type(error).__name__}: {error}"
        raise UserError(Problem(text, file=str(path), fix=fix)) from None
