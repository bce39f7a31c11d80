"""Do what may hang or grow in a child of its own, with a limit of time, and of memory where one is given: looks at file
systems, all at once, and what foreign files make a library do, such as chat templates and patterns.

A process that waits for a hung NFS server or a frozen file system cannot be killed (``D`` in ps) until that answers. Such a
child is left behind: it holds none of this process's files, so no reader of our output waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clustertune.process import die_with_parent

Work = Callable[[], Mapping[str, Any]]
"""What a child does; its answer is sent as JSON. It may raise OSError."""


@dataclass(frozen=True)
class Answer:
    """What came of one look."""

    found: dict[str, Any] | None = None
    errno: int | None = None
    """The system's error instead."""
    left: int | None = None
    """The child that did not answer in time and could not be ended."""
    signal: int | None = None
    """What ended the child before it answered; SIGKILL is the kernel's for want of memory, or a person's."""
    silent: bool = False
    """It did not answer in time."""


def ask_all(works: Mapping[str, Work], seconds: float, memory: int | None = None) -> dict[str, Answer]:
    """Run every work in a child; what has not answered after ``seconds`` is killed, or left.

    ``memory``: bytes that each may take beside what this process holds; beyond them it gets MemoryError, or ends.
    """
    started = {name: _start(work, memory) for name, work in works.items()}
    texts: dict[str, bytes] = dict.fromkeys(started, b"")
    done: set[str] = set()
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for name, (_, fd) in started.items():
            waiting.register(fd, selectors.EVENT_READ, name)
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(min(left, 3600.0)):
                if data := os.read(key.fd, 65536):
                    texts[key.data] += data
                else:
                    waiting.unregister(key.fd)
                    done.add(key.data)
    for name, (pid, _) in started.items():
        if name not in done:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    gone_by = time.monotonic() + 0.5
    return {name: _end(pid, fd, texts[name], name in done, gone_by) for name, (pid, fd) in started.items()}


def ask(work: Work, seconds: float, memory: int | None = None) -> Answer:
    """:func:`ask_all` of one."""
    return ask_all({"": work}, seconds, memory)[""]


PATTERN_SECONDS = 5.0
"""For all names of a model, which take a millisecond: a pattern that goes back again and again can take years."""


def patterns_end(match: Callable[[str], Any], names: Iterable[str]) -> bool:
    """Whether a foreign file's patterns, which ``match`` holds against one name, come to an end for all names."""
    return ask(lambda: {"tried": [0 for name in names if match(name) is None]}, PATTERN_SECONDS, 1 << 30).found is not None


def allow(seconds: float) -> None:
    """Have the kernel end this process once it has computed for ``seconds`` from now on, in whatever library it is."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _limit_memory(memory: int) -> None:
    pages = int(open("/proc/self/statm").read().split()[5])  # noqa: PTH123, SIM115 - data and stack, proc(5)
    limit = pages * resource.getpagesize() + memory
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _start(work: Work, memory: int | None = None) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    with contextlib.suppress(BaseException):
        os.setsid()
        die_with_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGVTALRM):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        if memory is not None:
            _limit_memory(memory)
        try:
            answer: dict[str, Any] = {"found": dict(work())}
        except OSError as error:
            answer = {"errno": error.errno or errno.EIO}
        with open(writer, "wb") as pipe:  # noqa: PTH123 - one write of a pipe may take a part only
            pipe.write(json.dumps(answer).encode())
    os._exit(0)


def _end(pid: int, fd: int, text: bytes, done: bool, gone_by: float) -> Answer:
    os.close(fd)
    status = _reap(pid, gone_by + 10.0 if done else gone_by)  # what has closed its pipe is at its end
    if done and text:
        return Answer(**json.loads(text))
    if done:  # it died, of want of memory or by a hand: nothing is known
        return Answer(errno=errno.ECHILD, signal=os.WTERMSIG(status) if status and os.WIFSIGNALED(status) else None)
    return Answer(silent=True, left=pid if status is None else None)


def _reap(pid: int, deadline: float) -> int | None:
    """How the child has ended, None where it has not; a killed one takes a moment, one in ``D`` for ever."""
    while True:
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == pid:
                return status
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            return None
        return 0
