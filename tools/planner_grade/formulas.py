"""The arithmetic of the sources' figures: one small pure function for each kind of figure.

Each takes the inputs of a claim by name and gives the value and the arithmetic with its numbers. Parameters are counted from a
model's architecture, times of published runs are read from their rows: nothing that can be derived is an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from clustertune.config.hardware import load_hardware
from clustertune.config.parameters import Counted, count, lora_parameter_count
from clustertune.plan.term import number
from tools.planner_grade.data import PublishedRun, published_models, published_runs

GB = 1e9


@dataclass(frozen=True)
class Computed:
    """A value in the claim's unit, and how it came about."""

    value: float
    arithmetic: str


@dataclass
class Inputs:
    """The inputs of a claim; remembers which were asked for."""

    values: Mapping[str, Any]
    used: set[str] = field(default_factory=set)

    def number(self, name: str, default: float | None = None) -> float:
        """A number; KeyError where it is missing and has no default."""
        self.used.add(name)
        found = self.values[name] if default is None else self.values.get(name, default)
        return float(found)

    def has(self, name: str) -> bool:
        """Whether an input is given."""
        return name in self.values

    def word(self, name: str) -> str:
        """A text."""
        self.used.add(name)
        return str(self.values[name])

    def mapping(self, name: str) -> dict[str, Any]:
        """A mapping."""
        self.used.add(name)
        return dict(self.values[name])

    def architecture(self) -> Mapping[str, Any]:
        """The config.json keys of ``model``."""
        return published_models()[self.word("model")].architecture

    def counted(self) -> Counted:
        """``model`` with its layers counted."""
        return _counted(self.word("model"))

    def parameters(self) -> float:
        """Parameters of ``model``, counted; a plain number ``parameters`` where the source names a size and no model."""
        return self.number("parameters") if self.has("parameters") else float(self.counted().total)

    def run(self, name: str = "run") -> PublishedRun:
        """A published run."""
        return published_runs()[self.word(name)]


@cache
def _counted(model: str) -> Counted:
    counted = count(published_models()[model].architecture)
    assert counted is not None, "models.yaml holds counted families only"
    return counted


def step_seconds(run: PublishedRun) -> float:
    """The published time of a step."""
    assert run.seconds is not None, f"{run.id} has no time of a step"
    return run.seconds


# --- memory ------------------------------------------------------------------------------------------------------------


def memory(given: Inputs) -> Computed:
    """GB: parameters x bytes each, over the GPUs that share them."""
    size, each, gpus = given.parameters(), given.number("bytes"), given.number("gpus", 1)
    shared = f" / {gpus:g} GPUs" if gpus != 1 else ""
    return Computed(size * each / gpus / GB, f"{number(size)} parameters x {each:g} B{shared}")


def minimum_gpus(given: Inputs) -> Computed:
    """GPUs that hold parameters, gradients and optimizer state between them, without any activation."""
    size, each, room = given.parameters(), given.number("bytes"), given.number("gpu_gb")
    return Computed(math.ceil(size * each / (room * GB)), f"{number(size)} parameters x {each:g} B / {room:g} GB, rounded up")


def nodes_filled(given: Inputs) -> Computed:
    """How many nodes of ``gpus`` GPUs the state alone fills."""
    size, each, gpus, room = given.parameters(), given.number("bytes"), given.number("gpus"), given.number("gpu_gb")
    return Computed(size * each / (gpus * room * GB), f"{number(size)} x {each:g} B / ({gpus:g} GPUs x {room:g} GB)")


def share_of_gpu(given: Inputs) -> Computed:
    """What the weights are of the memory of one GPU of ops/hardware.yaml."""
    size, each, gpu = given.parameters(), given.number("bytes"), given.word("gpu")
    room = load_hardware()[gpu].memory_gb
    return Computed(size * each / (room * GB), f"{number(size)} x {each:g} B / {room:g} GB of a {gpu}")


def saved_activations(given: Inputs) -> Computed:
    """GB that backward needs of one sequence without checkpointing, bf16, with an attention that keeps no scores.

    Per token and layer: inputs of the two norms and of the products behind them (4 d), queries and attention output (2 d), keys
    and values, gate, up, the activated gate and their product (4 f); and the logits once in bf16 and once in fp32.
    """
    counted = given.counted()
    tokens = given.number("tokens")
    layer = counted.layers[0]
    keys = layer.attention.kv_heads * (layer.attention.qk_dim + layer.attention.v_dim)
    elements = 6 * counted.hidden + keys + 4 * layer.inner
    layers = sum(kind.count for kind in counted.layers)
    total = tokens * (layers * elements * 2 + counted.vocabulary * 6)
    shown = f"{tokens:g} tokens x ({layers} layers x {number(elements)} x 2 B + {number(counted.vocabulary)} logits x 6 B)"
    return Computed(total / GB, shown)


