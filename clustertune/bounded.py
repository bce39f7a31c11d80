"""Do what may hang or grow in a child of its own, with a limit of time, and of memory where one is given: looks at file
systems, all at once, and what foreign files make a library do, such as chat templates and patterns.

A process that waits for a hung NFS server or a frozen file system cannot be killed (``D`` in ps) until that answers. Such a
child is left behind: it holds none of this process's files, so no reader of our output waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

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
    return _collect({name: _start(work, memory) for name, work in works.items()}, time.monotonic() + seconds)


def ask(work: Work, seconds: float, memory: int | None = None) -> Answer:
    """:func:`ask_all` of one."""
    return ask_all({"": work}, seconds, memory)[""]


class Pending:
    """A work in a child, beside what this process goes on with. As a context, it ends a child whose answer nobody wants."""

    def __init__(self, work: Work, seconds: float, memory: int | None = None) -> None:
        """Begin. ``seconds`` and ``memory`` as of :func:`ask_all`."""
        self._child, self._deadline = _start(work, memory), time.monotonic() + seconds
        with contextlib.suppress(OSError):  # room for an answer that is read only after the deadline
            fcntl.fcntl(self._child[1], fcntl.F_SETPIPE_SZ, 1 << 20)
        self._answer: Answer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._answer is None:
            self._deadline = 0.0
            self.answer()

    def is_ready(self) -> bool:
        """Whether :meth:`answer` returns at once, or all but that."""
        late = time.monotonic() > self._deadline
        return self._answer is not None or late or bool(select.select([self._child[1]], [], [], 0)[0])

    def answer(self) -> Answer:
        """What came of it; waits for it."""
        if self._answer is None:
            self._answer = _collect({"": self._child}, self._deadline)[""]
        return self._answer


class StandingChild:
    """A child that does one piece of work after the other; ``work`` says with :func:`allow` how long each may take.

    For many pieces: a child for each would copy this process's pages and fill the libraries' caches anew.
    """

    def __init__(self, work: Callable[[Any], Mapping[str, Any]], memory: int | None = None) -> None:
        """``memory``: bytes that the child may take beside what this process holds."""
        requests, self._requests = os.pipe()

        def serve(pipe: BinaryIO) -> None:
            with open(requests, "rb") as lines:  # noqa: PTH123
                for line in lines:
                    pipe.write(_answer(lambda: work(json.loads(line))) + b"\n")  # noqa: B023 - called at once
                    pipe.flush()

        self._pid, answers = fork_child(serve, memory, (requests,))
        os.close(requests)
        self._answers = open(answers, "rb")  # noqa: PTH123, SIM115
        self.ended = False
        """Whether the child is gone, by its own limits or by :meth:`close`."""

    def ask(self, request: Any) -> Answer:
        """What comes of one piece of work. ``request`` is sent as JSON. A child that gives no answer has :attr:`ended`."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        if (line := self._answers.readline()).endswith(b"\n"):
            return Answer(**json.loads(line))
        return _without_answer(self.close())

    def close(self) -> int | None:
        """End the child. Returns how it has ended, as ``waitpid`` says it; None where it has not."""
        if self.ended:
            return None
        self.ended = True
        os.close(self._requests)
        self._answers.close()
        if (status := reap(self._pid, time.monotonic() + 1.0)) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            status = reap(self._pid, time.monotonic() + 0.5)
        return status


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


def _collect(started: Mapping[str, tuple[int, int]], deadline: float) -> dict[str, Answer]:
    """Answers of children (each its id and the pipe that it answers through); what has none in time is killed, or left."""
    texts: dict[str, bytes] = dict.fromkeys(started, b"")
    done: set[str] = set()
    with selectors.DefaultSelector() as waiting:
        for name, (_, fd) in started.items():
            waiting.register(fd, selectors.EVENT_READ, name)
        while waiting.get_map():
            left = deadline - time.monotonic()
            ready = waiting.select(max(0.0, min(left, 3600.0)))  # an answer that came in time counts when it is read late
            if not ready and left <= 0:
                break
            for key, _ in ready:
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


def _start(work: Work, memory: int | None = None) -> tuple[int, int]:
    return fork_child(lambda pipe: pipe.write(_answer(work)), memory)


def _answer(work: Work) -> bytes:
    try:
        answer: dict[str, Any] = {"found": dict(work())}
    except OSError as error:
        answer = {"errno": error.errno or errno.EIO}
    return json.dumps(answer).encode()


def fork_child(talk: Callable[[BinaryIO], Any], memory: int | None = None, kept: Iterable[int] = ()) -> tuple[int, int]:
    """A child that talks into a pipe, with its limits and no file of ours but ``kept``; its id, and the pipe's other end."""
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
        first = 3
        for fd in sorted((writer, *kept)):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        if memory is not None:
            _limit_memory(memory)
        with open(writer, "wb") as pipe:  # noqa: PTH123 - one write of a pipe may take a part only
            talk(pipe)
    os._exit(0)


def _end(pid: int, fd: int, text: bytes, done: bool, gone_by: float) -> Answer:
    os.close(fd)
    status = reap(pid, gone_by + 10.0 if done else gone_by)  # what has closed its pipe is at its end
    if done and text:
        return Answer(**json.loads(text))
    if done:
        return _without_answer(status)
    return Answer(silent=True, left=pid if status is None else None)


def _without_answer(status: int | None) -> Answer:
    """Of a child that died, of want of memory or by a hand: nothing is known."""
    return Answer(errno=errno.ECHILD, signal=os.WTERMSIG(status) if status and os.WIFSIGNALED(status) else None)


def reap(pid: int, deadline: float) -> int | None:
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
