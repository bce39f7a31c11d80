"""The files of a checkpoint without a pickle: safetensors for each rank, hashed on its way, an index in JSON, and small
states.

torch 2.13's own ``SerializationFormat.SAFETENSORS`` is no way: it builds each file in memory, values that are not tensors
stand before its header, so that nothing opens it, and torch's reader cannot read it. The names of the files are torch's.

The small states (optimizer of a model that is not sharded, schedule, random numbers) are one safetensors file each: the
tensors, and how they are nested as JSON in its header.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from clustertune.errors import Problem, UserError
from clustertune.manifest import SHA256, XXH3_128, FileRecord, new_hasher, open_to_read, read_whole
from clustertune.tensorfile import Tensor, build_header, byte_size, read_header

INDEX = ".metadata"
PIECE = 16 << 20
"""Bytes that are hashed and written at a time; both release the interpreter's lock."""
_FORMAT = "clustertune 1"
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""safetensors' names of torch's types."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
OPTIMIZER, SCHEDULER, SCALER = "optimizer", "scheduler", "scaler"
_KEY = "clustertune.values"


@dataclass
class ByteSpan(_StorageInfo):  # type: ignore[misc]
    """Where the bytes of a value stand, ``length`` from the absolute ``offset`` of a file on; of a tensor's chunk also what."""

    dtype: torch.dtype | None = None
    shape: torch.Size | None = None


