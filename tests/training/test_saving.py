"""Saves behind training: the bytes of a save that training waited for, and nothing of one that failed or was killed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertune import manifest
from clustertune.checkpoint import saving, store
from clustertune.checkpoint import shards as writer
from clustertune.checkpoint.saving import StateWriter
from clustertune.errors import ExitCode
from clustertune.training.session import Watch
from clustertune.training.trainer import Trainer
from tests.command import events
from tests.damage import failing
from tests.training.benches import Bench, problems
from tests.training.forked import Forge, around, kill, on_rank

pytestmark = pytest.mark.timeout(900)


def slow() -> None:
    """The copy ends when the next optimizer step is due; no file is whole before that was taken, or training waits for it."""
    go, trained = threading.Event(), threading.Event()

    def late(*_: Any) -> None:
        assert trained.wait(60), "the copy holds training up"
        time.sleep(0.5)  # an optimizer that does not wait has changed everything by now

    def held(*_: Any) -> None:
        assert go.wait(60)

    around(StateWriter, "start", lambda *_: (go.clear(), trained.clear()))
    around(StateWriter, "copy", late)
    around(writer, "write_new", held)
    saving.write_new = writer.write_new
    around(Watch, "on_pre_optimizer_step", lambda *_: trained.set())
    around(Trainer, "agree", after=lambda *_: go.set())
    around(Trainer, "finish_save", lambda *_: go.set())


def no_room() -> None:
    """The copy does not fit on one rank."""
    StateWriter.room_for = lambda *_: "too little" if os.environ["RANK"] == "1" else None


def between() -> None:
    """The optimizer may change weights before its step, as schedule-free ones do; the copy takes half a second."""

    def copied(self: Any, *_: Any) -> None:
        assert not self.writer.is_copying, "a step began within the copy"

    torch.optim.AdamW.train = lambda _: None
    around(StateWriter, "copy", lambda *_: time.sleep(0.5))
    around(Trainer, "training_step", copied)


def no_copy() -> None:
    """The copy fails on rank 1."""
    around(StateWriter, "copy", on_rank(1, failing(RuntimeError("no memory could be pinned"))))


def unpinned() -> None:
    """The copy fails on rank 1, and no optimizer step may be taken until the save is whole."""
    no_copy()
    under_way = threading.Event()

    def stepped(*_: Any) -> None:
        assert not under_way.is_set(), "a step began within the save"

    around(StateWriter, "start", lambda *_: under_way.set())
    around(StateWriter, "_write_all", after=lambda *_: under_way.clear())
    around(Watch, "on_optimizer_step", stepped)
    around(writer, "write_new", lambda *_: time.sleep(0.2))
    saving.write_new = writer.write_new


def full() -> None:
    """The disk of rank 1 is full behind training."""
    around(writer, "write_new", on_rank(1, failing(OSError(errno.ENOSPC, "No space left on device", "shard"))))
    saving.write_new = writer.write_new


def killed() -> None:
    """Rank 1 is killed while the second save is written, which takes seconds."""

    def then_die(_: Any, step: int, *rest: Any) -> None:
        if step == 2:
            slow()
            killed_later(0.1)

    around(StateWriter, "start", then_die)


def killed_later(seconds: float | None = None) -> None:
    """Rank 1 is killed after these seconds, by default CT_KILL of them after its model was made."""
    timer = threading.Timer(seconds or float(os.environ["CT_KILL"]), on_rank(1, kill()))
    timer.daemon = True
    timer.start()


def signalled() -> None:
    """Rank 1 is asked to stop at one moment of the last step, which is the third: CT_MOMENT."""
    name, _, when = os.environ["CT_MOMENT"].partition(" ")
    ask = on_rank(1, kill(signal.SIGTERM))

    def at(self: Any, *_: Any) -> None:
        if 0 < self.state.max_steps <= self.state.global_step + (name == "training_step"):
            ask()

    around(Trainer, name, **{when or "before": at})


def shards(folder: Path) -> dict[str, dict[str, Any]]:
    """What the manifests of a run say about the shards and of the state, by checkpoint."""
    found = {}
    for checkpoint in store.list_checkpoints(folder / "checkpoints"):
        made = manifest.read_manifest(checkpoint.path)
        files = {name: record.digest for name, record in made.files.items() if name.endswith(".distcp")}
        found[f"{checkpoint.step}"] = {**files, "state": made.meta["state_digests"]}
    return found


def run(forge: Forge, folder: Path, what: str | None = None, attempt: int = 1, **environment: str) -> list[int]:
    breaks = f"{__name__}:{what}" if what else None
    return forge.run(folder, 2, attempt=attempt, seconds=120, environment=environment, breaks=breaks)


@pytest.fixture(scope="module")
def ready(bench: Bench) -> Path:
    """A run folder in which training is next: three steps, each saved; random numbers count."""
    more = ["lora.lora_dropout=0.1", "train.packing=true", "train.max_steps=3", "train.save_steps=1", "train.eval_steps=2"]
    return bench.make("fsdp2", *more)


@pytest.fixture(scope="module")
def last(bench: Bench) -> dict[str, Path]:
    """Run folders in which three steps are next, whose last one alone is evaluated and saved; by what evaluates it."""
    more = ["train.packing=true", "train.save_steps=50", "train.eval_steps=50"]
    return {way: bench.make("fsdp2", *more, f"train.eval_strategy={way}") for way in ("steps", "epoch")}


@pytest.fixture(scope="module")
def waited(forge: Forge, ready: Path) -> Path:
    """The run whose training waits for each save."""
    folder = shutil.copytree(ready, ready.parent / "waited")
    assert run(forge, folder, "no_room") == [0, 0]
    return folder


def saved(folder: Path) -> list[dict[str, Any]]:
    return [event for event in events(folder, "checkpoint") if event["status"] == "saved"]


def whole(folder: Path) -> list[int]:
    found = store.list_checkpoints(folder / "checkpoints")
    return sorted(c.step for c in found if (c.path / manifest.MANIFEST).exists())


@pytest.mark.jobs
def test_what_is_saved_behind_training_is_what_was_trained_then(forge: Forge, ready: Path, waited: Path) -> None:
    """Byte for byte a save that training waits for, though a step is taken while it is written."""
    folder = shutil.copytree(ready, ready.parent / "behind")
    assert run(forge, folder, "slow") == [0, 0]
    assert [e["step"] for e in saved(folder)] == [e["step"] for e in saved(waited)] == [1, 2, 3]
    assert saved(folder)[0]["save_copy_s"] > 0 == saved(waited)[0]["save_copy_s"]
    assert saved(folder)[0]["time"] > events(folder, "step")[1]["time"], "training waited"
    assert saved(waited)[0]["save_stall_s"] >= saved(waited)[0]["save_write_s"]
    assert shards(folder) == shards(waited) and len(shards(folder)["3"]) == 5
    assert all(store.verify(found.path) == [] for found in store.list_checkpoints(folder / "checkpoints"))


def test_a_rank_killed_during_a_save_costs_that_save_alone(forge: Forge, ready: Path, waited: Path) -> None:
    """It resumes from the checkpoint before, and ends with the bytes of a run that nobody disturbed."""
    folder = shutil.copytree(ready, ready.parent / "killed")
    assert -signal.SIGKILL in run(forge, folder, "killed")
    assert whole(folder) == [1]
    assert run(forge, folder, attempt=2) == [0, 0]
    assert events(folder, "start")[-1]["step"] == 1
    assert shards(folder)["3"] == shards(waited)["3"]


@pytest.mark.jobs
def test_an_optimizer_that_changes_weights_between_steps_waits_for_the_copy(forge: Forge, ready: Path) -> None:
    folder = shutil.copytree(ready, ready.parent / "between")
    assert run(forge, folder, "between") == [0, 0]
    assert saved(folder)[0]["save_stall_s"] >= 0.5


@pytest.mark.jobs
def test_where_a_copy_cannot_be_made_training_waits_for_that_save(forge: Forge, ready: Path, waited: Path) -> None:
    """On one rank it cannot be pinned: all write the state itself, the same bytes, ahead of the next optimizer step."""
    folder = shutil.copytree(ready, ready.parent / "unpinned")
    assert run(forge, folder, "unpinned") == [0, 0]
    assert [(e["step"], e["save_copy_s"]) for e in saved(folder)] == [(step, 0.0) for step in (1, 2, 3)]
    assert shards(folder) == shards(waited)


@pytest.mark.jobs
def test_what_fails_on_one_rank_ends_all_and_leaves_no_checkpoint(forge: Forge, ready: Path, tmp_path: Path) -> None:
    """Behind training; no rank waits for it in the collectives of a save."""
    folder = shutil.copytree(ready, tmp_path / "run")
    assert run(forge, folder, "full") == [ExitCode.STORAGE] * 2
    assert whole(folder) == []
    for rank in (0, 1):
        assert "step 1 was not saved" in problems(folder, rank)[0]["message"] and "No space left" in str(problems(folder, rank))


@pytest.mark.jobs
def test_ranks_killed_at_any_moment_lose_one_interval_and_the_save_under_way_at_most(
    forge: Forge, ready: Path, waited: Path
) -> None:
    """Again and again until the run has ended; the bytes at its end are those of a calm one."""
    chosen, fresh = random.Random(19), shutil.copytree(ready, ready.parent / "random")
    codes, reached = [-1], 0
    for attempt in range(1, 40):
        before = max(whole(fresh), default=0)
        codes = run(forge, fresh, "killed_later", attempt, CT_KILL=str(chosen.uniform(2, 12)))
        taken = [e["step"] for e in events(fresh, "step") if e["attempt"] == attempt]
        assert not taken or taken[0] == before + 1, "it resumed from the newest checkpoint"
        reached = max([reached, *taken])
        assert max(whole(fresh), default=0) >= reached - 2
        if codes == [0, 0]:
            break
    assert codes == [0, 0] and shards(fresh)["3"] == shards(waited)["3"]


MOMENTS = {
    "training_step": True, "agree after": True, "evaluate": True, "prediction_step after": True, "evaluate after": False,
    "_save_checkpoint": False, "finish_save after": False, "_commit after": False,
}  # fmt: skip
"""When the signal comes, and whether the evaluation, of several batches, is then left to the next attempt."""


@pytest.mark.jobs
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_last_step_is_saved_and_evaluated_whatever_signal_falls_there(
    moment: str, strategy: str, forge: Forge, last: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(last[strategy], tmp_path / "run")
    first = run(forge, folder, "signalled", CT_MOMENT=moment)
    left = MOMENTS[moment]
    assert first == [ExitCode.AGAIN if left else 0] * 2
    if left:
        assert run(forge, folder, attempt=2) == [0, 0]
    assert run(forge, folder, attempt=3) == [0, 0], "nothing is left"
    assert [event["step"] for event in events(folder, "step")] == [1, 2, 3], "no step is taken for the evaluation"
    assert [event["step"] for event in events(folder, "eval")] == [3], "evaluated once"
    found = [manifest.read_manifest(one.path).meta for one in store.list_checkpoints(folder / "checkpoints")]
    assert [(meta["step"], meta["final"]) for meta in found] == [(3, True)], "saved once"
