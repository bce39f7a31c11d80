"""Kills at random moments of one run, and damage to every file of a checkpoint: the result is that of a quiet run."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from clustertune import manifest
from clustertune.checkpoint import store
from tests.command import events
from tests.long.conftest import STEPS
from tests.long.faults import PATIENCE, Command, adapter_sha, attempts, half_written, pids

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

KILLS = 20
SEED = 20
CAMPAIGN_STEPS = "train.max_steps=24"
VICTIMS = ("rank", "both", "launcher", "command")


@dataclass(frozen=True)
class Kill:
    """One ``kill -9``."""

    moment: str
    victim: str
    reached: int
    """Step reached before it."""
    resumed: int | None = None
    """Step from which the next attempt went on; None where that one was killed before it could say."""
    first_step: float | None = None
    """Seconds from the start of the command to its first new step."""


def moments(run_dir: Path, attempt: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """What to wait for, and the longest random delay after it, in seconds."""

    def stepped() -> bool:
        return any(e["attempt"] == attempt for e in events(run_dir, "step"))

    return {
        "start of the command": (lambda: True, 12.0),
        "start of the launcher": (lambda: pids(run_dir, "launcher"), 6.0),
        "start of the ranks": (lambda: pids(run_dir, "rank"), 8.0),
        "a step": (stepped, 4.0),
        "a save": (lambda: stepped() and half_written(run_dir), 0.5),
    }


def strike(command: Command, victim: str, chance: random.Random) -> str:
    """Kill; where the victim is not there yet, the command."""
    ranks, launcher = pids(command.run_dir, "rank"), pids(command.run_dir, "launcher")
    chosen = {"rank": ranks and [chance.choice(ranks)], "both": ranks, "launcher": launcher, "command": []}[victim]
    command.signal(signal.SIGKILL, *chosen)
    return victim if chosen else "command"


def test_kills_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    quiet = Command(tmp_path / "quiet", CAMPAIGN_STEPS)
    assert quiet.end(600)[0] == 0
    run_dir = tmp_path / "killed"
    kills: list[Kill] = []
    finished = False
    while not finished and len(kills) < KILLS:
        left = set(half_written(run_dir))
        command = Command(run_dir, CAMPAIGN_STEPS)
        number = attempts(run_dir) + 1
        moment, (condition, longest) = chance.choice(list(moments(run_dir, number).items()))
        if moment == "a save":
            condition = lambda: set(half_written(run_dir)) - left  # noqa: B023, E731 - called in this round only
        victim, delay = chance.choice(VICTIMS), chance.uniform(0, longest)
        if command.until(condition):
            time.sleep(delay)
            victim = strike(command, victim, chance)
        code, text = command.end()
        finished = code == 0
        assert code in (0, 75, -signal.SIGKILL), text
        look_back(kills, run_dir, number, command.started)
        reached = max((e["step"] for e in events(run_dir, "step")), default=0)
        kills += [] if finished else [Kill(moment, victim, reached)]
    while not finished:
        number = attempts(run_dir) + 1
        last = Command(run_dir, CAMPAIGN_STEPS)
        code, text = last.end(600)
        assert code == 0, text
        look_back(kills, run_dir, number, last.started)
        finished = True
    show(kills)
    assert adapter_sha(run_dir) == adapter_sha(tmp_path / "quiet")
    assert len(kills) >= min(KILLS, 10)
    assert all(kill.reached - kill.resumed <= 2 for kill in kills if kill.resumed is not None)


def look_back(kills: list[Kill], run_dir: Path, attempt: int, started: float) -> None:
    """Complete the record of the last kill by what the attempt after it did."""
    begun = [e["step"] for e in events(run_dir, "start") if e["attempt"] == attempt]
    if kills and begun:
        steps = [e["time"] for e in events(run_dir, "step") if e["attempt"] == attempt]
        last = kills[-1]
        kills[-1] = Kill(last.moment, last.victim, last.reached, begun[0], steps[0] - started if steps else None)


def show(kills: list[Kill]) -> None:
    """The table of the campaign, on stdout (pytest -s)."""
    table = Table("kill -9 of", "after", "step reached", "resumed from", "steps lost", "s to the first new step")
    for kill in kills:
        lost = "-" if kill.resumed is None else str(kill.reached - kill.resumed)
        seconds = "-" if kill.first_step is None else f"{kill.first_step:.1f}"
        resumed = "-" if kill.resumed is None else str(kill.resumed)
        table.add_row(kill.victim, kill.moment, str(kill.reached), resumed, lost, seconds)
    Console(width=120).print(table, f"{len(kills)} kills survived")


# -- damage ------------------------------------------------------------------------------------------------------


def flip(path: Path, other: Path) -> None:
    """One bit in the middle; in the manifest one of the state that no file's hash covers."""
    data = bytearray(path.read_bytes())
    place = data.index(b'"tokens": ') + 10 if path.name == manifest.MANIFEST else len(data) // 2
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def swap(path: Path, other: Path) -> None:
    """The same file of the older checkpoint."""
    path.write_bytes(other.read_bytes())


