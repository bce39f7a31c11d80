"""Folders of a simulation below the system's temporary one: none outlives it, and what a killed one left goes with the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "clustertune-simulate-"
folders: set[Path] = set()
"""Those of this process."""
_YOUNG_SECONDS = 60.0
"""Between its making and its lock a folder is nobody's."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is locked while the context lasts, and then removed."""
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            folders.add(Path(name))
            yield Path(name)
        finally:
            folders.discard(Path(name))
            os.close(fd)


def _remove_left() -> None:
    """Remove the user's own folders whose process was killed: nobody holds their lock."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            at = path.lstat()
            if not stat.S_ISDIR(at.st_mode) or at.st_uid != os.geteuid() or time.time() - at.st_mtime < _YOUNG_SECONDS:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
