"""One rank's program around the training: whose child it is, what it says when it fails, and to whom."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clustertune import rank, storage
from clustertune.errors import ExitCode
from clustertune.launch import local
from clustertune.launch.local import LAUNCHER_PID
from tests.command import REPO

ORPHAN = """
import os, sys, time
from pathlib import Path
from clustertune import rank
folder = Path(sys.argv[1])
if os.fork():
    time.sleep(0.2)
    os._exit(0)
if sys.argv[2] == "late":
    time.sleep(0.5)
bound = rank._bind_to_launcher(folder / "launcher.pid")
(folder / "said").write_text(str(bound))
time.sleep(1)
(folder / "survived").touch()
"""


@pytest.mark.parametrize("moment", ["late", "early"])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, moment: str) -> None:
    """Killed by the kernel where it was bound in time; by its own look at the parent where it was still starting."""
    code = ORPHAN.replace("if os.fork():", f"(folder / '{LAUNCHER_PID}').write_text(str(os.getpid()))\nif os.fork():")
    subprocess.run([sys.executable, "-c", code, str(tmp_path), moment], cwd=REPO, check=True)
    deadline = time.monotonic() + 10
    while not (tmp_path / "said").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "said").read_text() == ("False" if moment == "late" else "True")
    time.sleep(1.5)
    assert (tmp_path / "survived").exists() is (moment == "late")


def test_another_launcher_s_rank_is_asked_and_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun and torchrun leave no such file; a save may still succeed before they end the step."""
    bound: list[signal.Signals] = []
    monkeypatch.setattr(rank, "die_with_parent", bound.append)
    assert rank._bind_to_launcher(tmp_path / LAUNCHER_PID)
    (tmp_path / LAUNCHER_PID).write_text(f"{os.getppid()}\n")
    assert rank._bind_to_launcher(tmp_path / LAUNCHER_PID)
    assert bound == [signal.SIGTERM, signal.SIGKILL]


def test_a_full_disk_is_found_in_what_libraries_wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "shard")
    wrapped = RuntimeError("could not build the dataset")
    wrapped.__cause__ = ValueError("inner")
    wrapped.__cause__.__context__ = full
    from torch.distributed.checkpoint import CheckpointException

    by_rank = CheckpointException("saving", {1: (full, None)})  # type: ignore[dict-item]
    for error in (full, wrapped, by_rank):
        known = rank._explain(error, tmp_path / "rank-0.log")
        assert known.code is ExitCode.STORAGE and "free space" in str(known), error
    lost = RuntimeError("Connection closed by peer")
    assert rank._explain(lost, tmp_path / "rank-0.log").code is ExitCode.FAILED
    assert rank._explain(ConnectionResetError(errno.ECONNRESET, "reset"), tmp_path / "log").code is ExitCode.FAILED
    monkeypatch.setattr(rank, "is_full", lambda path: True)
    assert rank._explain(RuntimeError("file write failed"), tmp_path / "log").code is ExitCode.STORAGE


def test_an_interruption_is_no_fault(tmp_path: Path) -> None:
    assert rank._explain(KeyboardInterrupt(), tmp_path / "log").code is ExitCode.AGAIN


def test_a_cycle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert storage.storage_cause(one) is None


def test_training_does_not_stop_for_its_audience() -> None:
    """``clustertune run ... | head``: the reader is gone."""
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError):
        os.write(write, b"x")
    out = rank._Forgiving(os.fdopen(write, "wb", 0))
    out.write("step 1\n")
    out.flush()
    read, write = os.pipe()
    heard = rank._Forgiving(os.fdopen(write, "wb", 0))
    heard.write("step 2\n")
    assert os.read(read, 100) == b"step 2\n"


def test_a_record_fits_where_nothing_more_does(tmp_path: Path) -> None:
    """Blanks are no record for the judge; filling them takes no further block."""
    path = tmp_path / "rank-0.json"
    rank._reserve(path)
    assert local.judge(tmp_path, 1).code is ExitCode.FAILED
    before = (path.stat().st_size, path.stat().st_ino)
    rank._fill(path, {"rank": 0, "code": 73, "time": 1.0, "problems": [{"message": "no space"}]})
    assert (path.stat().st_size, path.stat().st_ino) == before
    outcome = local.judge(tmp_path, 1)
    assert outcome.code is ExitCode.STORAGE and outcome.problems[0].message == "no space"
