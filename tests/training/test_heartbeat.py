"""Signs of life: what a watcher reads of a rank, and what they may cost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clustertune.training import heartbeat as room
from clustertune.training.heartbeat import Heartbeat


def read(path: Path) -> tuple[int, str, int]:
    text = path.read_text()
    assert text.endswith("\n") and text.count("\n") == 1
    counter, phase, step = text.split()
    return int(counter), phase, int(step)


def test_phases_are_written_at_once_and_repetitions_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro step of a tiny model takes a millisecond; on NFS every write is a message."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    path = tmp_path / "rank-0.heartbeat"
    heartbeat = Heartbeat(path)
    heartbeat("start")
    assert read(path) == (1, "start", 0)
    heartbeat("train", 1)
    heartbeat("train", 2)
    assert read(path) == (2, "train", 1) and heartbeat.step == 2
    clock[0] += room.EVERY_SECONDS
    heartbeat("train")
    assert read(path) == (3, "train", 2)
    heartbeat("save", 2)
    heartbeat("train", 1234567)
    assert read(path) == (5, "train", 1234567)


def test_a_shorter_line_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    heartbeat = Heartbeat(path)
    heartbeat("resume", 999_999_999)
    size = path.stat().st_size
    heartbeat("end", 1)
    assert read(path) == (2, "end", 1) and path.stat().st_size == size


def test_no_place_to_write_is_no_reason_to_stop(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "beat", Path("/dev/full"), None):
        heartbeat = Heartbeat(path)
        heartbeat("start")
        heartbeat("train", 3)
        assert heartbeat.step == 3