def as_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, :data:`PIECE` at a time."""
    for piece in tensor.detach().reshape(-1).view(torch.uint8).split(PIECE):
        yield memoryview(piece.cpu().numpy())


class Planner(DefaultSavePlanner):  # type: ignore[misc]
    """torch's planner, with values that are not tensors as JSON. TypeError for one that JSON does not give back."""

    def transform_object(self, write_item: Any, value: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return value
        _check(value, write_item.index.fqn)
        return io.BytesIO(json.dumps(value).encode())


def _check(value: Any, name: str) -> None:
    if isinstance(value, list | tuple):
        for one in value:
            _check(one, name)
    elif isinstance(value, dict):
        for key, one in value.items():
            _check(one if isinstance(key, str) else {str}, name)
    elif not (value is None or isinstance(value, str | int | float)):  # bool is an int
        raise TypeError(f"{name} is a {type(value).__name__}: a checkpoint keeps tensors, numbers and text")


class ShardWriter(FileSystemWriter):  # type: ignore[misc]
    """torch's writer of one rank. ``records`` holds each file that it wrote, fsynced: nothing is read again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.records: dict[str, FileRecord] = {}

    def prepare_local_plan(self, plan: Any) -> Any:
        Path(self.path).mkdir(exist_ok=True)  # torch makes parents too: a run folder that was deleted would be recreated
        return plan

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        # The widest elements first, so that each tensor is aligned; values that are not tensors are bytes.
        entries = sorted(((_describe(item, planner), item) for item in plan.items), key=lambda e: -DTYPES[e[0].dtype].itemsize)
        done: Future[list[WriteResult]] = Future()
        if not entries:  # other ranks hold all of it
            done.set_result([])
            return done
        name, names = f"{plan.storage_data.prefix}0.distcp", dict[str, int]()
        tensors = []
        for entry, _ in entries:
            names[entry.name] = again = names.get(entry.name, -1) + 1  # one rank may hold several chunks of a tensor
            tensors.append(replace(entry, name=f"{entry.name}#{again}") if again else entry)
        header = build_header(tensors)
        self.records[name] = write_new(Path(self.path, name), self._content(header, entries, planner), XXH3_128)
        results, at = [], len(header)
        for entry, item in entries:
            results.append(WriteResult(item.index, entry.size, _StorageInfo(name, at, entry.size)))
            at += entry.size
        done.set_result(results)
        return done

    def _content(self, header: bytes, entries: list[tuple[Tensor, Any]], planner: Any) -> Iterator[Any]:
        yield header
        for entry, item in entries:
            value = planner.resolve_data(item)
            if isinstance(value, io.BytesIO):
                yield value.getbuffer()
                continue
            assert value.nbytes == entry.size, f"{entry.name}: {value.nbytes} bytes, planned {entry.size}"
            yield from as_bytes(value)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        self.records[INDEX] = write_new(Path(self.path, INDEX), iter([write_index(metadata, places)]), SHA256)


def write_new(path: Path, content: Iterator[Any], algorithm: str) -> FileRecord:
    """Write a file that is not there yet, durably, hashed on its way."""
    hasher, size = new_hasher(algorithm), 0
    path.parent.mkdir(exist_ok=True)
    with path.open("xb", buffering=0) as out:
        for piece in content:
            hasher.update(piece)
            rest = memoryview(piece)
            size += rest.nbytes
            while rest:  # an unbuffered write may take only some
                rest = rest[out.write(rest) :]
        os.fsync(out.fileno())
    return FileRecord(size, hasher.hexdigest(), algorithm)


def _describe(item: Any, planner: Any) -> Tensor:
    """A value that is to be written, as an entry of the file's header."""
    name, nowhere = item.index.fqn, Path()
    if item.type == WriteItemType.BYTE_IO:
        size = planner.resolve_data(item).getbuffer().nbytes
        return Tensor(name, "U8", (size,), nowhere, 0, size)
    dtype, shape = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
    if dtype not in NAMES:
        raise TypeError(f"{name} is of {dtype}, which safetensors has no name for")
    return Tensor(name, NAMES[dtype], shape, nowhere, 0, byte_size(NAMES[dtype], shape))


def write_index(metadata: Metadata, places: dict[MetadataIndex, Any]) -> bytes:
    """The index as JSON: of each tensor dtype, size and the chunks with their files; of each other value its file."""
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            values[name] = _spot(places[MetadataIndex(name)])
            continue
        chunks = [
            [list(chunk.offsets), list(chunk.sizes), *_spot(places[MetadataIndex(name, chunk.offsets)])]
            for chunk in entry.chunks
        ]
        tensors[name] = {"dtype": NAMES[entry.properties.dtype], "size": list(entry.size), "chunks": chunks}
    paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
    body = {"format": _FORMAT, "tensors": tensors, "values": values, "paths": paths}
    return json.dumps(body, separators=(",", ":")).encode()


def _spot(span: Any) -> list[Any]:
    return [span.relative_path, span.offset, span.length]


def parse_index(data: bytes) -> Metadata:
    """The index that :func:`write_index` wrote. Raises ValueError for anything else, and for files outside of its folder."""
    try:
        body = json.loads(data)
        if body["format"] != _FORMAT:
            raise ValueError(f"its index has the format {body['format']!r}, {_FORMAT!r} is read")
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in body["values"]}
        places = {MetadataIndex(name): ByteSpan(str(file), *_counts(span)) for name, (file, *span) in body["values"].items()}
        for name, tensor in body["tensors"].items():
            dtype, chunks = DTYPES[tensor["dtype"]], []
            for offsets, sizes, file, *span in tensor["chunks"]:
                shape = torch.Size(_counts(sizes))
                chunks.append(ChunkStorageMetadata(torch.Size(_counts(offsets)), shape))
                span_ = ByteSpan(str(file), *_counts(span), dtype=dtype, shape=shape)
                if span_.length != byte_size(tensor["dtype"], shape):
                    raise ValueError(f"a chunk of {name} has {span_.length} bytes")
                places[MetadataIndex(name, chunks[-1].offsets)] = span_
            size = torch.Size(_counts(tensor["size"]))
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
        paths = {name: tuple(path) for name, path in body["paths"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not the index of a checkpoint: {type(error).__name__}: {error}") from None
    for span in places.values():
        name = span.relative_path
        if name in ("", ".", "..") or os.path.basename(name) != name:  # noqa: PTH119
            raise ValueError(f"its index names {name!r}, which is not a file of its folder")
    return Metadata(entries, planner_data=paths, storage_data=places)


def _counts(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r:.80} are not sizes")
    return values


class ShardReader(FileSystemReader):  # type: ignore[misc]
    """torch's reader of such a folder. torch's own runs what stands in its index and in values that are not tensors."""

    def __init__(self, path: Path, index: Metadata | None = None) -> None:
        """``index``: where it was read already."""
        super().__init__(path)
        self._index = index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Raises ValueError for anything but an index of ours."""
        index = self._index or parse_index(read_whole(Path(self.path, INDEX)))
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Raises OSError for a file that is cut short."""
        for item in sorted(plan.items, key=lambda item: _order(self.storage_data[item.storage_index])):
            span = self.storage_data[item.storage_index]
            with open_to_read(Path(self.path, span.relative_path)) as src:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(_read(src, span.offset, span.length)))
                    continue
                start, rows = (item.storage_offsets[0], item.lengths[0]) if span.shape else (0, 1)
                row = span.length // max(1, *span.shape[:1]) if span.shape else span.length
                data = _read(src, span.offset + start * row, rows * row)
            shape = torch.Size([rows, *span.shape[1:]]) if span.shape else span.shape
            tensor = torch.frombuffer(data, dtype=span.dtype) if data else torch.empty(0, dtype=span.dtype)
            offsets = torch.Size([0, *item.storage_offsets[1:]]) if span.shape else item.storage_offsets
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(tensor.view(shape), offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class LoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """torch's planner, with values that are not tensors as JSON."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Raises ValueError for anything but JSON."""
        loaded, name = json.load(value), read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def load(state: dict[str, Any], folder: Path, group: Any = None) -> None:
    """Fill ``state`` with what such a folder holds, however it was sharded; all ranks of ``group`` call it together.

    Raises UserError where the folder holds no such state.
    """
    try:
        dcp.load(state, storage_reader=ShardReader(folder), planner=LoadPlanner(), process_group=group)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, ValueError):
            raise
        text = f"contains no such state of a training: {' '.join(str(cause).split())[:300]}"
        fix = "find out who wrote it; resume from another checkpoint, or train again"
        raise UserError(Problem(text, file=str(folder), fix=fix)) from None


def _order(span: Any) -> tuple[str, int]:
    return span.relative_path, span.offset


def _read(src: Any, offset: int, length: int) -> bytearray:
    if offset + length > os.fstat(src.fileno()).st_size:
        raise OSError(f"{src.name} is cut short")
    data = bytearray(length)
    src.seek(offset)
    if src.readinto(data) != length:
        raise OSError(f"{src.name} is cut short")
    return data


# -- small states -----------------------------------------------------------------------------------------------------------


def random_of(rank: int, world_size: int) -> str:
    """The name of a rank's random numbers; without a number where there is one process, as transformers has it."""
    return f"rng_state_{rank}" if world_size > 1 else "rng_state"


def file_of(name: str) -> str:
    """The name of the file in a checkpoint."""
    return f"{name}.safetensors"


def save_small(folder: Path, name: str, value: Any) -> dict[str, FileRecord]:
    """Write a value, durably; returns its record. TypeError for more than tensors, arrays, numbers and text, nested."""
    return {file_of(name): write_new(folder / file_of(name), small_content(value), XXH3_128)}


def put_small(folder: Path, name: str, value: Any) -> None:
    """The same where a commit makes the file durable later: no disk is waited for."""
    (folder / file_of(name)).write_bytes(b"".join(small_content(value)))


def small_content(value: Any) -> Iterator[Any]:
    """The bytes of a value's file, piece by piece."""
    tensors: list[torch.Tensor] = []
    shape = json.dumps(_pack(value, tensors), separators=(",", ":"))
    # The widest elements first, so that each tensor is aligned.
    order = sorted(range(len(tensors)), key=lambda at: -tensors[at].element_size())
    entries = [
        Tensor(str(at), NAMES[tensors[at].dtype], tuple(tensors[at].shape), Path(), 0, tensors[at].nbytes) for at in order
    ]
    yield build_header(entries, {_KEY: shape})
    for at in order:
        yield from as_bytes(tensors[at])


def _pack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value as JSON; its tensors go to ``tensors``. A list, of a kind and what it holds, stands for any other value."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        tensors.append(torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value)
        if tensors[-1].dtype not in NAMES:
            raise TypeError(f"a tensor of {tensors[-1].dtype}, which safetensors has no name for")
        return ["array" if isinstance(value, np.ndarray) else "tensor", len(tensors) - 1]
    if isinstance(value, Mapping):
        return ["dict", [[_pack(key, tensors), _pack(one, tensors)] for key, one in value.items()]]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [_pack(one, tensors) for one in value]]
    raise TypeError(f"a {type(value).__name__}: a checkpoint keeps tensors, numbers and text")


