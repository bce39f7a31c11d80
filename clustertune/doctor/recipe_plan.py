"""What the planner foresees and would hurt, and settings of a recipe that run and are wrong, or slow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from clustertune.check.rule import FAIL, RECIPE, UNKNOWN, WARN, Rules, Seen
from clustertune.cluster.hardware import load_hardware
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.host.system import GIB
from clustertune.launch import serving, shape
from clustertune.launch import signal_margin as margins
from clustertune.plan.schedule import START_S, TOKENS_PER_CPU_S, tokens_to_prepare
from clustertune.recipe.library_facts import model_facts
from clustertune.resolve.distribution import how_to_load

RULES = Rules(RECIPE, __file__)

TIGHT = 0.95
"""Share of a GPU's memory above which a plan is called tight: its activations are predicted within a few per cent
(docs/results/planner.md)."""
STEP_FACTOR, MARGIN_SECONDS = 1.5, 30.0
"""The step that a signal meets may be slower than planned; seconds for the way of the signal to every rank, and for its end."""
LOST_HOURS = 1.0
"""Work between two saves, hours, that is called much to lose."""
SAVING, CHEAP = 0.05, 0.01
"""Shares of the time that saving may take: above the first it is called often, at the second the next cadence is proposed."""


def hours(seconds: float) -> str:
    """Seconds as people say them."""
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


@RULES("not-planned")
def not_planned(context: RecipeContext) -> Iterator[Seen]:
    """Whether the planner can say anything."""
    if context.is_real and context.plan is None:
        yield Seen(UNKNOWN, context.no_plan)


@RULES("shape-refused")
def shape_refused(context: RecipeContext) -> Iterator[Seen]:
    """Nodes, GPUs, time and memory that the job asks for."""
    # But for the memory of a GPU where the plan says more of it.
    for problem in shape.find_problems(context.resolved, context.cluster, memory=context.plan is None):
        yield Seen(FAIL, f"{problem.key}: {problem.message}", problem.fix or "another --cluster")


@RULES("gpu-memory")
def gpu_memory(context: RecipeContext) -> Iterator[Seen]:
    """Predicted memory of a GPU."""
    if plan := context.real_plan:
        room = plan.machine.usable_bytes
        memory = f"{plan.needed / GIB:.1f} GiB at the {plan.peak.name}, a {plan.machine.gpu} has {room / GIB:.1f} GiB"
        fix = f"clustertune plan {context.resolved.name} --advise names what fits"
        if plan.needed > TIGHT * room:
            over = plan.needed > room
            yield Seen(FAIL if over else WARN, f"{'' if over else 'tight: '}predicted {memory}", fix)


@RULES("host-memory")
def host_memory(context: RecipeContext) -> Iterator[Seen]:
    """Predicted RAM of the fullest node."""
    plan = context.real_plan
    if plan is not None and plan.host_bytes > plan.machine.host_bytes:
        parts = ", ".join(f"{term.name} {term.value / GIB:,.0f} GiB" for term in plan.host)
        need, room = f"predicted {plan.host_bytes / GIB:,.0f} GiB of RAM ({parts})", f"{plan.machine.host_bytes / GIB:,.0f} GiB"
        yield Seen(FAIL, f"{need}, a node has {room}", how_to_load(context.resolved.distribution)[1])


@RULES("load-timeout")
def load_timeout(context: RecipeContext) -> Iterator[Seen]:
    """Loading against the time-out of collectives."""
    plan, limit = context.real_plan, float(context.args["ddp_timeout"])
    # Ranks that read their own rows end together: none of them waits for one that loads.
    if plan is None or context.resolved.world_size == 1 or context.resolved.distribution.reads_parts:
        return
    seconds = plan.schedule.start.value - START_S
    if seconds > limit / 2:
        size, speed = 2.0 * plan.shape.counted.total / 1e9, plan.machine.storage_read_bytes_per_s / 1e9
        text = f"{size:,.0f} GB at {speed:g} GB/s ({plan.machine.storage_note}) load in {hours(seconds)}"
        fix = f"train.ddp_timeout={math.ceil(3 * seconds / 600) * 600}, or copy the model to the nodes first (storage.staging)"
        yield Seen(FAIL if seconds > limit else WARN, f"{text}, ranks wait {hours(limit)}", fix)


@RULES("prepare-time")
def prepare_time(context: RecipeContext) -> Iterator[Seen]:
    """Tokenising against the time limit of its job."""
    tokens = tokens_to_prepare(context.resolved) if context.is_real else None
    if tokens is not None and context.cluster.slurm is not None:
        job = shape.stage_shapes(context.resolved, context.cluster)["prepare"]
        seconds, limit = tokens / TOKENS_PER_CPU_S / job.cpus_per_node, 60 * job.minutes
        if seconds > limit:
            text = f"about {tokens:,.0f} tokens take {hours(seconds)} on {job.cpus_per_node} cores"
            yield Seen(WARN, f"{text}, the job of prepare may run {hours(limit)}")


def _cadence(context: RecipeContext) -> tuple[int, float, float] | None:
    """Steps between two checkpoints, seconds of a step, and those of a stop to save; None where nothing is saved by steps."""
    plan = context.real_plan
    if plan is None or plan.schedule.save_steps is None:
        return None
    every, steps = plan.schedule.save_steps, plan.schedule.steps
    return min(every, steps or every), plan.step.seconds, plan.schedule.save.value


@RULES("checkpoint-interval-too-long")
def checkpoint_interval_too_long(context: RecipeContext) -> Iterator[Seen]:
    """Hours of work between two checkpoints."""
    every, step, save = _cadence(context) or (0, 1.0, 0.0)
    better = max(1, min(every - 1, int(LOST_HOURS * 3600 / 2 / step)), math.ceil(save / CHEAP / step))
    if every * step > LOST_HOURS * 3600 and better < every:
        share = 100 * save / (better * step + save)
        lost = f"a failure loses up to {hours(every * step)} of {context.resolved.world_size} GPUs"
        fix = f"train.save_steps={better}: up to {hours(better * step)} then, and saving takes {share:.1f} % of the time"
        yield Seen(WARN, f"a checkpoint every {every} steps of {step:.0f} s: {lost}", fix)


@RULES("checkpoint-interval-too-short")
def checkpoint_interval_too_short(context: RecipeContext) -> Iterator[Seen]:
    """Time that training stands still for saves."""
    every, step, save = _cadence(context) or (1, 1.0, 0.0)
    share = save / (every * step + save)
    if share > SAVING:
        text = f"a checkpoint every {every} steps of {step:.0f} s, {save:.0f} s each: {100 * share:.0f} % of the time is saving"
        assert context.plan is not None
        around = context.plan.schedule
        better = max(every + 1, math.ceil(around.checkpoint.value / step), math.ceil(around.copy_seconds / CHEAP / step))
        key = "train.save_steps" if context.recipe.save is None else "save.every"
        yield Seen(WARN, text, f"{key}={better} or so, or save.every=auto")


@RULES("signal-margin")
def signal_margin(context: RecipeContext) -> Iterator[Seen]:
    """The signal margin before the time limit, against the time of a step and a save."""
    if not context.is_real or context.cluster.slurm is None:
        return
    wanted = context.resolved.recipe.slurm.signal_seconds
    for problem in margins.find_problems(wanted, context.minutes, file=context.where):
        yield Seen(FAIL, f"{problem.key}: {problem.message}", problem.fix or "a longer slurm.time")
    if context.plan is None:
        return
    step, save = context.plan.step.seconds, context.plan.schedule.checkpoint.value
    need = STEP_FACTOR * step + save + MARGIN_SECONDS
    if need > wanted:
        text = f"the job is signalled {wanted} s before its end; a predicted step of {step:.0f} s and"
        fix = f"slurm.signal_seconds={math.ceil(need)}"
        yield Seen(WARN, f"{text} a save of {save:.0f} s need {math.ceil(need)} s", fix)


@RULES("time-limit")
def time_limit(context: RecipeContext) -> Iterator[Seen]:
    """The time limit against the predicted hours."""
    plan = context.real_plan
    if plan is None or plan.hours is None or not context.minutes or context.cluster.slurm is None:
        return
    given = context.minutes / 60
    if plan.hours > given:
        text = f"predicted {plan.hours:.1f} h ({plan.hours * plan.low:.1f} to {plan.hours * plan.high:.1f})"
        longer, turns = math.ceil(plan.hours * plan.high), math.ceil(plan.hours / given)
        fix = f"slurm.time of {longer} h, or let it continue {turns} times from its checkpoints"
        yield Seen(WARN, f"{text}, slurm.time is {hours(60 * context.minutes)}", fix)


@RULES("eval-gpus")
def eval_gpus(context: RecipeContext) -> Iterator[Seen]:
    """GPUs, of one node or by vLLM of several, hold the merged model for its evaluation."""
    if note := serving.evaluation(context.resolved, context.cluster).note:
        yield Seen(WARN, note)


# --- settings -------------------------------------------------------------------------------------------------------------

LORA_RATES, FULL_RATES = (1e-5, 1e-3), (1e-7, 1e-4)
"""Learning rates outside of which a fine-tuning rarely learns: TRL's guide has 2e-5 for all parameters and ten times
that for LoRA (https://huggingface.co/docs/trl/peft_integration); a factor of 20 to 50 around it."""


@RULES("nothing-saved")
def nothing_saved(context: RecipeContext) -> Iterator[Seen]:
    """Checkpoints are written."""
    strategy = str(context.args["save_strategy"])
    if strategy in ("no", "best"):
        yield Seen(FAIL, f"train.save_strategy is {strategy}: no checkpoint of the last step is certain")


@RULES("learning-rate")
def learning_rate(context: RecipeContext) -> Iterator[Seen]:
    """The size of the learning rate."""
    rate, lora = context.args["learning_rate"], context.resolved.lora is not None
    low, high = LORA_RATES if lora else FULL_RATES
    if context.is_real and isinstance(rate, int | float) and not low <= rate <= high:
        fix = f"train.learning_rate between {low:g} and {high:g}, unless it was tried"
        yield Seen(WARN, f"train.learning_rate {rate:g} for {'a LoRA' if lora else 'training all parameters'}", fix)


@RULES("loss-on-all-tokens")
def loss_on_all_tokens(context: RecipeContext) -> Iterator[Seen]:
    """Which tokens of a conversation carry a loss."""
    stated = context.resolved.origins.get("train.assistant_only_loss", "default") != "default"
    chats = ("messages", "sharegpt", "oasst-tree", "lima", "alpaca")
    formats = dict.fromkeys(str(part.format) for part in context.recipe.data.parts if part.format in chats)
    if context.is_real and formats and not context.args["assistant_only_loss"] and not stated:
        given = f"{' and '.join(formats)} conversations"
        yield Seen(WARN, f"{given}, and train.assistant_only_loss is not given: all tokens count")


def _lacks_bf16(context: RecipeContext) -> bool:
    gpu = load_hardware().get(context.cluster.compute.gpu or "")
    return gpu is not None and gpu.bf16_tflops is None


@RULES("no-bfloat16")
def no_bfloat16(context: RecipeContext) -> Iterator[Seen]:
    """No bfloat16 on GPUs without it."""
    compute, mixed = context.cluster.compute, context.resolved.distribution.mixed_precision
    if compute.gpus and mixed == "bf16" and _lacks_bf16(context):
        yield Seen(FAIL, f"train.bf16 on {compute.gpu}, which has no bfloat16")


@RULES("no-mixed-precision")
def no_mixed_precision(context: RecipeContext) -> Iterator[Seen]:
    """Bfloat16 on GPUs that have it."""
    mixed = context.resolved.distribution.mixed_precision
    if context.is_real and context.cluster.compute.gpus and mixed == "no" and not _lacks_bf16(context):
        yield Seen(WARN, "train.bf16 is false")


@RULES("packed-state")
def packed_state(context: RecipeContext) -> Iterator[Seen]:
    """Packing with layers that carry a state."""
    kinds = context.resolved.architecture.get("layer_types")
    listed = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    states = sorted(kind for kind in listed if "attention" not in kind or "linear" in kind)
    model = str(context.resolved.architecture.get("model_type"))
    if context.args["packing"] and (states or model_facts(model)["carries_state"]):
        text = f"train.packing, and {model} has layers with a state" + (f" ({', '.join(states)})" if states else "")
        yield Seen(WARN, text)
