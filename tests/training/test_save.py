"""What a rank does when a checkpoint cannot be written, and what an evaluation that is broken off leaves."""

from __future__ import annotations

import errno
import random
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clustertune.checkpoint.saving import NotSaved
from clustertune.errors import ExitCode, UserError
from clustertune.training import trainer as room
from clustertune.training.heartbeat import Heartbeat
from clustertune.training.trainer import Trainer


class Ranks:
    """A group that counts how often the ranks meet."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.met = 0

    def gather(self, value: Any) -> list[Any]:
        self.met += 1
        return [value, value]

    def maximum(self, values: list[float]) -> list[float]:
        self.met += 1
        return values


class Disk:
    """A store whose write fails; ``met`` is how often the ranks had met by then."""

    def __init__(self, folder: Path, error: BaseException) -> None:
        self.folder, self.error = folder, error

    def path(self, step: int) -> Path:
        return self.folder


def make(folder: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    made: Any = object.__new__(Trainer)
    made.group, made.store = Ranks(), Disk(folder, error)
    made.model = torch.nn.Linear(4, 4)
    made.optimizer = torch.optim.AdamW(made.model.parameters())
    made.state = SimpleNamespace(global_step=4, max_steps=8, epoch=0.5)
    made.args = SimpleNamespace(output_dir=str(folder))
    made._total_train_tokens, made.eval_skipped, made._bad_loss = 0, False, None
    made.heartbeat, made.at_write = Heartbeat(), -1
    made.stopping = made.is_deepspeed_enabled = False

    def write(_folder: Path) -> None:
        made.at_write = made.group.met
        raise error

    monkeypatch.setattr(made, "store_flos", lambda: None, raising=False)
    monkeypatch.setattr(made, "_collect", write, raising=False)
    checked: Trainer = made
    return checked


def test_a_rank_that_cannot_write_leaves_without_meeting_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may still be inside the save, in a collective of its own: a further one here would never end."""
    trainer: Any = make(tmp_path, OSError(errno.ENOSPC, "No space left on device", "shard"), monkeypatch)
    with pytest.raises(UserError, match=r"step 4 was not saved: rank 0: .*No space.*MB free, it needs about") as caught:
        trainer._save_checkpoint(trainer.model, None)
    assert caught.value.code is ExitCode.STORAGE
    assert trainer.group.met == trainer.at_write


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "shard"), ExitCode.STORAGE),
        (NotSaved("rank 0: No space left on device", stored=True), ExitCode.STORAGE),
        (NotSaved("rank 0: a fault of a library", stored=False), ExitCode.FAILED),
    ],
)
def test_what_failed_behind_training_ends_all_ranks_alike(
    error: BaseException, code: ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = make(tmp_path, error, monkeypatch)
    future: Future[Any] = Future()
    future.set_exception(error)
    trainer._saving = room.Saving(4, False, future, True, 0.0, 0.0, 0.0)
    with pytest.raises(UserError, match="step 4 was not saved: ") as caught:
        trainer.finish_save()
    assert caught.value.code is code and str(getattr(error, "strerror", None) or "") in str(caught.value)
    trainer.finish_save()  # it is over


def test_a_lost_peer_is_not_the_storage_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = make(tmp_path, RuntimeError("Connection closed by peer"), monkeypatch)
    with pytest.raises(RuntimeError, match="closed by peer"):
        trainer._save_checkpoint(trainer.model, None)
    monkeypatch.setattr(room, "is_full", lambda path: True)
    with pytest.raises(UserError, match="was not saved"):
        trainer._save_checkpoint(trainer.model, None)


def test_an_evaluation_that_is_broken_off_leaves_the_random_state() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    with pytest.raises(KeyError), room.untouched_random_state():
        random.random(), np.random.rand(), torch.rand(1)
        raise KeyError
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(("saved", "refused"), [(["weight", "bias"], False), (["weight"], True), ([], True)])
def test_a_save_that_lacks_trained_parameters_is_refused(
    saved: list[str], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT 0.21.2 saves no adapter at all under FSDP2 with activation checkpointing, and raises nothing."""
    made: Any = make(tmp_path, OSError(), monkeypatch)
    state = made.model.state_dict()
    states = {"pytorch_model_fsdp_0": {"model": {key: state[key] for key in saved}}}
    if not refused:
        made._check_states(states, tmp_path)
        return
    with pytest.raises(UserError, match=f"{len(saved)} of 2 trained parameters were to be saved"):
        made._check_states(states, tmp_path)