def _unpack(body: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(body, list):
        return body
    kind, held = body
    if kind in ("tensor", "array"):
        return tensors[held] if kind == "tensor" else tensors[held].numpy()
    if kind == "dict":
        return {_unpack(key, tensors): _unpack(one, tensors) for key, one in held}
    return {"list": list, "tuple": tuple}[kind](_unpack(one, tensors) for one in held)


def load_small(folder: Path, name: str) -> Any:
    """The value that :func:`save_small` wrote, its tensors in host memory; None where there is none.

    Raises UserError for a file that contains no value.
    """
    path = folder / file_of(name)
    if not path.is_file():
        return None
    try:
        header = read_header(path)
        tensors: dict[str, torch.Tensor] = {}
        with open_to_read(path) as src:
            for entry in header.tensors:
                data, dtype = bytearray(entry.size), DTYPES[entry.dtype]
                src.seek(entry.offset)
                if src.readinto(data) != entry.size:
                    raise ValueError("it is cut short")
                flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                tensors[entry.name] = flat.view(entry.shape)
        return _unpack(json.loads(header.metadata[_KEY]), [tensors[str(at)] for at in range(len(tensors))])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        fix = "find out who wrote it; resume from another checkpoint, or train again"
        text = f"contains no state of a training: {type(error).__name__}: {error}"
        raise UserError(Problem(text, file=str(path), fix=fix)) from None
