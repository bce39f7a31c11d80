"""From one step to the whole training: conversations, packing, padding, steps, evaluations, checkpoints, start-up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustertune.errors import UserError
from clustertune.plan.lengths import PACKED_SHARE, Lengths, known_lengths, read_lengths
from clustertune.plan.predict import Plan, make_plan
from clustertune.plan.schedule import START_S, check_schedule_end, find_idle_schedule, times
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


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 64), st.integers(1, 4096))
def test_a_batch_is_at_least_as_long_as_its_mean(tokens: list[int], batch: int, longest: int) -> None:
    """Between the mean and the longest, and longer with a larger batch."""
    found = Lengths(tuple(sorted(tokens)), "test")
    padded = found.padded(batch, longest)
    assert found.mean(longest) - 1e-6 <= padded <= min(max(tokens), longest) + 1e-6
    assert padded <= found.padded(batch + 1, longest) + 1e-6


def test_files_of_lengths(tmp_path: Path) -> None:
    """One number a line, or a histogram; both give the same sample."""
    lines, counts = tmp_path / "lines.txt", tmp_path / "counts.json"
    lines.write_text("7\n3\n3\n")
    counts.write_text(json.dumps({"lengths": {"7": 1, "3": 2}}))
    assert read_lengths(lines).tokens == read_lengths(counts).tokens == (3, 3, 7)
    assert read_lengths(lines).source == str(lines)


def test_a_large_histogram_is_thinned_to_its_shape(tmp_path: Path) -> None:
    """Millions of conversations keep their mean, also where no length is frequent by itself."""
    many = {str(length): 1000 + length for length in range(1, 3001)}
    rare = {str(length): 1 for length in range(1, 90_001)}
    for name, counts in (("many", many), ("rare", rare)):
        path = tmp_path / name
        path.write_text(json.dumps({"lengths": counts}))
        found = read_lengths(path)
        exact = sum(int(length) * count for length, count in counts.items()) / sum(counts.values())
        assert len(found.tokens) <= 20_001
        assert found.mean(10**6) == pytest.approx(exact, rel=0.001)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"-5\n", b"0\n", b"12 words", b"1.5\n", b"{}", b'{"lengths": 5}', b'{"lengths": {"a": 1}}',
     b'{"lengths": {"5": -1}}', b'{"lengths": {"5": 0}}', b'{"lengths": {}}', b"{broken", b'{"lengths": {"5": 99999999}}',
     b'{"lengths": {"5": null}}', b"9" * 5000],
)  # fmt: skip
def test_a_file_that_holds_no_lengths(tmp_path: Path, content: bytes) -> None:
    """One clear line that names the file, whatever it holds."""
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_lengths(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="missing"):
        read_lengths(tmp_path / "missing")


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


def test_steps_that_are_known_and_not(tmp_path: Path) -> None:
    """1,152 packed sequences at a global batch of 32: the published run. Without lengths nothing is known."""
    found = make_plan(resolve("llama405b-oasst2"), machine(), constants(), sure=False)
    assert found.schedule.steps == 36 and found.schedule.evaluations == 18
    unknown = planned(tmp_path / "unknown")
    assert unknown.schedule.steps is None and unknown.hours is None and unknown.totals() is None
    assert "--lengths" in unknown.schedule.steps_why


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


def test_an_evaluation_gathers_and_computes(tmp_path: Path) -> None:
    """A forward pass of each rank's share of the rows; the weights are gathered for each pass, packed rows are fewer."""
    train = {"eval_strategy": "steps", "eval_steps": 10, "max_steps": 100, "per_device_eval_batch_size": 4}
    for more, evaluations, rows, passes in (
        ({}, 10, 25, 1),  # 100 x 500 / (2048 x 0.98) over 8 ranks of 4
        ({"packing": False, "eval_on_start": True}, 11, 100, 4),
        ({"eval_strategy": "no"}, 0, 25, 1),
    ):
        found = planned(tmp_path / str(len(more)) / str(rows), Lengths((500,), "test"), train=train | more).schedule
        values = found.evaluation.values
        assert (found.evaluations, values["rows"], values["passes"]) == (evaluations, rows, passes)
        assert found.evaluation.value == pytest.approx(passes * max(float(values["forward"]), float(values["moved"])))


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


