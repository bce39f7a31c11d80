"""Signs of life: what a watcher reads of a rank, and what they may cost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clustertune.training import heartbeat as room
from clustertune.training.heartbeat import Heartbeat


def test_phases_are_written_at_once_and_repetitions_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro step of a tiny model takes a millisecond; on NFS every write is a message. No line leaves a rest of another."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    heartbeat = Heartbeat(path := tmp_path / "rank-0.heartbeat")
    size = 0
    for later, phase, step, line in [
        (0.0, "start", None, "1 start 0"),
        (0.0, "train", 1, "2 train 1"),
        (0.0, "train", 2, "2 train 1"),
        (room.EVERY_SECONDS, "train", None, "3 train 2"),
        (0.0, "resume", 999_999_999, "4 resume 999999999"),
        (0.0, "end", 1, "5 end 1"),
    ]:
        clock[0] += later
        heartbeat(phase, *([] if step is None else [step]))
        text = path.read_text()
        assert text.endswith("\n") and text.count("\n") == 1 and text.split() == line.split()
        assert len(text) == (size := size or len(text)) and heartbeat.step == (step or heartbeat.step)


def test_no_place_to_write_is_no_reason_to_stop(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "beat", Path("/dev/full"), None):
        heartbeat = Heartbeat(path)
        heartbeat("start")
        heartbeat("train", 3)
        assert heartbeat.step == 3
