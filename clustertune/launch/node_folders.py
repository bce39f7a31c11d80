"""The folders that a node needs before its ranks start: the caches of the libraries, and the job's own for compiled code."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from clustertune.errors import UserError, storage_error

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that name a place below the job's own folder on the node."""
_WRITTEN = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")


def make_caches(environ: Mapping[str, str] = os.environ) -> None:
    """Make the cache folders on this machine. Raises UserError for one that cannot be, or cannot be written to.

    A cache that is only read (``HF_HUB_OFFLINE=1``) need not be writable.
    """
    offline = environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    for name in _WRITTEN:
        if not (value := environ.get(name)):
            continue
        path = Path(value)
        try:
            if path.exists() and not path.is_dir():
                text = f"{os.uname().nodename}: is not a folder, {name} needs one"
                raise UserError(text, file=str(path), key=name, fix="name another one: storage.caches, or export it")
            path.mkdir(parents=True, exist_ok=True)
            if not offline:
                with tempfile.TemporaryFile(dir=path):
                    pass
        except OSError as error:
            raise storage_error(error, f"{os.uname().nodename}: cannot be used as {name}", path) from None


def own_folder(values: Mapping[str, str]) -> Path | None:
    """The job's folder on the node's disk that an environment speaks of; None where it names none."""
    cache = next((values[name] for name in CACHES if name in values), None)
    return Path(cache).parent if cache else None


def make_own_folder(values: Mapping[str, str]) -> Path | None:
    """Create the job's folder on this node, readable by its user only. Returns it; None where the environment names none.

    Everybody may write in /tmp, and compiled kernels are code: a folder that is not ours, or that others can write to, is
    refused. Raises UserError.
    """
    folder = own_folder(values)
    return None if folder is None else make_private(folder)


def make_private(folder: Path) -> Path:
    """Create a folder for compiled code that only its user can write to; returns it. Raises UserError where it is another's."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise storage_error(error, "cannot hold compiler caches", folder) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        message = "belongs to another user, or others can write to it: compiled code from there would be run"
        raise UserError(message, file=str(folder), fix="remove it, or set storage.scratch in the cluster file")
    return folder
