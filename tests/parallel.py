"""Test files side by side: ``pytest --workers 3``.

This process collects all tests, which imports the stack, and forks workers: each takes one file after the other, with all that
is imported already, and sends its reports, which pytest prints here. The processes that fork commands and ranks
(:mod:`tests.warm`) are started once for all workers. (Each worker of pytest-xdist would collect and import all that again.)
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.command import warm

common_folder: Path | None = None
"""In a worker: the temporary folder of all of them."""
FIRST = (
    "tests/test_chain.py",
    "tests/simulate/test_simulate.py",
    "tests/testbed/test_cluster.py",
    "tests/training/test_saving.py",
)
"""Files that take longest: begun last they would keep one worker while the others have nothing left to do.

Not tests/test_readme.py: it would wait for the run that tests/test_chain.py makes at the same time."""
BUSY = "tests/training/"
"""Its ranks keep every core busy; most other files wait for something half of their time."""


def file_of(item: pytest.Item) -> str:
    """The file of a test, relative to the checkout."""
    return item.nodeid.partition("::")[0]


def in_order(files: list[str]) -> list[str]:
    """The longest files first, then those of the busy folder spread evenly between the others."""
    groups: dict[bool, list[str]] = {True: [], False: []}
    for name in files:
        groups[name.startswith(BUSY)].append(name)
    place = {name: at / len(group) for group in groups.values() for at, name in enumerate(group)}
    place |= dict.fromkeys(FIRST, -1.0)
    return sorted(files, key=place.__getitem__)


class Queue:
    """Numbers from 0, each of which one of the processes takes."""

    def __init__(self, length: int) -> None:
        self._read, write = os.pipe()
        os.write(write, b"".join(number.to_bytes(2, "big") for number in range(length)))  # a pipe holds 64 KiB
        os.close(write)

    def __iter__(self) -> Iterator[int]:
        while number := os.read(self._read, 2):
            yield int.from_bytes(number, "big")


class Workers:
    """Takes the place of pytest's loop over tests."""

    def __init__(self, count: int) -> None:
        self._count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest says what could not be collected
        files: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            files.setdefault(file_of(item), []).append(item)
        groups = [files[name] for name in in_order([*files])]
        session.config.pluginmanager.getplugin("terminalreporter").showfspath = False  # of several files at once
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for stack in (False, True):
            warm(stack=stack)
        gc.collect()
        gc.freeze()  # a collection in a worker would copy every page that it looks at
        queue, running = Queue(len(groups)), dict[Connection, tuple[int, list[str]]]()
        for number in range(min(self._count, len(groups))):
            mine, theirs = Pipe(duplex=False)
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                _work(session, number, groups, queue, theirs)
            theirs.close()
            running[mine] = (child, [])
        while running:
            for pipe in wait([*running]):
                assert isinstance(pipe, Connection)
                self._hear(session, pipe, running, queue)
        for number in queue:
            _lost(session, file_of(groups[number][0]), "no worker was left to run it")
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _hear(
        self, session: pytest.Session, pipe: Connection, running: dict[Connection, tuple[int, list[str]]], queue: Queue
    ) -> None:
        """One message of a worker: the test that begins, or a report."""
        child, begun = running[pipe]
        hook, config = session.config.hook, session.config
        try:
            message: dict[str, Any] = pipe.recv()
        except EOFError:
            del running[pipe]
            _, status = os.waitpid(child, 0)
            if code := os.waitstatus_to_exitcode(status):
                _lost(session, begun[-1] if begun else "tests", f"its worker ended with exit code {code}")
            return
        if name := message.get("begins"):
            begun.append(name)
            return
        hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=config, data=message))
        if session.shouldfail:  # -x
            for _ in queue:
                pass


def _lost(session: pytest.Session, name: str, reason: str) -> None:
    """A test or file that was not run to its end is a failure."""
    report = pytest.TestReport(name, (name.partition("::")[0], None, name), {}, "failed", f"{name}: {reason}", "call")
    session.config.hook.pytest_runtest_logreport(report=report)


class Reporter:
    """Sends what a worker has to report."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._pipe.send({"begins": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._pipe.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _work(session: pytest.Session, number: int, groups: list[list[pytest.Item]], queue: Queue, results: Connection) -> None:
    """What a worker does; does not return."""
    global common_folder  # noqa: PLW0603  # of this process
    code = 1
    try:
        config = session.config
        for plugin in ("workers", "terminalreporter"):
            config.pluginmanager.unregister(name=plugin)
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are the other workers' too
        capture.start_global_capturing()
        capture.suspend_global_capture()
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        common_folder = factory.getbasetemp()
        factory._basetemp = common_folder / f"worker{number}"
        factory._basetemp.mkdir()
        config.pluginmanager.register(Reporter(config, results), "reporter")
        # The next file is taken when the last test of one begins: what stays for the next test depends on it.
        items = itertools.chain.from_iterable(groups[number] for number in queue)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = None if session.shouldfail else following
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
