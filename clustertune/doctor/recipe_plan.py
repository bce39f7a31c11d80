"""What the planner foresees and would hurt: memory, loading against the time-out, saving against the step, the time limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from clustertune.check.rule import FAIL, UNKNOWN, WARN, Finding, Rule, finding
from clustertune.config.distribution import how_to_load
from clustertune.doctor.recipe_context import Context
from clustertune.errors import UserError
from clustertune.launch import shape, signal_margin
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

UNPLANNED = Rule(
    "not-planned",
    "whether the planner can say anything",
    "memory, time and cadence cannot be judged",
    "https://huggingface.co/docs/transformers/model_memory_anatomy",
)
REFUSED = Rule(
    "shape-refused",
    "nodes, GPUs, time and memory that the job asks for",
    "submit refuses it: the cluster does not have what is asked for",
    "https://slurm.schedmd.com/sbatch.html",
)
GPU_MEMORY = Rule(
    "gpu-memory",
    "predicted memory of a GPU",
    "the ranks run out of memory, often only at the first long batch or the first evaluation",
    "https://huggingface.co/docs/transformers/model_memory_anatomy",
)
HOST_MEMORY = Rule(
    "host-memory",
    "predicted RAM of the fullest node",
    "the kernel kills a rank that loads, and the others wait for it until a time-out",
    "https://github.com/huggingface/transformers/issues/43749",
)
LOADING = Rule(
    "load-timeout",
    "loading against the time-out of collectives",
    "ranks that wait for the one that loads end with 'wait timeout after ...ms', after a part of an hour for nothing",
    "https://github.com/axolotl-ai-cloud/axolotl/issues/3443",
)
TOKENISING = Rule(
    "prepare-time",
    "tokenising against the time limit of its job",
    "the job of prepare is ended, and the training that waits for it never starts",
    "https://github.com/huggingface/trl/issues/1519",
)
SELDOM = Rule(
    "saves-seldom",
    "hours of work between two checkpoints",
    "a node that fails costs all work since the last save, on all nodes",
    "https://github.com/awslabs/awsome-distributed-ai/issues/190",
)
OFTEN = Rule(
    "saves-often",
    "time that saving takes",
    "all ranks stand still while a checkpoint is written",
    "https://huggingface.co/docs/accelerate/usage_guides/fsdp",
)
WARNING = Rule(
    "warning-lead",
    "the warning before the time limit against a step and a save",
    "a signal that comes later than a step and a save before the end saves nothing",
    "https://github.com/goodfire-ai/spd/issues/741",
)
LIMIT = Rule(
    "time-limit",
    "the time limit against the predicted hours",
    "the job is stopped in the middle and waits in the queue again, once for each turn",
    "https://slurm.schedmd.com/sbatch.html",
)
EVALUATION = Rule(
    "much-evaluation",
    "time that evaluations take",
    "GPU hours go into passes that train nothing",
    "https://huggingface.co/docs/transformers/main_classes/trainer",
)
SCORING = Rule(
    "eval-gpus",
    "GPUs of one node hold the merged model for IFEval",
    "lm-eval's local models run on one node: what does not fit is computed from host memory, many times slower",
    "https://github.com/EleutherAI/lm-evaluation-harness/issues/3362",
)
SMALL_BATCH = Rule(
    "small-micro-batch",
    "accumulation where a larger micro batch fits",
    "FSDP gathers all weights again for each micro batch: accumulating is paid in traffic",
    "https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
)

RULES = (
    UNPLANNED, REFUSED, GPU_MEMORY, HOST_MEMORY, LOADING, TOKENISING, SELDOM, OFTEN, WARNING, LIMIT, EVALUATION, SCORING,
    SMALL_BATCH,
)  # fmt: skip


def check(context: Context) -> Iterator[Finding]:
    """Everything that follows from the plan of the recipe on the cluster."""
    for look in LOOKS:
        yield from look(context)


def hours(seconds: float) -> str:
    """Seconds as people say them."""
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _plan_of(context: Context) -> Plan | None:
    return context.plan if context.is_real else None


def _unplanned(context: Context) -> Iterator[Finding]:
    if context.is_real and context.plan is None:
        yield finding(UNPLANNED, UNKNOWN, context.no_plan, where=context.name)


def _refused(context: Context) -> Iterator[Finding]:
    """What submit would refuse anyway, but for the memory of a GPU where the plan says more of it."""
    for problem in shape.find_problems(context.resolved, context.cluster, memory=context.plan is None):
        yield finding(
            REFUSED, FAIL, f"{problem.key}: {problem.message}", problem.fix or "another --cluster", where=context.name
        )


def _memory(context: Context) -> Iterator[Finding]:
    plan = _plan_of(context)
    if plan is None:
        return
    room = plan.machine.usable_bytes
    words = f"{plan.needed / GIB:.1f} GiB at the {plan.peak.name}, a {plan.machine.gpu} has {room / GIB:.1f} GiB"
    fix = f"clustertune plan {context.resolved.name} --advise names what fits"
    if plan.needed > room:
        yield finding(GPU_MEMORY, FAIL, f"predicted {words}", fix, where=context.name)
    elif plan.needed > TIGHT * room:
        yield finding(GPU_MEMORY, WARN, f"tight: predicted {words}", fix, where=context.name)
    if plan.host_bytes > plan.machine.host_bytes:
        parts = ", ".join(f"{term.name} {term.value / GIB:,.0f} GiB" for term in plan.host)
        text = (
            f"predicted {plan.host_bytes / GIB:,.0f} GiB of RAM ({parts}), a node has {plan.machine.host_bytes / GIB:,.0f} GiB"
        )
        yield finding(HOST_MEMORY, FAIL, text, how_to_load(context.resolved.distribution)[1], where=context.name)


def _timeout(context: Context) -> float:
    return float(context.resolved.train_args.get("ddp_timeout") or DDP_TIMEOUT_S)


def _loading(context: Context) -> Iterator[Finding]:
    plan, limit = _plan_of(context), _timeout(context)
    # Ranks that read their own rows end together: none of them waits for one that loads.
    if plan is None or context.resolved.world_size == 1 or context.resolved.distribution.reads_parts:
        return
    seconds = plan.schedule.start.value - START_S
    if seconds > limit / 2:
        size, speed = 2.0 * plan.shape.counted.total / 1e9, plan.machine.storage_read_bytes_per_s / 1e9
        text = f"{size:,.0f} GB at {speed:g} GB/s ({plan.machine.storage_note}) load in {hours(seconds)}"
        text += f", ranks wait {hours(limit)}"
        fix = f"train.ddp_timeout={math.ceil(3 * seconds / 600) * 600}, or copy the model to the nodes first (storage.staging)"
        yield finding(LOADING, FAIL if seconds > limit else WARN, text, fix, where=context.name)


def _tokenising(context: Context) -> Iterator[Finding]:
    tokens = tokens_to_prepare(context.resolved) if context.is_real else None
    if tokens is None or context.cluster.slurm is None:
        return
    asked = shape.stage_shapes(context.resolved, context.cluster)["prepare"]
    seconds = tokens / TOKENS_PER_CPU_S / asked.cpus_per_node
    if seconds > 60 * asked.minutes:
        text = f"about {tokens:,.0f} tokens take {hours(seconds)} on {asked.cpus_per_node} cores"
        text += f", the job of prepare may run {hours(60 * asked.minutes)}"
        fix = "clustertune prepare beforehand, or submit again: what is finished is kept"
        yield finding(TOKENISING, WARN, text, fix, where=context.name)


def _cadence(context: Context) -> Iterator[Finding]:
    plan = _plan_of(context)
    if plan is None or str(context.resolved.train_args.get("save_strategy", "steps")) != "steps":
        return
    schedule, step = plan.schedule, plan.step.seconds
    given = float(context.resolved.train_args.get("save_steps") or 500)
    every = math.ceil(given * schedule.steps) if given < 1 and schedule.steps else int(max(1.0, given))
    every = min(every, schedule.steps or every)
    between, save = every * step, schedule.checkpoint.value
    share = save / (between + save)
    words = f"a checkpoint every {every} steps of {step:.0f} s"
    if between > LOST_HOURS * 3600:
        better = max(1, min(every - 1, int(LOST_HOURS * 3600 / 2 / step)), math.ceil(save / CHEAP / step))
        if better < every:
            cost = save / (better * step + save)
            text = f"{words}: a failure loses up to {hours(between)} of {context.resolved.world_size} GPUs"
            fix = (
                f"train.save_steps={better}: up to {hours(better * step)} then, and saving takes {100 * cost:.1f} % of the time"
            )
            yield finding(SELDOM, WARN, text, fix, where=context.name)
    if share > SAVING:
        better = math.ceil(save / CHEAP / step)
        text = f"{words}, {save:.0f} s each: {100 * share:.0f} % of the time is saving"
        yield finding(OFTEN, WARN, text, f"train.save_steps={better} or so", where=context.name)


def _warned(context: Context) -> Iterator[Finding]:
    """The header that submit writes warns as early as the recipe's own figures say; the plan may know better."""
    if not context.is_real or context.cluster.slurm is None:
        return
    wanted = signal_margin.needed(context.run_dir, context.resolved)
    for problem in signal_margin.find_problems(wanted, context.minutes, file=context.name):
        yield finding(
            WARNING, FAIL, f"{problem.key}: {problem.message}", problem.fix or "a longer slurm.time", where=context.name
        )
    if context.plan is None or (context.run_dir is not None and signal_margin.measured(context.run_dir)[0]):
        return
    step, save = context.plan.step.seconds, context.plan.schedule.checkpoint.value
    need = signal_margin.STEP_FACTOR * step + save + signal_margin.MARGIN_SECONDS
    if need > wanted.seconds:
        text = f"the job is warned {wanted.seconds} s before its end ({wanted.reason}); a predicted step of {step:.0f} s and"
        fix = f"give expect: {{hours, steps}} in the recipe, or smaller steps; sbatch --signal=B:USR1@{math.ceil(need)} by hand"
        yield finding(WARNING, WARN, f"{text} a save of {save:.0f} s need {math.ceil(need)} s", fix, where=context.name)


