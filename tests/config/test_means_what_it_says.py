"""Values that the libraries take and that do something else than they say, or nothing: refused before the queue."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from clustertune.config.resolve import resolve
from clustertune.errors import UserError
from clustertune.training import base_model
from tests.command import REPO, run

REFUSED = (
    "lora.rank_pattern={zzz: 4}", "lora.rank_pattern={q_proj: 4.5}", "lora.rank_pattern={q_proj: 0}",
    "lora.rank_pattern={'(': 4}", "lora.alpha_pattern={zzz: 4}", "lora.alpha_pattern={q_proj: -1}", "train.warmup_steps=20",
    "data.eval_fraction=0.999999", "train.adam_epsilon=10", "train.optim_args=foo=bar", "train.optim_args=foo",
    "train.lr_scheduler_kwargs={foo: 1}", "train.log_level=zzz", "train.model_init_kwargs=sdpa",
    "accelerate.dynamo_config.dynamo_backend=zzz", "accelerate.deepspeed_config.deepspeed_multinode_launcher=true",
    "slurm.time=00:00:00", "slurm.time='0'", "slurm.time=01:60:00", "slurm.time=1-24", "slurm.time=999-00:00:00",
)  # fmt: skip
TAKEN = (
    "lora.rank_pattern={q_proj: 4}", "lora.rank_pattern={'layers.[01].self_attn.q_proj': 4}",
    "lora.alpha_pattern={self_attn.v_proj: 0.5}", "train.warmup_steps=10", "train.warmup_steps=0.5",
    "train.lr_scheduler_kwargs={num_cycles: 0.5}", "train.log_level=warning",
    "accelerate.dynamo_config.dynamo_backend=INDUCTOR", "accelerate.dynamo_config.dynamo_backend=no", "slurm.time='90'",
    "slurm.time=36:00:00", "slurm.time=2-12",
)  # fmt: skip


def test_refused_with_its_key_or_taken() -> None:
    for override in REFUSED:
        with pytest.raises(UserError) as raised:
            resolve("tiny-oasst2", ["train.max_steps=10", override])
        assert {problem.key for problem in raised.value.problems} == {override.split("=", 1)[0]}
    for override in TAKEN:
        resolve("tiny-oasst2", ["train.max_steps=10", override])


def test_arguments_belong_to_their_optimizer_and_schedule() -> None:
    for taken in (
        ["train.optim=sgd", "train.optim_args='momentum=0.9, nesterov=true'"],
        ["train.optim=rmsprop_bnb", "train.optim_args=anything=1"],
        ["train.lr_scheduler_type=cosine_with_min_lr", "train.lr_scheduler_kwargs={min_lr_rate: 0.1}"],
    ):
        resolve("tiny-oasst2", taken)
    for refused in (
        ["train.optim=sgd", "train.optim_args=betas=0.9"],
        ["train.lr_scheduler_type=linear", "train.lr_scheduler_kwargs={num_cycles: 1}"],
    ):
        with pytest.raises(UserError):
            resolve("tiny-oasst2", refused)


def test_a_dropout_that_hides_the_input_is_warned_of() -> None:
    assert any("lora_dropout" in text for text in resolve("tiny-oasst2", ["lora.lora_dropout=0.999"]).warnings)
    assert not any("lora_dropout" in text for text in resolve("tiny-oasst2", ["lora.lora_dropout=0.1"]).warnings)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_base_of_other_sizes_is_refused(tmp_path: Path, part: str | None) -> None:
    resolved = resolve("tiny-oasst2")
    for hidden in (resolved.architecture["hidden_size"], 4096):
        sizes = {"hidden_size": hidden, "vocab_size": resolved.architecture["vocab_size"]}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **({part: sizes} if part else sizes)}))
        if hidden == 4096:
            with pytest.raises(UserError) as raised:
                base_model.check(str(tmp_path), None, resolved)
            assert "4096" in str(raised.value) and "model.json" in str(raised.value)
        else:
            base_model.check(str(tmp_path), None, resolved)


def test_a_base_that_lies_here_is_compared_before_the_queue(tmp_path: Path) -> None:
    recipes, base = tmp_path / "recipes", tmp_path / "base"
    for name in ("_base", "tiny-oasst2"):
        shutil.copytree(REPO / "recipes" / name, recipes / name)
    recipe = recipes / "tiny-oasst2" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("weights: random", f"path: {base}"))
    base.mkdir()
    config = json.loads((recipes / "tiny-oasst2" / "model.json").read_text())
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<pad>": 0, "<eos>": 1}}}))
    (base / "model.safetensors").write_bytes(bytes(8))
    right = ["train.pad_token=<pad>", "train.eos_token=<eos>"]
    for change, given, key in (
        ({}, right, None),
        ({"num_hidden_layers": 5}, right, "model.json"),
        ({}, ["train.pad_token=<zzz>"], "train.pad_token"),
        ({}, ["train.eos_token=<zzz>"], "train.eos_token"),
    ):
        (base / "config.json").write_text(json.dumps(config | change))
        done = run("submit", recipe.parent, "--dry-run", *given)
        assert (done.code, key is None or key in done.err) == (2 if key else 0, True), done.err


def test_a_warmup_that_outlasts_the_epochs_is_warned_of() -> None:
    for steps, warned in ((100_000, True), (0.03, False), (10, False)):
        done = run("submit", "llama8b-lima", "--cluster", "dgx-h100", "--dry-run", f"train.warmup_steps={steps}")
        assert ("train.warmup_steps" in done.err) is warned, done.err


def test_scores_of_tasks_that_are_not_evaluated() -> None:
    """A mistyped task or metric; the parts of a group and tasks of other names are lm-eval's to know."""
    for override, message in (
        ("eval.pass_mark={ifevla: {prompt_level_strict_acc: 0.5}}", "did you mean ifeval"),
        ("eval.pass_mark={ifeval: {prompt_strict_acc: 0.5, x: 0.5}}", "no such metric"),
        ("expect.tasks={ifeval: {prompt_level_strct_acc: 0.5}}", "did you mean prompt_level_strict_acc"),
    ):
        with pytest.raises(UserError, match=message):
            resolve("tiny-oasst2", [override])
    resolve("tiny-oasst2", ["eval.tasks=[mmlu]", "eval.pass_mark={mmlu_law: {acc: 0.5}, gsm8k: {exact_match: 0.5}}"])
