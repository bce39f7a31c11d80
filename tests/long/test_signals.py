"""Stop signals and kills at chosen moments: an exit code that says what to do, nothing left over, the same bytes in the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import events
from tests.long.conftest import STEPS
from tests.long.faults import Command, adapter_sha, attempts, half_written, pids

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

Fresh = Callable[[], Path]


def has_rank_pids(folder: Path) -> bool:
    return len(list((folder / "attempts").glob("*/rank-*.pid"))) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_asked_to_stop_before_there_is_a_rank(fresh: Fresh, number: signal.Signals) -> None:
    folder = fresh()
    command = Command(folder, STEPS)
    assert command.until(lambda: pids(folder, "launcher"))
    time.sleep(0.5)
    command.signal(number)
    code, text = command.end(20)
    assert code == 75 and "stopped on request" in text, text


def test_asked_to_stop_while_the_ranks_start(fresh: Fresh, reference: str) -> None:
    folder = fresh()
    command = Command(folder, STEPS)
    assert command.until(lambda: has_rank_pids(folder))
    command.signal(signal.SIGTERM)
    code, text = command.end()
    assert code == 75 and events(folder, "step") == [], text
    assert Command(folder, STEPS).end(300)[0] == 0
    assert adapter_sha(folder) == reference


def test_asked_to_stop_at_the_last_step_the_export_does_not_start(fresh: Fresh, reference: str) -> None:
    folder = fresh()
    command = Command(folder, STEPS)
    assert command.until(lambda: any(e["step"] == 6 for e in events(folder, "step")))
    command.signal(signal.SIGTERM)
    code, text = command.end()
    assert code == 75 and not (folder / "adapter").exists(), text
    assert Command(folder, STEPS).end()[0] == 0
    # A second attempt where the stop fell into the last evaluation: it makes that up, and takes no step.
    assert attempts(folder) <= 2 and len(events(folder, "step")) == 6 and adapter_sha(folder) == reference


@pytest.mark.parametrize(
    "pair", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)]
)
def test_asked_twice_during_a_save(fresh: Fresh, reference: str, pair: tuple[signal.Signals, signal.Signals]) -> None:
    """A warning and then the end leave the save alone; the same signal again is impatience."""
    folder = fresh()
    command = Command(folder, STEPS)
    assert command.until(lambda: half_written(folder))
    command.signal(pair[0])
    time.sleep(0.2)
    command.signal(pair[1])
    code, text = command.end()
    assert code == 75, text
    if pair[0] is not pair[1]:
        assert [e["step"] for e in events(folder, "checkpoint")], text
    assert Command(folder, STEPS).end(300)[0] == 0
    assert adapter_sha(folder) == reference


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_is_asked_and_all_stop(fresh: Fresh, number: signal.Signals) -> None:
    folder = fresh()
    command = Command(folder, STEPS)
    assert command.until(lambda: events(folder, "step"))
    command.signal(number, pids(folder, "rank")[-1])
    code, text = command.end()
    assert code == 75 and "stopped on request" in text, text
    assert events(folder, "checkpoint")[-1]["step"] == events(folder, "stop")[-1]["step"]


@pytest.mark.parametrize("victim", ["launcher", "command"])
@pytest.mark.parametrize("moment", ["rank", "step"])
def test_nothing_outlives_the_launcher_or_the_command(fresh: Fresh, victim: str, moment: str) -> None:
    """A rank that continued would write beside the next attempt: the run's lock is gone with the command."""
    folder = fresh()
    command = Command(folder, STEPS)
    assert command.until(lambda: pids(folder, "rank") if moment == "rank" else events(folder, "step"))
    command.signal(signal.SIGKILL, *(pids(folder, "launcher") if victim == "launcher" else []))
    began = time.monotonic()
    code, text = command.end()
    assert code == (75 if victim == "launcher" else -signal.SIGKILL), text
    assert time.monotonic() - began < 10


def test_killed_in_the_last_save_and_in_the_export(fresh: Fresh, reference: str) -> None:
    folder = fresh()
    command = Command(folder, STEPS)
    assert command.until(lambda: any(path.name == "step-000006" for path in half_written(folder)))
    command.signal(signal.SIGKILL)
    command.end()
    command = Command(folder, STEPS)
    assert command.until(lambda: any(e["stage"] == "export" for e in events(folder, "stage")))
    command.signal(signal.SIGKILL)
    command.end()
    assert Command(folder, STEPS).end()[0] == 0
    assert adapter_sha(folder) == reference


def test_two_commands_at_once(fresh: Fresh) -> None:
    folder = fresh()
    first = Command(folder, STEPS)
    assert first.until(lambda: pids(folder, "rank"))
    second = Command(folder, STEPS)
    code, text = second.end(30, alone=False)
    assert code == 75 and f"process {first.pid}" in text
    first.signal(signal.SIGKILL)
    first.end()
