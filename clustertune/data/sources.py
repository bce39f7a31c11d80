"""Where the rows come from: one file, a folder of files grouped into splits by name, or the Hub."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clustertune.config.resolved import expand_home, is_there
from clustertune.config.schema import Data
from clustertune.console import byte_progress
from clustertune.data.rejects import Place, Rejects
from clustertune.data.rows import COLUMNS, SUFFIXES, Record, is_data_file, read_file
from clustertune.errors import Problem, UserError
from clustertune.manifest import MANIFEST, hash_file, require_whole

_SPLIT_WORDS = {
    "train": r"train(?:ing|set)?",
    "eval": r"validation|valid|val|eval(?:uation|set)?|dev(?:set)?|test(?:ing|set)?",
}
_SPLIT = {split: re.compile(rf"(?:^|[^a-z])(?:{words})(?:$|[^a-z])") for split, words in _SPLIT_WORDS.items()}

_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json", MANIFEST)
"""JSON files that lie beside data and hold none: of ``datasets`` (saved or on the Hub) and our own."""


def split_of(name: str) -> str | None:
    """The split that a file or a Hub split is named after: ``train-00000-of-00002.parquet`` -> train, ``dev.jsonl`` -> eval."""
    found = [split for split, pattern in _SPLIT.items() if pattern.search(name.lower())]
    return found[0] if len(found) == 1 else None


def _is_table(path: Path) -> bool:
    return path.is_file() and is_data_file(path) and path.name not in _DESCRIPTIONS


def _readable(name: Path) -> str:
    """A file name as text that can be written: Linux allows bytes in it that are not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


class Source(Protocol):
    """Something that gives records."""

    shown: str
    """What to call it in a message."""
    root: Path | None
    """The folder that the file names of its records start from; None for the Hub."""
    warnings: list[str]

    def identity(self) -> list[Any] | None:
        """What the records depend on, for reuse: names and hashes. None where that cannot be known without reading them."""

    def has_splits(self) -> bool:
        """Whether every record has its split from the input: it needs a train split and an eval split."""

    def records(self, rejects: Rejects) -> Iterator[Record]:
        """All records, in order."""


@dataclass(frozen=True)
class InputFile:
    path: Path
    name: str
    split: str | None


class LocalFiles:
    """A file, or the data files of a folder."""

    def __init__(self, path: Path) -> None:
        self.shown = str(path)
        self.warnings: list[str] = []
        self.root: Path | None = path if path.is_dir() else path.parent
        if path.is_dir():
            self.files = self._list(path)
        elif is_data_file(path):
            self.files = [InputFile(path, _readable(Path(path.name)), None)]
        else:
            raise UserError(Problem("unknown kind of file", file=str(path), fix=f"known are {', '.join(SUFFIXES)}"))

    def _list(self, folder: Path) -> list[InputFile]:
        """Files named after a split, those of train first, in the folder or else in its ``data`` (a Hub snapshot).

        Where none is, all files of the folder are one pool.
        """
        levels = []
        for level in (folder, folder / "data"):
            paths = sorted(p for p in level.glob("[!.]*") if _is_table(p)) if level.is_dir() else []
            levels.append([InputFile(p, _readable(p.relative_to(folder)), split_of(p.name)) for p in paths])
        for files in levels:
            named = [file for file in files if file.split]
            if named:
                other = sorted({file.name for files in levels for file in files} - {file.name for file in named})
                if other:
                    self.warnings.append(f"{folder}: not read, being named after no split: {', '.join(other)}")
                return sorted(named, key=lambda file: file.split != "train")
        for files in levels:
            if files:
                return files
        raise UserError(Problem("no data file in the folder", file=str(folder), fix=f"known are {', '.join(SUFFIXES)}"))

    def identity(self) -> list[Any] | None:
        found = []
        for folder in sorted({file.path.parent for file in self.files}):
            require_whole(folder, only=[file.path.name for file in self.files if file.path.parent == folder])
        for file in self.files:
            try:
                found.append([file.name, file.split, hash_file(file.path).sha256])
            except OSError as error:
                raise UserError(Problem(f"cannot be read: {error.strerror}", file=str(file.path))) from None
        return found

    def has_splits(self) -> bool:
        return _has_splits({file.split for file in self.files}, self.shown)

    def records(self, rejects: Rejects) -> Iterator[Record]:
        before = 0
        with byte_progress() as bar:
            sizes = [file.path.stat().st_size for file in self.files]
            task = bar.add_task("reading", total=sum(sizes))
            for file, size in zip(self.files, sizes, strict=True):

                def advance(done: int, base: int = before) -> None:
                    bar.update(task, completed=base + done)

                yield from read_file(file.path, file.name, file.split, rejects, advance)
                before += size


