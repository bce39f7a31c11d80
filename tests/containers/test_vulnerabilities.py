"""The vulnerability scan against a database on the loopback, one that lies, and none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from clustertune.containers import __main__ as commands
from clustertune.containers import lock as locks
from clustertune.containers.lock import LockedPackage, NoDatabase, PackageLock, Vulnerability
from clustertune.errors import UserError

ENTRIES = {name: LockedPackage(name, version, ("h",)) for name, version in (("kiln", "1.0"), ("oven", "2.0+cpu"))}
LOCK = PackageLock("x", "3.12", "any", "", ENTRIES)


@contextmanager
def database(answer: Any) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers everything with one text (or document), and what it was asked."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def test_what_is_known_is_told_once() -> None:
    """With the version that is locked, without torch's mark of a build, which the database does not know."""
    with database({"results": [{}, {"vulns": [{"id": "PYSEC-1"}, {"id": "GHSA-2"}]}]}) as (address, requests):
        known = locks.ask([LOCK, LOCK], address)
    assert known == [Vulnerability("oven", "2.0", "PYSEC-1"), Vulnerability("oven", "2.0", "GHSA-2")]
    ((path, question),) = requests
    assert path == "/v1/querybatch"
    assert question["queries"] == [
        {"package": {"name": "kiln", "ecosystem": "PyPI"}, "version": "1.0"},
        {"package": {"name": "oven", "ecosystem": "PyPI"}, "version": "2.0"},
    ]
    (problem,) = locks.judge(known, {"GHSA-2": "not used"})
    assert problem.key == "oven" and "PYSEC-1" in problem.message and "GHSA" not in problem.message
    assert locks.judge(known, {"GHSA-2": "a", "PYSEC-1": "b"}) == []


def test_a_mirror_is_named_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """make lock-check DATABASE=<address>: a machine that reaches a mirror only has it scanned too."""
    monkeypatch.setattr(commands.lock, "check_all", lambda *_, **__: {"x": LOCK})
    with database({"results": [{}, {"vulns": [{"id": "PYSEC-1"}]}]}) as (address, requests):
        assert commands.main(["lock-check", "--database", address]) == 2
    assert requests and "oven: 2.0: PYSEC-1" in capsys.readouterr().err
    assert commands.main(["lock-check", "--database", "http://127.0.0.1:9"]) == 0
    assert "not done: known vulnerabilities" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["<html>", "[]", {"results": [{}]}, {"results": "none"}, {"error": 1}])
def test_an_answer_that_is_none_is_no_clean_bill(answer: Any) -> None:
    """A portal's login page is not `nothing known`."""
    with database(answer) as (address, _), pytest.raises(NoDatabase):
        locks.ask([LOCK], address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "file:///etc/passwd", "nonsense"])
def test_no_database_is_told(address: str) -> None:
    """Not done is not the same as clean."""
    with pytest.raises(NoDatabase):
        locks.ask([LOCK], address)


def test_what_is_lived_with_has_a_reason(tmp_path: Path) -> None:
    """Else the list becomes a way to be quiet."""
    listed = tmp_path / "x.txt"
    listed.write_text("# why\nPYSEC-1 only on Windows\nGHSA-2\nGHSA-3 \n")
    with pytest.raises(UserError) as caught:
        locks.accepted(listed)
    assert [problem.file for problem in caught.value.problems] == [f"{listed}:3", f"{listed}:4"]
    locks.accepted()
