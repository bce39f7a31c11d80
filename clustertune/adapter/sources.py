"""Which reader a checkpoint's files ask for: torch's shards, DeepSpeed's, or plain safetensors."""

from __future__ import annotations

import re
from pathlib import Path

from clustertune.adapter.shards import ADAPTER_FILE, INDEX, FileSource, ShardedSource
from clustertune.adapter.zero import ZeroSource, is_zero
from clustertune.errors import Problem, UserError
from clustertune.manifest import Manifest

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
    raise UserError(Problem(lacks, file=str(checkpoint), fix=fix))
