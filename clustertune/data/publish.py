"""Putting a finished dataset into its folder so that a crash leaves the old one, the new one or none, never a mix.

New files are written in the folder under hidden names. Then the old manifest goes (now the folder contains no dataset),
each file is renamed over its old one, and the new manifest is written last. A hidden mark says meanwhile that what
stands there without a manifest is ours to replace.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustertune.errors import UserError
from clustertune.manifest import MANIFEST, fsync_path, list_files, read_manifest, record_files, seal

KIND = "dataset"
FILES = ("train.jsonl", "eval.jsonl", "rejected.jsonl")
_MARK = ".replacing.tmp"


def staged(folder: Path, name: str) -> Path:
    """The hidden path of a file that is being made (the ending that manifests ignore)."""
    return folder / f".{name}.new.tmp"


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[None]:
    """The folder, made where it is missing and :func:`locked`; one that was made and stays empty goes again."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it holds the dataset
                folder.rmdir()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time, where the file system can lock a directory (NFS cannot; the manifest's hashes then tell)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def check_folder(folder: Path) -> None:
    """Raise UserError where the folder holds something else than a dataset of ours, whole or half replaced."""
    foreign: list[str] = []
    if (folder / MANIFEST).exists():
        with contextlib.suppress(UserError):  # an unreadable manifest is a broken dataset
            kind = read_manifest(folder).kind
            foreign = [] if kind == KIND else [f"{MANIFEST} of kind {kind}"]
    elif not (folder / _MARK).exists():
        foreign = list_files(folder)
    if foreign:
        listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UserError(f"holds something else than a dataset: {listed}", file=str(folder), fix="choose another folder")


def clean(folder: Path) -> None:
    """Remove what an interrupted attempt staged."""
    for path in folder.glob(".*.new.tmp"):
        path.unlink()


def replace(folder: Path, meta: Mapping[str, Any]) -> None:
    """Publish the staged files. Raises OSError; the folder then has no manifest."""
    for name in FILES:
        fsync_path(staged(folder, name))
    (folder / _MARK).touch()
    fsync_path(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    fsync_path(folder)
    for name in FILES:
        staged(folder, name).replace(folder / name)
    seal(folder, KIND, meta, record_files(folder, FILES))
    (folder / _MARK).unlink()
