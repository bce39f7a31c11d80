"""Which reader a checkpoint's files ask for: torch's shards, DeepSpeed's, or plain safetensors."""

from __future__ import annotations

from pathlib import Path

from clustertune.adapter.shards import ADAPTER_FILE, INDEX, FileSource, ModelFiles, ShardedSource
from clustertune.adapter.zero import ZeroSource, is_zero
from clustertune.errors import Problem, UserError
from clustertune.manifest import Manifest


def open_source(checkpoint: Path, manifest: Manifest) -> ShardedSource | FileSource | ZeroSource:
    """The shards where there are any, else the adapter file. Raises UserError where the checkpoint has neither."""
    if INDEX in manifest.files:
        return ShardedSource(checkpoint, manifest)
    if is_zero(manifest):
        return ZeroSource(checkpoint, manifest)
    if ADAPTER_FILE in manifest.files:
        return FileSource(checkpoint, manifest)
    raise UserError(
        Problem(
            f"holds neither {INDEX} nor {ADAPTER_FILE}",
            file=str(checkpoint),
            fix="export a checkpoint of a LoRA run (state_dict_type SHARDED_STATE_DICT under FSDP)",
        )
    )


def open_model(checkpoint: Path, manifest: Manifest) -> ShardedSource | ModelFiles | ZeroSource:
    """The whole model's shards where there are any, else its files. Raises UserError where the checkpoint has neither."""
    if INDEX in manifest.files:
        return ShardedSource(checkpoint, manifest)
    if is_zero(manifest):
        return ZeroSource(checkpoint, manifest)
    found = ModelFiles(checkpoint, manifest)
    if not found.stored:
        fix = "export a checkpoint that this program wrote (state_dict_type SHARDED_STATE_DICT under FSDP)"
        raise UserError(Problem(f"holds neither {INDEX} nor model.safetensors", file=str(checkpoint), fix=fix))
    return found