def _zero_bytes(stage: float, ranks: float) -> float:
    """Bytes a parameter and rank: bf16 weights 2, gradients 2, fp32 master and two moments 12 (ZeRO, arXiv:1910.02054)."""
    return (2 / ranks if stage >= 3 else 2) + (2 / ranks if stage >= 2 else 2) + (12 / ranks if stage >= 1 else 12)


def zero_reduction(given: Inputs) -> Computed:
    """How many times less memory a rank needs under a ZeRO stage than under plain data parallelism."""
    stage, ranks = given.number("stage"), given.number("ranks")
    held = _zero_bytes(stage, ranks)
    return Computed(16 / held, f"16 B / {held:.3g} B a parameter with stage {stage:g} over {ranks:g} ranks")


def zero_memory(given: Inputs) -> Computed:
    """GB of weights, gradients and optimizer state a rank under a ZeRO stage."""
    size, stage, ranks = given.parameters(), given.number("stage"), given.number("ranks")
    held = _zero_bytes(stage, ranks)
    return Computed(size * held / GB, f"{number(size)} parameters x {held:.3g} B (ZeRO-{stage:g} over {ranks:g} ranks)")


# --- parameters --------------------------------------------------------------------------------------------------------


def lora_parameters(given: Inputs) -> Computed:
    """Parameters that LoRA trains: r (inputs + outputs) of each target module."""
    kind, lora = given.counted().layers[0], given.mapping("lora")
    trained = lora_parameter_count(given.architecture(), lora)
    assert trained is not None, "only adapters that can be counted are claimed"
    sides = [f"({f.inputs:,} + {f.outputs:,})" for f in kind.linears if f.name.split(".")[-1] in lora["target_modules"]]
    return Computed(trained, f"{lora['r']} x {kind.count} layers x ({' + '.join(sides)})")


def lora_percent(given: Inputs) -> Computed:
    """Trained share of all parameters, per cent."""
    trained, size = lora_parameters(given).value, given.parameters()
    return Computed(100 * trained / size, f"100 x {number(trained)} / {number(size)}")


def lora_gb(given: Inputs) -> Computed:
    """Size of the adapter file, GB."""
    trained, each = lora_parameters(given).value, given.number("bytes")
    return Computed(trained * each / GB, f"{number(trained)} x {each:g} B")


def weight_shards(given: Inputs) -> Computed:
    """Files that transformers writes: whole tensors in the order of the model, a new file before the limit is passed."""
    counted, limit, each = given.counted(), given.number("shard_gb") * GB, given.number("bytes")
    layers = [[linear.inputs * linear.outputs for linear in kind.linears] for kind in counted.layers for _ in range(kind.count)]
    tensors = [counted.embedding, *(size for layer in layers for size in layer), counted.head]
    files, held = 1, 0.0
    for size in tensors:
        if held + size * each > limit and held:
            files, held = files + 1, 0.0
        held += size * each
    total = sum(tensors) * each
    return Computed(
        files, f"{total / GB:.1f} GB in whole tensors of up to {max(tensors) * each / GB:.2f} GB, {limit / GB:g} GB a file"
    )


# --- operations and time -----------------------------------------------------------------------------------------------


def flops_per_token(given: Inputs) -> Computed:
    """FLOPs of a token in training: 6 a parameter (2 forward, 4 backward)."""
    size = given.parameters()
    return Computed(6 * size, f"6 x {number(size)}")


def _rate(given: Inputs) -> Computed:
    """Tokens per second: from an MFU and a peak, from the TFLOP/s that a GPU reached, or as given."""
    if given.has("tokens_per_s"):
        rate = given.number("tokens_per_s")
        return Computed(rate, f"{number(rate)} tokens/s")
    size, gpus = given.parameters(), given.number("gpus")
    if given.has("measured"):
        run = given.run("measured")
        assert run.tflops_per_gpu is not None
        return Computed(
            gpus * run.tflops_per_gpu * 1e12 / (6 * size),
            f"{gpus:g} GPUs x {run.tflops_per_gpu:g} TFLOP/s (reached by {run.id}) / (6 x {number(size)})",
        )
    mfu, peak = given.number("mfu"), given.number("peak_tflops")
    shown = f"{mfu:g} x {gpus:g} GPUs x {peak:g} TFLOP/s / (6 x {number(size)})"
    return Computed(mfu * gpus * peak * 1e12 / (6 * size), shown)


def token_rate(given: Inputs) -> Computed:
    """Tokens per second of all GPUs."""
    return _rate(given)