def _limit(context: Context) -> Iterator[Finding]:
    plan = _plan_of(context)
    if plan is None or plan.hours is None or not context.minutes or context.cluster.slurm is None:
        return
    given = context.minutes / 60
    if plan.hours > given:
        text = f"predicted {plan.hours:.1f} h ({plan.hours * plan.low:.1f} to {plan.hours * plan.high:.1f}), "
        text += f"slurm.time is {hours(60 * context.minutes)}"
        turns = math.ceil(plan.hours / given)
        fix = f"slurm.time of {math.ceil(plan.hours * plan.high)} h, or let it go on {turns} times from its checkpoints"
        yield finding(LIMIT, WARN, text, fix, where=context.name)


def _evaluation(context: Context) -> Iterator[Finding]:
    plan = _plan_of(context)
    parts = plan.totals() if plan else None
    if plan is None or not parts or not plan.schedule.evaluations:
        return
    share = parts["evaluation"] / math.fsum(parts.values())
    if share > EVALUATING:
        each = hours(plan.schedule.evaluation.value)
        text = f"{plan.schedule.evaluations} evaluations of {each} are {100 * share:.0f} % of the time"
        yield finding(EVALUATION, WARN, text, "a larger train.eval_steps, or a smaller eval split", where=context.name)


def _scoring(context: Context) -> Iterator[Finding]:
    have = context.cluster.compute.gpus
    needed = shape.eval_gpus(context.resolved, context.cluster) if context.is_real else None
    if needed and needed > have > 0:
        text = f"the merged model needs {needed} GPUs in bfloat16, a node has {have}"
        fix = "serve it over several nodes (vLLM with Ray) and score through its API, or on nodes with larger GPUs"
        yield finding(SCORING, WARN, text, fix, where=context.name)


def _micro_batch(context: Context) -> Iterator[Finding]:
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
        text = f"{used.accumulation} micro batches of {used.micro_batch} a step: {doubled.micro_batch} are {gain:.1f} x faster"
        fix = f"train.per_device_train_batch_size={doubled.micro_batch}: predicted {other.needed / GIB:.0f} GiB"
        yield finding(SMALL_BATCH, WARN, text, fix, where=context.name)


LOOKS = (
    _unplanned, _refused, _memory, _loading, _tokenising, _cadence, _warned, _limit, _evaluation, _scoring, _micro_batch,
)  # fmt: skip
