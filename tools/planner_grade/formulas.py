"""The figures of other people's documents, each beside what arithmetic gives: one small pure function for each kind.

Each takes the inputs of a claim by name and gives the value and the arithmetic with its numbers. Parameters are counted from a
model's architecture, times of published runs are read from their rows: nothing that can be derived is an input.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from clustertune.cluster.hardware import load_hardware
from clustertune.plan.constants import number
from clustertune.recipe.native_rules import filled, lora_defaults
from clustertune.recipe.parameters import ParameterCount, count, lora_parameter_count
from tools.planner_grade.data import Claim, PublishedRun, claims_file, published_models, published_runs

GB = 1e9
Figure = tuple[float, str]
"""A value in the claim's unit, and how it came about."""


@cache
def _counted(model: str) -> ParameterCount:
    counted = count(published_models()[model].architecture)
    assert counted is not None, "models.yaml holds counted families only"
    return counted


def step_seconds(run: PublishedRun) -> float:
    """The published time of a step."""
    assert run.seconds is not None, f"{run.id} has no time of a step"
    return run.seconds


# --- memory ------------------------------------------------------------------------------------------------------------


def memory(size: float, each: float, gpus: float = 1) -> Figure:
    """GB: parameters x bytes each, over the GPUs that share them."""
    shared = f" / {gpus:g} GPUs" if gpus != 1 else ""
    return size * each / gpus / GB, f"{number(size)} parameters x {each:g} B{shared}"


def minimum_gpus(size: float, each: float, gpu_gb: float) -> Figure:
    """GPUs that hold parameters, gradients and optimizer state between them, without any activation."""
    return math.ceil(size * each / (gpu_gb * GB)), f"{number(size)} parameters x {each:g} B / {gpu_gb:g} GB, rounded up"


def nodes_filled(size: float, each: float, gpus: float, gpu_gb: float) -> Figure:
    """How many nodes of ``gpus`` GPUs the state alone fills."""
    return size * each / (gpus * gpu_gb * GB), f"{number(size)} x {each:g} B / ({gpus:g} GPUs x {gpu_gb:g} GB)"


def share_of_gpu(size: float, each: float, gpu: str) -> Figure:
    """What the weights are of the memory of one GPU of ops/hardware.yaml."""
    room = load_hardware()[gpu].memory_gb
    return size * each / (room * GB), f"{number(size)} x {each:g} B / {room:g} GB of a {gpu}"


def saved_activations(counted: ParameterCount, tokens: float) -> Figure:
    """GB that backward needs of one sequence without checkpointing, bf16, with an attention that keeps no scores.

    Per token and layer: inputs of the two norms and of the products behind them (4 d), queries and attention output (2 d), keys
    and values, gate, up, the activated gate and their product (4 f); and the logits once in bf16 and once in fp32.
    """
    layer, layers = counted.layers[0], counted.num_layers
    keys = layer.attention.kv_heads * (layer.attention.qk_dim + layer.attention.v_dim)
    elements = 6 * counted.hidden + keys + 4 * layer.inner
    total = tokens * (layers * elements * 2 + counted.vocabulary * 6)
    shown = f"{tokens:g} tokens x ({layers} layers x {number(elements)} x 2 B + {number(counted.vocabulary)} logits x 6 B)"
    return total / GB, shown


def _zero_bytes(stage: float, ranks: float) -> float:
    """Bytes a parameter and rank: bf16 weights 2, gradients 2, fp32 master and two moments 12 (ZeRO, arXiv:1910.02054)."""
    return (2 / ranks if stage >= 3 else 2) + (2 / ranks if stage >= 2 else 2) + (12 / ranks if stage >= 1 else 12)


def zero_reduction(stage: float, ranks: float) -> Figure:
    """How many times less memory a rank needs under a ZeRO stage than under plain data parallelism."""
    held = _zero_bytes(stage, ranks)
    return 16 / held, f"16 B / {held:.3g} B a parameter with stage {stage:g} over {ranks:g} ranks"


def zero_memory(size: float, stage: float, ranks: float) -> Figure:
    """GB of weights, gradients and optimizer state a rank under a ZeRO stage."""
    held = _zero_bytes(stage, ranks)
    return size * held / GB, f"{number(size)} parameters x {held:.3g} B (ZeRO-{stage:g} over {ranks:g} ranks)"


# --- parameters --------------------------------------------------------------------------------------------------------