def delete(path: Path, other: Path) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def stopped(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed after its checkpoint of step 4."""
    import shutil

    folder = tmp_path_factory.mktemp("stopped") / "run"
    shutil.copytree(prepared, folder)
    command = Command(folder, STEPS)
    assert command.until(lambda: [e for e in events(folder, "checkpoint") if e["step"] == 4])
    command.signal(signal.SIGKILL)
    command.end()
    return folder


def test_damage_to_any_file_is_seen(stopped: Path) -> None:
    """Each file, each kind of damage: the older checkpoint is chosen; undone, the newer one again."""
    checkpoints = stopped / "checkpoints"
    new, old = checkpoints / "step-000004", checkpoints / "step-000002"
    names = [*manifest.list_files(new), manifest.MANIFEST]
    assert len(names) >= 9
    tried = 0
    for name in names:
        for damage in (flip, cut, swap, delete):
            content = (new / name).read_bytes()
            if damage is swap and (old / name).read_bytes() == content:
                continue
            damage(new / name, old / name)
            chosen, broken = store.newest_whole(checkpoints)
            assert chosen is not None and chosen.path == old, f"{damage.__name__} of {name} went unseen"
            assert [found.path for found, _ in broken] == [new]
            (new / name).write_bytes(content)
            tried += 1
    assert store.newest_whole(checkpoints)[1] == []
    Console().print(f"{tried} of {tried} kinds of damage seen in {len(names)} files")


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0/__1_0.distcp", manifest.MANIFEST])
def test_the_command_passes_over_a_damaged_checkpoint(stopped: Path, tmp_path: Path, reference: str, name: str) -> None:
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    flip(folder / "checkpoints" / "step-000004" / name, folder)
    code, text = Command(folder, STEPS).end(PATIENCE * 2)
    assert code == 0 and "step-000004 is not whole and is passed over" in text and "resume from step-000002" in text
    assert adapter_sha(folder) == reference
    assert (folder / "checkpoints" / "step-000004").exists()
    assert "step-000004 is damaged: kept, not counted" in text


def test_a_damaged_final_checkpoint_is_trained_again(fresh: Callable[[], Path], reference: str) -> None:
    """Training is recorded as done, the export is not: an older checkpoint must not be exported in the final one's place."""
    folder = fresh()
    assert Command(folder, STEPS, to="train").end(300)[0] == 0
    flip(folder / "checkpoints" / "step-000006" / "optimizer_0" / "__0_0.distcp", folder)
    code, text = Command(folder, STEPS).end(PATIENCE * 2)
    assert code == 0 and "step-000006 is not whole and is passed over" in text, text
    assert adapter_sha(folder) == reference
