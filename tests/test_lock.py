"""One writer at a time, also where folders come and go under the lock."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertune import lock, manifest
from clustertune.errors import ExitCode, UserError
from clustertune.lock import held, in_turn

REPO = Path(__file__).resolve().parent.parent


def take(path: Path) -> None:
    with held(path, "works here", shown=path.parent, fix="wait for it"):
        pass


def test_the_second_is_told_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "stage" / "lock"
    with held(path, "works here", shown=tmp_path, fix="wait for it"):
        with pytest.raises(UserError) as caught:
            take(path)
        assert caught.value.code is ExitCode.AGAIN
        (problem,) = caught.value.problems
        assert problem.message == f"process {os.getpid()} on {os.uname().nodename} works here"
        assert (problem.file, problem.fix) == (str(path.parent), "wait for it")
    take(path)


def test_a_killed_holder_holds_nobody_off(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = "import sys, time; from pathlib import Path; from clustertune.lock import held, in_turn\n"
    program += "with held(Path(sys.argv[1]), '', shown=Path(), fix=''): print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPO)}) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {other.pid} on"):
            take(path)
        other.kill()
        other.wait()
        take(path)


def test_a_lock_that_was_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder before removes its folder when the next one has opened the lock and does not have it yet."""
    path, real, done = tmp_path / "stage" / "lock", fcntl.flock, list[None]()

    def flock(fd: int, operation: int) -> None:
        if not done:
            done.append(shutil.rmtree(path.parent))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(path, "works here", shown=path, fix=""):
        assert path.is_file()
        with pytest.raises(UserError):
            take(path)


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_unlocked(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But no cache: there everybody would have the lock, and remove what others read."""
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with held(tmp_path / "lock", "works here", shown=tmp_path, fix=""):
        take(tmp_path / "lock")
    for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        with pytest.raises(OSError, match=os.strerror(number)):
            lock.take(tmp_path / "tree.lock", how, in_cache=True)


def test_a_failing_disk_is_no_missing_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        take(tmp_path / "lock")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_second_waits_its_turn(tmp_path: Path) -> None:
    """What is gathered for every build is gathered by one at a time; the next one says that it waits, once."""
    path, order = tmp_path / "work" / "lock", []
    waits = threading.Event()

    def second() -> None:
        with in_turn(path, lambda: (order.append("waits"), waits.set())):
            order.append("second")

    with in_turn(path, lambda: order.append("never")):
        other = threading.Thread(target=second)
        other.start()
        assert waits.wait(30)
        order.append("first ends")
    other.join(30)
    assert order == ["waits", "first ends", "second"]


@pytest.mark.parametrize("how", [held, in_turn])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_lock_is_a_plain_file(tmp_path: Path, how: Any, kind: str) -> None:
    """A link in a folder that others can write to would cut any file of the user to nothing."""
    lock, target = tmp_path / "lock", tmp_path / "precious"
    target.write_text("kept")
    {"link": lambda: lock.symlink_to(target), "fifo": lambda: os.mkfifo(lock), "folder": lock.mkdir}[kind]()
    more = {"doing": "works", "shown": tmp_path, "fix": ""} if how is held else {"wait": lambda: None}
    with pytest.raises(UserError, match=r"lock: is not a plain file"), how(lock, **more):
        pass
    assert target.read_text() == "kept"


def test_a_cache_that_went_is_not_made_again(tmp_path: Path) -> None:
    """Its disk was unmounted: the folder would be one of the system's disk."""
    with pytest.raises(FileNotFoundError):
        lock.take(tmp_path / "cache" / "tree.lock", in_cache=True)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_held_is_a_fresh_file_and_a_look_into_a_cache_is_no_use(tmp_path: Path) -> None:
    """Storage that removes old files must not remove a lock that is held; a cache removes what was used longest ago."""
    for in_cache in (False, True):
        path = tmp_path / f"{in_cache}.lock"
        path.touch()
        os.utime(path, (1e6, 1e6))
        fd = lock.take(path, in_cache=in_cache)
        assert isinstance(fd, int)
        os.close(fd)
        assert (path.stat().st_mtime == 1e6) is in_cache


def test_a_full_disk_keeps_nobody_from_a_lock_and_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = failing(errno.ENOSPC)
    monkeypatch.setattr(os, "pwrite", full)
    fd = lock.take(tmp_path / "lock")
    assert isinstance(fd, int) and lock.take(tmp_path / "lock") == "another process"
    os.close(fd)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        manifest.write_durably(tmp_path / "run.json", "{}")
    assert caught.value.filename == str(tmp_path / "run.json")
