"""What tests do to a program: a bit flips, a call fails, a pickle would run code; and processes that are forked."""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import ExitCode, UserError


def flip(path: Path, at: int | None = None, bit: int = 0) -> None:
    """Flip one bit of a file, by default in its middle; the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at % len(data)] ^= 1 << bit
    path.write_bytes(data)


def flip_somewhere(path: Path, seed: int) -> None:
    """Flip a bit that the file's name and the seed choose."""
    draw = random.Random(f"{path.name} {seed}")
    flip(path, draw.randrange(path.stat().st_size), draw.randrange(8))


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises ``error``."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@contextmanager
def refused(match: str, code: ExitCode = ExitCode.CONFIG) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expects an error of these words and this exit code."""
    with pytest.raises(UserError, match=match) as caught:
        yield caught
    assert caught.value.code == code


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork(act: Callable[[], int | None]) -> int:
    """The id of a process that ends with the code that ``act`` returns; with 1, and the traceback, where it raises."""
    if child := os.fork():
        return child
    code = 1
    try:
        code = act() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(children: list[int]) -> list[int]:
    """The exit codes of forked processes."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
