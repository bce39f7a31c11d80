"""From one step to the whole training: conversations, packing, padding, steps, evaluations, checkpoints, start-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertune.plan.predict import Plan, make_plan
from clustertune.plan.schedule import PACKED_SHARE, Lengths, known_lengths, times
from clustertune.recipe.native_rules import train_defaults
from clustertune.resolve.resolve import resolve
from tests.plan.world import LORA_SECTION, constants, machine, write_recipe


def planned(folder: Path, lengths: Lengths | None = None, **recipe: Any) -> Plan:
    return make_plan(resolve(write_recipe(folder, **recipe)), machine(), constants(), lengths=lengths, sure=False)


def test_mean_and_padding_by_hand() -> None:
    """Of 100, 200 and 600 tokens two at a time: the longest is 600 in 5 of 9 pairs, 200 in 3, 100 in 1."""
    found = Lengths((100, 200, 600), "test")
    assert found.mean(1000) == pytest.approx(300)
    assert found.mean(500) == pytest.approx(800 / 3), "cut where the recipe cuts"
    assert found.padded(1, 1000) == pytest.approx(300)
    assert found.padded(2, 1000) == pytest.approx((5 * 600 + 3 * 200 + 100) / 9)
    assert found.padded(2, 500) == pytest.approx((5 * 500 + 3 * 200 + 100) / 9)


def test_what_a_recipe_says_of_its_lengths(tmp_path: Path) -> None:
    """The mean itself, or the mean that a known number of packed steps means; nothing where neither is stated."""
    counts = {"train": 10_000, "eval": 100, "mean_tokens": 300.4}
    data = {"name": "d", "input": "rows.jsonl", "format": "messages"}
    stated = known_lengths(resolve(write_recipe(tmp_path / "told", data=data | {"expect": counts})))
    assert stated == Lengths((300,), "data.expect.mean_tokens")
    stepped = known_lengths(resolve(write_recipe(tmp_path / "stepped", expect={"steps": 20})))
    assert stepped is not None
    assert stepped.tokens == (int(20 * 64 * 2048 * PACKED_SHARE / 10_000),)
    for name, changes in (
        ("nothing", {}),
        ("not-packed", {"expect": {"steps": 20}, "train": {"packing": False}}),
        ("stopped", {"expect": {"steps": 20}, "train": {"max_steps": 20}}),
    ):
        assert known_lengths(resolve(write_recipe(tmp_path / name, **changes))) is None, name


EPOCH = {"data": {"name": "d", "input": "rows.jsonl", "format": "messages"}, "train": {"num_train_epochs": 1}}


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ({}, -(-2492 // 64)),  # 10,000 x 500 / (2048 x 0.98) = 2,491.2 sequences
        ({"train": {"packing": False}}, -(-10_000 // 64)),  # a row each
        ({"train": {"num_train_epochs": 1.5}}, -(-39 * 3 // 2)),  # the last batch of an epoch may be smaller
        ({"train": {"max_steps": 7}}, 7),
        ({"expect": {"steps": 12}, **EPOCH}, 12),
    ],
)
def test_steps_of_a_training(tmp_path: Path, recipe: dict[str, Any], steps: int) -> None:
    assert planned(tmp_path / "r", Lengths((500,), "test"), **recipe).schedule.steps == steps


def test_padding_costs_and_tokens_count_once(tmp_path: Path) -> None:
    """A padded micro batch computes as many tokens as its longest row; useful are those of the conversations."""
    lengths = Lengths((100, 200, 600), "test")
    train = {"packing": False, "per_device_train_batch_size": 2}
    found = planned(tmp_path / "r", lengths, train=train)
    assert found.strategy.sequence == round(lengths.padded(2, 2048)) == 411
    assert found.useful == pytest.approx(300 / 411)
    assert found.tokens_per_s == pytest.approx(64 * 300 / found.step.seconds)
    unknown = planned(tmp_path / "unknown", train=train)
    assert unknown.strategy.sequence == 2048 and unknown.useful == 1
    assert any("lengths unknown" in note for note in unknown.notes)


@pytest.mark.parametrize(
    ("what", "args", "steps", "expected"),
    [
        ("save", {"save_strategy": "no"}, 100, 0),
        ("save", {}, 1200, 3),  # on by default, every 500 and at the end
        ("eval", {}, 1200, 0),  # off by default
        ("save", {"save_strategy": "steps", "save_steps": 20}, 100, 5),
        ("save", {"save_strategy": "steps", "save_steps": 30}, 100, 4),
        ("save", {"save_strategy": "steps", "save_steps": 0.25}, 100, 4),
        ("save", {"save_strategy": "steps", "save_steps": 0.3}, 7, 3),  # every ceil(2.1) = 3 steps, and the 7th
        ("eval", {"eval_strategy": "steps", "logging_steps": 40}, 100, 3),
        ("eval", {"eval_strategy": "steps"}, 100, 10),
        ("save", {"save_strategy": "epoch", "num_train_epochs": 3}, 100, 3),
        ("save", {"save_strategy": "epoch", "num_train_epochs": 1.5}, 100, 2),
        ("eval", {"eval_strategy": "epoch"}, 100, 3),
        ("save", {"save_strategy": "steps", "save_steps": 20}, None, None),
    ],
)
def test_counts_follow_training_arguments(what: str, args: dict[str, Any], steps: int | None, expected: int | None) -> None:
    """transformers' rules: a number from 1 is an interval, below 1 a share of all steps; the last step always counts."""
    assert times(train_defaults() | args, what, steps) == expected