def lora_parameters(counted: ParameterCount, architecture: Mapping[str, Any], lora: Mapping[str, Any]) -> Figure:
    """Parameters that LoRA trains: r (inputs + outputs) of each target module."""
    kind, trained = counted.layers[0], lora_parameter_count(architecture, filled(lora_defaults(), lora))
    assert trained is not None, "only adapters that can be counted are claimed"
    sides = [f"({f.inputs:,} + {f.outputs:,})" for f in kind.linears if f.name.split(".")[-1] in lora["target_modules"]]
    return trained, f"{lora['r']} x {kind.count} layers x ({' + '.join(sides)})"


def lora_percent(size: float, counted: ParameterCount, architecture: Mapping[str, Any], lora: Mapping[str, Any]) -> Figure:
    """Trained share of all parameters, per cent."""
    trained, _ = lora_parameters(counted, architecture, lora)
    return 100 * trained / size, f"100 x {number(trained)} / {number(size)}"


def lora_gb(each: float, counted: ParameterCount, architecture: Mapping[str, Any], lora: Mapping[str, Any]) -> Figure:
    """Size of the adapter file, GB."""
    trained, _ = lora_parameters(counted, architecture, lora)
    return trained * each / GB, f"{number(trained)} x {each:g} B"


def weight_shards(counted: ParameterCount, each: float, shard_gb: float) -> Figure:
    """Files that transformers writes: whole tensors in the order of the model, a new file before the limit is passed."""
    layers = [[linear.inputs * linear.outputs for linear in kind.linears] for kind in counted.layers for _ in range(kind.count)]
    tensors = [counted.embedding, *(size for layer in layers for size in layer), counted.head]
    files, held = 1, 0.0
    for size in tensors:
        if held + size * each > shard_gb * GB and held:
            files, held = files + 1, 0.0
        held += size * each
    total = sum(tensors) * each
    shown = f"{total / GB:.1f} GB in whole tensors of up to {max(tensors) * each / GB:.2f} GB, {shard_gb:g} GB a file"
    return files, shown


# --- operations and time -----------------------------------------------------------------------------------------------


def flops_per_token(size: float) -> Figure:
    """FLOPs of a token in training: 6 a parameter (2 forward, 4 backward)."""
    return 6 * size, f"6 x {number(size)}"


def token_rate(
    size: float = 0, gpus: float = 0, mfu: float = 0, peak_tflops: float = 0, measured: PublishedRun | None = None,
    tokens_per_s: float | None = None,
) -> Figure:  # fmt: skip
    """Tokens per second of all GPUs: from an MFU and a peak, from the TFLOP/s that a GPU reached, or as given."""
    if tokens_per_s is not None:
        return tokens_per_s, f"{number(tokens_per_s)} tokens/s"
    if measured is not None:
        assert measured.tflops_per_gpu is not None
        reached = f"{measured.tflops_per_gpu:g} TFLOP/s (reached by {measured.id})"
        rate = gpus * measured.tflops_per_gpu * 1e12 / (6 * size)
        return rate, f"{gpus:g} GPUs x {reached} / (6 x {number(size)})"
    shown = f"{mfu:g} x {gpus:g} GPUs x {peak_tflops:g} TFLOP/s / (6 x {number(size)})"
    return mfu * gpus * peak_tflops * 1e12 / (6 * size), shown


def hours_for_tokens(tokens: float, **rate: Any) -> Figure:
    """Wall hours for a number of tokens."""
    value, arithmetic = token_rate(**rate)
    return tokens / value / 3600, f"{number(tokens)} tokens / ({arithmetic} = {number(value)}) / 3600"


def days_for_tokens(tokens: float, **rate: Any) -> Figure:
    """Wall days for a number of tokens."""
    hours, arithmetic = hours_for_tokens(tokens, **rate)
    return hours / 24, f"{arithmetic} / 24"


def product(**factors: float) -> Figure:
    """A plain product of what is given."""
    return math.prod(factors.values()), " x ".join(f"{number(value)} {name}" for name, value in factors.items())


def quotient(above: float, below: float) -> Figure:
    """One number over another."""
    return above / below, f"{number(above)} / {number(below)}"


def gap_percent(found: float, wanted: float) -> Figure:
    """How far one figure lies from another, per cent."""
    return 100 * abs(found / wanted - 1), f"100 x |{found:g} / {wanted:g} - 1|"


def minutes_per_step(hours: float, steps: float) -> Figure:
    """Minutes of a step from the hours of all."""
    return hours * 60 / steps, f"{hours:g} h x 60 / {steps:g} steps"


def run_hours(run: PublishedRun, steps: float, factor: float = 1) -> Figure:
    """Hours of a training of ``steps`` steps at a published step time, ``factor`` times as long where the batch is."""
    more = f" x {factor:g}" if factor != 1 else ""
    seconds = step_seconds(run)
    return seconds * factor * steps / 3600, f"{seconds:.4g} s ({run.place}){more} x {steps:g} steps / 3600"


