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
