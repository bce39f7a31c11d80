"""``clustertune plan --model``: what a model costs does not hang on whether its commit on the Hub is known here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertune.launch.serving import evaluation
from clustertune.resolve.models import known_models
from clustertune.resolve.resolve import resolve
from tests.conftest import REPO
from tests.launch.test_serving import on
from tests.plan.test_command import answer, refused
from tests.recipe.architectures import ARCHITECTURES
from tests.recipe.test_parameters import build, stored

CONVERSATIONS = REPO / "recipes" / "tiny-oasst2" / "conversations.jsonl"
TWINS = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Llama-3.3-70B",
    "Qwen/Qwen2.5-72B-Instruct": "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B-Base",
    "Qwen/Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B-Base",
    "google/gemma-3-12b-it": "google/gemma-3-12b-pt",
    "mistralai/Mixtral-8x7B-v0.1": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistralai/Mistral-Small-24B-Base-2501",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M",
    "allenai/OLMo-2-1124-7B-Instruct": "allenai/OLMo-2-1124-7B",
}


def planned(model: str, *more: str) -> dict[str, Any]:
    return answer("--model", model, "--data", CONVERSATIONS, "--gpus", "1x8xh200-sxm", *more)


@pytest.mark.parametrize("known", TWINS)
def test_a_base_model_costs_what_its_instruct_twin_does(known: str) -> None:
    """One of the two has a commit here, the other has not."""
    assert known in known_models() and TWINS[known] not in known_models()
    one, other = planned(known), planned(TWINS[known])
    assert one["total"]["cost"]["on_demand"] > 0
    assert {**one["total"], "stages": None} == {**other["total"], "stages": None}
    assert one["total"]["stages"] == other["total"]["stages"] and one["evaluation"] == other["evaluation"]
    assert (one["step_s"], one["needed_gib_per_gpu"]) == (other["step_s"], other["needed_gib_per_gpu"])


def test_random_weights_are_served_like_others() -> None:
    """Large ones at least; a small model that the run makes itself is answered in its own process, and so is one that no
    server holds: each with its own reason."""
    cluster = on("rno-rtxpro6000", vllm="/images/vllm.sif")
    published = evaluation(resolve("llama70b-lora"), cluster)
    random = evaluation(resolve("llama70b-lora", ["model.weights=random", "model.revision=null"]), cluster)
    assert random == published and published.backend == "vllm"
    small = evaluation(resolve("tiny-oasst2"), cluster)
    assert small.backend == "hf" and "random" in small.why
    large = evaluation(resolve("llama405b-oasst2"), on("rno-rtxpro6000", "l4", vllm="/images/vllm.sif"))
    assert large.backend == "hf" and "too large" in large.why and "small" not in large.why
    tiny = evaluation(resolve("llama70b-lora", tiny=True), cluster)
    assert tiny.backend == "hf" and "--tiny" in tiny.why


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_act": "swigluu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "dinamic", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "lama3"}}}, "rope_parameters"),
    ],
)
def test_names_that_transformers_does_not_know(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    """A config.json with them is refused with file and key, before it has a price; as it was published it has one."""
    body = dict(ARCHITECTURES["Qwen/Qwen3-8B"])
    file = tmp_path / "own-8b" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(body | change))
    text = refused("--model", file, "--gpus", "1x1xh100-sxm")
    assert str(file) in text and f"{key}: " in text
    file.write_text(json.dumps(body))
    assert answer("--model", file, "--gpus", "1x1xh100-sxm")["fits"]


NEWEST = ("olmo3", "seed_oss", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "glm4_moe_lite", "glm_moe_dsa", "glm")


@pytest.mark.parametrize("kind", NEWEST)
def test_newest_families_are_planned(kind: str, tmp_path: Path) -> None:
    """By their config.json, with as many parameters as transformers makes of it."""
    (body,) = (one for one in ARCHITECTURES.values() if one["model_type"] == kind)
    file = tmp_path / "own" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(body))
    planned = answer("--model", file, "--gpus", "32x8xh200-sxm", "--data", CONVERSATIONS)
    assert planned["parameters"] == sum(tensor.numel() for tensor in stored(build(body)).values())
    assert planned["fits"] and planned["step_s"] > 0 and planned["total"]["gpu_hours"] > 0
