"""DeepSpeed's checkpoint files: written as DeepSpeed writes them, loaded only as they were saved, and never as code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from clustertune.errors import Problem, UserError
from clustertune.manifest import MANIFEST, find_problem, read_manifest
from clustertune.training.deepspeed import swapped_masters


class Hashed:
    """DeepSpeed's checkpoint files: written as DeepSpeed does, loaded only as they are in the manifest, and as data only.

    Stands in for ``deepspeed.runtime.checkpoint_engine.TorchCheckpointEngine``.
    """

    name = "clustertune"

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = optimizer

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """A folder of the checkpoint."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file. Zip form: its tensors can be mapped instead of read."""
        torch.save(state_dict, path)
        if path.endswith("_optim_states.pt") and (masters := swapped_masters(self._optimizer)):
            Path(path).with_suffix(".nvme.json").write_text(json.dumps(masters))

    def load(self, path: str, map_location: Any = None) -> Any:  # noqa: ARG002
        """Load one file whose SHA-256 is the manifest's; tensors, plain values and three of DeepSpeed's own names, no code.

        Raises UserError where the file is another than the one that was saved.
        """
        return load_verified(Path(path), own_names())

    def commit(self, info: Any) -> bool:  # noqa: ARG002
        """The store's manifest is the commit."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Rank 0 writes what all ranks hold alike."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """A save has ended when it returns."""
        return False

    def set_commit_info(self, info: Any) -> None:
        """Only decoupled engines keep it."""

    def get_commit_info(self) -> None:
        """Only decoupled engines have any."""

    def preserves_storage_sharing(self) -> bool:
        """torch.save writes a storage once."""
        return True

    def cleanup(self) -> None:
        """Nothing is left behind."""


def own_names() -> list[Any]:
    """What of DeepSpeed's own a checkpoint of it refers to."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def load_verified(path: Path, names: list[Any]) -> Any:
    """The content of a file of a checkpoint, by torch's restricted unpickler, after its hash. Raises UserError."""
    root = next((folder for folder in path.parents if (folder / MANIFEST).is_file()), None)
    if root is None:
        raise UserError(Problem("is not part of a whole checkpoint", file=str(path)))
    record = read_manifest(root, "checkpoint").files.get(path.relative_to(root).as_posix())
    if record is None:
        raise UserError(Problem("is not named by the checkpoint's manifest", file=str(path)))
    if problem := find_problem(path, record):
        raise UserError(problem)
    try:
        with safe_globals(names):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError) as error:
        words = " ".join(str(error).split())[:300]
        raise UserError(Problem(f"holds more than tensors and plain values: {words}", file=str(path))) from None
