"""Answers that are generated on the GPUs that train: their seconds and their memory."""

from __future__ import annotations

from typing import Any

import pytest

from clustertune.cluster.load import load_cluster
from clustertune.errors import UserError
from clustertune.launch.bill import bill
from clustertune.launch.shape import size_problems, train_shape
from clustertune.plan.decoding import BANDWIDTH_SHARE, TP_LAYER_S
from clustertune.plan.explanation import why
from clustertune.plan.generation_cost import cache_bytes
from clustertune.plan.machine import machine
from clustertune.plan.predict import SPREAD, Plan, deviations, make_plan
from clustertune.resolve.resolve import resolve

RECIPE = "qwen3-8b-ifeval-grpo"


def planned(*overrides: str) -> Plan:
    return make_plan(resolve(RECIPE, list(overrides)), machine(load_cluster("dgx-h100")))


@pytest.fixture(scope="module")
def plain() -> Plan:
    return planned("train.use_vllm=false")


def test_the_cache_of_a_token_is_its_keys_and_values() -> None:
    """Qwen3 8B: 36 layers, 8 heads of 128, two of them, 16 bits (its config.json)."""
    assert cache_bytes(planned().shape) == 36 * 8 * 128 * 2 * 2


def test_a_step_reads_the_weights_and_the_cache_and_prompts_take_products() -> None:
    """Where no answer ends by itself: 512 steps, each reads the weights and on average half of the answers' cache."""
    found = planned("plan.answer_tokens=1000000")
    read = 512 * (2 * found.shape.parameters + 16 * cache_bytes(found.shape) * (512 + 256))
    products = 16 * 1024 * 2 * found.shape.counted.active / (found.machine.peak_flops * found.constants.gemm("hopper"))
    assert seconds(found) == pytest.approx(read / (found.machine.hbm_bytes_per_s * BANDWIDTH_SHARE) + products, rel=0.01)
    assert found.parts()["generation"] == seconds(found) < found.step.seconds


def test_shorter_answers_cost_less_and_their_mean_is_the_recipe_s() -> None:
    """``plan.answer_tokens``, said in the notes; without it half of the most is taken. The range holds both."""
    assumed, short, long = planned(), planned("plan.answer_tokens=64"), planned("plan.answer_tokens=4000")
    assert seconds(short) < seconds(assumed) < seconds(long)
    assert any("answers of 64 tokens on average, 512 at most (plan.answer_tokens)" in note for note in short.notes)
    assert any("assumed: 0.5 of the most" in note for note in assumed.notes)
    for found in (assumed, planned("train.use_vllm=false")):
        lines = why(found, "generation")
        assert any(line.startswith("prompts:") for line in lines) and any(line.startswith("answers:") for line in lines)
        assert any("s where all reach 512 tokens" in line for line in lines)
    share = seconds(assumed) / assumed.step.seconds
    (_, links) = deviations(assumed.shape, assumed.machine, assumed.constants, assumed.step)
    assert links >= SPREAD["answers"] * share > 0.1


def seconds(found: Any) -> float:
    return float(found.step.generation.value)


def test_transformers_is_bound_by_its_layers(plain: Plan) -> None:
    assert 0.95 * 512 * 36 * 1e-3 < seconds(plain) < 1.2 * 512 * 36 * 1e-3 and seconds(plain) > seconds(planned())


