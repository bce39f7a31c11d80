"""How an attempt ended, judged from what each rank left behind."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clustertune.errors import ExitCode
from clustertune.launch import local


def leave(folder: Path, rank: int, code: int, at: float = 1.0, message: str = "why") -> None:
    problems: list[dict[str, Any]] = [{"message": message, "file": None, "key": None, "fix": None}] if code else []
    (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "code": code, "time": at, "problems": problems}))


def test_all_well(tmp_path: Path) -> None:
    for rank in (0, 1):
        leave(tmp_path, rank, 0)
    assert local.judge(tmp_path, 2) == local.Outcome(ExitCode.OK, [])


def test_a_rank_without_a_record_was_killed_and_the_job_may_go_on(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").touch()
    leave(tmp_path, 0, 1, message="connection closed by peer")
    outcome = local.judge(tmp_path, 2)
    assert outcome.code is ExitCode.AGAIN and "rank 1 ended without a word" in str(outcome.problems[0])


def test_the_first_to_fail_is_named(tmp_path: Path) -> None:
    leave(tmp_path, 0, 1, at=5.0, message="connection closed by peer")
    leave(tmp_path, 1, 1, at=2.0, message="KeyError: 'x'")
    outcome = local.judge(tmp_path, 2)
    assert outcome.code is ExitCode.FAILED and "rank 1 failed first: KeyError" in str(outcome.problems[0])


@pytest.mark.parametrize("code", [ExitCode.STOP, ExitCode.STORAGE, ExitCode.CONFIG])
def test_a_decision_outranks_the_noise_of_lost_peers(tmp_path: Path, code: ExitCode) -> None:
    leave(tmp_path, 0, 1, at=1.0, message="connection closed by peer")
    leave(tmp_path, 1, int(code), at=2.0, message="the reason")
    outcome = local.judge(tmp_path, 3)
    assert outcome.code is code and [p.message for p in outcome.problems] == ["the reason"]


def test_a_launcher_that_starts_nothing_is_no_reason_to_requeue(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_text("ValueError: no such option\n")
    outcome = local.judge(tmp_path, 2)
    assert outcome.code is ExitCode.FAILED and "no such option" in str(outcome.problems[0])


RANK = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def handle(number, frame):
    (folder / "rank-0.json").write_text(json.dumps({"rank": 0, "code": 75, "time": 1.0, "problems": []}))
    sys.exit(75)
signal.signal(signal.SIGUSR1, handle)
(folder / "rank-0.pid").write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stop_signal_reaches_the_ranks_and_not_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    def ask() -> None:
        while not (tmp_path / "rank-0.pid").exists() or not (tmp_path / "rank-0.pid").read_text():
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    (tmp_path / "rank-0.log").touch()
    thread = threading.Thread(target=ask)
    thread.start()
    outcome = local.run_ranks([sys.executable, "-c", RANK, str(tmp_path)], tmp_path, 1, quiet=True)
    thread.join()
    assert outcome == local.Outcome(ExitCode.AGAIN, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_before_the_first_rank_is_no_failure(tmp_path: Path, number: signal.Signals) -> None:
    def ask() -> None:
        while not (tmp_path / local.LAUNCHER_PID).exists():
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    thread = threading.Thread(target=ask)
    thread.start()
    outcome = local.run_ranks([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 2, quiet=True)
    thread.join()
    assert outcome == local.Outcome(ExitCode.AGAIN, [])
    # The same without the question, which is what the command would see otherwise.
    assert local.judge(tmp_path, 2).code is ExitCode.FAILED


def test_a_stop_that_came_after_the_last_step_still_stops_the_chain(tmp_path: Path) -> None:
    for rank in (0, 1):
        leave(tmp_path, rank, 0)
    assert local.judge(tmp_path, 2).code is ExitCode.OK
    assert local.judge(tmp_path, 2, asked=True) == local.Outcome(ExitCode.AGAIN, [])


def test_a_stop_does_not_hide_a_decision_or_a_fault(tmp_path: Path) -> None:
    leave(tmp_path, 0, int(ExitCode.STOP))
    leave(tmp_path, 1, 0)
    assert local.judge(tmp_path, 2, asked=True).code is ExitCode.STOP
    leave(tmp_path, 0, 1)
    assert local.judge(tmp_path, 2, asked=True).code is ExitCode.FAILED


def test_a_launcher_that_was_killed_is_a_reason_to_requeue(tmp_path: Path) -> None:
    assert local.judge(tmp_path, 2).code is ExitCode.FAILED
    assert local.judge(tmp_path, 2, killed=True).code is ExitCode.AGAIN


def test_ranks_killed_before_they_opened_a_log_are_a_reason_to_requeue(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_text("  rank      : 0\n  exitcode  : -9 (pid: 7)\n=====\n")
    assert local.judge(tmp_path, 2).code is ExitCode.AGAIN


def test_ranks_without_a_record_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-0.log").touch()
    assert local.judge(tmp_path, 2).code is ExitCode.AGAIN
    monkeypatch.setattr(local, "is_full", lambda path: True)
    outcome = local.judge(tmp_path, 2)
    assert outcome.code is ExitCode.STORAGE and "free space" in str(outcome.problems[0])


COUNTING = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
seen = []
def handle(number, frame):
    seen.append(number)
    (folder / "seen").write_text(str(len(seen)))
signal.signal(signal.SIGUSR1, handle)
(folder / "rank-0.pid").write_text(str(__import__("os").getpid()))
time.sleep(3)
"""


@pytest.mark.parametrize(
    ("first", "second", "ended"),
    [
        (signal.SIGUSR1, signal.SIGTERM, False),
        (signal.SIGUSR1, signal.SIGUSR1, False),
        (signal.SIGTERM, signal.SIGTERM, True),
        (signal.SIGINT, signal.SIGINT, True),
    ],
)
def test_only_impatience_breaks_off_a_save(tmp_path: Path, first: signal.Signals, second: signal.Signals, ended: bool) -> None:
    def ask() -> None:
        main = threading.main_thread().ident or 0
        while not (tmp_path / "rank-0.pid").exists() or not (tmp_path / "rank-0.pid").read_text():
            time.sleep(0.02)
        signal.pthread_kill(main, first)
        while not (tmp_path / "seen").exists():
            time.sleep(0.02)
        signal.pthread_kill(main, second)

    thread = threading.Thread(target=ask)
    began = time.monotonic()
    thread.start()
    local.run_ranks([sys.executable, "-c", COUNTING, str(tmp_path)], tmp_path, 1, quiet=True)
    thread.join()
    assert (time.monotonic() - began < 2.9) is ended
    assert (tmp_path / "seen").read_text() == ("1" if ended else "2")
