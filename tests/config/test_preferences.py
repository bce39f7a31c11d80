"""``trainer: dpo``: the keys that it takes, what it refuses by name before the queue, and what the plan counts of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertune.config.library_facts import facts
from clustertune.config.resolve import resolve
from clustertune.config.resolved import Resolved
from clustertune.errors import UserError
from tests.command import run
from tests.tree import REPO

PAIRS = ["trainer=dpo", "data.format=preference", "train.packing=null", "train.assistant_only_loss=null"]
REFUSED = {
    "packing": "true", "completion_only_loss": "true", "padding_free": "true", "precompute_ref_log_probs": "true",
    "sync_ref_model": "true", "label_smoothing_factor": "0.1", "truncation_mode": "keep_end", "loss_type": "[sigmoids]",
    "loss_weights": "[1.0, 0.5]", "f_divergence_type": "kl", "beta": "0", "ld_alpha": "1.5",
}  # fmt: skip
"""Key of ``train`` -> value."""
TOGETHER = {"label_smoothing": ["loss_type=[exo_pair]"], "use_weighting": ["use_weighting=true", "loss_type=[aot]"]}


def test_what_trl_refuses_in_a_rank_is_refused_before() -> None:
    for key, words in {**{key: [f"{key}={value}"] for key, value in REFUSED.items()}, **TOGETHER}.items():
        with pytest.raises(UserError) as caught:
            resolve("tiny-dpo", [f"train.{word}" for word in words])
        assert [problem.key for problem in caught.value.problems] == [f"train.{key}"]


@pytest.mark.parametrize(
    ("recipe", "more", "key"),
    [
        ("llama70b-zero3-offload", [], "distributed_type"),
        ("llama70b-tp-fsdp2", [], "parallelism_config.parallelism_config_tp_size"),
        ("llama8b-longcontext-32k", [], "parallelism_config.parallelism_config_cp_size"),
        ("llama405b-oasst2", ["accelerate=accelerate-fsdp1.yaml", "data.language=null"], "distributed_type"),
        ("llama70b-megatron", [], "trainer"),
    ],
)
def test_a_distribution_without_a_reference_is_refused(recipe: str, more: list[str], key: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(recipe, [*PAIRS, *more])
    assert [problem.key for problem in caught.value.problems] == [key]


def test_rows_and_trainer_fit_together() -> None:
    for recipe, given in (
        ("tiny-dpo", "trainer=sft"), ("tiny-dpo", "data.format=messages"), ("tiny-oasst2", "data.format=preference"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            resolve(recipe, [given])
        assert "data.format" in {problem.key for problem in caught.value.problems}


def test_each_loss_of_trl_is_taken() -> None:
    for loss in facts("trl")["dpo"]["loss_type"]:
        smoothed = ["train.label_smoothing=0.01"] if loss == "exo_pair" else []
        assert resolve("tiny-dpo", [f"train.loss_type=[{loss}]", *smoothed]).train_args["loss_type"] == [loss]
    with pytest.raises(UserError, match="aot_unpaired"):
        resolve("tiny-dpo", ["train.loss_type=[aot_unpaired]", "train.f_divergence_type=forward_kl"])


def test_it_is_recorded_and_another_run() -> None:
    """The same keys under the other trainer would resume from its checkpoints."""
    made = resolve("tiny-dpo")
    again = Resolved.from_dict(json.loads(json.dumps(made.as_dict())))
    assert again.is_dpo and again.fingerprint() == made.fingerprint()
    other = made.as_dict()
    other["recipe"]["trainer"] = "sft"
    assert Resolved.from_dict(other).fingerprint() != made.fingerprint()
    assert any("lora_dropout" in text for text in resolve("tiny-dpo", ["train.disable_dropout=true"]).warnings)
    assert not any("lora_dropout" in text for text in made.warnings)


def test_the_plan_counts_both_answers_and_the_reference() -> None:
    """Of full training a second model in the type that it is loaded in, sharded; of LoRA none, and a second forward pass."""

    def plan(*more: str) -> dict[str, float]:
        words = ("slurm.nodes=4", "train.per_device_train_batch_size=1", "accelerate.fsdp_config.fsdp_offload_params=false")
        done = run("plan", "llama70b-fsdp2", *words, *more, "--gpus", "4x8xh200-sxm", "--json")
        assert done.code == 0, done.err
        body = json.loads(done.out)
        return {**body["memory_parts_gib"], "compute": body["step_parts_s"]["compute"], "tokens": body["prepare_tokens"]}

    one, pairs = plan("train.packing=false"), plan(*PAIRS)
    assert pairs["tokens"] == 2 * one["tokens"]
    # float32 (nothing else is said there) over 32 ranks, and the head that stays gathered.
    assert "reference" not in one and 70.6e9 * 4 / 32 / 2**30 < pairs["reference"] < 1.3 * 70.6e9 * 4 / 32 / 2**30
    # A forward pass of three beside backward and recomputation: 5 of each of two sequences for 4 of one.
    assert 2.2 < pairs["compute"] / one["compute"] < 3
    lora = ["lora={target_modules: [q_proj]}", "train.model_init_kwargs.dtype=bfloat16"]
    adapter, alone = plan(*PAIRS, *lora), plan("train.packing=false", *lora)
    assert "reference" not in adapter and 2.2 < adapter["compute"] / alone["compute"] < 3.2


def test_a_benchmark_is_refused(tmp_path: Path) -> None:
    done = run("bench", str(REPO / "recipes" / "tiny-dpo"), "--steps", "2", "--out", tmp_path / "out")
    assert done.code == 2 and "trainer" in done.err