def test_steps_that_share_a_generation_share_its_seconds(plain: Plan) -> None:
    shared = planned("train.use_vllm=false", "train.num_iterations=2")
    assert seconds(shared) == pytest.approx(seconds(plain) / 2)
    assert shared.schedule.steps == 2 * (plain.schedule.steps or 0) == 2 * 10 * (96 // 16)


def test_memory_while_answers_are_generated(plain: Plan) -> None:
    """The weights of all ranks, and the cache of 16 answers at their longest; vLLM has its own."""
    (moment,) = (moment for moment in plain.moments if moment.name.startswith("generation"))
    parts = {term.name: term.value for term in moment.parts}
    assert parts["cache of the answers"] == 16 * 1024 * cache_bytes(plain.shape)
    assert parts["gathered layers"] == pytest.approx(2 * plain.shape.parameters, rel=0.01)
    assert not any(moment.name.startswith("generation") for moment in planned().moments)


def test_vllm_takes_its_share_of_the_gpu() -> None:
    assert planned().fits and not planned("train.vllm_gpu_memory_utilization=0.9").fits


def test_the_reference_costs_a_forward_pass_where_beta_is_above_0(plain: Plan) -> None:
    alone = planned("train.use_vllm=false", "train.beta=0")
    assert alone.step.seconds < plain.step.seconds
    assert planned("lora=null", "train.beta=0.01").strategy.reference_bytes > 0 == alone.strategy.reference_bytes


def beside(*overrides: str) -> Plan:
    return make_plan(resolve("llama70b-ifeval-grpo", list(overrides)), machine(load_cluster("dgx-h100")))


def test_servers_read_their_share_and_take_nothing_of_the_ranks() -> None:
    """128 answers on one server of 8 GPUs: each token reads an eighth of the weights and of half of the cache."""
    found = beside("plan.answer_tokens=1000000")
    read = 512 * (2 * found.shape.parameters + 128 * cache_bytes(found.shape) * (512 + 256)) / 8
    products = 128 * 1024 * 2 * found.shape.counted.active / 8 / (found.machine.peak_flops * found.constants.gemm("hopper"))
    sums = 512 * 80 * TP_LAYER_S + 128 * 1024 * 80 * 4 * 7 / 8 * 8192 * 2 / found.machine.intra.bytes_per_s
    assert seconds(found) == pytest.approx(read / (found.machine.hbm_bytes_per_s * BANDWIDTH_SHARE) + products + sums, rel=0.01)
    assert not any(term.name == "cache of the answers" for moment in found.moments for term in moment.parts)
    assert found.gpus == 24 and any("1 server: 16.4 GiB" in note for note in found.notes)


def test_servers_that_score_take_nothing_of_the_ranks_and_are_paid() -> None:
    """Supervised fine-tuning: as long a step, the GPUs of one node more, and room for the tasks' longest prompts."""
    cluster, scored = load_cluster("dgx-h100"), "eval.during={every: 10, limit: 16}"
    beside, between = (
        make_plan(resolve("llama70b-lora", [scored, *servers]), machine(cluster))
        for servers in (["servers.tensor_parallel_size=4"], [])
    )
    assert beside.step.seconds == between.step.seconds and beside.needed == between.needed
    assert (beside.gpus, between.gpus) == (16, 8) and any("2 servers: 32.9 GiB" in note for note in beside.notes)
    paid, stopped = bill(beside, cluster), bill(between, cluster)
    waits, stands = paid.seconds["scores while training"], stopped.seconds["scores while training"]
    assert waits is not None and stands is not None and 0 < waits < stands
    assert beside.hours is not None and paid.training == pytest.approx(16 * (beside.hours + waits / 3600))
    assert train_shape(beside.resolved, cluster).nodes == 2
    with pytest.raises(UserError, match="16,384 tokens"):
        make_plan(resolve("llama70b-lora", [scored, "servers.nodes=1"]), machine(cluster))
    (problem,) = size_problems(resolve("llama70b-lora", [scored, "servers.tensor_parallel_size=16"]), cluster)
    assert problem.key == "servers.tensor_parallel_size"


def test_servers_that_do_not_hold_the_model_are_refused() -> None:
    with pytest.raises(UserError, match="131 GiB of weights"):
        beside("servers.tensor_parallel_size=1")
    with pytest.raises(UserError, match="1 and 32 of servers"):
        beside("servers.nodes=32", "slurm.nodes=1")
