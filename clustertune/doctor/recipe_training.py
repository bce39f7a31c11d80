"""Settings of a recipe that run and are wrong, or slow: nothing here needs a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

from clustertune.check.rule import FAIL, WARN, Finding, Rule, finding
from clustertune.config import accelerate_file as acc
from clustertune.config import quantization
from clustertune.config.distribution import mixed_precision
from clustertune.config.hardware import load_hardware
from clustertune.config.modeling import carries_state
from clustertune.doctor import stack_faults
from clustertune.doctor.recipe_context import Context

LORA_RATES, FULL_RATES = (1e-5, 1e-3), (1e-7, 1e-4)
"""Learning rates outside of which a fine-tuning rarely gets anywhere: TRL's guide has 2e-5 for all parameters and ten times
that for LoRA (https://huggingface.co/docs/trl/peft_integration); a factor of 20 to 50 around it."""
LONG_WARMUP = 0.5
"""Share of all steps."""

RECOMPUTED = Rule(
    "double-recomputation",
    "activation checkpointing in one place only",
    "FSDP and the model both recompute: each layer is gathered and computed once more, or the ranks end with a ValueError",
    "https://github.com/huggingface/transformers/issues/30404",
)
UNSAVED = Rule(
    "nothing-saved",
    "checkpoints are written",
    "without a checkpoint nothing can be exported, and a stop loses the whole run",
    "https://github.com/huggingface/transformers/issues/30491",
)
ONLY_MODEL = Rule(
    "save-only-model",
    "save_only_model with sharded checkpoints",
    "the first save looks for a file that sharded saving does not write; and a run without optimizer state cannot go on",
    "https://github.com/huggingface/transformers/issues/36626",
)
ROTATION = Rule(
    "single-checkpoint",
    "more than one checkpoint is kept",
    "with one kept, a save that goes wrong or a node that still reads the old one leaves none",
    "https://github.com/huggingface/transformers/issues/20988",
)
RATE = Rule(
    "learning-rate",
    "the size of the learning rate",
    "LoRA wants about ten times the rate of full training: too small and nothing is learnt, too large and it diverges",
    "https://huggingface.co/docs/trl/peft_integration",
)
WARMUP = Rule(
    "long-warmup",
    "warm-up against the number of steps",
    "most of the run is spent below the learning rate that was asked for",
    "https://github.com/axolotl-ai-cloud/axolotl/pull/2897",
)
ALL_TOKENS = Rule(
    "loss-on-all-tokens",
    "which tokens of a conversation carry a loss",
    "the model learns to write the user's turns as well; losses of the two ways cannot be compared",
    "https://github.com/huggingface/trl/pull/3586",
)
SHAPES = Rule(
    "compile-shapes",
    "torch.compile with batches of one shape",
    "new lengths are compiled anew, or their CUDA graphs recorded anew: what compiling gains is lost again",
    "https://github.com/pytorch/pytorch/issues/188150",
)
SLOW_PRODUCTS = Rule(
    "quantised-compute",
    "what a quantised base computes in",
    "BitsAndBytesConfig's own type is float32: products run at a fraction of the speed of bfloat16",
    "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
)
NO_BF16 = Rule(
    "no-bfloat16",
    "no bfloat16 on GPUs without it",
    "without tensor cores for it bfloat16 is emulated, slower than float32",
    "https://developer.nvidia.com/cuda-gpus",
)
FLOAT32 = Rule(
    "no-mixed-precision",
    "bfloat16 on GPUs that have it",
    "float32 products use no tensor cores, or a quarter of them (TF32), and weights take twice the memory",
    "https://huggingface.co/docs/transformers/en/mixed_precision_training",
)
PACKED_STATE = Rule(
    "packed-state",
    "packing with layers that carry a state",
    "a mask keeps packed conversations apart in attention; recurrent layers (Mamba, linear attention, convolutions) hand their "
    "state from one to the next all the same",
    "https://github.com/huggingface/trl/issues/1230",
)
NO_EVAL = Rule(
    "no-evaluation",
    "an eval split where evaluation is asked for",
    "no evaluation happens, and overfitting is seen by nobody",
    "https://huggingface.co/docs/transformers/main_classes/trainer",
)
UNPINNED = Rule(
    "revision-not-pinned",
    "commits of model and dataset",
    "a branch moves: the next attempt trains on another model, and the cache is looked up under another name",
    "https://huggingface.co/docs/huggingface_hub/guides/download",
)

RULES = (
    RECOMPUTED, UNSAVED, ONLY_MODEL, ROTATION, RATE, WARMUP, ALL_TOKENS, SHAPES, SLOW_PRODUCTS, NO_BF16,
    FLOAT32, PACKED_STATE, NO_EVAL, UNPINNED,
)  # fmt: skip


def check(context: Context) -> Iterator[Finding]:
    """Everything that the recipe itself shows."""
    for look in LOOKS:
        yield from look(context)


def _recomputation(context: Context) -> Iterator[Finding]:
    args = context.resolved.train_args
    of_model = bool(args.get("activation_checkpointing") or args.get("gradient_checkpointing"))
    if context.resolved.distribution.recompute.by == "fsdp" and of_model:
        text = f"train.activation_checkpointing and {acc.key_of('activation_checkpointing')} are both true"
        yield finding(RECOMPUTED, FAIL, text, "leave it to one of them, best FSDP's", where=context.name)


def _saving(context: Context) -> Iterator[Finding]:
    args = context.resolved.train_args
    if str(args.get("save_strategy", "steps")) in ("no", "best"):
        text = f"train.save_strategy is {args['save_strategy']}: no checkpoint of the last step is certain"
        yield finding(UNSAVED, FAIL, text, "train.save_strategy=steps", where=context.name)
    sharded = context.resolved.distribution.state_dict == "SHARDED_STATE_DICT"
    if args.get("save_only_model"):
        text = "train.save_only_model is true" + (" with SHARDED_STATE_DICT" if sharded else "")
        yield finding(ONLY_MODEL, FAIL, text, "leave save_only_model out", where=context.name)
    if args.get("save_total_limit") == 1 and context.several_nodes:
        text = f"train.save_total_limit is 1, on {context.resolved.recipe.slurm.nodes} nodes"
        yield finding(ROTATION, WARN, text, "train.save_total_limit=2 or more", where=context.name)


def _rates(context: Context) -> Iterator[Finding]:
    args = context.resolved.train_args
    rate = args.get("learning_rate")
    low, high = LORA_RATES if stack_faults.lora(context) else FULL_RATES
    if context.is_real and isinstance(rate, int | float) and not low <= rate <= high:
        what = "a LoRA" if stack_faults.lora(context) else "training all parameters"
        fix = f"train.learning_rate between {low:g} and {high:g}, unless it was tried"
        yield finding(RATE, WARN, f"train.learning_rate {rate:g} for {what}", fix, where=context.name)
    steps = context.plan.schedule.steps if context.plan else None
    warm = float(args.get("warmup_steps") or 0)
    if steps:
        count = math.ceil(warm * steps) if warm < 1 else warm
        if count > LONG_WARMUP * steps:
            text = f"train.warmup_steps {warm:g} are {count:g} of {steps} steps"
            yield finding(WARMUP, WARN, text, "a share of all steps, such as train.warmup_steps=0.03", where=context.name)


def _labels(context: Context) -> Iterator[Finding]:
    stated = context.resolved.origins.get("train.assistant_only_loss", "default") != "default"
    if context.is_real and not context.resolved.train_args.get("assistant_only_loss") and not stated:
        text = (
            f"{context.resolved.recipe.data.format} conversations, and train.assistant_only_loss is not given: all tokens count"
        )
        fix = "train.assistant_only_loss=true, or say false where it is meant"
        yield finding(ALL_TOKENS, WARN, text, fix, where=context.name)


def _shapes(context: Context) -> Iterator[Finding]:
    args = context.resolved.train_args
    compiled = context.resolved.distribution.compiled
    # Packed rows differ in length too, unless they are cut to one: bfd fills them, the last one aside.
    if compiled and not args.get("packing") and not args.get("pad_to_multiple_of"):
        text = "the model is compiled, and batches as long as their longest conversation"
        fix = f"train.packing=true, or train.pad_to_multiple_of={args.get('max_length') or 1024}"
        yield finding(SHAPES, WARN, text, fix, where=context.name)


def _quantised(context: Context) -> Iterator[Finding]:
    args = context.resolved.train_args
    config = quantization.of(args)
    if config is None or not config.get("load_in_4bit"):
        return
    key = "train.model_init_kwargs.quantization_config"
    if str(config.get("bnb_4bit_compute_dtype", "float32")) == "float32" and mixed_precision(args) == "bf16":
        text = f"{key}.bnb_4bit_compute_dtype is {'float32' if 'bnb_4bit_compute_dtype' in config else 'not given'}"
        yield finding(SLOW_PRODUCTS, WARN, text, "bnb_4bit_compute_dtype: bfloat16", where=context.name)


def _precision(context: Context) -> Iterator[Finding]:
    compute, mixed = context.cluster.compute, mixed_precision(context.resolved.train_args)
    gpu = load_hardware().get(compute.gpu or "")
    without = gpu is not None and gpu.bf16_tflops is None
    if without and mixed == "bf16" and compute.gpus:
        text = f"train.bf16 on {compute.gpu}, which has no bfloat16"
        fix = "train.bf16=false train.model_init_kwargs.dtype=float32, or newer GPUs"
        yield finding(NO_BF16, FAIL, text, fix, where=context.name)
    if context.is_real and compute.gpus and mixed == "no" and not without:
        yield finding(FLOAT32, WARN, "train.bf16 is false", "train.bf16=true", where=context.name)


def _packed(context: Context) -> Iterator[Finding]:
    kinds = context.resolved.architecture.get("layer_types")
    listed = {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    states = sorted(kind for kind in listed if "attention" not in kind or "linear" in kind)
    model = str(context.resolved.architecture.get("model_type"))
    if context.resolved.train_args.get("packing") and (states or carries_state(model)):
        text = f"train.packing, and {model} has layers with a state" + (f" ({', '.join(states)})" if states else "")
        yield finding(PACKED_STATE, WARN, text, "train.packing=false", where=context.name)


def _evaluation(context: Context) -> Iterator[Finding]:
    expect = context.resolved.recipe.data.expect
    wanted = str(context.resolved.train_args.get("eval_strategy", "no")) != "no"
    if wanted and expect is not None and expect.eval == 0:
        text = "data.expect.eval is 0, and train.eval_strategy asks for evaluations"
        yield finding(NO_EVAL, WARN, text, "data.eval_fraction, or train.eval_strategy=no", where=context.name)


def _pinned(context: Context) -> Iterator[Finding]:
    recipe = context.resolved.recipe
    if recipe.model.weights == "hub" and recipe.model.path is None and recipe.model.revision is None:
        fix = f"model.revision: the commit of {recipe.model.name}, 40 hex digits"
        yield finding(UNPINNED, FAIL, f"model {recipe.model.name} without a revision", fix, where=context.name)
    if recipe.data.input is None and recipe.data.revision is None:
        fix = f"data.revision: the commit of {recipe.data.name}, 40 hex digits"
        yield finding(UNPINNED, FAIL, f"dataset {recipe.data.name} without a revision", fix, where=context.name)


LOOKS = (_recomputation, _saving, _rates, _labels, _shapes, _quantised, _precision, _packed, _evaluation, _pinned)
