"""Test files side by side: ``pytest -p tests.parallel --workers 3``.

This process imports what most test modules import (torch, transformers, TRL: 7 s) and forks workers. Each takes one file after
the other, collects it and runs it; under pytest-xdist every worker would import all that and collect all tests. The processes
that fork commands and ranks (:mod:`tests.warm`) are started once for all workers. A worker sends its reports file by file, and
pytest prints them.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.command import warm

WORKER = "PYTEST_WORKER"
"""Set in a worker: its temporary folder lies in that of all."""
IMPORTS = ("torch", "transformers.models.llama.modeling_llama", "trl", "peft", "datasets", "accelerate")
FIRST = ("tests/test_chain.py", "tests/testbed/test_cluster.py", "tests/training/test_saving.py")
"""Files that take minutes each: begun last they would keep one worker while the others have nothing left to do.

Not tests/test_readme.py: it would wait for the run that tests/test_chain.py makes at the same time."""
BUSY = "tests/training/"
"""Its ranks keep every core busy; most other files wait for something half of their time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that run test files; 0: this one runs all")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers and not config.option.collectonly:
        config.pluginmanager.register(Controller(config), "workers")


def in_order(files: list[str]) -> list[str]:
    """The longest files first, then those of the busy folder spread evenly between the others."""
    groups: dict[bool, list[str]] = {True: [], False: []}
    for name in files:
        groups[name.startswith(BUSY)].append(name)
    place = {name: at / len(group) for group in groups.values() for at, name in enumerate(group)}
    place |= dict.fromkeys(FIRST, -1.0)
    return sorted(files, key=place.__getitem__)


class Controller:
    """Takes the place of pytest's collection and of its loop over tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def _files(self) -> list[str]:
        """Test files at or below what the command line names; a single test stays one."""
        found: dict[str, None] = {}
        for argument in self.config.args:
            path = Path(argument)
            below = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            found |= dict.fromkeys(os.path.relpath(file, self.config.rootpath) for file in below)
        return in_order(list(found))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        session.items = []
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        files = self._files()
        self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for stack in (False, True):
            warm(stack=stack)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in IMPORTS:
                importlib.import_module(name)
        take, give = os.pipe()
        os.write(give, b"".join(at.to_bytes(2, "big") for at in range(len(files))))
        os.close(give)
        workers: dict[Connection, tuple[int, list[str]]] = {}
        for number in range(self.config.option.workers):
            mine, theirs = Pipe(duplex=False)
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                work(session, number, files, take, theirs)
            theirs.close()
            workers[mine] = (child, [])
        while workers:
            for pipe in wait([*workers]):
                assert isinstance(pipe, Connection)
                child, begun = workers[pipe]
                try:
                    file, *results = pipe.recv()
                except EOFError:
                    _, status = os.waitpid(child, 0)
                    del workers[pipe]
                    for file in begun:
                        self._died(file, os.waitstatus_to_exitcode(status))
                    continue
                if results:
                    begun.remove(file)
                    self._print(session, *results)
                else:
                    begun.append(file)
        while index := os.read(take, 2):
            self._died(files[int.from_bytes(index, "big")], 1)  # no worker was left to run it
        return True

    def _print(self, session: pytest.Session, tests: int, deselected: int, reports: list[dict[str, Any]]) -> None:
        """A file's reports, as pytest prints those of its own tests."""
        hook = self.config.hook
        session.testscollected += tests
        hook.pytest_deselected(items=[SimpleNamespace()] * deselected)
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self.config, data=data)
            if isinstance(report, pytest.CollectReport):
                hook.pytest_collectreport(report=report)
                continue
            if report.when == "setup":
                hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
            hook.pytest_runtest_logreport(report=report)

    def _died(self, file: str, code: int) -> None:
        """A file whose worker ended before its tests did is a failure."""
        text = f"the process that ran this file ended with exit code {code}"
        self.config.hook.pytest_collectreport(report=pytest.CollectReport(file, "failed", text, []))


class Reporter:
    """Keeps the reports of a worker for its next message."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.deselected, self.reports = config, 0, list[dict[str, Any]]()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.pytest_runtest_logreport(report)  # type: ignore[arg-type]

    def taken(self) -> tuple[int, list[dict[str, Any]]]:
        """Deselected tests and reports since the last call."""
        found = self.deselected, self.reports
        self.deselected, self.reports = 0, []
        return found


def work(session: pytest.Session, number: int, files: list[str], take: int, results: Connection) -> None:
    """What a worker does; does not return."""
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
        factory._basetemp = factory.getbasetemp() / f"worker{number}"
        factory._basetemp.mkdir()
        os.environ[WORKER] = str(number)
        reporter = Reporter(config)
        config.pluginmanager.register(reporter, "worker")
        run(session, reporter, files, take, results)
        results.close()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(session: pytest.Session, reporter: Reporter, files: list[str], take: int, results: Connection) -> None:
    """Run what is left of ``files``, of which ``take`` gives the next one's index to whoever reads first.

    A file is collected before the last test of the one before ends: fixtures of the session stay.
    """

    def items() -> Iterator[tuple[str, int, pytest.Item | None]]:
        while index := os.read(take, 2):
            file = files[int.from_bytes(index, "big")]
            results.send((file,))
            found = session.perform_collect([file])
            for item in found:
                yield file, len(found), item
            if not found:
                results.send((file, 0, *reporter.taken()))

    coming = items()
    current = next(coming, None)
    while current is not None:
        file, tests, item = current
        following = next(coming, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following and following[2])
        if following is None or following[0] != file:
            results.send((file, tests, *reporter.taken()))
        current = following
