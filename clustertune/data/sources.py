"""Where the rows come from: a file, a folder of files grouped into splits by name, an object store, or the Hub."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

from clustertune.console import byte_progress
from clustertune.data.rows import (
    BATCH_ROWS,
    KINDS,
    KNOWN,
    PACKED,
    Record,
    RowLocation,
    chosen_columns,
    kind_of,
    read_file,
    table_records,
)
from clustertune.errors import UserError, storage_error
from clustertune.manifest import MANIFEST, hash_file, require_whole
from clustertune.recipe.sections import Data, DataSource, is_address
from clustertune.resolve.resolved import expand_home, is_there

_SPLIT_WORDS = {"train": r"train(?:ing|set)?", "eval": r"validation|valid|val|eval(?:uation|set)?|dev(?:set)?|test(?:ing|set)?"}
_SPLIT = {split: re.compile(rf"(?:^|[^a-z])(?:{words})(?:$|[^a-z])") for split, words in _SPLIT_WORDS.items()}

_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json", MANIFEST)
"""JSON files that lie beside data and hold none: of ``datasets`` (saved or on the Hub) and our own."""


def split_of(name: str) -> str | None:
    """The split that a file or a Hub split is named after: ``train-00000-of-00002.parquet`` -> train, ``dev.jsonl`` -> eval."""
    splits = [split for split, pattern in _SPLIT.items() if pattern.search(name.lower())]
    return splits[0] if len(splits) == 1 else None


_READABLE = f"{', '.join(KINDS)}, all but the last three also with {', '.join(PACKED)} behind"


def _readable(name: Path) -> str:
    """A file name as text that can be written: Linux allows bytes in it that are not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def wanted_columns(part: DataSource) -> frozenset[str] | None:
    """The columns that are read of a table; None: all, of prompts whose rewards read what they like."""
    return None if part.format == "prompt" else KNOWN | set((part.columns or {}).values())


@dataclass(frozen=True)
class InputFile:
    """One file of the input."""

    path: str
    """On this machine."""
    name: str
    """Below the input, as text that can be written."""
    split: str | None
    shown: str = ""
    """What to call it in a message; empty: the path."""


class LocalFiles:
    """A file, or the data files of a folder."""

    def __init__(self, path: Path, part: DataSource) -> None:
        self.shown = str(path)
        """What to call it in a message."""
        self.root: Path | None = path if path.is_dir() else path.parent
        """The folder that the file names of its records start from; None where they are not on this machine."""
        self._begin(part)
        if path.is_dir():
            folder = path / part.config if part.config else path
            if not is_there(folder):
                raise UserError("no such folder", file=str(folder), key="data.config", fix="it names a folder in the input")
            paths = sorted(p for p in folder.glob("[!.]*") if p.is_file())
            for below in ("data", *sorted(p.name for p in folder.glob("[!.]*") if p.is_dir() and split_of(p.name))):
                paths += sorted(p for p in (folder / below).glob("[!.]*") if p.is_file())
            self.files = self._chosen([(str(p), _readable(p.relative_to(folder))) for p in paths])
        else:
            self.files = self._chosen([(str(path), _readable(Path(path.name)))])

    def _begin(self, part: DataSource) -> None:
        self.warnings: list[str] = []
        self.unused: set[str] = set()
        """Columns that no format has, and that were not read."""
        self._part = part
        self._columns = wanted_columns(part)

    def _chosen(self, entries: list[tuple[str, str]]) -> list[InputFile]:
        """Files named after a split, those of train first, in the folder or else in the folders of it; where none is, the files
        of the folder are one pool. With ``data.split``, the files that it names.
        """
        files = [
            InputFile(path, name, split_of(name))
            for path, name in entries
            if kind_of(name) != ("", "") and PurePosixPath(name).name not in _DESCRIPTIONS
        ]
        if not files:
            example = f"; there is {entries[0][1]}" if entries else ""
            raise UserError(f"no file of a known kind{example}", file=self.shown, fix=f"known are {_READABLE}")
        if len(entries) == 1 and PurePosixPath(self.shown).name == files[0].name and self._part.split is None:
            return [InputFile(files[0].path, files[0].name, None)]
        if self._part.split is not None:
            return self._of_wanted_splits(files)
        levels = [[f for f in files if "/" not in f.name], [f for f in files if "/" in f.name]]
        for level in levels:
            if named := [file for file in level if file.split]:
                other = sorted({file.name for file in files} - {file.name for file in named})
                if other:
                    self.warnings.append(f"{self.shown}: not read, being named after no split: {', '.join(other)}")
                return sorted(named, key=lambda file: file.split != "train")
        return next(level for level in levels if level)

    def _of_wanted_splits(self, files: list[InputFile]) -> list[InputFile]:
        splits = wanted_splits(self._part)
        matching = [InputFile(f.path, f.name, split) for split, name in splits.items() for f in files if _is_of(f.name, name)]
        for name in splits.values():
            if not any(_is_of(file.name, name) for file in files):
                text = f"no file of the split {name}; there are {', '.join(file.name for file in files[:8])}"
                fix = "the name of a file begins with that of its split, or a folder has it; a part of a split: data.limit"
                raise UserError(text, file=self.shown, key="data.split", fix=fix)
        return matching

    def identity(self) -> list[Any] | None:
        """What the records depend on, for reuse: names and hashes. None where that cannot be known without reading them."""
        identities = []
        for folder in sorted({Path(file.path).parent for file in self.files}):
            require_whole(folder, only=[Path(file.path).name for file in self.files if Path(file.path).parent == folder])
        for file in self.files:
            try:
                identities.append([file.name, file.split, hash_file(Path(file.path)).sha256])
            except OSError as error:
                raise UserError(f"cannot be read: {error.strerror}", file=file.path) from None
        return identities

    def has_splits(self) -> bool:
        """Whether every record has its split from the input: it needs a train split and an eval split."""
        return _has_splits({file.split for file in self.files}, self.shown)

    def records(self) -> Iterator[Record]:
        """All records, in order."""
        before = 0
        with byte_progress() as bar:
            sizes = [Path(file.path).stat().st_size for file in self.files]
            task = bar.add_task("reading", total=sum(sizes))
            for file, size in zip(self.files, sizes, strict=True):

                def advance(done: int, base: int = before) -> None:
                    bar.update(task, completed=base + done)

                location = RowLocation(file.name, 1, file.split)
                opened = partial(Path(file.path).open, "rb", buffering=0)
                yield from read_file(opened, location, file.shown or file.path, self._columns, advance, self.unused)
                before += size