def run_gpu_hours(run: PublishedRun, steps: float, factor: float = 1) -> Figure:
    """GPU-hours of the same."""
    hours, arithmetic = run_hours(run, steps, factor)
    return hours * run.world, f"{arithmetic} x {run.world} GPUs"


def speed_ratio(slow: PublishedRun, fast: PublishedRun) -> Figure:
    """How many times faster a step of one run is than the same step of another."""
    one, other = step_seconds(slow), step_seconds(fast)
    return one / other, f"{one:g} s ({slow.place}) / {other:g} s ({fast.place})"


def more_time(slow: PublishedRun, fast: PublishedRun) -> Figure:
    """Per cent that a step takes longer on several nodes than on one."""
    ratio, arithmetic = speed_ratio(slow, fast)
    return 100 * (ratio - 1), f"100 x ({arithmetic} - 1)"


def bubble(stages: float, micro_batches: float, virtual: float = 1) -> Figure:
    """Per cent of the step that a pipeline stage waits: (p - 1) / v over m + (p - 1) / v (arXiv:2104.04473, section 2.2)."""
    idle = (stages - 1) / virtual
    shown = f"({stages:g} - 1) / {virtual:g} / ({micro_batches:g} micro batches + ({stages:g} - 1) / {virtual:g}) x 100"
    return 100 * idle / (micro_batches + idle), shown


# --- tokens and steps --------------------------------------------------------------------------------------------------


def epoch_steps(rows: float, epochs: float, batch: float) -> Figure:
    """Optimizer steps where each row is a sequence."""
    return math.ceil(rows * epochs / batch), f"{number(rows)} rows x {epochs:g} / {batch:g}, rounded up"


def packed_steps(
    rows: float, batch: float, sequence: float, characters: float, characters_per_token: float, turns: float,
    template_tokens: float, header_tokens: float,
) -> Figure:  # fmt: skip
    """Optimizer steps where conversations are packed into sequences without gaps."""
    tokens = characters / characters_per_token + turns * template_tokens + header_tokens
    shown = f"{number(rows)} conversations x {tokens:.0f} tokens / {sequence:g} / {batch:g}, rounded up"
    return math.ceil(rows * tokens / sequence / batch), shown


def useful_percent(each: float, rows: float, bytes_per_token: float, sequence: float) -> Figure:
    """Per cent of a padded sequence that is text: ``each``, the bytes of a tokenised dataset, over rows, bytes a token and the
    sequence."""
    tokens = each / rows / bytes_per_token
    shown = f"{number(each)} B / {number(rows)} rows / {bytes_per_token:g} B = {tokens:.0f} tokens of {sequence:g}"
    return 100 * tokens / sequence, shown


def token_speed(steps: float, sequence: float, seconds: float) -> Figure:
    """Tokens per second of a rank: steps x sequences x length over the wall time."""
    return steps * sequence / seconds, f"{steps:g} x {sequence:g} / {seconds:g} s"


# --- traffic -----------------------------------------------------------------------------------------------------------


def layer_gather(counted: ParameterCount, each: float) -> Figure:
    """GB of one layer as it is gathered."""
    size = counted.layers[0].parameters
    return size * each / GB, f"{number(size)} parameters of a layer x {each:g} B"


def node_bandwidth(size: float, each: float, passes: float, run: PublishedRun, warm_up_s: float = 0) -> Figure:
    """GB/s through a node's link: ``passes`` collectives of the whole model a step, (n - 1) / n of it through every link."""
    seconds = step_seconds(run) - warm_up_s / (run.steps or 1)
    moved = passes * size * each * (run.world - 1) / run.world / GB
    shown = f"{passes:g} x {number(size)} x {each:g} B x {run.world - 1}/{run.world} = {moved:.1f} GB in {seconds:.3g} s"
    return moved / seconds, shown


def link_ratio(nvlink_gb_s: float, run: PublishedRun, **reached: Any) -> Figure:
    """How many times faster a GPU's NVLink is than its share of what a node's network reached."""
    value, arithmetic = node_bandwidth(run=run, **reached)
    shown = f"{nvlink_gb_s:g} GB/s / (({arithmetic}) / {run.gpus_per_node} GPUs)"
    return nvlink_gb_s / (value / run.gpus_per_node), shown