def hours_for_tokens(given: Inputs) -> Computed:
    """Wall hours for a number of tokens."""
    rate, tokens = _rate(given), given.number("tokens")
    return Computed(tokens / rate.value / 3600, f"{number(tokens)} tokens / ({rate.arithmetic} = {number(rate.value)}) / 3600")


def days_for_tokens(given: Inputs) -> Computed:
    """Wall days for a number of tokens."""
    hours = hours_for_tokens(given)
    return Computed(hours.value / 24, f"{hours.arithmetic} / 24")


def product(given: Inputs) -> Computed:
    """A plain product of what is given."""
    names = list(given.values)
    factors = [given.number(name) for name in names]
    return Computed(math.prod(factors), " x ".join(f"{number(v)} {n}" for n, v in zip(names, factors, strict=True)))


def quotient(given: Inputs) -> Computed:
    """One number over another."""
    above, below = given.number("above"), given.number("below")
    return Computed(above / below, f"{number(above)} / {number(below)}")


def gap_percent(given: Inputs) -> Computed:
    """How far one figure lies from another, per cent."""
    found, wanted = given.number("found"), given.number("wanted")
    return Computed(100 * abs(found / wanted - 1), f"100 x |{found:g} / {wanted:g} - 1|")


def minutes_per_step(given: Inputs) -> Computed:
    """Minutes of a step from the hours of all."""
    hours, steps = given.number("hours"), given.number("steps")
    return Computed(hours * 60 / steps, f"{hours:g} h x 60 / {steps:g} steps")


def run_hours(given: Inputs) -> Computed:
    """Hours of a training of ``steps`` steps at a published step time, ``factor`` times as long where the batch is."""
    run, factor, steps = given.run(), given.number("factor", 1), given.number("steps")
    more = f" x {factor:g}" if factor != 1 else ""
    return Computed(
        step_seconds(run) * factor * steps / 3600, f"{step_seconds(run):.4g} s ({run.place}){more} x {steps:g} steps / 3600"
    )


def run_gpu_hours(given: Inputs) -> Computed:
    """GPU-hours of the same."""
    hours, gpus = run_hours(given), given.run().world
    return Computed(hours.value * gpus, f"{hours.arithmetic} x {gpus} GPUs")


def speed_ratio(given: Inputs) -> Computed:
    """How many times faster a step of one run is than the same step of another."""
    slow, fast = given.run("slow"), given.run("fast")
    return Computed(
        step_seconds(slow) / step_seconds(fast),
        f"{step_seconds(slow):g} s ({slow.place}) / {step_seconds(fast):g} s ({fast.place})",
    )


def more_time(given: Inputs) -> Computed:
    """Per cent that a step takes longer on several nodes than on one."""
    ratio = speed_ratio(given)
    return Computed(100 * (ratio.value - 1), f"100 x ({ratio.arithmetic} - 1)")


def bubble(given: Inputs) -> Computed:
    """Per cent of the step that a pipeline stage waits: (p - 1) / v over m + (p - 1) / v (arXiv:2104.04473, section 2.2)."""
    stages, batches, virtual = given.number("stages"), given.number("micro_batches"), given.number("virtual", 1)
    idle = (stages - 1) / virtual
    shown = f"({stages:g} - 1) / {virtual:g} / ({batches:g} micro batches + ({stages:g} - 1) / {virtual:g}) x 100"
    return Computed(100 * idle / (batches + idle), shown)


# --- tokens and steps --------------------------------------------------------------------------------------------------


def epoch_steps(given: Inputs) -> Computed:
    """Optimizer steps where each row is a sequence."""
    rows, epochs, batch = given.number("rows"), given.number("epochs"), given.number("batch")
    return Computed(math.ceil(rows * epochs / batch), f"{number(rows)} rows x {epochs:g} / {batch:g}, rounded up")


def packed_steps(given: Inputs) -> Computed:
    """Optimizer steps where conversations are packed into sequences without gaps."""
    rows, batch, sequence = given.number("rows"), given.number("batch"), given.number("sequence")
    tokens = given.number("characters") / given.number("characters_per_token")
    tokens += given.number("turns") * given.number("template_tokens") + given.number("header_tokens")
    shown = f"{number(rows)} conversations x {tokens:.0f} tokens / {sequence:g} / {batch:g}, rounded up"
    return Computed(math.ceil(rows * tokens / sequence / batch), shown)


def useful_percent(given: Inputs) -> Computed:
    """Per cent of a padded sequence that is text: bytes of a tokenised dataset over rows, bytes a token and the sequence."""
    size, rows, each, sequence = (given.number(n) for n in ("bytes", "rows", "bytes_per_token", "sequence"))
    tokens = size / rows / each
    return Computed(
        100 * tokens / sequence, f"{number(size)} B / {number(rows)} rows / {each:g} B = {tokens:.0f} tokens of {sequence:g}"
    )


