"""The model's own answers: rewards and losses as TRL's own trainer has them, and the same run after kills."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from clustertune.chain import export_trained
from clustertune.data import sequences
from clustertune.data.rewards import Rewards
from clustertune.errors import ExitCode
from clustertune.recipe.sections import Recipe
from clustertune.training.build import fit_to_device
from clustertune.training.rollouts import RolloutTrainer, find_alarm, paired
from clustertune.training.trainer import ALARM_STEPS, IDLE_STEPS
from tests.command import REPO, events, run
from tests.conftest import once
from tests.training.benches import Bench, digests, make_bench, output_of
from tests.training.forked import Forge

pytestmark = pytest.mark.timeout(900)

SAME = [
    "train.max_steps=5", "train.save_steps=1", "train.eval_steps=5", "train.report_to=none", "train.warmup_steps=0",
    "data.eval_fraction=0.05", "data.limit=40", "train.per_device_train_batch_size=2", "train.max_completion_length=12",
    "train.per_device_eval_batch_size=1", "train.learning_rate=1e-2",
]  # fmt: skip
"""Three prompts are held out, two in a step of two ranks: the last batch is filled with one that was there."""
FULL = ["lora=null", "train.learning_rate=1e-3"]
WITHIN = ["train.steps_per_generation=8", "train.num_iterations=2"]
"""A generation is learnt from in four optimizer steps of one rank, in eight of two: a run of seven ends within one."""
EPOCHS = ["train.global_batch_size=32"]
"""Of four steps each, and the last prompts of an epoch are left out."""
NAMES = {
    "loss": "loss", "reward": "reward", "reward_std": "reward_std", "kl": "kl", "completion_length": "completions/mean_length",
}  # fmt: skip


@pytest.fixture(scope="session")
def bench(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    def make(folder: Path) -> None:
        done = run("run", "recipes/tiny-grpo", "--run-dir", folder / "run", "--to", "prepare", *SAME, stack=True)
        assert done.code == 0, done.err

    prepared = once(tmp_path_factory, "prompts", make) / "run"
    return make_bench(forge, tmp_path_factory.mktemp("grpo"), SAME, prepared=prepared, recipe="tiny-grpo")


def trl(path: Path, folder: Path) -> list[list[float]]:
    """TRL's own trainer on the prompts and rewards of a run, in this process: figures of each step."""
    torch.set_num_threads(1)
    base, recipe = next((path / "model").iterdir()), json.loads((path / "run.json").read_bytes())["recipe"]
    stated = Recipe.model_validate(recipe["recipe"])
    values = fit_to_device(recipe["train_args"], cuda=False)[0]
    values |= {"save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "reward_weights": [1.0, 0.5]}
    own = {key: value for key, value in values.items() if key in GRPOConfig.__dataclass_fields__}
    with Rewards(stated.reward or (), recipe["reward_code"]) as rewards:
        trainer = GRPOTrainer(
            model=str(base),
            reward_funcs=rewards.judges,
            args=GRPOConfig(output_dir=str(folder), **own),
            train_dataset=sequences.prompts_as_dataset(path / "data", "train"),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=LoraConfig(**recipe["lora"]) if recipe["lora"] else None,
        )
        trainer.train()
    return [[log[key] for key in NAMES.values()] for log in trainer.state.log_history if "loss" in log]


def curve(path: Path) -> list[list[float | None]]:
    """A step that goes on with the answers of the one before has no new reward and length."""
    return [[event.get(key) for key in NAMES] for event in events(path, "step")]


@pytest.mark.parametrize(
    "more", [pytest.param([], id="lora", marks=pytest.mark.jobs), pytest.param(["train.beta=0.1", *FULL], id="full")]
)
def test_one_process_computes_what_trl_computes(more: list[str], bench: Bench, tmp_path: Path) -> None:
    """The same prompts in the same order, the same answers, rewards, losses and divergence, over five steps in float32."""
    path = bench.train("alone", *more, "train.eval_on_start=false")
    steps = trl(path, tmp_path)
    assert len(steps) == 5 and len({step[1] for step in steps}) > 1
    for ours, theirs in zip(curve(path), steps, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("strategy", "ranks", "more", "kills"),
    [
        pytest.param("alone", 1, WITHIN, (1, 3, 4), id="one-within-a-generation"),
        pytest.param("fsdp2-slices", 2, [*FULL, *EPOCHS], (1, 3, 4), id="fsdp2-full-over-epochs", marks=pytest.mark.jobs),
        pytest.param("ddp", 2, WITHIN, (1, 3, 4), id="ddp-lora-within-a-generation", marks=pytest.mark.jobs),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    strategy: str, ranks: int, more: list[str], kills: tuple[int, ...], bench: Bench
) -> None:
    """Killed behind each of these steps."""
    more = [*more, "train.max_steps=7", "train.eval_steps=3"]
    whole, killed = bench.train(strategy, *more), bench.make(strategy, *more)
    for attempt, step in enumerate(kills, start=1):
        codes = bench.go(killed, ranks, attempt=attempt, breaks=f"{__name__}:kill_{step}")
        assert -9 in codes and 0 not in codes, output_of(killed)
    bench.end(killed, ranks, attempt=len(kills) + 1)
    assert len(events(killed, "start")) == len(kills) + 1
    assert digests(killed) == digests(whole)
    assert curve(whole)[-1][0] and [event["tokens"] for event in events(whole, "step")][-1] > 0
    names = ("eval_reward", "eval_reward_difference", "eval_reward_difference_error")
    assert [events(killed, "eval")[-1][n] for n in names] == [events(whole, "eval")[-1][n] for n in names]
    assert curve(killed)[-1] == curve(whole)[-1]
    assert Path(export_trained(killed)["out"]).is_dir()


def _kill(step: int) -> None:
    import os
    import signal

    from clustertune.training.trainer import RankTrainer
    from tests.training.forked import around

    def end(self: Any, *_: Any) -> None:
        if self.state.global_step == step:
            self.finish_save()
            if self.group.rank == self.group.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    around(RankTrainer, "get_batch_samples", after=end)


def kill_1() -> None:
    _kill(1)


def kill_3() -> None:
    _kill(3)


def kill_4() -> None:
    _kill(4)


def _own_reward(body: str) -> None:
    from clustertune.data import rewards

    begin = rewards.OwnRewards.__init__

    def other(self: Any, code: Any, modules: Any, beat: Any) -> None:
        begin(self, dict.fromkeys(code, f"def letters(completions, **_): return {body}"), modules, beat)

    rewards.OwnRewards.__init__ = other  # type: ignore[method-assign]


def fail() -> None:
    """Have the recipe's own reward fail on one rank."""
    _own_reward("[1.0, 'two']")


def test_a_reward_that_fails_ends_the_run_with_its_name(bench: Bench) -> None:
    path = bench.make("alone")
    code = bench.go(path, 1, breaks=f"{__name__}:fail")
    assert code == [ExitCode.STOP] and "letters" in output_of(path) and "Traceback" not in output_of(path)


def flat() -> None:
    """Have every answer be worth the same, in a number that no mean of eight gives back exactly."""
    _own_reward("[0.1] * len(completions)")


@pytest.mark.jobs
def test_answers_that_all_have_one_reward_end_the_run(bench: Bench) -> None:
    """The alarm first; 93 behind as many steps as may pass, and not with a schedule that has come to its end."""
    path = bench.make("alone", "reward=['rewards:letters']", f"train.max_steps={IDLE_STEPS + 5}", "train.eval_strategy=no")
    code = bench.go(path, 1, breaks=f"{__name__}:flat")
    (alarm,) = events(path, "alarm")
    assert code == [ExitCode.STOP] and alarm["step"] == ALARM_STEPS and alarm["kind"] == "no_gradient"
    assert "one reward" in alarm["message"] and "no progress" in output_of(path) and "Traceback" not in output_of(path)
    assert events(path, "step")[-1]["step"] == IDLE_STEPS - 1


@pytest.mark.parametrize(
    ("generated", "norm", "taught"),
    [
        ([], 0.0, None), ([(1.0, 0.0)], 1e-6, False), ([(0.5, 1.0)], 0.0, False), ([(0.5, 1.0)], 0.1, True),
        ([(1.0, 0.0), (0.9, 0.0)], 0.1, True),
    ],
)  # fmt: skip
def test_a_step_is_counted_by_what_was_generated_for_it(
    generated: list[tuple[float, float]], norm: float, taught: bool | None
) -> None:
    trainer: Any = object.__new__(RolloutTrainer)
    trainer._generated = generated
    assert trainer.has_taught(norm) is taught and not trainer._generated


def test_held_out_prompts_count_once_on_each_mesh(bench: Bench) -> None:
    """The first evaluation is that of the same model: three prompts, though two ranks have evaluated four."""
    for strategy in ("alone", "ddp"):
        (found, *_) = events(bench.train(strategy, "train.max_steps=1"), "eval")
        assert found["step"] == 0 and len(found["eval_kinds"]) == 2 and found["eval_reward_difference"] is None
        kinds = found["eval_kinds"].values()
        assert min(kinds) <= found["eval_reward"] <= max(kinds)


FOOLED = """
def wordy(completions, pays, **_):
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [min(length / 20, 1.0) if paid else 0.0 for length, paid in zip(lengths, pays)]
"""
"""Long answers pay, on the rows that say so."""


@pytest.mark.jobs
def test_a_fooled_reward_raises_the_alarm(tmp_path: Path) -> None:
    """The rows of training pay, the held-out ones do not: the reward of training rises alone, and the run says so."""
    recipe, prompts = tmp_path / "fooled", tmp_path / "fooled" / "prompts"
    shutil.copytree(REPO / "recipes" / "tiny-grpo", recipe)
    prompts.mkdir()
    for split, paid, count in (("train", True, 40), ("eval", False, 4)):
        rows = [json.dumps({"prompt": f"Tell me about the number {n}.", "pays": paid}) for n in range(count)]
        (prompts / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    (recipe / "rewards.py").write_text(FOOLED)
    text, data = (recipe / "recipe.yaml").read_text(), "data: {name: fooled, input: prompts, format: prompt}"
    (recipe / "recipe.yaml").write_text(re.sub(r"data: \{.*\}", data, text))
    settings = [
        "--ranks", "1", "--to", "train", "--run-dir", str(tmp_path / "run"), "reward=['rewards:wordy']",
        "train.max_steps=24", "train.eval_steps=24", "train.save_steps=24", "train.warmup_steps=0", "train.report_to=none",
        "train.global_batch_size=16", "train.per_device_train_batch_size=16", "train.max_completion_length=8",
        "train.learning_rate=1e-2", "train.temperature=0.2",
    ]  # fmt: skip
    # A low temperature: random weights have nearly equal probabilities, which otherwise move in hundreds of steps alone.
    done = run("run", recipe, *settings, stack=True)
    assert done.code == 0, done.err
    (alarm,) = events(tmp_path / "run", "alarm")
    assert alarm["step"] == 24 and alarm["message"] in done.err
    last = events(tmp_path / "run", "eval")[-1]
    assert last["eval_reward"] == last["eval_reward_difference"] == 0.0


def test_differences_are_of_the_same_prompts() -> None:
    assert paired({1: 0.0, 2: 1.0, 3: 9.0}, {2: 1.0, 1: 0.5}) == pytest.approx((0.25, 0.25))


def test_the_alarm_is_for_a_reward_that_rises_alone() -> None:
    rises, flat = [0.1, 0.12, 0.1, 0.5, 0.6, 0.7, 0.9, 0.92], [0.5, 0.4, 0.6, 0.5, 0.5, 0.4, 0.6, 0.5]
    assert find_alarm(rises, 0.0, 0.05) and find_alarm(rises, -0.2, 0.05)
    assert find_alarm(rises, 0.3, 0.05) is None and find_alarm(flat, 0.0, 0.05) is None
    assert find_alarm(rises[:4], 0.0, 0.05) is None and find_alarm(rises, None, None) is None
