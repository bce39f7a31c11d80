"""The output folder: what else goes in beside the weights, whether there is room, and what already stands there."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from clustertune import lock
from clustertune.errors import Problem, UserError, storage_error
from clustertune.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    fsync_path,
    list_files,
    parse_record,
    read_manifest,
    write_durably,
)
from clustertune.merge.base import INDEX, Base
from clustertune.merge.lora import Adapter
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
        raise UserError(Problem("exists and is not a folder", file=str(out), fix="give another name"))
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
        message = f"exists, is not a finished merge and holds {foreign[0]}"
        raise UserError(Problem(message, file=str(out), fix="give another name, or move it away"))
    return None


def free_bytes(out: Path) -> int:
    """Bytes that an ordinary user may still write where ``out`` will be."""
    folder = out.resolve().parent
    while not folder.exists():
        folder = folder.parent
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


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


# --- stage ----------------------------------------------------------------------------------------------------------------

# The staging folder beside the output: one merge at a time, and a journal of the files that are on the device.
#
# ``.<out>.merging/`` holds finished shards under their final names, ``journal.jsonl`` and ``lock``; it never holds a
# ``config.json`` or an index, so nothing loads it by mistake.


def staging_folder(out: Path) -> Path:
    """Where the work for ``out`` lies until it is whole."""
    return out.with_name(f".{out.name}.merging")


class Journal:
    """What of an output is done: per line one event, durable before the next step begins.

    First line ``{"inputs": id}``; then ``{"shard", "size", "xxh3_128"}`` per finished shard; ``{"publish": [names]}`` once
    files begin to move into the output.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self.inputs: str | None = None
        self.shards: dict[str, FileRecord] = {}
        self.published: list[str] = []

    def load(self) -> Journal:
        """Read what is there, up to the first line that is torn or unknown."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return self
        for line in text.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                self._apply(json.loads(line))
            except (ValueError, RecursionError, KeyError, TypeError):
                break
        return self

    def _apply(self, event: dict[str, Any]) -> None:
        if "inputs" in event:
            self.inputs = str(event["inputs"])
        elif "publish" in event:
            self.published = [str(name) for name in event["publish"]]
        else:
            self.shards[str(event["shard"])] = parse_record(event)

    def rewrite(self) -> None:
        """Write all of it again, so that nothing is appended after a torn line."""
        events: list[dict[str, Any]] = [{"inputs": self.inputs}]
        events += [{"shard": name, **record.as_json()} for name, record in self.shards.items()]
        events += [{"publish": self.published}] if self.published else []
        write_durably(self.path, "".join(json.dumps(event) + "\n" for event in events))

    def add_shard(self, name: str, record: FileRecord) -> None:
        """Note a shard that is on the device. Callers from several threads serialise."""
        self.shards[name] = record
        self._append({"shard": name, **record.as_json()})

    def begin_publish(self, names: list[str]) -> None:
        """Note that files named ``names`` in the output are ours from now on."""
        self.published = names
        self._append({"publish": names})

    def _append(self, event: dict[str, Any]) -> None:
        with self.path.open("ab") as out:
            out.write(json.dumps(event).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the staging folder against other processes, also of other nodes where the filesystem's locks reach.

    Raises UserError: exit 75 where another merge holds it, 73 where the folder cannot be made.
    """
    held = lock.held(folder / "lock", "is merging into it", shown=folder, fix="wait for it, then run the same command again")
    with ExitStack() as stack:
        try:
            stack.enter_context(held)
        except OSError as error:
            raise storage_error(error, "making the staging folder", folder) from error
        yield


def clear(folder: Path, keep: set[str] | None = None) -> None:
    """Remove the files of a staging folder that are not in ``keep``; without ``keep`` the folder itself, the lock last."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name == "lock"):
        if keep is None or path.name not in {*keep, "lock"}:
            path.unlink()
    if keep is None:
        folder.rmdir()
        fsync_path(folder.parent)
