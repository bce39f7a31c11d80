"""What the planner foresees and would hurt, and settings of a recipe that run and are wrong, or slow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

from clustertune.check.rule import FAIL, UNKNOWN, WARN, Seen
from clustertune.cluster.hardware import load_hardware
from clustertune.doctor import stack_faults
from clustertune.doctor.recipe_context import RecipeContext
from clustertune.errors import UserError
from clustertune.host.system import GIB
from clustertune.launch import serving, shape
from clustertune.launch import signal_margin as margins
from clustertune.plan.predict import make_plan
from clustertune.plan.schedule import START_S, TOKENS_PER_CPU_S, tokens_to_prepare
from clustertune.recipe import quantization
from clustertune.recipe.values import model_facts
from clustertune.resolve.distribution import how_to_load

TIGHT = 0.95
"""Share of a GPU's memory above which a plan is called tight: its activations are predicted within a few per cent
(docs/results/planner.md)."""
STEP_FACTOR, MARGIN_SECONDS = 1.5, 30.0
"""The step that a signal meets may be slower than planned; seconds for the way of the signal to every rank, and for its end."""
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


def not_planned(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: whether the planner can say anything

    Why: memory, time and cadence cannot be judged
    See: https://huggingface.co/docs/transformers/model_memory_anatomy
    """
    if context.is_real and context.plan is None:
        yield Seen(UNKNOWN, context.no_plan)


