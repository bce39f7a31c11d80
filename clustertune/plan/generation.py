"""The model's own answers, made on the GPUs that train: seconds, and what is held meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clustertune.plan.constants import BYTES, SECONDS, Term
from clustertune.plan.machine import PlanMachine
from clustertune.plan.strategy import HALF, ModelShape, Rollouts

BANDWIDTH_SHARE = 0.2
"""Of the memory bandwidth while tokens are generated. Published: 1,290 output tokens/s of a 405B model in FP8 on 8 MI325X at 50
sequences (Vultr's vLLM cookbook, 2026) are 22 %; 75 tokens/s of Llama 3.1 8B in bfloat16 on one A100 40GB are 77 %
(https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on)."""
LAYER_S = 1e-3
"""A decoder layer of a step in transformers' eager mode, where its kernels' start and not the memory decides; assumed."""
NOTE = (
    "generation: each token reads the weights and half of the cache at {share:.0%} of the memory's bandwidth, until the "
    "longest answer, taken to be max_completion_length; the rewards' own seconds are not counted"
)
VLLM = "vLLM's start, its waking and the copies of the weights into it are not counted; it takes its share of the GPU's memory"


def cache_bytes(shape: ModelShape) -> float:
    """Of one token's keys and values in all layers, 16 bits each."""
    kinds = shape.counted.layers
    return HALF * sum(kind.count * kind.attention.kv_heads * (kind.attention.qk_dim + kind.attention.v_dim) for kind in kinds)


def seconds(shape: ModelShape, machine: PlanMachine, answers: int, rollouts: Rollouts) -> tuple[float, Mapping[str, Any]]:
    """Of ``answers`` that one rank generates together, and the numbers that it follows from."""
    weights, each = HALF * shape.parameters, cache_bytes(shape) * (rollouts.prompt + rollouts.completion / 2)
    token = (weights + answers * each) / (machine.hbm_bytes_per_s * BANDWIDTH_SHARE)
    if not rollouts.vllm:
        token = max(token, shape.layers * LAYER_S)
    values = {"tokens": rollouts.completion, "answers": answers, "weights": weights / 1e9, "token": token, "cache": each / 1e9}
    return rollouts.completion * token, values


def of_step(shape: ModelShape, machine: PlanMachine) -> Term | None:
    """What an optimizer step waits for its answers; None where the model makes none."""
    rollouts = shape.strategy.rollouts
    if rollouts is None:
        return None
    whole, values = seconds(shape, machine, rollouts.answers, rollouts)
    text = "{tokens} tokens x {token} s ({answers} answers x {cache} GB of cache and {weights} GB of weights) / {steps} steps"
    return Term("generation", whole / rollouts.steps, SECONDS, text, {**values, "steps": rollouts.steps})


def held(shape: ModelShape) -> list[Term]:
    """Beside what rests: the gathered weights, and the cache of all answers at their longest. Of vLLM nothing: see ``NOTE``."""
    rollouts = shape.strategy.rollouts
    if rollouts is None or rollouts.vllm:
        return []
    gathered = shape.gathered if shape.strategy.weight_shards > 1 else 0.0
    each = cache_bytes(shape) * (rollouts.prompt + rollouts.completion)
    values = {"answers": rollouts.answers, "tokens": rollouts.prompt + rollouts.completion, "each": cache_bytes(shape)}
    return [
        Term("gathered layers", gathered, BYTES, "all weights, gathered on each GPU", {}),
        Term("cache of the answers", rollouts.answers * each, BYTES, "{answers} answers x {tokens} tokens x {each} B", values),
    ]