def test_checkpoints_hold_what_is_trained(tmp_path: Path) -> None:
    """Weights and states of a full training, adapters and theirs of LoRA; kept are as many as the recipe keeps."""
    count = 8_030_261_248
    train = {"save_strategy": "steps", "save_steps": 10, "max_steps": 100, "save_total_limit": 3}
    full = planned(tmp_path / "full", train=train).schedule
    assert full.checkpoints == 10 and full.checkpoint_bytes == pytest.approx(count * 12)
    assert full.checkpoint.value == pytest.approx(count * 12 / 1e9)
    assert full.disk == pytest.approx({"checkpoints": 3 * count * 12, "merged model": 2 * count})
    lora = planned(tmp_path / "lora", train=train, lora=LORA_SECTION).schedule
    adapters = 2 * 16 * 32 * (4096 + 4096 + 4096 + 1024)  # rank 16 on q, k, v, o of 32 layers
    assert lora.checkpoint_bytes == pytest.approx(adapters * 12)
    assert lora.disk["adapter"] == pytest.approx(adapters * 4)
    all_of_them = planned(tmp_path / "all", train={k: v for k, v in train.items() if k != "save_total_limit"}).schedule
    assert all_of_them.disk["checkpoints"] == pytest.approx(10 * count * 12)
    few = planned(tmp_path / "few", train=train | {"max_steps": 20}).schedule
    assert few.disk["checkpoints"] == pytest.approx(2 * count * 12), "of three that may be kept two are written"


def test_what_saves_take_is_the_copy_and_the_wait_for_the_one_before(tmp_path: Path) -> None:
    """Written behind training, unless the next one is due before: then training waits for the rest."""
    seldom, often = (planned(tmp_path / str(every), train={"max_steps": 100, "save_steps": every}) for every in (50, 1))
    write, step = seldom.schedule.checkpoint.value, seldom.step.seconds
    copy = seldom.schedule.save.value
    assert write > step > 0 and copy < write / 10
    assert often.schedule.save.value == pytest.approx(copy + write - step)
    assert seldom.parts()["checkpoint"] == pytest.approx(2 * copy / 100)


def test_a_section_for_saves_is_planned(tmp_path: Path) -> None:
    def saves(every: Any, **more: Any) -> Any:
        made = planned(tmp_path / f"{every}{len(more)}", train={"max_steps": 10_000}, save={"every": every, **more})
        return made.schedule

    by_steps, by_time, chosen = saves(1000), saves("1h"), saves("auto")
    assert by_steps.checkpoints == 10 and by_steps.interval is None
    assert saves(1000, milestones=[1000, 1500]).checkpoints == 11
    assert by_time.interval.value == 3600 and by_time.checkpoints < chosen.checkpoints
    assert by_time.save.value <= chosen.interval.value < 3600