def shape_refused(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: nodes, GPUs, time and memory that the job asks for

    Why: submit refuses it: the cluster does not have what is asked for
    See: https://slurm.schedmd.com/sbatch.html
    """
    # But for the memory of a GPU where the plan says more of it.
    for problem in shape.find_problems(context.resolved, context.cluster, memory=context.plan is None):
        yield Seen(FAIL, f"{problem.key}: {problem.message}", problem.fix or "another --cluster")


def gpu_memory(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: predicted memory of a GPU

    Why: the ranks run out of memory, often only at the first long batch or the first evaluation
    See: https://huggingface.co/docs/transformers/model_memory_anatomy
    """
    if plan := context.real_plan:
        room = plan.machine.usable_bytes
        memory = f"{plan.needed / GIB:.1f} GiB at the {plan.peak.name}, a {plan.machine.gpu} has {room / GIB:.1f} GiB"
        fix = f"clustertune plan {context.resolved.name} --advise names what fits"
        if plan.needed > TIGHT * room:
            over = plan.needed > room
            yield Seen(FAIL if over else WARN, f"{'' if over else 'tight: '}predicted {memory}", fix)


def host_memory(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: predicted RAM of the fullest node

    Why: the kernel kills a rank that loads, and the others wait for it until a time-out
    See: https://github.com/huggingface/transformers/issues/43749
    """
    plan = context.real_plan
    if plan is not None and plan.host_bytes > plan.machine.host_bytes:
        parts = ", ".join(f"{term.name} {term.value / GIB:,.0f} GiB" for term in plan.host)
        need, room = f"predicted {plan.host_bytes / GIB:,.0f} GiB of RAM ({parts})", f"{plan.machine.host_bytes / GIB:,.0f} GiB"
        yield Seen(FAIL, f"{need}, a node has {room}", how_to_load(context.resolved.distribution)[1])


def load_timeout(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: loading against the time-out of collectives

    Why: ranks that wait for the one that loads end with 'wait timeout after ...ms', and part of an hour is lost
    See: https://github.com/axolotl-ai-cloud/axolotl/issues/3443
    """
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


def prepare_time(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: tokenising against the time limit of its job

    Why: the job of prepare is ended, and the training that waits for it never starts
    Fix: clustertune prepare beforehand, or submit again: what is finished is kept
    See: https://github.com/huggingface/trl/issues/1519
    """
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


def saves_often(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: time that training stands still for saves

    Why: ranks stop where a copy takes longer than a step, does not fit, or comes before the last save is written
    See: https://huggingface.co/docs/accelerate/usage_guides/fsdp
    """
    every, step, save = _cadence(context) or (1, 1.0, 0.0)
    share = save / (every * step + save)
    if share > SAVING:
        text = f"a checkpoint every {every} steps of {step:.0f} s, {save:.0f} s each: {100 * share:.0f} % of the time is saving"
        assert context.plan is not None
        around = context.plan.schedule
        better = max(every + 1, math.ceil(around.checkpoint.value / step), math.ceil(around.copy_seconds / CHEAP / step))
        key = "train.save_steps" if context.recipe.save is None else "save.every"
        yield Seen(WARN, text, f"{key}={better} or so, or save.every=auto")


def signal_margin(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the signal margin before the time limit, against the time of a step and a save

    Why: a signal that comes later than a step and a save before the end saves nothing
    See: https://github.com/goodfire-ai/spd/issues/741
    """
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


def time_limit(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the time limit against the predicted hours

    Why: the job is stopped in the middle and waits in the queue again, once for each turn
    See: https://slurm.schedmd.com/sbatch.html
    """
    plan = context.real_plan
    if plan is None or plan.hours is None or not context.minutes or context.cluster.slurm is None:
        return
    given = context.minutes / 60
    if plan.hours > given:
        text = f"predicted {plan.hours:.1f} h ({plan.hours * plan.low:.1f} to {plan.hours * plan.high:.1f})"
        longer, turns = math.ceil(plan.hours * plan.high), math.ceil(plan.hours / given)
        fix = f"slurm.time of {longer} h, or let it continue {turns} times from its checkpoints"
        yield Seen(WARN, f"{text}, slurm.time is {hours(60 * context.minutes)}", fix)


def much_evaluation(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: time that evaluations take

    Why: GPU hours go into passes that train nothing
    Fix: a larger train.eval_steps, or a smaller eval split
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    plan = context.real_plan
    parts = plan.totals() if plan else None
    if plan and parts and plan.schedule.evaluations:
        share, each = parts["evaluation"] / math.fsum(parts.values()), hours(plan.schedule.evaluation.value)
        if share > EVALUATING:
            yield Seen(WARN, f"{plan.schedule.evaluations} evaluations of {each} are {100 * share:.0f} % of the time")


def eval_gpus(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: GPUs, of one node or by vLLM of several, hold the merged model for its evaluation

    Why: lm-eval's local models run on one node: what does not fit is computed from host memory, many times slower
    Fix: name vLLM in the cluster file (container.vllm), whose servers span nodes: docs/after-training.md
    See: https://github.com/EleutherAI/lm-evaluation-harness/issues/3362
    """
    if note := serving.evaluation(context.resolved, context.cluster).note:
        yield Seen(WARN, note)


def small_micro_batch(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: accumulation where a larger micro batch fits

    Why: FSDP gathers all weights again for each micro batch, so gradient accumulation multiplies the traffic
    See: https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    plan = context.real_plan
    if plan is None or plan.strategy.accumulation < 2 or plan.strategy.accumulation % 2 or not plan.fits:
        return
    used = plan.strategy
    doubled = replace(used, micro_batch=2 * used.micro_batch, accumulation=used.accumulation // 2)
    with contextlib.suppress(UserError):
        other = make_plan(context.resolved, plan.machine, plan.constants, chosen=doubled, sure=False)
        gain = plan.step.seconds / other.step.seconds
        if other.needed <= TIGHT * plan.machine.usable_bytes and gain >= GAIN:
            text = f"gradient accumulation {used.accumulation} x micro batch {used.micro_batch}"
            fix = f"train.per_device_train_batch_size={doubled.micro_batch}: predicted {other.needed / GIB:.0f} GiB"
            yield Seen(WARN, f"{text}: micro batch {doubled.micro_batch} is predicted {gain:.1f}x faster", fix)


# --- settings -------------------------------------------------------------------------------------------------------------

LORA_RATES, FULL_RATES = (1e-5, 1e-3), (1e-7, 1e-4)
"""Learning rates outside of which a fine-tuning rarely learns: TRL's guide has 2e-5 for all parameters and ten times
that for LoRA (https://huggingface.co/docs/trl/peft_integration); a factor of 20 to 50 around it."""
LONG_WARMUP = 0.5
"""Share of all steps."""


def nothing_saved(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: checkpoints are written

    Why: without a checkpoint nothing can be exported, and a stop loses the whole run
    Fix: train.save_strategy=steps
    See: https://github.com/huggingface/transformers/issues/30491
    """
    strategy = str(context.args["save_strategy"])
    if strategy in ("no", "best"):
        yield Seen(FAIL, f"train.save_strategy is {strategy}: no checkpoint of the last step is certain")


def save_only_model(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: save_only_model with sharded checkpoints

    Why: the first save looks for a file that sharded saving does not write; and a run without optimizer state cannot continue
    Fix: leave save_only_model out
    See: https://github.com/huggingface/transformers/issues/36626
    """
    if context.args.get("save_only_model"):
        sharded = context.resolved.distribution.state_dict == "SHARDED_STATE_DICT"
        yield Seen(FAIL, "train.save_only_model is true" + (" with SHARDED_STATE_DICT" if sharded else ""))


def single_checkpoint(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: more than one checkpoint is kept

    Why: with one kept, a save that goes wrong or a node that still reads the old one leaves none
    Fix: train.save_total_limit=2 or more
    See: https://github.com/huggingface/transformers/issues/20988
    """
    if context.args.get("save_total_limit") == 1 and context.several_nodes:
        yield Seen(WARN, f"train.save_total_limit is 1, on {context.recipe.slurm.nodes} nodes")


def learning_rate(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: the size of the learning rate

    Why: LoRA wants about ten times the rate of full training: too small and nothing is learnt, too large and it diverges
    See: https://huggingface.co/docs/trl/peft_integration
    """
    rate, lora = context.args.get("learning_rate"), stack_faults.lora(context)
    low, high = LORA_RATES if lora else FULL_RATES
    if context.is_real and isinstance(rate, int | float) and not low <= rate <= high:
        fix = f"train.learning_rate between {low:g} and {high:g}, unless it was tried"
        yield Seen(WARN, f"train.learning_rate {rate:g} for {'a LoRA' if lora else 'training all parameters'}", fix)


def long_warmup(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: warm-up against the number of steps

    Why: most of the run is spent below the learning rate that was asked for
    See: https://github.com/axolotl-ai-cloud/axolotl/pull/2897
    """
    steps = context.plan.schedule.steps if context.plan else None
    warm = float(context.args["warmup_steps"])
    if steps:
        count = math.ceil(warm * steps) if warm < 1 else warm
        if count > LONG_WARMUP * steps:
            few = count <= 1  # a share of so few steps that its one step is most of them
            fix = "more steps: a smaller train.global_batch_size or more epochs; or train.warmup_steps=0"
            fix = fix if few else "a share of all steps, such as train.warmup_steps=0.03"
            yield Seen(WARN, f"train.warmup_steps {warm:g} are {count:g} of {steps} steps", fix)


def loss_on_all_tokens(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: which tokens of a conversation carry a loss

    Why: the model learns to write the user's turns as well; losses of the two ways cannot be compared
    Fix: train.assistant_only_loss=true, or say false where it is meant
    See: https://github.com/huggingface/trl/pull/3586
    """
    stated = context.resolved.origins.get("train.assistant_only_loss", "default") != "default"
    chats = ("messages", "sharegpt", "oasst-tree", "lima", "alpaca")
    formats = dict.fromkeys(str(part.format) for part in context.recipe.data.parts if part.format in chats)
    if context.is_real and formats and not context.args.get("assistant_only_loss") and not stated:
        given = f"{' and '.join(formats)} conversations"
        yield Seen(WARN, f"{given}, and train.assistant_only_loss is not given: all tokens count")


def compile_shapes(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: torch.compile with batches of one shape

    Why: new lengths are compiled again, or their CUDA graphs recorded again: the gain of compiling is lost
    See: https://github.com/pytorch/pytorch/issues/188150
    """
    args = context.args
    compiled = context.resolved.distribution.compiled
    # Packed rows differ in length too, unless they are cut to one: bfd fills them, the last one aside.
    if compiled and not args.get("packing") and args.get("pad_to_multiple_of") in (None, "auto"):
        text = "the model is compiled, and batches as long as their longest conversation"
        fix = f"train.packing=true, or train.pad_to_multiple_of={args['max_length']}"
        yield Seen(WARN, text, fix)


def quantised_compute(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: what a quantised base computes in

    Why: BitsAndBytesConfig's own type is float32: products run at a fraction of the speed of bfloat16
    Fix: bnb_4bit_compute_dtype: bfloat16
    See: https://huggingface.co/docs/transformers/quantization/bitsandbytes
    """
    config = quantization.of(context.args) or {}
    given, mixed = config.get("bnb_4bit_compute_dtype"), context.resolved.distribution.mixed_precision
    if config.get("load_in_4bit") and str(given or "float32") == "float32" and mixed == "bf16":
        key = "train.model_init_kwargs.quantization_config.bnb_4bit_compute_dtype"
        yield Seen(WARN, f"{key} is {'float32' if given else 'not given'}")


def _lacks_bf16(context: RecipeContext) -> bool:
    gpu = load_hardware().get(context.cluster.compute.gpu or "")
    return gpu is not None and gpu.bf16_tflops is None


def no_bfloat16(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: no bfloat16 on GPUs without it

    Why: without tensor cores for it bfloat16 is emulated, slower than float32
    Fix: train.bf16=false train.model_init_kwargs.dtype=float32, or newer GPUs
    See: https://developer.nvidia.com/cuda-gpus
    """
    compute, mixed = context.cluster.compute, context.resolved.distribution.mixed_precision
    if compute.gpus and mixed == "bf16" and _lacks_bf16(context):
        yield Seen(FAIL, f"train.bf16 on {compute.gpu}, which has no bfloat16")


def no_mixed_precision(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: bfloat16 on GPUs that have it

    Why: float32 products use no tensor cores, or a quarter of them (TF32), and weights take twice the memory
    Fix: train.bf16=true
    See: https://huggingface.co/docs/transformers/en/mixed_precision_training
    """
    mixed = context.resolved.distribution.mixed_precision
    if context.is_real and context.cluster.compute.gpus and mixed == "no" and not _lacks_bf16(context):
        yield Seen(WARN, "train.bf16 is false")


def packed_state(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: packing with layers that carry a state

    Why: a mask keeps packed conversations apart in attention; recurrent layers (Mamba, linear attention, convolutions) hand
      their state from one to the next all the same
    Fix: train.packing=false
    See: https://github.com/huggingface/trl/issues/1230
    """
    kinds = context.resolved.architecture.get("layer_types")
    listed = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    states = sorted(kind for kind in listed if "attention" not in kind or "linear" in kind)
    model = str(context.resolved.architecture.get("model_type"))
    if context.args.get("packing") and (states or model_facts(model)["carries_state"]):
        text = f"train.packing, and {model} has layers with a state" + (f" ({', '.join(states)})" if states else "")
        yield Seen(WARN, text)


def no_evaluation(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: an eval split where evaluation is asked for

    Why: no evaluation happens, and overfitting stays unseen
    Fix: data.eval_fraction, or train.eval_strategy=no
    See: https://huggingface.co/docs/transformers/main_classes/trainer
    """
    expect = context.recipe.data.expect
    wanted = str(context.args["eval_strategy"]) != "no"
    if wanted and expect is not None and expect.eval == 0:
        yield Seen(WARN, "data.expect.eval is 0, and train.eval_strategy asks for evaluations")


def revision_not_pinned(context: RecipeContext) -> Iterator[Seen]:
    """Looks at: commits of model and dataset

    Why: a branch moves: the next attempt trains on another model, and the cache is looked up under another name
    See: https://huggingface.co/docs/huggingface_hub/guides/download
    """
    recipe = context.recipe
    if recipe.model.weights == "hub" and recipe.model.path is None and recipe.model.revision is None:
        fix = f"model.revision: the commit of {recipe.model.name}, 40 hex digits"
        yield Seen(FAIL, f"model {recipe.model.name} without a revision", fix)
    for key, part in recipe.data.keyed_parts():
        if part.input is None and part.revision is None:
            fix = f"{key}.revision: the commit of {part.name}, 40 hex digits"
            yield Seen(FAIL, f"dataset {part.name} without a revision", fix)
