"""Reading chosen tensors out of a checkpoint that is not trusted: hash first, no pickle of torch's, no process group.

The shards carry no checksum that torch looks at (199 of 200 single-bit flips load without a message): they are hashed before
they are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.serialization import safe_globals

from clustertune.checkpoint.shards import ShardReader, parse_index
from clustertune.errors import Problem, UserError
from clustertune.manifest import Manifest, find_problem, read_whole
from clustertune.recipe.deepspeed_file import ALIGNMENT
from clustertune.tensorfile import read_header

MODEL_FOLDER = "pytorch_model_fsdp_0"
"""Where accelerate's ``save_fsdp_model`` puts the model's shards."""
ADAPTER_FILE = "adapter_model.safetensors"
_FLOATING = {"F64", "F32", "F16", "BF16"}
INDEX = f"{MODEL_FOLDER}/.metadata"


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
        """Parse the very bytes whose hash the manifest gives."""
        path = self.checkpoint / INDEX
        data = read_whole(path)
        if hashlib.sha256(data).hexdigest() != self.manifest.files[INDEX].sha256:
            raise UserError("content differs from the manifest's SHA-256", file=str(path))
        try:
            return parse_index(data)
        except ValueError as error:
            raise UserError(f"not the index of a checkpoint: {error}", file=str(path)) from None

    def files_of(self, keys: Iterable[str]) -> tuple[list[str], list[Problem]]:
        """The shard files, relative to the checkpoint, that hold the given keys; and what is wrong with their places."""
        chosen, files, problems = set(keys), set(), []
        for index, info in self._index.storage_data.items():
            if index.fqn not in chosen:
                continue
            name = f"{MODEL_FOLDER}/{info.relative_path}"
            if name in self.manifest.files:
                files.add(name)
            else:
                message = f"{index.fqn} lies in {info.relative_path!r}, which is not a plain file of this checkpoint"
                problems.append(Problem(message, file=str(self.checkpoint / INDEX)))
        return sorted(files), problems

    def read(self, entries: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Read the chosen tensors, in one process. The rest of the shards is not touched."""
        # NaN and not empty: a chunk that the index forgot stays NaN and is found by the check for finite values.
        tensors = {
            stored.key: torch.full(
                stored.shape, float("nan"), dtype=self._index.state_dict_metadata[stored.key].properties.dtype
            )
            for stored in entries.values()
        }
        reader = ShardReader(self.checkpoint / MODEL_FOLDER, self._index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is unavailable or uninitialized, assuming single process"
            logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
            try:
                dcp.load(tensors, storage_reader=reader, no_dist=True)
            except (Exception, CheckpointException) as error:  # torch derives its own from BaseException
                message = " ".join(str(error).split())[:500]
                raise UserError(f"torch cannot read the shards: {message}", file=str(self.checkpoint / MODEL_FOLDER)) from None
        return {name: tensors[stored.key] for name, stored in entries.items()}


class FileSource:
    """The tensors of safetensors files: a run without sharding saves an adapter's, or a model's as ``save_pretrained`` does."""

    published = True
    """Names of a model are those of the Hub, which transformers may join and rename as it loads them."""

    def __init__(self, checkpoint: Path, names: Iterable[str]) -> None:
        self.checkpoint = checkpoint
        self._file: dict[str, str] = {}
        self.stored: list[StoredTensor] = []
        for name in names:
            try:
                tensors = read_header(checkpoint / name).tensors
            except ValueError as error:
                raise UserError(f"no safetensors file: {error}", file=str(checkpoint / name)) from None
            self.stored += [StoredTensor(t.name, t.shape, t.dtype, t.dtype in _FLOATING) for t in tensors]
            self._file |= {tensor.name: name for tensor in tensors}

    def files_of(self, keys: Iterable[str]) -> tuple[list[str], list[Problem]]:
        """The files that hold the given keys."""
        return sorted({self._file[key] for key in keys}), []

    def read(self, entries: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Read the chosen tensors."""
        tensors = {}
        for name, stored in entries.items():
            with safe_open(self.checkpoint / self._file[stored.key], framework="pt") as src:
                tensors[name] = src.get_tensor(stored.key)
        return tensors


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


# --- zero ------------------------------------------------------------------------------------------------------------------

# Trained tensors out of DeepSpeed's checkpoint files, without DeepSpeed: hash first, no code, only the pages asked for.
#
# The float32 masters lie flat, one file for each rank (``*_optim_states.pt``); their names and shapes lie in rank 0's
# ``*_model_states.pt``, in the order of the flat groups. Stages 1 and 2 cut a group into one piece for each rank, stage 3 cuts
# each parameter into equal pieces, the last one padded (deepspeed/utils/zero_to_fp32.py, 0.19.8). Files are mapped, not read.


_STATES = re.compile(r"(global_step\d+)/(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(global_step\d+)/(?:zero_pp_rank_0_)?mp_rank_00_model_states\.pt")
_PREFIX = "model."
"""What a torch distributed checkpoint puts before each name, and readers of both take off."""


class _Opaque:
    """Stands for an object of DeepSpeed's that nothing here needs."""

    def __init__(self, *_args: Any) -> None:
        pass


_NAMES: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Opaque, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Opaque, "deepspeed.utils.tensor_fragment.fragment_address"),
]
"""All that DeepSpeed's files refer to beside tensors and plain values, each by what takes its place."""


