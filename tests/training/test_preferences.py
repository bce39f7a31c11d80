"""Preferences: the same losses as TRL's own trainer, and the same run after a kill, on every distribution that is carried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from clustertune.chain import export_trained
from clustertune.training.build import fit_to_device
from tests.command import events, run
from tests.conftest import once
from tests.training.benches import Bench, digests, make_bench, output_of
from tests.training.forked import Forge

pytestmark = pytest.mark.timeout(900)

SLICED = "fsdp2-slices"
"""Each rank reads its own rows, of the reference too."""
SAME = [
    "train.max_steps=4", "train.save_steps=2", "train.eval_steps=4", "train.max_length=96", "train.eval_on_start=false",
    "train.report_to=none", "train.warmup_steps=0", "data.eval_fraction=0.08", "train.per_device_eval_batch_size=2",
    "train.per_device_train_batch_size=1", "train.global_batch_size=4",
]  # fmt: skip
"""Seven pairs are evaluated, four in a step of two ranks: the last batch is not full, and not the same on both."""
FULL = ["lora=null", "train.learning_rate=1e-4"]
EXACT = ["train.disable_dropout=true"]
HALF = ["train.bf16=true"]
NAMES = {"loss": "loss", "grad_norm": "grad_norm", "reward_accuracy": "rewards/accuracies", "reward_margin": "rewards/margins"}


def job(*values: Any, id: str) -> Any:
    """A case that is left to ``make test-jobs``."""
    return pytest.param(*values, id=id, marks=pytest.mark.jobs)


@pytest.fixture(scope="session")
def bench(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    def make(folder: Path) -> None:
        done = run("run", "recipes/tiny-dpo", "--run-dir", folder / "run", "--to", "prepare", *SAME, stack=True)
        assert done.code == 0, done.err

    prepared = once(tmp_path_factory, "preferences", make) / "run"
    return make_bench(forge, tmp_path_factory.mktemp("dpo"), SAME, prepared=prepared, recipe="tiny-dpo")


def trl(path: Path, folder: Path) -> tuple[list[list[float]], dict[str, float]]:
    """TRL's own trainer on the conversations of a run, in this process: figures of each step, and of the evaluation."""
    torch.set_num_threads(1)
    base, recipe = next((path / "model").iterdir()), json.loads((path / "run.json").read_bytes())["recipe"]
    rows = {split: datasets.Dataset.from_json(str(path / "data" / f"{split}.jsonl")) for split in ("train", "eval")}
    values = fit_to_device(recipe["train_args"], cuda=False)[0] | {"save_strategy": "no"}
    own = {key: value for key, value in values.items() if key in DPOConfig.__dataclass_fields__}
    trainer = DPOTrainer(
        model=str(base),
        args=DPOConfig(output_dir=str(folder), **own),
        train_dataset=rows["train"].remove_columns("source"),
        eval_dataset=rows["eval"].remove_columns("source"),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(**recipe["lora"]) if recipe["lora"] else None,
    )
    trainer.train()
    logs = trainer.state.log_history
    (evaluated,) = (log for log in logs if "eval_loss" in log)
    return [[log[key] for key in NAMES.values()] for log in logs if "loss" in log], evaluated


def curve(path: Path) -> list[list[float]]:
    return [[event[key] for key in NAMES] for event in events(path, "step")]


@pytest.mark.parametrize("more", [pytest.param(EXACT, id="lora"), job(FULL, id="full")])
def test_one_process_computes_what_trl_computes(more: list[str], bench: Bench, tmp_path: Path) -> None:
    """The same rows, truncated ones among them, in the same order; float32."""
    path = bench.train("alone", *more, "train.per_device_train_batch_size=2", "train.per_device_eval_batch_size=7")
    steps, evaluated = trl(path, tmp_path)
    assert len(steps) == 4
    for ours, theirs in zip(curve(path), steps, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    (found,) = events(path, "eval")
    assert found["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-6)
    assert found["eval_reward_margin"] == pytest.approx(evaluated["eval_rewards/margins"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        job("ddp", EXACT, id="ddp-lora"),
        job("ddp", FULL, id="ddp-full"),
        job(SLICED, EXACT, id="fsdp2-lora"),
        job(SLICED, FULL, id="fsdp2-full"),
        job("fsdp2", FULL, id="fsdp2-full-read-whole"),
    ],
)
def test_two_ranks_compute_what_one_does(strategy: str, more: list[str], bench: Bench) -> None:
    """The evaluation too, of which each pair counts once though the ranks have different numbers of them."""
    one, two = bench.alone(*more), bench.train(strategy, *more)
    for ours, alone in zip(curve(two), curve(one), strict=True):
        assert ours == pytest.approx(alone, rel=2e-4, abs=2e-6)
    names = ("eval_loss", "eval_reward_accuracy", "eval_reward_margin", "eval_token_accuracy")
    (alone,), (ours,) = (events(path, "eval") for path in (one, two))
    assert [ours[name] for name in names] == pytest.approx([alone[name] for name in names], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        job(SLICED, [*HALF, "lora.lora_dropout=0.1", "activation_checkpointing.ratio=0.5"], id="fsdp2-lora-dropout"),
        job(SLICED, [*FULL, *HALF], id="fsdp2-full"),
        job("ddp", [], id="ddp-lora"),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(strategy: str, more: list[str], bench: Bench) -> None:
    """The reference is the base again, though the policy has left it: another one would give another loss."""
    more = [*more, "train.save_steps=1"]  # that of the step before is whole by then
    whole, killed = bench.train(strategy, *more), bench.make(strategy, *more)
    codes = bench.go(killed, breaks="killed")
    assert -9 in codes and 0 not in codes, output_of(killed)
    bench.end(killed)
    assert [event["step"] > 0 for event in events(killed, "start")] == [False, True]
    assert digests(killed) == digests(whole)
    names = ("eval_loss", "eval_reward_margin")
    assert [events(killed, "eval")[-1][n] for n in names] == [events(whole, "eval")[-1][n] for n in names]
    assert curve(whole)[0][0] == pytest.approx(0.693147, abs=1e-5) and curve(whole)[-1][0] != curve(whole)[0][0]
    assert Path(export_trained(killed)["out"]).is_dir()
