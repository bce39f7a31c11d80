"""W&B's own service process is killed: training continues, and the bytes are the same."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import events
from tests.long.conftest import STEPS
from tests.long.faults import Command, adapter_sha, pids

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def services(folder: Path) -> list[int]:
    ranks = set(pids(folder, "rank"))
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and (process / "cmdline").is_file():
            try:
                parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent in ranks and "wandb-core" in (process / "cmdline").read_text(errors="replace"):
                    found.append(int(process.name))
            except (OSError, IndexError):
                continue
    return found


def test_training_does_not_stop_for_its_tracker(fresh: Callable[[], Path], reference: str) -> None:
    folder = fresh()
    command = Command(folder, STEPS)
    assert command.until(lambda: events(folder, "step"))
    found = services(folder)
    assert found
    command.signal(signal.SIGKILL, *found)
    code, text = command.end()
    assert code == 0 and "WandbCallback is left out" in text, text
    assert adapter_sha(folder) == reference