def is_zero(manifest: Manifest) -> bool:
    """Whether a checkpoint was written by DeepSpeed."""
    return any(_MODEL.fullmatch(name) for name in manifest.files)


class ZeroSource:
    """The trained tensors of a DeepSpeed checkpoint, stages 0 to 3."""

    published = False
    """Names are the model's own, not those of a published file."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.checkpoint, self.manifest = checkpoint, manifest
        files = {int(m[2]): name for name in manifest.files if (m := _STATES.fullmatch(name))}
        self._states = [files[rank] for rank in sorted(files)]
        self._model_file = next(name for name in manifest.files if _MODEL.fullmatch(name))
        self._verify(self._model_file)
        self._model = self._load(self._model_file)
        self._groups: list[list[torch.Tensor]] | None = None
        self._places: dict[str, tuple[int, int]] = {}
        """A tensor's group, and its first element in it (stage 3: in each rank's piece of the group)."""
        self._stage = 0
        self.stored: list[StoredTensor] = []
        if self._states:
            self._look(files)
        else:
            self._full_state = {f"{_PREFIX}{name}": tensor for name, tensor in self._model["module"].items()}
            entries = ((key, tuple(t.shape), t.dtype) for key, t in self._full_state.items())
            self.stored = [StoredTensor(key, shape, str(dtype), dtype.is_floating_point) for key, shape, dtype in entries]

    def _look(self, files: Mapping[int, str]) -> None:
        """Names, shapes and places of all tensors, and what does not fit."""
        if sorted(files) != list(range(int(self._model.get("dp_world_size", -1)))):
            text = f"parts of ranks {sorted(files)}, saved by {self._model.get('dp_world_size')}"
            raise UserError(text, file=str(self.checkpoint))
        self._stage = 3 if "zero_pp_rank_0" in self._model_file else 2
        for number, shapes in enumerate(self._model["param_shapes"]):
            start = 0
            for name, shape in shapes.items():
                size = math.prod(shape)
                self._places[f"{_PREFIX}{name}"] = number, start
                self.stored.append(StoredTensor(f"{_PREFIX}{name}", tuple(shape), "torch.float32", floating=True))
                start += -(-size // len(self._states)) if self._stage == 3 else size

    def _verify(self, name: str) -> None:
        if problem := find_problem(self.checkpoint / name, self.manifest.files[name]):
            raise UserError(problem)

    def _load(self, name: str) -> dict[str, Any]:
        """A file's values, its tensors mapped. Only after its hash was compared."""
        try:
            with safe_globals(_NAMES):
                return dict(torch.load(self.checkpoint / name, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:  # unpickling hostile bytes raises nearly every exception there is
            message = " ".join(str(error).split())[:300]
            raise UserError(f"no file of a DeepSpeed checkpoint: {message}", file=str(self.checkpoint / name)) from None

    def files_of(self, keys: Iterable[str]) -> tuple[list[str], list[Problem]]:
        """The files that hold the given keys: every rank has a piece of nearly all. The model's was verified when opened."""
        return [*self._states, *self._swapped()] if any(key in self._places for key in keys) else [], []

    def _swapped(self) -> list[str]:
        """What was saved of the disks that state was offloaded to: the masters of some groups may lie there alone."""
        notes = [name.removesuffix(".pt") + ".nvme.json" for name in self._states]
        if not any(name in self.manifest.files for name in notes):
            return []
        return [name for name in self.manifest.files if name in notes or "/offloaded_tensors/" in name]

    def read(self, entries: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Read the chosen tensors, by the names that the caller gives them. Only after their files' hashes were compared."""
        if not self._states:
            return {name: self._full_state[entry.key].clone() for name, entry in entries.items()}
        if self._groups is None:
            self._groups = [self._flat(name) for name in self._states]
            self._check_sizes()
        return {name: self._gather(entry.key, entry.shape) for name, entry in entries.items()}

    def _flat(self, name: str) -> list[torch.Tensor]:
        state = self._load(name).get("optimizer_state_dict")
        state = state if isinstance(state, dict) else {}
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        groups = state.get(key)
        if not isinstance(groups, list) or len(groups) != len(self._model["param_shapes"]):
            raise UserError(f"contains no {key} of this model", file=str(self.checkpoint / name))
        paddings = state.get("param_alignment_paddings")
        if self._stage != 3 and paddings and any(any(group) for group in paddings):
            raise UserError(f"{ALIGNMENT} was on: not read here", file=str(self.checkpoint / name))
        flat = [group.detach().reshape(-1) for group in groups]
        note = name.removesuffix(".pt") + ".nvme.json"
        for number, file in (self._note(note) if note in self.manifest.files else {}).items():
            flat[int(number)] = self._from_disk(int(number), f"{Path(name).parent}/offloaded_tensors/{_folder(name)}/{file}")
        return flat

    def _note(self, name: str) -> dict[str, str]:
        files: dict[str, str] = json.loads(read_whole(self.checkpoint / name))
        return files

    def _from_disk(self, number: int, name: str) -> torch.Tensor:
        """A group's masters as they lay on NVMe: float32, end to end, then what fills the last block."""
        need = sum(-(-math.prod(shape) // len(self._states)) for shape in self._model["param_shapes"][number].values())
        record = self.manifest.files.get(name)
        if record is None or record.size < 4 * need:
            raise UserError(f"missing or shorter than {4 * need:,} bytes", file=str(self.checkpoint / name))
        return torch.from_file(str(self.checkpoint / name), shared=False, size=need, dtype=torch.float32)

    def _check_sizes(self) -> None:
        """Every group is as long as its parameters need; stages 1 and 2 may have padded their last piece."""
        assert self._groups is not None
        for number, shapes in enumerate(self._model["param_shapes"]):
            ranks = len(self._states)
            held = sum(groups[number].numel() for groups in self._groups)
            if self._stage == 3:
                need = ranks * sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
                fits = held == need
            else:
                need = sum(math.prod(shape) for shape in shapes.values())
                fits = need <= held
            if not fits:
                text = f"group {number} has {held:,} elements, its parameters have {need:,}"
                raise UserError(text, file=str(self.checkpoint))

    def _gather(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        (number, start), size = self._places[key], math.prod(shape)
        assert self._groups is not None
        pieces = [groups[number] for groups in self._groups]
        if self._stage == 3:
            each = -(-size // len(pieces))
            flat = torch.cat([piece[start : start + each] for piece in pieces])[:size]
        else:
            flat = torch.cat(list(_cut(pieces, start, size)))
        return flat.reshape(shape).clone()


def _folder(states: str) -> str:
    """DeepSpeed's name for the swap files of the rank that wrote a file (runtime/engine.py, save_checkpoint)."""
    match = _STATES.fullmatch(states)
    assert match is not None
    return f"rank{int(match[2]):02d}"


def _cut(pieces: list[torch.Tensor], start: int, size: int) -> Iterator[torch.Tensor]:
    """The parts of ``pieces``, laid end to end, that hold ``size`` elements from ``start``."""
    for piece in pieces:
        if start < piece.numel() and size > 0:
            part = piece[start : start + size]
            yield part
            size -= part.numel()
        start = max(0, start - piece.numel())


# --- sources ---------------------------------------------------------------------------------------------------------------

# Which reader a checkpoint's files ask for: torch's shards, DeepSpeed's, or plain safetensors.


Source = ShardedSource | FileSource | ZeroSource


def open_source(checkpoint: Path, manifest: Manifest, *, whole: bool = False) -> Source:
    """The shards where there are any, else the adapter's file, or with ``whole`` the model's.

    Raises UserError where the checkpoint has neither.
    """
    if INDEX in manifest.files:
        return ShardedSource(checkpoint, manifest)
    if is_zero(manifest):
        return ZeroSource(checkpoint, manifest)
    pattern = r"model(-\d+-of-\d+)?\.safetensors" if whole else re.escape(ADAPTER_FILE)
    if names := [name for name in sorted(manifest.files) if re.fullmatch(pattern, name)]:
        return FileSource(checkpoint, names)
    run = "that this program wrote" if whole else "of a LoRA run"
    fix = f"export a checkpoint {run} (state_dict_type SHARDED_STATE_DICT under FSDP)"
    lacks = f"holds neither {INDEX} nor {'model.safetensors' if whole else ADAPTER_FILE}"
    raise UserError(lacks, file=str(checkpoint), fix=fix)
