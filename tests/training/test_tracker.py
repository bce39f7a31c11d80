"""A tracker that fails under way is left out, once and with a word; whatever else fails is not hidden."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from clustertune.training import tracker


class WandbCallback(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.label = "mirror"

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == 2:
            raise ConnectionResetError("Connection lost\nmore")


class OtherCallback(WandbCallback):
    pass


def handler(callback: TrainerCallback) -> Any:
    return CallbackHandler([callback], None, None, None, None)


def log(callbacks: Any, step: int) -> None:
    callbacks.call_event("on_log", SimpleNamespace(), TrainerState(global_step=step), TrainerControl(), logs={})


def test_a_dead_tracker_does_not_end_the_training() -> None:
    told: list[str] = []
    mirror = WandbCallback()
    callbacks = handler(mirror)
    tracker.guard(callbacks.callbacks, told.append)
    for step in (1, 2, 3):
        log(callbacks, step)
    assert mirror.steps == [1, 2]
    assert len(told) == 1 and "Connection lost;" in told[0] and "left out" in told[0]
    assert callbacks.callbacks[0].label == "mirror"


def test_only_trackers_are_guarded() -> None:
    callbacks = handler(OtherCallback())
    tracker.guard(callbacks.callbacks, print)
    with pytest.raises(ConnectionResetError):
        log(callbacks, 2)
