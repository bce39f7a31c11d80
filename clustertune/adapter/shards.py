"""Reading chosen tensors out of a checkpoint that is not trusted: hash first, restricted unpickler, no process group.

torch writes the index of a distributed checkpoint (``.metadata``) as a pickle and reads it with a plain ``pickle.load``,
which runs whatever stands in it; its shards carry no checksum that is looked at (199 of 200 single-bit flips load
without a message). :mod:`clustertune.checkpoint.restricted` reads the index, ours or torch's, and the shards are hashed
before they are read.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from clustertune.checkpoint import restricted
from clustertune.errors import Problem, UserError
from clustertune.manifest import Manifest

MODEL_FOLDER = "pytorch_model_fsdp_0"
"""Where accelerate's ``save_fsdp_model`` puts the model's shards."""
ADAPTER_FILE = "adapter_model.safetensors"
_FLOATING = {"F64", "F32", "F16", "BF16"}
INDEX = f"{MODEL_FOLDER}/.metadata"


class _IndexedReader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader over an index that has been verified and unpickled already, so that the file is not opened again."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._index

    read_data = restricted.read_data


class ShardedSource:
    """The tensors of ``pytorch_model_fsdp_0`` (torch distributed checkpoint)."""

    published = False
    """Names are those of the model in memory."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.checkpoint, self.manifest = checkpoint, manifest
        self._index = self._read_index()
        self.stored = [
            StoredTensor(key, tuple(entry.size), str(entry.properties.dtype), entry.properties.dtype.is_floating_point)
            for key, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        ]

    def _read_index(self) -> Metadata:
        """Unpickle the very bytes whose hash the manifest gives."""
        path = self.checkpoint / INDEX
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.manifest.files[INDEX].sha256:
            raise UserError(Problem("content differs from the manifest's SHA-256", file=str(path)))
        try:
            return restricted.read_index(data)
        except pickle.UnpicklingError as error:
            raise UserError(Problem(f"not the index of a torch distributed checkpoint: {error}", file=str(path))) from None

    def files_of(self, keys: Iterable[str]) -> tuple[list[str], list[Problem]]:
        """The shard files, relative to the checkpoint, that hold the given keys; and what is wrong with their places."""
        wanted, files, problems = set(keys), set(), []
        for index, info in self._index.storage_data.items():
            if index.fqn not in wanted:
                continue
            name = f"{MODEL_FOLDER}/{info.relative_path}"
            if name in self.manifest.files and not getattr(info, "transform_descriptors", None):
                files.add(name)
            else:
                message = f"{index.fqn} lies in {info.relative_path!r}, which is not a plain file of this checkpoint"
                problems.append(Problem(message, file=str(self.checkpoint / INDEX)))
        return sorted(files), problems

    def read(self, wanted: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Read the chosen tensors, in one process. The rest of the shards is not touched."""
        # NaN and not empty: a chunk that the index forgot stays NaN and is found by the check for finite values.
        tensors = {
            stored.key: torch.full(
                stored.shape, float("nan"), dtype=self._index.state_dict_metadata[stored.key].properties.dtype
            )
            for stored in wanted.values()
        }
        reader = _IndexedReader(self.checkpoint / MODEL_FOLDER, self._index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is unavailable or uninitialized, assuming single process"
            logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
            try:
                dcp.load(tensors, storage_reader=reader, no_dist=True)
            except (Exception, CheckpointException) as error:  # torch derives its own from BaseException
                message = " ".join(str(error).split())[:500]
                raise UserError(
                    Problem(f"torch cannot read the shards: {message}", file=str(self.checkpoint / MODEL_FOLDER))
                ) from None
        return {name: tensors[stored.key] for name, stored in wanted.items()}


class FileSource:
    """The tensors of safetensors files: a run without sharding saves an adapter's, or a model's as ``save_pretrained`` does."""

    published = True
    """Names of a model are those of the Hub, which transformers may join and rename as it loads them."""

    def __init__(self, checkpoint: Path, names: Iterable[str]) -> None:
        self.checkpoint = checkpoint
        self._file: dict[str, str] = {}
        self.stored = []
        for name in names:
            try:
                with safe_open(checkpoint / name, framework="pt") as src:
                    for key in src.keys():  # noqa: SIM118  (safe_open is not a mapping)
                        part = src.get_slice(key)
                        dtype = part.get_dtype()
                        self.stored.append(StoredTensor(key, tuple(part.get_shape()), dtype, dtype in _FLOATING))
                        self._file[key] = name
            except SafetensorError as error:
                raise UserError(Problem(f"no safetensors file: {error}", file=str(checkpoint / name))) from None

    def files_of(self, keys: Iterable[str]) -> tuple[list[str], list[Problem]]:
        """The files that hold the given keys."""
        return sorted({self._file[key] for key in keys}), []

    def read(self, wanted: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Read the chosen tensors."""
        found = {}
        for name, stored in wanted.items():
            with safe_open(self.checkpoint / self._file[stored.key], framework="pt") as src:
                found[name] = src.get_tensor(stored.key)
        return found


# --- stored ---------------------------------------------------------------------------------------------------------------

# What a checkpoint says about one of its tensors; every reader speaks of this.


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the checkpoint describes it, before it is read."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name, such as ``torch.float32``, or safetensors' such as ``F32``."""
    floating: bool
