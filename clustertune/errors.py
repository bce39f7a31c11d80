"""Errors that a user can cause: the problem, where it is, what to do, and an exit code."""

from __future__ import annotations

import errno
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
    if found := list(problems):
        raise UserError(found, code)


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