def test_hours_are_the_sum_of_everything(tmp_path: Path) -> None:
    """Steps, evaluations, checkpoints and the load from storage: a node reads rows of each file and hashes its own files."""
    train = {"save_strategy": "steps", "save_steps": 25, "eval_strategy": "steps", "eval_steps": 50, "max_steps": 100}
    found = planned(tmp_path / "r", Lengths((500,), "test"), train=train)
    around, totals = found.schedule, found.totals()
    assert totals is not None and found.hours is not None
    nodes = found.strategy.nodes
    start = START_S + 2 * 8_030_261_248 * (2 - 1 / nodes) / 2e9
    assert around.start.value == pytest.approx(start) == pytest.approx(totals["load"])
    expected = 100 * found.step.seconds + 2 * around.evaluation.value + 4 * around.save.value + start
    assert found.hours * 3600 == pytest.approx(expected) == pytest.approx(sum(totals.values()))


def test_what_saves_take_is_the_copy_and_the_wait_for_the_one_before(tmp_path: Path) -> None:
    """Written behind training, unless the next one is due before: then training waits for the rest."""
    seldom, often = (planned(tmp_path / str(every), train={"max_steps": 100, "save_steps": every}) for every in (50, 1))
    write, step = seldom.schedule.checkpoint.value, seldom.step.seconds
    copy = seldom.schedule.save.value
    assert write > step > 0 and copy < write / 10
    assert often.schedule.save.value == pytest.approx(copy + write - step)
    assert seldom.parts()["checkpoint"] == pytest.approx(2 * copy / 100)


def test_what_is_named_by_a_step_that_never_comes_is_known(tmp_path: Path) -> None:
    at_end = resolve(write_recipe(tmp_path / "a", train={"max_steps": 10, "warmup_steps": 10}, save={"milestones": [5, 10]}))
    assert check_schedule_end(at_end) == []
    few, warm, late = check_schedule_end(at_end, 7)
    assert "7 steps" in few and "warmup" in warm and "milestones" in late
    at_end = resolve(write_recipe(tmp_path / "b", train={"max_steps": 10}, save={"milestones": [5, 11, 10**9]}))
    assert "save.milestones 11, 1000000000, the training has 10 steps" in check_schedule_end(at_end)[0]


@pytest.mark.parametrize(
    ("train", "idle"),
    [
        ({"max_steps": 1, "warmup_steps": 0.03}, True),
        ({"max_steps": 1, "warmup_steps": 1, "lr_scheduler_type": "linear"}, True),
        ({"max_steps": 1, "warmup_steps": 0}, False),
        ({"max_steps": 1, "warmup_steps": 1, "lr_scheduler_type": "constant"}, False),
        ({"max_steps": 2, "warmup_steps": 2}, False),
    ],
)
def test_a_rate_of_0_in_every_step_is_known_as_the_trainer_has_it(train: dict[str, Any], idle: bool, tmp_path: Path) -> None:
    """Against transformers' own schedule: step n takes its rate at n - 1."""
    import torch
    from transformers import get_scheduler

    resolved = resolve(write_recipe(tmp_path / "a", train=train))
    assert bool(find_idle_schedule(resolved)) is idle and check_schedule_end(resolved)
    steps, warm = train["max_steps"], train["warmup_steps"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kind = str(resolved.train_args["lr_scheduler_type"] or "linear")
    scheduler = get_scheduler(kind, optimizer, math.ceil(warm * steps) if warm < 1 else int(warm), steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert (max(rates) == 0) is idle
    assert find_idle_schedule(resolve(write_recipe(tmp_path / "b", train=train), tiny=True)) == []


def test_a_section_for_saves_is_planned(tmp_path: Path) -> None:
    def saves(every: Any, **more: Any) -> Any:
        made = planned(tmp_path / f"{every}{len(more)}", train={"max_steps": 10_000}, save={"every": every, **more})
        return made.schedule

    by_steps, by_time, chosen = saves(1000), saves("1h"), saves("auto")
    assert by_steps.checkpoints == 10 and by_steps.interval is None
    assert saves(1000, milestones=[1000, 1500]).checkpoints == 11
    assert by_time.interval.value == 3600 and by_time.checkpoints < chosen.checkpoints
    assert by_time.save.value <= chosen.interval.value < 3600
