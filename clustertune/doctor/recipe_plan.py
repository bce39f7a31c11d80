"""What the planner foresees and would hurt: memory, loading against the time-out, saving against the step, the time limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from clustertune.check.rule import FAIL, RECIPE, UNKNOWN, WARN, Seen, rule
from clustertune.config.distribution import how_to_load
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.errors import UserError
from clustertune.launch import serving, shape, signal_margin
from clustertune.plan.predict import GIB, Plan, make_plan
from clustertune.plan.schedule import START_S, TOKENS_PER_CPU_S, tokens_to_prepare

TIGHT = 0.95
"""Share of a GPU's memory above which a plan is called tight: its activations are predicted within a few per cent
(docs/results/planner.md)."""
DDP_TIMEOUT_S = 1800.0
"""``TrainingArguments.ddp_timeout``'s own, seconds."""
LOST_HOURS = 1.0
"""Work between two saves, hours, that is called much to lose."""
SAVING, CHEAP = 0.05, 0.01
"""Shares of the time that saving may take: above the first it is called often, at the second the next cadence is proposed."""
EVALUATING = 0.30
"""Share of the time above which evaluating is called much."""
GAIN = 1.5
"""How many times faster a larger micro batch must be foreseen to be worth a word."""


def hours(seconds: float) -> str:
    """Seconds as people say them."""
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _plan_of(context: RecipeContext) -> Plan | None:
    return context.plan if context.is_real else None


