"""``clustertune plan --model``: what a model costs does not hang on whether its commit on the Hub is known here."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.launch.serving import evaluation
from clustertune.resolve.models import known_models
from clustertune.resolve.resolve import resolve
from tests.conftest import REPO
from tests.launch.test_serving import on
from tests.plan.test_command import answer

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
