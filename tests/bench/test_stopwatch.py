"""The stopwatch of a rank: what is timed and counted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clustertune.training import bench_schedule
from clustertune.training.bench_schedule import BenchSchedule
from clustertune.training.stopwatch import Stopwatch


class Clock:
    """Seconds that the test decides."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(watch: Stopwatch, seconds: list[float], inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = Clock()
    monkeypatch.setattr("clustertune.training.stopwatch.time.perf_counter", clock)
    control = SimpleNamespace(should_save=True)
    for length in seconds:
        watch.on_step_begin(None, None, control)
        for _ in range(2):
            watch.count(inputs)
        clock.now += length
        watch.on_step_end(None, None, control)
    return control


INPUTS = {
    "input_ids": torch.zeros(2, 8, dtype=torch.long),
    "attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3]),
    "labels": torch.tensor([[-100] * 4 + [1] * 4, [-100] * 4 + [1] + [-100] * 3]),
}


def test_warm_up_is_apart_and_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps hold compilation and connections; padding is no work that anybody wants."""
    watch = Stopwatch(BenchSchedule(warmup=1, steps=2), tmp_path / "r.json")
    drive(watch, [50.0, 1.0, 3.0], INPUTS, monkeypatch)
    found = json.loads((tmp_path / "r.json").read_text())
    assert [row["seconds"] for row in found["steps"]] == [1.0, 3.0] and found["warmup"][0]["seconds"] == 50.0
    assert [(row["computed"], row["tokens"], row["labelled"]) for row in found["steps"]] == [(32, 26, 10)] * 2
    assert found["peak"]["rss"] > 0 and found["to_first_step_s"] > 0


def test_packed_inputs_without_a_mask_are_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding-free batches have no attention mask: TRL leaves it out for flash attention."""
    watch = Stopwatch(BenchSchedule(warmup=1, steps=1), tmp_path / "r.json")
    drive(watch, [1.0, 1.0], {"input_ids": torch.zeros(1, 7), "labels": torch.ones(1, 7)}, monkeypatch)
    row = json.loads((tmp_path / "r.json").read_text())["steps"][0]
    assert (row["computed"], row["tokens"], row["labelled"]) == (14, 14, 14)


def test_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a large model takes minutes."""
    watch = Stopwatch(BenchSchedule(warmup=1, steps=1), tmp_path / "r.json")
    control = drive(watch, [1.0, 2.0], INPUTS, monkeypatch)
    assert control.should_save is False
    control.should_save = True
    watch.on_epoch_end(None, None, control)
    assert control.should_save is False


def test_another_run_is_not_measured(tmp_path: Path) -> None:
    """Only a benchmark's run folder says that its ranks are to be timed."""
    assert bench_schedule.read(tmp_path) is None
    BenchSchedule(1, 2).write(tmp_path)
    assert bench_schedule.read(tmp_path) == BenchSchedule(1, 2) and BenchSchedule(1, 2).total == 3
