"""Whether the storage caused an error: libraries wrap the system's error, and a rank that lost its peer fails likewise."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

ERRNOS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
}
"""What a full, read-only, failing or vanished file system answers."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers, which are written in Rust, word an OSError inside of exceptions of their own."""
NO_ROOM = 1 << 20
"""Bytes free below which a failure without a word of the system is put down to the disk."""


def storage_cause(error: BaseException) -> OSError | None:
    """The file system's own error, found in ``error`` or in what it wraps (a DCP error holds each rank's own)."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, OSError) and found.errno in ERRNOS:
            return found
        if (of_rust := _OF_RUST.search(str(found))) and int(of_rust[1]) in ERRNOS:
            return OSError(int(of_rust[1]), os.strerror(int(of_rust[1])))
        by_rank = getattr(found, "failures", None)
        waiting += [found.__cause__, found.__context__]
        waiting += [failure[0] for failure in by_rank.values()] if isinstance(by_rank, dict) else []
    return None


def free_bytes(path: Path) -> int | None:
    """Bytes free where ``path`` lies; None where that cannot be asked."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).free
    return None


def is_full(path: Path) -> bool:
    """Less than :data:`NO_ROOM` bytes are free where ``path`` lies."""
    free = free_bytes(path)
    return free is not None and free < NO_ROOM
