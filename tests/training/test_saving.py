"""Saves behind training: the bytes of a save that training waited for, and nothing of one that failed or was killed."""

from __future__ import annotations

import errno
import json
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
from clustertune.checkpoint import store
from clustertune.errors import ExitCode
from tests.command import events
from tests.training.benches import Bench, fsdp
from tests.training.forked import Forge

pytestmark = pytest.mark.timeout(900)
MODULE = __name__


def slow() -> None:
    """The copy ends after the next backward pass; no file is whole before the next step was taken, or training waits for it."""
    from clustertune.checkpoint import saving, shards
    from clustertune.training.trainer import Trainer

    put, start, agree, finish = shards.write_new, saving.StateWriter.start, Trainer.agree, Trainer.finish_save
    copy, train = saving.StateWriter.copy, Trainer.training_step
    go, trained = threading.Event(), threading.Event()

    def begin(self: Any, *args: Any, **options: Any) -> Any:
        go.clear()
        trained.clear()
        return start(self, *args, **options)

    def late_copy(self: Any, *args: Any) -> Any:
        assert trained.wait(60), "the copy holds training up"
        time.sleep(0.5)  # an optimizer that does not wait has changed everything by now
        return copy(self, *args)

    def then_copy(self: Any, *args: Any, **options: Any) -> Any:
        loss = train(self, *args, **options)
        trained.set()
        return loss

    def write(*args: Any) -> Any:
        assert go.wait(60)
        return put(*args)

    def step(self: Any, *args: Any) -> bool:
        stop = agree(self, *args)
        go.set()
        return stop

    def end(self: Any) -> None:
        go.set()
        finish(self)

    saving.StateWriter.start, saving.StateWriter.copy = begin, late_copy  # type: ignore[method-assign]
    Trainer.training_step = then_copy  # type: ignore[method-assign]
    shards.write_new = saving.write_new = write
    Trainer.agree, Trainer.finish_save = step, end  # type: ignore[method-assign]


def no_room() -> None:
    """The copy does not fit on one rank."""
    from clustertune.checkpoint import saving

    saving.StateWriter.room_for = lambda *_: "too little" if os.environ["RANK"] == "1" else None  # type: ignore[assignment]


def between() -> None:
    """The optimizer may change weights before its step, as schedule-free ones do; the copy takes half a second."""
    from clustertune.checkpoint import saving
    from clustertune.training.trainer import Trainer

    copy, train = saving.StateWriter.copy, Trainer.training_step
    torch.optim.AdamW.train = lambda _: None  # type: ignore[attr-defined]

    def late_copy(self: Any, *args: Any) -> Any:
        time.sleep(0.5)
        return copy(self, *args)

    def then_copied(self: Any, *args: Any, **options: Any) -> Any:
        assert not self.writer.is_copying, "a step began within the copy"
        return train(self, *args, **options)

    saving.StateWriter.copy, Trainer.training_step = late_copy, then_copied  # type: ignore[method-assign]


def no_copy() -> None:
    """The copy fails on rank 1."""
    from clustertune.checkpoint import saving

    def copy(*_: Any) -> None:
        raise RuntimeError("no memory could be pinned")

    if os.environ["RANK"] == "1":
        saving.StateWriter.copy = copy  # type: ignore[assignment,method-assign]


def full() -> None:
    """The disk of rank 1 is full behind training."""
    from clustertune.checkpoint import saving, shards

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "shard")

    if os.environ["RANK"] == "1":
        shards.write_new = saving.write_new = write


