"""Recipes with ``trainer: grpo``: what is refused before the queue, and what a run of another reward is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.launch.serving import beside_serving, while_training
from clustertune.resolve.resolve import resolve
from tests.command import REPO
from tests.refusal import problems


def refused(*overrides: str, recipe: str = "tiny-grpo") -> list[str]:
    return [str(problem.key) for problem in problems(resolve, recipe, list(overrides))]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["reward=null"], "reward"),
        (["reward=[ifevals]"], "reward.0"),
        (["reward=[{function: regex, pattern: '('}]"], "reward.0"),
        (["reward=[length]"], "reward.0"),
        (["reward=[ifeval, ifeval]"], "reward"),
        (["rollout=servers", "lora=null"], "rollout"),
        (["rollout=servers", "train.use_vllm=true"], "train.use_vllm"),
        (["train.vllm_mode=server"], "train.vllm_mode"),
        (["train.vllm_server_host=a"], "train.vllm_server_host"),
        (["train.max_length=64"], "train.max_length"),
        (["train.max_completion_length=4000"], "train.max_completion_length"),
        (["data.format=messages"], "data.format"),
        (["accelerate.distributed_type=DEEPSPEED", "accelerate.fsdp_config=null"], "distributed_type"),
    ],
)
def test_what_trl_or_the_ranks_would_refuse_is_refused_here(overrides: list[str], key: str) -> None:
    assert any(found.endswith(key) for found in refused(*overrides)), refused(*overrides)


def test_other_trainers_take_no_reward() -> None:
    assert "reward" in refused("reward=[ifeval]", recipe="tiny-oasst2")
    assert {"rollout", "servers"} <= {*refused("rollout=servers", "servers.nodes=2", recipe="tiny-oasst2")}
    assert "data.format" in refused("data.format=prompt", recipe="tiny-oasst2")


def test_servers_are_nodes_beside_those_that_train_and_answer_otherwise() -> None:
    apart, plain = resolve("llama70b-ifeval-grpo"), resolve("llama70b-ifeval-grpo", ["rollout=colocate"])
    assert (apart.world_size, apart.recipe.server_nodes, plain.recipe.server_nodes) == (16, 1, 0)
    assert apart.fingerprint() != plain.fingerprint()
    assert resolve("llama70b-ifeval-grpo", tiny=True).recipe.rollout == "colocate"


def test_servers_beside_a_trainer_score_for_nothing() -> None:
    """No time, as the training goes on, and longer prompts than those of the training; ``hf`` has its GPUs answer instead."""
    scored, machine = ["eval.during={every: 5}"], load_cluster(None)
    beside = resolve("llama70b-ifeval-grpo", scored)
    found = while_training(beside, machine, 20, 100.0)
    assert found is not None and (found.times, found.seconds) == (4, 0.0)
    assert beside_serving(beside, 8).max_model_len > beside_serving(resolve("llama70b-ifeval-grpo"), 8).max_model_len
    assert beside.recipe.scores_beside
    assert not resolve("llama70b-ifeval-grpo", [*scored, "eval.backend=hf"]).recipe.scores_beside
    assert not resolve("llama70b-ifeval-grpo", [*scored, "rollout=colocate", "servers=null"]).recipe.scores_beside


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["lora=null"], "eval.during"),
        (["eval.during.every=milestone"], "eval.during.every"),
        (["eval.during.tasks=[gsm8k]"], "eval"),
        (["eval.during.every=0"], "eval.during.every"),
        (["servers.nodes=1", "lora=null"], "eval.during"),
        (["servers.nodes=1", "eval.backend=hf"], "eval.backend"),
        (["servers.nodes=1", "lora.modules_to_save=[lm_head]"], "lora.modules_to_save"),
    ],
)
def test_scores_while_training_that_cannot_be_are_refused(overrides: list[str], key: str) -> None:
    assert refused("eval.during.every=5", *overrides, recipe="tiny-oasst2") == [key]
    assert resolve("tiny-oasst2", ["eval.during={every: milestone}", "save.milestones=[4]"]).recipe.eval.during is not None


def test_the_run_keeps_the_text_of_its_own_rewards(tmp_path: Path) -> None:
    """Another text is another run; a function that is not there, and what is no Python, are found here."""
    for name in ("_base", "tiny-grpo", "tiny-oasst2"):
        shutil.copytree(REPO / "recipes" / name, tmp_path / name)
    folder, file = tmp_path / "tiny-grpo", tmp_path / "tiny-grpo" / "rewards.py"
    before = resolve(folder)
    assert before.reward_code == {"rewards": file.read_text()}
    assert type(before).from_dict(before.as_dict()) == before
    file.write_text(file.read_text() + "\nMORE = 1\n")
    assert resolve(folder).fingerprint() != before.fingerprint()
    assert resolve(folder, ["reward=[ifeval]"]).fingerprint() != before.fingerprint()
    for text in ("def other(): ...", "def letters(:"):
        file.write_text(text)
        (problem,) = problems(resolve, folder)
        assert problem.file.startswith(f"{folder.name}/rewards.py") or str(problem.file).endswith("rewards.py")
    file.unlink()
    assert problems(resolve, folder)


def test_tiny_keeps_the_prompts_that_the_rewards_read() -> None:
    made = resolve("tiny-grpo", tiny=True)
    assert made.recipe.data.input == "prompts.jsonl" and made.reward_code and made.train_args["num_generations"] == 2
    assert not resolve("qwen3-8b-ifeval-grpo", tiny=True).train_args["use_vllm"]
