"""torch's distributed checkpoints read as data: tensors and plain values, never code.

What is written today contains no pickle (:mod:`clustertune.checkpoint.shards`, ``values``); checkpoints of earlier releases do.
torch 2.13 writes the index (``.metadata``) and every value that is not a tensor as pickles, and runs what stands in them when
it loads: ``FileSystemReader.read_metadata`` is a ``pickle.load``, ``DefaultLoadPlanner.load_bytes`` a ``torch.load`` with
``weights_only=False``. Who can write to a checkpoint can rewrite its manifest, so digests do not protect.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from clustertune.checkpoint import shards
from clustertune.errors import Problem, UserError

_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = frozenset(
    [("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES]
    + [("torch.distributed.checkpoint.filesystem", "_StorageInfo")]
    + [("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")]
    + [("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")]
    + [("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
)
"""Everything that a real index refers to; no entry can read, write or run anything."""


class IndexUnpickler(pickle.Unpickler):
    """Resolves only the classes of torch's own checkpoint index."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 defines the paths
            module = "pathlib"
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint index needs")
        return super().find_class(module, name)


def _member(owner: Any, name: Any) -> Any:
    """A member of an enumeration, which Python 3.11.2 (Debian 12) writes as ``getattr(CLASS, NAME)``. Nothing else is read."""
    if not isinstance(owner, EnumMeta) or name not in owner.__members__:
        raise pickle.UnpicklingError("it refers to builtins.getattr, of more than an enumeration, which no index needs")
    return owner.__members__[name]


def read_index(data: bytes) -> Metadata:
    """The index in a ``.metadata``, JSON or pickle. Raises ``pickle.UnpicklingError`` where it holds anything else."""
    try:
        index = shards.parse_index(data) if data.startswith(b"{") else IndexUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # unpickling hostile bytes raises nearly every exception there is
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise pickle.UnpicklingError("it contains no index")
    for span in index.storage_data.values():
        name = getattr(span, "relative_path", None)
        if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name:  # noqa: PTH119
            raise pickle.UnpicklingError(f"it names {name!r}, which is not a file of its folder")
    return index


def install() -> None:
    """Have torch read every distributed checkpoint of this process so, also where accelerate asks it to."""
    FileSystemReader.read_metadata = _read_metadata
    FileSystemReader.read_data = read_data
    DefaultLoadPlanner.load_bytes = _load_bytes


def check(checkpoint: Path) -> None:
    """Raise ``pickle.UnpicklingError`` where an index of a checkpoint is none: torch would hide the reason in a traceback."""
    for file in sorted(checkpoint.glob("*/.metadata")):
        read_index(file.read_bytes())


def _read_metadata(reader: Any, *_args: Any, **kwargs: Any) -> Metadata:
    """Replaces :meth:`FileSystemReader.read_metadata`."""
    index = read_index(Path(reader._get_metadata_path(kwargs.get("rank"))).read_bytes())
    if getattr(index, "storage_meta", None) is None:
        index.storage_meta = StorageMeta()
    index.storage_meta.load_id = reader.load_id
    return index


_read_pickles = FileSystemReader.read_data


def read_data(reader: Any, plan: Any, planner: Any) -> Any:
    """Replaces :meth:`FileSystemReader.read_data`."""
    plain = all(isinstance(reader.storage_data[item.storage_index], shards.ByteSpan) for item in plan.items)
    return (shards.read_data if plain else _read_pickles)(reader, plan, planner)


def _load_bytes(planner: Any, read_item: Any, value: io.BytesIO) -> None:
    """Replaces :meth:`DefaultLoadPlanner.load_bytes`."""
    old, name = value.getvalue().startswith(b"PK"), read_item.dest_index.fqn  # torch.save's container, and no JSON
    found = torch.load(value, weights_only=True) if old else json.load(value)
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], found)
    else:
        planner.state_dict[name] = found


@contextmanager
def reading(checkpoint: str | Path) -> Iterator[None]:
    """Raise UserError where a load inside met a pickle of more than tensors and plain values."""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        causes = [failure[0] for failure in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        refused = next((cause for cause in causes if isinstance(cause, pickle.UnpicklingError)), None)
        if refused is None:
            raise
        message = " ".join(str(refused).split())
        message = message if message.startswith("it ") else "its values are more than tensors and plain values"
        text = f"is not read, a pickle in it could run code: {message[:300]}"
        fix = "find out who wrote it; resume from another checkpoint, or train again"
        raise UserError(Problem(text, file=str(checkpoint), fix=fix)) from None
