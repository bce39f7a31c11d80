"""The model's own answers, made on the GPUs that train or by servers beside them: seconds, and what is held meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from clustertune.host.system import GIB
from clustertune.plan.constants import BYTES, SECONDS, Term, total
from clustertune.plan.decoding import LAYER_S, SHORT, TP_LAYER_S, DecodingSpeed, batches, continuous, products_per_s, token_sums
from clustertune.plan.machine import PlanMachine
from clustertune.plan.strategy import HALF, ModelShape, Rollouts

NOTE = (
    "generation: {lengths}, prompts of {prompt:,.0f} tokens, the most there can be; all ranks wait for the longest answer of "
    "all. docs/plan.md has what a step of decoding costs; the rewards' own seconds are not counted"
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


def _engine(shape: ModelShape, machine: PlanMachine, gpus: int = 1, *, by_host: bool = False) -> DecodingSpeed:
    """``gpus`` that share each layer; ``by_host``: transformers, whose kernels the host starts one by one."""
    speed, layers = products_per_s(machine.peak_flops, machine.generation), shape.layers
    beside, least = layers * TP_LAYER_S * (gpus > 1), layers * LAYER_S * by_host
    weights, cache, work = HALF * shape.parameters, cache_bytes(shape), 2.0 * shape.counted.active
    sums = token_sums(layers, shape.counted.hidden, gpus, machine.intra.bytes_per_s)
    return DecodingSpeed(weights / gpus, cache / gpus, work / gpus, machine.hbm_bytes_per_s, speed, beside, sums, least)


def terms(shape: ModelShape, machine: PlanMachine, answers: int, rollouts: Rollouts) -> list[Term]:
    """Prompts and answers of ``answers`` that each rank generates together: by servers beside the trainer, which share those of
    all ranks out; by vLLM; or by transformers in one batch. All wait for the longest of all ranks."""
    lengths, ranks = rollouts.lengths, shape.strategy.data_parallel_size
    if rollouts.by_servers and (server := server_of(shape, machine)) is not None and server.answers:
        engine = _engine(shape, machine, shape.strategy.servers.gpus if shape.strategy.servers else 1)
        course = continuous(lengths, math.ceil(answers * ranks / server.count), server.answers, server.count)
    elif rollouts.vllm:
        engine, course = _engine(shape, machine), continuous(lengths, answers, answers, ranks)
    else:
        engine, course = _engine(shape, machine, by_host=True), batches(lengths, answers, answers, ranks)
    return [engine.prompts(lengths, course), engine.answers(course)]


def seconds(shape: ModelShape, machine: PlanMachine, answers: int, rollouts: Rollouts) -> float:
    """Of ``answers`` that each rank generates together."""
    return total(terms(shape, machine, answers, rollouts))


def of_step(shape: ModelShape, machine: PlanMachine) -> Term | None:
    """What an optimizer step waits for its answers; None where the model makes none."""
    rollouts = shape.strategy.rollouts
    if rollouts is None:
        return None
    prompts, made = terms(shape, machine, rollouts.answers, rollouts)
    values = {"prompts": prompts.value, "made": made.value, "steps": rollouts.steps}
    text = "({prompts} s for prompts + {made} s for answers) / {steps} steps"
    return Term("generation", (prompts.value + made.value) / rollouts.steps, SECONDS, text, values)


def explained(shape: ModelShape, machine: PlanMachine) -> list[Term]:
    """The terms of :func:`of_step`, and what one generation takes where answers are shorter, and where none ends by itself."""
    rollouts = shape.strategy.rollouts
    if rollouts is None or (whole := of_step(shape, machine)) is None:
        return []
    low, high = (seconds(shape, machine, rollouts.answers, replace(rollouts, known=mean)) for mean in rollouts.lengths.ends)
    values = {"low": low / rollouts.steps, "high": high / rollouts.steps, "share": SHORT, "longest": rollouts.completion}
    text = "{low} s a step with answers of {share} of that length, {high} s where all reach {longest} tokens; as taken"
    return [
        *terms(shape, machine, rollouts.answers, rollouts),
        replace(whole, name=f"generation, {rollouts.lengths}"),
        replace(whole, name="generation, by length", formula=text, values=values),
    ]


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
