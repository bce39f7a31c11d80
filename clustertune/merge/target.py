"""The output folder: what else goes in beside the weights, whether there is room, and what already stands there."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from pathlib import Path
from typing import Any

from clustertune.errors import ExitCode, Problem, UserError
from clustertune.manifest import MANIFEST, Manifest, list_files, read_manifest
from clustertune.merge.base import INDEX, Base
from clustertune.merge.lora import Adapter
from clustertune.merge.stage import Journal, staging_folder
from clustertune.merge.streams import Shard

KIND = "merged"
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "*.tiktoken", "tekken.json",
)  # fmt: skip
_CHAT = ("chat_template.jinja", "chat_template.json")
_OTHER = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE*", "USE_POLICY*", "NOTICE*")


def _matching(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    return {name: folder / name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}


def companion_files(base: Base, adapter: Adapter) -> dict[str, Path]:
    """The files beside the weights, by name, from where they come; ``config.json`` last.

    The adapter's tokenizer, if it has one, and its chat template are those of the training and go before the base's.
    """
    tokenizer = _matching(adapter.folder, _TOKENIZER)
    if not {"tokenizer.json", "tokenizer.model"} & set(tokenizer):
        tokenizer = _matching(base.folder, _TOKENIZER)
    chat = _matching(adapter.folder, _CHAT) or _matching(base.folder, _CHAT)
    extra = base.folder / "additional_chat_templates"
    if extra.is_dir() and chat and next(iter(chat.values())).parent == base.folder:
        chat |= {f"{extra.name}/{p.name}": p for p in sorted(extra.glob("*.jinja"))}
    files = {**_matching(base.folder, _OTHER), **tokenizer, **chat}
    return {**files, "config.json": base.folder / "config.json"}


def index_text(base: Base, shards: list[Shard]) -> str:
    """``model.safetensors.index.json`` as ``save_pretrained`` writes it."""
    metadata: dict[str, Any] = {**base.index_metadata, "total_size": sum(t.size for s in shards for t in s.tensors)}
    weights = {t.name: shard.name for shard in shards for t in shard.tensors}
    return json.dumps({"metadata": metadata, "weight_map": weights}, indent=2, sort_keys=True) + "\n"


def output_names(shards: list[Shard], companions: dict[str, Path]) -> list[str]:
    """Every file of the output but its manifest."""
    return [*(s.name for s in shards), *([INDEX] if len(shards) > 1 else []), *companions]


def place_problems(base: Path, adapter: Path, out: Path) -> list[Problem]:
    """Whether ``out`` lies where it would destroy or swallow its inputs."""
    target = out.resolve()
    problems = []
    for what, folder in (("base", base.resolve()), ("adapter", adapter.resolve())):
        if target == folder or folder in target.parents:
            where = "is" if target == folder else "lies inside"
            problems.append(Problem(f"{where} the {what} {folder}", file=str(out), fix="give a folder of its own"))
        elif target in folder.parents:
            problems.append(Problem(f"holds the {what} {folder}", file=str(out), fix="give a folder of its own"))
    return problems


def finished_manifest(out: Path, inputs: str) -> Manifest | None:
    """The manifest of ``out`` if it is a merge of the same inputs, None if ``out`` is free or begun by us.

    Raises UserError where something else stands there; nothing is ever overwritten.
    """
    if not os.path.lexists(out):
        return None
    if not out.is_dir():
        raise UserError(Problem("exists and is no folder", file=str(out), fix="give another name"))
    if (out / MANIFEST).exists():
        manifest = read_manifest(out)
        if manifest.kind != KIND:
            raise UserError(Problem(f"holds a finished {manifest.kind}", file=str(out), fix="give another name"))
        if manifest.meta.get("inputs") != inputs:
            message = "holds a finished merge of other inputs (base, adapter or shard size)"
            raise UserError(Problem(message, file=str(out), fix="give another name, or move it away"))
        return manifest
    ours = set(Journal(staging_folder(out)).load().published)
    foreign = [name for name in list_files(out) if name not in ours]
    if foreign:
        message = f"exists, is no finished merge and holds {foreign[0]}"
        raise UserError(Problem(message, file=str(out), fix="give another name, or move it away"))
    return None


def free_bytes(out: Path) -> int:
    """Bytes that an ordinary user may still write where ``out`` will be."""
    folder = out.resolve().parent
    while not folder.exists():
        folder = folder.parent
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


def space_error(out: Path, need: int) -> UserError | None:
    """The error for too little free space, None if there is enough for ``need`` more bytes."""
    free = free_bytes(out)
    if free >= need:
        return None
    message = f"needs {need / 1e9:.3f} GB, {free / 1e9:.3f} GB are free"
    return UserError(Problem(message, file=str(out), fix="free space, then run the same command again"), ExitCode.STORAGE)


def remove_published(out: Path, journal: Journal) -> None:
    """Take back what an earlier merge of other inputs had moved into ``out`` and never finished."""
    for name in journal.published:
        (out / name).unlink(missing_ok=True)
    remove_temporary(out)
    for folder in {(out / name).parent for name in journal.published} - {out}:
        if folder.is_dir():
            folder.rmdir()


def remove_temporary(out: Path) -> None:
    """Remove what a killed :func:`~clustertune.manifest.write_durably` left."""
    for path in out.rglob(".*.tmp"):
        if re.fullmatch(r"\..+\.\d+\.tmp", path.name):
            path.unlink()