class RemoteFiles(LocalFiles):
    """The same in an object store, or behind a web address, through fsspec: they are fetched to this machine first.

    ``datasets`` opens such files with fsspec too. The keys are those of the storage's own tools, in the environment.
    """

    def __init__(self, address: str, part: DataSource) -> None:
        self.shown, self.root = address, None
        self._begin(part)
        self._fetched = tempfile.TemporaryDirectory(prefix="clustertune-data-")
        try:
            import fsspec

            fs, path = fsspec.core.url_to_fs(address)
            web = address.startswith(("http://", "https://"))
            if not web and fs.isdir(path):
                base = f"{path}/{part.config}" if part.config else path
                entries = [(name, name.removeprefix(base).lstrip("/")) for name in sorted(fs.find(base))]
            else:
                entries = [(name, PurePosixPath(name).name) for name in (sorted(fs.glob(path)) if "*" in path else [path])]
            self.files = []
            for number, file in enumerate(self._chosen(entries)):
                local = Path(self._fetched.name, str(number), PurePosixPath(file.name).name)
                local.parent.mkdir()
                fs.get_file(file.path, str(local))
                self.files.append(replace(file, path=str(local), shown=f"{address}: {file.name}"))
        except ImportError as error:
            fix = "install the package in the image, or fetch the files and name the folder"
            raise UserError(f"cannot be read: {error}", file=address, key="data.input", fix=fix) from None
        except UserError:
            raise
        except Exception as error:  # each storage has its own exceptions
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise storage_error(error, "cannot be fetched", self._fetched.name) from None
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            fix = "is the address right, does this machine have a network, and are the storage's keys in the environment?"
            text = f"cannot be read: {type(error).__name__}: {message}"
            raise UserError(text, file=address, key="data.input", fix=fix) from None


def wanted_splits(part: DataSource) -> dict[str | None, str]:
    """By our split (None: all are one pool), the input's name of it that the recipe asks for."""
    if not isinstance(part.split, dict):
        return {None: str(part.split)}
    return {ours if len(part.split) > 1 else None: name for ours, name in part.split.items()}


def _is_of(name: str, split: str) -> bool:
    """Whether a file is of a split, by its path: ``train_sft/rows.jsonl`` and ``data/train_sft-00000-of-00003.parquet`` are of
    the split ``train_sft``."""
    return any(re.match(rf"{re.escape(split)}(?![A-Za-z0-9_])", part) for part in name.split("/"))