@rule("not-planned", RECIPE)
def unplanned(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: whether the planner can say anything

    Why: memory, time and cadence cannot be judged
    See: https://huggingface.co/docs/transformers/model_memory_anatomy
    """
    if context.is_real and context.plan is None:
        yield Seen(UNKNOWN, context.no_plan)


@rule("shape-refused", RECIPE)
def refused(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: nodes, GPUs, time and memory that the job asks for

    Why: submit refuses it: the cluster does not have what is asked for
    See: https://slurm.schedmd.com/sbatch.html
    """
    # But for the memory of a GPU where the plan says more of it.
    for problem in shape.find_problems(context.resolved, context.cluster, memory=context.plan is None):
        yield Seen(FAIL, f"{problem.key}: {problem.message}", problem.fix or "another --cluster")


@rule("gpu-memory", RECIPE)
def gpu_memory(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: predicted memory of a GPU

    Why: the ranks run out of memory, often only at the first long batch or the first evaluation
    See: https://huggingface.co/docs/transformers/model_memory_anatomy
    """
    plan = _plan_of(context)
    if plan is None:
        return
    room = plan.machine.usable_bytes
    memory = f"{plan.needed / GIB:.1f} GiB at the {plan.peak.name}, a {plan.machine.gpu} has {room / GIB:.1f} GiB"
    fix = f"clustertune plan {context.resolved.name} --advise names what fits"
    if plan.needed > room:
        yield Seen(FAIL, f"predicted {memory}", fix)
    elif plan.needed > TIGHT * room:
        yield Seen(WARN, f"tight: predicted {memory}", fix)


@rule("host-memory", RECIPE)
def host_memory(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: predicted RAM of the fullest node

    Why: the kernel kills a rank that loads, and the others wait for it until a time-out
    See: https://github.com/huggingface/transformers/issues/43749
    """
    plan = _plan_of(context)
    if plan is not None and plan.host_bytes > plan.machine.host_bytes:
        parts = ", ".join(f"{term.name} {term.value / GIB:,.0f} GiB" for term in plan.host)
        text = f"predicted {plan.host_bytes / GIB:,.0f} GiB of RAM ({parts})"
        text += f", a node has {plan.machine.host_bytes / GIB:,.0f} GiB"
        yield Seen(FAIL, text, how_to_load(context.resolved.distribution)[1])


@rule("load-timeout", RECIPE)
def loading(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: loading against the time-out of collectives

    Why: ranks that wait for the one that loads end with 'wait timeout after ...ms', after a part of an hour for nothing
    See: https://github.com/axolotl-ai-cloud/axolotl/issues/3443
    """
    plan, limit = _plan_of(context), float(context.resolved.train_args.get("ddp_timeout") or DDP_TIMEOUT_S)
    # Ranks that read their own rows end together: none of them waits for one that loads.
    if plan is None or context.resolved.world_size == 1 or context.resolved.distribution.reads_parts:
        return
    seconds = plan.schedule.start.value - START_S
    if seconds > limit / 2:
        size, speed = 2.0 * plan.shape.counted.total / 1e9, plan.machine.storage_read_bytes_per_s / 1e9
        text = f"{size:,.0f} GB at {speed:g} GB/s ({plan.machine.storage_note}) load in {hours(seconds)}"
        text += f", ranks wait {hours(limit)}"
        fix = f"train.ddp_timeout={math.ceil(3 * seconds / 600) * 600}, or copy the model to the nodes first (storage.staging)"
        yield Seen(FAIL if seconds > limit else WARN, text, fix)


@rule("prepare-time", RECIPE)
def tokenising(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: tokenising against the time limit of its job

    Why: the job of prepare is ended, and the training that waits for it never starts
    Fix: clustertune prepare beforehand, or submit again: what is finished is kept
    See: https://github.com/huggingface/trl/issues/1519
    """
    tokens = tokens_to_prepare(context.resolved) if context.is_real else None
    if tokens is None or context.cluster.slurm is None:
        return
    shapes = shape.stage_shapes(context.resolved, context.cluster)["prepare"]
    seconds = tokens / TOKENS_PER_CPU_S / shapes.cpus_per_node
    if seconds > 60 * shapes.minutes:
        text = f"about {tokens:,.0f} tokens take {hours(seconds)} on {shapes.cpus_per_node} cores"
        text += f", the job of prepare may run {hours(60 * shapes.minutes)}"
        yield Seen(WARN, text)


def _cadence(context: RecipeContext) -> tuple[int, float, float] | None:
    """Steps between two checkpoints, seconds of a step, and those of a stop to save; None where nothing is saved by steps."""
    plan = _plan_of(context)
    if plan is None or plan.schedule.save is None or plan.schedule.save_steps is None:
        return None
    every, steps = plan.schedule.save_steps, plan.schedule.steps
    return min(every, steps or every), plan.step.seconds, plan.schedule.save.value


@rule("saves-seldom", RECIPE)
def saves_seldom(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: hours of work between two checkpoints

    Why: a node that fails costs all work since the last save, on all nodes
    See: https://github.com/awslabs/awsome-distributed-ai/issues/190
    """
    every, step, save = _cadence(context) or (0, 1.0, 0.0)
    better = max(1, min(every - 1, int(LOST_HOURS * 3600 / 2 / step)), math.ceil(save / CHEAP / step))
    if every * step > LOST_HOURS * 3600 and better < every:
        share = 100 * save / (better * step + save)
        lost = f"a failure loses up to {hours(every * step)} of {context.resolved.world_size} GPUs"
        fix = f"train.save_steps={better}: up to {hours(better * step)} then, and saving takes {share:.1f} % of the time"
        yield Seen(WARN, f"a checkpoint every {every} steps of {step:.0f} s: {lost}", fix)


@rule("saves-often", RECIPE)
def saves_often(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: time that training stands still for saves

    Why: a copy may take longer than a step, and ranks stop until it is written where it does not fit or the save before still runs
    See: https://huggingface.co/docs/accelerate/usage_guides/fsdp
    """
    every, step, save = _cadence(context) or (1, 1.0, 0.0)
    share = save / (every * step + save)
    if share > SAVING:
        text = f"a checkpoint every {every} steps of {step:.0f} s, {save:.0f} s each: {100 * share:.0f} % of the time is saving"
        assert context.plan is not None
        around = context.plan.schedule
        better = max(every + 1, math.ceil(around.checkpoint.value / step), math.ceil(around.copy_seconds / CHEAP / step))
        key = "train.save_steps" if context.resolved.recipe.save is None else "save.every"
        yield Seen(WARN, text, f"{key}={better} or so, or save.every=auto")


@rule("warning-lead", RECIPE)
def warned(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the warning before the time limit against a step and a save

    Why: a signal that comes later than a step and a save before the end saves nothing
    See: https://github.com/goodfire-ai/spd/issues/741
    """
    # The header that submit writes warns as early as the recipe's own figures say; the plan may know better.
    if not context.is_real or context.cluster.slurm is None:
        return
    wanted = signal_margin.needed(context.run_dir, context.resolved)
    for problem in signal_margin.find_problems(wanted, context.minutes, file=context.where):
        yield Seen(FAIL, f"{problem.key}: {problem.message}", problem.fix or "a longer slurm.time")
    if context.plan is None or (context.run_dir is not None and signal_margin.measured(context.run_dir)[0]):
        return
    step, save = context.plan.step.seconds, context.plan.schedule.checkpoint.value
    need = signal_margin.STEP_FACTOR * step + save + signal_margin.MARGIN_SECONDS
    if need > wanted.seconds:
        text = f"the job is warned {wanted.seconds} s before its end ({wanted.reason}); a predicted step of {step:.0f} s and"
        fix = f"give expect: {{hours, steps}} in the recipe, or smaller steps; sbatch --signal=B:USR1@{math.ceil(need)} by hand"
        yield Seen(WARN, f"{text} a save of {save:.0f} s need {math.ceil(need)} s", fix)


@rule("time-limit", RECIPE)
def limit(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the time limit against the predicted hours

    Why: the job is stopped in the middle and waits in the queue again, once for each turn
    See: https://slurm.schedmd.com/sbatch.html
    """
    plan = _plan_of(context)
    if plan is None or plan.hours is None or not context.minutes or context.cluster.slurm is None:
        return
    given = context.minutes / 60
    if plan.hours > given:
        text = f"predicted {plan.hours:.1f} h ({plan.hours * plan.low:.1f} to {plan.hours * plan.high:.1f}), "
        text += f"slurm.time is {hours(60 * context.minutes)}"
        turns = math.ceil(plan.hours / given)
        fix = f"slurm.time of {math.ceil(plan.hours * plan.high)} h, or let it continue {turns} times from its checkpoints"
        yield Seen(WARN, text, fix)


@rule("much-evaluation", RECIPE)
def evaluation(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: time that evaluations take

    Why: GPU hours go into passes that train nothing
    Fix: a larger train.eval_steps, or a smaller eval split
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    plan = _plan_of(context)
    parts = plan.totals() if plan else None
    if plan is None or not parts or not plan.schedule.evaluations:
        return
    share = parts["evaluation"] / math.fsum(parts.values())
    if share > EVALUATING:
        each = hours(plan.schedule.evaluation.value)
        text = f"{plan.schedule.evaluations} evaluations of {each} are {100 * share:.0f} % of the time"
        yield Seen(WARN, text)


@rule("eval-gpus", RECIPE)
def scoring(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: GPUs, of one node or by vLLM of several, hold the merged model for its evaluation

    Why: lm-eval's local models run on one node: what does not fit is computed from host memory, many times slower
    Fix: name vLLM in the cluster file (container.vllm), whose servers span nodes: docs/after-training.md
    See: https://github.com/EleutherAI/lm-evaluation-harness/issues/3362
    """
    if note := serving.evaluation(context.resolved, context.cluster).note:
        yield Seen(WARN, note)


@rule("small-micro-batch", RECIPE)
def micro_batch(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: accumulation where a larger micro batch fits

    Why: FSDP gathers all weights again for each micro batch, so gradient accumulation multiplies the traffic
    See: https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    plan = _plan_of(context)
    if plan is None or plan.strategy.accumulation < 2 or plan.strategy.accumulation % 2 or not plan.fits:
        return
    used = plan.strategy
    doubled = replace(used, micro_batch=2 * used.micro_batch, accumulation=used.accumulation // 2)
    try:
        other = make_plan(context.resolved, plan.machine, plan.constants, chosen=doubled, sure=False)
    except UserError:
        return
    gain = plan.step.seconds / other.step.seconds
    if other.needed <= TIGHT * plan.machine.usable_bytes and gain >= GAIN:
        text = f"gradient accumulation {used.accumulation} x micro batch {used.micro_batch}: "
        text += f"micro batch {doubled.micro_batch} is predicted {gain:.1f}x faster"
        fix = f"train.per_device_train_batch_size={doubled.micro_batch}: predicted {other.needed / GIB:.0f} GiB"
        yield Seen(WARN, text, fix)