class Hub:
    """A dataset of the Hugging Face Hub, through ``datasets`` and its cache."""

    root: Path | None = None

    def __init__(self, name: str, revision: str | None) -> None:
        self.name = name
        self.revision = revision
        self.shown = f"{name}@{revision[:12]}" if revision else name
        self.warnings: list[str] = []
        if revision is None:
            self.warnings.append(f"{name}: data.revision is not pinned, the dataset is prepared anew each time")
        self._loaded: dict[str, Any] | None = None

    def identity(self) -> list[Any] | None:
        return ["hub", self.name, self.revision] if self.revision else None

    def _splits(self) -> dict[str, Any]:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> dict[str, Any]:
        import datasets

        try:
            found = datasets.load_dataset(self._snapshot() or self.name, revision=self.revision)
        except Exception as error:  # the exceptions of the Hub's clients have no common base
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            fix = "without the network, name a local copy: data.input=PATH (a file, or a snapshot folder)"
            raise UserError(Problem(f"{self.shown} cannot be had from the Hub: {words}", key="data.name", fix=fix)) from None
        by_name = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
        named = {name: rows for name, rows in by_name.items() if split_of(name)}
        if named and (other := sorted(set(by_name) - set(named))):
            self.warnings.append(f"{self.shown}: splits that are neither train nor eval are not read: {', '.join(other)}")
        return dict(sorted((named or by_name).items(), key=lambda item: split_of(item[0]) != "train"))

    def _snapshot(self) -> str | None:
        """Without the network: the Hub's cache, which ``datasets`` 5.2 does not look into for a dataset's own files."""
        import huggingface_hub

        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            return None
        try:
            found: str = huggingface_hub.snapshot_download(
                self.name, repo_type="dataset", revision=self.revision, local_files_only=True
            )
        except (OSError, ValueError):  # not there: datasets may have prepared it before
            return None
        require_whole(Path(found))
        return found

    def has_splits(self) -> bool:
        return _has_splits({split_of(name) for name in self._splits()}, self.shown)

    def records(self, rejects: Rejects) -> Iterator[Record]:  # noqa: ARG002 - the Hub's rows are whole and typed
        for name, rows in self._splits().items():
            known = rows.select_columns([column for column in rows.column_names if column in COLUMNS])
            for number, row in enumerate(known, 1):
                yield Place(f"{self.name}/{name}", number, split_of(name), number), dict(row)


def _has_splits(splits: set[str | None], shown: str) -> bool:
    if splits == {"eval"}:
        raise UserError(Problem("holds an eval split and no train split", file=shown, fix="name the training file train*"))
    return splits == {"train", "eval"}


def find_source(data: Data, recipe_folder: Path, input_path: Path | None) -> Source:
    """What ``--input`` says, else ``data.input``, else the Hub. Raises UserError where a path does not exist."""
    if input_path is not None:
        return LocalFiles(_existing([expand_home(input_path)], "--input"))
    if data.input is not None:
        path = expand_home(data.input)
        return LocalFiles(_existing([recipe_folder / path, path], "data.input"))
    return Hub(data.name, data.revision)


def _existing(candidates: list[Path], key: str) -> Path:
    for path in candidates:
        if is_there(path):
            return path
    tried = ", ".join(dict.fromkeys(str(path.absolute()) for path in candidates))
    raise UserError(Problem(f"no such file or folder (looked for {tried})", key=key))


def digest(value: str) -> str:
    """SHA-256 (hex) of a text."""
    return hashlib.sha256(value.encode()).hexdigest()
