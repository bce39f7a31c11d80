"""Errors that a user can cause: the problem, where it is, what to do, and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """The exit codes that launchers act on (sysexits.h where it has a word for it)."""

    OK = 0
    FAILED = 1
    """A bug or an unforeseen fault: restart by hand after a look."""
    CONFIG = 2
    """Usage, recipe, data or checkpoint is wrong: a restart changes nothing."""
    STORAGE = 73
    """No space, or not writable: free space, then run the same command again."""
    AGAIN = 75
    """Interrupted: requeue, the same command continues."""
    STOP = 93
    """Do not restart: the loss is not finite or there is no progress."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in the terms of the person who must fix it."""

    message: str
    """What is wrong, with the value found."""
    file: str | None = None
    """The file (or command-line argument) it stands in; with a line as ``file:line`` where there is one."""
    key: str | None = None
    """The key path in that file, such as ``train.learning_rate``."""
    fix: str | None = None
    """What to do."""

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.key) if part)
        text = f"{where}: {self.message}" if where else self.message
        return f"{text} -> {self.fix}" if self.fix else text


class UserError(Exception):
    """Everything that is wrong with what the user gave, at once. The command line prints it without a traceback."""

    def __init__(
        self,
        problems: Problem | str | Iterable[Problem],
        code: ExitCode = ExitCode.CONFIG,
        *,
        file: str | None = None,
        key: str | None = None,
        fix: str | None = None,
    ) -> None:
        """``problems``: one or more, or the message of a single one, to which ``file``, ``key`` and ``fix`` belong."""
        if isinstance(problems, str):
            problems = Problem(problems, file, key, fix)
        self.problems: list[Problem] = [problems] if isinstance(problems, Problem) else list(problems)
        self.code = code
        super().__init__("\n".join(str(p) for p in self.problems))

    def as_dict(self) -> dict[str, object]:
        """The ``--json`` form."""
        return {"exit_code": int(self.code), "problems": [asdict(p) for p in self.problems]}


def raise_if(problems: Iterable[Problem], code: ExitCode = ExitCode.CONFIG) -> None:
    """Raise UserError with all problems at once; nothing where there are none."""
    if listed := list(problems):
        raise UserError(listed, code)


@contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """Within: a UserError ends the block, and what it says comes to ``problems``; the rest is still looked at."""
    try:
        yield
    except UserError as error:
        problems += error.problems


_NO_SUCH_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOCKED = (errno.EACCES, errno.EPERM, errno.EROFS)


def storage_error(error: OSError, doing: str, path: str | Path) -> UserError:
    """The system's error of a file operation, with the path, what was being done, and what to do.

    A path that cannot be is the user's (exit 2); a full, read-only or failing disk is the storage's (exit 73).
    """
    again = "then run the same command again"
    code = ExitCode.STORAGE
    if error.errno in _NO_SUCH_PLACE:
        code, fix = ExitCode.CONFIG, "give another path"
    elif error.errno in _FULL:
        fix = f"free space, {again}"
    elif error.errno in _LOCKED:
        fix = f"give another path, or change who may read and write it, {again}"
    else:
        fix = f"fix the storage, {again}"
    return UserError(f"{doing}: {error.strerror or error}", file=str(path), fix=fix, code=code)


@contextmanager
def storing(doing: str, path: str | Path, *, named: bool = False) -> Iterator[None]:
    """Within: an OSError is raised as :func:`storage_error` of ``path``; with ``named``, of the file that the system names."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing, (error.filename if named else None) or path) from error


# --- what the storage caused -------------------------------------------------------------------------------------------

# Libraries wrap the system's error, and a rank that lost its peer fails likewise.

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
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError) and current.errno in ERRNOS:
            return current
        if (of_rust := _OF_RUST.search(str(current))) and int(of_rust[1]) in ERRNOS:
            return OSError(int(of_rust[1]), os.strerror(int(of_rust[1])))
        by_rank = getattr(current, "failures", None)
        waiting += [current.__cause__, current.__context__]
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