def snapshot(name: str, revision: str | None = None) -> Path | None:
    """The folder of a data set in the Hub's cache on this machine, as ``hf download`` or ``stage --to`` leaves it, or None."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not there, or no name of a data set
        return None


class HubDataset:
    """A dataset of the Hugging Face Hub, through ``datasets`` and its cache; its methods are those of :class:`LocalFiles`."""

    root: Path | None = None

    def __init__(self, part: DataSource) -> None:
        self._part = part
        self.name, self.revision = part.name, part.revision
        self.shown = f"{part.name}@{part.revision[:12]}" if part.revision else part.name
        self.warnings: list[str] = []
        self.unused: set[str] = set()
        if part.revision is None:
            self.warnings.append(f"{part.name}: data.revision is not pinned, the dataset is prepared again each time")

    def identity(self) -> list[Any] | None:
        choice = [value for value in (self._part.config, self._part.split) if value]
        return ["hub", self.name, self.revision, *choice] if self.revision else None

    @cached_property
    def _splits(self) -> list[tuple[str, str | None, Any]]:
        """Name on the Hub, split of ours and rows; those of train first."""
        import datasets

        def load(**more: Any) -> Any:
            config = {"name": self._part.config} if self._part.config else {}
            return datasets.load_dataset(self._snapshot() or self.name, revision=self.revision, **config, **more)

        try:
            if self._part.split is not None:
                return [(name, split, load(split=name)) for split, name in wanted_splits(self._part).items()]
            loaded = load()
        except Exception as error:  # the exceptions of the Hub's clients have no common base
            message = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])
            key = next((f"data.{name}" for name in ("config", "split") if name in message.lower().split()), "data.name")
            fix = "without the network, name a local copy: data.input=PATH (a file, or a snapshot folder)"
            raise UserError(f"{self.shown} is not available from the Hub: {message}", key=key, fix=fix) from None
        by_name = dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
        named = {name: rows for name, rows in by_name.items() if split_of(name)}
        if named and (other := sorted(set(by_name) - set(named))):
            self.warnings.append(f"{self.shown}: splits that are neither train nor eval are not read: {', '.join(other)}")
        chosen = [(name, split_of(name), rows) for name, rows in (named or by_name).items()]
        for ours in ("train", "eval"):
            if len(several := [name for name, split, _ in chosen if split == ours]) > 1:
                self.warnings.append(f"{self.shown}: {', '.join(several)} are all read as {ours}: data.split chooses")
        return sorted(chosen, key=lambda item: item[1] != "train")

    def _snapshot(self) -> str | None:
        """Without the network: the Hub's cache, which ``datasets`` 5.2 does not look into for a dataset's own files."""
        import huggingface_hub

        folder = snapshot(self.name, self.revision) if huggingface_hub.constants.HF_HUB_OFFLINE else None
        if folder is not None:
            require_whole(folder)
        return None if folder is None else str(folder)

    def has_splits(self) -> bool:
        return _has_splits({split for _, split, _ in self._splits}, self.shown)

    def records(self) -> Iterator[Record]:
        for name, split, rows in self._splits:
            columns = chosen_columns(rows.column_names, wanted_columns(self._part), self.unused)
            tables = rows.select_columns(columns).with_format("arrow").iter(BATCH_ROWS)
            yield from table_records(tables, RowLocation(f"{self.name}/{name}", 1, split))


RecordSource = LocalFiles | HubDataset
"""Something that gives records."""


def _has_splits(splits: set[str | None], shown: str) -> bool:
    if splits == {"eval"}:
        raise UserError("holds an eval split and no train split", file=shown, fix="name the training file train*")
    return splits == {"train", "eval"}


def find_sources(data: Data, recipe_folder: Path, input_path: Path | None) -> list[tuple[DataSource, RecordSource]]:
    """What ``--input`` says, else for each part ``input``, else the Hub. Raises UserError where a path does not exist."""
    if input_path is None:
        return [(part, _find(part, recipe_folder, key)) for key, part in data.keyed_parts()]
    if data.sources:
        fix = "override data.sources with one source, or leave --input out"
        raise UserError("names one input, the recipe mixes several", file=str(input_path), key="--input", fix=fix)
    return [(data, LocalFiles(_existing([expand_home(input_path)], "--input"), data))]


def _find(part: DataSource, recipe_folder: Path, key: str) -> RecordSource:
    if part.input is None:
        return HubDataset(part)
    if is_address(part.input):
        return RemoteFiles(part.input, part)
    path = expand_home(part.input)
    return LocalFiles(_existing([recipe_folder / path, path], f"{key}.input"), part)


def _existing(candidates: list[Path], key: str) -> Path:
    for path in candidates:
        if is_there(path):
            if not (path.is_file() or path.is_dir()):
                fix = "write the rows to a file first: they are read twice, once for their digest"
                text = "is neither a file nor a folder but a pipe, a socket or a device"
                raise UserError(text, file=str(path), key=key, fix=fix)
            return path
    tried = ", ".join(dict.fromkeys(str(path.absolute()) for path in candidates))
    raise UserError(f"no such file or folder (looked for {tried})", key=key)