def token_speed(given: Inputs) -> Computed:
    """Tokens per second of a rank: steps x sequences x length over the wall time."""
    steps, sequence, seconds = given.number("steps"), given.number("sequence"), given.number("seconds")
    return Computed(steps * sequence / seconds, f"{steps:g} x {sequence:g} / {seconds:g} s")


# --- traffic -----------------------------------------------------------------------------------------------------------


def layer_gather(given: Inputs) -> Computed:
    """GB of one layer as it is gathered."""
    counted = given.counted()
    each = given.number("bytes")
    return Computed(
        counted.layers[0].parameters * each / GB, f"{number(counted.layers[0].parameters)} parameters of a layer x {each:g} B"
    )


def node_bandwidth(given: Inputs) -> Computed:
    """GB/s through a node's link: ``passes`` collectives of the whole model a step, (n - 1) / n of it through every link."""
    size, each, run, warm = given.parameters(), given.number("bytes"), given.run(), given.number("warm_up_s", 0)
    passes = given.number("passes")
    seconds = step_seconds(run) - warm / (run.steps or 1)
    moved = passes * size * each * (run.world - 1) / run.world / GB
    shown = f"{passes:g} x {number(size)} x {each:g} B x {run.world - 1}/{run.world} = {moved:.1f} GB in {seconds:.3g} s"
    return Computed(moved / seconds, shown)


def link_ratio(given: Inputs) -> Computed:
    """How many times faster a GPU's NVLink is than its share of what a node's network reached."""
    reached = node_bandwidth(given)
    nvlink, run = given.number("nvlink_gb_s"), given.run()
    shown = f"{nvlink:g} GB/s / (({reached.arithmetic}) / {run.gpus_per_node} GPUs)"
    return Computed(nvlink / (reached.value / run.gpus_per_node), shown)


def steady_rate(given: Inputs) -> Computed:
    """Tokens per second of a rank without a warm-up: compute at ``mfu``, then all collectives over NVLink, no overlap."""
    size, each, tokens, ranks = given.parameters(), given.number("bytes"), given.number("tokens"), given.number("gpus")
    mfu, peak, nvlink, passes = (given.number(n) for n in ("mfu", "peak_tflops", "nvlink_gb_s", "passes"))
    busy = 6 * size * tokens / (mfu * peak * 1e12)
    moved = passes * size * each * (ranks - 1) / ranks / (nvlink * GB)
    shown = f"{tokens:g} tokens / (6 x {number(size)} x {tokens:g} / ({mfu:g} x {peak:g} TFLOP/s) = {busy:.3f} s"
    shown += f" + {passes:g} x {number(size)} x {each:g} B x {ranks - 1:g}/{ranks:g} / {nvlink:g} GB/s = {moved:.3f} s)"
    return Computed(tokens / (busy + moved), shown)


def link_busy(given: Inputs) -> Computed:
    """Per cent of a step in which NVLink at its nominal speed would move the step's collectives."""
    reached = node_bandwidth(given)
    nvlink = given.number("nvlink_gb_s")
    return Computed(100 * reached.value / nvlink, f"100 x ({reached.arithmetic}) / {nvlink:g} GB/s")


def link_speed(given: Inputs) -> Computed:
    """GB/s of a link from its Gbit/s."""
    gbit = given.number("gbit")
    return Computed(gbit / 8, f"{gbit:g} Gbit/s / 8")


_ALL: tuple[Callable[[Inputs], Computed], ...] = (
    memory, minimum_gpus, nodes_filled, share_of_gpu, saved_activations, zero_reduction, zero_memory,
    lora_parameters, lora_percent, lora_gb, weight_shards,
    flops_per_token, token_rate, hours_for_tokens, days_for_tokens, product, quotient, gap_percent, minutes_per_step, run_hours,
    run_gpu_hours, speed_ratio, more_time, bubble,
    epoch_steps, packed_steps, useful_percent, token_speed,
    layer_gather, link_ratio, steady_rate, link_busy, link_speed,
)  # fmt: skip
FORMULAS: Mapping[str, Callable[[Inputs], Computed]] = {made.__name__.replace("_", "-"): made for made in _ALL}
"""The functions by the name that a claim calls them."""


def compute(formula: str, inputs: Mapping[str, Any]) -> Computed:
    """The figure of a formula: its value, and the arithmetic with the result. KeyError where an input is missing."""
    given = Inputs(inputs)
    found = FORMULAS[formula](given)
    if unused := sorted(set(inputs) - given.used):
        raise KeyError(f"{formula} takes no {', '.join(unused)}")
    return replace(found, arithmetic=f"{found.arithmetic} = {number(found.value)}")
