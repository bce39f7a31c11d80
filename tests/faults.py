"""One system call that does not happen, at every place in turn: the process was killed there, or the disk refused it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clustertune.errors import UserError

CALLS = ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "chmod")
"""What changes the disk's names, or flushes."""


class Crash(BaseException):
    """Stands for a kill: no handler of the program may act on it."""


@contextmanager
def fault_at(number: int, error: OSError | None = None, calls: tuple[str, ...] = CALLS) -> Iterator[list[str]]:
    """Raise instead of the ``number``-th of the ``calls`` (0: of none): ``error``, or :class:`Crash`. Gives the calls so far.

    A killed process makes no further call either; a disk refuses one.
    """
    seen: list[str] = []
    originals = {name: getattr(os, name) for name in calls}

    def watch(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == number or (len(seen) > number > 0 and error is None):
                raise error or Crash
            return originals[name](*args, **kwargs)

        return call

    for name in calls:
        setattr(os, name, watch(name))
    try:
        yield seen
    finally:
        for name, function in originals.items():
            setattr(os, name, function)


def sweep(
    work: Callable[[int], object], error: OSError | None = None, calls: tuple[str, ...] = CALLS, step: int = 1
) -> Iterator[int]:
    """Do ``work`` with a fault at its first call, its second, and so on to its last; or at each ``step``-th.

    Gives the number of the call (``work`` gets it too) after each time.
    """
    for number in itertools.count(1, step):
        try:
            with fault_at(number, error, calls) as seen:
                work(number)
        except (Crash, UserError) as caught:
            assert error is None or (isinstance(caught, UserError) and caught.code == 73), caught
        if len(seen) < number:
            return
        yield number
