"""The model's own answers, made on the GPUs that train or by servers beside them: seconds, and what is held meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clustertune.host.system import GIB
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

GPU_SHARE = 0.9
"""vLLM's own ``--gpu-memory-utilization``."""
GPU_OVERHEAD = 5e9
"""Activations, CUDA graphs and NCCL's buffers of one GPU of a server, bytes; assumed, rounded up."""
MOST = 256
"""Sequences that a server is sent at once."""


def cache_bytes(shape: ModelShape) -> float:
    """Of one token's keys and values in all layers, 16 bits each."""
    kinds = shape.counted.layers
    return HALF * sum(kind.count * kind.attention.kv_heads * (kind.attention.qk_dim + kind.attention.v_dim) for kind in kinds)


@dataclass(frozen=True)
class BesideServer:
    """One of vLLM's servers beside a trainer."""

    count: int
    """Equal servers, on all of their nodes."""
    weights: float
    """Bytes on each of its GPUs."""
    room: float
    """Bytes for the cache on each of its GPUs; negative: the weights do not fit."""
    each: float
    """Bytes of cache of an answer at its longest, on each GPU."""
    longest: float
    """The same of the longest that it takes: vLLM does not start without room for it."""

    @property
    def answers(self) -> int:
        """That it works on at once."""
        return max(0, min(MOST, int(self.room // self.each))) if self.count else 0

    def __str__(self) -> str:
        many = f"{self.count} server{'s' if self.count != 1 else ''}"
        text = f"{many}: {self.weights / GIB:.1f} GiB of weights on each GPU, and room for {self.answers} answers"
        return f"{text} at once in {self.room / GIB:.1f} GiB"


def server_of(shape: ModelShape, machine: PlanMachine) -> BesideServer | None:
    """The servers beside the trainer; None where there are none."""
    servers = shape.strategy.servers
    if servers is None:
        return None
    weights, cache = HALF * shape.parameters / servers.gpus, cache_bytes(shape) / servers.gpus
    count = servers.nodes * (shape.strategy.ranks_per_node // servers.gpus)
    room = GPU_SHARE * machine.usable_bytes - GPU_OVERHEAD - weights
    return BesideServer(count, weights, room, cache * servers.answer, cache * servers.longest)


def find_problem(shape: ModelShape, machine: PlanMachine) -> str | None:
    """What keeps the servers from holding the model and an answer; None: nothing."""
    servers, server = shape.strategy.servers, server_of(shape, machine)
    if servers is None or server is None:
        return None
    if not server.count:
        return f"{servers.gpus} GPUs, and the job has {shape.strategy.ranks_per_node} on each node"
    if server.room >= server.longest:
        return None
    text = f"{server.weights / GIB:.0f} GiB of weights on each GPU of {machine.usable_bytes / GIB:.0f}"
    return f"{text} leave no room for a prompt and its answer of {servers.longest:,} tokens"


def _of_servers(shape: ModelShape, machine: PlanMachine, answers: int, rollouts: Rollouts, server: BesideServer) -> Any:
    """As :func:`seconds`, of the answers of all ranks: each server makes its share, as many at once as it has room for."""
    mine = math.ceil(answers * shape.strategy.data_parallel_size / server.count)
    at_once = min(mine, server.answers)
    each = server.each * (rollouts.prompt + rollouts.completion / 2) / (rollouts.prompt + rollouts.completion)
    token = (server.weights + at_once * each) / (machine.hbm_bytes_per_s * BANDWIDTH_SHARE)
    tokens = rollouts.completion * math.ceil(mine / at_once)
    values = {"tokens": tokens, "answers": at_once, "weights": server.weights / 1e9, "token": token, "cache": each / 1e9}
    return tokens * token, values


def seconds(shape: ModelShape, machine: PlanMachine, answers: int, rollouts: Rollouts) -> tuple[float, Mapping[str, Any]]:
    """Of ``answers`` that one rank generates together, and the numbers that it follows from."""
    if rollouts.by_servers and (server := server_of(shape, machine)) is not None and server.answers:
        timed: tuple[float, Mapping[str, Any]] = _of_servers(shape, machine, answers, rollouts, server)
        return timed
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
    total, values = seconds(shape, machine, rollouts.answers, rollouts)
    text = "{tokens} tokens x {token} s ({answers} answers x {cache} GB of cache and {weights} GB of weights) / {steps} steps"
    return Term("generation", total / rollouts.steps, SECONDS, text, {**values, "steps": rollouts.steps})


def held(shape: ModelShape) -> list[Term]:
    """Beside what rests: the gathered weights, and the cache of all answers at their longest. Of vLLM nothing: see ``NOTE``."""
    rollouts = shape.strategy.rollouts
    if rollouts is None or rollouts.vllm or rollouts.by_servers:
        return []
    gathered = shape.gathered if shape.strategy.weight_shards > 1 else 0.0
    each = cache_bytes(shape) * (rollouts.prompt + rollouts.completion)
    values = {"answers": rollouts.answers, "tokens": rollouts.prompt + rollouts.completion, "each": cache_bytes(shape)}
    return [
        Term("gathered layers", gathered, BYTES, "all weights, gathered on each GPU", {}),
        Term("cache of the answers", rollouts.answers * each, BYTES, "{answers} answers x {tokens} tokens x {each} B", values),
    ]