def steady_rate(
    size: float, each: float, tokens: float, gpus: float, mfu: float, peak_tflops: float, nvlink_gb_s: float, passes: float
) -> Figure:
    """Tokens per second of a rank without a warm-up: compute at ``mfu``, then all collectives over NVLink, no overlap."""
    busy = 6 * size * tokens / (mfu * peak_tflops * 1e12)
    moved = passes * size * each * (gpus - 1) / gpus / (nvlink_gb_s * GB)
    shown = f"{tokens:g} tokens / (6 x {number(size)} x {tokens:g} / ({mfu:g} x {peak_tflops:g} TFLOP/s) = {busy:.3f} s"
    shown += f" + {passes:g} x {number(size)} x {each:g} B x {gpus - 1:g}/{gpus:g} / {nvlink_gb_s:g} GB/s = {moved:.3f} s)"
    return tokens / (busy + moved), shown


def link_busy(nvlink_gb_s: float, **reached: Any) -> Figure:
    """Per cent of a step in which NVLink at its nominal speed would move the step's collectives."""
    value, arithmetic = node_bandwidth(**reached)
    return 100 * value / nvlink_gb_s, f"100 x ({arithmetic}) / {nvlink_gb_s:g} GB/s"


def link_speed(gbit: float) -> Figure:
    """GB/s of a link from its Gbit/s."""
    return gbit / 8, f"{gbit:g} Gbit/s / 8"


_ALL: tuple[Callable[..., Figure], ...] = (
    memory, minimum_gpus, nodes_filled, share_of_gpu, saved_activations, zero_reduction, zero_memory,
    lora_parameters, lora_percent, lora_gb, weight_shards,
    flops_per_token, token_rate, hours_for_tokens, days_for_tokens, product, quotient, gap_percent, minutes_per_step, run_hours,
    run_gpu_hours, speed_ratio, more_time, bubble,
    epoch_steps, packed_steps, useful_percent, token_speed,
    layer_gather, link_ratio, steady_rate, link_busy, link_speed,
)  # fmt: skip
FORMULAS: Mapping[str, Callable[..., Figure]] = {made.__name__.replace("_", "-"): made for made in _ALL}
"""The functions by the name that a claim calls them."""
_NAMES = {"bytes": "each", "parameters": "size"}
"""Inputs of claims by the arguments' names."""


def compute(formula: str, inputs: Mapping[str, Any]) -> Figure:
    """The figure of a formula: its value, and the arithmetic with the result. KeyError where an input is missing or unknown.

    ``model`` is counted: formulas take its ``size``, its layers (``counted``) or its ``architecture``. Runs are given by id.
    """
    function = FORMULAS[formula]
    wanted = inspect.signature(function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values())
    given = {_NAMES.get(key, key): value for key, value in inputs.items()}
    given |= {key: published_runs()[given[key]] for key in ("run", "slow", "fast", "measured") if key in given}
    if model := given.pop("model", None):
        counted = _counted(model)
        made = {"size": float(counted.total), "counted": counted, "architecture": published_models()[model].architecture}
        given |= {key: value for key, value in made.items() if key in wanted or (open_ended and key == "size")}
    if unknown := sorted(set(given) - set(wanted)) if not open_ended else []:
        raise KeyError(f"{formula} takes no {', '.join(unknown)}")
    try:
        value, arithmetic = function(**given)
    except TypeError as error:  # Python names the argument
        raise KeyError(f"{formula}: {error}") from error
    return value, f"{arithmetic} = {number(value)}"


# --- claims: right, imprecise or refuted ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClaimResult:
    """A claim and its check."""

    claim: Claim
    computed: float
    arithmetic: str
    """The computation with its numbers."""
    verdict: str
    """right | imprecise | refuted; one that is not the claim's own is a fault of the data file or of the formula."""


def check_claims() -> list[ClaimResult]:
    """Every claim checked, in the order of the file."""
    return [check(claim) for claim in claims_file().claims]


def check(claim: Claim) -> ClaimResult:
    """One claim: the figure computed from its inputs, and how far the claimed one lies from it."""
    value, arithmetic = compute(claim.formula, claim.inputs)
    return ClaimResult(claim, value, arithmetic, judge(claim, value))


def judge(claim: Claim, value: float) -> str:
    """The verdict on a claim where arithmetic gives ``value``."""
    limits = claims_file()
    off = distance(claim, value)
    if off <= (limits.tolerance if claim.tolerance is None else claim.tolerance):
        return "right"
    return "imprecise" if off <= (limits.coarse if claim.coarse is None else claim.coarse) else "refuted"


def distance(claim: Claim, value: float) -> float:
    """How far ``value`` lies outside what is claimed, as a share of the smaller of the two; 0 inside."""
    low, high = claim.claimed if isinstance(claim.claimed, tuple) else (claim.claimed, claim.claimed)
    if claim.relation != "at_least" and value > high:
        return value / high - 1
    if claim.relation != "at_most" and value < low:
        return low / value - 1
    return 0.0