def killed() -> None:
    """Rank 1 is killed while the second save is written, which takes seconds."""
    from clustertune.checkpoint import saving

    start, calls = saving.StateWriter.start, []

    def then_die(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            slow()
            killed_later(0.1)
        return start(self, *args, **options)

    saving.StateWriter.start = then_die  # type: ignore[method-assign]


def killed_later(seconds: float | None = None) -> None:
    """Rank 1 is killed after these seconds, by default CT_KILL of them after its model was made."""
    if os.environ["RANK"] != "1":
        return
    timer = threading.Timer(seconds or float(os.environ["CT_KILL"]), os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def signalled() -> None:
    """Rank 1 is asked to stop at one moment of the last step, which is the third: CT_MOMENT."""
    from clustertune.training.trainer import Trainer

    def at(name: str, late: bool) -> None:
        call = getattr(Trainer, name)

        def then(self: Any, *args: Any, **kwargs: Any) -> Any:
            last = 0 < self.state.max_steps <= self.state.global_step + (name == "training_step")
            if last and os.environ["RANK"] == "1" and not late:
                os.kill(os.getpid(), signal.SIGTERM)
            found = call(self, *args, **kwargs)
            if last and os.environ["RANK"] == "1" and late:
                os.kill(os.getpid(), signal.SIGTERM)
            return found

        setattr(Trainer, name, then)

    name, _, when = os.environ["CT_MOMENT"].partition(" ")
    at(name, late=when == "after")


def shards(folder: Path) -> dict[str, dict[str, Any]]:
    """What the manifests of a run say about the shards and of the state, by checkpoint."""
    found = {}
    for checkpoint in store.list_checkpoints(folder / "checkpoints"):
        made = manifest.read_manifest(checkpoint.path)
        files = {name: record.digest for name, record in made.files.items() if name.endswith(".distcp")}
        found[f"{checkpoint.step}"] = {**files, "state": made.meta["state_digests"]}
    return found


def run(forge: Forge, folder: Path, what: str | None = None, attempt: int = 1, **environment: str) -> list[int]:
    breaks = f"{MODULE}:{what}" if what else None
    return forge.run(folder, 2, attempt=attempt, seconds=120, environment=environment, breaks=breaks)


SAVED = ["lora.lora_dropout=0.1", "train.packing=true", "train.eval_on_start=true"]
"""Random numbers count."""


@pytest.fixture(scope="module")
def ready(bench: Bench) -> Path:
    """A run folder in which training is next: four steps, each saved."""
    return bench.make("saving", 2, fsdp(), *SAVED, "train.max_steps=4", "train.save_steps=1", "train.eval_steps=2")


FAST = {("training_step", "epoch")}


@pytest.fixture(scope="module")
def last(bench: Bench) -> dict[str, Path]:
    """Run folders in which three steps are next, whose last one alone is evaluated and saved; by what evaluates it."""
    more = ["train.packing=true", "train.save_steps=50", "train.eval_steps=50"]
    ways = ("steps", "epoch")
    return {way: bench.make(f"last-{way}", 2, fsdp(), *more, f"train.eval_strategy={way}") for way in ways}


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


def test_what_is_saved_behind_training_is_what_was_trained_then(forge: Forge, ready: Path, waited: Path) -> None:
    """Byte for byte a save that training waits for, though a step is taken while it is written."""
    folder = shutil.copytree(ready, ready.parent / "behind")
    assert run(forge, folder, "slow") == [0, 0]
    assert [e["step"] for e in saved(folder)] == [e["step"] for e in saved(waited)] == [1, 2, 3, 4]
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
    assert shards(folder)["4"] == shards(waited)["4"]


def test_an_optimizer_that_changes_weights_between_steps_waits_for_the_copy(forge: Forge, ready: Path) -> None:
    folder = shutil.copytree(ready, ready.parent / "between")
    assert run(forge, folder, "between") == [0, 0]
    assert saved(folder)[0]["save_stall_s"] >= 0.5


def test_a_copy_that_fails_on_one_rank_ends_all_and_leaves_no_checkpoint(forge: Forge, ready: Path) -> None:
    """No rank waits for it in the collectives of a save."""
    folder = shutil.copytree(ready, ready.parent / "no-copy")
    assert run(forge, folder, "no_copy") == [ExitCode.FAILED] * 2
    assert whole(folder) == []
    record = json.loads((folder / "attempts/0001/rank-0.json").read_bytes())
    assert "rank 1: no memory could be pinned" in record["problems"][0]["message"]


@pytest.mark.jobs
def test_a_disk_that_is_full_behind_training_ends_all_ranks_and_leaves_no_checkpoint(forge: Forge, fresh: Path) -> None:
    assert run(forge, fresh, "full") == [ExitCode.STORAGE] * 2
    assert whole(fresh) == []
    for rank in (0, 1):
        record = json.loads((fresh / f"attempts/0001/rank-{rank}.json").read_bytes())
        assert "step 2 was not saved" in record["problems"][0]["message"] and "No space left" in str(record["problems"])
    assert run(forge, fresh, attempt=2) == [0, 0]


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
    assert codes == [0, 0] and shards(fresh)["4"] == shards(waited)["4"]


MOMENTS = {
    "training_step": True, "agree after": True, "evaluate": True, "prediction_step after": False, "evaluate after": False,
    "_save_checkpoint": False, "finish_save after": False, "_commit after": False,
}  # fmt: skip
"""When the signal comes, and whether the evaluation is then left to the next attempt."""


@pytest.mark.parametrize(
    ("moment", "strategy"),
    [
        pytest.param(moment, strategy, marks=[] if (moment, strategy) in FAST else [pytest.mark.jobs])
        for moment in MOMENTS
        for strategy in ("steps", "epoch")
    ],
)
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
    assert [event["step"] for event in events(folder, "eval")] == [3], "evaluated once"
    found = [manifest.read_manifest(one.path).meta for one in store.list_checkpoints(folder / "checkpoints")]
    assert [(meta["step"], meta["final"]) for meta in found] == [(3, True)], "saved once"
